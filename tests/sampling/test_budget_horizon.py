import jax.numpy as jnp
import numpy as np
import pytest

import fedpdmc as fp
from fedpdmc.errors import BudgetSpent
from fedpdmc.privacy.accountant import AccountStatus, Sensitivity
from fedpdmc.sampling.coordinator import State
from fedpdmc.sampling.engines.rounds import BudgetHorizon


def account(site, remaining):
    known = Sensitivity(0.1, 0.2, 0.1)
    return AccountStatus(site, 2, 1.0, 1e-6, 20.0, None, 1e9, 0.5, known, 0, False, remaining, 0.0, 0.0)


def state(t, events=0):
    chains = len(t)
    count = jnp.zeros(chains, int)
    seen = count + jnp.asarray(events, int)
    return State(jnp.zeros((chains, 2)), jnp.ones((chains, 2)), jnp.asarray(t), count, seen, count, count)


@pytest.mark.parametrize("sites", [2, 6])
def test_a_run_that_fits_never_runs_out_however_often_sites_object(sites):
    # One site rings, far more often than its excess rate says, and all others are watched to the end of the plan.
    rng, chains, end = np.random.default_rng(sites), 5, 4.0
    left = np.full(sites, 1.06 * chains * end)
    pace = BudgetHorizon(fp.ZigZag(), 2, lambda: [account(str(m), left[m]) for m in range(sites)], 0.0)
    assert pace.longest(chains)[0] >= end
    pace.promised = end
    t, rounds, events = np.zeros(chains), 0, 0
    # The first block ends early: it must leave enough for the rest that was promised.
    for until in (0.5, end):
        while np.any(t < until):
            horizon = np.minimum(np.asarray(pace(state(t, events / chains), until)), until - t)
            assert np.all(horizon[t < until] > 0)
            moved = np.minimum(rng.exponential(1 / 8, chains), horizon)
            events += int((moved < horizon).sum())
            winner = rng.integers(sites, size=chains)
            for m in range(sites):
                left[m] -= np.where(winner == m, moved, horizon).sum()
            t, rounds = t + moved, rounds + 1
            assert np.all(left > 0) and rounds < 3000
            t = np.where(until - t < 1e-6, until, t)
    assert np.all(t == end)


def test_what_does_not_fit_is_not_planned():
    pace = BudgetHorizon(fp.ZigZag(), 2, lambda: [account("a", 3.0), account("b", 9.0)], 0.0)
    fits, name = pace.longest(4)
    assert name == "a" and fits == pytest.approx(3.0 / (1.05 * 4))
    with pytest.raises(BudgetSpent):
        pace(state(np.zeros(4)), 1.0)
    assert np.all(np.asarray(pace(state(np.zeros(4)), 0.5)) <= (3.0 - 2.0) / 8)


def test_plans_are_short_enough_for_losing_arrivals_to_cost_little():
    pace = BudgetHorizon(fp.ZigZag(), 2, lambda: [account(str(m), 1e9) for m in range(10)], 0.0)
    assert np.asarray(pace(state(np.zeros(4)), 10.0))[0] == pytest.approx(1 / (10 * 2 * 0.5))
    # Where sites object more often than their excess rates say, plans follow.
    busy = np.asarray(pace(state(np.full(4, 1.0), events=100), 10.0))[0]
    assert busy == pytest.approx(1 / 100)
