"""A site's privacy budget, granted by the owner of the data for all studies together."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedpdmc.errors import InputError
from fedpdmc.privacy.accountant import USUAL_EXCESS, Sensitivity, account_limit, best_bound, best_order
from fedpdmc.privacy.ledger import Account, Ledger
from fedpdmc.privacy.sensitivity import NEIGHBOURS, Bounds
from fedpdmc.validation import integer, one_of, positive, probability

# The smallest total excess rate of all private sites. The observed time that a budget covers grows in proportion to ρ,
# and an effective sample takes ``1.6 + 4Mρ`` units of it: at Mρ = 1 there are 0.7 of the samples of a large rate, for
# few rounds.
TOTAL_EXCESS = 1.0
# A walk is cut short with a probability below 2⁻²⁶⁷ (`fedpdmc.privacy.budget_planning`), in 2⁶⁴ plans below 10⁻⁶⁰: compared
# with this δ or a larger one, that is less than the margin by which limits are rounded down.
LEAST_DELTA = 1e-40
# The data set's name if none is declared: then one ledger is one data set, whatever its sites and columns are called.
DATASET = "records"


@dataclass(frozen=True, eq=False)
class Budget:
    """The (ε, δ) that a site grants for everything that is ever revealed about a data set.

    Parameters
    ----------
    epsilon, delta : float
        The total of all runs and studies on the data set, never a figure per round.
    neighbours : {"replace", "add-remove", "label"}
        Which data sets must be indistinguishable: one record replaced, added or removed, or its outcome changed.
    bounds : Bounds
        Declared bounds of the records.
    on_violation : {"refuse", "clip"}
        What to do with a record outside the bounds. With "clip", the posterior of the clipped records is sampled, exactly.
    excess : float, optional
        The rate ρ of excess flips that the site adds to every coordinate. None: ``2 α K_2``, and at least one divided
        by the number of private sites.
    release : float
        The share of the budget that a study may spend on noisy derivatives for its reference. Zero: none are released.
    ledger : path, optional
        The site's ledger. None: the file named by FEDPDMC_LEDGER, or ``fedpdmc/ledger.db`` in the user's state folder.
    dataset : str, optional
        The data set's name in the ledger, declared by its owner. Records of the same people are one data set, whichever
        columns a study uses and whatever the site is called in it. None: the whole ledger is one data set.
    study : str
        The name under which a run is charged.
    granted : (epsilon, delta), optional
        The part of the budget that this study may spend. None: all that is left.
    colluding : int, optional
        Share the noise of ``method="private-laplace"`` with the other sites: only the sum over all sites is revealed, and
        the guarantee holds if at most this many of them collude with the coordinator or misuse what they know about their
        own noise. None: the site adds all of its noise itself and need not trust the others.
    seeded_for_tests : bool
        Let a site with a ``seed`` of its own answer without a warning. Its randomness can be guessed: nothing is private.
    """

    epsilon: float
    delta: float
    neighbours: str = "replace"
    bounds: Bounds = field(default_factory=Bounds)
    on_violation: str = "refuse"
    excess: float | None = None
    release: float = 0.0
    ledger: Any = None
    dataset: str | None = None
    study: str = "study"
    granted: tuple[float, float] | None = None
    colluding: int | None = None
    seeded_for_tests: bool = False

    def __post_init__(self):
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        put("epsilon", positive("Budget(epsilon)", self.epsilon))
        put("delta", probability("Budget(delta)", self.delta))
        if self.delta < LEAST_DELTA:
            raise InputError("Budget(delta)", repr(self.delta), f"Give at least {LEAST_DELTA:g}.")
        one_of("Budget(neighbours)", self.neighbours, tuple(NEIGHBOURS))
        one_of("Budget(on_violation)", self.on_violation, ("refuse", "clip"))
        if not isinstance(self.bounds, Bounds):
            raise InputError("Budget(bounds)", type(self.bounds).__name__, "Give fedpdmc.Bounds(...).")
        if self.excess is not None:
            put("excess", positive("Budget(excess)", self.excess))
        if not (isinstance(self.release, (int, float)) and 0 <= self.release < 1):
            raise InputError("Budget(release)", repr(self.release), "Give a share of the budget, from 0 to below 1.")
        for name, value in (("dataset", self.account_name), ("study", self.study)):
            if not (isinstance(value, str) and value):
                raise InputError(f"Budget({name})", repr(value), "Give a non-empty string.")
        if self.colluding is not None:
            remedy = "Give a number of sites, from 0, or None."
            put("colluding", integer("Budget(colluding)", self.colluding, remedy=remedy))
        if self.granted is not None:
            epsilon, delta = self.granted
            put("granted", (positive("Budget(granted)", epsilon), probability("Budget(granted)", delta)))

    @property
    def account_name(self) -> str:
        """The name of the account in the ledger."""
        return DATASET if self.dataset is None else self.dataset

    @property
    def alpha(self) -> float:
        """The Rényi order of the account, a function of ε and δ alone."""
        return best_order(self.epsilon, self.delta)

    def terms(self, releases_only: bool = False) -> Account:
        """The terms on which an account is opened.

        ``releases_only``: for noisy derivatives alone, which may spend the whole account. Their exact bound covers no
        arrivals.
        """
        alpha = self.alpha
        bound = "gaussian" if releases_only and self.granted is None and not self.release else "renyi"
        if bound != "gaussian" and self.excess is None:
            bound = best_bound(alpha, self.epsilon, self.delta)
        limit = account_limit(bound, alpha, self.epsilon, self.delta)
        return Account(self.account_name, self.epsilon, self.delta, self.neighbours, alpha, limit, bound)

    def excess_for(self, sensitivity: Sensitivity, sites: int = 0) -> float:
        """The excess rate for a sensitivity and a number of private sites; zero sites: their number is not known."""
        if self.excess is not None:
            return self.excess
        return max(USUAL_EXCESS * self.alpha * sensitivity.k_2, TOTAL_EXCESS / sites if sites else 0.0)

    def study_limit(self, account: Account, releases_only: bool = False) -> float:
        """The part of an account that the study may spend, at the account's order.

        ``releases_only``: for noisy derivatives and nothing else.
        """
        total = account.limit
        if self.granted is None:
            return total
        epsilon, delta = self.granted
        limit = account_limit("gaussian" if releases_only else account.bound, account.alpha, epsilon, delta)
        if not limit > 0:
            raise InputError(
                "Budget(granted)",
                f"epsilon={epsilon:g} at delta={delta:g} for study {self.study!r}",
                f"The account of data set {account.dataset!r} uses the Rényi order {account.alpha:.4g}, at which this "
                "allows nothing: grant a larger epsilon or delta.",
            )
        return min(limit, total)

    def open(self, releases_only: bool = False) -> tuple[Ledger, Account]:
        """The site's ledger and its account, opened with `terms` if it does not exist yet."""
        ledger = self.find()
        return ledger, ledger.account(self.terms(releases_only))

    def find(self) -> Ledger:
        """The site's ledger, checked: it holds either one unnamed data set or named ones."""
        ledger = Ledger.open(default_path() if self.ledger is None else self.ledger)
        others = [name for name in ledger.datasets if name != self.account_name]
        if others and DATASET in (self.account_name, *others):
            found = f"{self.dataset!r} in {ledger.path}, which holds {', '.join(map(repr, others))}"
            remedy = "A ledger holds one unnamed data set, or several named ones: give the name, or use another ledger."
            raise InputError("Budget(dataset)", found, remedy)
        return ledger


def default_path() -> Path:
    """The default path of the ledger."""
    if named := os.environ.get("FEDPDMC_LEDGER"):
        return Path(named)
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "fedpdmc" / "ledger.db"
