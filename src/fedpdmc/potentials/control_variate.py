"""Control variates: public quadratics that are moved from a site to the coordinator."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from fedpdmc.potentials.base import Potential
from fedpdmc.potentials.quadratic import Quadratic


class ControlVariate(NamedTuple):
    """A public quadratic ``q`` of a site's own parameters, made at ``point`` from derivatives up to ``order``."""

    quadratic: Quadratic
    point: Float[Array, " k"]
    order: int


def taylor_quadratic(potential: Potential, x: Float[Array, " k"], order: int) -> Quadratic:
    """``∇U(x*)·(x − x*) + ½ (x − x*)ᵀ∇²U(x*)(x − x*)``, the second term for order 2 only."""
    hessian = potential.hessian(x) if order == 2 else jnp.zeros((x.shape[0], x.shape[0]))
    return Quadratic(hessian, potential.gradient(x) - hessian @ x)
