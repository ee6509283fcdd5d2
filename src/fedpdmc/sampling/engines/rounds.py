"""The engine for sites that are asked one message at a time, and how far such a run may go on a privacy budget."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Key

from fedpdmc._jax.compilation import compiled, strong_types
from fedpdmc._jax.precision import double_precision
from fedpdmc.console.progress import Tick
from fedpdmc.dynamics import Dynamics
from fedpdmc.errors import BudgetSpent, InputError, NotFinite
from fedpdmc.members.private_site import PrivateSite, usual_speed
from fedpdmc.plan import Arrival, Plan
from fedpdmc.privacy.accountant import AccountStatus
from fedpdmc.results.skeleton import Block, Chunk, side_by_side, signs
from fedpdmc.sampling.coordinator import Coordinator, Itinerary, State
from fedpdmc.sampling.engines import one_round
from fedpdmc.sampling.engines.base import BlockMemory, Engine, Federation, with_all_marks
from fedpdmc.sampling.engines.one_round import LastRequest, Round

# How far each chain may be planned from its present state, given the end of the block.
Reach = Callable[[State, float], Float[Array, " C"]]


class _Unfinished(NamedTuple):
    """An unfinished block, its knots so far, and their cost."""

    until: float
    chunks: list[Chunk]
    now: Round
    plans: int
    rounds: int
    end: Float[Array, " C"]  # how far the chains were planned
    asked: np.ndarray  # of each site: exchanges, and plans of single chains


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
        now, asked = one_round.plan_and_ask(self.coordinator, self.keys, block.now, self, end)
        now, knots = one_round.move_on(self.coordinator, now, self, end)
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
                fresh = with_all_marks(answer, own)
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


# Sites with a privacy budget ---------------------------------------------------------------------------------------------


LEAST_SLACK = 0.05  # margin of a budget over the process time itself
LEAST_SLACK_ROTATING = 0.25  # the same on rotations, where the path length is random
SHARE = 0.8  # of the slack, that further arrivals may use in expectation
LONGEST = 32.0  # process time of a plan: a site refuses those that may take too much work


class PrivateSites(Federation):
    """Sites in this process that are charged for their answers, opened for a run."""

    def __init__(self, sites: Mapping[str, PrivateSite]):
        self.sites, self.names = dict(sites), tuple(sites)
        self.columns = [site.columns for site in sites.values()]
        self.choices = {name: {"clock": "public proposals", "why": "a privacy budget"} for name in sites}

    def ask(self, plans: Sequence[Plan | None]) -> list[Arrival | None]:
        """An arrival is charged before it is seen, and a site that is not asked is not charged."""
        pairs = zip(self.sites.values(), plans, strict=True)
        return [None if plan is None else site.answer(plan) for site, plan in pairs]

    @property
    def accounts(self) -> list[AccountStatus]:
        """The account of each site: sites that share one have equal parts of the rest."""
        places = [(site.ledger.path, site.dataset) for site in self.sites.values()]
        pairs = zip([site.status for site in self.sites.values()], places, strict=True)
        return [status._replace(remaining=status.remaining / places.count(place)) for status, place in pairs]

    @property
    def privacy(self) -> dict[str, Any]:
        """What each site has granted and revealed."""
        return {name: site.report() for name, site in self.sites.items()}

    def continue_accounts(self, privacy: dict[str, Any]) -> None:
        """Add the observed time before this process continued the run."""
        for name, site in self.sites.items():
            site.observed_before = privacy[name]["observed"]


class BudgetHorizon:
    """How far a run with private sites may go, and how far its chains are planned.

    A round that ends in an arrival wastes the time for which other sites were observed beyond it: at most the horizon H on
    every chain. Silent rounds waste nothing. So with slack s, what is left of a budget beyond the process time still to
    run, a horizon below ``s/(2C)`` always leaves slack: on lines a run whose budget covers its process time never runs out,
    whatever the sites do.

    Parameters
    ----------
    dynamics : Dynamics
    dim : int
        Number of parameters.
    accounts : callable
        The present accounts of all private sites.
    begin : float
        Process time at which the chains start.
    """

    def __init__(self, dynamics: Dynamics, dim: int, accounts: Callable[[], Sequence[AccountStatus]], begin: float):
        self.dynamics, self.dim, self.accounts, self.begin = dynamics, dim, accounts, begin
        # The process time that the run has been promised: the present block must leave enough for the rest.
        self.promised = begin
        self.speed = usual_speed(dynamics, dim)
        self.margin = 1 + (LEAST_SLACK if dynamics.unit_speed else LEAST_SLACK_ROTATING)

    def longest(self, chains: int) -> tuple[float, str]:
        """The process time that every chain can still be given, and the site that sets it."""
        tightest = min(self.accounts(), key=lambda site: site.remaining)
        return tightest.remaining / (self.margin * self.speed * chains), tightest.site

    def check(self, chains: int, now: float, until: float) -> None:
        """Refuse a run to a process time that a site's privacy budget does not cover, before it starts.

        A run that is accepted can be completed: horizons are chosen so that the budget is not used up before.
        """
        if until <= self.promised:
            return
        fits, name = self.longest(chains)
        if until - now > fits:
            raise InputError(
                "duration",
                f"{until - now:.4g} process time on each of {chains} chains, burn-in included",
                f"The privacy budget of site {name!r} covers {fits:.4g}: ask for less, use fewer chains, or see "
                "`fedpdmc privacy plan`.",
            )
        self.promised = until

    def __call__(self, state: State, until: float):
        """How far each chain is planned from its present state."""
        t = np.asarray(state.t)
        to_run = np.maximum(max(until, self.promised) - t, 0.0)
        sites = self.accounts()
        slack = min(site.remaining for site in sites) - self.speed * to_run.sum()
        going = max(int((t < until).sum()), 1)
        if slack <= 0:
            raise BudgetSpent(
                f"What is left of a privacy budget does not cover the {to_run.sum():.4g} of process time to come: "
                "the block is dropped (code BUDGET_SPENT)."
            )
        excess = self.speed * sum(site.dim * site.excess for site in sites)
        ran = float((t - self.begin).sum())
        arrivals = max(excess, float(np.asarray(state.events).sum()) / ran if ran > 0 else 0.0)
        # An arrival wastes half a horizon of every site's time, or less.
        horizon = min(
            1 / arrivals,
            2 * SHARE * slack / (self.speed * arrivals * max(float(to_run.sum()), 1e-300)),
            slack / (2 * going * self.speed),
            LONGEST,
        )
        return jnp.full(t.shape, horizon)
