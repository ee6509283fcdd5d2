import numpy as np
import pytest
from tests.privacy.audit import (
    added,
    chains_forgotten,
    counts,
    honest,
    labels,
    log_ratio,
    losers_forgotten,
    lower_bound,
    outliers,
    pair,
    replaced,
    run,
    speed_forgotten,
)
from tests.privacy.support import a_plan

import fedpdmc as fp
from fedpdmc.clocks.private_arrivals import time_grid
from fedpdmc.members.private_site import Exposure, _pack, _unpack
from fedpdmc.privacy.accountant import censored_horizon, run_epsilon, tail_delta
from fedpdmc.privacy.ledger import read

KAPPA, RHO, CAP, DELTA, HORIZON = 1.0, 2.0, 0.5, 1e-2, 0.2
BOOMERANG = fp.FactorisedBoomerang()
# Chains in a message, the same nearly everywhere: a walk is compiled for each number.
WIDTH = 8000
# Copies of the run, and the share of the account that so many can show.
SHORT, LONG = (WIDTH, 0.25), (100_000, 0.4)
CASES = {
    "label": labels([KAPPA]),
    "label, rotating": labels([KAPPA], BOOMERANG),
    "replace": replaced(KAPPA / 2),
    "replace, rotating": replaced(KAPPA / 2, BOOMERANG),
    "add-remove": added(KAPPA),
    "student_t": outliers(KAPPA),
    "poisson": counts(KAPPA),
}
DAILY = ("label", "replace, rotating")


def account(site, cap=CAP, delta=DELTA):
    """What the site's own sensitivity, from declared bounds, says of a run with this cap: the least of both accounts."""
    k, rho = site.sensitivity.k_2, site.excess
    low, high = 0.0, run_epsilon(site.sensitivity, rho, cap, delta)
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (low, middle) if tail_delta(middle, k / rho, k * k * cap / rho) <= delta else (middle, high)
    return high


def found(sites, case, delta=DELTA, cap=CAP, horizon=HORIZON, **options):
    one, other = (
        log_ratio(run(site, case.velocity, cap, horizon, seed=i, **options), case.change, site.excess)
        for i, site in enumerate(sites)
    )
    return lower_bound(one, other, delta)


@pytest.mark.parametrize(
    ("name", "copies", "share"),
    [pytest.param(name, *SHORT, id=name) for name in DAILY]
    + [pytest.param(name, *LONG, id=f"long, {name}", marks=pytest.mark.long) for name in CASES],
)
def test_the_attack_stays_below_the_account_and_comes_near_it(tmp_path, name, copies, share):
    case = CASES[name]
    sites = pair(tmp_path, case, RHO)
    claimed = account(sites[0])
    assert share * claimed < found(sites, case, copies=copies) <= claimed


def test_it_stays_below_when_arrivals_lose_and_chains_add_up(tmp_path):
    case = CASES["label"]
    sites = pair(tmp_path, case, RHO)
    for options in ({"rival": 8.0}, {"chains": 4}):
        leaked = found(sites, case, copies=WIDTH // options.get("chains", 1), **options)
        assert leaked <= account(sites[0])


@pytest.mark.parametrize("name", ["label", pytest.param("poisson", marks=pytest.mark.long)])
def test_a_ledger_that_forgets_losing_arrivals_is_caught(tmp_path, name):
    case = CASES[name]
    sites = pair(tmp_path, case, RHO)
    options = {"rival": 8.0, "copies": WIDTH, "rule": losers_forgotten, "most_rounds": 20}
    assert found(sites, case, **options) > account(sites[0])


@pytest.mark.parametrize("name", ["label", pytest.param("replace, rotating", marks=pytest.mark.long)])
def test_a_ledger_that_does_not_add_up_chains_is_caught(tmp_path, name):
    case = CASES[name]
    sites = pair(tmp_path, case, RHO)
    assert found(sites, case, chains=16, copies=2000, rule=chains_forgotten) > account(sites[0])


@pytest.mark.parametrize("name", ["label", pytest.param("add-remove", marks=pytest.mark.long)])
def test_a_site_that_leaves_out_the_excess_rate_is_caught(tmp_path, monkeypatch, name):
    case = CASES[name]
    sites = pair(tmp_path, case, RHO)
    claimed = account(sites[0])
    for site in sites:
        monkeypatch.setattr(site, "excess", 1e-12)
    one, other = (
        run(site, case.velocity, CAP, HORIZON, copies=WIDTH, seed=i).counts.sum(1) for i, site in enumerate(sites)
    )
    assert lower_bound(one, other, DELTA) > claimed


@pytest.mark.long
@pytest.mark.parametrize("rule", [honest, speed_forgotten])
def test_on_rotations_path_length_is_charged_and_not_time(tmp_path, rule):
    case = labels([KAPPA], BOOMERANG, velocity=6.0)
    sites = pair(tmp_path, case, RHO)
    leaked = found(sites, case, horizon=HORIZON / 6, copies=20_000, rule=rule)
    assert leaked <= account(sites[0]) if rule is honest else leaked > account(sites[0])


@pytest.mark.parametrize("wrong", [False, True], ids=["K_1", "K_inf"])
def test_the_horizon_of_a_pure_arrival_needs_the_sum_over_six_coordinates(tmp_path, wrong):
    epsilon, rho, kappa = 1.5, 0.6, np.full(6, 0.9)
    horizon = censored_horizon(epsilon, kappa.max(), kappa.max() if wrong else kappa.sum(), rho)
    case = labels(kappa)
    sites = pair(tmp_path, case, rho)
    # One message, one arrival: nothing is charged, the horizon alone is the guarantee.
    leaked = found(sites, case, delta=0.0, cap=1e9, horizon=horizon, copies=WIDTH, most_rounds=1)
    assert leaked > epsilon if wrong else 0.3 * epsilon < leaked <= epsilon


@pytest.mark.parametrize("name", ["label", "replace, rotating"])
def test_no_byte_of_a_reply_says_more_than_the_arrivals(tmp_path, name):
    """Every byte follows from the plan, who rang, and time and coordinate of those who did; and that is what is charged."""
    case = CASES[name]
    dim, replies = len(case.center), []
    for k, site in enumerate(pair(tmp_path, case, RHO)):
        for number, horizon in enumerate((np.linspace(0.0, 0.1, WIDTH), np.full(WIDTH, 1e-12))):
            plan = a_plan(np.zeros((WIDTH, dim)), case.velocity, horizon, number)
            site.answer(plan)
            entry = read(tmp_path / f"{k}.db")[-1]
            time, rang, mark = _unpack(entry.reply, WIDTH)
            assert entry.reply == _pack(np.where(rang, time, horizon), rang, np.where(rang, mark, 0))
            assert np.all(time <= horizon) and np.all((0 <= mark) & (mark < dim))
            path = (np.asarray(x) for x in (plan.start, plan.duration, plan.velocity))
            seen = Exposure(case.dynamics, *path, time_grid(horizon, dim).unit).until(time)
            assert entry.exposure == pytest.approx(honest(seen, None, None, WIDTH)[0], rel=0.01)
            replies.append((rang, entry.reply))
    assert replies[0][0].any() and not replies[1][0].any()
    # Where nobody rang, neighbouring data sets give the same bytes.
    assert replies[1][1] == replies[3][1]
