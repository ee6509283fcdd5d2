"""Elementwise functions, one record each: their range on an interval, and their Taylor coefficients with proved errors.

Intervals use the range. Taylor models use ``f_k = f^{(k)}/k!`` at the middle of a value, each with an error, and a bound of
the next one on the whole range: from a closed form (`_exact`) or from ranges of the derivatives (`ByRanges`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedpdmc.enclosures.domain import TINY, Domain, Form, Interval, is_point, shared, unit, whole_number

# Relative room for the rounding of a bound.
ROOM = 1 + 1e-12
# Rounding of JAX's own special functions, in units in the last place.
NOISE = 320.0

Range = Callable[[Interval], Interval]


class Known(NamedTuple):
    """A smooth function about a point: ``f_k`` with errors up to the order, and a bound of the next one on the range."""

    values: list[Any]
    errors: list[Any]
    beyond: Any


# At a point, within this distance of it, up to this order.
Local = Callable[[Any, Any, int], Known]
# Ranges of ``f_k`` up to an order.
Taylor = Callable[[Interval, int], list[Interval]]


class Function(NamedTuple):
    """A function of one number.

    Attributes
    ----------
    range : callable
        Its range on an interval, without rounding.
    local : callable
        Its Taylor coefficients.
    noise : float
        Its rounding error in multiples of that of one operation; also an absolute error of as many units.
    lost : callable, optional
        Bounds on an interval of the errors of JAX's own function and of its derivative beyond rounding.
    """

    range: Range
    local: Local
    noise: float = 0.0
    lost: Callable[[Interval], tuple[Any, Any]] | None = None

    def on(self, x: Interval) -> Interval:
        """The range with room for rounding and for ``lost``, at its ends and for a program in between."""
        found = self.range(x)
        found = found.widened(found.magnitude * (1 + self.noise) + self.noise)
        if self.lost is None:
            return found
        off = 2 * self.lost(x)[0]
        return Interval(found.lo - off, found.hi + off)


class ByRanges(NamedTuple):
    """The Taylor coefficients of a function from the ranges of its derivatives."""

    taylor: Taylor

    def __call__(self, x: Any, far: Any, order: int) -> Known:
        """See `Local`."""
        here = self.taylor(Interval(x, x), order)
        beyond = self.taylor(Interval(x - far, x + far).widened(), order + 1)[-1].magnitude
        return Known([0.5 * (y.lo + y.hi) for y in here], [0.5 * (y.hi - y.lo) for y in here], beyond)


def of_derivatives(each: Callable[[int], Range], noise: float = 0.0, **more: Any) -> Function:
    """A function from the ranges of its derivatives; of order zero its own."""

    def taylor(x: Interval, order: int) -> list[Interval]:
        ranges = [each(k)(x) for k in range(order + 1)]
        room = max(noise, 4.0)
        return [
            _scaled(y.widened(y.magnitude * (1 + room) + room * 1e-2), 1 / math.factorial(k))
            for k, y in enumerate(ranges)
        ]

    return Function(each(0), ByRanges(taylor), noise, **more)


# Ranges ---------------------------------------------------------------------------------------------------------------


def by_point(x: Interval, factor: Any) -> Interval:
    """An interval times a number."""
    one, other = x.lo * factor, x.hi * factor
    return Interval(jnp.minimum(one, other), jnp.maximum(one, other))


def product(x: Interval, y: Interval) -> Interval:
    """The range of a product of two independent numbers."""
    if x.lo is x.hi:
        return by_point(y, x.lo)
    if y.lo is y.hi:
        return by_point(x, y.lo)
    ends = [x.lo * y.lo, x.lo * y.hi, x.hi * y.lo, x.hi * y.hi]
    return Interval(
        jnp.minimum(jnp.minimum(ends[0], ends[1]), jnp.minimum(ends[2], ends[3])),
        jnp.maximum(jnp.maximum(ends[0], ends[1]), jnp.maximum(ends[2], ends[3])),
    )


def rising(f: Callable) -> Range:
    """The range of a function that does not fall."""
    return lambda x: Interval(f(x.lo), f(x.hi))


def falling(f: Callable) -> Range:
    """The range of a function that does not rise."""
    return lambda x: Interval(f(x.hi), f(x.lo))


def with_peaks(f: Callable, *peaks: tuple[float, float]) -> Range:
    """The range of a function monotone between its extremes, each given as ``(where, value)``."""

    def found(x: Interval) -> Interval:
        one, other = f(x.lo), f(x.hi)
        lo, hi = jnp.minimum(one, other), jnp.maximum(one, other)
        for where, value in peaks:
            inside = (x.lo <= where) & (where <= x.hi)
            lo = jnp.where(inside, jnp.minimum(lo, value), lo)
            hi = jnp.where(inside, jnp.maximum(hi, value), hi)
        return Interval(lo, hi)

    return found


def on_positive(inner: Range, least: float = 0.0) -> Range:
    """A range that is everything unless the argument is above ``least``."""

    def found(x: Interval) -> Interval:
        good = x.lo > least
        inside = inner(Interval(jnp.where(good, x.lo, least + 1.0), jnp.where(good, x.hi, least + 1.0)))
        return Interval(jnp.where(good, inside.lo, -jnp.inf), jnp.where(good, inside.hi, jnp.inf))

    return found


def negated(inner: Range) -> Range:
    """The range of minus the function."""

    def found(x: Interval) -> Interval:
        y = inner(x)
        return Interval(-y.hi, -y.lo)

    return found


def sine(x: Interval) -> Interval:
    """Peaks at ``π/2 + 2πk``, troughs at ``−π/2 + 2πk``; very wide or far intervals give everything."""

    def holds(at):
        return jnp.floor((x.hi - at) / (2 * jnp.pi) + 1e-9) >= jnp.ceil((x.lo - at) / (2 * jnp.pi) - 1e-9)

    far = x.magnitude > 1e6
    one, other = jnp.sin(x.lo), jnp.sin(x.hi)
    hi = jnp.where(holds(jnp.pi / 2) | far, 1.0, jnp.maximum(one, other))
    lo = jnp.where(holds(-jnp.pi / 2) | far, -1.0, jnp.minimum(one, other))
    return Interval(lo, hi)


def cosine(x: Interval) -> Interval:
    """As `sine`, shifted by a quarter period."""
    shift = jnp.pi / 2
    return sine(Interval(x.lo + shift, x.hi + shift)).widened(1.0)


def power_range(n: int) -> Range:
    """The range of ``x**n`` for an integer n."""

    def inverse(x: Interval) -> Interval:
        apart = (x.lo > 0) | (x.hi < 0)
        found = power_range(-n)(Interval(jnp.where(apart, x.lo, 1.0), jnp.where(apart, x.hi, 1.0)))
        return Interval(jnp.where(apart, 1 / found.hi, -jnp.inf), jnp.where(apart, 1 / found.lo, jnp.inf))

    if n < 0:
        return inverse
    if n == 0:
        return lambda x: Interval(jnp.ones_like(x.lo), jnp.ones_like(x.hi))
    if n % 2:
        return rising(lambda x: lax.integer_pow(x, n))

    def even(x: Interval) -> Interval:
        least, most = jnp.maximum(jnp.maximum(x.lo, -x.hi), 0.0), x.magnitude
        return Interval(lax.integer_pow(least, n), lax.integer_pow(most, n))

    return even


# log Φ -----------------------------------------------------------------------------------------------------------------


# ``log Φ``, the logarithm of the normal distribution function: ranges of its derivatives, and the error of JAX's own.
#
# With ``t = −x``, ``Φ(x) = φ(t) ∫_0^∞ e^{−tu − u²/2} du``. So its derivatives of order k ≥ 2 are the cumulants of the
# density ``∝ e^{−tu − u²/2}``, except for −1 in the second. For large t they are those of the exponential distribution,
# ``(k−1)!/t^k``, times a factor that rises to one with t. Elsewhere they follow from ``m = φ/Φ`` with ``m' = −m (m + x)``.

# Below, ``m + x`` cancels; above, the k-th derivative is computed up to ``LOG_NDTR_ERROR (2 + |x|)^k``. The share there.
LOG_NDTR_NEAR, LOG_NDTR_ERROR = -8.0, 3e-14
LOG_NDTR_SHARES = {2: 0.9167, 3: 0.8427, 4: 0.7545}
# The fourth is at most this in absolute value: its minimum, with room; for large t it is at most ``6/t⁴``.
MOST_FOURTH = 0.18896
# The third is positive with one peak; the fourth rises to a peak, falls to a trough and rises to zero.
LOG_NDTR_PEAKS = {
    2: (),
    3: ((1.0023693422683706, 0.2957188191931231),),
    4: ((-0.029833620926059145, 0.11483629895508604), (2.071288938808874, -0.18895683512084606)),
}
# Below this number JAX sums three terms of an alternating series; the error is less than the next term, ``105/t⁸``.
LOG_NDTR_SERIES = -20.0


def log_ndtr_slope(x):
    """``m(x) = φ(x)/Φ(x)``."""
    return jnp.exp(-0.5 * x * x - jax.scipy.special.log_ndtr(x) - 0.5 * math.log(2 * math.pi))


def _log_ndtr_derivative(k: int, x: Any):
    """The derivative of order 2, 3 or 4."""
    m = log_ndtr_slope(x)
    q = m + x
    second = -m * q
    third = -(second * q + m * (1 + second))
    return (second, third, -(third * q + 2 * second * (1 + second) + m * third))[k - 2]


def _cumulant(k: int, share: float, x: Any):
    """So much of the exponential distribution's, as a derivative."""
    return share * math.factorial(k - 1) / (-x) ** k - (k == 2)


