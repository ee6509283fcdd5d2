"""A run and its result: whole blocks, to a process time or to an effective sample size; also of a run that was saved."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from fedpdmc._jax.precision import double_precision
from fedpdmc.console.progress import Display, Tick, showing
from fedpdmc.console.warnings import warn
from fedpdmc.dynamics import QUARTER, first_waits
from fedpdmc.errors import BudgetSpent, InputError, LimitReached
from fedpdmc.members.site import DescribedSites, Site, hand_over, latents_at
from fedpdmc.models.mixture_prior import MixturePrior
from fedpdmc.models.user_function import check_unchanged, variables
from fedpdmc.results.archive import read
from fedpdmc.results.exactness_certificate import certificate
from fedpdmc.results.path_store import LEAST_DRAWS, MOST_DRAWS, DrawStore, RunState, SkeletonStore, Store
from fedpdmc.results.posterior import Posterior
from fedpdmc.results.skeleton import Block, Skeleton
from fedpdmc.results.verdict import STOP_ESS_PER_CHAIN, ConvergenceWarning
from fedpdmc.sampling.arguments import PRIOR_SITE, PriorSite, check_length, public_potential
from fedpdmc.sampling.defaults import Method, on_lines
from fedpdmc.sampling.engines.base import BlockMemory, Engine
from fedpdmc.sampling.factory import open_engine
from fedpdmc.sampling.laplace_reference import each_site
from fedpdmc.sampling.run_cost import (
    LATENT_REMEDY,
    REMEDY,
    USUAL_YIELD,
    CostEstimate,
    Distance,
    GivenUp,
    Unsuitable,
    counts,
    remedies,
    rounds_ahead,
)
from fedpdmc.sampling.run_state_arrays import (
    Position,
    check_ledger,
    identify,
    members_of,
    pack_choices,
    pack_position,
    unpack_choices,
    unpack_position,
    unpack_reference,
    versions,
)

DEFAULT_ESS = 1000.0
FIRST_BLOCK = 10.0  # process time, at least, of the first block of a run to an effective sample size
TURN_YIELD = 0.82  # effective samples of a turn on a good reference, at least
LEAST_TURNS = 6  # of the first block
# With private latents, by the largest standard deviation of a log spread.
LATENT_YIELD = ((0.2, 0.66), (np.inf, 0.55))
MOST_GROWTH = 4.0
MOST_JOINED = 500.0  # process time of a first block with turns, and of what is run together with the burn-in
MOST_BLOCKS = 40  # of a run to an effective sample size
MOST_LENGTH = 50  # of such a run by the few-rounds method, in first blocks
MOST_BLOCK = 50.0  # process time of a block in one process; in a run of more than `MOST_PIECES` of them a part of it
PLANS_PER_BLOCK = 5000  # of a chain: chains wait for each other at the end of a block
MOST_PIECES = 20  # blocks of equal length
LATENT_BLOCKS = 4  # the least number of blocks if sites have private latents, which are recorded at their ends
LATENT_BLOCK = 1.0  # process time, the least length of such blocks


class Goal(NamedTuple):
    """A process time that is reached in whole blocks."""

    begin: float
    until: float
    pieces: int  # blocks of equal length, where all knots are kept
    step: float  # length of the next block where they are not: it follows the rate of events, to bound memory

    @classmethod
    def to(cls, until: float, begin: float, pieces: int, memory: BlockMemory) -> Goal:
        """A goal before its first block."""
        return cls(begin, until, pieces, min((until - begin) / 64, memory.first))

    def next_stop(self, now: float, keep: str) -> float:
        """Process time at which all chains meet next."""
        if keep == "skeleton":
            done = round((now - self.begin) / (self.until - self.begin) * self.pieces) + 1
            # The last stop is set, not computed: rounding must not leave a piece after it.
            return self.until if done >= self.pieces else self.begin + (self.until - self.begin) * done / self.pieces
        return self.until if now + 1.5 * self.step >= self.until else now + self.step

    def after(self, plans: float, rounds: int, dim: int, memory: BlockMemory) -> Goal:
        """The goal with the length of the next block, given the plans and rounds of the last one."""
        made = max(plans, 1.0) * 8 * (2 * dim + 2) + memory.per_round * rounds
        return self._replace(step=self.step * float(np.clip(memory.most / made, 0.25, 4.0)))


def pieces(plans_per_time: float, length: float) -> int:
    """Division of a process time into blocks, for a chain with this many plans per unit of time."""
    return int(np.clip(plans_per_time * length / PLANS_PER_BLOCK, 1, MOST_PIECES))


def fewest(method: Method, length: float, before: float = 0.0) -> int:
    """The least number of blocks: not too few if sites record private latents at their ends, given the time before.

    In one process Ctrl-C drops the unfinished block, so none is long. A run over a network goes on from its store.
    """
    if not any(site.latents for site in method.own_sites):
        return 1 if method.elsewhere else int(np.clip(np.ceil(length / MOST_BLOCK), 1, MOST_PIECES))
    return int(np.clip(length / max(LATENT_BLOCK, before / LATENT_BLOCKS), 1, LATENT_BLOCKS))


def first_block(method: Method, duration: float | None, ess: float | None) -> float:
    """Process time of the first block: as requested, or as probably needed; with turns whole ones, and not too many."""
    chains, whitened, turns = method.chains, method.whitened, method.dynamics.turns
    target = ess or DEFAULT_ESS
    if duration is not None:
        length = float(duration)
    elif turns and whitened:
        latents = any(site.latents for site in method.sites)
        each = next(x for width, x in LATENT_YIELD if method.spread_width <= width) if latents else TURN_YIELD
        length = QUARTER * float(np.clip(np.ceil(target / (each * chains)), LEAST_TURNS, 100 * LEAST_TURNS))
    else:
        usual = target / (USUAL_YIELD * chains) if whitened else FIRST_BLOCK
        length = float(np.clip(usual, FIRST_BLOCK, 100 * FIRST_BLOCK))
    return min(length, MOST_JOINED) if turns else length


def joined_block(method: Method, duration: float | None, ess: float | None) -> float:
    """Process time that is run together with the burn-in."""
    return min(first_block(method, duration, ess), MOST_JOINED if method.elsewhere else MOST_BLOCK)


def ess_to_reach(method: Method, ess: float | None) -> float:
    """What was asked for; where the number of chains was left open, at least enough of each chain to tell if they agree."""
    wanted = DEFAULT_ESS if ess is None else float(ess)
    return max(wanted, STOP_ESS_PER_CHAIN * method.chains) if method.open_chains else wanted


def next_length(target: float, worst: float, span: float) -> tuple[float, float]:
    """Process time that an effective sample size still needs, and of the next block.

    ``worst`` is the effective sample size of the first ``span`` units. A block is at least a tenth of the run so far and at
    most three times as long, since the effective sample size of a short run is inaccurate.
    """
    need = span * (1.05 * target / max(worst, 1.0) - 1.0)
    return need, float(np.clip(need, 0.1 * span, (MOST_GROWTH - 1) * span))


# Errors that end a run, whose blocks so far are kept, and what is said then.
LIMITS = {BudgetSpent: "A privacy budget is spent", LimitReached: "A limit of the contract is reached"}


class Watch(Protocol):
    """Observes a run, to store it on disk and to report the state of the sites."""

    def block(self, block: Block | Skeleton) -> None:
        """A block has been kept."""

    def between_blocks(self, sampler: Sampler) -> None:
        """The run is between two blocks."""

    def status(self) -> str:
        """A few words on the sites, for the progress display."""
        ...

    def facts(self) -> dict[str, Any]:
        """Additional entries of the settings."""
        ...

    def privacy(self) -> dict[str, Any] | None:
        """What each site with a budget has granted and revealed."""
        ...


class Sampler:
    """A run and what has been kept of it; `extend` leaves this one as it is and returns the next posterior.

    ``watch.block(block)`` is called with every block that is kept, ``watch.between_blocks(sampler)`` before the first one
    and after each.
    """

    def __init__(self, method: Method, burn_in: float, keep: str, watch: Watch | None = None):
        self.method, self.keep, self.watch = method, keep, watch
        self.burn_in_time = burn_in
        # The prior of every parameter in words, and how coefficients are read, where they are known.
        self.described: dict[str, Any] = {"prior": []}
        self.goal: Goal | None = None
        # The cost of an abandoned burn-in before this run, and of this run's burn-in.
        self.given_up = self._cost = GivenUp()
        # The last posterior and its time: diagnostics are not computed twice.
        self._made: tuple[float, Posterior] | None = None
        self._proofs: list[dict[str, Any]] | None = None
        self._identity: dict[str, Any] | None = None
        self.engine, self.horizon = open_engine(method, burn_in)
        # Starts of the chains, in the parameters' own coordinates.
        self.origin = method.reference.to_x(np.asarray(self.engine.state.a))
        self.burn_in_events = np.zeros(method.chains, dtype=np.int64)
        # Private sites, and priors with scales, have many events by design, which say nothing about the reference.
        watched = method.few_rounds and self.horizon is None and method.mixture is None
        remedy = LATENT_REMEDY if any(site.latents for site in method.sites) else REMEDY
        self.distance = Distance(method.chains, method.dim, remedy, watched)
        self.estimate = CostEstimate(remedies(method), method.open_chains)
        flow = method.dynamics.flow
        origin = -burn_in if method.dynamics.turns else None
        self.store: Store = SkeletonStore(flow, origin=origin) if keep == "skeleton" else DrawStore(flow)

    def check_budget(self, until: float) -> None:
        """Refuse a run to a process time that a site cannot answer for, before it starts."""
        if self.horizon is not None:
            self.horizon.check(self.method.chains, self.engine.time, until)

    def burn_in(self, progress: bool, duration: float | None = None, ess: float | None = None) -> Sampler:
        """Run to process time zero and discard the path; returns this sampler, or one with another method.

        If the user left the dynamics open, the burn-in decides: if it shows that the posterior is too far from its
        reference, another method replaces it from the start. `sampling.defaults.on_lines` explains why that is exact.

        With turns, the first units of time towards ``duration`` or ``ess`` belong to the same block: plans reach beyond the
        burn-in, and no chain waits at its end for the slowest. The decision does not depend on what is kept.
        """
        method = self.method
        joined = method.few_rounds and method.dynamics.turns and self.horizon is None and self.keep == "skeleton"
        # Sites that remember have agreed to one method.
        self.distance.deciding = self.distance.active and self.method.open_dynamics and not self.engine.sites_remember
        try:
            with self._display(progress, "burn-in") as display:
                first = joined_block(method, duration, ess) if joined else 0.0
                latents = joined and any(site.latents for site in method.own_sites)
                self._set_goal(first, fewest(method, first + self.burn_in_time) if latents else 1)
                self._reach_goal(display)
            if self.distance.deciding or self.method.elsewhere:
                self.distance.judge_burn_in(float(np.mean(self.burn_in_events)), self.burn_in_time)
                self.distance.deciding = False
        except Unsuitable as found:
            return self._instead(str(found)).burn_in(progress, duration, ess)
        self.estimate.burn_in = self.engine.rounds
        return self

    def to_length(self, duration: float | None, ess: float | None, progress: bool) -> Posterior:
        """What is left to ``duration`` or to ``ess`` after the first block, and the posterior."""
        left = None if duration is None else float(duration) - max(self.engine.time, 0.0)
        if left is not None and left <= 0:
            return self._finish()
        return self._extend(left, None if left is not None else ess, progress)

    def _instead(self, reason: str) -> Sampler:
        """The sampler that replaces this one; if there is none, this one, which does not check again."""
        method = on_lines(self.method, reason, "in the burn-in")
        if method is None:
            self.method = self.method.replace(open_dynamics=False)
            return self
        better = Sampler(method, max(self.burn_in_time, method.burn_in(None, None)), self.keep, self.watch)
        better.given_up, better.described = self._cost, self.described
        return better

    def resume(self, progress: bool) -> bool:
        """Run to the goal that was set before; returns whether it was reached."""
        with self._display(progress, "resuming") as display:
            try:
                self._reach_goal(display)
            except tuple(LIMITS) as stopped:
                self._ends_early(stopped, 0.0)
                return False
        return True

    def _ends_early(self, stopped: BaseException, since: float) -> None:
        """Say where a run that was stopped ends; raise what stopped it if no block was kept."""
        if self.engine.time <= since:
            raise stopped
        why = LIMITS.get(type(stopped), "Interrupted")  # type: ignore[call-overload]
        on = f" {stopped}" if type(stopped) in LIMITS else " post = post.extend(...) continues from there."
        warn(
            f"{why}: the unfinished block is dropped, and the posterior ends at process time {self.engine.time:g}.{on}"
        )

    def _display(self, wanted: bool, title: str) -> AbstractContextManager[Display]:
        return showing(wanted, None if self.watch is None else self.watch.status, title)

    def position(self) -> Position:
        """Where the run is."""
        engine, burn_in = self.engine, np.asarray(self.burn_in_events)
        return Position(engine.state, engine.rounds, engine.asked, engine.passes, engine.violations, burn_in)

    def restore(self, position: Position) -> None:
        """Continue from where a run was."""
        self.engine.restore(position)
        self.burn_in_events = position.burn_in_events

    @double_precision
    def state(self) -> RunState | None:
        """The state from which the same sites and prior can continue; None if sites keep a part of it."""
        method = self.method
        if method.elsewhere:
            return None
        if self._identity is None:
            self._identity = identify(method.own_sites, method.mixture or method.prior, method.redistribution)
        choices, arrays = pack_choices(method)
        facts = {"burn_in": self.burn_in_time, "keep": self.keep, "given_up": list(self.given_up[:3])}
        arrays |= pack_position(self.position())
        arrays["given_up_passes"] = np.zeros(len(method.sites), np.int64) + self.given_up.passes
        return RunState(self._identity | choices | facts | {"versions": versions()}, arrays)

    @property
    def members(self) -> tuple[Site, ...]:
        """The sites in this process."""
        return () if self.method.elsewhere else self.method.own_sites

    def each_site(self, sites: Any) -> dict[str, Any] | None:
        """What each site in this process says by itself; None for sites on a network."""
        method = self.method
        return None if method.elsewhere else each_site(method.own_sites, method.prior, method.names)

    def extend(
        self, *, duration: float | None = None, ess: float | None = None, sites: Any = None, prior: Any = None,
        progress: bool = True,
    ) -> Posterior:  # fmt: skip
        """Go on by ``duration``, or until the worst ESS reaches ``ess``."""
        check_length(duration, ess)
        if sites is not None:
            if (state := self.state()) is None:
                remedy = "Leave it out: the connection has the sites."
                raise InputError("sites", "given for a study on a network", remedy)
            members_of(state, self.method.names, sites, prior)
        for site in self.method.own_sites:
            if site.model is not None:
                check_unchanged(site.model, site.dim, site.name)
        return self._extend(duration, ess, progress)

    def _extend(self, duration: float | None, ess: float | None, progress: bool) -> Posterior:
        following = copy.copy(self)
        following.engine, following.store = copy.copy(self.engine), copy.copy(self.store)
        with self._display(progress, "sampling") as display:
            try:
                if self.engine.sites_remember:
                    following._reach_goal(display)
                if duration is not None:
                    following.check_budget(following.engine.time + float(duration))
                    following._say_costs(float(duration), f"process time {self.engine.time + duration:.4g}", display)
                    following._advance(following.engine.time + float(duration), display)
                else:
                    following._until(ess_to_reach(self.method, ess), display)
            except (KeyboardInterrupt, *LIMITS) as stopped:
                following._ends_early(stopped, max(self.engine.time, 0.0))
        return following._finish()

    def _finish(self) -> Posterior:
        hand_over(self.method.own_sites, self.method.reference, self.engine)
        post = self.posterior()
        self.check_distance(min(post.ess().values()))
        if not post.verdict:
            warn(str(post.verdict), ConvergenceWarning)
        return post

    def _say_costs(self, length: float, goal: str, display: Display) -> None:
        method, time = self.method, self.burn_in_time + self.engine.time
        plans = self.engine.plans - method.first_plan - 1
        rounds = rounds_ahead(np.maximum(plans, 0), time, length, method.site_event_rate or 0.0)
        each = display.pace.seconds_per_round
        seconds = None if each is None else rounds * each
        display.foresee(self.estimate.tell(rounds, seconds, goal, self.distance.warned), seconds)

    def check_distance(self, ess: float | None = None) -> None:
        """Warn if the posterior has turned out too far from its reference for the few-rounds method to be efficient.

        ``ess`` is the worst effective sample size, where it is known.
        """
        events = float(np.mean(self.engine.events - self.burn_in_events))
        self.distance.judge(events, ess, max(self.engine.time, 0.0))

    def _tick(self, display: Display) -> Callable[[Tick], None]:
        # The display counts as the posterior does, including the search for the mode and an abandoned method.
        before = self.given_up.rounds + self.method.reference.rounds

        def tick(tick: Tick) -> None:
            display.tick(tick._replace(rounds=tick.rounds + before))
            if self.distance.deciding:
                made, planned = (int(np.sum(np.asarray(x))) for x in (self.engine.plans, self.engine.state.planned))
                self._cost = GivenUp(tick.rounds, made, planned, self.engine.passes)
            self.distance.tick(tick)

        return tick

    def _advance(self, until: float, display: Display) -> None:
        plans = self.engine.plans.mean() - self.method.first_plan
        rate = plans / max(self.burn_in_time + self.engine.time, 1e-9)
        length = until - self.engine.time
        self._set_goal(until, max(fewest(self.method, length, self.engine.time), pieces(rate, length)))
        self._reach_goal(display)

    def _set_goal(self, until: float, count: int) -> None:
        self.goal = Goal.to(until, self.engine.time, count, self.engine.memory)
        if self.watch is not None:
            self.watch.between_blocks(self)

    def _reach_goal(self, display: Display) -> None:
        """Whole blocks up to the goal, if there is one that has not been reached."""
        engine = self.engine
        if self.goal is not None:
            display.aim(self.goal.until)
        while self.goal is not None and engine.time < self.goal.until:
            burning, plans, rounds = engine.time < 0, float(engine.plans.sum()), engine.rounds
            stop = self.goal.next_stop(engine.time, self.keep)
            keep = self._keep if not burning else self._keep_since_zero if stop > 0 else lambda block: None
            engine.advance(stop, keep, self._tick(display))
            if stop <= 0:
                self.burn_in_events = engine.events
            made = float(engine.plans.sum()) - max(plans, 1.0)
            self.goal = self.goal.after(made, engine.rounds - rounds, self.method.dim, engine.memory)
            if self.watch is not None:
                self.watch.between_blocks(self)
            if display.visible and not burning:
                so_far = self.posterior()
                display.quality(min(so_far.ess().values()), max(so_far.rhat().values()))

    def _keep_since_zero(self, block: Block) -> None:
        """Keep what comes after the burn-in of a block with turns.

        Velocities change at events and at turns, whose number is known.
        """
        path, flow = block.skeleton(), self.method.dynamics.flow
        turns = np.floor((-block.begin - first_waits(path.chains)) / QUARTER) + 1
        self.burn_in_events = np.maximum(path.jumps(flow, 0.0) - turns.astype(np.int64), 0)
        self._keep(path.since(flow, 0.0))

    def _keep(self, block: Block | Skeleton) -> None:
        self.store.append(block)
        if self.watch is not None:
            self.watch.block(block)

    def _until(self, target: float, display: Display) -> None:
        """Append whole blocks, each of a length suggested by the ESS so far; the ESS is evaluated between blocks only."""
        if self.keep == "draws" and target > LEAST_DRAWS * self.method.chains:
            raise InputError(
                "ess",
                f"{target:g} with keep='draws', which keeps {LEAST_DRAWS} to {MOST_DRAWS} draws of each chain",
                "Ask for less, take more chains, or use keep='skeleton'.",
            )
        first = first_block(self.method, None, target)
        begin = max(self.engine.time, 0.0)
        for _ in range(MOST_BLOCKS + 1):
            length = need = first
            span = max(self.engine.time, 0.0)
            display.aim(span or length, target)
            if span > 0:
                found = self.posterior().ess()
                worst = min(found.values())
                self.check_distance(worst)
                display.quality(worst)
                if worst >= target:
                    return
                if self.distance.active and span - begin >= MOST_LENGTH * first:
                    break
                need, length = next_length(target, worst, span)
                display.aim(span + need, target)
            self._say_costs(need, f"an ESS of {target:,.0f}", display)
            fits, name = (np.inf, "") if self.horizon is None else self.horizon.longest(self.method.chains)
            if length > fits:
                # A last block whose length is fixed in advance and does not depend on its content.
                self.check_budget(span + 1e-3 * max(span, FIRST_BLOCK))
                warn(
                    f"The privacy budget of site {name!r} covers {fits:.4g} more process time on each of "
                    f"{self.method.chains} chains: the run ends with it.",
                )
                self._advance(span + fits, display)
                return
            self._advance(span + length, display)
        warn(
            f"The worst effective sample size is {worst:.0f}, not yet {target:.0f}, at process time "
            f"{max(self.engine.time, 0.0):.4g} ({min(found, key=lambda name: found[name])}). Use extend(), more chains, or "
            "another dynamics.",
        )

    @double_precision
    def posterior(self) -> Posterior:
        """The posterior of what has been drawn so far."""
        if self._made is not None and self._made[0] == self.engine.time:
            return self._made[1]
        method, engine, watch = self.method, self.engine, self.watch
        if self._proofs is None:
            self._proofs = certificate([site.name for site in method.sites], dict(engine.federation.clocks))
        found = counts(method, engine, self.given_up) | {
            "events": engine.events - self.burn_in_events,
            "certified": method.certified,
            "violations": engine.violations,
            "privacy": engine.federation.privacy or (None if watch is None else watch.privacy()),
        }
        settings = describe(method, engine) | self.described | ({} if watch is None else watch.facts())
        settings |= {"burn_in": self.burn_in_time, "keep": self.keep, "certificate": self._proofs}
        self._made = engine.time, Posterior(
            self.store, method.reference, method.dynamics, method.names, found, settings, self, method.variables,
            self.origin,
        )  # fmt: skip
        return self._made[1]


MOST_NAMED = 3  # parameters in the description of a mode


def describe(method: Method, engine: Engine) -> dict[str, Any]:
    """The choices of a run and how far it has come, as `Posterior.settings` has them."""
    narrow, choices = method.reference.narrow, engine.federation.choices
    # The member that walks with the prior for the coordinator; a site that happens to have its name is a site.
    walker = next((site.name for site in method.sites if isinstance(site, PriorSite)), None)
    extra = any(site.name == PRIOR_SITE for site in method.sites)
    return {
        "dynamics": repr(method.dynamics),
        "reference": method.reference_name,
        "reference_why": method.reference.why,
        # The parameter whose tail is wider than the reference, and by how much.
        "narrow": None if narrow is None else {"name": method.names[narrow[0]], "ratio": narrow[1]},
        "wide_starts": method.wide_starts,
        "modes": [mode | {"place": _place(method, mode)} for mode in method.reference.modes or ()],
        "modes_searched": method.reference.modes is not None,
        "control": method.control_name,
        "chosen": method.chosen,
        "prior_at": method.prior_at if method.prior is not None else "extra" if extra else "flat",
        "prior_site": walker,
        "redistribution": method.redistribution,
        "chains": method.chains,
        "segments": method.segments,
        "ended_by_arrival": float(
            np.asarray(engine.state.site_events).sum() / max((np.asarray(engine.plans) - method.first_plan).sum(), 1)
        ),
        "duration": max(engine.time, 0.0),
        "seed": method.seed,
        "bounds": method.bounds,
        "constraints": 0 if method.constraints is None else len(method.constraints[1]),
        "sites": [site.name for site in method.sites],
        # Which clock each site walks with and why; for remote sites this is not known here.
        "clocks": [{"site": site.name, **choices.get(site.name, {"clock": "at the site"})} for site in method.sites],
        "versions": versions(),
    }


def _place(method: Method, mode: dict[str, Any]) -> str:
    """The parameters at a mode that differ most from those at the centre of the reference."""
    away = np.abs(np.linalg.solve(np.asarray(mode["scale"]), np.asarray(mode["at"]) - np.asarray(mode["center"])))
    first = np.argsort(-away)[:MOST_NAMED]
    return ", ".join(f"{method.names[i]} = {mode['at'][i]:.3g}" for i in first if away[i] > 0.5 * away.max())


@double_precision
def load(path: str | Path) -> Posterior:
    """Read a posterior that `Posterior.save` wrote.

    It holds no records. With the state of its run it has the sites' derivatives, which `fedpdmc.assessment` needs for
    heterogeneity. To continue, give it the sites and the prior again: ``post.extend(ess=..., sites=sites, prior=prior)``.
    """
    post, state = read(path)
    if state is not None:
        post.run = SavedRun(post, state)
        try:
            made = unpack_reference(state.facts["reference"], state.arrays)
            post.reference = dataclasses.replace(post.reference, control=made.control, name=made.name)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            found = f"{path}, whose run has a state that cannot be read ({type(error).__name__})"
            raise InputError("load(path)", found, "Give a folder that Posterior.save wrote, whole.") from error
    return post


class SavedRun:
    """The run of a posterior that was read from an archive.

    Parameters
    ----------
    post : Posterior
    state : RunState
        Where its run was.
    """

    def __init__(self, post: Posterior, state: RunState):
        self.post, self._state = post, state

    def state(self) -> RunState:
        """Where the run is."""
        return self._state

    @property
    def members(self) -> tuple[Any, ...]:
        """None: an archive holds no records."""
        return ()

    def each_site(self, sites: Any) -> dict[str, Any] | None:
        """What each of the given sites says by itself; None without them."""
        if sites is None:
            return None
        prior = sites.prior if isinstance(sites, DescribedSites) else None
        prior = prior.normal if isinstance(prior, MixturePrior) else prior
        return each_site(list(sites), prior, self.post.names)

    def extend(
        self,
        *,
        duration: float | None = None,
        ess: float | None = None,
        sites: Any = None,
        prior: Any = None,
        progress: bool = True,
    ) -> Posterior:
        """Open the sites again, and continue by ``duration`` or to ``ess``."""
        check_length(duration, ess)
        if sites is None:
            raise InputError(
                "sites",
                "None, of a posterior that was read from disk without its records",
                "Give the sites and the prior that sample() was given: post.extend(..., sites=sites, prior=prior).",
            )
        if prior is None and isinstance(sites, DescribedSites):
            prior = sites.prior
        with showing(progress):
            return self._sampler(sites, prior).extend(duration=duration, ess=ess, progress=progress)

    @double_precision
    def _sampler(self, sites: Any, prior: Any) -> Sampler:
        """A sampler that is where the saved one was, with all its choices and the sites that were given.

        A site with a budget begins a new run in its ledger, with new random numbers; the observed time before is added to
        its report.
        """
        facts, arrays, post = self._state.facts, self._state.arrays, self.post
        names, dynamics, before = post.names, post.dynamics, post.privacy or {}
        mixture = prior if isinstance(prior, MixturePrior) else None
        members, prior, rate = members_of(self._state, names, sites, prior)
        choices, reference, control = unpack_choices(facts, arrays)
        walked = prior if facts["prior_at"] == "coordinator" else None
        method = Method(
            sites=members,
            dim=len(names),
            prior=prior,
            dynamics=dynamics,
            reference=reference,
            control=control,
            chains=post.chains,
            names=names,
            public=public_potential(members, walked, control, reference, dynamics, mixture),
            mixture=mixture,
            redistribution=rate,
            variables=variables(members, names),
            **choices,
        )
        for site in method.own_sites:
            if site.budget is not None:
                check_ledger(site, before[site.name]["run"])
        sampler = Sampler(method, facts["burn_in"], facts["keep"])
        sampler.restore(unpack_position(arrays))
        sampler.engine.set_latents(latents_at(method.own_sites, sampler.engine.time, method.chains))
        rounds, plans, segments = facts["given_up"]
        sampler.given_up = GivenUp(rounds, plans, segments, arrays["given_up_passes"])
        sampler.described = {key: post.settings[key] for key in ("prior", "effect_scale") if key in post.settings}
        sampler.store, sampler.origin = copy.copy(post.store), post.origin
        sampler.engine.federation.continue_accounts(before)
        return sampler
