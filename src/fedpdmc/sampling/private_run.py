"""Runs with sites that have a privacy budget: their federation, how far they may go, and how far they are planned."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from fedpdmc.dynamics import Dynamics
from fedpdmc.errors import BudgetSpent, InputError
from fedpdmc.members.private_site import PrivateSite, usual_speed
from fedpdmc.plan import Arrival, Plan
from fedpdmc.privacy.accountant import AccountStatus
from fedpdmc.sampling.coordinator import State
from fedpdmc.sampling.engines.base import Federation

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
