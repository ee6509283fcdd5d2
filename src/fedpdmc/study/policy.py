"""A site's policy: its own limits, which every contract must respect."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedpdmc.errors import InputError, Refused
from fedpdmc.privacy.account_bounds import spent_epsilon
from fedpdmc.study.consistency import EXACT
from fedpdmc.study.contract import Study
from fedpdmc.study.contract_keys import DERIVATIVES, FAMILIES
from fedpdmc.study.strict_toml import REQUIRED, Table, naming_file, read_bytes
from fedpdmc.validation import check_fingerprint

CHECK = "Agree on another contract, or change the site's policy.toml."
CHOICE = (
    "The coordinator would choose this contract's plans. Agree on one whose plans sites make: with a normal prior, without "
    "effects, [coordinates] and linear control; or set coordinator_may_choose = true in the site's policy.toml."
)
UNPROTECTED = (
    "Without a privacy budget a coordinator can reconstruct records, few or many. Agree on a contract with [privacy]; or, "
    "if it may know them, lower least_without_budget in the site's policy.toml."
)
MOST_CHAINS = 2048
LEAST_WITHOUT_BUDGET = 50
# The chance of a breach for each record must be far below one over the number of records.
LARGEST_DELTA = 1e-5
NEIGHBOURS = ("replace", "add-remove")
# A record of treatment, outcome and age in whole years has about eight bits: half of it, and all of it. A table of many such
# records has fewer for each, because their order is not in the answers: docs/information.md.
MOST_BITS = 4.0
MOST_BITS_IN_ALL = 8.0
DIGEST = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class Policy:
    """The limits of a site.

    Attributes
    ----------
    least_records : int
        The smallest number of records with which the site takes part; and the smallest effective number of records,
        ``(Σ w)²/Σ w²`` of their contributions w, in an exact value, gradient or Hessian, and in its difference from
        others.
    largest_share : float
        The largest share of one record in these, in any direction.
    least_cell : int
        The smallest number of records of a level that occurs.
    most_derivatives : int
        The largest number of points at which a contract may request derivatives.
    farthest : float
        The largest distance of such a point from the prior's mean, in prior standard deviations of each parameter.
    most_parameters_per_record : float
    families : tuple of str
        Families that are allowed by name.
    models : tuple of str
        SHA-256 of model files that are allowed.
    most_operations : int
        Any model file with at most this many operations is allowed; 0: only those listed under ``models``.
    derivatives : {"none", "noisy", "noisy-summed", "summed", "own"}
        The most that may be released of value, gradient and Hessian.
    passes : bool
        Whether the number of passes over the records may be released.
    most_rounds, most_observed_time
        Upper limits for the contract's limits.
    largest_epsilon : float or None
        If given, a contract must have a privacy budget with at most this epsilon.
    largest_delta : float
        The largest delta of a privacy budget, unless its epsilon at this delta is at most ``largest_epsilon``.
    neighbours : tuple of {"replace", "add-remove", "label"}
        Which relations of a privacy budget are allowed. With "label" only outcomes are protected.
    dataset : str or None
        The name of the records in the site's privacy ledger, whatever columns a contract uses and however it names the
        site; None: the whole ledger is one data set.
    total : (epsilon, delta) or None
        The data set's budget for all studies together; each contract uses a part of it. None: the account has the terms
        of the first contract, and contracts with other terms are refused.
    certificates : dict
        Fingerprints of the certificates of other sites, for secure sums, and of the coordinator. For these parties no other
        certificate is accepted, whoever has signed it.
    most_chains : int
        The largest number of chains: a site needs memory for all of them.
    least_sites, least_pinned : int
        The smallest number of sites of a contract; and, with secure sums, of other sites whose certificates must be listed
        here. For sites that are not listed, the authority alone vouches.
    least_colluding : int
        If noise is shared with other sites, the smallest number of colluding sites that a contract must allow for.
    hours : (int, int) or None
        The hours of the day, by the site's clock, between which it answers; None: always.
    least_without_budget : int
        The smallest number of records with which the site takes part in a contract without a privacy budget. It is no
        protection: exact answers determine the records, however many there are.
    most_seconds : float
        Time limit for one plan, after which it is refused (`TOO_MUCH_WORK`).
    least_difference : int
        The smallest number of records in which a set may differ from those of earlier studies.
    most_bits, most_bits_in_all : float
        The most information that exact answers may carry, in bits for each record: in a study, and in all studies with the
        same records.
    record_id : tuple of str
        The columns of the site's own table that identify a person; empty: records are compared by their values.
    coordinator_may_choose : bool
        Whether contracts are accepted whose plans sites cannot make themselves (`Study.sites_plan`).
    """

    least_records: int
    most_parameters_per_record: float
    families: tuple[str, ...]
    derivatives: str
    passes: bool
    most_rounds: int
    most_observed_time: float
    largest_epsilon: float | None
    dataset: str | None = None
    total: tuple[float, float] | None = None
    certificates: dict[str, str] = field(default_factory=dict)
    most_chains: int = MOST_CHAINS
    least_sites: int = 1
    least_pinned: int = 0
    least_colluding: int = 1
    hours: tuple[int, int] | None = None
    largest_share: float = 0.75
    least_cell: int = 3
    most_derivatives: int = 12
    farthest: float = 6.0
    most_seconds: float = 600.0
    least_without_budget: int = LEAST_WITHOUT_BUDGET
    models: tuple[str, ...] = ()
    most_operations: int = 0
    largest_delta: float = LARGEST_DELTA
    neighbours: tuple[str, ...] = NEIGHBOURS
    least_difference: int = 20
    most_bits: float = MOST_BITS
    most_bits_in_all: float = MOST_BITS_IN_ALL
    record_id: tuple[str, ...] = ()
    coordinator_may_choose: bool = True

    def allows_model(self, study: Study) -> bool:
        """Whether the family, or the model file, is one that the site allows."""
        if study.model is None or study.model_file is None:
            return study.family in self.families
        model = study.model.model
        return model.digest in self.models or model.operations <= self.most_operations

    def budget_terms(self, study: Study) -> dict[str, Any]:
        """The site's own terms of a budget for this study, as `Study.budget` takes them."""
        terms: dict[str, Any] = {} if self.dataset is None else {"dataset": self.dataset}
        if self.total is not None:
            terms |= {"epsilon": self.total[0], "delta": self.total[1], "granted": (study.epsilon, study.delta)}
        return terms

    def _allows_delta(self, study: Study) -> bool:
        """Whether the delta is small enough, or the budget has an allowed epsilon at the largest that is."""
        budget = study.budget(**self.budget_terms(study))
        if budget is None or study.delta <= self.largest_delta or self.largest_epsilon is None:
            return budget is None or study.delta <= self.largest_delta
        account, alone = budget.terms(study.one_shot), study.one_shot and not study.release
        bound, spent = "gaussian" if alone else account.bound, budget.study_limit(account, alone)
        return spent_epsilon(bound, account.alpha, spent, self.largest_delta) <= self.largest_epsilon

    def check(self, site: str, study: Study, records: int) -> None:
        """Raise `Refused` if the contract, or the site's number of records, violates the policy."""
        dim = len(study.names)
        faults = {
            "POLICY_SITE": site not in study.sites,
            "POLICY_RECORDS": records < self.least_records,
            "POLICY_WITHOUT_BUDGET": study.epsilon is None and records < self.least_without_budget,
            "POLICY_PARAMETERS": dim > self.most_parameters_per_record * records,
            "POLICY_FAMILY": not self.allows_model(study),
            "POLICY_DERIVATIVES": DERIVATIVES.index(study.derivatives) > DERIVATIVES.index(self.derivatives),
            "POLICY_POINTS": (study.derivatives in EXACT or study.label)
            and study.most_derivatives > self.most_derivatives,
            "POLICY_PASSES": study.passes and not self.passes,
            "POLICY_ROUNDS": study.rounds > self.most_rounds,
            "POLICY_TIME": study.observed_time > self.most_observed_time,
            "POLICY_CHAINS": study.chains > self.most_chains,
            "POLICY_SITES": len(study.sites) < self.least_sites,
            "POLICY_PINNED": study.summed
            and len(set(self.certificates) & set(study.sites) - {site}) < self.least_pinned,
            "POLICY_COLLUDING": study.colluding is not None and study.colluding < self.least_colluding,
            "POLICY_CHOICE": not self.coordinator_may_choose and study.epsilon is None and not study.sites_plan,
            "POLICY_EPSILON": self.largest_epsilon is not None
            and (study.epsilon is None or study.epsilon > self.largest_epsilon),
            "POLICY_DELTA": not self._allows_delta(study),
            "POLICY_NEIGHBOURS": study.epsilon is not None and study.neighbours not in self.neighbours,
        }
        for code, broken in faults.items():
            if broken:
                remedies = {"POLICY_WITHOUT_BUDGET": UNPROTECTED, "POLICY_CHOICE": CHOICE}
                raise Refused(site, code, remedies.get(code, CHECK))


