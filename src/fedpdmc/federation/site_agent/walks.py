"""A site's walk along a plan, and the watchdog that ends one which takes for ever."""

from __future__ import annotations

import time

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from fedpdmc._jax.compilation import compiled
from fedpdmc._jax.random_streams import ChainKeys
from fedpdmc.clocks import Clock, Walk
from fedpdmc.plan import Arrival, Plan
from fedpdmc.sites.site import begin_walk, walk_on

# Seconds of work on one plan after which a site gives up: an honest one takes a small part of one.
MOST_SECONDS = 600.0
# Steps between two looks at the clock: fewer where each passes over many records.
MOST_STEPS, LEAST_STEPS, RECORDS_AT_ONCE = 1 << 14, 1 << 6, 1 << 26


class TooMuchWork(Exception):
    """A plan took longer to walk than the site allows."""


@compiled
def _answer(clock, keys, steps, *plan):
    """The first steps; the plan's arrays are taken as they came, which is faster than giving them to JAX one by one."""
    return _outcome(clock, *walk_on(clock, keys, begin_walk(clock, Plan(*plan)), Plan(*plan), steps))


@compiled
def _further(clock, keys, steps, state, *plan):
    """More steps, for the few plans that need them."""
    return _outcome(clock, *walk_on(clock, keys, state, Plan(*plan), steps))


def _outcome(clock: Clock, state, done: Array):
    walk = clock.walk(state)
    return walk.arrival(clock.dynamics), walk, state, done


def walked(
    clock: Clock, keys: ChainKeys, plan: tuple[np.ndarray, ...], records: int, seconds: float
) -> tuple[Arrival, Walk]:
    """The site's arrivals along the arrays of a plan.

    Raises
    ------
    TooMuchWork
        After this many seconds it had not come to an end.
    """
    steps = np.int64(min(MOST_STEPS, max(LEAST_STEPS, RECORDS_AT_ONCE // max(records, 1))))
    arrival, walk, state, done = _answer(clock, keys, steps, *plan)
    begun = time.monotonic()
    while not done:
        if time.monotonic() - begun > seconds:
            raise TooMuchWork
        arrival, walk, state, done = _further(clock, keys, jnp.asarray(steps), state, *plan)
    return arrival, walk
