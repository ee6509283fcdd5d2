import numpy as np
import pytest
from tests.privacy.audit import chains_forgotten, honest, log_ratio, losers_forgotten, lower_bound, pair, run
from tests.privacy.support import a_plan

from fedpdmc.privacy.accountant import Sensitivity, run_epsilon
from fedpdmc.privacy.entries import read
from fedpdmc.privacy.theorem import censored_horizon

KAPPA, RHO, CAP, DELTA, HORIZON = 1.0, 2.0, 0.5, 1e-2, 0.2
# Copies of the run, and the share of the account that so many can show.
SCALES = [pytest.param(8000, 0.25, id="short"), pytest.param(400_000, 0.5, id="long", marks=pytest.mark.long)]


def account(kappa, rho, cap, delta=DELTA):
    kappa = np.asarray(kappa, float)
    k = Sensitivity(kappa.max(), kappa.sum(), float(np.linalg.norm(kappa)))
    return run_epsilon(k, rho, cap, delta)


def found(sites, kappa, rho, delta=DELTA, **options):
    one, other = (log_ratio(run(site, seed=i, **options), kappa, rho) for i, site in enumerate(sites))
    return lower_bound(one, other, delta)


@pytest.mark.parametrize(("copies", "share"), SCALES)
def test_the_attack_stays_below_the_account_and_comes_near_it(tmp_path, copies, share):
    sites = pair(tmp_path, [KAPPA], RHO)
    claimed = account([KAPPA], RHO, CAP)
    leaked = found(sites, [KAPPA], RHO, cap=CAP, horizon=HORIZON, copies=copies)
    assert share * claimed < leaked <= claimed


def test_it_stays_below_when_arrivals_lose_and_chains_add_up(tmp_path):
    sites = pair(tmp_path, [KAPPA], RHO)
    for options in ({"rival": 8.0}, {"chains": 4}):
        width = 8000 // options.get("chains", 1)
        leaked = found(sites, [KAPPA], RHO, cap=CAP, horizon=HORIZON, copies=width, **options)
        assert leaked <= account([KAPPA], RHO, CAP)


def test_a_ledger_that_forgets_losing_arrivals_is_caught(tmp_path):
    sites = pair(tmp_path, [KAPPA], RHO)
    options = {"rival": 8.0, "copies": 2000, "rule": losers_forgotten, "most_rounds": 80}
    assert found(sites, [KAPPA], RHO, cap=CAP, horizon=HORIZON, **options) > account([KAPPA], RHO, CAP)


def test_a_ledger_that_does_not_add_up_chains_is_caught(tmp_path):
    sites = pair(tmp_path, [KAPPA], RHO)
    options = {"chains": 16, "copies": 2000, "rule": chains_forgotten}
    assert found(sites, [KAPPA], RHO, cap=CAP, horizon=HORIZON, **options) > account([KAPPA], RHO, CAP)


def test_a_site_that_leaves_out_the_excess_rate_is_caught(tmp_path, monkeypatch):
    sites = pair(tmp_path, [KAPPA], RHO)
    for site in sites:
        monkeypatch.setattr(site, "excess", 1e-12)
    one, other = (
        run(site, cap=CAP, horizon=HORIZON, copies=2000, seed=i).counts.sum(1) for i, site in enumerate(sites)
    )
    assert lower_bound(one, other, DELTA) > account([KAPPA], RHO, CAP)


@pytest.mark.parametrize("wrong", [False, True], ids=["K_1", "K_inf"])
def test_the_horizon_of_a_pure_arrival_needs_the_sum_over_six_coordinates(tmp_path, wrong):
    epsilon, rho, kappa = 1.5, 0.6, np.full(6, 0.9)
    horizon = censored_horizon(epsilon, kappa.max(), kappa.max() if wrong else kappa.sum(), rho)
    sites = pair(tmp_path, kappa, rho)
    # One message, one arrival: nothing is charged, the horizon alone is the guarantee.
    leaked = found(sites, kappa, rho, delta=0.0, cap=1e9, horizon=horizon, copies=8000, most_rounds=1)
    assert leaked > epsilon if wrong else 0.3 * epsilon < leaked <= epsilon


def test_the_ledger_charges_by_the_rule_that_was_audited(tmp_path):
    site = pair(tmp_path, [KAPPA], RHO)[0]
    arrival = site.answer(a_plan(np.full((4, 1), 60.0), 1.0, [0.1, 0.2, 0.0, 0.3]))
    seen = np.where(np.asarray(arrival.rang), np.asarray(arrival.time), [0.1, 0.2, 0.0, 0.3])
    assert read(tmp_path / "0.0.db")[-1].exposure == pytest.approx(honest(seen, None, 4)[0], rel=1e-12)
