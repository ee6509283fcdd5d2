"""A site's policy: its own limits, which every contract must respect."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from fedpdmc.errors import InputError, Refused
from fedpdmc.privacy.accountant import spent_epsilon
from fedpdmc.study.contract import EXACT, Study
from fedpdmc.study.schema import (
    DERIVATIVES,
    AtLeastZero,
    Count,
    CountFromOne,
    Delta,
    DerivativesName,
    FamilyName,
    Keys,
    Neighbours,
    Positive,
    Share,
    doc,
    naming_file,
    parse_toml,
    read,
    read_bytes,
)
from fedpdmc.validation import check_fingerprint

CHECK = "Agree on another contract, or change the site's policy.toml."
CHOICE = (
    "The contract has {}, so the operator of the coordinator can choose where your records are asked. Agree on one "
    "without{}; or, if they may know your records, set coordinator_may_choose = true in the site's policy.toml."
)
UNPROTECTED = (
    "Without a privacy budget a coordinator can reconstruct records, few or many. Agree on a contract with [privacy]; or, "
    "if it may know them, lower least_without_budget in the site's policy.toml."
)
MOST_CHAINS = 2048
MOST_DERIVATIVES = 12
LEAST_WITHOUT_BUDGET = 50
# The chance of a breach for each record must be far below one over the number of records.
LARGEST_DELTA = 1e-5
NEIGHBOURS = ("replace", "add-remove")
# Limits without `most_bits`: parts of the bits of the site's table, in a study and in all, and the most for each record. An
# attacker who may think that any table is as likely is then wrong with probability 1/2, or 1/4: docs/information.md.
PARTS_OF_TABLE = 0.5, 0.75
MOST_BITS = 4.0, 8.0
Sha256 = Annotated[str, doc(pattern="^[0-9a-f]{64}$", allowed="the SHA-256 of a model file, 64 hexadecimal digits")]
Hour = Annotated[int, doc(ge=0, le=24)]


class Policy(Keys, kw_only=True):
    """The limits of a site: the keys of its policy.toml."""

    # Its effective number is (Σ w)²/Σ w² of the records' contributions w to a value, gradient, Hessian or difference.
    least_records: Annotated[Count, doc("records with which the site takes part, and effective ones in a release")]
    most_parameters_per_record: Annotated[AtLeastZero, doc("parameters for each record")]
    families: Annotated[tuple[FamilyName, ...], doc("families that are allowed by name; required without models")] = ()
    models: Annotated[tuple[Sha256, ...], doc("model files that are allowed")] = ()
    most_operations: Annotated[Count, doc("operations of a model file that is allowed unlisted")] = 0
    derivatives: Annotated[DerivativesName, doc("the most that may be released of them")] = "none"
    passes: Annotated[bool, doc("whether the number of passes over the records may be released")] = False
    most_rounds: Annotated[int, doc("upper limit for the contract's rounds", ge=1, le=2**62)]
    most_observed_time: Annotated[AtLeastZero, doc("upper limit for the contract's observed_time")]
    most_chains: Annotated[CountFromOne, doc("chains, for which a site needs memory")] = MOST_CHAINS
    most_derivatives: Annotated[Count, doc("points at which a contract may request derivatives")] = MOST_DERIVATIVES
    farthest: Annotated[AtLeastZero, doc("distance of such a point from the prior's mean, in the prior's sds")] = 6.0
    largest_share: Annotated[Share, doc("share of one record in a release, in any direction")] = 0.75
    least_cell: Annotated[Count, doc("records of a level that occurs")] = 3
    least_difference: Annotated[Count | None, doc("records in which sets may differ; left out: least_records")] = None
    record_id: Annotated[tuple[str, ...], doc("columns that identify a person; left out: all values do")] = ()
    # No protection: exact answers determine the records, however many there are.
    least_without_budget: Annotated[Count, doc("records without a privacy budget")] = LEAST_WITHOUT_BUDGET
    most_bits: Annotated[Positive | None, doc("bits a record in a study; left out: 4, or half of the table's")] = None
    most_bits_in_all: Annotated[Positive | None, doc("in all studies; left out: 8, or three quarters of it")] = None
    largest_epsilon: Annotated[AtLeastZero | None, doc("ε, which a contract must have; left out: any, or none")] = None
    largest_delta: Annotated[float, doc("δ, unless the ε at it is small enough", ge=0.0, le=0.5)] = LARGEST_DELTA
    neighbours: Annotated[
        tuple[Neighbours, ...], doc("relations of a budget; 'label' protects outcomes only", min_length=1)
    ] = NEIGHBOURS
    dataset: Annotated[str | None, doc("the records' name in the privacy ledger; left out: it is one data set")] = None
    total_epsilon: Annotated[Positive | None, doc("ε for all studies together; left out: the first contract's")] = None
    total_delta: Annotated[Delta | None, doc("δ of the same")] = None
    least_sites: Annotated[CountFromOne, doc("sites of a contract")] = 1
    least_pinned: Annotated[Count, doc("other sites of a secure sum that certificates must name")] = 0
    least_colluding: Annotated[Count, doc("colluding sites that shared noise must allow for")] = 1
    hours: Annotated[
        tuple[Hour, Hour] | None,
        doc("between which the site answers, by its clock", "[first, last], two hours of the day such as [20, 6]"),
    ] = None
    most_seconds: Annotated[float, doc("of work on one plan, or it is refused (TOO_MUCH_WORK)", ge=1.0)] = 600.0
    coordinator_may_choose: Annotated[bool, doc("where records are asked; false: such a contract is refused")] = False
    certificates: Annotated[dict[str, str], doc("fingerprints of the only accepted ones, by party")] = {}

    def __post_init__(self) -> None:
        if not (self.families or self.models or self.most_operations):
            raise InputError("families", "no value", "This key is required, or models, or most_operations.")
        if self.hours is not None and self.hours[0] == self.hours[1]:
            raise InputError("hours", repr(list(self.hours)), "Give two different hours of the day, such as [20, 6].")
        if (self.total_epsilon is None) != (self.total_delta is None):
            raise InputError("total_epsilon, total_delta", "one of them", "Give both, or neither.")
        pins = {name: check_fingerprint(text) for name, text in self.certificates.items()}
        self.certificates = pins
        if self.least_difference is None:
            self.least_difference = self.least_records

    def budget_terms(self, study: Study) -> dict[str, Any]:
        """The site's own terms of a budget for this study, as `Study.budget` takes them."""
        terms: dict[str, Any] = {} if self.dataset is None else {"dataset": self.dataset}
        if self.total_epsilon is not None:
            granted = study.epsilon, study.delta
            terms |= {"epsilon": self.total_epsilon, "delta": self.total_delta, "granted": granted}
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
        dim, allowed = len(study.names), study.family in self.families
        if study.model.file:
            model = study.model.model
            allowed = model.digest in self.models or model.operations <= self.most_operations
        faults = {
            "POLICY_SITE": site not in study.sites,
            "POLICY_RECORDS": records < self.least_records,
            "POLICY_WITHOUT_BUDGET": study.epsilon is None and records < self.least_without_budget,
            "POLICY_PARAMETERS": dim > self.most_parameters_per_record * records,
            "POLICY_FAMILY": not allowed,
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
            "POLICY_CHOICE": not self.coordinator_may_choose and study.coordinator_chooses,
            "POLICY_EPSILON": self.largest_epsilon is not None
            and (study.epsilon is None or study.epsilon > self.largest_epsilon),
            "POLICY_DELTA": not self._allows_delta(study),
            "POLICY_NEIGHBOURS": study.epsilon is not None and study.neighbours not in self.neighbours,
        }
        choice = CHOICE.format(study.coordinator_chooses, "" if study.effects is not None else ", or with [privacy]")
        remedies = {"POLICY_WITHOUT_BUDGET": UNPROTECTED, "POLICY_CHOICE": choice}
        for code in (code for code, broken in faults.items() if broken):
            raise Refused(site, code, remedies.get(code, CHECK))


def read_policy(path: str | Path) -> Policy:
    """Read a policy from a TOML file."""
    with naming_file("policy.toml", path):
        return read(Policy, parse_toml(read_bytes(path, "policy"), "policy.toml"), "policy.toml")
