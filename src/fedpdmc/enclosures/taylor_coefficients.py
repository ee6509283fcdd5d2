"""Ranges of ``f^{(k)}/k!`` on intervals for the smooth functions of one number, any k up to the order of a jet."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedpdmc.enclosures import log_ndtr
from fedpdmc.enclosures.cell_values import Interval, by_point
from fedpdmc.enclosures.domain import is_static
from fedpdmc.enclosures.known_extremes import falling, on_positive, power_range, rising, with_peaks
from fedpdmc.enclosures.series.special_functions import FUNCTIONS, LGAMMA_LEAST, _polygamma, softplus

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


def integer_power(n: int) -> Taylor:
    """``binom(n, k) x^{n−k}``."""

    def found(x: Interval, order: int) -> list[Interval]:
        ranges, factor = [], 1.0
        for k in range(order + 1):
            zero = jnp.zeros_like(x.lo)
            ranges.append(_scaled(power_range(n - k)(x), factor) if factor else Interval(zero, zero))
            factor *= (n - k) / (k + 1)
        return ranges

    return found


def real_power(y: Any) -> Taylor:
    """``binom(y, k) x^{y−k}`` of positive x, for a point y. If y is an integer known while tracing, use `integer_power`."""
    if is_static(y) and np.ndim(y) == 0 and float(y).is_integer() and abs(float(y)) < 64:
        return integer_power(int(y))

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


_logistic = _polynomials(lax.logistic, np.polynomial.Polynomial([0.0, 1.0, -1.0]), 0.0, 1.0)
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


_ROOT = 2 / math.sqrt(math.pi)
_NORMAL = 1 / math.sqrt(2 * math.pi)


def _log_normal(k: int) -> Callable[[Interval], Interval]:
    if k > 4:
        raise NotImplementedError("log_ndtr to more than four derivatives")
    if k > 1:
        return log_ndtr.derivative_range(k)
    inside = rising(jax.scipy.special.log_ndtr) if k == 0 else falling(log_ndtr.slope)

    def found(x: Interval) -> Interval:
        y, off = inside(x), 2 * log_ndtr.series_error(x)[k]
        return Interval(y.lo - off, y.hi + off)

    return found


def _lgamma(k: int) -> Callable[[Interval], Interval]:
    if k == 0:
        return on_positive(with_peaks(lax.lgamma, LGAMMA_LEAST))
    return on_positive(rising(lax.digamma)) if k == 1 else _polygammas(k - 1)


def _polygammas(n: int) -> Callable[[Interval], Interval]:
    """``ψ⁽ⁿ⁾`` of positive numbers for n ≥ 1: of one sign, and its size falls."""
    return on_positive((rising if n % 2 == 0 else falling)(lambda x: _polygamma(n, x)))


def polygamma(n: int) -> Taylor:
    """``ψ⁽ⁿ⁾``."""
    return _listed(lambda k: _lgamma(k + 1 + n), 256.0)


def _turns(k: int) -> Callable[[Interval], Interval]:
    """Derivatives of the sine."""
    sine, cosine = FUNCTIONS["sin"].range, FUNCTIONS["cos"].range
    way = (sine, cosine)[k % 2]
    return way if k % 4 < 2 else lambda x: Interval(-way(x).hi, -way(x).lo)


def _log1p_square(k: int) -> Callable[[Interval], Interval]:
    """Derivatives of ``log(1 + x²) = 2 Re log(1 + ix)``.

    With ``x = cot φ`` the k-th over k! is ``−(2/k)(−1)^k sin^kφ cos kφ``; its extremes are where ``cos (k+1)φ = 0``.
    """
    if k == 0:
        return with_peaks(lambda x: jnp.log1p(x * x), (0.0, 0.0))

    def value(x, arc=jnp.arctan2, sin=jnp.sin, cos=jnp.cos):
        phi = arc(1.0, x)
        return -2 * (-1.0) ** k * math.factorial(k - 1) * sin(phi) ** k * cos(k * phi)

    places = [1 / math.tan((m + 0.5) * math.pi / (k + 1)) for m in range(k + 1)]
    return with_peaks(value, *((x, float(value(x, np.arctan2, np.sin, np.cos))) for x in places))


def _exp_like(value: Callable[[Interval], Interval]) -> Taylor:
    return _listed(lambda k: value if k == 0 else rising(jnp.exp))


TAYLOR: dict[str, Taylor] = {
    "exp": _exp_like(rising(jnp.exp)),
    "expm1": _exp_like(rising(jnp.expm1)),
    "log": _log,
    "log1p": _log1p,
    "log1p_square": _listed(_log1p_square),
    "logistic": _listed(lambda k: rising(lax.logistic) if k == 0 else _logistic(k)),
    "tanh": _listed(lambda k: rising(jnp.tanh) if k == 0 else _tanh(k)),
    "softplus": _listed(lambda k: rising(softplus) if k == 0 else _logistic(k - 1)),
    "sqrt": real_power(0.5),
    "rsqrt": real_power(-0.5),
    "erf": _listed(_integral(rising(lax.erf), _ROOT, 1.0)),
    "erfc": _listed(_integral(falling(lax.erfc), -_ROOT, 1.0)),
    "ndtr": _listed(_integral(rising(jax.scipy.special.ndtr), _NORMAL, 0.5)),
    "log_ndtr": _listed(_log_normal, 256.0),
    "lgamma": _listed(_lgamma, 256.0),
    "digamma": _listed(lambda k: _lgamma(k + 1), 256.0),
    "sin": _listed(_turns),
    "cos": _listed(lambda k: _turns(k + 1)),
}