def log_ndtr_derivatives_at(x: Any) -> list[tuple[Any, Any]]:
    """The function and its first three derivatives at points, each with a bound of its error.

    The errors of `log_ndtr_derivative_range`, and twice those of JAX's own functions.
    """
    off, slope_off = log_ndtr_series_error(Interval(x, x))
    found = [(jax.scipy.special.log_ndtr(x), 2 * off), (log_ndtr_slope(x), 2 * slope_off)]
    near = jnp.maximum(x, LOG_NDTR_NEAR)
    m = log_ndtr_slope(near)
    q = m + near
    second = -m * q
    for k, inside in ((2, second), (3, -(second * q + m * (1 + second)))):
        least, most = (_cumulant(k, share, jnp.minimum(x, LOG_NDTR_NEAR)) for share in (LOG_NDTR_SHARES[k], 1.0))
        room = LOG_NDTR_ERROR * (2 + jnp.clip(-x, 0.0, -LOG_NDTR_NEAR)) ** k
        below = x < LOG_NDTR_NEAR
        found.append(
            (jnp.where(below, 0.5 * (least + most), inside), jnp.where(below, 0.5 * (most - least), 0.0) + room)
        )
    return found


def log_ndtr_derivative_range(k: int) -> Range:
    """The range of the derivative of order 2, 3 or 4."""
    inside = (rising if k == 2 else with_peaks)(lambda x: _log_ndtr_derivative(k, x), *LOG_NDTR_PEAKS[k])

    def found(x: Interval) -> Interval:
        near = inside(Interval(jnp.maximum(x.lo, LOG_NDTR_NEAR), jnp.maximum(x.hi, LOG_NDTR_NEAR)))
        least = _cumulant(k, LOG_NDTR_SHARES[k], x.lo)
        most = _cumulant(k, 1.0, jnp.minimum(x.hi, LOG_NDTR_NEAR))
        lo = jnp.where(x.lo < LOG_NDTR_NEAR, jnp.minimum(near.lo, least), near.lo)
        hi = jnp.where(x.hi < LOG_NDTR_NEAR, most, jnp.where(x.lo < LOG_NDTR_NEAR, jnp.maximum(near.hi, most), near.hi))
        room = LOG_NDTR_ERROR * (2 + jnp.clip(-x.lo, 0.0, -LOG_NDTR_NEAR)) ** k
        return Interval(lo - room, jnp.minimum(hi + room, 0.0) if k == 2 else hi + room)

    return found


