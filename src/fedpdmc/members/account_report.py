"""The report of a private site's account."""

from __future__ import annotations

from typing import Any

from fedpdmc.dynamics import Dynamics
from fedpdmc.privacy.account_bounds import account_limit, spent_epsilon
from fedpdmc.privacy.account_status import AccountStatus
from fedpdmc.privacy.budget import Budget
from fedpdmc.privacy.sensitivity import NEIGHBOURS

COVERED = (
    "everything this site has revealed to anyone in all runs on this data set: times and coordinates of its arrivals on "
    "every chain, including discarded ones, and released derivatives; therefore also the published posterior"
)
ALONE = ", and other sites that collude with the coordinator"
NOT_COVERED = (
    "how long the site takes to answer, that it fails or does not take part, anything "
    "released outside this ledger, starting points and references that someone computed from the records, anyone who can "
    "read the ledger itself, and a person with records at several sites"
)
SEEDED = "a seed, for tests only: NOT private"


def account_report(status: AccountStatus, budget: Budget, dynamics: Dynamics) -> dict[str, Any]:
    """The grants and spending of a private site, for `Posterior.privacy`."""
    epsilon, delta, alpha, granted, spent = status.epsilon, status.delta, status.alpha, status.granted, status.spent
    running = spent_epsilon(status.bound, alpha, spent * account_limit(status.bound, alpha, epsilon, delta), delta)
    return {
        "epsilon": epsilon,
        "delta": delta,
        "neighbours": budget.neighbours,
        "relation": NEIGHBOURS[budget.neighbours],
        "alpha": alpha,
        "bound": status.bound,
        "granted": None if granted is None else list(granted),
        "running_epsilon": running,
        "spent": spent,
        "observed": status.observed,
        "observed_unit": "process time" if dynamics.unit_speed else "path length",
        "cap": status.cap,
        "releases": status.releases,
        "excess": status.excess,
        "sensitivity": status.sensitivity._asdict(),
        "bounds": budget.bounds.describe(),
        "records": "clipped to the declared bounds: the posterior is that of the clipped records"
        if budget.on_violation == "clip"
        else "refused if outside the declared bounds",
        "randomness": SEEDED if status.seeded else "operating system",
        "colluding": budget.colluding,
        "covered": COVERED + _against(budget),
        "not_covered": NOT_COVERED,
    }


def _against(budget: Budget) -> str:
    """Which other sites may collude with the coordinator."""
    if budget.colluding is None:
        return ALONE
    return f"; for derivatives with shared noise, if at most {budget.colluding} of the other sites collude"
