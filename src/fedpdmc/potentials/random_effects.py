"""Records in groups, each group with private effects of a learned spread: a generalised linear mixed model."""

from __future__ import annotations

import dataclasses
import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from fedpdmc.potentials.grouped_families import Family
from fedpdmc.potentials.latent import LatentPotential
from fedpdmc.potentials.random_effects_rates import Conditional, InformedRemainder

# Gauss–Hermite points along each effect, for one effect and for two; Newton steps to a group's mode.
NODES, NODES_OF_TWO, STEPS = 21, 9, 40


class RandomEffects(LatentPotential):
    """``U(θ, z) = Σ_i ℓ(η_i; y_i) + Σ_g −log N(z_g; 0, Σ)`` with ``η_i = ξ_i·β + o_i + w_i·z_g(i)``.

    θ = (β, log σ where the family has a scale, log spreads, φ where two effects are correlated); ``Σ = D C D`` with D the
    spreads and C of correlation ``tanh φ``: then ``C⁻¹`` is ``cosh²φ`` on the diagonal and ``−sinh φ cosh φ`` off it, and
    ``½ log det C = −log cosh φ``.

    As a function of θ it is the marginal by adaptive Gauss–Hermite quadrature about each group's mode. The points are held
    while it is differentiated: the integral does not depend on them.

    Parameters
    ----------
    design : array of shape (N, p)
    effects : array of shape (N, r)
        The covariates ``w_i`` of the effects; ones for an intercept.
    response, offset, weight : arrays of shape (N,)
        ``weight`` is zero for padding, else one.
    index : array of shape (N,)
        The record's group; records of a group are together.
    present : array of shape (G,)
        Zero for padding, else one.
    family : Family
    correlated : bool
    records, groups : int
        Without padding.
    names : tuple of str
    labels : tuple of str
        The groups' names.
    """

    design: Float[Array, "N p"]
    effects: Float[Array, "N r"]
    response: Float[Array, " N"]
    offset: Float[Array, " N"]
    weight: Float[Array, " N"]
    index: Int[Array, " N"]
    present: Float[Array, " G"]
    family: Family
    correlated: bool = eqx.field(static=True, default=False)
    records: int = eqx.field(static=True, default=0)
    groups: int = eqx.field(static=True, default=0)
    names: tuple[str, ...] | None = eqx.field(static=True, default=None)
    labels: tuple[str, ...] = eqx.field(static=True, default=())

    @property
    def dim(self) -> int:
        """Number of shared parameters."""
        return self.design.shape[1] + self.family.scaled + self.effects.shape[1] + self.correlated

    @property
    def latents(self) -> int:
        """Private numbers, padding included."""
        return self.present.shape[0] * self.effects.shape[1]

    @property
    def constrain(self) -> NaturalScale:
        """Spreads, scale and correlation in place of their coordinates."""
        assert self.names is not None
        return NaturalScale(self.names)

    def split(self, x):
        """``β, s, ρ, φ``; zero for what the model has not."""
        p, r = self.design.shape[1], self.effects.shape[1]
        s = x[p] if self.family.scaled else jnp.zeros(())
        at = p + self.family.scaled
        phi = x[at + r] if self.correlated else jnp.zeros(())
        return x[:p], s, x[at : at + r], phi

    def summed(self, values):
        """Sums over the records of each group, which are along the first axis."""
        return jax.ops.segment_sum(values, self.index, self.present.shape[0], indices_are_sorted=True)

    def energies(self, x: Float[Array, " d"], z: Float[Array, "G r J"]) -> Float[Array, "G J"]:
        """Each group's ``U`` at several values of its effects."""
        beta, s, rho, phi = self.split(x)
        eta = (self.offset + self.design @ beta)[:, None] + jnp.einsum("nr,nrj->nj", self.effects, z[self.index])
        loss = self.family.value(eta, self.response[:, None], s)
        own = self.summed(self.weight[:, None] * loss)
        return own + self.present[:, None] * gaussian_energy(z * jnp.exp(-rho)[:, None], rho[:, None], phi)

    def _mode(self, x):
        """Each group's mode and a root of its inverse curvature, by Newton steps of bounded length."""
        beta, s, rho, phi = self.split(x)
        fixed, (groups, r) = self.offset + self.design @ beta, (self.present.shape[0], self.effects.shape[1])
        zero = jnp.zeros((r, 1))
        prior = jax.hessian(lambda z: gaussian_energy(z[:, None] * jnp.exp(-rho)[:, None], zero, phi)[0])(jnp.zeros(r))

        def curvature(z):
            eta = fixed + jnp.sum(self.effects * z[self.index], -1)

            def slope(e):
                return self.weight * self.family.slope(e, self.response, s)

            first, second = jax.jvp(slope, (eta,), (jnp.ones_like(eta),))
            gradient = self.summed(first[:, None] * self.effects) + z @ prior
            outer = self.effects[:, :, None] * self.effects[:, None, :]
            return gradient, self.summed(jnp.maximum(second, 0.0)[:, None, None] * outer) + prior

        def step(_, z):
            gradient, hessian = curvature(z)
            move = -jnp.linalg.solve(hessian, gradient[..., None])[..., 0]
            longest = jnp.max(jnp.abs(move), -1, keepdims=True) / self.family.stride
            return z + move / jnp.maximum(longest, 1.0)

        z = jax.lax.fori_loop(0, STEPS, step, jnp.zeros((groups, r)))
        return z, jnp.linalg.cholesky(jnp.linalg.inv(curvature(z)[1]))

    def _quadrature(self, x):
        """Points of each group, and their weights' logarithms at θ."""
        z, root = jax.tree.map(jax.lax.stop_gradient, self._mode(jax.lax.stop_gradient(x)))
        points, log_weights = _grid(z.shape[1])
        nodes = z[:, :, None] + jnp.einsum("grs,sj->grj", root, points)
        volume = jnp.sum(jnp.log(jnp.diagonal(root, axis1=1, axis2=2)), -1)
        return nodes, log_weights[None] + volume[:, None] - self.energies(x, nodes)

    def value(self, x):
        """``−Σ_g log ∫ e^{−U_g(θ, z)} dz``."""
        _, logs = self._quadrature(x)
        return -jnp.sum(self.present * jax.scipy.special.logsumexp(logs, axis=1))

    def contributions(self, x: Float[Array, " d"]) -> Float[Array, " N"]:
        """What each record adds to the value: ``−log Z_g`` less that of its group without it.

        ``Z_{g∖i} = ∫ e^{−U_g + ℓ_i} dz``, by the group's own points.
        """
        beta, s, _, _ = self.split(x)
        nodes, logs = self._quadrature(x)
        eta = (self.offset + self.design @ beta)[:, None] + jnp.einsum("nr,nrj->nj", self.effects, nodes[self.index])
        loss = self.weight[:, None] * self.family.value(eta, self.response[:, None], s)
        whole = jax.scipy.special.logsumexp(logs, axis=1)[self.index]
        return self.weight * (jax.scipy.special.logsumexp(logs[self.index] + loss, axis=1) - whole)

    def conditional(self, x: Float[Array, " d"]) -> Conditional:
        """Means, their derivatives and variances of the effects given θ."""

        def mean(x):
            nodes, logs = self._quadrature(x)
            share = jax.nn.softmax(logs, axis=1)[:, None]
            center = jnp.sum(share * nodes, -1)
            return center, (center, jnp.sum(share * (nodes - center[..., None]) ** 2, -1))

        slope, (center, variance) = jax.jacfwd(mean, has_aux=True)(x)
        return Conditional(center, slope, variance)

    def padded(self, records: int, groups: int) -> RandomEffects:
        """The same with more padding: up to so many records and groups."""
        more, room = records - self.weight.shape[0], groups - self.present.shape[0]

        def filled(x, value=0):
            return jnp.asarray(np.concatenate([np.asarray(x), np.full((more, *x.shape[1:]), value, x.dtype)]))

        rows = (self.design, self.effects, self.response, self.offset, self.weight)
        design, effects, response, offset, weight = (filled(x) for x in rows)
        present = jnp.asarray(np.concatenate([np.asarray(self.present), np.zeros(room)]))
        return dataclasses.replace(
            self, design=design, effects=effects, response=response, offset=offset, weight=weight, present=present,
            index=filled(self.index, groups - 1),
        )  # fmt: skip

    def stripped(self):
        """Without names and counts."""
        return dataclasses.replace(self, records=0, groups=0, names=None, labels=())

    def opened(self, center, rows, control):
        """In a run's coordinates, with the private map made at the reference's centre."""
        return _opened(self.stripped(), center, rows, control)