def log_ndtr_series_error(x: Interval) -> tuple[Any, Any]:
    """Bounds of the errors of JAX's ``log Φ`` and of its derivative."""
    t = jnp.maximum(-x.hi, -LOG_NDTR_SERIES)
    inverse = 1 / t
    off = jnp.where(x.lo <= LOG_NDTR_SERIES, 105 * inverse**8, 0.0)
    return off, off * (t + inverse)


# Derivatives of log Γ --------------------------------------------------------------------------------------------------


# Derivatives of ``log Γ`` of positive numbers, all orders at once, with a proved error.
#
# ``ψ⁽ᵐ⁾(x) = ψ⁽ᵐ⁾(x + N) − (−1)ᵐ m! Σ_{k<N} (x + k)^{−m−1}``, and beyond N the asymptotic series, with ``w = 1/(x + N)``,
#
#     ψ = log(1/w) − w/2 − Σ_j B_{2j} w^{2j}/(2j),
#     (−1)^{m+1} ψ⁽ᵐ⁾ = (m−1)! wᵐ + m! w^{m+1}/2 + Σ_j B_{2j} (2j+m−1)!/(2j)! w^{2j+m},
#
# which is enveloping on positive numbers: the error of a partial sum is at most the next term (DLMF 5.11, 5.15.8). The
# terms for m ≥ 1 have one sign but for the small ones with ``B_{2j}``, so that rounding is relative. Powers are shared among
# orders; ``lax.polygamma`` sums a series for each.

