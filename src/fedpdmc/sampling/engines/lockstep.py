"""All sites in one process by dense clocks: every chain advances one piece of its path in every iteration.

A piece ends at a refreshment, at the end of the block, at its longest length or at a candidate. One product with the
records of all sites gives their rates along the pieces of all chains (`fedpdmc.potentials.dense_rates`), and one stream
of candidates serves the superposed clocks (`fedpdmc.clocks.thinning`). The few chains whose candidates the
curves do not reject are gathered, and the records of their sites decide in 64 bits. No chain waits for another before the
end of the block.

Plans are not made here, since sites and coordinator are one program, but they are counted as `Coordinator.plan_ahead` would
cut them: a plan ends with the event of a site, after its last segment, or where it reaches.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from fedpdmc._jax.by_numpy import once
from fedpdmc._jax.compilation import apart, compiled, strong_types
from fedpdmc._jax.garbage_collection import Uncollected
from fedpdmc._jax.precision import double_precision
from fedpdmc._jax.random_streams import exponentials, normals, uniforms
from fedpdmc.clocks.base import FINE, accept, gathered, unit
from fedpdmc.clocks.thinning import (
    CANDIDATES,
    DRAWN,
    CurveClock,
    Found,
    ThirdOrder,
    TimePolynomial,
    first_candidate,
    is_poor,
    second_order_candidate,
)
from fedpdmc.dynamics import LEAST_WAIT, QUARTER, Turn, draw_bounce, turn_velocities
from fedpdmc.potentials.chebyshev import RateCurve
from fedpdmc.potentials.dense_rates import cosine_and_sine
from fedpdmc.results.skeleton import Chunk
from fedpdmc.sampling.coordinator import Coordinator, PublicKeys, RoundKnots, State
from fedpdmc.sampling.engines.base import raise_faults
from fedpdmc.sampling.engines.compiled_loop import CompiledEngine, Record

MANY_COLUMNS = 32  # of the records, from which more chains are gathered at a time
LANES = 8  # chains whose records are passed over together in 64 bits on a processor
MORE_LANES = 32  # the same where there are many columns
WIDE_SHARE = 16  # on a GPU one chain in so many
MORE_WIDE_SHARE = 4  # the same where there are many columns
POOR_LANES = 64  # chains whose curves are poor, at most: they are a few in 100,000
SHARPENED = 32  # chains whose candidates are bounded at a point together
REFRESHED_SHARE = 2  # velocities of single chains are made where at most one in so many turns
TURNED_SHARE = 8  # one in so many of the chains at a time
UNIFORMS_IN_CELLS = 2  # of a site's candidate under a second-order bound
FIRST = 2**20  # number of the first draw of a block


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
    """Whether the curves of all sites are of records, for reflections on rotations."""
    clocks = [group.clock for group in groups if isinstance(group.clock, CurveClock) and group.columns is None]
    return len(clocks) == len(groups) and not any(isinstance(clock.curves, TimePolynomial) for clock in clocks)


@once
def at_rest(groups, coordinator: Coordinator, keys: PublicKeys, state: State) -> Step:
    """The chains between two blocks."""
    zero, turn = jnp.zeros_like(state.number), state.turn
    none = jnp.zeros((sum(group.size for group in groups), zero.shape[0]), int)
    if turn is None:
        wait, turns = _random_wait(coordinator, keys, state.number, jnp.full_like(zero, FIRST)), None
    else:
        wait, turns = turn.wait, turn.number
    return strong_types(
        Step(
            state.a.T, state.v.T, state.t, wait, turns, state.number - 1, zero, zero, jnp.zeros_like(wait),
            state.site_events, state.planned, none, none,
        )
    )  # fmt: skip


@compiled
def begin_block(coordinator: Coordinator, keys: PublicKeys, last: Step, until) -> Step:
    """With the first plan of a block. Positions, velocities, times and the next turn are kept of the last one."""
    none = jnp.zeros_like(last.draws)
    wait = last.wait
    if last.turns is None:
        wait = _random_wait(coordinator, keys, last.number + 1, jnp.full_like(none, FIRST))
    rest = eqx.tree_at(
        lambda s: (s.wait, s.draws, s.segments, s.reach), last, (wait, none, none, jnp.zeros_like(last.reach))
    )
    return _begin_plans(coordinator, rest, jnp.ones(rest.t.shape, bool), until)


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


def _iteration(groups, coordinator: Coordinator, keys: PublicKeys, now: Step, until) -> tuple[Step, RoundKnots]:
    """One piece of every chain that is not at the end of the block."""
    left = jnp.maximum(until - now.t, 0.0)
    longest = functools.reduce(jnp.minimum, [jnp.min(group.clock.length) for group in groups])
    length = jnp.minimum(jnp.minimum(now.wait, left), longest)
    found = _first_candidates(groups, coordinator, now, length, left > 0)
    cos, sin = cosine_and_sine(found.time)
    a, v = now.a * cos + now.v * sin, now.v * cos - now.a * sin
    hit, whole = found.hit & (left > 0), ~found.hit & ~found.cut & (left > 0)
    hit, found = _sharpen(groups, a, v, found, hit)
    read = np.repeat([group.clock.curves.passes for group in groups], [group.size for group in groups])
    passes = now.passes + read[:, None] * (left > 0)
    v, accepted, passes, fault = _decide_all(groups, a, v, found, hit, passes, now.fault, now.number)
    # Times are set, not added up, where something is due: rounding must not make a piece of no length.
    ends, refreshed = whole & (length >= left), whole & (length >= now.wait)
    t = jnp.where(ends, until, now.t + found.time)
    fresh, again, turns = _refreshment(coordinator, keys, now, refreshed)
    v = jnp.where(refreshed, fresh, v)
    wait = jnp.where(refreshed, again, jnp.maximum(now.wait - found.time, LEAST_WAIT))
    knots = RoundKnots(t[:, None], a.T[:, None], v.T[:, None], ((accepted | refreshed) & ~ends)[:, None])
    new = Step(
        a, v, t, wait, turns, now.number, now.draws + (left > 0), now.segments - refreshed, now.reach - found.time,
        now.site_events + accepted, now.planned, passes, fault,
    )  # fmt: skip
    over = accepted | (refreshed & (new.segments <= 0)) | (new.reach <= 0)
    return _begin_plans(coordinator, new, over & (t < until), until), knots


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
    velocity = jax.lax.cond(few, lambda: _turn_some(made, keys.turns, turns, now.v, refreshed), every)
    return velocity, QUARTER, turns + refreshed


def _turn_some(made, keys, turns, v, refreshed) -> Float[Array, "d C"]:
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
    return exponentials(uniforms(keys.share, number, draws, 1)[0]) / coordinator.dynamics.refresh_rate


def _begin_plans(coordinator: Coordinator, step: Step, new: Bool[Array, " C"], until) -> Step:
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


def _first_candidates(groups, coordinator: Coordinator, now: Step, length, live) -> Found:
    """Where the pieces end: by the curves of all sites, or by second-order bounds where those are poor."""
    clocks = [group.clock for group in groups]
    parts = [clock.curves.along(clock.potential, clock.dynamics, now.a, now.v, length) for clock in clocks]
    curve = RateCurve(jnp.concatenate([x.values for x in parts]), jnp.concatenate([x.error for x in parts]), length)
    u = uniforms(
        groups[0].keys[0], now.number, now.draws, CANDIDATES * DRAWN + UNIFORMS_IN_CELLS * curve.error.shape[0]
    )
    found = first_candidate(curve, u)
    poor = is_poor(curve) & live
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
            walk = functools.partial(second_order_candidate, coordinator.dynamics, a=a, v=v, remaining=remaining)
            ends.append(jax.lax.map(lambda site: walk(site[0], u=site[1]), (group.clock.potential, own)))  # noqa: B023
        every = Found(*(jnp.concatenate(x) for x in zip(*ends, strict=True)))
        first = jnp.argmin(every.time, 0)
        best = Found(*(jnp.take_along_axis(x, first[None], 0)[0] for x in every))._replace(site=first)
        return Found(*(x.at[index].set(y, mode="drop") for x, y in zip(found, best, strict=True)))

    return _in_turn(poor, min(POOR_LANES, lane_count(groups, length.shape[0])), serve, found)


def _sharpen(groups, a, v, found: Found, hit) -> tuple[Bool[Array, " C"], Found]:
    """The candidates that bounds at a point do not reject, where curves have them: there they cost less than the records."""
    place, most = 0, found.most
    for group in groups:
        if isinstance(group.clock.curves, ThirdOrder):
            waits = hit & (found.site >= place) & (found.site < place + group.size) & (found.threshold >= found.least)
            serve = functools.partial(_bound_some, group, place, a, v, found.site)
            bound = _in_turn(waits, min(SHARPENED, hit.shape[0]), serve, jnp.full_like(most, jnp.inf))
            # A bound that is not a number rejects nothing.
            most = jnp.where(bound < most, bound, most)
        place += group.size
    return hit & ~(found.threshold >= most), found._replace(most=most)


def _bound_some(group, place: int, a, v, sites, index, bounds):
    position, velocity = (x.at[:, index].get(mode="clip").T for x in (a, v))
    site = jnp.clip(sites.at[index].get(mode="clip") - place, 0, group.size - 1)

    def bound(curves: ThirdOrder, x, y):
        return curves.bound(group.clock.dynamics, x, y)[:, 0]

    known = _at_sites(bound, group.clock.curves, site, position, velocity)
    return bounds.at[index].set(known, mode="drop")


def _at_sites(function, stacked, site, *rows):
    """``function(part, *rows)`` with the part of each row's site, of stacked parts."""
    if jax.tree.leaves(stacked)[0].shape[0] == 1:
        return function(jax.tree.map(lambda x: x[0], stacked), *rows)
    parts = jax.tree.map(lambda x: x[site], stacked)
    return jax.vmap(lambda part, *row: function(part, *(x[None] for x in row))[0])(parts, *rows)


