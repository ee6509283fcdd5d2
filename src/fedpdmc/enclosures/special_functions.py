"""Elementwise functions: their range on an interval, first derivative, and the range of their second derivative.

With ``δ = w(s) − w_0``, ``f(w) ∈ f(w_0) + f'(w_0) δ + ½ f''(W) δ²`` with W the range of w on the cell: value and slope are
exact however a formula is written, and interval arithmetic widens only the remainder, of second order in the cell.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedpdmc.enclosures.cell_values import (
    TINY,
    Cell,
    Form,
    Interval,
    Series,
    bent,
    by_point,
    drift,
    lifted,
    plus,
    product,
    size,
    span,
    squared,
    times,
    unit,
)  # fmt: skip
from fedpdmc.enclosures.domain import is_static


def rising(f: Callable) -> Callable[[Interval], Interval]:
    """The range of a function that does not fall."""
    return lambda x: Interval(f(x.lo), f(x.hi))


def falling(f: Callable) -> Callable[[Interval], Interval]:
    """The range of a function that does not rise."""
    return lambda x: Interval(f(x.hi), f(x.lo))


def with_peaks(f: Callable, *peaks: tuple[float, float]) -> Callable[[Interval], Interval]:
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


def on_positive(inner: Callable[[Interval], Interval], least: float = 0.0) -> Callable[[Interval], Interval]:
    """A range that is everything unless the argument is above ``least``."""

    def found(x: Interval) -> Interval:
        good = x.lo > least
        inside = inner(Interval(jnp.where(good, x.lo, least + 1.0), jnp.where(good, x.hi, least + 1.0)))
        return Interval(jnp.where(good, inside.lo, -jnp.inf), jnp.where(good, inside.hi, jnp.inf))

    return found


def apart_from_zero(inner: Callable[[Interval], Interval], x: Interval) -> Interval:
    """A range on either side of zero; everything if zero is inside."""
    good = (x.lo > 0) | (x.hi < 0)
    inside = inner(Interval(jnp.where(good, x.lo, 1.0), jnp.where(good, x.hi, 1.0)))
    return Interval(jnp.where(good, inside.lo, -jnp.inf), jnp.where(good, inside.hi, jnp.inf))


def negated(inner: Callable[[Interval], Interval]) -> Callable[[Interval], Interval]:
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


def power_range(n: int) -> Callable[[Interval], Interval]:
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


def log_ndtr_derivative_range(k: int) -> Callable[[Interval], Interval]:
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


class Smooth(NamedTuple):
    """A function of one number.

    Attributes
    ----------
    value, first : callable
        ``f`` and ``f'`` at points.
    range, second : callable
        Ranges of ``f`` and of ``f''`` on an interval.
    noise : float
        Its rounding error in multiples of that of one operation; also an absolute error of as many units.
    lost : callable, optional
        Bounds on an interval of the errors of ``value`` and ``first`` beyond rounding.
    """

    value: Callable[[Any], Any]
    first: Callable[[Any], Any]
    range: Callable[[Interval], Interval]
    second: Callable[[Interval], Interval]
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


def apply(cell: Cell, f: Smooth, w: Form) -> Form:
    """``f`` of an interval or a series."""
    if isinstance(w, Interval):
        return f.on(w)
    value, first = f.value(w.value), f.first(w.value)
    if w.slope is None and w.turn is None and w.low is None:
        return _steady(cell, f, w)
    move, where = drift(cell, w), span(cell, w).widened()
    second = f.second(where)
    remainder = product(by_point(second, 0.5), squared(move))  # type: ignore[arg-type]
    own = by_point(bent(cell, w), first)
    h = cell.length
    reach, steep = h * move.magnitude, jnp.abs(first)
    error = steep * w.error + 0.5 * second.magnitude * w.error * (2 * reach + w.error)
    made = jnp.abs(value) + steep * reach + h * h * remainder.magnitude
    error = error + unit(value) * ((1 + f.noise) * made + f.noise) + TINY
    if f.lost is not None:
        off, tilt = f.lost(where)
        error = error + 2 * off + tilt * reach
    return Series(
        value,
        error,
        times(w.slope, first),
        None,
        plus(remainder.lo, None if own is None else own.lo),
        plus(remainder.hi, None if own is None else own.hi),
    )


def _steady(cell: Cell, f: Smooth, w: Series) -> Series:
    """A value that is constant but has an error: its range is used."""
    return lifted(f.on(span(cell, w)))


def multiplied(cell: Cell, w: Form, u: Form) -> Form:
    """A product of two forms, one of them not a point."""
    if isinstance(w, Interval) and isinstance(u, Interval):
        return product(w, u).widened()
    w, u = lifted(w), lifted(u)
    across = product(drift(cell, w), drift(cell, u))
    one, other = by_point(bent(cell, w), u.value), by_point(bent(cell, u), w.value)
    wide, tall = size(cell, w), size(cell, u)
    return Series(
        w.value * u.value,
        wide * u.error + tall * w.error + unit(w.value) * wide * tall + TINY,
        plus(times(w.slope, u.value), times(u.slope, w.value)),
        None,
        plus(across.lo, *(x.lo for x in (one, other) if x is not None)),
        plus(across.hi, *(x.hi for x in (one, other) if x is not None)),
    )


def scaled(cell: Cell, w: Form, factor: Any) -> Form:
    """A form times a point: linear."""
    if isinstance(w, Interval):
        return by_point(w, factor).widened()  # type: ignore[union-attr]
    part = by_point(None if w.low is None else Interval(w.low, w.high), factor)
    error = jnp.abs(factor) * (w.error + unit(w.value) * size(cell, w)) + TINY
    return Series(
        w.value * factor,
        error,
        times(w.slope, factor),
        times(w.turn, factor),
        None if part is None else part.lo,
        None if part is None else part.hi,
    )


# Powers ---------------------------------------------------------------------------------------------------------------


def integer_power(n: int) -> Smooth:
    """``x**n``."""
    if n in (0, 1):
        second = lambda x: Interval(jnp.zeros_like(x.lo), jnp.zeros_like(x.lo))  # noqa: E731
    else:
        curve = power_range(n - 2)
        second = lambda x: by_point(curve(x), float(n * (n - 1)))  # noqa: E731
    return Smooth(
        lambda x: lax.integer_pow(x, n),
        lambda x: n * lax.integer_pow(x, n - 1) if n else jnp.zeros_like(x),
        power_range(n),
        second,  # type: ignore[arg-type]
        abs(n),
    )


def real_power(y: Any) -> Smooth:
    """``x**y`` of positive x, for points y of any sign."""

    def either(f):
        def inner(x: Interval) -> Interval:
            one, other = f(x.lo), f(x.hi)
            return Interval(jnp.minimum(one, other), jnp.maximum(one, other))

        return on_positive(inner)

    return Smooth(
        lambda x: x**y,
        lambda x: y * x ** (y - 1),
        either(lambda x: x**y),
        either(lambda x: y * (y - 1) * x ** (y - 2)),
        4.0,
    )


# The functions --------------------------------------------------------------------------------------------------------


def _bump(p):
    return p * (1 - p)


def _tilt(p):
    return p * (1 - p) * (1 - 2 * p)


_TILT = 1 / (6 * math.sqrt(3))
_TILTS = [((3 - math.sqrt(3)) / 6, _TILT), ((3 + math.sqrt(3)) / 6, -_TILT)]


def _of_sigmoid(inner: Callable[[Interval], Interval]) -> Callable[[Interval], Interval]:
    return lambda x: inner(Interval(lax.logistic(x.lo), lax.logistic(x.hi)).widened())


def softplus(x):
    """``log(1 + e^x)``."""
    return jnp.maximum(x, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(x)))


def _density(x):
    return jnp.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


_ROOT = 2 / math.sqrt(math.pi)
_ERF_PEAK = math.sqrt(2) * _ROOT * math.exp(-0.5)
_erf_second = with_peaks(
    lambda x: -2 * x * _ROOT * jnp.exp(-x * x), (math.sqrt(0.5), -_ERF_PEAK), (-math.sqrt(0.5), _ERF_PEAK)
)
_NORMAL_PEAK = math.exp(-0.5) / math.sqrt(2 * math.pi)


def _polygamma(n: int, x):
    return lax.polygamma(jnp.full(jnp.shape(x), float(n), jnp.result_type(x)), x)


def polygamma(n: int) -> Smooth:
    """``ψ⁽ⁿ⁾`` of positive numbers for n ≥ 1: of one sign, and its size falls."""
    way = rising if n % 2 == 0 else falling
    return Smooth(
        lambda x: _polygamma(n, x),
        lambda x: _polygamma(n + 1, x),
        on_positive(way(lambda x: _polygamma(n, x))),
        on_positive(way(lambda x: _polygamma(n + 2, x))),
        256.0,
    )


LGAMMA_LEAST = (1.4616321449683623, -0.12148629053584961)

FUNCTIONS: dict[str, Smooth] = {
    "exp": Smooth(jnp.exp, jnp.exp, rising(jnp.exp), rising(jnp.exp)),
    "exp2": Smooth(
        jnp.exp2,
        lambda x: math.log(2) * jnp.exp2(x),
        rising(jnp.exp2),
        rising(lambda x: math.log(2) ** 2 * jnp.exp2(x)),
        4.0,
    ),
    "expm1": Smooth(jnp.expm1, jnp.exp, rising(jnp.expm1), rising(jnp.exp)),
    "log": Smooth(
        jnp.log, lambda x: 1 / x, on_positive(rising(jnp.log)), on_positive(rising(lambda x: -1 / (x * x))), 1.0
    ),
    "log1p": Smooth(
        jnp.log1p,
        lambda x: 1 / (1 + x),
        on_positive(rising(jnp.log1p), -1.0),
        on_positive(rising(lambda x: -1 / ((1 + x) * (1 + x))), -1.0),
    ),
    "logistic": Smooth(
        lax.logistic,
        lambda x: _bump(lax.logistic(x)),
        rising(lax.logistic),
        _of_sigmoid(with_peaks(_tilt, *_TILTS)),
    ),
    "tanh": Smooth(
        jnp.tanh,
        lambda x: 1 - jnp.tanh(x) ** 2,
        rising(jnp.tanh),
        lambda x: with_peaks(
            lambda t: -2 * t * (1 - t * t),
            (1 / math.sqrt(3), -4 / (3 * math.sqrt(3))),
            (-1 / math.sqrt(3), 4 / (3 * math.sqrt(3))),
        )(Interval(jnp.tanh(x.lo), jnp.tanh(x.hi)).widened()),
    ),
    "softplus": Smooth(softplus, lax.logistic, rising(softplus), _of_sigmoid(with_peaks(_bump, (0.5, 0.25)))),
    "log_ndtr": Smooth(
        jax.scipy.special.log_ndtr,
        log_ndtr_slope,
        rising(jax.scipy.special.log_ndtr),
        log_ndtr_derivative_range(2),
        256.0,
        log_ndtr_series_error,
    ),
    "ndtr": Smooth(
        jax.scipy.special.ndtr,
        _density,
        rising(jax.scipy.special.ndtr),
        with_peaks(lambda x: -x * _density(x), (1.0, -_NORMAL_PEAK), (-1.0, _NORMAL_PEAK)),
        4.0,
    ),
    "sqrt": Smooth(
        jnp.sqrt,
        lambda x: 0.5 / jnp.sqrt(x),
        lambda x: Interval(jnp.where(x.lo >= 0, jnp.sqrt(jnp.maximum(x.lo, 0.0)), -jnp.inf), jnp.sqrt(x.hi)),
        on_positive(rising(lambda x: -0.25 / (x * jnp.sqrt(x)))),
    ),
    "rsqrt": Smooth(
        lax.rsqrt,
        lambda x: -0.5 * lax.rsqrt(x) / x,
        on_positive(falling(lax.rsqrt)),
        on_positive(falling(lambda x: 0.75 * lax.rsqrt(x) / (x * x))),
        1.0,
    ),
    "cbrt": Smooth(
        jnp.cbrt,
        lambda x: 1 / (3 * jnp.cbrt(x) ** 2),
        rising(jnp.cbrt),
        lambda x: apart_from_zero(rising(lambda y: -2 / (9 * jnp.cbrt(y) ** 5)), x),
        4.0,
    ),
    "atan": Smooth(
        jnp.arctan,
        lambda x: 1 / (1 + x * x),
        rising(jnp.arctan),
        with_peaks(
            lambda x: -2 * x / (1 + x * x) ** 2,
            (1 / math.sqrt(3), -3 * math.sqrt(3) / 8),
            (-1 / math.sqrt(3), 3 * math.sqrt(3) / 8),
        ),
        4.0,
    ),
    "sinh": Smooth(jnp.sinh, jnp.cosh, rising(jnp.sinh), rising(jnp.sinh), 4.0),
    "cosh": Smooth(jnp.cosh, jnp.sinh, with_peaks(jnp.cosh, (0.0, 1.0)), with_peaks(jnp.cosh, (0.0, 1.0)), 4.0),
    "asinh": Smooth(
        jnp.arcsinh,
        lambda x: lax.rsqrt(1 + x * x),
        rising(jnp.arcsinh),
        with_peaks(
            lambda x: -x * lax.rsqrt(1 + x * x) ** 3,
            (math.sqrt(0.5), -2 / (3 * math.sqrt(3))),
            (-math.sqrt(0.5), 2 / (3 * math.sqrt(3))),
        ),
        16.0,
    ),
    "erf_inv": Smooth(
        lax.erf_inv,
        lambda x: jnp.exp(lax.erf_inv(x) ** 2) / _ROOT,
        rising(lax.erf_inv),
        rising(lambda x: 2 * lax.erf_inv(x) * jnp.exp(2 * lax.erf_inv(x) ** 2) / _ROOT**2),
        1024.0,
    ),
    "sin": Smooth(jnp.sin, jnp.cos, sine, negated(sine)),
    "cos": Smooth(jnp.cos, lambda x: -jnp.sin(x), cosine, negated(cosine)),
    "erf": Smooth(lax.erf, lambda x: _ROOT * jnp.exp(-x * x), rising(lax.erf), _erf_second),
    "erfc": Smooth(lax.erfc, lambda x: -_ROOT * jnp.exp(-x * x), falling(lax.erfc), negated(_erf_second), 4.0),
    "lgamma": Smooth(
        lax.lgamma,
        lax.digamma,
        on_positive(with_peaks(lax.lgamma, LGAMMA_LEAST)),
        on_positive(falling(lambda x: _polygamma(1, x))),
        256.0,
    ),
    "digamma": Smooth(
        lax.digamma,
        lambda x: _polygamma(1, x),
        on_positive(rising(lax.digamma)),
        on_positive(rising(lambda x: _polygamma(2, x))),
        256.0,
    ),
}
FUNCTIONS["square"] = integer_power(2)
FUNCTIONS["reciprocal"] = integer_power(-1)


# Ranges of ``f^{(k)}/k!``, any k ---------------------------------------------------------------------------------------


Taylor = Callable[[Interval, int], list[Interval]]


def _scaled(x: Interval, factor: Any) -> Interval:
    return by_point(x, factor).widened()  # type: ignore[union-attr]


def _listed(each: Callable[[int], Callable[[Interval], Interval]], noise: float = 4.0) -> Taylor:
    """Coefficients from the ranges of the derivatives themselves; ``noise`` as in `Smooth`."""

    def found(x: Interval, order: int) -> list[Interval]:
        ranges = [each(k)(x) for k in range(order + 1)]
        return [
            _scaled(y.widened(y.magnitude * (1 + noise) + noise * 1e-2), 1 / math.factorial(k))
            for k, y in enumerate(ranges)
        ]

    return found


def taylor_of_integer_power(n: int) -> Taylor:
    """``binom(n, k) x^{n−k}``."""

    def found(x: Interval, order: int) -> list[Interval]:
        ranges, factor = [], 1.0
        for k in range(order + 1):
            zero = jnp.zeros_like(x.lo)
            ranges.append(_scaled(power_range(n - k)(x), factor) if factor else Interval(zero, zero))
            factor *= (n - k) / (k + 1)
        return ranges

    return found


def taylor_of_real_power(y: Any) -> Taylor:
    """``binom(y, k) x^{y−k}`` of positive x, for a point y that is no integer known while tracing."""
    if is_static(y) and np.ndim(y) == 0 and float(y).is_integer() and abs(float(y)) < 64:
        return taylor_of_integer_power(int(y))

    def found(x: Interval, order: int) -> list[Interval]:
        ranges, factor = [], jnp.ones_like(jnp.asarray(y))
        for k in range(order + 1):

            def either(x: Interval, power=y - k) -> Interval:
                one, other = x.lo**power, x.hi**power
                return Interval(jnp.minimum(one, other), jnp.maximum(one, other))

            ranges.append(_scaled(on_positive(either)(x).widened(), factor))
            factor = factor * (y - k) / (k + 1)
        return ranges

    return found


def _log(x: Interval, order: int) -> list[Interval]:
    """``−(−1)^k x^{−k}/k``."""
    logs = on_positive(rising(jnp.log))(x)
    powers = [on_positive(power_range(-k))(x) for k in range(1, order + 1)]
    return [logs.widened(2 * logs.magnitude + 1), *(_scaled(p, -((-1.0) ** k) / k) for k, p in enumerate(powers, 1))]


def _log1p(x: Interval, order: int) -> list[Interval]:
    moved = _log(Interval(1 + x.lo, 1 + x.hi).widened(), order)
    own = on_positive(rising(jnp.log1p), -1.0)(x)
    return [own.widened(), *moved[1:]]


def _polynomials(inner: Callable, derivative: np.polynomial.Polynomial, least: float, most: float) -> Callable:
    """Ranges of the derivatives of ``p`` with ``p' = derivative(p)``: polynomials in p, with extremes at roots."""

    def each(k: int) -> Callable[[Interval], Interval]:
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


