import decimal
import itertools
import math

import numpy as np
import pytest

from fedpdmc.privacy.accountant import (
    ORDERS,
    Sensitivity,
    best_order,
    cost_rate,
    divergence_growth,
    gaussian_delta,
    gaussian_epsilon,
    gaussian_limit,
    growth_rate,
    renyi,
    renyi_limit,
    run_cap,
    run_epsilon,
    running_epsilon,
    to_epsilon,
)
from fedpdmc.privacy.budget import Budget
from fedpdmc.privacy.ledger import added

ALPHAS = (1.5, 2.0, 4.0, 8.0)


def growth(lam, other, alpha):
    """``Σ λ̃ g(λ/λ̃)``: the growth of E[L^α], exactly."""
    return np.sum(lam**alpha * other ** (1 - alpha) - alpha * lam + (alpha - 1) * other, -1)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_no_pair_of_rates_grows_faster_than_the_account(alpha):
    rng = np.random.default_rng(1)
    for rho, scale in ((1.0, 0.2), (0.3, 1.0), (5.0, 3.0)):
        change = scale * rng.normal(size=(4000, 5)) * rng.integers(0, 2, size=(4000, 5))
        base = rho + rng.exponential(size=(4000, 5)) * rng.integers(0, 2, size=(4000, 5))
        lam, other = base + np.maximum(change, 0), base + np.maximum(-change, 0)
        actual = growth(lam, other, alpha)
        found = np.abs(lam - other)
        for i in range(0, 4000, 40):
            k = Sensitivity(found[i].max() or 1e-9, found[i].sum() or 1e-9, np.linalg.norm(found[i]) or 1e-9)
            assert actual[i] <= growth_rate(alpha, k, rho) * (1 + 1e-9) + 1e-13


@pytest.mark.parametrize("alpha", ALPHAS)
def test_the_account_is_attained_by_one_coordinate_at_the_excess_rate(alpha):
    k, rho = 0.7, 2.0
    exact = growth(np.array([rho + k]), np.array([rho]), alpha)
    account = growth_rate(alpha, Sensitivity(k, k, k), rho)
    assert account == pytest.approx(exact, rel=1e-9 if alpha >= 2 else 0.2)


def varying_rates(rng, d, rho, kappa, times):
    """Rates of neighbouring data sets that wander apart and together, at least ρ, at most κ_i apart."""
    phase, speed = rng.uniform(0, 6, (2, d, 1))
    base = rho + np.maximum(0, np.sin(speed * times + phase))
    change = kappa[:, None] * np.sin(2.3 * speed * times - phase)
    return base + np.maximum(change, 0), base + np.maximum(-change, 0)


def supermartingale(lam, other, alpha, c, times):
    """``E_Q[L^α e^{−c τ∧H}]`` of a censored marked arrival, by quadrature."""
    step = times[1] - times[0]

    def cumulative(x):
        return np.concatenate([[0.0], np.cumsum((x[1:] + x[:-1]) / 2) * step])

    power = -alpha * cumulative(lam.sum(0)) + (alpha - 1) * cumulative(other.sum(0)) - c * times
    density = np.sum(lam**alpha * other ** (1 - alpha), 0) * np.exp(power)
    return np.trapezoid(density, times) + math.exp(power[-1])


@pytest.mark.parametrize("alpha", ALPHAS)
def test_quadrature_of_varying_marked_rates_stays_below_the_renyi_bound(alpha):
    rng, times = np.random.default_rng(5), np.linspace(0, 3, 6001)
    for _ in range(12):
        d, rho = int(rng.integers(1, 7)), float(rng.uniform(0.2, 3))
        kappa = rng.uniform(0, 1.5, d)
        lam, other = varying_rates(rng, d, rho, kappa, times)
        found = np.abs(lam - other)
        k = Sensitivity(found.max(), found.sum(0).max(), np.linalg.norm(found, axis=0).max())
        c = growth_rate(alpha, k, rho)
        assert supermartingale(lam, other, alpha, c, times) <= 1 + 1e-6
        assert supermartingale(other, lam, alpha, c, times) <= 1 + 1e-6