def lane_count(groups, chains: int) -> int:
    """How many chains are gathered at a time."""
    many = groups[0].clock.dim >= MANY_COLUMNS
    lanes = MORE_LANES if many else LANES
    if any(group.clock.curves.wide for group in groups):
        lanes = max(LANES, chains // (MORE_WIDE_SHARE if many else WIDE_SHARE))
    return min(chains, lanes)


def _decide_all(groups, a, v, found: Found, hit, passes, fault, number):
    """Decide the candidates by the records of their sites: new velocities, who accepted, passes and faults by site."""
    state, place = (v, jnp.zeros_like(hit), passes, fault), 0
    for group in groups:
        own = hit & (found.site >= place) & (found.site < place + group.size)
        serve = functools.partial(_decide_some, group, place, a, found, number)
        state = _in_turn(own, lane_count((group,), hit.shape[0]), serve, state)
        place += group.size
    return state


def _decide_some(group, place: int, a, found: Found, number, index, state):
    v, accepted, passes, fault = state
    position, velocity = (x.at[:, index].get(mode="clip").T for x in (a, v))
    some = Found(*gathered(index, tuple(found)))
    site = jnp.clip(some.site - place, 0, group.size - 1)
    gradient = _at_sites(lambda potential, x: potential.gradients(x), group.clock.potential, site, position)
    rate, squeeze = jnp.sum(gradient * velocity, -1), (some.least, some.most)
    yes, wrong = accept(some.threshold, rate, some.ceiling, jnp.isfinite(rate), squeeze)
    normal = unit(gradient)
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


# The engine ------------------------------------------------------------------------------------------------------------


MOST_FILLED = 0.5  # share of an accelerator's memory above which knots go to the host at once


def filled_share() -> float:
    """The share of the accelerator's memory that is in use."""
    found = jax.local_devices()[0].memory_stats()
    return found["bytes_in_use"] / found["bytes_limit"] if found else 1.0


class Reached(NamedTuple):
    """What the host must know after a chunk: iterations, the least time, events, most plans of a chain, any fault.

    The chunk's own program makes these numbers. One that came after it would wait on an accelerator for the chunk that is
    already under way behind it.
    """

    used: Any
    time: Any
    events: Any
    plans: Any
    faulty: Any


@functools.partial(compiled, graphs=True)
def _run_chunk(groups, coordinator, keys, step: Step, first, until, limit, rows: int):
    step, record, used = run_chunk(groups, coordinator, keys, step, until, limit, rows)
    events, plans = jnp.sum(step.site_events), jnp.max(step.number + 1 - first)
    return step, record, Reached(used, jnp.min(step.t), events, plans, jnp.any(step.fault))


class LockstepEngine(CompiledEngine):
    """Sites with dense clocks in this process (`lockstep`).

    On an accelerator the next chunk is under way while the host processes the last one; one that begins after the end of the
    block does nothing. Knots stay on the accelerator until they are read, as long as there is room: copying them takes many
    times longer than making them.
    """

    _ahead: tuple[Step, Record, Reached] | None = None

    @property
    def _runs_ahead(self) -> bool:
        return jax.default_backend() != "cpu"

    whole_plans = False

    def _start(self, state: State) -> None:
        self.selective = False
        self.progress = at_rest(self.federation.groups, self.coordinator, self.keys, state)

    def _start_block(self, until: float) -> None:
        self._ahead = None
        self.progress = begin_block(self.coordinator, self.keys, self.progress, jnp.asarray(float(until)))
        self._first = self.progress.number

    @Uncollected()
    def _run_chunk(self, until, limit):
        self.progress, record, reached = self._ahead or self._dispatch(until, limit)
        if self._runs_ahead:
            self._ahead = self._dispatch(until, limit)
        self._last = Reached(*jax.device_get(tuple(reached)))
        return record, self._last.used

    def _knots(self, record: Record, used: int) -> Chunk:
        if not self._runs_ahead:
            return record.chunk(used)
        knots = record.on_device(used)
        return knots.on_host() if filled_share() > MOST_FILLED else knots

    def _dispatch(self, until, limit):
        return _run_chunk(
            self.federation.groups, self.coordinator, self.keys, self.progress, self._first, until, limit, self.rows
        )  # fmt: skip

    def _reached(self, first: np.ndarray) -> tuple[float, int, int]:
        return float(self._last.time), int(self._last.events), int(self._last.plans)

    def _check_faults(self) -> None:
        if not self._last.faulty:
            return
        raise_faults([self.federation.names[i] for i in self.federation.order], np.asarray(self.progress.fault))

    @property
    @double_precision
    def state(self) -> State:
        """Where every chain is."""
        return state_of(self.progress)

    def _counts(self) -> np.ndarray:
        """Passes of each site; no violations, since every bound is proved."""
        counts = np.zeros((2, len(self.federation.names)), np.int64)
        counts[0, self.federation.order] = np.asarray(self.progress.passes).sum(1)
        return counts
