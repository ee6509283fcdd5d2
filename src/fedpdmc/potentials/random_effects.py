"""Records in groups, each group with private effects of a learned spread: a generalised linear mixed model."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from fedpdmc._jax.by_numpy import once
from fedpdmc._jax.compilation import on_device
from fedpdmc.enclosures import check_continuity, smoothed
from fedpdmc.potentials.base import LatentPotential
from fedpdmc.potentials.latent_program import GroupedRemainder
from fedpdmc.potentials.random_effects_rates import (
    AnalyticFamily,
    Conditional,
    EffectsFamily,
    InformedRemainder,
    gaussian_energy,
)
from fedpdmc.whitening import bent, steepness, straight

# Gauss–Hermite points along each effect, for one effect and for two; the most Newton steps to a group's mode, and the length
# of a step that ends them.
NODES, NODES_OF_TWO, STEPS, SHORT = 21, 9, 40, 1e-9


class RandomEffects(LatentPotential):
    """``U(θ, z) = Σ_i w_i ℓ(η_i; y_i) + Σ_g −log N(z_g; 0, Σ)`` with ``η_i = ξ_i·β + o_i + e_i·z_g(i)``.

    θ = (β, log σ where the family has a scale, log spreads, φ where two effects are correlated); ``Σ = D C D`` with D the
    spreads and C of correlation ``tanh φ``: then ``C⁻¹`` is ``cosh²φ`` on the diagonal and ``−sinh φ cosh φ`` off it, and
    ``½ log det C = −log cosh φ``.

    As a function of θ it is the marginal by adaptive Gauss–Hermite quadrature about each group's mode. The points are held
    while it is differentiated: the integral does not depend on them.

    Parameters
    ----------
    design : array of shape (N, p)
    effects : array of shape (N, r)
        The covariates ``e_i`` of the effects; ones for an intercept.
    response : array of shape (N,), or columns by name
        What the family takes of each record.
    offset, weight : arrays of shape (N,)
        ``weight`` is zero for padding, else the record's own: by it every loss is multiplied.
    index : array of shape (N,)
        The record's group; records of a group are together.
    present : array of shape (G,)
        Zero for padding, else one.
    family : EffectsFamily
    correlated : bool
    records, groups : int
        Without padding.
    names : tuple of str
    labels : tuple of str
        The groups' names.
    variables : callable, optional
        From the parameters without those of the effects to what results show.
    bend : array of shape (6, r), optional
        In a run whose log spreads are bent, their numbers (`fedpdmc.whitening`): ρ is ``T`` of θ's entries.
    """

    design: Float[Array, "N p"]
    effects: Float[Array, "N r"]
    response: Any
    offset: Float[Array, " N"]
    weight: Float[Array, " N"]
    index: Int[Array, " N"]
    present: Float[Array, " G"]
    family: EffectsFamily
    correlated: bool = eqx.field(static=True, default=False)
    records: int = eqx.field(static=True, default=0)
    groups: int = eqx.field(static=True, default=0)
    names: tuple[str, ...] | None = eqx.field(static=True, default=None)
    labels: tuple[str, ...] = eqx.field(static=True, default=())
    variables: Callable[[Any], dict[str, Any]] | None = eqx.field(static=True, default=None)
    bend: Float[Array, "6 r"] | None = None

    @property
    def dim(self) -> int:
        return self.design.shape[1] + self.family.scaled + self.effects.shape[1] + self.correlated

    @property
    def latents(self) -> int:
        return self.present.shape[0] * self.effects.shape[1]

    @property
    def constrain(self) -> NaturalScale:
        """Spreads, scale and correlation in place of their coordinates."""
        assert self.names is not None
        if self.variables is None:
            return NaturalScale(self.names)
        own = self.design.shape[1] + self.family.scaled
        return NaturalScale(self.names[own:], self.variables, own)

    def split(self, x):
        """``β, s, ρ, φ``; zero for what the model has not."""
        p, r = self.design.shape[1], self.effects.shape[1]
        at = p + self.family.scaled
        s = self.family.scales(x[p:at])
        phi = x[at + r] if self.correlated else jnp.zeros(())
        rho = x[at : at + r] if self.bend is None else bent(x[at : at + r], self.bend)
        return x[:p], s, rho, phi

    @property
    def spreads(self) -> tuple[int, ...]:
        """Which parameters are the log spreads."""
        first = self.design.shape[1] + self.family.scaled
        return tuple(range(first, first + self.effects.shape[1]))

    def steep(self, x: Float[Array, " d"]) -> Float[Array, " r"]:
        """The slope of ρ in its coordinates."""
        u = x[np.asarray(self.spreads)]
        return jnp.ones_like(u) if self.bend is None else steepness(u, self.bend)

    def summed(self, values):
        """Sums over the records of each group, which are along the first axis."""
        return jax.ops.segment_sum(values, self.index, self.present.shape[0], indices_are_sorted=True)

    def _losses(self, eta: Float[Array, "N J"], s) -> Float[Array, "N J"]:
        return jax.vmap(lambda one: self.family.value(one, self.response, s), 1, 1)(eta)

    def energies(self, x: Float[Array, " d"], z: Float[Array, "G r J"]) -> Float[Array, "G J"]:
        """Each group's ``U`` at several values of its effects."""
        beta, s, rho, phi = self.split(x)
        eta = (self.offset + self.design @ beta)[:, None] + jnp.einsum("nr,nrj->nj", self.effects, z[self.index])
        own = self.summed(self.weight[:, None] * self._losses(eta, s))
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

        def step(state):
            count, z, _, _ = state
            gradient, hessian = curvature(z)
            move = -_solved(hessian, gradient)
            longest = jnp.max(jnp.abs(move), -1, keepdims=True)
            return count + 1, z + move / jnp.maximum(longest / self.family.stride, 1.0), jnp.max(longest), hessian

        start = (0, jnp.zeros((groups, r)), jnp.asarray(jnp.inf), jnp.ones((groups, r, r)))
        _, z, _, hessian = jax.lax.while_loop(lambda s: (s[0] < STEPS) & (s[2] > SHORT), step, start)
        return z, _root(hessian)

    def _points(self, x):
        z, root = jax.tree.map(jax.lax.stop_gradient, self._mode(jax.lax.stop_gradient(x)))
        points, log_weights = _grid(z.shape[1])
        nodes = z[:, :, None] + jnp.einsum("grs,sj->grj", root, points)
        volume = jnp.sum(jnp.log(jnp.diagonal(root, axis1=1, axis2=2)), -1)
        return nodes, log_weights[None] + volume[:, None]

    def _quadrature(self, x):
        """Points of each group, and the logarithms of what each adds to the integral at θ."""
        nodes, log_weights = self._points(x)
        return nodes, log_weights - self.energies(x, nodes)

    def _marginal(self, logs):
        return -jnp.sum(self.present * jax.scipy.special.logsumexp(logs, axis=1))

    def value(self, x):
        """``−Σ_g log ∫ e^{−U_g(θ, z)} dz``."""
        return self._marginal(self._quadrature(x)[1])

    def derivatives(self, x: Float[Array, " d"]) -> tuple[Float[Array, ""], Float[Array, " d"], Float[Array, "d d"]]:
        """Value, gradient and Hessian, the points found once."""
        nodes, log_weights = self._points(x)

        def along(way):
            held = jax.value_and_grad(lambda x: self._marginal(log_weights - self.energies(x, nodes)))
            return jax.jvp(held, (x,), (way,))

        (value, gradient), (_, hessian) = jax.vmap(along, out_axes=(None, 0))(jnp.eye(self.dim))
        return value, gradient, hessian

    def contributions(self, x: Float[Array, " d"]) -> Float[Array, " N"]:
        """What each record adds to the value: ``−log Z_g`` less that of its group without it.

        ``Z_{g∖i} = ∫ e^{−U_g + ℓ_i} dz``, by the group's own points.
        """
        beta, s, _, _ = self.split(x)
        nodes, logs = self._quadrature(x)
        eta = (self.offset + self.design @ beta)[:, None] + jnp.einsum("nr,nrj->nj", self.effects, nodes[self.index])
        loss = self.weight[:, None] * self._losses(eta, s)
        whole = jax.scipy.special.logsumexp(logs, axis=1)[self.index]
        return (self.weight > 0) * (jax.scipy.special.logsumexp(logs[self.index] + loss, axis=1) - whole)

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
        """The same padded to so many records, by copies of the first of weight zero, and to so many groups."""
        n, known = self.records, self.groups

        def copied(x):
            x = np.asarray(x)
            return on_device(np.concatenate([x[:n], np.repeat(x[:1], records - n, 0)]))

        def filled(x, value, own, size):
            return on_device(np.concatenate([np.asarray(x)[:own], np.full(size - own, value, x.dtype)]))

        design, effects, response, offset = jax.tree.map(
            copied, (self.design, self.effects, self.response, self.offset)
        )  # fmt: skip
        return dataclasses.replace(
            self, design=design, effects=effects, response=response, offset=offset,
            weight=filled(self.weight, 0, n, records), present=filled(self.present, 0, known, groups),
            index=filled(self.index, groups - 1, n, records),
        )  # fmt: skip

    def bendable(self) -> RandomEffects:
        """The same with the numbers of a bend, those of straight coordinates where it has none."""
        numbers = straight(self.effects.shape[1])
        return self if self.bend is not None else dataclasses.replace(self, bend=on_device(numbers))

    def stripped(self):
        return dataclasses.replace(self, records=0, groups=0, names=None, labels=(), variables=None)

    def check_continuity(self) -> None:
        """Show that the losses have no jumps, as functions of predictors and parameters: the rest is smooth.

        Raises
        ------
        Discontinuous
            Where that is not shown.
        """
        if isinstance(self.family, AnalyticFamily):
            return
        n = self.weight.shape[0]

        def losses(y):
            return jnp.sum(self.weight * smoothed(self.family.value)(y[:n], self.response, self.family.scales(y[n:])))

        check_continuity(losses, n + self.family.scaled)

    def opened(self, center, rows, control):
        return _opened(self.stripped(), center, rows, control)