def test_quadrature_catches_an_account_with_the_largest_change_alone():
    times, d, rho, kappa, alpha = np.linspace(0, 1, 4001), 6, 1.0, 0.8, 2.0
    lam, other = np.full((d, 4001), rho + kappa), np.full((d, 4001), rho)
    k_inf = rho * divergence_growth(kappa / rho, alpha)
    right = growth_rate(alpha, Sensitivity(kappa, d * kappa, kappa * math.sqrt(d)), rho)
    assert supermartingale(lam, other, alpha, k_inf, times) > 1.1
    assert supermartingale(lam, other, alpha, right, times) <= 1 + 1e-5


def poisson_epsilon(k, rho, t, delta):
    """The exact ε at δ of t units of time at constant rates ρ + K against ρ, both ways round."""
    counts = np.arange(0, 8000)
    logs = [
        counts * math.log(rate * t) - rate * t - np.array([math.lgamma(n + 1) for n in counts])
        for rate in (rho + k, rho)
    ]

    def excess(epsilon, p, q):
        return np.sum(np.maximum(np.exp(p) - np.exp(epsilon + q), 0))

    found = 0.0
    for p, q in (logs, logs[::-1]):
        low, high = 0.0, 60.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if excess(middle, p, q) > delta else (low, middle)
        found = max(found, high)
    return found


def test_the_account_is_close_to_the_truth_for_constant_rates():
    k, rho, t, delta = 1.0, 12.5, 100.0, 1e-5
    exact, account = poisson_epsilon(k, rho, t, delta), run_epsilon(Sensitivity(k, k, k), rho, t, delta)
    assert exact == pytest.approx(15.6, abs=0.1)
    assert account == pytest.approx(16.7, abs=0.1)


def test_a_sensitivity_beyond_all_measure_buys_nothing():
    k = Sensitivity(1e250, 1e250, 1e250)
    assert run_cap(k, 1.0, 1.0, 1e-6) < 1e-100
    assert growth_rate(1.5, k, 1.0) == math.inf


def test_cap_and_epsilon_are_inverse():
    k = Sensitivity(0.02, 0.05, 0.03)
    cap = run_cap(k, 0.5, 2.0, 1e-6)
    assert run_epsilon(k, 0.5, cap, 1e-6) == pytest.approx(2.0, rel=1e-6)
    assert run_epsilon(k, 0.5, 1.01 * cap, 1e-6) > 2.0
    assert run_epsilon(k, 0.5, 0.0, 1e-6) == 0.0


@pytest.mark.parametrize(("epsilon", "delta"), [(0.1, 1e-6), (1.0, 1e-5), (8.0, 1e-3)])
def test_the_limit_of_an_account_is_what_dp_accounting_converts(epsilon, delta):
    budget = Budget(epsilon, delta)
    limit = renyi_limit(budget.alpha, epsilon, delta)
    assert to_epsilon([budget.alpha], [limit], delta)[0] == pytest.approx(epsilon, rel=1e-9)
    # The order is nearly the best for costs that grow like α.
    best = max(renyi_limit(a, epsilon, delta) / a for a in ORDERS)
    assert limit / best_order(epsilon, delta) == pytest.approx(best, rel=1e-12)
    # The line that holds at all times is above the cap, by little.
    assert epsilon < running_epsilon(budget.alpha, limit, delta) < 1.4 * epsilon + 0.1


def test_small_steps_cost_what_gaussian_noise_does():
    k, rho, t = 1e-4, 1.0, 100.0
    for alpha in ALPHAS:
        gaussian = alpha * k**2 * t / (2 * rho)
        assert renyi(alpha, Sensitivity(k, k, k), rho, t) == pytest.approx(gaussian, rel=1e-2)


def loss_of_paths(rng, k, rho, steps, h, paths):
    """``log L`` along Poisson paths of rate ρ + K, on a grid of times."""
    counts = rng.poisson((rho + k) * h, size=(paths, steps)).cumsum(1)
    times = h * np.arange(1, steps + 1)
    return counts * math.log1p(k / rho) - k * times, times


def test_the_running_line_holds_at_all_times_and_the_least_over_orders_does_not():
    rng = np.random.default_rng(11)
    k, rho, delta = 1.0, 4.0, 0.01
    loss, times = loss_of_paths(rng, k, rho, 400, 0.05, 60000)
    one = Sensitivity(k, k, k)
    alpha = 4.0
    line = np.array([running_epsilon(alpha, renyi(alpha, one, rho, t), delta) for t in times])
    crossed = np.mean(np.any(loss > line, 1))
    assert crossed <= delta + 3 * math.sqrt(delta / 60000)
    orders = np.array([1.1, 1.3, 1.6, 2, 2.5, 3, 4, 6, 9, 14, 20, 30])
    least = np.array([min(running_epsilon(a, renyi(a, one, rho, t), delta) for a in orders) for t in times])
    assert np.mean(np.any(loss > least, 1)) > crossed + 5 * math.sqrt(delta / 60000)