# The errors of these are below 1e-8 up to the fourth derivative and are counted; a rate needs no better.
POLYGAMMA_SHIFT = 5
BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730)
NEXT_BERNOULLI = 7 / 6
# Rounding of these sums and of ``lax.digamma`` or ``lax.polygamma``, which the program itself calls; relative, and absolute.
POLYGAMMA_NOISE, POLYGAMMA_ABSOLUTE = 320.0, 4.0
POLYGAMMA_ROOM = 1 + 1e-9


def polygammas(x: Any, orders: range) -> list[tuple[Any, Any]]:
    """``ψ⁽ᵐ⁾(x)`` for some m and bounds of the errors of series and rounding; x must be positive."""
    w, sums = 1 / (x + POLYGAMMA_SHIFT), [jnp.zeros_like(x) for _ in orders]
    for k in range(POLYGAMMA_SHIFT):
        r = 1 / (x + k)
        power = r ** (orders[0] + 1)
        for i in range(len(orders)):
            sums[i] = sums[i] + power
            power = power * r
    return [_first(x, w, s) if m == 0 else _higher(m, w, s) for m, s in zip(orders, sums, strict=True)]


def _first(x, w, shifted):
    """``ψ``: the subtracted sum may be larger than the result."""
    terms = [b / (2 * j) for j, b in enumerate(BERNOULLI, 1)]
    logs = jnp.log(x + POLYGAMMA_SHIFT)
    value = logs - (0.5 * w + _even(terms, w)) - shifted
    left = NEXT_BERNOULLI / (2 * len(BERNOULLI) + 2) * w ** (2 * len(BERNOULLI) + 2) * POLYGAMMA_ROOM
    return value, left + unit(x) * (POLYGAMMA_NOISE * (jnp.abs(logs) + shifted) + POLYGAMMA_ABSOLUTE) + TINY


def _higher(m: int, w, shifted):
    """``ψ⁽ᵐ⁾`` for m ≥ 1."""
    terms = [b * _ratio(j, m) for j, b in enumerate(BERNOULLI, 1)]
    power = w**m
    series = power * (math.factorial(m - 1) + 0.5 * math.factorial(m) * w + _even(terms, w))
    size = math.factorial(m) * shifted + series
    j = len(BERNOULLI) + 1
    left = NEXT_BERNOULLI * _ratio(j, m) * power * w ** (2 * j) * POLYGAMMA_ROOM
    return (-1.0) ** (m + 1) * size, left + unit(w) * (POLYGAMMA_NOISE * size + POLYGAMMA_ABSOLUTE) + TINY


def _ratio(j: int, m: int) -> float:
    return math.factorial(2 * j + m - 1) / math.factorial(2 * j)


def _even(terms: list[float], w):
    """``Σ_j terms[j] w^{2j}``, from j = 1."""
    square = w * w
    total = jnp.full_like(w, terms[-1])
    for term in terms[-2::-1]:
        total = term + square * total
    return total * square


# Powers ---------------------------------------------------------------------------------------------------------------


def _scaled(x: Interval, factor: Any) -> Interval:
    return by_point(x, factor).widened()


def _either_end(f: Callable) -> Range:
    """The range of a monotone function of positive numbers."""

    def inner(x: Interval) -> Interval:
        one, other = f(x.lo), f(x.hi)
        return Interval(jnp.minimum(one, other), jnp.maximum(one, other))

    return on_positive(inner)


def integer_power(n: int) -> Function:
    """``x**n``, with the coefficients ``binom(n, k) x^{n−k}``."""

    def taylor(x: Interval, order: int) -> list[Interval]:
        ranges, factor = [], 1.0
        for k in range(order + 1):
            zero = jnp.zeros_like(x.lo)
            ranges.append(_scaled(power_range(n - k)(x), factor) if factor else Interval(zero, zero))
            factor *= (n - k) / (k + 1)
        return ranges

    return Function(power_range(n), ByRanges(taylor), abs(n))


