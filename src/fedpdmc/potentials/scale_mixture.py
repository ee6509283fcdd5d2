"""Priors that are normal given scales of their own: Student-t and horseshoe, as the coordinator walks with them."""

from __future__ import annotations

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from fedpdmc._jax.random_streams import exponentials, normals
from fedpdmc.potentials.base import Potential
from fedpdmc.potentials.quadratic import Quadratic, quadratic_field

# Sweeps over the scales of a horseshoe at each renewal: they cost no round and help the global scale to move.
SWEEPS = 3
# Exponentials are not smaller than this: ``−log(1 − u)`` is zero with probability 2⁻⁵².
LEAST = 2.0**-54
# The half-Cauchy laws of a horseshoe end at this share of their scale. A coefficient held by a scale of nothing would have
# events without end; 0.6 % of the law is below.
FLOOR = 0.01


def halved_gamma(u: Float[Array, "n C"], twice: int) -> Float[Array, " C"]:
    """A gamma variable of rate one and shape ``twice/2``: a sum of exponentials, and half the square of a normal."""
    whole, odd = divmod(twice, 2)
    total = jnp.sum(exponentials(u[:whole]), 0)
    return jnp.maximum(total + 0.5 * normals(u[whole]) ** 2 if odd else total, LEAST)


def halved_draws(twice: int) -> int:
    """How many uniforms `halved_gamma` takes."""
    return -(-twice // 2)


class ScaleLaw(eqx.Module):
    """Scales of a prior, and their law given the coefficients.

    The first coefficients are Student-t: ``z ~ N(0, 1/w)`` with ``w s² ~ Gamma(ν/2, ν/2)``, so that given z
    ``w ~ Gamma((ν + 1)/2, (ν s² + z²)/2)``. The last are a horseshoe: ``z_j ~ N(0, τ²λ_j²)`` with λ_j and τ/τ₀ half-Cauchy
    above `FLOOR`. With ``λ² | n ~ IG(½, 1/n)`` and ``n ~ IG(½, 1)`` a half-Cauchy is a mixture of inverse gamma laws, so all
    conditional laws are of this kind:

    - ``λ_j² ~ IG(1, 1/n_j + z_j²/(2τ²))``, ``n_j ~ IG(1, 1 + 1/λ_j²)``
    - ``τ² ~ IG((p + 1)/2, 1/m + Σ z_j²/(2λ_j²))``, ``m ~ IG(1, 1/τ₀² + 1/τ²)``

    A draw below the floor is not taken: the scale stays, which is Metropolis' rule for the law above the floor.

    Parameters
    ----------
    df : tuple of int
        Degrees of freedom of the Student-t coefficients.
    scale : array of shape (len(df),)
    members : int
        Number of the horseshoe's coefficients.
    global_scale : array of shape ()
        ``τ₀``.
    """

    df: tuple[int, ...] = eqx.field(static=True)
    scale: Float[Array, " t"]
    members: int = eqx.field(static=True)
    global_scale: Float[Array, ""]

    @property
    def draws(self) -> int:
        """How many uniforms a renewal takes."""
        sweep = 2 * self.members + halved_draws(self.members + 1) + 1 if self.members else 0
        return sum(halved_draws(df + 1) for df in self.df) + SWEEPS * sweep

    def start(self, chains: int) -> Float[Array, "C m"]:
        """Where every chain begins: normal laws of the same scale."""
        t = jnp.broadcast_to(self.scale**-2.0, (chains, len(self.df)))
        if not self.members:
            return t
        square = jnp.full((chains, 1), self.global_scale**2)
        return jnp.concatenate([t, jnp.ones((chains, 2 * self.members)), square, square], 1)

    def weights(self, scales: Float[Array, "C m"]) -> Float[Array, "C k"]:
        """The precisions of all coefficients."""
        t, local, _, tau, _ = self._parts(scales)
        return jnp.concatenate([t, 1 / (local * tau)], 1) if self.members else t

    def renewed(self, scales: Float[Array, "C m"], z: Float[Array, "C k"], u: Float[Array, "n C"]):
        """New scales: draws from their law given ``z``, which leave their joint law with the coefficients as it is."""
        t, local, inner, tau, outer = self._parts(scales)
        fresh, used = [], 0
        for j, df in enumerate(self.df):
            count = halved_draws(df + 1)
            drawn = halved_gamma(u[used : used + count], df + 1)
            fresh.append(drawn / (0.5 * (df * self.scale[j] ** 2 + z[:, j] ** 2)))
            used += count
        t = jnp.stack(fresh, 1) if fresh else t
        if not self.members:
            return t
        square, p = 0.5 * z[:, len(self.df) :] ** 2, self.members
        for _ in range(SWEEPS):
            own, used = u[used:], used + 2 * p + halved_draws(p + 1) + 1
            unit = jnp.maximum(exponentials(own[: 2 * p + 1]), LEAST).T
            drawn = (1 / inner + square / tau) / unit[:, :p]
            local = jnp.where(drawn >= FLOOR**2, drawn, local)
            inner = (1 + 1 / local) / unit[:, p : 2 * p]
            whole = halved_gamma(own[2 * p + 1 :], p + 1)[:, None]
            drawn = (1 / outer + jnp.sum(square / local, 1, keepdims=True)) / whole
            tau = jnp.where(drawn >= (FLOOR * self.global_scale) ** 2, drawn, tau)
            outer = (self.global_scale**-2.0 + 1 / tau) / unit[:, 2 * p :]
        return jnp.concatenate([t, local, inner, tau, outer], 1)

    def _parts(self, scales):
        """The precisions of Student-t coefficients; ``λ²``, n, ``τ²`` and m of the horseshoe, empty if there is none."""
        k, p = len(self.df), self.members
        ends = [0, k, k + p, k + 2 * p, k + 2 * p + 1, k + 2 * p + 2]
        return [scales[:, a:b] for a, b in zip(ends[:-1], ends[1:], strict=True)]


class ScaleMixture(Potential):
    """``U(a) + ½ Σ_k w_k (r_k·a + s_k)²`` with weights ``w`` of its own for each chain, which change in time.

    Given the weights it is quadratic, and walked as such. They are renewed from their law given the position at times that
    do not depend on the state: the process of position, velocity and scales has the joint law of coefficients and scales
    as its invariant one, and the coefficients alone have the posterior under the mixture.

    Parameters
    ----------
    base : Quadratic
        ``U``, in whitened coordinates.
    rows : array of shape (k, d)
    shift : array of shape (k,)
    law : ScaleLaw
    weight : array of shape (C, k), optional
        None until the chains' weights are given.
    """

    base: Quadratic
    rows: Float[Array, "k d"]
    shift: Float[Array, " k"]
    law: ScaleLaw
    weight: Float[Array, "C k"] | None = None

    @property
    def dim(self) -> int:
        """Number of parameters."""
        return self.base.dim

    def holding(self, scales: Float[Array, "C m"]) -> ScaleMixture:
        """The same with these scales."""
        return eqx.tree_at(lambda s: s.weight, self, self.law.weights(scales), is_leaf=lambda x: x is None)

    def renewed(self, scales: Float[Array, "C m"], a: Float[Array, "C d"], u: Float[Array, "n C"]):
        """New scales at a position."""
        return self.law.renewed(scales, a @ self.rows.T + self.shift, u)

    def _weights(self) -> Float[Array, "C k"]:
        if self.weight is None:
            raise ValueError("a mixture walks with the scales of each chain")
        return self.weight

    def value(self, x):
        """At one position, a value for each chain's weights."""
        return self.base.value(x) + 0.5 * self._weights() @ (self.rows @ x + self.shift) ** 2

    def gradients(self, a):
        """Each chain with its own weights."""
        return self.base.gradients(a) + (self._weights() * (a @ self.rows.T + self.shift)) @ self.rows

    def whiten(self, reference, columns):
        """It is made in whitened coordinates."""
        raise TypeError("a mixture is made in whitened coordinates")

    def field(self, rotating, flips, a, v):
        """As of `Quadratic`, with a precision for each chain: ``B + RᵀWR``, whose entries are at most ``|B| + |R|ᵀW|R|``."""
        weight, rows, base = self._weights(), self.rows, self.base

        def times(x, precision, rows):
            return x @ precision + (weight * (x @ rows.T)) @ rows

        ba, bv = times(a, base.precision, rows), times(v, base.precision, rows)
        linear = base.linear + (weight * self.shift) @ rows
        largest = times(jnp.hypot(a, v), jnp.abs(base.precision), jnp.abs(rows)) if flips and rotating else None
        return quadratic_field(rotating, flips, a, v, ba, bv, linear, largest)

    def affine(self, rotating):
        """Exact on straight lines."""
        return not rotating
