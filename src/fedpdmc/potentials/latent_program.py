"""Private latents of any model: ``U(θ, z) = f(θ, z, data)`` for a JAX function f.

**Marginal.** As a function of θ it is Laplace's: ``U(θ, ẑ(θ)) + ½ log det ∇²_z U`` at the mode ẑ. One Newton step from the
mode, which is held, makes ``dẑ/dθ`` right; since ``∇_z U = 0`` there, so is the Hessian of the profile ``U(θ, ẑ(θ))``.

**Private map.** ``z = ẑ + B(θ − c) + e^{D(θ − c)} ∘ Lζ`` with ``B = dẑ/dθ`` and ``L Lᵀ = (∇²_z U)⁻¹`` at the reference's
centre c, and the rows of D the slopes of the latents' log standard deviations there: standard normal in ζ to first order.
``log|∂z/∂ζ| = Σ_j D_j(θ − c)`` up to a constant. The sampler is exact for any such map.

**Bounds.** With ζ at rest, ``R(a(s), ζ)`` is a program of time as any other (`fedpdmc.potentials.latent_program`).

**Kernel.** Hamiltonian steps in ζ with a Metropolis decision: reversible, so that ``π(ζ | θ)`` is invariant.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fedpdmc._jax.compilation import calls_library, mapped
from fedpdmc._jax.random_streams import logarithm, normals
from fedpdmc.enclosures import smoothed
from fedpdmc.potentials.base import LatentPotential, PrivateRemainder
from fedpdmc.potentials.chebyshev import RateCurve, chebyshev_nodes
from fedpdmc.potentials.jax_function import Program, enclosed_rates
from fedpdmc.potentials.quadratic import Quadratic
from fedpdmc.potentials.random_effects_rates import FROM_PRIOR, POINTS, Conditional, gaussian_energy, informed

if TYPE_CHECKING:
    from fedpdmc.potentials.random_effects import RandomEffects


# Newton steps to the mode, the longest move of a latent, and the parts of a step that are tried.
STEPS, LONGEST_MOVE, PARTS = 40, 2.0, (1.0, 0.5, 0.2, 0.05, 0.0)
# The least curvature in any direction, relative to the largest.
LEAST_CURVATURE = 1e-8
# Hamiltonian steps, and their length at one latent: the way of a quarter period, about.
LEAPS, LEAP = 6, 0.3


@dataclasses.dataclass(frozen=True)
class Mapped:
    """``f(θ, z(θ, ζ), data) − log|∂z/∂ζ|`` as a function of θ and of all that the map needs."""

    function: Callable[..., Any]

    def __call__(self, x, held):
        """The value."""
        away = x - held["center"]
        z = held["mode"] + held["slope"] @ away + jnp.exp(held["spread"] @ away) * (held["root"] @ held["zeta"])
        return self.function(jnp.concatenate([x, z]), held["data"]) - jnp.sum(held["spread"] @ away)


class LatentProgram(LatentPotential):
    """Any function with private latents.

    Parameters
    ----------
    joint : Program
        Of parameters and latents, one vector.
    latents : int
    records : int
    """

    joint: Program
    count: int = eqx.field(static=True)
    records: int = eqx.field(default=0, static=True)

    @property
    def dim(self) -> int:
        """Number of shared parameters."""
        return self.joint.size - self.count

    @property
    def latents(self) -> int:
        """Number of private latents."""
        return self.count

    def energy(self, x: Float[Array, " d"], z: Float[Array, " k"]) -> Float[Array, ""]:
        """``U(θ, z)``."""
        return self.joint.value(jnp.concatenate([x, z]))

    def _curvature(self, x, z):
        """``∇_z U`` and ``∇²_z U``."""
        return jax.grad(self.energy, 1)(x, z), jax.hessian(self.energy, 1)(x, z)

    def _mode(self, x):
        """The mode, by Newton steps with a search along each."""

        def step(_, z):
            gradient, hessian = self._curvature(x, z)
            move = -jnp.linalg.solve(_positive(hessian), gradient)
            move = move / jnp.maximum(jnp.max(jnp.abs(move)) / LONGEST_MOVE, 1.0)
            tried = z + jnp.asarray(PARTS)[:, None] * move
            values = jax.lax.map(lambda one: self.energy(x, one), tried)
            return tried[jnp.argmin(jnp.where(jnp.isfinite(values), values, jnp.inf))]

        return jax.lax.fori_loop(0, STEPS, step, jnp.zeros(self.count))

    def _profile(self, x, held):
        """``ẑ(θ)``, right in its first derivative, from the mode at this θ."""
        gradient, hessian = self._curvature(x, held)
        return held - jnp.linalg.solve(_positive(hessian), gradient)

    def value(self, x):
        """Laplace's marginal."""
        held = jax.lax.stop_gradient(self._mode(jax.lax.stop_gradient(x)))
        z = self._profile(x, held)
        return self.energy(x, z) + 0.5 * jnp.linalg.slogdet(_positive(self._curvature(x, z)[1]))[1]

    def opened(self, center, rows, control):
        """The potential in a run's coordinates, with the private map made at the reference's centre."""
        return _opened(self, center, rows, control)

    def remainder(self, center, rows, control) -> ProgramRemainder:
        """The remainder, its map worked out."""
        mode = self._mode(center)

        def deviations(x):
            z = self._profile(x, mode)
            covariance = jnp.linalg.inv(_positive(self._curvature(x, z)[1]))
            return 0.5 * jnp.log(jnp.diagonal(covariance)), (z, covariance)

        spread, (_, covariance) = jax.jacfwd(deviations, has_aux=True)(center)
        held = {
            "center": center,
            "mode": mode,
            "slope": jax.jacfwd(lambda x: self._profile(x, mode))(center),
            "spread": spread,
            "root": jnp.linalg.cholesky(covariance),
            "zeta": jnp.zeros(self.count),
            "data": self.joint.data,
        }
        quadratic = None if control is None else control.along(rows, center)
        program = Program(Mapped(self.joint.function), held, rows.shape[1], center, rows, quadratic)
        return ProgramRemainder(program, self.count)