def read_policy(path: str | Path) -> Policy:
    """Read a policy from a TOML file."""
    with naming_file("policy.toml", path):
        return _policy(Table.parse(read_bytes(path, "policy"), "policy.toml"))


def _policy(table: Table) -> Policy:
    models = table.texts("models", ())
    most = table.whole("most_operations", 0)
    policy = Policy(
        least_records=table.whole("least_records", least=0),
        most_parameters_per_record=table.number("most_parameters_per_record", least=0.0),
        families=table.texts("families", () if models or most else REQUIRED, among=FAMILIES),
        derivatives=table.text("derivatives", "none", among=DERIVATIVES),
        passes=table.flag("passes", False),
        most_rounds=table.whole("most_rounds", least=1, most=2**62),
        most_observed_time=table.number("most_observed_time", least=0.0),
        largest_epsilon=table.number("largest_epsilon", None, least=0.0, most=math.inf),
        dataset=table.text("dataset", None),
        total=_total(table),
        certificates=_certificates(table.table("certificates", None)),
        most_chains=table.whole("most_chains", MOST_CHAINS, least=1),
        least_sites=table.whole("least_sites", 1, least=1),
        least_pinned=table.whole("least_pinned", 0),
        least_colluding=table.whole("least_colluding", 1),
        hours=_hours(table),
        largest_share=table.number("largest_share", 0.75, least=0.0, most=1.0),
        least_cell=table.whole("least_cell", 3, least=0),
        most_derivatives=table.whole("most_derivatives", 12, least=0),
        farthest=table.number("farthest", 6.0, least=0.0),
        most_seconds=table.number("most_seconds", 600.0, least=1.0),
        least_without_budget=table.whole("least_without_budget", LEAST_WITHOUT_BUDGET),
        models=_digests(table, models),
        most_operations=most,
        largest_delta=table.number("largest_delta", LARGEST_DELTA, least=0.0, most=0.5),
        neighbours=table.texts("neighbours", NEIGHBOURS, among=(*NEIGHBOURS, "label")),
        least_difference=table.whole("least_difference", table.values.get("least_records", 0)),
        most_bits=table.number("most_bits", MOST_BITS, least=1e-6),
        most_bits_in_all=table.number("most_bits_in_all", MOST_BITS_IN_ALL, least=1e-6),
        record_id=table.texts("record_id", ()),
        coordinator_may_choose=table.flag("coordinator_may_choose", True),
    )
    table.done()
    return policy


