"""Turns: refreshment of the velocity at fixed times, a quarter period apart.

The velocities at the turns are public: a function of a public key, the chain and the number of the turn. Whoever has the key
computes them itself, the same bits on every machine, so that they need not be sent.
"""

from __future__ import annotations

import math

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from fedpdmc._jax.random_streams import ChainKeys, portable_normals, threefry, unit_interval

# The value of ``refresh`` that selects turns instead of a rate.
QUARTER_TURNS = "quarter-turns"
QUARTER = math.pi / 2
# The shortest wait: a jump less than this before a turn counts as one at the turn.
LEAST_WAIT = 2.0**-40
GOLDEN = (math.sqrt(5) - 1) / 2


class Turn(eqx.Module):
    """The next turn of every chain: in how much time it comes, which is positive, and its number."""

    wait: Float[Array, " C"]
    number: Int[Array, " C"]


def first_waits(chains: int) -> np.ndarray:
    """When each chain turns first: spread evenly over a quarter period, for any number of chains.

    The phases are multiples of the golden ratio, so that any number of first ones is spread evenly, and a chain's phase
    does not depend on how many chains there are.
    """
    return QUARTER * ((np.arange(chains) + 0.5) * GOLDEN % 1.0)


def turn_velocities(keys: ChainKeys, first: Int[Array, " C"], count: int, dim: int) -> Float[Array, "n C d"]:
    """Standard normal velocities at ``count`` turns of each chain from its turn ``first`` on."""
    turn = (first[None] + jnp.arange(count)[:, None]).astype(jnp.uint32)
    entry = jnp.arange(dim, dtype=jnp.uint32)
    shape = (count, dim, first.shape[0])
    counter = jnp.broadcast_to(turn[:, None, :], shape), jnp.broadcast_to(entry[None, :, None], shape)
    u = unit_interval(*threefry((keys[None, None, :, 0], keys[None, None, :, 1]), counter))
    return jnp.swapaxes(portable_normals(u, first), 1, 2)


def turn_durations(wait: np.ndarray, horizon: np.ndarray, count: int) -> np.ndarray:
    """Lengths (C, count) of the segments between turns up to a horizon: subtractions alone, so the same bits everywhere."""
    duration, left, wait = np.zeros((len(wait), count)), np.array(horizon), np.array(wait)
    for k in range(count):
        duration[:, k] = np.minimum(wait, left)
        left = np.where(wait <= left, left - wait, 0.0)
        wait = np.full_like(wait, QUARTER)
    return duration
