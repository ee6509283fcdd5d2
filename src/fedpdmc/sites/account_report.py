"""A private site's account as it is told: in process from its ledger, over a network from what the site says."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fedpdmc.dynamics import Dynamics
from fedpdmc.privacy.accountant import Sensitivity, renyi_limit, running_epsilon
from fedpdmc.privacy.budget import Budget
from fedpdmc.privacy.sensitivity import NEIGHBOURS

COVERED = (
    "everything this site has revealed to anyone in all runs on this data set: times and coordinates of its arrivals, those "
    "that lost included, on every chain, and released summaries; so also the published posterior, and other sites that "
    "collude with the coordinator"
)
NOT_COVERED = (
    "how long the site takes to answer, that it fails or does not take part, what "
    "is released outside this ledger, starting points and references that were made from the records by hand, whoever reads "
    "the ledger itself, and a person with records at several sites"
)


# What is said of the randomness of a site with a seed.
SEEDED = "a seed, for tests only: NOT private"


class Standing(NamedTuple):
    """What does not change during a run in a private site's account.

    Attributes
    ----------
    epsilon, delta, alpha : float
        Of the account, for all studies together.
    granted : (epsilon, delta) or None
        What this study alone may spend of it.
    cap : float
        Observed time that all of the account covers at this run's sensitivity.
    excess : float
    sensitivity : Sensitivity
    releases : int
        Noisy summaries released so far.
    seeded : bool
        Whether the randomness comes from a seed, for tests.
    """

    epsilon: float
    delta: float
    alpha: float
    granted: tuple[float, float] | None
    cap: float
    excess: float
    sensitivity: Sensitivity
    releases: int
    seeded: bool

    def numbers(self) -> np.ndarray:
        """As a message has it; a grant of zero is none."""
        numbers = [*self[:3], *(self.granted or (0.0, 0.0)), self.cap, self.excess, *self.sensitivity]
        return np.asarray([*numbers, self.releases, self.seeded], dtype=np.float64)

    @classmethod
    def of(cls, numbers: np.ndarray) -> Standing:
        """From a message; ValueError for numbers that are no account's."""
        epsilon, delta, alpha, *granted, cap, excess, k_inf, k_1, k_2, releases, seeded = (float(x) for x in numbers)
        if not (epsilon > 0 and 0 < delta < 1 < alpha):
            raise ValueError(f"an account of epsilon {epsilon:g}, delta {delta:g}, order {alpha:g}")
        grant, known = (granted[0], granted[1]) if granted[0] else None, Sensitivity(k_inf, k_1, k_2)
        return cls(epsilon, delta, alpha, grant, cap, excess, known, int(releases), bool(seeded))


def account_report(
    standing: Standing, budget: Budget, dynamics: Dynamics, observed: float, spent: float
) -> dict[str, Any]:
    """What a private site has granted and used; the same from its ledger as from what it tells over a network.

    ``observed`` is the time of this run, ``spent`` the share of the account's divergence that is spent by all studies.
    """
    epsilon, delta, alpha, granted = standing[:4]
    return {
        "epsilon": epsilon,
        "delta": delta,
        "neighbours": budget.neighbours,
        "relation": NEIGHBOURS[budget.neighbours],
        "alpha": alpha,
        "granted": None if granted is None else list(granted),
        "running_epsilon": running_epsilon(alpha, spent * renyi_limit(alpha, epsilon, delta), delta),
        "spent": spent,
        "observed": observed,
        "observed_unit": "process time" if dynamics.unit_speed else "path length",
        "cap": standing.cap,
        "releases": standing.releases,
        "excess": standing.excess,
        "sensitivity": standing.sensitivity._asdict(),
        "bounds": budget.bounds.describe(),
        "records": "clipped to the declared bounds: the posterior is that of the clipped records"
        if budget.on_violation == "clip"
        else "refused if outside the declared bounds",
        "randomness": SEEDED if standing.seeded else "operating system",
        "covered": COVERED,
        "not_covered": NOT_COVERED,
    }
