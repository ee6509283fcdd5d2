import math

import numpy as np
import pytest

from fedpdmc.errors import InputError
from fedpdmc.privacy.accountant import censored_excess, censored_horizon, one_arrival_delta, one_arrival_excess

CASES = [(1.0, 0.3, 2.0), (0.2, 1.0, 50.0), (3.0, 5.0, 4.0)]


@pytest.mark.parametrize(("epsilon", "k", "rho"), CASES)
def test_theorem_bounds_what_two_constant_rates_give_away(epsilon, k, rho):
    # τ ~ Exp(ρ) against Exp(ρ + K): the ratio of densities exceeds e^ε beyond a time, and δ is what is left there.
    beyond = (epsilon + math.log1p(k / rho)) / k
    exact = math.exp(-rho * beyond) - math.exp(epsilon - (rho + k) * beyond)
    delta = one_arrival_delta(epsilon, k, rho)
    assert 0 < exact <= delta
    # It is not vacuous: twice the sensitivity breaks the figure for half of it somewhere.
    assert one_arrival_delta(epsilon, 2 * k, rho) > delta


@pytest.mark.parametrize(("epsilon", "delta", "k"), [(1.0, 1e-5, 0.1), (0.1, 1e-3, 2.0), (5.0, 0.2, 1.0)])
def test_the_least_excess_gives_the_delta_back(epsilon, delta, k):
    rho = one_arrival_excess(epsilon, delta, k)
    assert one_arrival_delta(epsilon, k, rho) == pytest.approx(delta, rel=1e-9)
    assert one_arrival_delta(epsilon, k, 0.99 * rho) > delta


@pytest.mark.parametrize("k", [0.01, 0.7, 3.0])
def test_the_paper_s_condition_is_enough_for_every_sensitivity(k):
    """``ρ ≥ K (1 + log(1/δ))/ε``, K below one too. The proof needs ``log(1 + ε/(1 + log(1/δ))) < log(1 + ε)``, as meant;
    without the first logarithm, as printed, it is false.
    """
    for epsilon in (0.1, 1.0, 4.0):
        for delta in (1e-6, 1e-2):
            rho = k * (1 + math.log(1 / delta)) / epsilon
            assert one_arrival_delta(epsilon, k, rho) <= delta
            inside = epsilon / (1 + math.log(1 / delta))
            assert math.log1p(k / rho) <= math.log1p(inside) * (1 + 1e-12) < math.log1p(epsilon) < epsilon
    assert not 1 + inside < math.log1p(0.1)


def worst_log_ratio(rates, other, horizon):
    """Largest |log ratio| of (time, index) and silence for two vectors of constant rates."""
    drift = abs(rates.sum() - other.sum())
    index = np.abs(np.log(rates / other))
    signed = np.log(rates / other) - (rates.sum() - other.sum()) * np.array([[0.0], [horizon]])
    return max(drift * horizon, np.abs(signed).max(), index.max() if horizon == 0 else 0.0)


def test_a_censored_arrival_is_pure_and_the_maximum_norm_is_not_enough():
    epsilon, kappa, rho, d = 1.5, 0.9, 0.6, 6
    k_inf, k_1 = kappa, d * kappa
    horizon = censored_horizon(epsilon, k_inf, k_1, rho)
    low, high = np.full(d, rho), np.full(d, rho + kappa)
    assert worst_log_ratio(high, low, horizon) <= epsilon + 1e-12
    mixed = np.where(np.arange(d) == 0, low, high), np.where(np.arange(d) == 0, high, low)
    # One coordinate rises while the others fall: the index and the drift add up, and the bound is attained.
    wrong = censored_horizon(epsilon, k_inf, k_inf, rho)
    assert worst_log_ratio(*mixed, horizon) <= epsilon + 1e-12
    assert worst_log_ratio(high, low, wrong) > epsilon


def test_the_excess_for_a_horizon_is_the_inverse():
    rho = censored_excess(1.0, 0.5, 0.3, 1.2)
    assert censored_horizon(1.0, 0.3, 1.2, rho) == pytest.approx(0.5)
    assert censored_excess(1.0, 1.0, 0.3, 1.2) == math.inf
    assert censored_horizon(0.1, 1.0, 1.0, 0.5) == 0.0


@pytest.mark.parametrize("call", [
    lambda: one_arrival_delta(-1, 1, 1),
    lambda: one_arrival_excess(1, 1.5, 1),
    lambda: one_arrival_excess(1, "small", 1),
    lambda: censored_horizon(1, 1, 0.5, 1),
])  # fmt: skip
def test_figures_that_make_no_sense_are_refused(call):
    with pytest.raises(InputError):
        call()
