"""The engine for sites that are asked one message at a time: each round is a plan, an exchange and a move."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Key

from fedpdmc._jax.compilation import compiled, strong_types
from fedpdmc._jax.precision import double_precision
from fedpdmc.console.progress import Tick
from fedpdmc.errors import InputError, NotFinite
from fedpdmc.plan import Arrival, Plan
from fedpdmc.results.skeleton import Block, Chunk, side_by_side, signs
from fedpdmc.sampling.coordinator import Coordinator, Itinerary, State
from fedpdmc.sampling.engines import one_round
from fedpdmc.sampling.engines.base import BlockMemory, Engine, Federation, globalised
from fedpdmc.sampling.engines.one_round import LastRequest, Round

# How far each chain may be planned from its present state, given the end of the block.
Reach = Callable[[State, float], Float[Array, " C"]]


class _Unfinished(NamedTuple):
    """An unfinished block: its end, its knots so far, where the chains are, how far they were planned, and the cost so far.

    ``asked`` has for each site the exchanges that it took part in and the plans of single chains that it was sent.
    """

    until: float
    chunks: list[Chunk]
    now: Round
    plans: int
    rounds: int
    end: Float[Array, " C"]
    asked: np.ndarray


class _Line:
    """Shared by all copies of a run: the progress from which the sites may be asked next, and the block under way."""

    def __init__(self, tip: Round):
        self.tip = tip
        self.unfinished: _Unfinished | None = None


class RoundsEngine(Engine):
    """Sites that are asked one message at a time: on a network, under a privacy budget, or with a log.

    A site stores its answers, so a round that was sent is never planned again: an interrupted block is finished as planned
    before anything else, and of several copies only the last one that ran can continue.

    Parameters
    ----------
    federation, coordinator, state, key
        As of every `Engine`.
    reach : callable, optional
        ``reach(state, until)``: the largest horizon of each chain's plan, a function of what is known so far.
    """

    sites_remember = True
    # Arrays of a round have an overhead of about 4 kB, and a block must be short enough to be repeated.
    memory = BlockMemory(most=2**23, per_round=4096, first=10.0)

    def __init__(
        self,
        federation: Federation,
        coordinator: Coordinator,
        state: State,
        key: Key[Array, ""],
        reach: Reach | None = None,
    ):
        self.reach = reach
        super().__init__(federation, coordinator, state, key)

    def _start(self, state: State) -> None:
        self.selective = one_round.applies(self.federation.columns, self.coordinator)
        self.progress = Round(strong_types(state), jnp.zeros(state.t.shape, bool), None)
        self._line = _Line(self.progress)

    @double_precision
    def advance(self, until: float, keep: Callable[[Block], None], tick: Callable[[Tick], None]) -> None:
        """One block, all of it or nothing.

        After an interrupt or an error the next call finishes that block, to the end that it was given then, before it goes
        on to ``until``.
        """
        line = self._line
        if self.progress is not line.tip:
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
            self.progress, self.rounds, self.asked = done.now, self.rounds + done.rounds, self.asked + done.asked
            line.tip, line.unfinished = self.progress, None
            if self.time < until:
                line.unfinished = self._block(until)

    def _block(self, until: float) -> _Unfinished:
        """A block before its first round: nothing is kept of the sites from one block to the next."""
        (chains, dim), segments, requests, answers = self.state.a.shape, self.coordinator.segments, None, None
        if self.selective:
            sizes = [dim if own is None else len(own) for own in self.federation.columns]
            requests = tuple(one_round.first_request(chains, segments, size) for size in sizes)
            silent = Arrival(jnp.zeros(chains), jnp.zeros(chains, bool), jnp.zeros(chains, int))
            answers = (silent,) * len(sizes)
        now = Round(self.state, jnp.zeros(chains, bool), answers, None, requests)
        return _Unfinished(float(until), [], now, 0, 0, self.state.t, np.zeros_like(self.asked))

    def _finish(self, line: _Line, tick: Callable[[Tick], None]) -> Block:
        began = self.time
        block = line.unfinished
        assert block is not None
        while float(np.min(np.asarray(block.now.state.t))) < block.until:
            clock = time.perf_counter()
            following, knots = self._round(block)
            # An interrupt may have left the knots of this round behind those that count.
            del block.chunks[block.plans :]
            block.chunks.append(knots)
            block = line.unfinished = following
            now, rounds = block.now.state, self.rounds + block.rounds
            reached, events = float(np.min(np.asarray(now.t))), int(np.asarray(now.events).sum())
            tick(Tick(began, reached, block.until, events, rounds, time.perf_counter() - clock))
        return Block((np.asarray(self.state.a), np.asarray(self.state.v)), block.chunks, began, block.until)

    def _round(self, block: _Unfinished) -> tuple[_Unfinished, Chunk]:
        """One exchange; chains that are finished send a plan of no length and stay where they are."""
        self.federation.until, end = block.until, self._end(block)
        now, knots, asked = one_round.one_round(self.coordinator, self.keys, block.now, self, end)
        exchanges = np.stack([asked.any(1), asked.sum(1)])
        following = block._replace(
            now=dataclasses.replace(now, itinerary=None), plans=block.plans + 1, end=end,
            rounds=block.rounds + bool(asked.any()), asked=block.asked + exchanges,
        )  # fmt: skip
        t, a, v, valid = (np.asarray(x) for x in (knots.t, knots.a, knots.v, knots.valid))
        return following, Chunk(side_by_side(t, a), signs(v) if self.coordinator.dynamics.unit_speed else v, valid)

    def ask(self, now: Round, new: Bool[Array, " C"], left: Float[Array, " C"]) -> tuple[Round, np.ndarray]:
        """One exchange, after which every chain has all arrivals; returns the chains that each site was asked about."""
        itinerary = now.itinerary
        assert itinerary is not None
        if not np.all(np.isfinite(np.asarray(itinerary.path.horizon))):
            raise NotFinite("coordinator", 0)
        if now.requests is not None:
            return self._ask_selected(now, itinerary, new, left)
        plan = itinerary.plan
        if self.federation.needs_time:
            plan = dataclasses.replace(plan, time=now.state.t)
        arrivals = jax.tree.map(lambda *x: np.stack(x), *self.federation.exchange(plan))
        return dataclasses.replace(now, answers=arrivals), np.tile(np.asarray(new), (len(self.federation.names), 1))

    def _ask_selected(self, now: Round, itinerary: Itinerary, new, left) -> tuple[Round, np.ndarray]:
        """One exchange with the sites whose arrivals are no longer valid; the others are sent nothing."""
        requests, plans, asked, arrivals = [], [], [], []
        for own, old, last in zip(self.federation.columns, now.requests or (), now.answers, strict=True):
            columns = None if own is None else jnp.asarray(own)
            request, plan, about = _consider(self.coordinator, old, last, itinerary, columns, left, new)
            requests.append(request)
            asked.append(np.asarray(about))
            plans.append(plan if asked[-1].any() else None)
        answers = self.federation.ask(plans) if np.any(asked) else [None] * len(plans)
        for own, last, about, answer in zip(self.federation.columns, now.answers, asked, answers, strict=True):
            if answer is not None:
                fresh = globalised(answer, own)
                pairs = ((fresh.time, last.time), (fresh.rang, last.rang), (fresh.mark, last.mark))
                last = Arrival(*(jnp.asarray(np.where(about, np.asarray(x), np.asarray(y))) for x, y in pairs))
            arrivals.append(last)
        return dataclasses.replace(now, answers=tuple(arrivals), requests=tuple(requests)), np.asarray(asked)

    def arrivals(self, now: Round) -> tuple[Arrival, Bool[Array, " C"]]:
        """Every chain has those of all sites."""
        selected = now.requests is not None
        arrivals = jax.tree.map(lambda *x: jnp.stack(x), *now.answers) if selected else now.answers
        return arrivals, jnp.ones(now.open.shape, bool)

    def cut(self, answers, path, elapsed, ready):
        """Sites elsewhere go back by themselves: the next plan says where."""
        return answers

    def _end(self, block: _Unfinished) -> Float[Array, " C"]:
        """How far each chain is planned: to the end of the block, or as far as it may be.

        If arrivals stay valid from plan to plan, an end is kept until its chain has reached it, so that sites are not asked
        for a little more at every plan.
        """
        state, end = block.now.state, jnp.full(block.now.state.t.shape, block.until)
        if self.reach is not None:
            end = jnp.minimum(end, state.t + self.reach(state, block.until))
        return jnp.where(state.t < block.end, jnp.minimum(block.end, end), end) if self.selective else end


@compiled
def _consider(coordinator: Coordinator, request: LastRequest, arrival: Arrival, itinerary: Itinerary, own, left, new):
    """What a site is asked now: the request, the plan that is sent, and the chains that it is of."""
    path = one_round.to_the_end(itinerary, left)
    path = path if own is None else path.restricted(own)
    request, asked = one_round.consider(coordinator.dynamics, request, arrival, path, left, new)
    rest = request.rest
    plan = Plan(
        itinerary.path.number,
        jnp.where(asked[:, None], rest.start[:, 0], 0.0),
        jnp.where(asked[:, None], rest.duration, 0.0),
        jnp.where(asked[:, None, None], rest.velocity, 0.0),
    )
    return request, plan, asked
