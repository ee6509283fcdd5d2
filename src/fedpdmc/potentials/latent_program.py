"""Private latents of any model: ``U(θ, z) = f(θ, z, data)`` for a JAX function f.

**Marginal.** As a function of θ it is Laplace's: ``U(θ, ẑ(θ)) + ½ log det ∇²_z U`` at the mode ẑ. One Newton step from the
mode, which is held, makes ``dẑ/dθ`` right; since ``∇_z U = 0`` there, so is the Hessian of the profile ``U(θ, ẑ(θ))``.

**Private map.** ``z = ẑ + B(θ − c) + e^{D(θ − c)} ∘ Lζ`` with ``B = dẑ/dθ`` and ``L Lᵀ = (∇²_z U)⁻¹`` at the reference's
centre c, and the rows of D the slopes of the latents' log standard deviations there: standard normal in ζ to first order.
``log|∂z/∂ζ| = Σ_j D_j(θ − c)`` up to a constant. The sampler is exact for any such map.

**Bounds.** With ζ at rest, ``R(a(s), ζ)`` is a program of time as any other (`fedpdmc.potentials.latent_program_rates`).

**Kernel.** Hamiltonian steps in ζ with a Metropolis decision: reversible, so that ``π(ζ | θ)`` is invariant.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fedpdmc._jax.mapped import mapped
from fedpdmc._jax.random_streams import logarithm, normals
from fedpdmc.potentials.jax_function import Program
from fedpdmc.potentials.latent import LatentPotential, PrivateRemainder
from fedpdmc.potentials.latent_program_rates import rate_cell
from fedpdmc.potentials.quadratic import Quadratic

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
        quadratic = None
        if control is not None:
            precision = rows.T @ control.precision @ rows
            quadratic = Quadratic(precision, rows.T @ (control.precision @ center + control.linear))
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
