"""A run and what is kept of it: whole blocks, to a process time or to an effective sample size."""

from __future__ import annotations

import copy
from collections.abc import Callable
from importlib import metadata
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from fedpdmc._jax.precision import double_precision
from fedpdmc.console.progress import Display, Tick
from fedpdmc.console.warnings import warn
from fedpdmc.errors import BudgetSpent, InputError, LimitReached
from fedpdmc.results.certificate import certificate
from fedpdmc.results.path_store import LEAST_DRAWS, MOST_DRAWS, DrawStore, SkeletonStore, Store
from fedpdmc.results.posterior import Posterior
from fedpdmc.results.run_state import RunState
from fedpdmc.results.skeleton import Block
from fedpdmc.results.verdict import ConvergenceWarning
from fedpdmc.sampling.budget_horizon import Pace
from fedpdmc.sampling.cost_estimate import CostEstimate, rounds_ahead
from fedpdmc.sampling.engines.base import message_bytes
from fedpdmc.sampling.engines.compiled import Run
from fedpdmc.sampling.engines.compiled_rounds import LocalFederation
from fedpdmc.sampling.engines.in_process_private import GuardedFederation
from fedpdmc.sampling.engines.rounds import Rounds
from fedpdmc.sampling.members import PRIOR_SITE
from fedpdmc.sampling.reference_warning import USUAL_YIELD, Distance, Unsuitable
from fedpdmc.sampling.run_position import Position, pack_choices, pack_position
from fedpdmc.sampling.same_sites import identify, members_of
from fedpdmc.sampling.settings import Method, on_lines
from fedpdmc.sites.site import Site, local_columns
from fedpdmc.validation import positive

DEFAULT_ESS = 1000.0
FIRST_BLOCK = 10.0
MOST_GROWTH = 4.0
# Limits of a run to an effective sample size: its blocks, and for the few-rounds method times its first block.
MOST_BLOCKS, MOST_STRETCH = 40, 50
# With keep="draws" a block is cut so that its knots stay within this many bytes.
BLOCK_BYTES = 2**26
# Rounds one by one: what the arrays of a round weigh beside their numbers, and a block that long runs can afford.
ROUND_BYTES, ROUNDS_BLOCK_BYTES = 4096, 2**23
PLANS_PER_BLOCK, MOST_PIECES = 5000, 20
# What ends a run for good, with what it has got to.
LIMITS = (BudgetSpent, LimitReached)


def check_length(duration: float | None, ess: float | None) -> None:
    """At most one of them, and positive."""
    if duration is not None and ess is not None:
        raise InputError("duration, ess", "both", "Give one of them.")
    for name, value in (("duration", duration), ("ess", ess)):
        if value is not None:
            positive(name, value)


class Watch(Protocol):
    """Follows a run, to keep it on disk and to say how the sites are."""

    def block(self, block: Block) -> None:
        """A block has been kept."""

    def stands(self, sampler: Sampler) -> None:
        """The run stands between two blocks."""

    def status(self) -> str:
        """A few words on the sites, for the progress display."""
        ...

    def facts(self) -> dict[str, Any]:
        """What the settings should say beside the rest."""
        ...

    def privacy(self) -> dict[str, Any] | None:
        """What each site with a budget has granted and revealed."""
        ...


class Goal(NamedTuple):
    """A stretch of whole blocks: from where to where, in how many pieces, and the present length of a block."""

    begin: float
    until: float
    pieces: int
    step: float


class GivenUp(NamedTuple):
    """What a burn-in that was given up has cost: rounds, plans and segments of all chains, passes of each site."""

    rounds: int
    plans: int
    segments: int
    passes: np.ndarray


