"""The horizon of plans when observed time is limited by a budget.

A round that ends in an arrival wastes the time for which other sites were observed beyond it: at most the horizon H on
every chain. Silent rounds waste nothing. So with slack s, what is left of a budget beyond the process time still to run,
a horizon below ``s/(2C)`` always leaves slack: on lines a run whose budget covers its process time never runs out,
whatever the sites do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np

from fedpdmc.dynamics import Dynamics
from fedpdmc.errors import BudgetSpent
from fedpdmc.members.observed_time import usual_speed
from fedpdmc.privacy.account_status import AccountStatus
from fedpdmc.sampling.coordinator import State

# The margin of a budget over the process time itself: on rotations the path length is random.
LEAST_SLACK, LEAST_SLACK_ROTATING = 0.05, 0.25
# The share of the slack that further arrivals may use, in expectation.
SHARE = 0.8
# The longest plan: a site refuses those that may take too much work.
LONGEST = 32.0


class Pace:
    """Horizons for a run with private sites.

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
