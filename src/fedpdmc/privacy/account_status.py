"""The state of a site's privacy account in one run, as the coordinator may know it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fedpdmc.privacy.accountant import Sensitivity
from fedpdmc.privacy.ledger_entries import BOUNDS


class AccountStatus(NamedTuple):
    """What a private site grants, how much more this run may observe, and how much is spent.

    The same for a site in this process (from its ledger) and for a remote site (from its messages).

    Attributes
    ----------
    site : str
    dim : int
        Coordinates that the site may flip.
    epsilon, delta, alpha : float
        Budget of the account, for all studies together, and the Rényi order of the accounting.
    granted : (epsilon, delta) or None
        The part of it that this study may spend.
    cap : float
        Observed time (path length on rotations) that the whole account covers at this run's sensitivity.
    excess : float
        The rate ρ that the site adds to each coordinate.
    sensitivity : Sensitivity
    releases : int
        Releases so far.
    seeded : bool
        Whether the randomness comes from a seed, for tests.
    remaining : float
        Observed time that the budget still covers, over all chains.
    observed : float
        Observed time of this run so far.
    spent : float
        The share of the account that all studies have spent.
    bound : str
        One of `BOUNDS`: the bound on privacy loss that the account uses.
    """

    site: str
    dim: int
    epsilon: float
    delta: float
    alpha: float
    granted: tuple[float, float] | None
    cap: float
    excess: float
    sensitivity: Sensitivity
    releases: int
    seeded: bool
    remaining: float
    observed: float
    spent: float
    bound: str = "renyi"

    def numbers(self) -> list[float]:
        """The numbers that a site reports when a run is opened; a grant of zero means none."""
        granted = self.granted or (0.0, 0.0)
        account = (self.epsilon, self.delta, self.alpha, *granted, self.cap, self.excess, *self.sensitivity)
        return [*account, float(self.releases), float(self.seeded), self.spent, float(BOUNDS.index(self.bound))]

    @classmethod
    def from_numbers(
        cls, site: str, dim: int, remaining: float, numbers: Sequence[float], observed: float = 0.0
    ) -> AccountStatus:
        """The status from a site's numbers; ValueError if they cannot be those of an account."""
        epsilon, delta, alpha, *granted, cap, excess, k_inf, k_1, k_2, releases, seeded, spent, bound = map(
            float, numbers
        )
        if not (epsilon > 0 and 0 < delta < 1 < alpha and bound in range(len(BOUNDS))):
            raise ValueError(f"an account of epsilon {epsilon:g}, delta {delta:g}, order {alpha:g}")
        return cls(
            site, dim, epsilon, delta, alpha, (granted[0], granted[1]) if granted[0] else None, cap, excess,
            Sensitivity(k_inf, k_1, k_2), int(releases), bool(seeded), remaining, observed, spent,
            BOUNDS[int(bound)],
        )  # fmt: skip
