"""Numerical accounting of arrivals and Gaussian releases together, by a tail bound on privacy loss. It needs no NumPy.

Let L be the likelihood ratio of all that was revealed, ``a = e^ε``, and ``f(l) = (l − b)_+²/(4(a − b))`` with ``0 < b < a``.
Then ``(l − a)_+ ≤ f(l)``, with equality at ``l = 2a − b``, so ``δ ≤ E[f(L)]`` under the law in the denominator.

Let ``W(l, s) = E[f(l Λ_s)]``, where Λ is the likelihood ratio of Poisson processes of rates ``ρ(1 + x)`` and ρ, observed
for the time ``s/(x² ρ)``. Its generator in s is ``A W = (W(l(1 + x)) − W(l) − x l W')/x²``. As ``f''`` does not decrease,
neither does ``W'' = E[Λ² f''(lΛ)]``. With ``φ(y) = W(l(1 + y)) − W(l) − y l W' = y² l² ∫₀¹ (1 − θ) W''(l(1 + θy)) dθ``:

- ``φ(y)/y²`` does not decrease, so an arrival process of ratio ``y ≤ x`` and exposure ``ds = ρ y² dt`` adds at most
  ``A W ds``;
- so does one in which the record lowers the rate, and a sum over coordinates with ``Σ y_i² ≤ y²``;
- ``λ̃ (W(lλ/λ̃) − W(l)) − (λ − λ̃) l W'`` is convex and homogeneous in (λ, λ̃) and zero where they agree, so it falls when both
  grow by the same amount: rates of exactly ρ are the worst case;
- Gaussian noise with ``μ² = Δ²/σ²`` is the limit ``y → 0`` with exposure μ²: ``½ l² W'' ≤ A W``.

Hence ``W(L, S − s)`` is a supermartingale as long as the total exposure s stays below S, however adaptively plans and
releases are chosen, and ``δ ≤ W(1, S)``: an expectation over one Poisson variable, minimised over b.
"""

from __future__ import annotations

import math
from functools import lru_cache

from fedpdmc.privacy.gaussian_epsilon_delta import gaussian_limit

# Part of ε reserved for discrete noise, and part of δ for rounding of the sums.
DISCRETE, ROUNDING = 1e-9, 1e-9
# Standard deviations beyond which probabilities underflow.
FAR = 40.0
# Logarithm of the largest useful number.
LARGEST = 600.0
# ε above which the Rényi bound is much better.
MOST = 100.0
# Smallest log(b/a) of the search for b.
LOWEST = 4.0


def tail_delta(epsilon: float, ratio: float, exposure: float) -> float:
    """A bound on δ at ε, rounded up: ``min_b E[(Λ − b)_+²]/(4(e^ε − b))`` for jumps of at most ``ratio``."""
    step, mean = math.log1p(ratio), exposure / ratio**2
    if mean <= 0:
        return 0.0
    tilted = mean * (1 + ratio) ** 2
    first = max(1, math.ceil((epsilon - LOWEST + ratio * mean) / step))
    last = max(math.ceil(tilted + FAR * math.sqrt(tilted)), first) + 400
    best, square, linear, mass = 1.0, 0.0, 0.0, 0.0
    for n in range(last, first - 1, -1):
        loss = n * step - ratio * mean - epsilon
        log_weight = n * math.log(mean) - mean - math.lgamma(n + 1) + epsilon
        if log_weight + 2 * max(loss, 0.0) > LARGEST:
            return 1.0
        weight, above = math.exp(log_weight), math.expm1(min(loss, LARGEST / 2))
        # In units of a: Σ w (l − 1)², Σ w (l − 1) and Σ w over all values from n on.
        square, linear, mass = square + weight * above * above, linear + weight * above, mass + weight
        if mass <= 0:
            continue
        # The value before n must not lie above b; further values below b only increase the bound.
        gap = min(math.sqrt(square / mass), -math.expm1(loss - step))
        if gap > 0:
            best = min(best, (square / gap + 2 * linear + gap * mass) / 4)
    return best * (1 + ROUNDING)


@lru_cache(maxsize=64)
def tail_exposure(epsilon: float, delta: float, ratio: float) -> float:
    """The largest exposure S with `tail_delta` at most δ, rounded down; zero if there is none."""
    if epsilon > MOST:
        return 0.0
    # Gaussian noise alone, accounted for exactly, is the least that such a process can reveal.
    low, high = 0.0, gaussian_limit(2.0, epsilon, delta)
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if tail_delta(epsilon - DISCRETE, ratio, middle) <= delta else (low, middle)
    return low
