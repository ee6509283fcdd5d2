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
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

from fedpdmc.errors import InputError
from fedpdmc.privacy.ledger import BOUNDS
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


class AccountStatus(NamedTuple):
    """What a private site grants, how much more this run may observe, and how much is spent.

    The same for a site in this process (from its ledger) and for a remote site (from its messages).
    """

    site: str
    dim: int  # coordinates that the site may flip
    # Budget of the account, for all studies together, and the Rényi order of the accounting.
    epsilon: float
    delta: float
    alpha: float
    granted: tuple[float, float] | None  # (ε, δ): the part of it that this study may spend
    cap: float  # observed time (path length on rotations) that the whole account covers at this run's sensitivity
    excess: float  # the rate ρ that the site adds to each coordinate
    sensitivity: Sensitivity
    releases: int  # releases so far
    seeded: bool  # whether the randomness comes from a seed, for tests
    remaining: float  # observed time that the budget still covers, over all chains
    observed: float  # observed time of this run so far
    spent: float  # the share of the account that all studies have spent
    bound: str = "renyi"  # one of `BOUNDS`: the bound on privacy loss that the account uses

    def numbers(self) -> list[float]:
        """The numbers that a site reports when a run is opened; a grant of zero means none."""
        granted = self.granted or (0.0, 0.0)
        account = (self.epsilon, self.delta, self.alpha, *granted, self.cap, self.excess, *self.sensitivity)
        return [*account, float(self.releases), float(self.seeded), self.spent, float(BOUNDS.index(self.bound))]

    @classmethod
    def from_numbers(
        cls, site: str, dim: int, remaining: float, numbers: Sequence[float], observed: float = 0.0
    ) -> AccountStatus:
        """The status from a site's numbers; ValueError if they cannot be those of an account."""
        epsilon, delta, alpha, *granted, cap, excess, k_inf, k_1, k_2, releases, seeded, spent, bound = map(
            float, numbers
        )
        if not (epsilon > 0 and 0 < delta < 1 < alpha and bound in range(len(BOUNDS))):
            raise ValueError(f"an account of epsilon {epsilon:g}, delta {delta:g}, order {alpha:g}")
        return cls(
            site, dim, epsilon, delta, alpha, (granted[0], granted[1]) if granted[0] else None, cap, excess,
            Sensitivity(k_inf, k_1, k_2), int(releases), bool(seeded), remaining, observed, spent,
            BOUNDS[int(bound)],
        )  # fmt: skip


# What one arrival reveals ----------------------------------------------------------------------------------------------


def one_arrival_delta(epsilon: float, sensitivity: float, excess: float) -> float:
    """δ of ONE switching time, ``exp(−(ρ/K)(ε − log(1 + K/ρ)))`` (paper, Theorem 5.1; any K > 0).

    The log ratio of the densities of τ is at most ``log(1 + K/ρ) + K τ``: above ε only if τ exceeds
    ``(ε − log(1 + K/ρ))/K``, and ``P(τ > t) ≤ e^{−ρ t}``. It covers neither the mark nor a second arrival. ``sensitivity``
    is K, how much one record can change the rate, and ``excess`` ρ, the least rate.
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

    def below(x: float) -> bool:
        return x * (epsilon - math.log1p(1 / x)) < wanted

    while below(high):
        high *= 2
    return _bisect(below, low, high)[1] * k


def censored_horizon(epsilon: float, k_inf: float, k_1: float, excess: float) -> float:
    """The longest plan whose one arrival (time, index, or "none") is ε-DP with δ = 0: ``(ε − log(1 + K_∞/ρ))/K_1``.

    The density of (t, i) changes by at most the factor ``(1 + K_∞/ρ) e^{K_1 t}``, the probability of no arrival by
    ``e^{K_1 H}``. ``K_1`` bounds the change of the *total* rate; ``K_∞`` in its place is wrong as soon as d > 1. Zero if
    even an immediate arrival costs more than ε: then ρ is too small.
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


# Bounds of an account --------------------------------------------------------------------------------------------------


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
    k_inf, k_1, k_2 = sensitivity
    return up(alpha / 2 * min(k_2 * (k_2 / excess), k_1 * (k_inf / excess)))


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


# Part of ε reserved for discrete noise: far above 2⁻⁵² for each released number.
DISCRETE = 1e-9
BOUND_ROUNDING = 1e-9  # part of δ reserved for rounding of the sums
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
    return best * (1 + BOUND_ROUNDING)


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
    return _bisect(lambda epsilon: gaussian_delta(epsilon, mu) > delta, 0.0, high)[1] + DISCRETE


def gaussian_limit(alpha: float, epsilon: float, delta: float) -> float:
    """The limit for releases with Gaussian noise at order α: ``α μ²/2`` for the largest μ within (ε, δ), rounded down.

    Only for an account in which nothing else is charged. `DISCRETE` allows for discrete Gaussian noise on a grid of
    2⁻³⁰ σ: that law is the continuous one, rounded to the grid, up to a factor within ``e^{±2⁻⁵³}`` for each number and
    40 standard deviations (the midpoint rule, with an error of ``(1 + z²)/24`` cells squared), and rounding a shifted
    number is post-processing.
    """
    if epsilon <= 2 * DISCRETE:
        return 0.0
    mu = _bisect(lambda mu: gaussian_delta(epsilon - DISCRETE, mu) * (1 + 1e-9) <= delta, 1e-9, 1e3)[0]
    return alpha * mu * mu / 2 * (1 - 1e-9)


def _bisect(below: Callable[[float], bool], low: float, high: float) -> tuple[float, float]:
    """Bisection: the last point where ``below`` is true and the first where it is false."""
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) else (low, middle)
    return low, high
