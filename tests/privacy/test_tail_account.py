"""The numerical account of arrivals and releases together, against adversaries that choose as they go."""

import math

import numpy as np
import pytest
from scipy import stats
from tests.privacy.support import a_ledger, a_plan, opened, private_site

import fedpdmc as fp
from fedpdmc.errors import BudgetSpent, InputError
from fedpdmc.privacy.accountant import (
    Sensitivity,
    account_limit,
    arrival_cost,
    best_bound,
    best_order,
    gaussian_delta,
    gaussian_limit,
    inaccuracy_cost,
    renyi_limit,
    spent_epsilon,
    tail_delta,
    tail_exposure,
    usual_ratio,
)
from fedpdmc.privacy.ledger import BOUNDS, Account, read

CASES = [(0.5, 1e-5), (1.0, 1e-6), (4.0, 1e-5), (8.0, 1e-6)]


def poisson(epsilon, ratio, exposure):
    """The exact δ of a Poisson process that a record makes faster."""
    mean = exposure / ratio**2
    n = np.arange(0, int(mean * (1 + ratio) + 40 * math.sqrt(mean) + 60))
    loss = n * math.log1p(ratio) - ratio * mean
    return float(np.sum(stats.poisson.pmf(n, mean) * np.maximum(np.exp(loss) - math.exp(epsilon), 0)))


class Adversary:
    """The best of all ways to choose mechanisms as the likelihood ratio goes: values by backward induction.

    On a grid of log L; linear in L between its points, which a convex function lies below.
    """

    def __init__(self, epsilon, exposure, ratios, steps=12):
        self.y = np.linspace(-3.0, epsilon + 4.0, 1601)
        self.value = np.maximum(np.exp(self.y) - math.exp(epsilon), 0)
        self.laws = [self.law(ratio, exposure / steps) for ratio in ratios]
        for _ in range(steps):
            self.value = np.max([self.mean(*law) for law in self.laws], 0)

    @staticmethod
    def law(ratio, exposure):
        """Jumps of log L and their chances: up or down for positive and negative ratios, Gaussian for zero."""
        if ratio == 0:
            z = np.linspace(-9, 9, 181)
            chance = stats.norm.pdf(z) / stats.norm.pdf(z).sum()
            jump = np.sqrt(exposure) * z - exposure / 2
            return jump - math.log(np.sum(chance * np.exp(jump))), chance
        n = np.arange(60)
        rate, factor = (1.0, 1 + ratio) if ratio > 0 else (1 - ratio, 1 / (1 - ratio))
        time = exposure / ratio**2
        return n * math.log(factor) - (factor - 1) * rate * time, stats.poisson.pmf(n, rate * time)

    def mean(self, jump, chance):
        levels = np.exp(self.y)
        to = np.exp(self.y[:, None] + jump)
        found = np.interp(to, levels, self.value, left=self.value[0])
        beyond = to > levels[-1]
        slope = (self.value[-1] - self.value[-2]) / (levels[-1] - levels[-2])
        found = np.where(beyond, self.value[-1] + slope * (to - levels[-1]), found)
        return found @ chance

    @property
    def delta(self):
        return float(np.interp(0.0, self.y, self.value))


@pytest.mark.parametrize(("epsilon", "delta"), CASES)
def test_no_adversary_who_chooses_as_he_goes_reveals_more(epsilon, delta):
    alpha = best_order(epsilon, delta)
    x = usual_ratio(alpha)
    exposure = tail_exposure(epsilon, delta, x)
    assert 0.99 * delta < tail_delta(epsilon, x, exposure) <= delta
    found = Adversary(epsilon, exposure, [x, -x, x / 3, -x / 3, 0.0]).delta
    # Not too little either, and an account that were a fifth larger would not hold.
    assert 0.5 * delta < found < delta
    assert Adversary(epsilon, 1.2 * exposure, [x, -x, 0.0]).delta > delta
    # Nor does it cover arrivals of a larger ratio.
    assert Adversary(epsilon, exposure, [6 * x, -6 * x]).delta > 1.5 * delta


@pytest.mark.parametrize(("epsilon", "delta"), CASES)
def test_it_lies_between_the_exact_worst_case_and_the_renyi_account(epsilon, delta):
    alpha = best_order(epsilon, delta)
    x = usual_ratio(alpha)
    exposure, one = tail_exposure(epsilon, delta, x), Sensitivity(x, x, x)
    assert 0.6 * delta < poisson(epsilon, x, exposure) < delta
    assert gaussian_delta(epsilon, math.sqrt(exposure)) < delta
    time = {bound: account_limit(bound, alpha, epsilon, delta) / arrival_cost(bound, alpha, one, 1.0) for bound in
            ("tail", "renyi")}  # fmt: skip
    assert 1.08 < time["tail"] / time["renyi"] < 1.25 and best_bound(alpha, epsilon, delta) == "tail"
    assert time["tail"] * x**2 == pytest.approx(exposure, rel=1e-9) and time["tail"] * x**2 <= exposure
    assert account_limit("tail", alpha, epsilon, delta) < gaussian_limit(alpha, epsilon, delta)
    # A split over coordinates costs no more than its sum of squares.
    split = Sensitivity(x / 2, 2 * x, x)
    assert arrival_cost("tail", alpha, split, 1.0) == pytest.approx(arrival_cost("tail", alpha, one, 1.0))


