"""All sites in one process by dense clocks: every chain advances one piece of its path in every iteration.

A piece ends at a refreshment, at the end of the block, at its longest length or at a candidate. One product with the
records of all sites gives their rates along the pieces of all chains (`fedpdmc.potentials.dense_rates`), and one stream
of candidates serves the superposed clocks (`fedpdmc.clocks.superposed_candidates`). The few chains whose candidates the
curves do not reject are gathered, and the records of their sites decide in 64 bits. No chain waits for another before the
end of the block.

Plans are not made here, since sites and coordinator are one program, but they are counted as `Coordinator.plan_ahead` would
cut them: a plan ends with the event of a site, after its last segment, or where it reaches.
"""

from __future__ import annotations

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fedpdmc._jax.compilation import apart
from fedpdmc._jax.random_streams import exponentials, normals, uniforms
from fedpdmc.clocks.dense import DenseClock, decide, is_poor, second_order_candidate
from fedpdmc.clocks.path import FINE
from fedpdmc.clocks.superposed_candidates import CANDIDATES, DRAWN, Found, cells_of, first_candidate
from fedpdmc.clocks.unfinished_chains import gathered
from fedpdmc.dynamics import QUARTER, Turn
from fedpdmc.dynamics.jumps import draw_bounce
from fedpdmc.dynamics.quarter_turns import LEAST_WAIT, turn_velocities
from fedpdmc.potentials.dense_rates import Curves, cosine_and_sine
from fedpdmc.sampling.coordinator import Coordinator, Knots, PublicKeys, State
from fedpdmc.sampling.engines.event_buffer import Record

# Chains whose records are passed over together in 64 bits on a processor, and where there are so many columns; on a GPU one
# in so many, likewise; of chains whose curves are poor, which are a few in 100,000, at most so many.
LANES, MORE_LANES, MANY_COLUMNS, POOR_LANES = 8, 32, 32, 64
WIDE_SHARE, MORE_WIDE_SHARE = 16, 4
# Velocities of single chains are made where at most one in so many turns, this share of the chains at a time.
REFRESHED_SHARE, TURNED_SHARE = 2, 8
# Uniforms of a site's candidate under a second-order bound; the number of the first draw of a block.
UNIFORMS_IN_CELLS, FIRST = 2, 2**20


class Step(eqx.Module):
    """The chains between two iterations, along the last axis.

    ``wait`` is the time to the next refreshment and ``turns`` its number where it is a turn, ``draws`` the pieces of the
    present plan so far, ``segments`` and ``reach`` what is left of it.
    """

    a: Float[Array, "d C"]
    v: Float[Array, "d C"]
    t: Float[Array, " C"]
    wait: Float[Array, " C"]
    turns: Int[Array, " C"] | None
    number: Int[Array, " C"]
    draws: Int[Array, " C"]
    segments: Int[Array, " C"]
    reach: Float[Array, " C"]
    site_events: Int[Array, " C"]
    planned: Int[Array, " C"]
    passes: Int[Array, "M C"]
    fault: Int[Array, "M C"]


def suits(coordinator: Coordinator) -> bool:
    """Whether the coordinator does nothing but refresh."""
    alone = coordinator.clock is None and coordinator.walls is None and coordinator.redistribution == 0
    return alone and coordinator.dynamics.refresh != 0


def applies(groups) -> bool:
    """Whether all sites have dense clocks, of pieces of one length."""
    return all(isinstance(group.clock, DenseClock) and group.columns is None for group in groups)


def at_rest(groups, coordinator: Coordinator, keys: PublicKeys, state: State, passes) -> Step:
    """The chains between two blocks."""
    zero, turn = jnp.zeros_like(state.number), state.turn
    sites = sum(group.size for group in groups)
    if turn is None:
        wait, turns = _random_wait(coordinator, keys, state.number, jnp.full_like(zero, FIRST)), None
    else:
        wait, turns = turn.wait, turn.number
    return Step(
        state.a.T, state.v.T, state.t, wait, turns, state.number - 1, zero, zero, jnp.zeros_like(wait),
        state.site_events, state.planned, passes, jnp.zeros((sites, zero.shape[0]), zero.dtype),
    )  # fmt: skip