def _digests(table: Table, models: tuple[str, ...]) -> tuple[str, ...]:
    if not all(DIGEST.fullmatch(model) for model in models):
        raise table.invalid("models", "Give the SHA-256 of model files, 64 hexadecimal digits each.")
    return models


def _hours(table: Table) -> tuple[int, int] | None:
    found = table.numbers("hours", None) if "hours" in table.values else None
    if found is None:
        return None
    good = isinstance(found, tuple) and len(found) == 2 and all(h in range(25) for h in found) and found[0] != found[1]
    if not good or not isinstance(found, tuple):
        raise table.invalid("hours", "Give [first, last], two hours of the day such as [20, 6].")
    return int(found[0]), int(found[1])


def _total(table: Table) -> tuple[float, float] | None:
    epsilon, delta = (
        table.number("total_epsilon", None, least=1e-6),
        table.number("total_delta", None, least=1e-300, most=0.5),
    )
    if (epsilon is None) != (delta is None):
        raise InputError("policy.toml: total_epsilon, total_delta", "one of them", "Give both, or neither.")
    return None if epsilon is None or delta is None else (epsilon, delta)


def _certificates(table: Table) -> dict[str, str]:
    found = {name: check_fingerprint(table.text(name)) for name in table.keys()}
    table.done()
    return found