def test_inaccurate_probabilities_cost_enough():
    """A factor on the likelihood ratio and on the law is covered by the exposure that is charged for it."""
    epsilon, delta, eta = 2.0, 1e-5, 1e-3
    alpha = best_order(epsilon, delta)
    x = usual_ratio(alpha)
    exposure = tail_exposure(epsilon, delta, x)
    extra = 2 / alpha * inaccuracy_cost("tail", alpha) * eta
    assert math.exp(eta) * tail_delta(epsilon - eta, x, exposure - extra) <= delta
    assert math.exp(eta) * tail_delta(epsilon - eta, x, exposure) > delta


def test_where_it_is_worse_the_renyi_account_is_kept():
    alpha = best_order(200.0, 1e-6)
    assert best_bound(alpha, 200.0, 1e-6) == "renyi"
    for epsilon in (200.0, 2e4):
        assert fp.Budget(epsilon, 1e-6).terms().bound == "renyi"
    assert fp.Budget(2.0, 1e-6).terms().bound == "tail"
    explicit = fp.Budget(2.0, 1e-6, excess=0.1).terms()
    assert explicit.bound == "renyi" and explicit.limit == renyi_limit(explicit.alpha, 2.0, 1e-6)
    assert fp.Budget(2.0, 1e-6).terms(releases_only=True).bound == "gaussian"
    for terms in ({"release": 0.5}, {"granted": (1.0, 1e-6)}):
        assert fp.Budget(2.0, 1e-6, **terms).terms(releases_only=True).bound == "tail"
    alpha = best_order(2.0, 1e-6)
    for bound in BOUNDS:
        limit = account_limit(bound, alpha, 2.0, 1e-6)
        assert spent_epsilon(bound, alpha, 0.1 * limit, 1e-6) < spent_epsilon(bound, alpha, limit, 1e-6)


@pytest.mark.filterwarnings("ignore:The noise that the privacy budgets ask for")
def test_an_account_keeps_the_bound_it_was_opened_with(tmp_path):
    """The bound is chosen before anything is revealed: what was revealed has no part in it."""
    ledger = a_ledger(tmp_path / "ledger.db")
    terms = {"epsilon": 2.0, "delta": 1e-6, "dataset": None}
    site = private_site(ledger, **terms)
    fp.sample([site], fp.models.normal_prior(2), seed=1, progress=False)
    with pytest.raises(BudgetSpent, match="releases alone"):
        opened(site)
    account = next(e for e in read(ledger) if e.kind == "account")
    assert '"bound": "gaussian"' in account.detail
    other = a_ledger(tmp_path / "other.db")
    guard = opened(private_site(other, **terms))
    assert guard.account.bound == "tail" and guard.sensitivity.k_2 / guard.excess <= usual_ratio(guard.account.alpha)
    guard.answer(a_plan([0.0, 0.0], [1.0, -1.0], 1e-3))
    spent = guard.ledger.spent("records")
    assert 0 < spent <= 1.01 * guard.account.alpha / 2 * guard.sensitivity.k_2**2 / guard.excess * 1e-3
    with pytest.raises(InputError, match="covers rates of at least"):
        opened(private_site(other, excess=guard.excess / 2, **terms), run="another")
    assert guard.ledger.spent("records") == spent
    # One that was opened before bounds were named has Rényi's.
    assert Account("a", 1.0, 1e-6, "replace", 2.0, 0.1).bound == "renyi"


@pytest.mark.filterwarnings("ignore:The noise that the privacy budgets ask for")
def test_what_a_study_was_granted_is_for_one_kind_of_answer(tmp_path):
    """Released summaries alone may cost a little more than with arrivals: a study that mixes them has the lesser."""
    prior = fp.models.normal_prior(2)
    terms = {"epsilon": 9.0, "delta": 1e-6, "granted": (2.0, 1e-6), "dataset": None}
    site = private_site(a_ledger(tmp_path / "arrivals first.db"), **terms)
    opened(site).answer(a_plan([0.0, 0.0], [1.0, -1.0], 1e-3))
    with pytest.raises(BudgetSpent, match="has spent part of its grant on arrivals"):
        fp.sample([site], prior, method="private-laplace", seed=1, progress=False)
    site = private_site(a_ledger(tmp_path / "summaries first.db"), **terms)
    fp.sample([site], prior, method="private-laplace", seed=1, progress=False)
    with pytest.raises(BudgetSpent, match="grant to study 'study' was opened for releases alone"):
        opened(site)
    # Another study has a grant of its own.
    opened(private_site(tmp_path / "summaries first.db", **terms, study="another"))