@eqx.filter_jit
def _opened(potential: LatentProgram, center, rows, control) -> ProgramRemainder:
    return potential.remainder(center, rows, control)


def _positive(matrix):
    """The matrix with eigenvalues that are positive: of a convex function it is the matrix itself."""
    values, vectors = jax.lax.stop_gradient(jnp.linalg.eigh(0.5 * (matrix + matrix.T)))
    least = LEAST_CURVATURE * jnp.max(jnp.abs(values))
    raised = jnp.maximum(jnp.abs(values), least) - values
    return matrix + (vectors * jnp.where(values < least, raised, 0.0)) @ vectors.T


class ProgramRemainder(PrivateRemainder):
    """``R(a, ζ)`` of any function under the private map above.

    Parameters
    ----------
    program : Program
        With the map and ζ among its data.
    count : int
        Latents.
    """

    program: Program
    count: int = eqx.field(static=True)

    @property
    def dim(self) -> int:
        """Number of whitened coordinates."""
        return self.program.size

    @property
    def latents(self) -> int:
        """Number of private latents."""
        return self.count

    def _at(self, zeta: Float[Array, " k"]) -> Program:
        return dataclasses.replace(self.program, data=self.program.data | {"zeta": zeta})

    def gradients(self, a, zeta):  # type: ignore[override]
        """``∇_a R``."""
        return mapped(lambda one, held: self._at(held).gradient(one), self.program.calls_library)(a, zeta)

    def cell(self, a, v, zeta, room):
        """The rate on a cell, from enclosures of the program."""
        return rate_cell(lambda a, zeta: self._at(zeta).value(a), a, v, zeta, room)

    @property
    def chances(self) -> int:
        """Momenta, the length of the steps, and the decision."""
        return self.count + 2

    def kernel(self, a, zeta, u):
        """Hamiltonian Monte Carlo in ζ, with steps of random length."""

        def one(a, zeta, u):
            def energy(at):
                return self._at(at).value(a) + 0.0

            slope = jax.grad(energy)
            leap = LEAP * self.count**-0.25 * (0.5 + u[0])
            momentum = normals(u[2:])

            def step(_, state):
                at, p = state
                p = p - 0.5 * leap * slope(at)
                at = at + leap * p
                return at, p - 0.5 * leap * slope(at)

            at, p = jax.lax.fori_loop(0, LEAPS, step, (zeta, momentum))
            change = energy(zeta) - energy(at) + 0.5 * (momentum @ momentum - p @ p)
            accepted = jnp.isfinite(change) & (logarithm(1 - u[1]) < change)
            return jnp.where(accepted, at, zeta)

        return mapped(one, self.program.calls_library)(a, zeta, u.T)

    def to_z(self, a, zeta):
        """The latents."""
        held = self.program.data

        def one(a, zeta):
            away = self.program._argument(a) - held["center"]
            return held["mode"] + held["slope"] @ away + jnp.exp(held["spread"] @ away) * (held["root"] @ zeta)

        return jax.vmap(one)(a, zeta)


