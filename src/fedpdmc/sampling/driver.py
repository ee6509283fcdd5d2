"""A run and its result: whole blocks, to a process time or to an effective sample size."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from fedpdmc._jax.precision import double_precision
from fedpdmc.console.progress import Display, Tick
from fedpdmc.console.warnings import warn
from fedpdmc.errors import BudgetSpent, InputError, LimitReached
from fedpdmc.members.latent_handover import hand_over
from fedpdmc.results.exactness_certificate import certificate
from fedpdmc.results.path_store import LEAST_DRAWS, MOST_DRAWS, DrawStore, SkeletonStore, Store
from fedpdmc.results.posterior import Posterior
from fedpdmc.results.run_state import RunState
from fedpdmc.results.skeleton import Block, Skeleton
from fedpdmc.results.verdict import ConvergenceWarning
from fedpdmc.sampling import block_length
from fedpdmc.sampling.arguments import check_length
from fedpdmc.sampling.block_length import FIRST_BLOCK, MOST_BLOCKS, MOST_LENGTH, Goal, ess_to_reach, next_length, pieces
from fedpdmc.sampling.communication_cost import GivenUp, counts
from fedpdmc.sampling.defaults import Method, check_functions_unchanged, on_lines
from fedpdmc.sampling.factory import open_engine
from fedpdmc.sampling.provenance import describe, versions
from fedpdmc.sampling.reference_warning import LATENT_REMEDY, REMEDY, Distance, Unsuitable
from fedpdmc.sampling.remaining_cost import CostEstimate, remedies, rounds_ahead
from fedpdmc.sampling.run_state_arrays import Position, pack_choices, pack_position
from fedpdmc.sampling.same_sites import identify, members_of

# Errors that end a run; the blocks so far are kept.
LIMITS = (BudgetSpent, LimitReached)


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
        # The prior of every parameter in words, where it is known.
        self.prior_lines: list[str] = []
        self.goal: Goal | None = None
        # The cost of an abandoned burn-in before this run, and of this run's burn-in.
        self.given_up = self._cost = GivenUp.nothing(len(method.sites))
        # The last posterior and its time: diagnostics are not computed twice.
        self._made: tuple[float, Posterior] | None = None
        self._proofs: list[dict[str, Any]] | None = None
        self._identity: dict[str, Any] | None = None
        self.engine, self.pace = open_engine(method, burn_in)
        # Starts of the chains, in the parameters' own coordinates.
        self.origin = method.reference.to_x(np.asarray(self.engine.state.a))
        self.burn_in_events = np.zeros(method.chains, dtype=np.int64)
        # Private sites, and priors with scales, have many events by design, which say nothing about the reference.
        watched = method.few_rounds and self.pace is None and method.mixture is None
        remedy = LATENT_REMEDY if any(site.latents for site in method.sites) else REMEDY
        self.distance = Distance(method.chains, method.dim, remedy) if watched else None
        self.estimate = CostEstimate(remedies(method), method.open_chains)
        flow = method.dynamics.flow
        origin = -burn_in if method.dynamics.turns else None
        self.store: Store = SkeletonStore(flow, origin=origin) if keep == "skeleton" else DrawStore(flow)

    def _longest(self) -> tuple[float, str]:
        """The process time that every site's budget still covers, and the site with the tightest one."""
        return (float("inf"), "") if self.pace is None else self.pace.longest(self.method.chains)

    def check_budget(self, until: float) -> None:
        """Refuse a run to a process time that a site's privacy budget does not cover, before it starts.

        A run that is accepted can be completed: horizons are chosen so that the budget is not used up before.
        """
        if self.pace is None or until <= self.pace.promised:
            return
        length, (fits, name) = until - self.engine.time, self._longest()
        if length > fits:
            raise InputError(
                "duration",
                f"{length:.4g} process time on each of {self.method.chains} chains, burn-in included",
                f"The privacy budget of site {name!r} covers {fits:.4g}: ask for less, use fewer chains, or see "
                "`fedpdmc privacy plan`.",
            )
        self.pace.promised = until

    def _end_with_budget(self, span: float, fits: float, name: str, display: Display) -> None:
        """A last block as long as the budget covers. Its length is fixed in advance and does not depend on its content."""
        self.check_budget(span + 1e-3 * max(span, FIRST_BLOCK))
        warn(
            f"The privacy budget of site {name!r} covers {fits:.4g} more process time on each of "
            f"{self.method.chains} chains: the run ends with it.",
        )
        self._advance(span + fits, display)

    def burn_in(self, progress: bool, duration: float | None = None, ess: float | None = None) -> Sampler:
        """Run to process time zero and discard the path; returns this sampler, or one with another method.

        If the user left the dynamics open, the burn-in decides: if it shows that the posterior is too far from its
        reference, another method replaces it from the start. `sampling.defaults.on_lines` explains why that is exact.

        With turns, the first units of time towards ``duration`` or ``ess`` belong to the same block: plans reach beyond the
        burn-in, and no chain waits at its end for the slowest. The decision does not depend on what is kept.
        """
        joined = self.method.few_rounds and self.method.dynamics.turns and self.pace is None and self.keep == "skeleton"
        if self.distance is not None:
            self.distance.deciding = self._may_switch
        try:
            with self._display(progress, "burn-in") as display:
                first = block_length.joined_block(self.method, duration, ess) if joined else 0.0
                latents = joined and any(site.latents for site in self.method.own_sites)
                self._set_goal(first, block_length.fewest(self.method, first + self.burn_in_time) if latents else 1)
                self._reach_goal(display)
            if self.distance is not None and (self.distance.deciding or self.method.elsewhere):
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
            return self._finished()
        return self._extend(left, None if left is not None else ess, progress)

    def _instead(self, reason: str) -> Sampler:
        """The sampler that replaces this one; if there is none, this one, which does not check again."""
        method = on_lines(self.method, reason, "in the burn-in")
        if method is None:
            self.method = self.method.replace(open_dynamics=False)
            return self
        better = Sampler(method, max(self.burn_in_time, method.burn_in(None, None)), self.keep, self.watch)
        better.given_up, better.prior_lines = self._cost, self.prior_lines
        return better

    @property
    def _may_switch(self) -> bool:
        """Whether the sites can be opened again: remote sites have agreed to one method."""
        return self.method.open_dynamics and self.distance is not None and not self.engine.sites_remember

    def resume(self, progress: bool) -> bool:
        """Run to the goal that was set before; returns whether it was reached."""
        with self._display(progress, "resuming") as display:
            try:
                self._reach_goal(display)
            except LIMITS as stopped:
                self._ends_early(stopped, 0.0)
                return False
        return True

    def _ends_early(self, stopped: BaseException, since: float) -> None:
        """Say where a run that was stopped ends; raise what stopped it if no block was kept."""
        if self.engine.time <= since:
            raise stopped
        reasons = {BudgetSpent: "A privacy budget is spent", LimitReached: "A limit of the contract is reached"}
        why = reasons.get(type(stopped), "Interrupted")
        on = "" if type(stopped) in reasons else " post = post.extend(...) continues from there."
        warn(
            f"{why}: the unfinished block is dropped, and the posterior ends at process time {self.engine.time:g}.{on}",
        )

    def _display(self, wanted: bool, title: str) -> Display:
        return Display(wanted, title, None if self.watch is None else self.watch.status)

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
        arrays |= pack_position(self.position()) | {"given_up_passes": np.asarray(self.given_up.passes)}
        return RunState(self._identity | choices | facts | {"versions": versions()}, arrays)

    def _check_same(self, sites: Any, prior: Any) -> None:
        """Check that these are the sites and the prior of this run."""
        if (state := self.state()) is None:
            raise InputError("sites", "given for a study on a network", "Leave it out: the connection has the sites.")
        members_of(state, self.method.names, sites, prior)

    def extend(
        self, *, duration: float | None = None, ess: float | None = None, sites: Any = None, prior: Any = None,
        progress: bool = True,
    ) -> Posterior:  # fmt: skip
        """Go on by ``duration``, or until the worst ESS reaches ``ess``."""
        check_length(duration, ess)
        if sites is not None:
            self._check_same(sites, prior)
        check_functions_unchanged(self.method.own_sites)
        return self._extend(duration, ess, progress)

    def _extend(self, duration: float | None, ess: float | None, progress: bool) -> Posterior:
        following = copy.copy(self)
        following.engine, following.store = copy.copy(self.engine), self.store.copy()
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
        return following._finished()

    def _finished(self) -> Posterior:
        """The posterior, after the warnings about it."""
        hand_over(self.method.own_sites, self.method.reference, self.engine)
        post = self.posterior()
        self.check_distance(min(post.ess().values()))
        if not post.verdict:
            warn(str(post.verdict), ConvergenceWarning)
        return post

    def _say_costs(self, length: float, goal: str, display: Display) -> None:
        """Show the estimated cost of continuing by a process time."""
        method, time = self.method, self.burn_in_time + self.engine.time
        plans = self.engine.plans - method.first_plan - 1
        rounds = rounds_ahead(np.maximum(plans, 0), time, length, method.site_event_rate or 0.0)
        each = display.seconds_per_round
        seconds = None if each is None else rounds * each
        far = self.distance is not None and self.distance.told
        display.foresee(self.estimate.tell(rounds, seconds, goal, far), seconds)

    def check_distance(self, ess: float | None = None) -> None:
        """Warn if the posterior has turned out too far from its reference for the few-rounds method to be efficient.

        ``ess`` is the worst effective sample size, where it is known.
        """
        if self.distance is not None:
            events = float(np.mean(self.engine.events - self.burn_in_events))
            self.distance.judge(events, ess, max(self.engine.time, 0.0))

    def _tick(self, display: Display) -> Callable[[Tick], None]:
        # The display counts as the posterior does, including the search for the mode and an abandoned method.
        before = self.given_up.rounds + self.method.reference.rounds

        def tick(tick: Tick) -> None:
            display.tick(tick._replace(rounds=tick.rounds + before))
            if self.distance is not None:
                if self.distance.deciding:
                    self._cost = GivenUp(
                        tick.rounds, int(self.engine.plans.sum()), int(self.engine.planned.sum()), self.engine.passes
                    )
                self.distance.tick(tick)

        return tick

    def _advance(self, until: float, display: Display) -> None:
        plans = self.engine.plans.mean() - self.method.first_plan
        rate = plans / max(self.burn_in_time + self.engine.time, 1e-9)
        length = until - self.engine.time
        self._set_goal(until, max(block_length.fewest(self.method, length, self.engine.time), pieces(rate, length)))
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
            keep = self._keep if not burning else self._forget if stop <= 0 else self._keep_since_zero
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

    def _forget(self, block: Block) -> None: ...

    def _keep_since_zero(self, block: Block) -> None:
        """Keep what comes after the burn-in."""
        self.burn_in_events, path = block_length.split_burn_in(block, self.method.dynamics.flow)
        self._keep(path)

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
        first = block_length.first_block(self.method, None, target)
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
                if self.distance is not None and span - begin >= MOST_LENGTH * first:
                    break
                need, length = next_length(target, worst, span)
                display.aim(span + need, target)
            self._say_costs(need, f"an ESS of {target:,.0f}", display)
            fits, name = self._longest()
            if length > fits:
                self._end_with_budget(span, fits, name, display)
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
        found = counts(self.method, self.engine, self.given_up) | {
            "events": self.engine.events - self.burn_in_events,
            "certified": self.method.certified,
            "violations": self.engine.violations,
            "privacy": self._privacy(),
        }
        method = self.method
        self._made = self.engine.time, Posterior(
            self.store, method.reference, method.dynamics, method.names, found, self._settings(), self,
            method.variables, self.origin,
        )  # fmt: skip
        return self._made[1]

    def _privacy(self) -> dict[str, Any] | None:
        own = self.engine.federation.privacy
        return self.watch.privacy() if own is None and self.watch is not None else own

    def _settings(self) -> dict[str, Any]:
        if self._proofs is None:
            names = [site.name for site in self.method.sites]
            self._proofs = certificate(names, self.engine.federation.clocks)
        own = {"burn_in": self.burn_in_time, "keep": self.keep, "certificate": self._proofs, "prior": self.prior_lines}
        return describe(self.method, self.engine) | own | ({} if self.watch is None else self.watch.facts())