def begin_block(coordinator: Coordinator, keys: PublicKeys, last: Step, until) -> Step:
    """With the first plan of a block. Positions, velocities, times and the next turn are kept of the last one."""
    none = jnp.zeros_like(last.draws)
    wait = last.wait
    if last.turns is None:
        wait = _random_wait(coordinator, keys, last.number + 1, jnp.full_like(none, FIRST))
    rest = eqx.tree_at(
        lambda s: (s.wait, s.draws, s.segments, s.reach), last, (wait, none, none, jnp.zeros_like(last.reach))
    )
    return _planned(coordinator, rest, jnp.ones(rest.t.shape, bool), until)


def run_chunk(groups, coordinator: Coordinator, keys: PublicKeys, first: Step, until, limit, rows: int):
    """Up to ``limit`` iterations; returns the chains, the record and its number of rows."""
    dim, chains = first.a.shape
    empty = Record.empty(rows, chains, dim, 1, False)

    def unfinished(carry):
        now, _, row = carry
        return (row < limit) & jnp.any(now.t < until) & ~jnp.any(now.fault != FINE)

    def iteration(carry):
        now, record, row = carry
        new, knots = _iteration(groups, coordinator, keys, now, until)
        return new, record.written(knots, row), row + 1

    return jax.lax.while_loop(unfinished, iteration, (first, empty, jnp.array(0)))


def state_of(step: Step) -> State:
    """The state in the form of other engines; the next plan's number follows the present one."""
    turn = None if step.turns is None else Turn(step.wait, step.turns)
    events = step.site_events
    return State(step.a.T, step.v.T, step.t, step.number + 1, events, events, step.planned, turn=turn)


def _iteration(groups, coordinator: Coordinator, keys: PublicKeys, now: Step, until) -> tuple[Step, Knots]:
    """One piece of every chain that is not at the end of the block."""
    left = jnp.maximum(until - now.t, 0.0)
    longest = functools.reduce(jnp.minimum, [jnp.min(group.clock.length) for group in groups])
    length = jnp.minimum(jnp.minimum(now.wait, left), longest)
    found = _found(groups, coordinator, now, length, left > 0)
    cos, sin = cosine_and_sine(found.time)
    a, v = now.a * cos + now.v * sin, now.v * cos - now.a * sin
    hit, whole = found.hit & (left > 0), ~found.hit & ~found.cut & (left > 0)
    v, accepted, passes, fault = _served(groups, a, v, found, hit, now.passes + (left > 0), now.fault, now.number)
    # Times are set, not added up, where something is due: rounding must not make a piece of no length.
    ends, refreshed = whole & (length >= left), whole & (length >= now.wait)
    t = jnp.where(ends, until, now.t + found.time)
    fresh, again, turns = _refreshment(coordinator, keys, now, refreshed)
    v = jnp.where(refreshed, fresh, v)
    wait = jnp.where(refreshed, again, jnp.maximum(now.wait - found.time, LEAST_WAIT))
    knots = Knots(t[:, None], a.T[:, None], v.T[:, None], ((accepted | refreshed) & ~ends)[:, None])
    new = Step(
        a, v, t, wait, turns, now.number, now.draws + (left > 0), now.segments - refreshed, now.reach - found.time,
        now.site_events + accepted, now.planned, passes, fault,
    )  # fmt: skip
    over = accepted | (refreshed & (new.segments <= 0)) | (new.reach <= 0)
    return _planned(coordinator, new, over & (t < until), until), knots


