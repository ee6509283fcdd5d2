"""The engine for sites that are asked one message at a time: each round is a plan, an exchange and a move."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from fedpdmc._jax.compilation import compiled
from fedpdmc._jax.precision import double_precision
from fedpdmc.console.progress import Tick
from fedpdmc.errors import InputError, NotFinite
from fedpdmc.results.skeleton import Block, Chunk, side_by_side, signs
from fedpdmc.sampling.coordinator import Coordinator, Itinerary, PublicKeys, State
from fedpdmc.sampling.engines import pending_arrivals, selective_requests
from fedpdmc.sampling.engines.base import BlockMemory, Engine, Federation
from fedpdmc.sampling.engines.pending_arrivals import Kept
from fedpdmc.sampling.run_state_arrays import Position

# How far each chain may be planned from its present state, given the end of the block.
Reach = Callable[[State, float], Float[Array, " C"]]


class _Unfinished(NamedTuple):
    """An unfinished block: its end, its knots so far, the state of the chains, and the cost so far.

    Where only some sites are asked, ``kept`` is what is known of each, ``end`` how far each chain was planned last, and
    ``asked`` for each site the exchanges that it took part in and the plans of single chains that it was sent.
    """

    until: float
    chunks: list[Chunk]
    state: State
    plans: int
    rounds: int
    kept: tuple[Kept, ...] | None
    end: Float[Array, " C"]
    asked: np.ndarray


class _Line:
    """Shared by all copies of a run: the state from which the sites may be asked next, and the block under way."""

    def __init__(self, tip: State):
        self.tip = tip
        self.unfinished: _Unfinished | None = None


class RoundsEngine(Engine):
    """Sites that are asked one message at a time: on a network, under a privacy budget, or with a log.

    A site stores its answers, so a round that was sent is never planned again: an interrupted block is finished as planned
    before anything else, and of several copies only the last one that ran can continue.

    Parameters
    ----------
    federation : Federation
    coordinator : Coordinator
    state : State
        Where the chains start; their process time is minus the burn-in.
    key : key
        The coordinator's randomness.
    reach : callable, optional
        ``reach(state, until)``: the largest horizon of each chain's plan, a function of what is known so far.
    """

    sites_remember = True
    # Arrays of a round have an overhead of about 4 kB, and a block must be short enough to be repeated.
    memory = BlockMemory(most=2**23, per_round=4096, first=10.0)

    @double_precision
    def __init__(
        self,
        federation: Federation,
        coordinator: Coordinator,
        state: State,
        key: Key[Array, ""],
        reach: Reach | None = None,
    ):
        self.federation, self.coordinator, self.reach = federation, coordinator, reach
        self.keys = PublicKeys.of(key, state.a.shape[0])
        self.selective = selective_requests.applies(federation.columns, coordinator)
        self._begin_at(state, 0, np.zeros((2, len(federation.names)), np.int64))

    @double_precision
    def restore(self, position: Position) -> None:
        """Continue from where a run was between two blocks; the sites report their passes."""
        self._begin_at(position.chains, position.rounds, position.asked)

    def _begin_at(self, state: State, rounds: int, asked: np.ndarray) -> None:
        # Strong types, as the compiled steps return them: they are then compiled once.
        self._state: State = jax.tree.map(lambda x: jax.lax.convert_element_type(x, x.dtype), state)
        # Serial exchanges; of each site those that it took part in, and the plans of single chains that it was sent.
        self.rounds, self.asked = rounds, asked
        self._line = _Line(self._state)

    @property
    def state(self) -> State:
        """Where every chain is."""
        return self._state

    @property
    def passes(self) -> np.ndarray:
        """Passes over each site's records so far, zero for sites that do not report them."""
        return self.federation.evaluations

    @double_precision
    def advance(self, until: float, keep: Callable[[Block], None], tick: Callable[[Tick], None]) -> None:
        """One block, all of it or nothing.

        After an interrupt or an error the next call finishes that block, to the end that it was given then, before it goes
        on to ``until``.
        """
        line = self._line
        if self._state is not line.tip:
            raise InputError(
                "extend",
                "a posterior whose run has gone on since",
                "The sites have answered later plans: extend the last posterior of this run.",
            )
        if line.unfinished is None and self.time < until:
            line.unfinished = self._block(until)
        while line.unfinished is not None:
            block = self._finish(line, tick)
            keep(block)
            done = line.unfinished
            self._state, self.rounds, self.asked = done.state, self.rounds + done.rounds, self.asked + done.asked
            line.tip, line.unfinished = self._state, None
            if self.time < until:
                line.unfinished = self._block(until)

    def _block(self, until: float) -> _Unfinished:
        """A block before its first round: nothing is kept of the sites from one block to the next."""
        (chains, dim), kept = self._state.a.shape, None
        if self.selective:
            kept = pending_arrivals.nothing_kept(self.federation.columns, chains, self.coordinator.segments, dim)
        return _Unfinished(float(until), [], self._state, 0, 0, kept, self._state.t, np.zeros_like(self.asked))

    def _finish(self, line: _Line, tick: Callable[[Tick], None]) -> Block:
        began = self.time
        now = line.unfinished
        assert now is not None
        while float(np.min(np.asarray(now.state.t))) < now.until:
            clock = time.perf_counter()
            following, knots = self._round(now)
            # An interrupt may have left the knots of this round behind those that count.
            del now.chunks[now.plans :]
            now.chunks.append(knots)
            now = line.unfinished = following
            state = now.state
            reached, events = float(np.min(np.asarray(state.t))), int(np.asarray(state.events).sum())
            rounds = self.rounds + now.rounds
            tick(Tick(began, reached, now.until, events, rounds, time.perf_counter() - clock))
        return Block((np.asarray(self._state.a), np.asarray(self._state.v)), now.chunks, began, now.until)

    def _round(self, now: _Unfinished) -> tuple[_Unfinished, Chunk]:
        """One exchange; chains that are finished send a plan of no length and stay where they are."""
        state, end = now.state, self._end(now)
        itinerary = plan_ahead(self.coordinator, state, self.keys, end)
        if not np.all(np.isfinite(np.asarray(itinerary.path.horizon))):
            raise NotFinite("coordinator", 0)
        kept, sent, going = now.kept, None, state.t < end
        if kept is None:
            plan = itinerary.plan
            if self.federation.needs_time:
                plan = dataclasses.replace(plan, time=state.t)
            self.federation.until = now.until
            arrivals = jax.tree.map(lambda *x: np.stack(x), *self.federation.exchange(plan))
            about = np.tile(np.asarray(going), (len(self.federation.names), 1))
        else:
            left = jnp.maximum(end - state.t, 0.0)
            kept, about = pending_arrivals.ask(self.federation, self.coordinator, itinerary, kept, left, going)
            arrivals, sent = pending_arrivals.stacked(kept, self.federation.columns)
        state, knots, elapsed = finish_round(self.coordinator, state, itinerary, arrivals, sent, end, going)
        if kept is not None and elapsed is not None:
            kept = pending_arrivals.later(kept, elapsed)
        asked = now.asked + np.stack([about.any(1), about.sum(1)])
        following = now._replace(
            state=state, plans=now.plans + 1, rounds=now.rounds + bool(about.any()), kept=kept, end=end, asked=asked
        )
        t, a, v, valid = (np.asarray(x) for x in (knots.t, knots.a, knots.v, knots.valid))
        return following, Chunk(side_by_side(t, a), signs(v) if self.coordinator.dynamics.unit_speed else v, valid)

    def _end(self, now: _Unfinished) -> Float[Array, " C"]:
        """How far each chain is planned: to the end of the block, or as far as it may be.

        If arrivals stay valid from plan to plan, an end is kept until its chain has reached it, so that sites are not asked
        for a little more at every plan.
        """
        t, end = now.state.t, jnp.full(now.state.t.shape, now.until)
        if self.reach is not None:
            end = jnp.minimum(end, t + self.reach(now.state, now.until))
        return end if now.kept is None else jnp.where(t < now.end, jnp.minimum(now.end, end), end)


finish_round = compiled(selective_requests.finish_round)


@compiled
def plan_ahead(coordinator: Coordinator, state: State, keys: PublicKeys, end: Float[Array, " C"]) -> Itinerary:
    """The plans from a state, each chain up to its end."""
    return coordinator.plan_ahead(state, keys, end)