def _powers(y: Any) -> Taylor:
    """``binom(y, k) x^{y−k}`` of positive x."""

    def taylor(x: Interval, order: int) -> list[Interval]:
        ranges, factor = [], jnp.ones_like(jnp.asarray(y))
        for k in range(order + 1):
            ranges.append(_scaled(_either_end(lambda x, power=y - k: x**power)(x).widened(), factor))
            factor = factor * (y - k) / (k + 1)
        return ranges

    return taylor


def real_power(y: Any) -> Function:
    """``x**y`` of positive x, for points y of any sign; whole powers known while tracing are those of any x."""
    whole = whole_number(y)
    local = ByRanges(_powers(y)) if whole is None else integer_power(whole).local
    return Function(_either_end(lambda x: x**y), local, 4.0)


# Ranges of derivatives ------------------------------------------------------------------------------------------------


def _polynomials(inner: Callable, derivative: np.polynomial.Polynomial, least: float, most: float) -> Callable:
    """Ranges of the derivatives of ``p`` with ``p' = derivative(p)``: polynomials in p, with extremes at roots."""

    def each(k: int) -> Range:
        p = np.polynomial.Polynomial([0.0, 1.0])
        for _ in range(k):
            p = p.deriv() * derivative
        roots = p.deriv().roots() if p.degree() > 0 else []
        peaks = [float(r.real) for r in np.atleast_1d(roots) if abs(r.imag) < 1e-7 and least < r.real < most]
        bounded = with_peaks(
            lambda t: sum(c * t**i for i, c in enumerate(p.coef)), *((r, float(p(r))) for r in peaks)
        )  # fmt: skip
        return lambda x: bounded(Interval(inner(x.lo), inner(x.hi)).widened())

    return each


_tanh = _polynomials(jnp.tanh, np.polynomial.Polynomial([1.0, 0.0, -1.0]), -1.0, 1.0)


def _gaussians(k: int, scale: float, square: float) -> Range:
    """The range of ``scale d^k/dx^k exp(−square x²)``: a polynomial times the same, its extremes at the next one's roots."""
    p = np.polynomial.Polynomial([1.0])
    slope = np.polynomial.Polynomial([0.0, -2 * square])
    for _ in range(k):
        p = p.deriv() + p * slope
    roots = (p.deriv() + p * slope).roots()

    def value(x, power=lambda c, x, i: c * x**i):
        total = sum(power(c, x, i) for i, c in enumerate(p.coef))
        return jnp.where(jnp.abs(x) < 1e3, scale * total * jnp.exp(-square * x * x), 0.0)

    peaks = [float(r) for r in np.real(roots)]
    values = [scale * float(p(r)) * math.exp(-square * r * r) for r in peaks]
    return with_peaks(value, *zip(peaks, values, strict=True))


def _integral(value: Range, scale: float, square: float) -> Callable[[int], Range]:
    return lambda k: value if k == 0 else _gaussians(k - 1, scale, square)


def _arctangents(k: int) -> Range:
    """``(k−1)! cosᵏφ sin(k(φ + π/2))`` with ``φ = atan x``; its derivative is zero where that of the next order is."""
    if k == 0:
        return rising(jnp.arctan)

    def value(phi, xp=jnp):
        return math.factorial(k - 1) * xp.cos(phi) ** k * xp.sin(k * (phi + math.pi / 2))

    angles = [m * math.pi / (k + 1) - math.pi / 2 for m in range(1, k + 1)]
    bounded = with_peaks(lambda x: value(jnp.arctan(x)), *((math.tan(a), float(value(a, np))) for a in angles))
    return lambda x: bounded(x).widened(float(math.factorial(k)))


def _area_sines(k: int) -> Range:
    """Derivatives of ``asinh``: ``p (1 + x²)^{½−k}`` with ``p ← p' (1 + x²) − (2k − 1) x p``.

    Extremes are at the roots of the next one's p. As ``|x|^i ≤ (1 + x²)^{i/2}``, the terms of which the value is made are at
    most the sizes of the coefficients.
    """
    if k == 0:
        return rising(jnp.arcsinh)
    p, square = np.polynomial.Polynomial([1.0]), np.polynomial.Polynomial([1.0, 0.0, 1.0])
    slopes = [p]
    for j in range(1, k + 1):
        slopes.append(slopes[-1].deriv() * square - (2 * j - 1) * np.polynomial.Polynomial([0.0, 1.0]) * slopes[-1])
    p, roots = slopes[k - 1], np.atleast_1d(slopes[k].roots())
    peaks = [float(r.real) for r in roots if abs(r.imag) < 1e-7]

    def value(x):
        return sum(c * x**i for i, c in enumerate(p.coef)) * (1 + x * x) ** (0.5 - k)

    bounded = with_peaks(value, *((r, float(value(r))) for r in peaks))
    return lambda x: bounded(x).widened(float(np.abs(p.coef).sum()))


