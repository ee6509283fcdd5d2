"""A site's records with a part of the prior that differs between chains and changes in time."""

from __future__ import annotations

import equinox as eqx
from jaxtyping import Array, Float

from fedpdmc.potentials.base import Field, Potential
from fedpdmc.potentials.quadratic import Quadratic


class Shared(Potential):
    """``U + α U_0`` with a weight ``α ≥ 0`` for each chain, which a plan brings (paper, Algorithm 4).

    Parameters
    ----------
    records : Potential
        ``U``.
    prior : Quadratic
        ``U_0``.
    share : array of shape (C,), optional
        ``α``; None until a plan has come.
    """

    records: Potential
    prior: Quadratic
    share: Float[Array, " C"] | None = None

    @property
    def dim(self) -> int:
        """Number of parameters."""
        return self.records.dim

    def holding(self, share: Float[Array, " C"]) -> Shared:
        """The same with these weights."""
        return eqx.tree_at(lambda s: s.share, self, share, is_leaf=lambda x: x is None)

    def value(self, x):
        """``U(x) + α U_0(x)``, one for each chain's weight."""
        return self.records.value(x) + self._weights() * self.prior.value(x)

    def gradients(self, a):
        """``∇U + α ∇U_0``, each chain with its own weight."""
        return self.records.gradients(a) + self._weights()[:, None] * self.prior.gradients(a)

    def whiten(self, reference, columns):
        """Whiten both terms."""
        return Shared(self.records.whiten(reference, columns), self.prior.whiten(reference, columns), self.share)

    def field(self, rotating, flips, a, v):
        """Gradients add, and so do the bounds of their change, since ``α ≥ 0``."""
        return self.records.field(rotating, flips, a, v) + self.prior_field(rotating, flips, a, v)

    def prior_field(self, rotating: bool, flips: bool, a: Float[Array, "C d"], v: Float[Array, "C d"]) -> Field:
        """The field of ``α U_0`` alone."""
        prior, weight = self.prior.field(rotating, flips, a, v), self._weights()[:, None]
        return Field(weight * prior.gradient, weight * prior.slope, weight * prior.curve, prior.reach, prior.slack)

    def _weights(self) -> Float[Array, " C"]:
        if self.share is None:
            raise ValueError("a shared prior walks with the weights of a plan")
        return self.share

    def affine(self, rotating):
        """Whether both terms are."""
        return self.records.affine(rotating) and self.prior.affine(rotating)
