"""Privacy accounting of a whole run: Rényi divergence per unit of observed time, and its conversion to (ε, δ).

Let ``λ, λ̃ ≥ ρ`` be the rates of a coordinate under neighbouring data sets and L the likelihood ratio of everything that a
site revealed. Under the law in the denominator ``d/dt E[L^α] = E[L^α Σ_i λ̃_i g(λ_i/λ̃_i)]``, ``g(r) = r^α − α r + α − 1``.
Along a fixed difference ``λ̃ g(λ/λ̃)`` falls as both rates grow, so it is largest where the smaller one is ρ, and the
larger in the numerator is the worse case: ``ρ g(1 + K/ρ)``. Hence ``L^α e^{−c(α) t}`` is a supermartingale in observed
time, however adaptively plans were chosen, and a run with observed time at most T has Rényi divergence at most
``T c(α)/(α − 1)``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from fedpdmc.errors import InputError
from fedpdmc.validation import positive, probability

# Orders at which a cap that is fixed beforehand may be converted.
ORDERS = tuple(1 + 10 ** (k / 40) for k in range(-60, 221))
# Above the relative error of a few operations in 64-bit floating point.
ROUNDING = 2.0**-46


class Sensitivity(NamedTuple):
    """How much one record can change a site's flip rates: in max, sum and Euclidean norm over whitened coordinates."""

    k_inf: float
    k_1: float
    k_2: float


def up(value: float) -> float:
    """Round up, past the error of a few floating-point operations: costs are never rounded down, nor to zero."""
    return math.nextafter(value * (1 + ROUNDING), math.inf)


def divergence_growth(x: float, alpha: float) -> float:
    """``g(1 + x) = (1 + x)^α − 1 − α x`` for x ≥ 0, rounded up.

    For small ``α x`` by Taylor: ``½ α (α−1) x² (1 + (α−2) x/3 (1 + θ)^{α−3})`` with θ between 0 and x, where the last
    factor is at most ``1 + 2αx``, and the term in ``α − 2`` is left out if it is negative.
    """
    if alpha * x < 1e-4:
        third = max(alpha - 2, 0.0) * x / 3 * (1 + 2 * alpha * x)
        return up(0.5 * alpha * (alpha - 1) * x * x * (1 + third))
    power = alpha * math.log1p(x)
    if power > 700:
        return math.inf
    # Rounding errors of the power, of the exponential and of the difference.
    return up(math.expm1(power) - alpha * x + 2.0**-50 * (power + 2) * math.exp(power))


def growth_rate(alpha: float, sensitivity: Sensitivity, excess: float) -> float:
    """``c(α)``: growth of ``log E[L^α]`` per unit of observed time (ZigZag) or path length (FactorisedBoomerang).

    The smaller of two bounds. From ``K_2``: ``x ↦ ρ g(1 + √x/ρ)`` is convex for α ≥ 2, so in the worst case
    all of the change is in one coordinate, ``ρ g(1 + K_2/ρ)``; for 1 < α < 2 ``g(1 + x) ≤ α(α−1)x²/2``. From
    ``K_1, K_∞``: g is convex, so ``(K_1/K_∞) ρ g(1 + K_∞/ρ)``.
    """
    if not alpha > 1:
        raise InputError("alpha", repr(alpha), "Give an order above 1.")
    rho = positive("excess", excess)
    k_inf, k_1, k_2 = sensitivity
    if alpha >= 2:
        euclidean = rho * divergence_growth(k_2 / rho, alpha)
    else:
        euclidean = alpha * (alpha - 1) * k_2 * (k_2 / (2 * rho))
    by_coordinate = (k_1 / k_inf) * rho * divergence_growth(k_inf / rho, alpha)
    return up(min(euclidean, by_coordinate))


def cost_rate(alpha: float, sensitivity: Sensitivity, excess: float) -> float:
    """Rényi divergence ``c(α)/(α − 1)`` per unit of observed time, rounded up."""
    return up(growth_rate(alpha, sensitivity, excess) / (alpha - 1))


def renyi(alpha: float, sensitivity: Sensitivity, excess: float, observed: float) -> float:
    """Rényi divergence ``T c(α)/(α − 1)`` of a run whose observed time never exceeds T = ``observed``, rounded up."""
    return up(observed * cost_rate(alpha, sensitivity, excess)) if observed > 0 else 0.0


def to_epsilon(orders: Sequence[float], divergences: Sequence[float], delta: float) -> tuple[float, float]:
    """The smallest ε at this δ and the order that gives it, by ``dp_accounting``.

    The divergences must hold for a cap fixed beforehand: at the observed time, which may depend on arrivals, the minimum
    over orders is no guarantee.
    """
    try:
        from dp_accounting.rdp import rdp_privacy_accountant as rdp
    except ImportError as error:
        raise InputError("privacy", "dp-accounting is missing", "pip install 'fedpdmc[privacy]'.") from error
    pairs = [(a, r) for a, r in zip(orders, divergences, strict=True) if math.isfinite(r)]
    if not pairs:
        return math.inf, math.nan
    epsilon, order = rdp.compute_epsilon([a for a, _ in pairs], [r for _, r in pairs], probability("delta", delta))
    return float(epsilon), float(order)


def run_epsilon(sensitivity: Sensitivity, excess: float, cap: float, delta: float) -> float:
    """ε of a whole run with a cap on observed time that is fixed beforehand."""
    if cap <= 0:
        return 0.0
    return to_epsilon(ORDERS, [renyi(a, sensitivity, excess, cap) for a in ORDERS], delta)[0]


def run_cap(sensitivity: Sensitivity, excess: float, epsilon: float, delta: float) -> float:
    """The longest observed time whose `run_epsilon` is at most ε."""
    epsilon, delta = positive("epsilon", epsilon), probability("delta", delta)
    best = 0.0
    for alpha in ORDERS:
        rate = cost_rate(alpha, sensitivity, excess)
        if math.isfinite(rate) and (limit := renyi_limit(alpha, epsilon, delta)) > 0:
            best = max(best, limit / rate)
    return best


def renyi_limit(alpha: float, epsilon: float, delta: float) -> float:
    """The largest Rényi divergence of order α that implies (ε, δ); negative if none does.

    ``ε − log(1 − 1/α) + log(α δ)/(α − 1)``, the conversion that `to_epsilon` makes, solved for the divergence and rounded
    down.
    """
    first, second = math.log1p(-1 / alpha), math.log(alpha * delta) / (alpha - 1)
    return epsilon - first + second - ROUNDING * (epsilon + abs(first) + abs(second))


def best_order(epsilon: float, delta: float) -> float:
    """The order at which an account for (ε, δ) is kept: the one with the largest ``limit(α)/α``.

    Costs of order ``α η`` (small steps, Gaussian noise) then go furthest. It depends on nothing that happens in a run.
    """
    epsilon, delta = positive("epsilon", epsilon), probability("delta", delta)
    return max(ORDERS, key=lambda alpha: renyi_limit(alpha, epsilon, delta) / alpha)


def running_epsilon(alpha: float, divergence: float, delta: float) -> float:
    """The line ``ε_t = (c(α) t + log(1/δ))/(α − 1)`` with ``divergence = c(α) t/(α − 1)``, for α fixed beforehand.

    ``L^{α−1} e^{−c t}`` is a supermartingale under the law in the numerator, so by Ville's inequality the probability that
    ``log L_t`` ever exceeds the line is at most δ: it holds at all t simultaneously, for any stopping rule.
    """
    return divergence + math.log(1 / delta) / (alpha - 1)