# On a rotation a cell is at most this long (radians).
LONGEST = 1.0
# The order of the polynomials; the number of candidates that the error of a cell should add, and the largest number.
ORDER, AIM, MOST = 3, 0.05, 0.15
# How often a cell is shortened, the largest factor, and the factor where no finite bound of the rate is known.
ATTEMPTS, SHORTER, NOT_FINITE = 24, 8.0, 3.0
# Relative rounding error of a polynomial's value.
ROUNDING = 1e-13

Energy = Callable[[Float[Array, " d"], Float[Array, " k"]], Float[Array, ""]]


def rate_cell(
    energy: Energy, a: Float[Array, "C d"], v: Float[Array, "C d"], zeta: Float[Array, "C k"], room: Float[Array, " C"]
) -> RateCurve:
    """``v·∇_a R`` along the rotation from ``(a, v)`` for ``R(a, ζ) = energy``, with ζ at rest, on cells within ``room``.

    The rate is enclosed as a polynomial of time (`fedpdmc.enclosures.taylor_models`), ζ being a curve that does not move. A
    cell is as long as the room, and is shortened until its error e adds few candidates: with ``e ∝ h^{n+1}`` for order n,
    ``e h`` is `AIM` at ``h (AIM/(e h))^{1/(n+2)}``.
    """

    def rate(a, v, zeta):
        return jax.jvp(lambda x: energy(x, zeta), (a,), (v,))[1]

    def attempt(h):
        found = enclosed_rates(rate, True, a.T, v.T, h, ORDER, zeta.T)
        value = jnp.zeros((POINTS, a.shape[0]))
        for part in reversed(found.parts):
            value = value * jnp.asarray(chebyshev_nodes(POINTS))[:, None] + (0.0 if part is None else part)
        return value, jnp.broadcast_to(found.error, h.shape) + ROUNDING * found.size

    def again(state):
        count, h, good, old = state
        value, error = attempt(h)
        added = error * h + 0.0 * jnp.sum(value, 0)
        finite = jnp.isfinite(added)
        ratio = jnp.where(finite, (AIM / jnp.maximum(added, 1e-300)) ** (1 / (ORDER + 2)), 1 / NOT_FINITE)
        well = finite & (added <= MOST)
        new = RateCurve(*(jnp.where(finite, x, 0.0) for x in (value, error, h)))
        kept = jax.tree.map(lambda x, y: jnp.where(good, x, y), old, new)
        return count + 1, jnp.where(good | well, h, h * jnp.clip(ratio, 1 / SHORTER, 1.0)), good | well, kept

    # One loop, so that the program is enclosed in one place.
    blank = RateCurve(jnp.zeros((POINTS, *room.shape)), jnp.zeros_like(room), jnp.zeros_like(room))
    start = (jnp.asarray(0), jnp.clip(room, 0.0, LONGEST), jnp.zeros(room.shape, bool), blank)
    return jax.lax.while_loop(lambda s: (s[0] < ATTEMPTS) & ~jnp.all(s[2]), again, start)[-1]