@once
def _opened(model: RandomEffects, center, rows, control) -> Any:
    kind = InformedRemainder if isinstance(model.family, AnalyticFamily) else GroupedRemainder
    return kind.of(model, center, rows, control, model.conditional(center))


def _solved(matrices: Float[Array, "G r r"], vectors: Float[Array, "G r"]) -> Float[Array, "G r"]:
    if vectors.shape[1] == 1:
        return vectors / matrices[..., 0]
    return jnp.linalg.solve(matrices, vectors[..., None])[..., 0]


def _root(matrices: Float[Array, "G r r"]) -> Float[Array, "G r r"]:
    return matrices**-0.5 if matrices.shape[1] == 1 else jnp.linalg.cholesky(jnp.linalg.inv(matrices))


def _grid(effects: int) -> tuple[np.ndarray, np.ndarray]:
    """Points of a product rule for ``∫ f``, and the logarithms of their weights."""
    x, w = np.polynomial.hermite_e.hermegauss(NODES if effects == 1 else NODES_OF_TWO)
    points = np.array(list(itertools.product(x, repeat=effects))).T
    logs = np.array([sum(pair) for pair in itertools.product(np.log(w) + x**2 / 2, repeat=effects)])
    return points, logs


class NaturalScale(eqx.Module):
    """From coordinates to variables: ``log_sd`` to ``sd``, ``atanh_correlation`` to ``correlation``.

    The first ``own`` coordinates have no names here: they are those of a model with ``variables``.
    """

    names: tuple[str, ...] = eqx.field(static=True)
    variables: Callable[[Any], dict[str, Any]] | None = eqx.field(static=True, default=None)
    own: int = eqx.field(static=True, default=0)

    def __call__(self, x):
        """Variables by name."""
        first = {} if self.variables is None else self.variables(x[: self.own])
        return first | dict(_natural(name, x[self.own + i]) for i, name in enumerate(self.names))


def _natural(name: str, x):
    if name.startswith("log_"):
        return name.removeprefix("log_"), jnp.exp(x)
    return (name.removeprefix("atanh_"), jnp.tanh(x)) if name.startswith("atanh_") else (name, x)
