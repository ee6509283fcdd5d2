"""What the records of a group say of its effects, as a Gaussian, and the map that is made of it.

With h, m and ``∂m/∂θ`` of `informed` the map is ``z = σ(u) m(θ) + √(σ(u)/h) ζ``, ``u = 2 log τ + log h``
(`fedpdmc.potentials.random_effects_rates`).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# The least information of records on an effect, relative to its prior's.
LEAST_INFORMATION = 1e-6
# The kernel proposes from the prior with this probability, else from a standard normal.
FROM_PRIOR = 0.1


class Conditional(NamedTuple):
    """Mean, its slope in θ, and variance of each effect given θ."""

    mean: Float[Array, "G r"]
    slope: Float[Array, "G r d"]
    variance: Float[Array, "G r"]


def informed(known: Conditional, rho: Float[Array, " r"], steep: Float[Array, " r"], first: int):
    """h, m and ``∂m/∂θ`` of every effect, whose log spreads ρ have the slopes ``steep`` in θ's entries from ``first`` on."""
    r, dim = rho.shape[0], known.slope.shape[-1]
    information = jnp.maximum(1 / known.variance - jnp.exp(-2 * rho), LEAST_INFORMATION * jnp.exp(-2 * rho))
    share = jax.nn.sigmoid(2 * rho + jnp.log(information))
    center = known.mean / share
    # ∂(σ(u) m)/∂θ is the slope of the mean; σ(u) itself has slope 2 σ(u)σ(−u) in its own log τ.
    own = jnp.zeros((r, dim)).at[jnp.arange(r), first + jnp.arange(r)].set(steep)
    return information, center, known.slope / share[..., None] - (2 * (1 - share) * center)[..., None] * own
