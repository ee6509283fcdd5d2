"""Rounds without thinning: Zig-Zag on Gaussian potentials, where every clock is inverted in closed form.

A round is then one draw of every site and of the coordinator's potential, and all chains advance together: only the chains'
state is carried from round to round. Draws and arithmetic are those of `Coordinator.plan_ahead` and `apply_arrivals`. They
are written separately for speed: chains are along the last axis, where the compiler vectorises, and no path is built and
cut, since a plan is one line that ends with the first event.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fedpdmc._jax.random_streams import uniforms
from fedpdmc.clocks import AffineClock
from fedpdmc.dynamics import ZigZag
from fedpdmc.sampling.coordinator import Coordinator, Knots, PublicKeys, State
from fedpdmc.sampling.engines.event_buffer import Record


class Step(eqx.Module):
    """The chains between two rounds: positions and velocities of shape (d, C).

    ``public`` counts the coordinator's jumps where it has a clock.
    """

    a: Float[Array, "d C"]
    v: Float[Array, "d C"]
    t: Float[Array, " C"]
    number: Int[Array, " C"]
    events: Int[Array, " C"]
    broken: Bool[Array, "sources C"]
    public: Int[Array, " C"] | None


def applies(groups, coordinator: Coordinator) -> bool:
    """Whether every clock of the run is inverted and a plan is a single line without further events."""
    clocks = [group.clock for group in groups] + ([] if coordinator.clock is None else [coordinator.clock])
    return (
        coordinator.segments == 1
        and coordinator.redistribution == 0
        and isinstance(coordinator.dynamics, ZigZag)
        and coordinator.dynamics.excess == 0
        and coordinator.walls is None
        and coordinator.mixture is None
        and all(isinstance(clock, AffineClock) for clock in clocks)
        and all(group.columns is None for group in groups)
    )


def run(groups, coordinator: Coordinator, keys: PublicKeys, state: State, until, limit, empty: Record):
    """Up to ``limit`` rounds; returns the state, where each source broke, the record and its number of rows."""
    sources = sum(group.size for group in groups) + (coordinator.clock is not None)
    public = None if coordinator.clock is None else jnp.zeros_like(state.events)
    broken = jnp.zeros((sources, state.t.shape[0]), bool)
    first = Step(state.a.T, state.v.T, state.t, state.number, state.events, broken, public)

    def unfinished(carry):
        now, _, row = carry
        return (row < limit) & jnp.any(now.t < until) & ~jnp.any(now.broken)

    def iteration(carry):
        now, record, row = carry
        new = _round(groups, coordinator, keys, now, until)
        fresh = Knots(new.t[:, None], new.a.T[:, None], new.v.T[:, None], ((now.t < until) & (new.t < until))[:, None])
        return new, record.written(fresh, row), row + 1

    last, record, rows = jax.lax.while_loop(unfinished, iteration, (first, empty, jnp.array(0)))
    site_events = state.site_events + (last.events - state.events) - (0 if last.public is None else last.public)
    planned = state.planned + (last.number - state.number)
    new = State(last.a.T, last.v.T, last.t, last.number, last.events, site_events, planned)
    return new, last.broken, record, rows


def _round(groups, coordinator: Coordinator, keys: PublicKeys, now: Step, until) -> Step:
    """The earliest of all clocks, its flip, or the end of the block."""
    waits, marks, broken = zip(*_draws(groups, coordinator, keys, now), strict=True)
    waits = jnp.concatenate(waits)
    winner, wait = jnp.argmin(waits, 0), jnp.min(waits, 0)
    mark = jnp.concatenate(marks)[0] if waits.shape[0] == 1 else _of(winner, jnp.concatenate(marks))
    left = jnp.maximum(until - now.t, 0.0)
    active, flips = now.t < until, wait < left
    step = jnp.minimum(wait, left)
    turned = jnp.where((jnp.arange(now.a.shape[0])[:, None] == mark) & flips, -now.v, now.v)
    t = jnp.where(flips, now.t + step, jnp.where(active, until, now.t))
    return Step(
        now.a + now.v * step, turned, t, now.number + active, now.events + flips,
        jnp.concatenate(broken) & active, None if now.public is None else now.public + (flips & (winner == 0)),
    )  # fmt: skip


def _draws(groups, coordinator: Coordinator, keys: PublicKeys, now: Step):
    """First flip of the coordinator's potential and of every site, each of shape (sites, C): ties go to the first."""

    def draw(clock, keys):
        u = uniforms(keys, now.number, jnp.zeros_like(now.number), clock.dim)
        return clock.first_flip(now.a, now.v, u, now.number)

    if coordinator.clock is not None:
        yield tuple(x[None] for x in draw(coordinator.clock, keys.clock))
    for group in groups:
        yield group.each(draw)


def _of(winner: Int[Array, " C"], marks: Int[Array, "sources C"]) -> Int[Array, " C"]:
    return jnp.take_along_axis(marks, winner[None], 0)[0]