def _inverse_errors(k: int) -> Range:
    """Derivatives of ``f = erf⁻¹``: ``(√π/2 e^{f²})ᵏ q(f)`` with ``q ← q' + 2k f q``, whose coefficients are positive."""
    if k == 0:
        return rising(lax.erf_inv)
    q = np.polynomial.Polynomial([1.0])
    for j in range(1, k):
        q = q.deriv() + 2 * j * np.polynomial.Polynomial([0.0, 1.0]) * q

    def value(x):
        f = lax.erf_inv(x)
        return sum(c * f**i for i, c in enumerate(q.coef)) * (jnp.exp(f * f) / _ROOT) ** k

    return rising(value) if k % 2 == 0 else with_peaks(value, (0.0, float(q(0.0)) / _ROOT**k))


def _cube_roots(x: Interval, order: int) -> list[Interval]:
    """``binom(⅓, k) x^{⅓}/xᵏ`` on either side of zero: the function is odd."""
    left = x.hi < 0

    def sided(one: Interval, other: Interval) -> Interval:
        return Interval(jnp.where(left, one.lo, other.lo), jnp.where(left, one.hi, other.hi))

    positive, ranges, factor = sided(Interval(-x.hi, -x.lo), x), [], 1.0
    for k in range(order + 1):
        found = _either_end(lambda y, k=k: jnp.cbrt(y) / y**k)(positive)
        found = _scaled(found.widened(5 * found.magnitude), factor)
        ranges.append(found if k % 2 else sided(Interval(-found.hi, -found.lo), found))
        factor *= (1 / 3 - k) / (k + 1)
    return ranges


def _turns(k: int) -> Range:
    way = (sine, cosine)[k % 2]
    return way if k % 4 < 2 else negated(way)


def _hyperbolic(k: int) -> Range:
    return with_peaks(jnp.cosh, (0.0, 1.0)) if k % 2 else rising(jnp.sinh)


def _log1p(x: Interval, order: int) -> list[Interval]:
    """``−(−1)^k (1 + x)^{−k}/k``."""
    moved = Interval(1 + x.lo, 1 + x.hi).widened()
    powers = [on_positive(power_range(-k))(moved) for k in range(1, order + 1)]
    own = on_positive(rising(jnp.log1p), -1.0)(x)
    return [own.widened(), *(_scaled(p, -((-1.0) ** k) / k) for k, p in enumerate(powers, 1))]


def _log_normals(k: int) -> Range:
    if k > 4:
        raise NotImplementedError("log_ndtr to more than four derivatives")
    if k > 1:
        return log_ndtr_derivative_range(k)
    inside = rising(jax.scipy.special.log_ndtr) if k == 0 else falling(log_ndtr_slope)

    def found(x: Interval) -> Interval:
        y, off = inside(x), 2 * log_ndtr_series_error(x)[k]
        return Interval(y.lo - off, y.hi + off)

    return found


# Closed forms ---------------------------------------------------------------------------------------------------------


def _exact(values: list[Any], noise: float, absolute: float, beyond: Any) -> Known:
    errors = [unit(value) * (noise * jnp.abs(value) + absolute) + TINY for value in values]
    return Known(values, errors, beyond)


def _exp(x, far, order: int) -> Known:
    """``e^x/k!``."""
    value = jnp.exp(x)
    beyond = jnp.exp(x + far) * ((1 + 1e-9) / math.factorial(order + 1))
    return _exact([value / math.factorial(k) for k in range(order + 1)], 4.0, 0.0, beyond)


def _log(x, far, order: int) -> Known:
    """``−(−1)^k x^{−k}/k``."""
    inverse, least = 1 / x, x - far
    values = [jnp.log(x), *(-((-1.0) ** k) / k * inverse**k for k in range(1, order + 1))]
    beyond = jnp.where(least > 0, ROOM / ((order + 1) * jnp.where(least > 0, least, 1.0) ** (order + 1)), jnp.inf)
    return _exact(values, 4.0, 1.0, beyond)


