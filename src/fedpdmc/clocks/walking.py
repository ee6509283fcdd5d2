"""A site's part in a round: a clock walks a plan to its end, at once or in portions."""

from __future__ import annotations

from typing import TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from fedpdmc._jax.random_streams import ChainKeys
from fedpdmc.clocks.base import Clock
from fedpdmc.clocks.path import Walk, follow, pick
from fedpdmc.dynamics.jumps import draw_bounce
from fedpdmc.plan import Arrival, Plan
from fedpdmc.potentials import Shared

W = TypeVar("W")
TIME_GRID = 2.0**-32  # of process time: the spacing of the times that a site reveals


def holding(clock: Clock, share: Float[Array, " C"] | None) -> Clock:
    """The clock of a site that holds this part of the prior on each chain; itself where the prior is not redistributed.

    A clock may start a plan with rates that it found at the end of the one before. An event ended that plan, so the parts
    are the same: they change at horizons, where nothing has been evaluated.
    """
    if share is None or not isinstance(clock.potential, Shared):
        return clock
    return eqx.tree_at(lambda c: c.potential, clock, clock.potential.holding(share))


def answer(clock: Clock, keys: ChainKeys, plan: Plan) -> tuple[Arrival, Walk]:
    """Walk a plan to the end on every chain: the site's whole part in a round."""
    path, clock = follow(clock.dynamics, plan), holding(clock, plan.share)
    state = clock.restart(clock.idle(plan.start.shape[0]), jnp.ones(plan.start.shape[0], bool), path)
    state = jax.lax.while_loop(lambda s: jnp.any(~clock.walk(s).done), lambda s: clock.step(s, path, keys), state)
    walk = clock.walk(state)
    arrival = walk.arrival(clock.dynamics)
    return reveal(clock, keys, plan.number, arrival) if clock.dynamics.draws else arrival, walk


def reveal(clock: Clock, keys: ChainKeys, number: Int[Array, " C"], arrival: Arrival) -> Arrival:
    """An arrival as it leaves a site: on the public grid of times, with a velocity that is drawn in place of a normal."""
    if not clock.dynamics.draws:
        return Arrival(on_grid(arrival), arrival.rang, arrival.mark)
    return Arrival(on_grid(arrival), arrival.rang, draw_bounce(keys, number, arrival.mark, arrival.rang))


def reveal_first(
    arrivals: Arrival, keys: UInt32[Array, "M C words"], number: Int[Array, " C"], which: Bool[Array, " C"]
) -> Arrival:
    """The arrivals of M sites as they would be revealed, with the velocity of the earliest one only, on some chains."""
    time = on_grid(arrivals)
    first = jnp.argmin(jnp.where(arrivals.rang, time, jnp.inf), 0)
    key, normal, rang = (pick(jnp.swapaxes(x, 0, 1), first) for x in (keys, arrivals.mark, arrivals.rang))
    velocity = draw_bounce(key, number, normal, rang & which)
    return Arrival(time, arrivals.rang, jnp.broadcast_to(velocity, arrivals.mark.shape))


def on_grid(arrival: Arrival) -> Float[Array, "*M C"]:
    """The times, those of events rounded down to a multiple of `TIME_GRID`.

    The probability of each value is that of its cell, positive whatever the records are. Times as they are computed have
    last bits that are a function of the records. The grid is as far below the scale of the process as rounding errors are.
    """
    return jnp.where(arrival.rang, jnp.floor(arrival.time / TIME_GRID) * TIME_GRID, arrival.time)


def begin_walk(clock: Clock[W], plan: Plan) -> W:
    """A walk at the start of a plan."""
    path, chains = follow(clock.dynamics, plan), plan.start.shape[0]
    return clock.restart(clock.idle(chains), jnp.ones(chains, bool), path)


def walk_on(clock: Clock[W], keys: ChainKeys, state: W, plan: Plan, steps: Int[Array, ""]) -> tuple[W, Bool[Array, ""]]:
    """At most so many steps more of a walk, and whether it is at its end."""
    path = follow(clock.dynamics, plan)

    def going(carry):
        return jnp.any(~clock.walk(carry[1]).done) & (carry[0] < steps)

    _, state = jax.lax.while_loop(
        going, lambda carry: (carry[0] + 1, clock.step(carry[1], path, keys)), (jnp.zeros_like(steps), state)
    )
    return state, ~jnp.any(~clock.walk(state).done)
