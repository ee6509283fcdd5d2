"""A site's walk along a plan, with a time limit."""

from __future__ import annotations

import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from fedpdmc._jax.compilation import compiled
from fedpdmc._jax.random_streams import ChainKeys
from fedpdmc.clocks import Clock, Walk, begin_walk, walk_on
from fedpdmc.clocks.walking import reveal
from fedpdmc.plan import Arrival, Plan

# Default time limit for one plan, in seconds. Usual plans take a fraction of a second.
MOST_SECONDS = 600.0
# Steps between two checks of the time; fewer if each passes over many records.
MOST_STEPS, LEAST_STEPS, RECORDS_AT_ONCE = 1 << 14, 1 << 6, 1 << 26


class TooMuchWork(Exception):
    """A plan took longer than the site allows."""


@compiled
def _first_steps(clock, keys, steps, latents, *plan):
    """The first steps. Passing NumPy arrays is faster than converting them to JAX arrays one by one."""
    state = begin_walk(clock, Plan(*plan))
    if latents is not None:
        state = eqx.tree_at(lambda s: s.settled, state, latents)
    return _outcome(clock, keys, Plan(*plan), *walk_on(clock, keys, state, Plan(*plan), steps))


@compiled
def _more_steps(clock, keys, steps, state, *plan):
    """More steps, for the few plans that need them."""
    return _outcome(clock, keys, Plan(*plan), *walk_on(clock, keys, state, Plan(*plan), steps))


def _outcome(clock: Clock, keys: ChainKeys, plan: Plan, state, done: Array):
    walk = clock.walk(state)
    arrival = walk.arrival(clock.dynamics)
    revealed = jax.lax.cond(done, lambda: reveal(clock, keys, plan.number, arrival), lambda: arrival)
    return revealed, walk, state, done


def arrivals_along(
    clock: Clock,
    keys: ChainKeys,
    plan: tuple[np.ndarray, ...],
    records: int,
    seconds: float,
    latents: Array | None = None,
) -> tuple[Arrival, Walk]:
    """The site's arrivals along the arrays of a plan; with private latents, from these on.

    Raises
    ------
    TooMuchWork
        The walk was not finished after this many seconds.
    """
    steps = np.int64(min(MOST_STEPS, max(LEAST_STEPS, RECORDS_AT_ONCE // max(records, 1))))
    arrival, walk, state, done = _first_steps(clock, keys, steps, latents, *plan)
    begun = time.monotonic()
    while not done:
        if time.monotonic() - begun > seconds:
            raise TooMuchWork
        arrival, walk, state, done = _more_steps(clock, keys, jnp.asarray(steps), state, *plan)
    return arrival, walk
