"""All sites in one process: whole rounds compiled, no Python per event.

Sites of one family and padded size form a group, whose numbers are stacked and walked by one compiled step. With short
plans, chains do not wait for each other: a chain whose sites have all answered moves on and gets a new plan while others
still walk. If plans are long and costly to make, chains advance together.
The draws of a chain depend on its own plans and keys alone, so this changes no result.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key, UInt8, UInt32

from fedpdmc._jax.by_numpy import once
from fedpdmc._jax.compilation import compiled, on_device, strong_types
from fedpdmc._jax.garbage_collection import Uncollected
from fedpdmc._jax.precision import double_precision
from fedpdmc.clocks import Clock, LatentClock, Path, Walk, answer, follow, holding
from fedpdmc.clocks.base import reveal_first
from fedpdmc.console.progress import Tick
from fedpdmc.dynamics import Dynamics
from fedpdmc.enclosures import not_finite_along
from fedpdmc.errors import NotFinite, RunTooLong
from fedpdmc.plan import Arrival, Plan
from fedpdmc.potentials import Program
from fedpdmc.results.skeleton import Block, Chunk
from fedpdmc.sampling.coordinator import Coordinator, Itinerary, PublicKeys, RoundKnots, State
from fedpdmc.sampling.engines import one_round
from fedpdmc.sampling.engines.base import BlockMemory, Engine, Federation, raise_faults
from fedpdmc.sampling.engines.one_round import LastRequest, Round

LEAST_FILLED = 0.5  # share of a record that is knots, with which it is kept as it is


class Record(eqx.Module):
    """Rows of knots, chain after chain."""

    numbers: Float[Array, "C rows S n"]  # time and position of a knot side by side: one write for each chain and row
    velocities: (
        Float[Array, "C rows S d"] | UInt8[Array, "C rows S bytes"]
    )  # or the bits of their signs (`skeleton.signs`)
    valid: Bool[Array, "C rows S"]
    asked: Int[Array, "sites C rows"] | None = (
        None  # number of the plan asked about, −1 for none; None: every site always
    )

    @classmethod
    def empty(cls, rows: int, chains: int, dim: int, segments: int, signs: bool, sites: int | None = None) -> Record:
        """No knots yet. ``signs``: of velocities they are all that is kept; ``sites``: it is noted who was asked."""
        shape, asked = (chains, rows, segments), None if sites is None else jnp.full((sites, chains, rows), -1)
        velocities = jnp.zeros((*shape, -(-dim // 8)), jnp.uint8) if signs else jnp.zeros((*shape, dim))
        return cls(jnp.zeros((*shape, 1 + dim)), velocities, jnp.zeros(shape, bool), asked)

    def written(self, knots: RoundKnots, row: Int[Array, ""], asked: Int[Array, "sites C"] | None = None) -> Record:
        """The record with the knots of one round in the given row."""
        packed = self.velocities.dtype == jnp.uint8
        velocities = jnp.packbits(knots.v < 0, axis=-1, bitorder="little") if packed else knots.v
        numbers = jnp.concatenate([knots.t[..., None], knots.a], -1)
        return Record(
            lax.dynamic_update_index_in_dim(self.numbers, numbers, row, 1),
            lax.dynamic_update_index_in_dim(self.velocities, velocities, row, 1),
            lax.dynamic_update_index_in_dim(self.valid, knots.valid, row, 1),
            self.asked if asked is None else lax.dynamic_update_index_in_dim(self.asked, asked, row, 2),
        )

    def questions(self, rows: int, first: np.ndarray) -> list[np.ndarray] | None:
        """For each site the plans in the first rows that it was asked about, counted from each chain's ``first``."""
        if self.asked is None:
            return None
        asked = np.asarray(self.asked)[:, :, :rows]
        return [(site - first[:, None])[site >= 0] for site in asked]

    def on_device(self, rows: int) -> Chunk:
        """At least the first rows, where they were made: they are copied to the host when they are read.

        Half of the record, a quarter and so on, as rows allow, because every length needs its own compiled program.
        """
        kept = self.valid.shape[1]
        while rows <= -(-kept // 2) < kept:
            kept = -(-kept // 2)
        arrays: list[Any] = [
            (x if kept == x.shape[1] else x[:, :kept]).reshape(x.shape[0], -1, *x.shape[3:])
            for x in (self.numbers, self.velocities, self.valid)
        ]
        return Chunk(*arrays)

    def chunk(self, rows: int) -> Chunk:
        """The first rows as arrays of the skeleton."""
        numbers, velocities, valid = (
            np.asarray(x)[:, :rows].reshape(x.shape[0], rows * x.shape[2], *x.shape[3:])
            for x in (self.numbers, self.velocities, self.valid)
        )
        counts = np.count_nonzero(valid, 1)
        most = int(counts.max(initial=0))
        if most > LEAST_FILLED * self.valid.shape[1] * self.valid.shape[2]:
            return Chunk(numbers, velocities, valid)
        # A view would keep the whole record: of knots that are few, or mostly void, copies are kept.
        order = np.argsort(~valid, 1, kind="stable")[:, :most, None]
        numbers, velocities = (np.take_along_axis(x, order, 1) for x in (numbers, velocities))
        return Chunk(numbers, velocities, np.arange(most) < counts[:, None])


class Group(eqx.Module):
    """Sites whose clocks have the same structure and shapes, stacked along the first axis."""

    clock: Clock
    keys: UInt32[Array, "G C words"]  # the sites' secret keys, by chain
    columns: Int[Array, "G k"] | None  # the coordinates that each site is sent; None for all
    place: Int[Array, " G"]  # in the federation

    @property
    def size(self) -> int:
        """Number of sites."""
        return self.keys.shape[0]

    def each(self, function, *stacked):
        """Map ``function(clock, keys, …)`` over the sites, one at a time, on the shapes that a site alone would use."""
        everything = (self.clock, self.keys, *stacked)
        if self.size == 1:
            alone = function(*jax.tree.map(lambda x: x[0], everything))
            return jax.tree.map(lambda x: x[None], alone)
        return jax.lax.map(lambda args: function(*args), everything)


class LocalFederation(Federation):
    """Sites in this process.

    Parameters
    ----------
    names : sequence of str
    clocks : sequence of Clock
        One for each site, as `fedpdmc.members.run_coordinates.open_site` gives it.
    columns : sequence of arrays or None
        The coordinates that each site is sent.
    keys : sequence of arrays
        The sites' secret keys, by chain.
    chains : int
    choices : sequence of dict, optional
        Why each site has its clock (`fedpdmc.clocks.choose.ClockChoice.report`).
    """

    def __init__(self, names, clocks, columns, keys, chains: int, choices: Sequence[dict[str, Any]] = ()):
        self.names, self.columns, self.chains = tuple(names), list(columns), chains
        self.clocks: dict[str, Clock] = dict(zip(self.names, clocks, strict=True))
        self.choices = dict(zip(self.names, choices, strict=False))
        self._keys = list(keys)
        self.groups = _group(list(clocks), self.columns, self._keys)
        # For each site of the groups, one after the other, its place in the federation.
        self.order = np.concatenate([np.asarray(group.place) for group in self.groups])

    def ask(self, plans: Sequence[Plan | None]) -> list[Arrival | None]:
        """One round, site by site."""
        arrivals: list[Arrival | None] = []
        for (name, clock), keys, plan in zip(self.clocks.items(), self._keys, plans, strict=True):
            if plan is None:
                arrivals.append(None)
                continue
            arrival, walk = _answer(clock, keys, dataclasses.replace(plan, time=None))
            raise_faults([name], np.asarray(walk.fault)[None])
            arrivals.append(arrival)
        return arrivals


_answer = compiled(answer)


def _group(clocks, columns, keys) -> tuple[Group, ...]:
    members: dict[Any, list[int]] = {}
    for i, (clock, own) in enumerate(zip(clocks, columns, strict=True)):
        leaves, structure = jax.tree.flatten(clock)
        shape = (structure, tuple((x.shape, str(x.dtype)) for x in leaves), own is None)
        members.setdefault(shape, []).append(i)
    groups = []
    for index in members.values():
        own = None if columns[index[0]] is None else _stack(*(columns[i] for i in index))
        clock = jax.tree.map(_stack, *[clocks[i] for i in index])
        groups.append(Group(clock, _stack(*(keys[i] for i in index)), own, jnp.asarray(index)))
    return tuple(groups)


def _stack(*arrays) -> Array:
    """Stacked by NumPy: nothing is compiled for it."""
    return on_device(np.stack([np.asarray(array) for array in arrays]))


@once
def begin(groups: tuple[Group, ...], coordinator: Coordinator, state: State) -> Round:
    """A run before its first round."""
    chains, dim = state.a.shape
    s = coordinator.segments
    path = follow(
        coordinator.dynamics,
        Plan(state.number, state.a, jnp.zeros((chains, s)), jnp.zeros((chains, s, dim)), state.share),
    )
    none, never = jnp.zeros((chains, s), int), jnp.zeros(chains, bool)
    wait = None if state.turn is None else jnp.zeros((chains, s + 1))
    turns = coordinator.schedule(state, jnp.zeros(chains))
    held = None if state.scales is None else jnp.repeat(state.scales[:, None], s + 1, 1)
    itinerary = Itinerary(path, none, state.a, state.v, never, state.share, wait, turns, held)
    walks = tuple(jax.vmap(lambda c: c.idle(chains))(group.clock) for group in groups)
    requests = None
    if one_round.applies([group.columns for group in groups], coordinator):
        own = [dim if group.columns is None else group.columns.shape[1] for group in groups]
        requests = tuple(
            one_round.first_request(chains, s, size, (group.size,)) for size, group in zip(own, groups, strict=True)
        )
    return strong_types(Round(state, never, walks, itinerary, requests, jnp.array(False)))


def run_chunk(
    groups: tuple[Group, ...],
    coordinator: Coordinator,
    keys: PublicKeys,
    progress: Round,
    until: Float[Array, ""],
    limit: Int[Array, ""],
    rows: int,
) -> tuple[Round, Record, Int[Array, ""]]:
    """Up to ``limit`` iterations: chains that are ready move on and are planned, and every site takes a step.

    Returns the progress, the record of knots (one row for each iteration, ``rows`` at most) and the number of rows.
    """
    asked = sum(group.size for group in groups) if progress.requests is not None else None
    chains, dim = progress.state.a.shape
    empty = Record.empty(rows, chains, dim, coordinator.segments, coordinator.dynamics.unit_speed, asked)
    sites = Walkers(groups, coordinator)

    def unfinished(carry):
        now, _, row = carry
        return (row < limit) & ~now.broken & jnp.any(now.open | (now.state.t < until))

    def iteration(carry):
        now, record, row = carry
        now, knots = one_round.move_on(coordinator, now, sites, until)
        now, asked = one_round.plan_and_ask(coordinator, keys, now, sites, until)
        return now, record.written(knots, row, asked), row + 1

    return jax.lax.while_loop(unfinished, iteration, (progress, empty, jnp.array(0)))


class Walkers(eqx.Module):
    """The sites of this process as `one_round.SitesInRound`: each takes a step along its plans when it is asked."""

    groups: tuple[Group, ...]
    coordinator: Coordinator

    def ask(self, now: Round, new: Bool[Array, " C"], left: Float[Array, " C"]) -> tuple[Round, Any]:
        """Let every site walk on."""
        groups, dynamics, itinerary = self.groups, self.coordinator.dynamics, now.itinerary
        assert itinerary is not None
        requests, asked = None, None
        if now.requests is None:
            walks = _walk_on(groups, now.answers, itinerary.path, new, self.coordinator.segments > 1)
        else:
            walks, requests, asked = _ask_selected(groups, dynamics, now, itinerary, left, new)
        faulty = [jnp.any(walk.fault != 0) for walk in _walks(groups, walks)]
        broken = jnp.any(jnp.stack(faulty)) | jnp.any(new & ~jnp.isfinite(itinerary.path.horizon))
        return Round(now.state, now.open, walks, itinerary, requests, broken), asked

    def arrivals(self, now: Round) -> tuple[Arrival, Bool[Array, " C"]]:
        """A chain has all arrivals when all its walks are done."""
        assert now.itinerary is not None
        walks = _walks(self.groups, now.answers)
        done = jnp.all(jnp.concatenate([walk.done for walk in walks]), 0)
        each = [_arrival(group, walk) for group, walk in zip(self.groups, walks, strict=True)]
        arrivals = jax.tree.map(lambda *x: jnp.concatenate(x), *each)
        if self.coordinator.dynamics.draws:
            keys = jnp.concatenate([group.keys for group in self.groups])
            arrivals = reveal_first(arrivals, keys, now.itinerary.path.number, now.open & done)
        return arrivals, done

    def cut(self, answers, path: Path, elapsed: Float[Array, " C"], ready: Bool[Array, " C"]):
        """Latents go back to where their site was when the plan was cut."""
        walks = list(answers)
        for k, (group, walk) in enumerate(zip(self.groups, answers, strict=True)):
            if not isinstance(group.clock, LatentClock):
                continue
            if walk.times.shape[-1]:
                settled = jax.vmap(lambda clock, walk: clock.cut(walk, elapsed, ready))(group.clock, walk)
            else:
                # What has not changed is not written back.
                settled = group.each(lambda c, keys, w: c.settle(w, path, elapsed, ready, keys).settled, walk)
            walks[k] = eqx.tree_at(lambda w: w.settled, walk, settled)
        return tuple(walks)


def _walks(groups: Sequence[Group], states) -> list[Walk]:
    return [jax.vmap(lambda c, w: c.walk(w))(g.clock, w) for g, w in zip(groups, states, strict=True)]


def _ask_selected(groups, dynamics: Dynamics, now: Round, itinerary: Itinerary, left, new):
    """Ask the sites that must be asked about the new plans, and let all of them walk one step."""
    whole = one_round.to_the_end(itinerary, left)

    def one(clock: Clock, keys, state, request: LastRequest, own):
        path, walk = whole if own is None else whole.restricted(own), clock.walk(state)
        arrival = Arrival(walk.time, walk.rang, walk.mark)
        request, ask = one_round.consider(dynamics, request, arrival, path, left, new)
        return clock.step(clock.restart(state, ask, request.rest), request.rest, keys), request, ask

    parts = zip(groups, now.answers, now.requests or (), strict=True)
    walks, requests, asked = zip(
        *(group.each(one, walk, request, group.columns) for group, walk, request in parts), strict=True
    )
    return walks, requests, jnp.where(jnp.concatenate(asked), itinerary.path.number, -1)


def _walk_on(groups: tuple[Group, ...], walks, path: Path, new, to_the_end: bool):
    """Start on new plans and take one step, or all steps if making a plan costs more than letting chains wait.

    A site that has passed the earliest arrival found so far stops: it cannot be the first. No site learns of this.
    """
    if not to_the_end:
        return _steps(groups, walks, path, new)

    def unfinished(carry):
        walks, new = carry
        done = [walk.done for walk in _walks(groups, walks)]
        return jnp.any(new) | ~jnp.all(jnp.concatenate(done))

    # The first step is part of the loop, so that a step is compiled once.
    def step(carry):
        return _steps(groups, carry[0], path, carry[1]), jnp.zeros_like(new)

    return jax.lax.while_loop(unfinished, step, (walks, new))[0]


def _steps(groups: tuple[Group, ...], walks, path: Path, new) -> tuple:
    if sum(group.size for group in groups) > 1:
        # The earliest arrival found so far on each chain; infinite where none is, and where a plan is new.
        times = [jnp.where(w.done & w.rang & ~new, w.time, jnp.inf) for w in _walks(groups, walks)]
        path = dataclasses.replace(path, cap=jnp.min(jnp.concatenate(times), 0))
    if any(isinstance(group.clock, LatentClock) for group in groups):
        # The time before which no site has an event that is not known; zero where a plan is new.
        pairs = zip(groups, walks, strict=True)
        times = [jax.vmap(lambda c, w: c.reached(w, path))(group.clock, walk) for group, walk in pairs]  # noqa: B023
        path = dataclasses.replace(path, floor=jnp.where(new, 0.0, jnp.min(jnp.concatenate(times), 0)))
    return tuple(_step(group, walk, path, new) for group, walk in zip(groups, walks, strict=True))


def _step(group: Group, walks, path: Path, new):
    def one(clock: Clock, keys, state, own, place):
        own_path = path if own is None else path.restricted(own)
        clock = holding(clock, None if path.share is None else path.share[:, place])
        return clock.step(clock.restart(state, new, own_path), own_path, keys)

    return group.each(one, walks, group.columns, group.place)


def _arrival(group: Group, walk: Walk) -> Arrival:
    mark = walk.mark if group.clock.dynamics.flips else walk.normal
    if group.columns is not None:
        mark = jnp.take_along_axis(group.columns, mark, 1)
    return Arrival(walk.time, walk.rang, mark)


# The engine ------------------------------------------------------------------------------------------------------------


CHUNK_SECONDS = 0.25  # of one compiled call, about
KNOT_BYTES = 2**24  # of the knots of a chunk, at most
WIDE_KNOT_BYTES = 2**28  # the same on an accelerator
MOST_ITERATIONS = 1e9  # of a block

_run_chunk = compiled(run_chunk)
# Programs with private latents are large, and sample as fast if they are compiled quickly.
_run_chunk_of_latents = compiled(run_chunk, quickly=True)


@once
def _to_z(group: Group, a, walks):
    return group.each(lambda clock, _, walk: clock.potential.to_z(a, walk.settled), walks)


class CompiledEngine(Engine):
    """Sites in this process: many rounds are one compiled call.

    The first chunk is one iteration, so that progress is shown as soon as the chains move.
    """

    sites_remember = False
    whole_plans = True  # an iteration may add all knots of a chain's plan
    memory = BlockMemory(most=2**26)

    def __init__(self, federation: LocalFederation, coordinator: Coordinator, state: State, key: Key[Array, ""]):
        self.has_latents = any(isinstance(group.clock, LatentClock) for group in federation.groups)
        super().__init__(federation, coordinator, state, key)
        chains, dim = state.a.shape
        velocities = -(-dim // 8) if coordinator.dynamics.unit_speed else 8 * dim
        row_bytes = chains * (coordinator.segments if self.whole_plans else 1) * (9 + 8 * dim + velocities)
        room = KNOT_BYTES if jax.default_backend() == "cpu" else WIDE_KNOT_BYTES
        self.rows = int(np.clip(room // row_bytes, 4, 2**15))
        self.limit, self._compiled = 1, False

    def _start(self, state: State) -> None:
        self.progress = begin(self.federation.groups, self.coordinator, state)
        self._first_requests = self.progress.requests
        self.selective = self._first_requests is not None

    def _start_block(self, until: float) -> None:
        """No state of the sites is kept from one block to the next, so that a run can be continued between two blocks."""
        self.progress = dataclasses.replace(self.progress, requests=self._first_requests)

    @Uncollected()
    def _run_chunk(self, until: Float[Array, ""], limit: Int[Array, ""]) -> tuple[Record, Int[Array, ""]]:
        run = _run_chunk_of_latents if self.has_latents else _run_chunk
        self.progress, record, used = run(
            self.federation.groups, self.coordinator, self.keys, self.progress, until, limit, self.rows
        )
        return record, used

    def _knots(self, record: Record, used: int) -> Chunk:
        return record.chunk(used)

    def _reached(self, first: np.ndarray) -> tuple[float, int, int]:
        """Process time of the slowest chain, all events, and the most plans of a chain since its ``first``."""
        return self.time, int(self.events.sum()), int((self.plans - first).max())

    def _check_faults(self) -> None:
        federation, now = self.federation, self.progress
        walks = [group.clock.walk(state) for group, state in zip(federation.groups, now.answers, strict=True)]
        faults = np.concatenate([np.asarray(walk.fault) for walk in walks])
        try:
            raise_faults([federation.names[place] for place in federation.order], faults)
        except NotFinite as error:
            clock, where = federation.clocks[error.site], None
            potential = getattr(clock, "potential", None)
            # Known where all sites walk the same path.
            if now.requests is None and isinstance(potential, Program):
                place = federation.names.index(error.site)
                row, own = int(np.argmax(federation.order == place)), federation.columns[place]
                walk = jax.tree.map(lambda *x: np.concatenate([np.asarray(part) for part in x])[row], *walks)
                path = now.itinerary.path if own is None else now.itinerary.path.restricted(jnp.asarray(own))
                state = path.state(clock.dynamics, jnp.asarray(walk.segment), jnp.asarray(walk.offset))
                a, v = (np.asarray(x)[error.chain] for x in state)
                where = not_finite_along(potential.value, potential._program(clock.dynamics.flips), a, v)
            raise NotFinite(error.site, error.chain, where=where) from None
        if bool(now.broken):
            raise NotFinite("coordinator", 0)

    def _counts(self) -> np.ndarray:
        """Passes and violations of each site in this process, over all chains: (2, sites)."""
        counts = np.zeros((2, len(self.federation.names)), np.int64)
        for group, walks in zip(self.federation.groups, self.progress.answers, strict=True):
            both = group.clock.walk(walks).passes, group.clock.violations(walks)
            for row, count in zip(counts, both, strict=True):
                row[np.asarray(group.place)] = np.asarray(count).reshape(group.size, -1).sum(1)
        return counts

    def _latents(self, of_group: Callable[[Group, Any], Array]) -> dict[str, np.ndarray]:
        found = {}
        for group, walks in zip(self.federation.groups, self.progress.answers, strict=True):
            if isinstance(group.clock, LatentClock):
                own = np.asarray(of_group(group, walks))
                found |= {self.federation.names[place]: own[row] for row, place in enumerate(np.asarray(group.place))}
        return found

    @property
    def settled(self) -> dict[str, np.ndarray]:
        """Where the latents of the sites are, in their private coordinates."""
        return self._latents(lambda group, walks: walks.settled)

    @double_precision
    def set_latents(self, settled: dict[str, np.ndarray]) -> None:
        """Put latents to where they were at the end of a run that was saved."""
        super().set_latents(settled)
        if not settled:
            return
        walks = list(self.progress.answers)
        for k, group in enumerate(self.federation.groups):
            if isinstance(group.clock, LatentClock):
                own = [jnp.asarray(settled[self.federation.names[place]]) for place in np.asarray(group.place)]
                walks[k] = eqx.tree_at(lambda walk: walk.settled, walks[k], jnp.stack(own))
        self.progress = dataclasses.replace(self.progress, answers=tuple(walks))

    @property
    def passes(self) -> np.ndarray:
        """Passes over each site's records so far."""
        return (self._before + self._counts())[0]

    @property
    def violations(self) -> np.ndarray:
        """How often each site saw a rate above a bound that is not certified."""
        return (self._before + self._counts())[1]

    @double_precision
    def advance(self, until: float, keep: Callable[[Block], None], tick: Callable[[Tick], None]) -> None:
        """One block, all of it or nothing."""
        before, began, state, plans = self.progress, self.time, self.state, self.plans
        start = np.asarray(state.a), np.asarray(state.v)
        try:
            self._start_block(until)
            chunks, questions = self._chunks(until, began, tick)
            keep(Block(start, chunks, began, until))
        except BaseException:
            self.progress = before
            raise
        if until > 0 and self.has_latents:
            found = self._latents(lambda group, walks: _to_z(group, self.state.a, walks))
            self.latents += ((float(until), np.asarray(self.state.a), found),)
        rounds, asked = self._exchanges(questions, self.plans - plans)
        self.rounds, self.asked = self.rounds + rounds, self.asked + asked

    def _exchanges(self, questions: list[list[np.ndarray]], plans: np.ndarray) -> tuple[int, np.ndarray]:
        """Exchanges of a block, and by site its exchanges and plans.

        Chains that ask in the same of their plans share an exchange; a plan about which no site is asked needs none.
        """
        rounds, sites = int(plans.max(initial=0)), len(self.federation.names)
        if not self.selective:
            return rounds, np.full((sites, 2), (rounds, plans.sum())).T
        counts, everyone = np.zeros((2, sites), np.int64), np.zeros(0, np.int64)
        for site, *about in zip(self.federation.order, *questions, strict=True):
            asked = np.concatenate(about)
            counts[:, site] = len(np.unique(asked)), len(asked)
            everyone = np.union1d(everyone, asked)
        return len(everyone), counts

    def _chunks(self, until: float, began: float, tick) -> tuple[list[Chunk], list[list[np.ndarray]]]:
        chunks, questions, iterations, target, first = [], [], 0, jnp.asarray(float(until)), self.plans
        now = began
        while now < until:
            clock = time.perf_counter()
            record, used = self._run_chunk(target, jnp.asarray(self.limit))
            used = int(used)
            chunks.append(self._knots(record, used))
            if (asked := record.questions(used, first)) is not None:
                questions.append(asked)
            seconds = time.perf_counter() - clock
            self._check_faults()
            iterations += used
            self._pace(seconds, used)
            now, events, plans = self._reached(first)
            tick(Tick(began, now, until, events, self.rounds + plans, seconds))
            if iterations * (until - began) > MOST_ITERATIONS * max(now - began, 1e-300) and iterations > 4096:
                raise RunTooLong(
                    f"After {iterations} steps the slowest chain has come from process time {began:.3g} to "
                    f"{now:.3g} of {until:.3g}: the run would take over {MOST_ITERATIONS:.0e} steps. "
                    "Rescale the covariates, use reference='laplace', or ask for a shorter duration."
                )
        return chunks, questions

    def _pace(self, seconds: float, used: int) -> None:
        """Choose the next chunk's length so that it takes about a quarter of a second; the first may have been compiled."""
        if used == self.limit and self._compiled:
            self.limit = int(np.clip(self.limit * np.clip(CHUNK_SECONDS / max(seconds, 1e-9), 0.25, 4), 1, self.rows))
        self._compiled = True
