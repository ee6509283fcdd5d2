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
from jax import lax

from fedpdmc.enclosures import log_ndtr
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
from fedpdmc.enclosures.known_extremes import (
    apart_from_zero,
    cosine,
    falling,
    negated,
    on_positive,
    power_range,
    rising,
    sine,
    with_peaks,
)  # fmt: skip


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
        log_ndtr.slope,
        rising(jax.scipy.special.log_ndtr),
        log_ndtr.derivative_range(2),
        256.0,
        log_ndtr.series_error,
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