class Sampler:
    """A run and what has been kept of it; `extend` leaves this one as it is and returns the next posterior.

    ``watch.block(block)`` and ``watch.stands(sampler)`` are called with every block that is kept, and whenever the run
    stands between two blocks.
    """

    def __init__(self, method: Method, burn_in: float, keep: str, watch: Watch | None = None):
        self.method, self.keep, self.watch = method, keep, watch
        self.burn_in_time = burn_in
        self.goal: Goal | None = None
        # What a burn-in has cost that was given up before this run, and what this one's has cost so far.
        self.given_up = self._cost = GivenUp(0, 0, 0, np.zeros(len(method.sites), np.int64))
        # The posterior that was made last, and when: its diagnostics are not made twice.
        self._made: tuple[float, Posterior] | None = None
        federation = method.federation()
        start = method.start(burn_in)
        # Where the chains set out, in the parameters' own coordinates.
        self.origin = np.asarray(method.reference.to_x(start.a))
        parts = method.coordinator(burn_in), start, jax.random.fold_in(jax.random.key(method.seed), 1)
        self._proofs: list[dict[str, Any]] | None = None
        self._identity: dict[str, Any] | None = None
        self.guarded = federation if isinstance(federation, GuardedFederation) else None
        self.pace: Pace | None = None
        if federation.accounts:
            self.pace = Pace(method.dynamics, method.dim, lambda: federation.accounts, -burn_in)
        self.run: Run | Rounds
        if isinstance(federation, LocalFederation):
            self.run = Run(federation, *parts)
        else:
            self.run = Rounds(federation, *parts, reach=self.pace)
        self.burn_in_events = np.zeros(method.chains, dtype=np.int64)
        few_rounds = method.whitened and method.control_name == "quadratic" and method.dynamics.flow.rotating
        # Private sites object by design: their excess flips say nothing of the reference.
        self.distance = Distance(method.chains, method.dim) if few_rounds and self.pace is None else None
        self.estimate = CostEstimate(self._remedies())
        flow = method.dynamics.flow
        self.store: Store = SkeletonStore(flow) if keep == "skeleton" else DrawStore(flow)

    def _longest(self) -> tuple[float, str]:
        """The process time that every site's budget still covers, and the site with the tightest one."""
        return (float("inf"), "") if self.pace is None else self.pace.longest(self.method.chains)

    def check_budget(self, until: float) -> None:
        """Refuse a run to a process time that a site's privacy budget does not cover, before it starts.

        What has been promised is kept: the horizons see to it that it is not used up on the way.
        """
        if self.pace is None or until <= self.pace.promised:
            return
        length, (fits, name) = until - self.run.time, self._longest()
        if length > fits:
            raise InputError(
                "duration",
                f"{length:.4g} process time on each of {self.method.chains} chains, burn-in included",
                f"The privacy budget of site {name!r} covers {fits:.4g}: ask for less, use fewer chains, or see "
                "`fedpdmc privacy plan`.",
            )
        self.pace.promised = until

    def _end_with_budget(self, span: float, fits: float, name: str, display: Display) -> None:
        """A last block as long as the budget covers: decided before it, so what it will show has no part in it."""
        self.check_budget(span + 1e-3 * max(span, FIRST_BLOCK))
        warn(
            f"The privacy budget of site {name!r} covers {fits:.4g} more process time on each of "
            f"{self.method.chains} chains: the run ends with it.",
        )
        self._advance(span + fits, display)

    def burn_in(self, progress: bool) -> Sampler:
        """Run to process time zero and keep nothing; returns this sampler, or the one that turned out better.

        Where nobody said which dynamics, the burn-in decides: if it shows that the posterior is too far from its reference,
        another method takes its place from the start. `fedpdmc.sampling.settings.on_lines` says why that is exact.
        """
        try:
            if self.distance is not None:
                self.distance.deciding = self._may_switch
            with self._display(progress, "burn-in") as display:
                self._set_goal(0.0, 1)
                self._reach_goal(display)
            if self.distance is not None and (self.distance.deciding or self._elsewhere):
                self.distance.judge_burn_in(float(np.mean(self.run.events)), self.burn_in_time)
                self.distance.deciding = False
        except Unsuitable as found:
            return self._instead(str(found)).burn_in(progress)
        return self

    def _instead(self, reason: str) -> Sampler:
        """The sampler that takes this one's place; this one, which will not ask again, if there is none."""
        method = on_lines(self.method, reason, "in the burn-in")
        if method is None:
            self.method = self.method._replace(open_dynamics=False)
            return self
        better = Sampler(method, self.burn_in_time, self.keep, self.watch)
        better.given_up = self._cost
        return better

    @property
    def _may_switch(self) -> bool:
        """Sites in this process can be opened anew; those elsewhere have agreed to one method."""
        return self.method.open_dynamics and self.distance is not None and isinstance(self.run, Run)

    def resume(self, progress: bool) -> bool:
        """Reach the goal that was set before; returns whether that could be done."""
        with self._display(progress, "resuming") as display:
            try:
                self._reach_goal(display)
            except LIMITS as stopped:
                self._ends_early(stopped, 0.0)
                return False
        return True

    def _ends_early(self, stopped: BaseException, since: float) -> None:
        """Say where a run that was stopped ends; raise what stopped it if it has got nowhere."""
        if self.run.time <= since:
            raise stopped
        reasons = {BudgetSpent: "A privacy budget is spent", LimitReached: "A limit of the contract is reached"}
        why = reasons.get(type(stopped), "Interrupted")
        on = "" if type(stopped) in reasons else " post = post.extend(...) goes on from there."
        warn(
            f"{why}: the unfinished block is dropped, and the posterior ends at process time {self.run.time:g}.{on}",
        )

    def _display(self, wanted: bool, title: str) -> Display:
        return Display(wanted, title, None if self.watch is None else self.watch.status)

    def position(self) -> Position:
        """Where the run stands."""
        run = self.run
        return Position(run.state, run.rounds, run.asked, run.passes, run.violations, np.asarray(self.burn_in_events))

    def restore(self, position: Position) -> None:
        """Stand where a run stood."""
        self.run.restore(position)
        self.burn_in_events = position.burn_in_events

    @double_precision
    def state(self) -> RunState | None:
        """All that it takes to go on with the same sites and prior; None where sites elsewhere keep a part of it."""
        method = self.method
        if method.sites[0].federation is not None:
            return None
        if self._identity is None:
            self._identity = identify(method.sites, method.prior, method.redistribution)
        choices, arrays = pack_choices(method)
        facts = {"burn_in": self.burn_in_time, "keep": self.keep, "given_up": list(self.given_up[:3])}
        arrays |= pack_position(self.position()) | {"given_up_passes": np.asarray(self.given_up.passes)}
        return RunState(self._identity | choices | facts | {"versions": _versions()}, arrays)

    def _check_same(self, sites: Any, prior: Any) -> None:
        """That these are the sites and the prior of this run, which has them already."""
        if (state := self.state()) is None:
            raise InputError("sites", "given for a study on a network", "Leave it out: the connection has the sites.")
        members_of(state, self.method.names, sites, prior)

    def extend(
        self,
        *,
        duration: float | None = None,
        ess: float | None = None,
        sites: Any = None,
        prior: Any = None,
        progress: bool = True,
    ) -> Posterior:
        """Go on by ``duration``, or until the worst ESS reaches ``ess``."""
        check_length(duration, ess)
        if sites is not None:
            self._check_same(sites, prior)
        following = copy.copy(self)
        following.run, following.store = copy.copy(self.run), self.store.copy()
        with self._display(progress, "sampling") as display:
            try:
                if isinstance(self.run, Rounds):
                    following._reach_goal(display)
                if duration is not None:
                    following.check_budget(following.run.time + float(duration))
                    following._foresee(float(duration), f"process time {self.run.time + duration:.4g}", display)
                    following._advance(following.run.time + float(duration), display)
                else:
                    following._until(DEFAULT_ESS if ess is None else float(ess), display)
            except (KeyboardInterrupt, *LIMITS) as stopped:
                following._ends_early(stopped, max(self.run.time, 0.0))
        post = following.posterior()
        following.judge(min(post.ess().values()))
        if not post.verdict:
            warn(str(post.verdict), ConvergenceWarning)
        return post

    @property
    def _elsewhere(self) -> bool:
        return self.method.sites[0].federation is not None

    def _remedies(self) -> str | None:
        """What to do about many rounds; None where rounds cost little and the user has chosen the dynamics."""
        elsewhere = self._elsewhere
        if not (elsewhere or self.method.open_dynamics or self.method.chosen):
            return None
        where = " in the contract" if elsewhere else ""
        lines = 'kind = "ZigZag" in the contract; ' if elsewhere else "dynamics=fedpdmc.ZigZag(); "
        lines = lines if self.method.dynamics.flow.rotating else ""
        return (
            f"What may help: {lines}more chains{where}, which share every round (there are {self.method.chains}); a smaller "
            "ess or duration; parameters in which the posterior is nearer to a Gaussian (logarithms of scales, effects that "
            "are standardised, columns that are centred)."
        )

    def _foresee(self, length: float, goal: str, display: Display) -> None:
        """Say what it will cost to go on by a process time."""
        method, time = self.method, self.burn_in_time + self.run.time
        plans = self.run.plans - method.first_plan - 1
        rounds = rounds_ahead(np.maximum(plans, 0), time, length, method.objections or 0.0)
        each = display.seconds_per_round
        seconds = None if each is None else rounds * each
        far = self.distance is not None and self.distance.told
        display.foresee(self.estimate.tell(rounds, seconds, goal, far), seconds)

    def judge(self, ess: float | None = None) -> None:
        """Say so if the posterior has turned out too far from its reference for the few-rounds method to be wise.

        ``ess`` is the worst effective sample size, where it is known.
        """
        if self.distance is not None:
            objections = float(np.mean(self.run.events - self.burn_in_events))
            self.distance.judge(objections, ess, max(self.run.time, 0.0))

    def _tick(self, display: Display) -> Callable[[Tick], None]:
        # The display counts as the posterior does: the search for the mode and a method that was given up included.
        before = self.given_up.rounds + self.method.reference.rounds

        def tick(tick: Tick) -> None:
            display.tick(tick._replace(rounds=tick.rounds + before))
            if self.distance is not None:
                if self.distance.deciding:
                    self._cost = GivenUp(
                        tick.rounds, int(self.run.plans.sum()), int(self.run.planned.sum()), self.run.passes
                    )
                self.distance.tick(tick)

        return tick

    def _advance(self, until: float, display: Display) -> None:
        # Chains wait for each other at the end of a block: few blocks, of many plans each.
        plans = (
            (self.run.plans.mean() - self.method.first_plan)
            / max(self.burn_in_time + self.run.time, 1e-9)
            * (until - self.run.time)
        )
        self._set_goal(until, int(np.clip(plans / PLANS_PER_BLOCK, 1, MOST_PIECES)))
        self._reach_goal(display)

    def _set_goal(self, until: float, pieces: int) -> None:
        step = (until - self.run.time) / 64
        self.goal = Goal(self.run.time, until, pieces, min(step, FIRST_BLOCK) if isinstance(self.run, Rounds) else step)
        if self.watch is not None:
            self.watch.stands(self)

    def _reach_goal(self, display: Display) -> None:
        """Whole blocks up to the goal, if there is one that has not been reached."""
        if self.goal is not None:
            display.aim(self.goal.until)
        while self.goal is not None and self.run.time < self.goal.until:
            burning, plans, rounds = self.run.time < 0, float(self.run.plans.sum()), self.run.rounds
            self.run.advance(self._next_stop(self.goal), self._forget if burning else self._keep, self._tick(display))
            if burning:
                self.burn_in_events = self.run.events
            made = max(float(self.run.plans.sum()) - max(plans, 1.0), 1.0) * 8 * (2 * self.method.dim + 2)
            most = BLOCK_BYTES
            if isinstance(self.run, Rounds):
                made, most = made + ROUND_BYTES * (self.run.rounds - rounds), ROUNDS_BLOCK_BYTES
            self.goal = self.goal._replace(step=self.goal.step * float(np.clip(most / made, 0.25, 4.0)))
            if self.watch is not None:
                self.watch.stands(self)
            if display.visible and not burning:
                so_far = self.posterior()
                display.quality(min(so_far.ess().values()), max(so_far.rhat().values()))

    def _forget(self, block: Block) -> None:
        pass

    def _keep(self, block: Block) -> None:
        self.store.append(block)
        if self.watch is not None:
            self.watch.block(block)

    def _next_stop(self, goal: Goal) -> float:
        """Process time at which all chains meet next; with keep='draws' it follows the rate of events, to bound memory."""
        now = self.run.time
        if self.keep == "skeleton":
            done = round((now - goal.begin) / (goal.until - goal.begin) * goal.pieces)
            return goal.begin + (goal.until - goal.begin) * (done + 1) / goal.pieces
        return goal.until if now + 1.5 * goal.step >= goal.until else now + goal.step

    def _until(self, target: float, display: Display) -> None:
        """Append whole blocks, each as long as the ESS so far suggests, and look at the ESS between them only."""
        if self.keep == "draws" and target > LEAST_DRAWS * self.method.chains:
            raise InputError(
                "ess",
                f"{target:g} with keep='draws', which keeps {LEAST_DRAWS} to {MOST_DRAWS} draws of each chain",
                "Ask for less, take more chains, or use keep='skeleton'.",
            )
        first, begin = FIRST_BLOCK, max(self.run.time, 0.0)
        if self.method.whitened:
            first = float(np.clip(target / (USUAL_YIELD * self.method.chains), FIRST_BLOCK, 100 * FIRST_BLOCK))
        for _ in range(MOST_BLOCKS + 1):
            length = need = first
            span = max(self.run.time, 0.0)
            display.aim(span or length, target)
            if span > 0:
                found = self.posterior().ess()
                worst = min(found.values())
                self.judge(worst)
                display.quality(worst)
                if worst >= target:
                    return
                if self.distance is not None and span - begin >= MOST_STRETCH * first:
                    break
                need = span * (1.05 * target / max(worst, 1.0) - 1.0)
                display.aim(span + need, target)
                length = float(np.clip(need, 0.1 * span, (MOST_GROWTH - 1) * span))
            self._foresee(need, f"an ESS of {target:,.0f}", display)
            fits, name = self._longest()
            if length > fits:
                self._end_with_budget(span, fits, name, display)
                return
            self._advance(span + length, display)
        warn(
            f"The worst effective sample size is {worst:.0f} of the {target:.0f} asked for at process time "
            f"{max(self.run.time, 0.0):.4g} ({min(found, key=lambda name: found[name])}). Use extend(), more chains, or "
            "another dynamics.",
        )

    @double_precision
    def posterior(self) -> Posterior:
        """What has been drawn so far."""
        if self._made is not None and self._made[0] == self.run.time:
            return self._made[1]
        method, rounds = self.method, self.run.rounds
        counts = {
            "rounds": rounds + self.given_up.rounds + method.reference.rounds,
            "messages": [
                2 * (int(exchanges) + self.given_up.rounds + self._reference_rounds(site))
                for site, exchanges in zip(method.sites, self.run.asked[0], strict=True)
            ],
            "bytes": [
                self._bytes(site, int(plans)) for site, plans in zip(method.sites, self.run.asked[1], strict=True)
            ],
            "events": self.run.events - self.burn_in_events,
            "gradient_evaluations": self.run.passes + self.given_up.passes,
            "certified": method.certified,
            "violations": self.run.violations,
            "privacy": self._privacy(),
        }
        self._made = self.run.time, Posterior(
            self.store, method.reference, method.dynamics, method.names, counts, self._settings(), self,
            method.variables, self.origin,
        )  # fmt: skip
        return self._made[1]

    def _privacy(self) -> dict[str, Any] | None:
        if self.guarded is not None:
            return self.guarded.privacy or None
        return None if self.watch is None else self.watch.privacy()

    def _reference_rounds(self, site: Site) -> int:
        reference = self.method.reference
        return reference.rounds if site.name in (reference.bytes or {}) else 0

    def _bytes(self, site: Site, plans: int) -> int:
        method = self.method
        columns = local_columns(site, method.opening(site))
        sent = method.dim if columns is None else len(columns)
        if self.run.federation.bytes is not None:
            return int(self.run.federation.bytes[self.run.federation.names.index(site.name)])
        made = (method.reference.bytes or {}).get(site.name, 0)
        if self.given_up.plans:
            made += sum(
                message_bytes(self.given_up.plans, self.given_up.segments, sent, False, method.redistribution > 0)
            )
        share = method.redistribution > 0
        # Sites that are not always asked are sent the last velocity too, for what is not planned yet.
        segments = plans * (method.segments + 1) if self.run.spares else int(self.run.planned.sum())
        return made + sum(message_bytes(plans, segments, sent, method.dynamics.flips, share))

    def _prior_at(self) -> str:
        if self.method.prior is not None:
            return self.method.prior_at
        return "extra" if any(site.name == PRIOR_SITE for site in self.method.sites) else "flat"

    def _certificate(self) -> list[dict[str, Any]]:
        """What is proved of the sites' event times, made once."""
        if self._proofs is None:
            federation: Any = self.run.federation if self.guarded is None else self.guarded.plain
            clocks = federation.clocks if isinstance(federation, LocalFederation) else {}
            self._proofs = certificate([site.name for site in self.method.sites], clocks)
        return self._proofs

    def _settings(self) -> dict[str, Any]:
        method = self.method
        extra = {} if self.watch is None else self.watch.facts()
        return extra | {
            "dynamics": repr(method.dynamics),
            "reference": method.reference_name,
            "control": method.control_name,
            "chosen": method.chosen,
            "prior_at": self._prior_at(),
            "redistribution": method.redistribution,
            "chains": method.chains,
            "segments": method.segments,
            "objected": float(self.run.objections.sum() / max((self.run.plans - method.first_plan).sum(), 1)),
            "burn_in": self.burn_in_time,
            "duration": max(self.run.time, 0.0),
            "seed": method.seed,
            "bounds": method.bounds,
            "keep": self.keep,
            "sites": [site.name for site in method.sites],
            "certificate": self._certificate(),
            "versions": _versions(),
        }


def _versions() -> dict[str, str]:
    return {name: metadata.version(name) for name in ("fedpdmc", "jax", "jaxlib", "numpy", "equinox")}