def _reciprocal(x, far, order: int) -> Known:
    """``(−1)^k x^{−k−1}``."""
    inverse, least = 1 / x, jnp.abs(x) - far
    values = [(-1.0) ** k * inverse ** (k + 1) for k in range(order + 1)]
    beyond = jnp.where(least > 0, ROOM / jnp.where(least > 0, least, 1.0) ** (order + 2), jnp.inf)
    return _exact(values, 4.0, 0.0, beyond)


@functools.cache
def _logistic_derivatives(order: int) -> tuple[list[np.ndarray], float, float]:
    """``σ^{(k)}/k!`` up to an order n of at least one, as polynomials in σ, lowest power first; and two bounds.

    They are of ``|σ^{(n)}/n!|`` and of its ratio to ``σ(1 − σ)``, which is a polynomial too. From a grid of step 1e-4 on
    [0, 1]: at an extreme within, the slope is zero and by Markov's inequality the second derivative at most ``4 k⁴/3`` times
    the largest value, so that the grid misses a share of less than ``2e-9 k⁴``.
    """
    sigma = np.polynomial.Polynomial([0.0, 1.0])
    found, ratio = [sigma], sigma
    for k in range(1, order + 1):
        ratio = found[-1].deriv() / k
        found.append(ratio * sigma * (1 - sigma))
    largest, of_ratio = (float(np.abs(q(np.linspace(0, 1, 10001))).max()) * (1 + 1e-3) for q in (found[-1], ratio))
    return [q.coef for q in found], largest, of_ratio


def _largest_logistic(x, far, largest: float, of_ratio: float):
    """A bound of ``|σ^{(n)}/n!|`` within ``far`` of x, where ``σ(1 − σ)`` is at most ``e^{−|x|}``."""
    return jnp.minimum(largest, of_ratio * ROOM * jnp.exp(jnp.minimum(far - jnp.abs(x), 0.0)))


def softplus(x):
    """``log(1 + e^x)``."""
    return jnp.maximum(x, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(x)))


def _logistic(x, far, order: int) -> Known:
    coefficients, *bounds = _logistic_derivatives(order + 1)
    p = lax.logistic(x)
    return _exact([_horner(c, p) for c in coefficients[:-1]], 16.0, 16.0, _largest_logistic(x, far, *bounds))


def _softplus(x, far, order: int) -> Known:
    coefficients, *bounds = _logistic_derivatives(order)
    p = lax.logistic(x)
    slopes = [_horner(c, p) / (k + 1) for k, c in enumerate(coefficients[:-1])]
    return _exact([softplus(x), *slopes], 16.0, 16.0, _largest_logistic(x, far, *bounds) / (order + 1))


def _polygammas(n: int) -> Local:
    """``ψ⁽ⁿ⁾``; for n = −1 ``log Γ``."""

    def found(x, far, order: int) -> Known:
        least = x - far
        inside = least > 0
        low = jnp.where(inside, least, 1.0)
        known = polygammas(jnp.where(inside, x, 1.0), range(max(n, 0), n + order + 1))
        if n < 0:
            logs = lax.lgamma(x)
            known = [(logs, unit(x) * (POLYGAMMA_NOISE * jnp.abs(logs) + POLYGAMMA_ABSOLUTE) + TINY), *known]
        values = [value / math.factorial(k) for k, (value, _) in enumerate(known)]
        errors = [error * POLYGAMMA_ROOM / math.factorial(k) for k, (_, error) in enumerate(known)]
        # The size of ``ψ⁽ᵐ⁾`` falls for m ≥ 1.
        (top, left), *_ = polygammas(low, range(n + order + 1, n + order + 2))
        beyond = (jnp.abs(top) + left) * POLYGAMMA_ROOM / math.factorial(order + 1)
        return Known(values, errors, jnp.where(inside, beyond, jnp.inf))

    return found


def polygamma(n: int) -> Function:
    """``ψ⁽ⁿ⁾`` of positive numbers for n ≥ 1: of one sign, and its size falls."""

    def value(x):
        return lax.polygamma(jnp.full(jnp.shape(x), float(n), jnp.result_type(x)), x)

    return Function(on_positive((rising if n % 2 == 0 else falling)(value)), _polygammas(n), 256.0)