def _refreshment(coordinator: Coordinator, keys: PublicKeys, now: Step, refreshed):
    """The velocity after a refreshment, the time to the one that follows, and the number of the next turn."""
    dim = now.a.shape[0]
    if now.turns is None:
        velocity = apart(normals, uniforms(keys.events, now.number, now.draws, dim), number=now.number)
        return velocity, _random_wait(coordinator, keys, now.number, now.draws), None
    made, turns = functools.partial(turn_velocities, count=1, dim=dim), now.turns

    def every():
        return apart(lambda k, n: made(k, n)[0].T, keys.turns, turns, number=turns)

    if jax.default_backend() != "cpu":
        return every(), QUARTER, turns + refreshed
    few = REFRESHED_SHARE * jnp.sum(refreshed) <= refreshed.shape[0]
    velocity = jax.lax.cond(few, lambda: _turned(made, keys.turns, turns, now.v, refreshed), every)
    return velocity, QUARTER, turns + refreshed


def _turned(made, keys, turns, v, refreshed) -> Float[Array, "d C"]:
    """The velocities of the chains that turn, some at a time; what stands in the place of the others is not used."""

    def some(index, v):
        key, number = (x.at[index].get(mode="clip") for x in (keys, turns))
        return v.at[:, index].set(made(key, number)[0].T, mode="drop")

    return _in_turn(refreshed, max(1, refreshed.shape[0] // TURNED_SHARE), some, v)


def _in_turn(which: Bool[Array, " C"], lanes: int, serve, state):
    """``state = serve(index, state)`` for these chains, so many at a time; an index beyond the last chain is none."""
    chains, place = which.shape[0], jnp.cumsum(which)
    every, beyond = jnp.arange(chains), chains + lanes
    # Each of the others has a place of its own beyond the end: on a GPU those that share one wait for each other.
    order = jnp.full(beyond, chains).at[jnp.where(which, place - 1, beyond + every)].set(
        every, mode="drop", unique_indices=True
    )  # fmt: skip

    def some(carry):
        first, state = carry
        return first + lanes, serve(jax.lax.dynamic_slice(order, (first,), (lanes,)), state)

    return jax.lax.while_loop(lambda carry: carry[0] < place[-1], some, (jnp.zeros_like(place[-1]), state))[1]


def _random_wait(coordinator: Coordinator, keys: PublicKeys, number, draws) -> Float[Array, " C"]:
    """The time to the next refreshment where they come at a rate."""
    return exponentials(uniforms(keys.share, number, draws, 1)[0]) / coordinator.dynamics.refresh_rate


def _planned(coordinator: Coordinator, step: Step, new: Bool[Array, " C"], until) -> Step:
    """The chains with a new plan counted where one begins."""
    reach = coordinator.reach(state_of(step)) if coordinator.segments > 1 else jnp.full_like(step.t, jnp.inf)
    ahead = jnp.minimum(reach, until - step.t)
    rate = coordinator.dynamics.refresh_rate if step.turns is None else 1 / QUARTER
    count = jnp.clip(jnp.ceil(ahead * rate), 1, coordinator.segments).astype(int)
    return eqx.tree_at(
        lambda s: (s.number, s.draws, s.segments, s.reach, s.planned),
        step,
        (
            step.number + new,
            jnp.where(new, 0, step.draws),
            jnp.where(new, coordinator.segments, step.segments),
            jnp.where(new, reach, step.reach),
            step.planned + jnp.where(new, count, 0),
        ),
    )


def _found(groups, coordinator: Coordinator, now: Step, length, live) -> Found:
    """Where the pieces end: by the curves of all sites, or by second-order bounds where those are poor."""
    parts = [group.clock.curves.along(now.a, now.v, length) for group in groups]
    curves = Curves(*(jnp.concatenate(x) for x in zip(*parts, strict=True)))
    u = uniforms(
        groups[0].keys[0], now.number, now.draws, CANDIDATES * DRAWN + UNIFORMS_IN_CELLS * curves.error.shape[0]
    )
    found = first_candidate(cells_of(curves, length), length, u)
    poor = is_poor(curves, length) & live
    return jax.lax.cond(
        jnp.any(poor), lambda: _in_cells(groups, coordinator, now, length, u, poor, found), lambda: found
    )


def _in_cells(groups, coordinator: Coordinator, now: Step, length, u, poor, found: Found) -> Found:
    """The first candidate, or the first end of a cell, of all sites by their second-order bounds, on the poor chains.

    Until the first of them each site is silent, and beyond it nothing of the others is used.
    """

    def serve(index, found):
        a, v, remaining, some = (x.at[index].get(mode="clip") for x in (now.a.T, now.v.T, length, u.T))
        ends, place = [], CANDIDATES * DRAWN
        for group in groups:
            own = some[:, place : place + UNIFORMS_IN_CELLS * group.size].T.reshape(group.size, UNIFORMS_IN_CELLS, -1)
            place += UNIFORMS_IN_CELLS * group.size
            walk = functools.partial(_cell, coordinator.dynamics, a, v, remaining)
            ends.append(jax.lax.map(lambda site: walk(*site), (group.clock.potential, own)))  # noqa: B023
        every = Found(*(jnp.concatenate(x) for x in zip(*ends, strict=True)))
        first = jnp.argmin(every.time, 0)
        best = Found(*(jnp.take_along_axis(x, first[None], 0)[0] for x in every))._replace(site=first)
        return Found(*(x.at[index].set(y, mode="drop") for x, y in zip(found, best, strict=True)))

    return _in_turn(poor, min(POOR_LANES, lane_count(groups, length.shape[0])), serve, found)


def _cell(dynamics, a, v, remaining, potential, u) -> Found:
    return second_order_candidate(dynamics, potential, a, v, remaining, u)


def lane_count(groups, chains: int) -> int:
    """How many chains are gathered at a time."""
    many = groups[0].clock.dim >= MANY_COLUMNS
    lanes = MORE_LANES if many else LANES
    if any(group.clock.curves.wide for group in groups):
        lanes = max(LANES, chains // (MORE_WIDE_SHARE if many else WIDE_SHARE))
    return min(chains, lanes)


def _served(groups, a, v, found: Found, hit, passes, fault, number):
    """Decide the candidates by the records of their sites: new velocities, who accepted, passes and faults by site."""
    state, place = (v, jnp.zeros_like(hit), passes, fault), 0
    for group in groups:
        own = hit & (found.site >= place) & (found.site < place + group.size)
        serve = functools.partial(_serve, group, place, a, found, number)
        state = _in_turn(own, lane_count((group,), hit.shape[0]), serve, state)
        place += group.size
    return state


def _serve(group, place: int, a, found: Found, number, index, state):
    """Some of the chains that wait for the sites of a group."""
    v, accepted, passes, fault = state
    position, velocity = (x.at[:, index].get(mode="clip").T for x in (a, v))
    some = Found(*gathered(index, tuple(found)))
    site = jnp.clip(some.site - place, 0, group.size - 1)
    if group.size == 1:
        gradient = jax.tree.map(lambda x: x[0], group.clock.potential).gradients(position)
    else:
        potentials = jax.tree.map(lambda x: x[site], group.clock.potential)
        gradient = jax.vmap(lambda potential, x: potential.gradients(x[None])[0])(potentials, position)
    yes, wrong, normal = decide(gradient, velocity, some)
    if group.clock.dynamics.draws:
        key = group.keys.at[site, index].get(mode="clip")
        bounced = draw_bounce(key, number.at[index].get(mode="clip"), normal, yes & (index < a.shape[1]))
    else:
        bounced = group.clock.dynamics.jump(velocity, normal)
    turned = jnp.where(yes[:, None], bounced, velocity)
    return (
        v.at[:, index].set(turned.T, mode="drop"),
        accepted.at[index].set(yes, mode="drop"),
        passes.at[place + site, index].add(1, mode="drop"),
        fault.at[place + site, index].max(wrong.astype(fault.dtype), mode="drop"),
    )