def _gaussians(k: int, scale: float, square: float) -> Callable[[Interval], Interval]:
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


def _integral(value: Callable[[Interval], Interval], scale: float, square: float) -> Callable:
    return lambda k: value if k == 0 else _gaussians(k - 1, scale, square)


_NORMAL = 1 / math.sqrt(2 * math.pi)


def _log_normal(k: int) -> Callable[[Interval], Interval]:
    if k > 4:
        raise NotImplementedError("log_ndtr to more than four derivatives")
    if k > 1:
        return log_ndtr_derivative_range(k)
    inside = rising(jax.scipy.special.log_ndtr) if k == 0 else falling(log_ndtr_slope)

    def found(x: Interval) -> Interval:
        y, off = inside(x), 2 * log_ndtr_series_error(x)[k]
        return Interval(y.lo - off, y.hi + off)

    return found


def _turns(k: int) -> Callable[[Interval], Interval]:
    sine, cosine = FUNCTIONS["sin"].range, FUNCTIONS["cos"].range
    way = (sine, cosine)[k % 2]
    return way if k % 4 < 2 else lambda x: Interval(-way(x).hi, -way(x).lo)


TAYLOR: dict[str, Taylor] = {
    "expm1": _listed(lambda k: rising(jnp.expm1 if k == 0 else jnp.exp)),
    "log1p": _log1p,
    "tanh": _listed(lambda k: rising(jnp.tanh) if k == 0 else _tanh(k)),
    "sqrt": taylor_of_real_power(0.5),
    "rsqrt": taylor_of_real_power(-0.5),
    "erf": _listed(_integral(rising(lax.erf), _ROOT, 1.0)),
    "erfc": _listed(_integral(falling(lax.erfc), -_ROOT, 1.0)),
    "ndtr": _listed(_integral(rising(jax.scipy.special.ndtr), _NORMAL, 0.5)),
    "log_ndtr": _listed(_log_normal, 256.0),
    "sin": _listed(_turns),
    "cos": _listed(lambda k: _turns(k + 1)),
}
