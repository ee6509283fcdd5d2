"""Start a site's agent: read records, apply the policy, open log and secrets."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from fedpdmc._jax.precision import double_precision
from fedpdmc.certificates import Credentials
from fedpdmc.errors import InputError, Refused
from fedpdmc.federation.joint_plans import OwnPlans
from fedpdmc.federation.masking import SecureSumParty
from fedpdmc.federation.site_agent.agent import Agent
from fedpdmc.federation.site_agent.audit_log import AuditLog, opening_secret, refuse_links, site_seed, sum_secret
from fedpdmc.federation.site_agent.computation import MOST_SECONDS, Computation
from fedpdmc.federation.site_agent.derivative_disclosure import (
    FEWEST,
    contributing_records,
    disclosure_control,
)
from fedpdmc.federation.site_agent.information import NO_LIMITS, Information, bit_limits
from fedpdmc.federation.site_agent.model_trial import RangeShares, try_model_file
from fedpdmc.federation.site_agent.trust_region import TrustRegion
from fedpdmc.members.site import Site
from fedpdmc.privacy.budget import default_path
from fedpdmc.privacy.data_sets import PERSON, DataSets, Use, record_parts
from fedpdmc.study import Policy, Study
from fedpdmc.study.contract import EXACT
from fedpdmc.study.read_data import check_cells, check_shares, identifying_texts, site_records

logger = logging.getLogger("fedpdmc.site")
FEW_ADD = (
    "The model file takes nearly everything from few records. Read it (fedpdmc model show), and ask its author; or, if it "
    "is right, lower least_records in the site's policy.toml."
)


@double_precision
def open_agent(
    study: Study,
    name: str,
    source: str | Path | pd.DataFrame,
    *,
    store: str | Path,
    query: str | None = None,
    policy: Policy | None = None,
    seed: int | None = None,
    run_seed: int | None = None,
    ledger: str | Path | None = None,
    dataset: str | None = None,
    seeded_for_tests: bool = False,
    credentials: Credentials | None = None,
) -> Agent:
    """Start a site's agent: read and check its records, apply its policy, open its log.

    Parameters
    ----------
    source, query
        As `fedpdmc.study.read_records` takes them; or the records themselves, as `site_records` gives them.
    store : path
        The folder of the site's log and seed.
    seed : int, optional
        The site's own secret; from the operating system if None.
    run_seed : int, optional
        Derive the site's randomness from the run's seed instead; only for sites in the coordinator's process.
    ledger : path, optional
        The site's privacy ledger, for a contract with a budget; the user's own by default. The register of the record sets
        that its studies have used is in the same folder.
    dataset : str, optional
        The data set's name in the ledger, if the policy gives none; None: the whole ledger is one data set.
    seeded_for_tests : bool
        Accept a seed despite a budget. Nothing is private then, and log and result say so.
    credentials : Credentials, optional
        The site's keys; required if the contract has derivatives summed.
    """
    also = () if policy is None else policy.record_id
    records = source if isinstance(source, pd.DataFrame) else site_records(study, name, source, query, also)
    use, information = (None, None) if policy is None else admit(study, name, records, policy, ledger)
    if policy is not None and study.epsilon is None:
        logger.warning("no privacy budget: the operator of the coordinator can reconstruct the records")
    if study.epsilon is not None and seed is not None and not seeded_for_tests:
        remedy = "Omit it: the operating system provides randomness. For tests only: seeded_for_tests (not private)."
        raise InputError("seed", "one for a site with a privacy budget", remedy)
    terms = {"dataset": dataset, "seeded_for_tests": seeded_for_tests}
    terms |= {} if policy is None else policy.budget_terms(study)
    budget = study.budget(ledger, name, **terms)
    # Under a budget the ledger provides new randomness for every request; a seed is for tests only.
    own = seed if budget is not None else None if run_seed is not None else site_seed(store, seed)
    potential, coordinates = study.potential(records, name), study.coordinates(name)
    site = Site(potential, name=name, coordinates=coordinates, seed=own, budget=budget)
    control = region = shares = None
    if policy is not None and study.epsilon is None:
        region = TrustRegion(study, name, policy)
        if study.model_file is not None and study.effects is None:
            shares = RangeShares(study, name)
    if policy is not None and study.derivatives in EXACT:
        control = disclosure_control(study, name, records, potential, policy)
    elif policy is not None and study.label and study.noisy:
        # Hessians have no noise. Outcomes, which are protected, do not change them and must not decide what is released.
        column = study.columns[study.design.response_name]
        public = pd.Categorical(column.levels[:1] * len(records), column.levels) if column.levels else column.range[0]
        blank = records.assign(**{column.name: public})
        control = disclosure_control(study, name, blank, study.potential(blank, name), policy)
    party, pinned, own_plans = None, None if policy is None else policy.certificates, None
    if study.sites_plan:
        secret = f"run/{run_seed}" if own is None else f"own/{own}"
        # A seed that is given is for runs with the same bits again.
        entropy = partial(opening_secret, store, seed is None and run_seed is None)
        own_plans = OwnPlans(study, name, secret, credentials, pinned, policy is not None, entropy)
    elif policy is not None and study.coordinator_chooses:
        logger.warning("the coordinator chooses the plans of this contract: only the trust region limits them")
    if study.summed:
        party = SecureSumParty(study, name, sum_secret(store), credentials, pinned or {})
    log = AuditLog(refuse_links(store))
    try:
        if site.budget is not None:
            # An account with other terms is reported to the operator before the site joins.
            site.budget.study_limit(site.budget.open(study.one_shot)[1], study.one_shot and not study.release)
        if site.budget is not None and site.seed is not None:
            logger.warning("the site's randomness comes from a seed, for tests only: nothing is private")
            log.note("seeded for tests: NOT private")
        seconds = MOST_SECONDS if policy is None else policy.most_seconds
        information = Information(site.records) if information is None else information
        parts = {"control": control, "region": region, "own": own_plans, "shares": shares}
        computation = Computation(study, site, information, run_seed or 0, party, **parts, most_seconds=seconds)
        return Agent(computation, log, credentials, use)
    except BaseException:
        log.close()
        raise


def admit(
    study: Study, name: str, records: pd.DataFrame, policy: Policy, ledger: str | Path | None
) -> tuple[Callable[[], None], Information]:
    """Check contract and records by the site's policy; returns what registers the use of the records, and its account."""
    weights = study.record_weights(records)
    trials = None if study.model.trials is None else records[study.model.trials].to_numpy(float)
    # A record that adds nothing is not in the study: neither in its number of records nor in its set.
    present = weights > 0 if trials is None else (weights > 0) & (trials > 0)
    policy.check(name, study, study.count(records[present]))
    try_model_file(study, name, policy)
    register = DataSets(Path(default_path() if ledger is None else ledger).parent)
    exact = study.epsilon is None or study.label
    if exact:
        adding, effective = contributing_records(study, name, records, register.secret())
        present &= adding
        if effective < min(policy.least_records, FEWEST * len(records)):
            raise Refused(name, "POLICY_RECORDS", FEW_ADD)
        policy.check(name, study, study.count(records[present]))
    count = study.count(records[present])
    if study.epsilon is None:
        check_cells(study, records.loc[present], policy.least_cell)
        check_shares(study, records, policy.largest_share)
    texts = {column: np.array(identifying_texts(values)) for column, values in records.attrs["raw"].items()}
    # Outcomes are what the relation "label" protects: they must not decide whether the site takes part.
    hidden = {study.design.response_name} if study.label else set()
    columns = {column: texts[column][present] for column in sorted(study.used - hidden)}
    if policy.record_id:
        persons = [json.dumps(person) for person in zip(*map(texts.get, policy.record_id), strict=True)]
        columns[PERSON] = np.array(persons)[present]
        if any("" in texts[column] for column in policy.record_id):
            raise InputError("policy.toml: record_id", "a record without a value", "Name columns that are never empty.")
    offset = study.offset(records) if study.formula else None
    parts = record_parts(weights[present], *(None if x is None else x[present] for x in (trials, offset)))
    use = Use(study.name, study.digest.hex(), name, policy.dataset or "", exact)
    known = register.hash_records(columns, parts), use, policy.least_difference or 0
    register.use(*known, register=False)
    # A group of rows is one record, and its key is not what an attacker wants to know.
    key = study.model.group
    values = [len(set(texts[column])) for column in study.used if column != key]
    rows = int(present.sum()) if not key else len(records)
    limits = bit_limits(policy, count, values, rows) if use.exact else NO_LIMITS
    account = (partial(change, use, known[0].digest) for change in (register.charge, register.refund))
    return partial(register.use, *known), Information(count, limits, register.bits(use), *account)
