"""A prior whose parts move between the sites: Algorithm 4 of the paper."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from fedpdmc._jax.random_streams import exponentials
from fedpdmc.errors import InputError
from fedpdmc.potentials import Quadratic
from fedpdmc.validation import positive


class Redistributed:
    """A prior that the sites walk with in random shares, renewed at random times (paper, Algorithm 4).

    Site m walks with ``U_m + α_m U_0``: its rate is ``(v_i ∂_i(U_m + α_m U_0))_+`` for flips and ``⟨v, ∇(U_m + α_m U_0)⟩_+``
    for reflections. The weights α are uniform on the simplex (Dirichlet with all parameters one) and renewed by the
    coordinator at the times of a Poisson process. For each fixed α the process leaves the posterior invariant, and α is
    drawn independently of position, velocity and past, so the posterior times the law of α is invariant.

    Parameters
    ----------
    prior : Quadratic
        From `fedpdmc.models`.
    rate : float
        How often the weights are drawn, per unit of process time; positive. Each time ends a plan.
    """

    def __init__(self, prior: Quadratic, rate: float = 0.1):
        if not isinstance(prior, Quadratic) or prior.records:
            raise InputError(
                "Redistributed(prior)", type(prior).__name__, "Give a prior such as fedpdmc.models.normal_prior(dim)."
            )
        self.prior, self.rate = prior, positive("Redistributed(rate)", rate, "Give a positive finite rate.")

    def __repr__(self) -> str:
        return f"Redistributed(rate={self.rate:g})"


def shares(u: Float[Array, "M C"]) -> Float[Array, "C M"]:
    """Weights uniform on the simplex, from uniforms: exponentials over their sum."""
    parts = exponentials(u).T
    return parts / jnp.sum(parts, -1, keepdims=True)
