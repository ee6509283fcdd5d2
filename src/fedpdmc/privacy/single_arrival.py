"""Guarantees for a single arrival: the paper's Theorem 5.1, its inverse, and the censored arrival, which needs no δ."""

from __future__ import annotations

import math

from fedpdmc.errors import InputError
from fedpdmc.validation import positive, probability


def one_arrival_delta(epsilon: float, sensitivity: float, excess: float) -> float:
    """δ of ONE switching time, ``exp(−(ρ/K)(ε − log(1 + K/ρ)))`` (paper, Theorem 5.1; any K > 0).

    The log ratio of the densities of τ is at most ``log(1 + K/ρ) + K τ``: above ε only if τ exceeds
    ``(ε − log(1 + K/ρ))/K``, and ``P(τ > t) ≤ e^{−ρ t}``. It covers neither the mark nor a second arrival.

    Parameters
    ----------
    epsilon : float
    sensitivity : float
        K: how much one record can change the rate.
    excess : float
        ρ: the least rate.
    """
    epsilon, k, rho = positive("epsilon", epsilon), positive("sensitivity", sensitivity), positive("excess", excess)
    return min(1.0, math.exp(-(rho / k) * (epsilon - math.log1p(k / rho))))


def one_arrival_excess(epsilon: float, delta: float, sensitivity: float) -> float:
    """The smallest excess rate ρ for which `one_arrival_delta` is at most δ.

    With ``x = ρ/K`` the exponent ``x (ε − log(1 + 1/x))`` increases where it is positive, so there is one solution.
    """
    epsilon, delta = positive("epsilon", epsilon), probability("delta", delta)
    k = positive("sensitivity", sensitivity)
    wanted = math.log(1 / delta)
    low = 1 / math.expm1(epsilon)
    high = 2 * low + 2 * wanted / epsilon
    while high * (epsilon - math.log1p(1 / high)) < wanted:
        high *= 2
    for _ in range(200):
        middle = 0.5 * (low + high)
        if middle * (epsilon - math.log1p(1 / middle)) < wanted:
            low = middle
        else:
            high = middle
    return high * k


def censored_horizon(epsilon: float, k_inf: float, k_1: float, excess: float) -> float:
    """The longest plan whose one arrival (time, index, or "none") is ε-DP with δ = 0: ``(ε − log(1 + K_∞/ρ))/K_1``.

    The density of (t, i) changes by at most the factor ``(1 + K_∞/ρ) e^{K_1 t}``, the probability of no arrival by
    ``e^{K_1 H}``. ``K_1`` bounds the change of the *total* rate; ``K_∞`` in its place is wrong as soon as d > 1.

    Returns
    -------
    float
        Zero if even an immediate arrival costs more than ε: then ρ is too small.
    """
    epsilon, rho = positive("epsilon", epsilon), positive("excess", excess)
    k_inf, k_1 = positive("k_inf", k_inf), positive("k_1", k_1)
    if k_1 < k_inf:
        raise InputError("k_1", repr(k_1), f"The sum over coordinates is at least their maximum, {k_inf!r}.")
    return max(0.0, (epsilon - math.log1p(k_inf / rho)) / k_1)


def censored_excess(epsilon: float, horizon: float, k_inf: float, k_1: float) -> float:
    """The smallest excess rate ρ for which a plan of length ``horizon`` is ε-DP, infinite if ``K_1 H ≥ ε``."""
    left = positive("epsilon", epsilon) - positive("k_1", k_1) * positive("horizon", horizon)
    return positive("k_inf", k_inf) / math.expm1(left) if left > 0 else math.inf
