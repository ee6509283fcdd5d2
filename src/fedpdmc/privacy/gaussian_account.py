"""The exact account of releases with Gaussian noise alone, in (ε, δ). It needs neither JAX nor NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable

# Of ε, for noise that is discrete: far above 2⁻⁵² for each of the numbers that are released.
DISCRETE = 1e-9


def gaussian_delta(epsilon: float, mu: float) -> float:
    """The least δ at ε of releases with Gaussian noise and ``μ² = Σ Δ²/σ²``: ``Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ)``.

    Exact (Balle and Wang, 2018): the privacy loss is Gaussian with mean μ²/2 and variance μ². It holds for releases whose
    points, and noise, depend on earlier ones, as long as the sum never exceeds μ² (Smith and Thakurta, 2022).
    """
    first = math.erfc((epsilon / mu - mu / 2) / math.sqrt(2)) / 2
    second = math.exp(min(epsilon, 700.0)) * math.erfc((epsilon / mu + mu / 2) / math.sqrt(2)) / 2
    return first - second


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The least ε at δ of releases with Gaussian noise and ``μ² = Σ Δ²/σ²``, rounded up."""
    if mu <= 0:
        return 0.0
    high = 1.0
    while gaussian_delta(high, mu) > delta:
        high *= 2
    return _bisected(lambda epsilon: gaussian_delta(epsilon, mu) > delta, 0.0, high)[1] + DISCRETE


def gaussian_limit(alpha: float, epsilon: float, delta: float) -> float:
    """What releases with Gaussian noise may cost at order α, ``α μ²/2`` for the largest μ that is (ε, δ), rounded down.

    It is for an account in which nothing else is charged. `DISCRETE` is for noise of the discrete Gaussian law on a grid of
    2⁻³⁰ σ: that law is the continuous one, rounded to the grid, up to a factor within ``e^{±2⁻⁵³}`` for each number and
    40 standard deviations (the midpoint rule, with an error of ``(1 + z²)/24`` cells squared), and rounding a shifted
    number is post-processing.
    """
    if epsilon <= 2 * DISCRETE:
        return 0.0
    mu = _bisected(lambda mu: gaussian_delta(epsilon - DISCRETE, mu) * (1 + 1e-9) <= delta, 1e-9, 1e3)[0]
    return alpha * mu * mu / 2 * (1 - 1e-9)


def _bisected(below: Callable[[float], bool], low: float, high: float) -> tuple[float, float]:
    """Around the place where ``below`` turns from true to false."""
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) else (low, middle)
    return low, high