def _log_ndtr(x, far, order: int) -> Known:
    """``log Φ``, the next derivative by its largest value anywhere; of other orders from ranges."""
    if order != 3:
        return LOG_NDTR.local(x, far, order)
    values, errors = [], []
    for k, (value, left) in enumerate(log_ndtr_derivatives_at(x)):
        values.append(value / math.factorial(k))
        errors.append((left * ROOM + unit(x) * (NOISE * jnp.abs(value) + 4.0)) / math.factorial(k) + TINY)
    return Known(values, errors, jnp.full_like(x, MOST_FOURTH / math.factorial(4)))


def _horner(coefficients, x):
    total = coefficients[-1]
    for c in coefficients[-2::-1]:
        total = c + x * total
    return jnp.broadcast_to(total, jnp.shape(x))


# The functions --------------------------------------------------------------------------------------------------------


_ROOT = 2 / math.sqrt(math.pi)
_NORMAL = 1 / math.sqrt(2 * math.pi)
LGAMMA_LEAST = (1.4616321449683623, -0.12148629053584961)
LOG_NDTR = of_derivatives(_log_normals, 256.0)

FUNCTIONS: dict[str, Function] = {
    "exp": Function(rising(jnp.exp), _exp),
    "exp2": of_derivatives(lambda k: rising(lambda x: math.log(2) ** k * jnp.exp2(x)), 4.0),
    "expm1": of_derivatives(lambda k: rising(jnp.expm1 if k == 0 else jnp.exp)),
    "log": Function(on_positive(rising(jnp.log)), _log, 1.0),
    "log1p": Function(on_positive(rising(jnp.log1p), -1.0), ByRanges(_log1p)),
    "logistic": Function(rising(lax.logistic), _logistic),
    "tanh": of_derivatives(lambda k: rising(jnp.tanh) if k == 0 else _tanh(k)),
    "softplus": Function(rising(softplus), _softplus),
    "log_ndtr": Function(rising(jax.scipy.special.log_ndtr), _log_ndtr, 256.0, log_ndtr_series_error),
    "ndtr": of_derivatives(_integral(rising(jax.scipy.special.ndtr), _NORMAL, 0.5), 4.0),
    "sqrt": Function(
        lambda x: Interval(jnp.where(x.lo >= 0, jnp.sqrt(jnp.maximum(x.lo, 0.0)), -jnp.inf), jnp.sqrt(x.hi)),
        ByRanges(_powers(0.5)),
    ),
    "rsqrt": Function(on_positive(falling(lax.rsqrt)), ByRanges(_powers(-0.5)), 1.0),
    "cbrt": Function(rising(jnp.cbrt), ByRanges(_cube_roots), 4.0),
    "atan": of_derivatives(_arctangents, 4.0),
    "sinh": of_derivatives(_hyperbolic, 4.0),
    "cosh": of_derivatives(lambda k: _hyperbolic(k + 1), 4.0),
    "asinh": of_derivatives(_area_sines, 16.0),
    "erf_inv": of_derivatives(_inverse_errors, 1024.0),
    "sin": of_derivatives(_turns),
    "cos": of_derivatives(lambda k: _turns(k + 1)),
    "erf": of_derivatives(_integral(rising(lax.erf), _ROOT, 1.0)),
    "erfc": of_derivatives(_integral(falling(lax.erfc), -_ROOT, 1.0), 4.0),
    "lgamma": Function(on_positive(with_peaks(lax.lgamma, LGAMMA_LEAST)), _polygammas(-1), 256.0),
    "digamma": Function(on_positive(rising(lax.digamma)), _polygammas(0), 256.0),
    "square": integer_power(2),
    "reciprocal": Function(power_range(-1), _reciprocal, 1),
}


# Rules of all domains -------------------------------------------------------------------------------------------------


for _name in FUNCTIONS:
    shared(_name)(lambda domain, params, x, name=_name: domain.smooth(FUNCTIONS[name], x))


@shared("div")
def _div(domain: Domain, params: Any, x: Form, y: Form) -> Form:
    return domain.rule("mul", {}, x, 1 / y if is_point(y) else domain.smooth(FUNCTIONS["reciprocal"], y))


@shared("polygamma")
def _polygamma(domain: Domain, params: Any, n: Form, x: Form) -> Form:
    order = whole_number(n)
    if order is None or order < 0:
        raise NotImplementedError("polygamma needs an order that is a constant of the program")
    return domain.smooth(FUNCTIONS["digamma"] if order == 0 else polygamma(order), x)