class GroupedRemainder(PrivateRemainder):
    """``R(a, ζ)`` of grouped records of any loss under the informed map.

    Attributes
    ----------
    model : RandomEffects
    at, rows : (d,), (d, e)
        ``θ = at + rows a``.
    slope, center, information : (G, r, e), (G, r), (G, r)
        ``m = center + slope a`` and h.
    control : Quadratic
        Of a.
    """

    model: RandomEffects
    at: Float[Array, " d"]
    rows: Float[Array, "d e"]
    slope: Float[Array, "G r e"]
    center: Float[Array, "G r"]
    information: Float[Array, "G r"]
    control: Quadratic

    @classmethod
    def of(
        cls, model: RandomEffects, at: Float[Array, " d"], rows: Float[Array, "d e"], control, known: Conditional
    ) -> GroupedRemainder:
        """The remainder in coordinates ``θ = at + rows a``."""
        information, center, slope = informed(
            known, model.split(at)[2], model.steep(at), model.design.shape[1] + model.family.scaled
        )  # fmt: skip
        dim = at.shape[0]
        control = Quadratic(jnp.zeros((dim, dim)), jnp.zeros(dim)) if control is None else control
        slope = jnp.einsum("grd,de->gre", slope, rows)
        return cls(model, at, rows, slope, center, information, control.along(rows, at))

    @property
    def dim(self) -> int:
        """Number of whitened coordinates."""
        return self.rows.shape[1]

    @property
    def latents(self) -> int:
        """Private numbers, padding included."""
        return self.center.size

    def _mapped(self, a, zeta):
        """Parameters, effects, ``e = z/τ`` and u, of one chain: ``e = √σ(−u) (√(hσ(u)) m + ζ)``."""
        own = self.model.split(self.at + self.rows @ a)
        h, m = self.information, self.center + self.slope @ a
        u = 2 * own[2] + jnp.log(h)
        # √σ(±u), with a derivative where σ is rounded to zero too: far down a bent log spread.
        up, down = (jnp.exp(-0.5 * jax.nn.softplus(-side * u)) for side in (1.0, -1.0))
        zeta = zeta.reshape(h.shape)
        return own, up * (up * m + zeta / jnp.sqrt(h)), down * (jnp.sqrt(h) * up * m + zeta), u

    def _losses(self, own, z) -> Float[Array, " N"]:
        model, (beta, s, _, _) = self.model, own
        eta = model.offset + model.design @ beta + jnp.sum(model.effects * z[model.index], -1)
        return model.weight * model.family.value(eta, model.response, s)

    def _own(self, a, zeta):
        """The energy without the quadratic."""
        own, z, e, u = self._mapped(a, zeta)
        law = gaussian_energy(e[..., None], own[2][:, None], own[3])[:, 0]
        # −log|∂z/∂ζ| = −½ log σ(u) up to a constant.
        law = law + 0.5 * jnp.sum(jax.nn.softplus(-u), -1)
        return jnp.sum(self._losses(own, z)) + jnp.sum(self.model.present * law)

    def energy(self, a: Float[Array, " e"], zeta: Float[Array, " k"]) -> Float[Array, ""]:
        """``R(a, ζ)`` of one chain."""
        return smoothed(self._own)(a, zeta) - self.control.value(a)

    def _calls_library(self, a, zeta) -> bool:
        return calls_library(self._own, a[0], zeta[0])

    def gradients(self, a, zeta):  # type: ignore[override]
        """``∇_a R``, backward."""
        return mapped(jax.grad(self.energy), self._calls_library(a, zeta))(a, zeta)

    def cell(self, a, v, zeta, room):
        """The rate on a cell, from enclosures of the losses."""
        return rate_cell(self.energy, a, v, zeta, room)

    @property
    def chances(self) -> int:
        """For each group a choice, a decision and its effects."""
        return self.center.shape[0] * (2 + self.center.shape[1])

    def kernel(self, a, zeta, u):
        """Independence Metropolis, group by group: as `InformedRemainder.kernel`, of one chain at a time."""
        groups, r = self.center.shape

        def one(a, zeta, u):
            chosen, decided, standard = u[:groups], u[groups : 2 * groups], normals(u[2 * groups :]).reshape(groups, r)
            own, _, at_zero, _ = self._mapped(a, jnp.zeros_like(zeta))
            # ``z = τ ε`` in ζ: ``ζ = ε/√σ(−u) − √(hσ(u)) m``.
            wide = jnp.sqrt(1 + self.information * jnp.exp(2 * own[2]))
            shift, old = at_zero * wide, zeta.reshape(groups, r)
            new = jnp.where((chosen < FROM_PRIOR)[:, None], wide * standard - shift, standard)
            change = self._weights(a, new, shift, wide) - self._weights(a, old, shift, wide)
            return jnp.where((logarithm(1 - decided) < change)[:, None], new, old).reshape(-1)

        return mapped(one, self._calls_library(a, zeta))(a, zeta, u.T)

    def _weights(self, a, zeta, shift, wide) -> Float[Array, " G"]:
        """Log of target over proposal, by group."""
        own, z, e, _ = self._mapped(a, zeta)
        energy = gaussian_energy(e[..., None], 0.0 * own[2][:, None], own[3])[:, 0] + self.model.summed(
            self._losses(own, z)
        )
        near = math.log(1 - FROM_PRIOR) - 0.5 * jnp.sum(zeta**2, 1)
        far = math.log(FROM_PRIOR) - jnp.sum(0.5 * ((zeta + shift) / wide) ** 2 + jnp.log(wide), 1)
        return -energy - jnp.logaddexp(near, far)

    def to_z(self, a, zeta):
        """The effects."""
        return jax.vmap(lambda a, zeta: self._mapped(a, zeta)[1].reshape(-1))(a, zeta)
