"""Exact accounting in (ε, δ) for releases with Gaussian noise alone. It needs neither JAX nor NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable

# Part of ε reserved for discrete noise: far above 2⁻⁵² for each released number.
DISCRETE = 1e-9


def gaussian_delta(epsilon: float, mu: float) -> float:
    """The smallest δ at ε of releases with Gaussian noise and ``μ² = Σ Δ²/σ²``: ``Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ)``.

    Exact (Balle and Wang, 2018): the privacy loss is Gaussian with mean μ²/2 and variance μ². Also valid for releases whose
    points and noise depend on earlier ones, provided the sum never exceeds μ² (Smith and Thakurta, 2022).
    """
    first = math.erfc((epsilon / mu - mu / 2) / math.sqrt(2)) / 2
    second = math.exp(min(epsilon, 700.0)) * math.erfc((epsilon / mu + mu / 2) / math.sqrt(2)) / 2
    return first - second


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The smallest ε at δ of releases with Gaussian noise and ``μ² = Σ Δ²/σ²``, rounded up."""
    if mu <= 0:
        return 0.0
    high = 1.0
    while gaussian_delta(high, mu) > delta:
        high *= 2
    return _bisected(lambda epsilon: gaussian_delta(epsilon, mu) > delta, 0.0, high)[1] + DISCRETE


def gaussian_limit(alpha: float, epsilon: float, delta: float) -> float:
    """The limit for releases with Gaussian noise at order α: ``α μ²/2`` for the largest μ within (ε, δ), rounded down.

    Only for an account in which nothing else is charged. `DISCRETE` allows for discrete Gaussian noise on a grid of
    2⁻³⁰ σ: that law is the continuous one, rounded to the grid, up to a factor within ``e^{±2⁻⁵³}`` for each number and
    40 standard deviations (the midpoint rule, with an error of ``(1 + z²)/24`` cells squared), and rounding a shifted
    number is post-processing.
    """
    if epsilon <= 2 * DISCRETE:
        return 0.0
    mu = _bisected(lambda mu: gaussian_delta(epsilon - DISCRETE, mu) * (1 + 1e-9) <= delta, 1e-9, 1e3)[0]
    return alpha * mu * mu / 2 * (1 - 1e-9)


def _bisected(below: Callable[[float], bool], low: float, high: float) -> tuple[float, float]:
    """Bisection: the last point where ``below`` is true and the first where it is false."""
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) else (low, middle)
    return low, high