@eqx.filter_jit
def _opened(model: RandomEffects, center, rows, control) -> InformedRemainder:
    return InformedRemainder.of(model, center, rows, control, model.conditional(center))


def gaussian_energy(e: Float[Array, "*G r J"], rho: Float[Array, "r 1"], phi) -> Float[Array, "*G J"]:
    """``−log N(z; 0, Σ)`` up to a constant, of ``e = z/τ``."""
    energy = 0.5 * jnp.sum(e * e, -2) + jnp.sum(rho, 0)
    if e.shape[-2] != 2:
        return energy
    c, s = jnp.cosh(phi), jnp.sinh(phi)
    return energy + 0.5 * s * s * jnp.sum(e * e, -2) - s * c * e[..., 0, :] * e[..., 1, :] - jnp.log(c)


def _grid(effects: int) -> tuple[np.ndarray, np.ndarray]:
    """Points of a product rule for ``∫ f``, and the logarithms of their weights."""
    x, w = np.polynomial.hermite_e.hermegauss(NODES if effects == 1 else NODES_OF_TWO)
    points = np.array(list(itertools.product(x, repeat=effects))).T
    logs = np.array([sum(pair) for pair in itertools.product(np.log(w) + x**2 / 2, repeat=effects)])
    return points, logs


class NaturalScale(eqx.Module):
    """From coordinates to variables: ``log_sd`` to ``sd``, ``atanh_correlation`` to ``correlation``."""

    names: tuple[str, ...] = eqx.field(static=True)

    def __call__(self, x):
        """Variables by name."""
        return dict(_natural(name, x[i]) for i, name in enumerate(self.names))


def _natural(name: str, x):
    if name.startswith("log_"):
        return name.removeprefix("log_"), jnp.exp(x)
    return (name.removeprefix("atanh_"), jnp.tanh(x)) if name.startswith("atanh_") else (name, x)