@pytest.mark.parametrize("alpha", [1.03, *ALPHAS, 60.0])
def test_no_cost_is_rounded_down_or_to_zero(alpha):
    """Against 60 digits, down to changes that a 64-bit ``1 + K/ρ`` does not see."""
    with decimal.localcontext(prec=60):
        a = decimal.Decimal(alpha)
        for k, rho in itertools.product((1e-3, 1e-9, 1e-20, 1e-40, 0.3), (1.0, 1e-2, 1e12, 7.3)):
            x = decimal.Decimal(k) / decimal.Decimal(rho)
            if x < decimal.Decimal("1e-15"):
                exact = a * (a - 1) * x * x / 2 * (1 + (a - 2) * x / 3)
            else:
                exact = (1 + x) ** a - 1 - a * x
            found = divergence_growth(k / rho, alpha)
            assert exact <= decimal.Decimal(found) <= exact * decimal.Decimal("1.001") + decimal.Decimal("5e-324")
            rate = growth_rate(alpha, Sensitivity(k, k, k), rho)
            assert 0 < decimal.Decimal(rho) * exact <= decimal.Decimal(rate)


def test_a_budget_with_an_excess_beyond_all_measure_is_still_charged():
    budget = Budget(1.0, 1e-6, excess=1e18)
    rate = cost_rate(budget.alpha, Sensitivity(1e-3, 1e-3, 1e-3), 1e18)
    assert rate == pytest.approx(budget.alpha * 1e-6 / 2e18, rel=1e-6)
    least = cost_rate(budget.alpha, Sensitivity(1e-200, 1e-200, 1e-200), 1e18)
    assert 0 < least < 1e-300
    # Nor is a charge lost beside what was spent before.
    assert added(0.5, 1e-30) > 0.5 and added(0.5, 0.0) == 0.5 and added(added(0.1, 0.2), 0.3) >= 0.6


@pytest.mark.parametrize("delta", [1e-3, 1e-6, 1e-9])
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 4.0, 20.0])
def test_releases_alone_are_accounted_exactly(epsilon, delta):
    """Against the hockey-stick divergence by quadrature; less than by Rényi divergence at any order, and not too little."""
    alpha = best_order(epsilon, delta)
    limit = gaussian_limit(alpha, epsilon, delta)
    mu = math.sqrt(2 * limit / alpha)
    loss = np.linspace(epsilon, mu * mu / 2 + 40 * mu, 400001)
    density = np.exp(-((loss - mu * mu / 2) ** 2) / (2 * mu * mu)) / (mu * math.sqrt(2 * math.pi))
    exact = np.trapezoid(-np.expm1(epsilon - loss) * density, loss)
    assert exact == pytest.approx(gaussian_delta(epsilon, mu), rel=1e-4)
    assert 0.999 * delta < exact * (1 + 1e-5) and exact <= delta * (1 + 1e-4)
    assert renyi_limit(alpha, epsilon, delta) < limit < 1.4 * renyi_limit(alpha, epsilon, delta)
    assert gaussian_epsilon(mu, delta) == pytest.approx(epsilon, rel=1e-5)
    # Noise that is a tenth too small is not within the account.
    assert gaussian_delta(epsilon, mu / 0.9) > delta


def test_a_privacy_loss_distribution_agrees():
    """Three releases of different noise, composed numerically by dp-accounting."""
    from dp_accounting.pld import privacy_loss_distribution as pld

    multipliers, delta = (2.0, 3.0, 5.0), 1e-6
    one, *others = (
        pld.from_gaussian_mechanism(m, value_discretization_interval=1e-4, use_connect_dots=True) for m in multipliers
    )
    for other in others:
        one = one.compose(other)
    mu = math.sqrt(sum(m**-2.0 for m in multipliers))
    assert gaussian_epsilon(mu, delta) == pytest.approx(one.get_epsilon_for_delta(delta), rel=1e-3)
