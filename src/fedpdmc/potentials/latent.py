"""Potentials with private latents: ``U(θ, z)``, of which only θ is shared."""

from __future__ import annotations

import abc

from jaxtyping import Array, Float

from fedpdmc.potentials.base import Potential
from fedpdmc.potentials.chebyshev import RateCurve
from fedpdmc.potentials.quadratic import Quadratic

NEEDS_ROTATION = (
    "Private latents move with the few-rounds method only: leave dynamics out, or give fedpdmc.Boomerang()."
)


class LatentPotential(Potential):
    """``U(θ, z)``; as a function of θ alone, `value` is the Laplace or quadrature marginal ``−log ∫ e^{−U(θ, z)} dz``.

    The marginal's gradient and Hessian, of size d, are what a site releases to make a reference. They need not be exact for
    the sampler to be: they decide how few arrivals there are.
    """

    @property
    @abc.abstractmethod
    def latents(self) -> int:
        """How many private numbers there are."""

    @abc.abstractmethod
    def opened(
        self, center: Float[Array, " d"], rows: Float[Array, "d e"], control: Quadratic | None
    ) -> PrivateRemainder:
        """The remainder ``R(a, ζ)`` with ``θ = center + rows a``; ``control`` is a quadratic of θ."""


class PrivateRemainder(Potential):
    """``R(a, ζ) = U(θ, T_θ(ζ)) − log|∂T_θ/∂ζ| − q(θ)`` with ``θ = c + S a``: what a site with private latents walks with.

    The map ``z = T_θ(ζ)`` is the site's own. For any map that is smooth and one-to-one in ζ, the density of ``(a, ζ)`` is
    ``exp(−R − q)`` and that of ``(θ, z)`` is unchanged; the better ζ | θ is standard normal for every θ, the less
    ``∇_a R`` depends on ζ, and the fewer arrivals there are.
    """

    @property
    @abc.abstractmethod
    def latents(self) -> int:
        """How many private numbers there are."""

    @abc.abstractmethod
    def gradients(self, a: Float[Array, "C d"], zeta: Float[Array, "C k"]) -> Float[Array, "C d"]:  # type: ignore[override]
        """``∇_a R``."""

    @abc.abstractmethod
    def cell(
        self, a: Float[Array, "C d"], v: Float[Array, "C d"], zeta: Float[Array, "C k"], room: Float[Array, " C"]
    ) -> RateCurve:
        """``v(s)·∇_a R(a(s), ζ)`` along the rotation from ``(a, v)``, on a cell no longer than ``room``."""

    @property
    @abc.abstractmethod
    def chances(self) -> int:
        """Uniforms that one application of the kernel takes."""

    @abc.abstractmethod
    def kernel(
        self, a: Float[Array, "C d"], zeta: Float[Array, "C k"], u: Float[Array, "n C"]
    ) -> Float[Array, "C k"]:  # fmt: skip
        """New latents from a kernel that leaves ``π(ζ | θ) ∝ exp(−R(a, ζ))`` invariant."""

    @abc.abstractmethod
    def to_z(self, a: Float[Array, "C d"], zeta: Float[Array, "C k"]) -> Float[Array, "C k"]:
        """``T_θ(ζ)``."""
