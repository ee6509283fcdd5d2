"""Control variates: public quadratics that are moved from a site to the coordinator."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from fedpdmc.potentials.base import Potential
from fedpdmc.potentials.quadratic import Quadratic


class ControlVariate(NamedTuple):
    """A public quadratic ``q`` of a site's own parameters, made at ``point`` from derivatives up to ``order``.

    With a spread S, from their means over ``N(point, S Sᵀ)``. ``kept`` is the part of their curvature that q has, and
    ``slope`` the gradient where that of q differs from it. These fields describe how q was made; q itself may be noisy or
    rounded.
    """

    quadratic: Quadratic
    point: Float[Array, " k"]
    order: int
    spread: Float[Array, "k k"] | None = None
    kept: float = 1.0
    slope: Float[Array, " k"] | None = None

    @property
    def gradient(self) -> Float[Array, " k"]:
        """The site's gradient at the point, or its mean about it."""
        return self.quadratic.gradient(self.point) if self.slope is None else self.slope


def local_quadratic(
    potential: Potential, x: Float[Array, " k"], order: int, spread: Float[Array, "k k"] | None = None
) -> Quadratic:
    """``g·(x − x*) + ½ (x − x*)ᵀH(x − x*)``, the second term for order 2 only.

    Here g and H are the gradient and Hessian at ``x*``: the Taylor polynomial. With a spread they are their means about it.
    """
    if spread is None:
        gradient, hessian = potential.gradient(x), potential.hessian(x) if order == 2 else None
    else:
        _, gradient, hessian = potential.averaged(x, spread)
    hessian = hessian if hessian is not None and order == 2 else jnp.zeros((x.shape[0], x.shape[0]))
    return Quadratic(hessian, gradient - hessian @ x)
