"""The bounds on privacy loss that an account can use: the limit on spending, and the cost of arrivals.

Costs are measured as ``α s/2``: Gaussian noise with ``Δ²/σ² = s`` costs its Rényi divergence of order α.
The bound is chosen when an account is opened, before anything is revealed, and never changes: no bound covers a choice
that depends on what was revealed.

- ``tail`` (`tail_account`): arrivals and releases in any order, if arrivals have a ratio ``K/ρ`` of at most 1/(2α).
- ``renyi`` (`accountant`): the same for any ratio.
- ``gaussian`` (`gaussian_epsilon_delta`): releases alone, exactly.
"""

from __future__ import annotations

import math

from fedpdmc.privacy.accountant import (
    Sensitivity,
    cost_rate,
    divergence_growth,
    renyi_limit,
    running_epsilon,
    up,
)
from fedpdmc.privacy.gaussian_epsilon_delta import gaussian_epsilon, gaussian_limit
from fedpdmc.privacy.tail_account import tail_exposure

# The usual excess rate in units of α K.
USUAL_EXCESS = 2.0


def usual_ratio(alpha: float) -> float:
    """``K/ρ`` at the usual excess rate: the largest that the tail bound covers, with a margin for rounding."""
    return (1 + 1e-9) / (USUAL_EXCESS * alpha)


def account_limit(bound: str, alpha: float, epsilon: float, delta: float) -> float:
    """The largest total cost within (ε, δ); zero or negative if nothing may be spent."""
    if bound == "gaussian":
        return gaussian_limit(alpha, epsilon, delta)
    if bound == "tail":
        return alpha / 2 * tail_exposure(epsilon, delta, usual_ratio(alpha)) * (1 - 1e-12)
    return renyi_limit(alpha, epsilon, delta)


def best_bound(alpha: float, epsilon: float, delta: float) -> str:
    """The bound that allows the longer observed time for arrivals of the usual ratio."""
    x = usual_ratio(alpha)
    one = Sensitivity(x, x, x)
    fits = {bound: account_limit(bound, alpha, epsilon, delta) / arrival_cost(bound, alpha, one, 1.0) for bound in
            ("tail", "renyi")}  # fmt: skip
    return "tail" if fits["tail"] > fits["renyi"] else "renyi"


def arrival_cost(bound: str, alpha: float, sensitivity: Sensitivity, excess: float) -> float:
    """The cost of arrivals per unit of observed time (ZigZag) or path length (FactorisedBoomerang), rounded up.

    For the tail bound ``α/2 Σ κ_i²/ρ``, where ``Σ κ_i²`` is at most ``K_2²`` and ``K_1 K_∞``.
    """
    if bound == "renyi":
        return cost_rate(alpha, sensitivity, excess)
    return up(
        alpha / 2 * min(sensitivity.k_2 * (sensitivity.k_2 / excess), sensitivity.k_1 * (sensitivity.k_inf / excess))
    )


def inaccuracy_cost(bound: str, alpha: float) -> float:
    """The cost of probabilities that are accurate to a factor ``e^{±η}``, in units of η.

    For the tail bound: W is convex in l with a growing second derivative and ``W(0) = W'(0) = 0``, so
    ``W ≤ l W' ≤ l² W'' ≤ 2 ∂W/∂s``. A factor ``e^η`` of the likelihood ratio, and one of the law, thus cost no more than an
    exposure of 4η.
    """
    return alpha / (alpha - 1) if bound == "renyi" else 2 * alpha


def spent_epsilon(bound: str, alpha: float, cost: float, delta: float) -> float:
    """An ε that holds at δ at every moment of a run in which ``cost`` was spent."""
    if bound == "gaussian":
        return gaussian_epsilon(math.sqrt(2 * cost / alpha), delta)
    if bound == "tail":
        x = usual_ratio(alpha)
        cost = 2 * cost / alpha * divergence_growth(x, alpha) / (x * x * (alpha - 1)) if alpha >= 2 else cost
    return running_epsilon(alpha, cost, delta)
