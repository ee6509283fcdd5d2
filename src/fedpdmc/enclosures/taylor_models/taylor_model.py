"""Curves: values along a stretch of path as polynomials of time with a proved error (Taylor models).

A stretch is read in ``τ ∈ [−1, 1]``. Sums and products of curves are those of polynomials cut off at the order n; what is
cut off, and what a smooth function leaves beyond its own n-th derivative, joins the error: with ``δ = w − c_0`` and
``D ≥ |δ|``, ``f(w) ∈ Σ_{k≤n} f_k(c_0) δ^k ± sup |f_{n+1}| D^{n+1}`` with ``f_k = f^{(k)}/k!``. The error of a stretch
shrinks with its (n+1)-th power, where that of a `Series` shrinks with its square. Rounding is as in `forms`.

Many stretches go side by side, along the last axis of every array, so that processors work on vectors of them whatever the
shape of a value is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from fedpdmc.enclosures.derivative_ranges import TAYLOR, Taylor
from fedpdmc.enclosures.intervals import TINY, Form, Interval, unit
from fedpdmc.enclosures.series.smooth_functions import softplus

# Relative room for the rounding of a bound.
ROOM = 1 + 1e-12


class Stretch(NamedTuple):
    """A piece of path, read in ``[−1, 1]``, and the order of its polynomials."""

    order: int


class Curve(eqx.Module):
    """``w(τ) ∈ Σ_k parts[k] τ^k ± error`` for all ``|τ| ≤ 1``; None, or beyond the last, stands for zero.

    The last axis of the arrays is that of stretches, and no axis of the value.
    """

    parts: tuple[Any, ...]
    error: Any

    @property
    def shape(self):
        """Shape of the value."""
        return jnp.shape(self.error)[:-1]

    @property
    def dtype(self):
        """Type of the value."""
        return jnp.result_type(self.error)

    @property
    def reach(self) -> Array:
        """``Σ_{k≥1} |c_k|``: how far the polynomial moves from its middle."""
        return total(self.parts[1:], self.error)

    @property
    def size(self) -> Array:
        """A bound of ``|w|`` and of every term it is made of."""
        return total(self.parts, self.error) + self.error

    @property
    def range(self) -> Interval:
        """All its values."""
        far = (self.reach + self.error) * ROOM
        middle = _first(self)
        return Interval(middle - far, middle + far).widened()


def total(parts, like) -> Array:
    """``Σ |c_k|``."""
    there = [jnp.abs(part) for part in parts if part is not None]
    return sum(there[1:], there[0]) if there else jnp.zeros_like(like)


def _first(w: Curve) -> Array:
    return jnp.zeros_like(w.error) if not w.parts or w.parts[0] is None else w.parts[0]


def wide(x: Any) -> Array:
    """A point that is the same on all stretches."""
    return jnp.asarray(x)[..., None]


def lifted(x: Form) -> Curve:
    """A form as a curve: a point does not move."""
    return x if isinstance(x, Curve) else Curve((wide(x),), jnp.zeros_like(wide(x)))


def steady(x: Interval) -> Curve:
    """An interval as a curve that does not move."""
    middle = 0.5 * (x.lo + x.hi)
    return Curve((middle,), (jnp.maximum(x.hi - middle, middle - x.lo) + unit(x.lo) * x.magnitude) * ROOM)


def fields(function: Callable, *forms: Form) -> Curve:
    """A structural operation (it moves entries and may set them to zero) on every part, stretch by stretch."""
    curves = [lifted(form) for form in forms]
    length, count = max(len(curve.parts) for curve in curves), max(curve.error.shape[-1] for curve in curves)
    along = jax.vmap(function, in_axes=-1, out_axes=-1)

    def each(parts):
        if all(part is None for part in parts):
            return None
        shapes = [(*curve.shape, count) for curve in curves]
        there = [
            jnp.zeros_like(curve.error) if part is None else part for part, curve in zip(parts, curves, strict=True)
        ]
        return along(*(jnp.broadcast_to(part, shape) for part, shape in zip(there, shapes, strict=True)))

    parts = [[curve.parts[k] if k < len(curve.parts) else None for curve in curves] for k in range(length)]
    return Curve(tuple(map(each, parts)), each([curve.error for curve in curves]))


def multiplied(stretch: Stretch, x: Curve, y: Curve, times: Callable = jnp.multiply, terms: int = 0) -> Curve:
    """A bilinear map of two curves, of so many terms: the product of the polynomials, cut off."""
    parts, tail = cut_product(x.parts, y.parts, stretch.order, times)
    wide, tall = x.size, y.size
    share = unit(x.error) + terms * float(jnp.finfo(x.dtype).eps)
    error = times(wide, y.error) + times(x.error, tall) + share * times(wide, tall) + TINY
    return Curve(parts, error if tail is None else error + tail * ROOM)


def cut_product(x, y, order: int, times: Callable = jnp.multiply) -> tuple[tuple[Any, ...], Any]:
    """The product of two polynomials up to an order, and a bound of the rest (None if there is none)."""
    parts: list[Any] = [None] * min(len(x) + len(y) - 1, order + 1)
    tail = None
    beyond: list[Any] = [None] * (len(y) + 1)
    for j in range(len(y) - 1, -1, -1):
        beyond[j] = plus(beyond[j + 1], None if y[j] is None else jnp.abs(y[j]))
    for i, one in enumerate(x):
        if one is None:
            continue
        kept = min(max(order + 1 - i, 0), len(y))
        for j, other in enumerate(y[:kept]):
            if other is not None:
                parts[i + j] = plus(parts[i + j], times(one, other))
        if beyond[kept] is not None:
            tail = plus(tail, times(jnp.abs(one), beyond[kept]))
    return tuple(parts), tail


def plus(x: Any, y: Any) -> Any:
    """The sum, where None is zero."""
    return y if x is None else x if y is None else x + y


class Known(NamedTuple):
    """A smooth function about a point: ``f_k`` with their errors, up to the order, and a bound of the next on the range."""

    values: list[Any]
    errors: list[Any]
    beyond: Any


Local = Callable[[Any, Any, int], Known]


def composed(stretch: Stretch, f: Local, w: Curve) -> Curve:
    """A smooth function of a curve, by Horner's rule in what the curve moves by."""
    far = (w.reach + w.error) * ROOM
    known = f(_first(w), far, stretch.order)
    moved = (None, *w.parts[1:])
    if all(part is None for part in moved):
        moved = ()
    reach = far - w.error
    g: tuple[Any, ...] = (known.values[-1],)
    error = known.errors[-1]
    size = jnp.abs(known.values[-1])
    for k in range(stretch.order - 1, -1, -1):
        own = total(g, w.error)
        product, tail = cut_product(moved, g, stretch.order - k) if moved else ((), None)
        error = known.errors[k] + reach * error + w.error * (own + error)
        error = error if tail is None else error + tail * ROOM
        g = (known.values[k], *product[1:])
        size = jnp.abs(known.values[k]) + far * size
    error = error + known.beyond * far ** (stretch.order + 1)
    return Curve(g, error * ROOM + unit(w.error) * size + TINY)


def by_ranges(f: Taylor) -> Local:
    """From the ranges of the derivatives."""

    def found(x, far, order: int) -> Known:
        here = f(Interval(x, x), order)
        beyond = f(Interval(x - far, x + far).widened(), order + 1)[-1].magnitude
        return Known([0.5 * (y.lo + y.hi) for y in here], [0.5 * (y.hi - y.lo) for y in here], beyond)

    return found


def _exact(values: list[Any], noise: float, absolute: float, beyond: Any) -> Known:
    """With the rounding of the values, relative and absolute."""
    errors = [unit(value) * (noise * jnp.abs(value) + absolute) + TINY for value in values]
    return Known(values, errors, beyond)


def exp(x, far, order: int) -> Known:
    """``e^x/k!``."""
    value = jnp.exp(x)
    beyond = jnp.exp(x + far) * ((1 + 1e-9) / math.factorial(order + 1))
    return _exact([value / math.factorial(k) for k in range(order + 1)], 4.0, 0.0, beyond)


def log(x, far, order: int) -> Known:
    """``−(−1)^k x^{−k}/k``."""
    inverse, least = 1 / x, x - far
    values = [jnp.log(x), *(-((-1.0) ** k) / k * inverse**k for k in range(1, order + 1))]
    beyond = jnp.where(least > 0, ROOM / ((order + 1) * jnp.where(least > 0, least, 1.0) ** (order + 1)), jnp.inf)
    return _exact(values, 4.0, 1.0, beyond)


def reciprocal(x, far, order: int) -> Known:
    """``(−1)^k x^{−k−1}``."""
    inverse, least = 1 / x, jnp.abs(x) - far
    values = [(-1.0) ** k * inverse ** (k + 1) for k in range(order + 1)]
    beyond = jnp.where(least > 0, ROOM / jnp.where(least > 0, least, 1.0) ** (order + 2), jnp.inf)
    return _exact(values, 4.0, 0.0, beyond)


@functools.cache
def _logistic_derivatives(order: int) -> tuple[list[np.ndarray], list[float]]:
    """``σ^{(k)}/k!`` as polynomials in σ, lowest power first, and a bound of the absolute value of each.

    From a grid of step 1e-4 on [0, 1]: at an extreme within, the slope is zero and by Markov's inequality the second
    derivative at most ``4 k⁴/3`` times the largest value, so that the grid misses a share of less than ``2e-9 k⁴``.
    """
    p, found, largest = np.polynomial.Polynomial([0.0, 1.0]), [], []
    for k in range(order + 1):
        scaled = p / math.factorial(k)
        found.append(scaled.coef)
        largest.append(float(np.abs(scaled(np.linspace(0, 1, 10001))).max()) * (1 + 1e-3))
        p = p.deriv() * np.polynomial.Polynomial([0.0, 1.0, -1.0])
    return found, largest


def _logistic(x, far, order: int) -> Known:
    coefficients, largest = _logistic_derivatives(order + 1)
    p = lax.logistic(x)
    return _exact([_horner(c, p) for c in coefficients[:-1]], 16.0, 16.0, jnp.full_like(x, largest[-1]))


def _softplus(x, far, order: int) -> Known:
    coefficients, largest = _logistic_derivatives(order)
    p = lax.logistic(x)
    slopes = [_horner(c, p) / (k + 1) for k, c in enumerate(coefficients[:-1])]
    return _exact([softplus(x), *slopes], 16.0, 16.0, jnp.full_like(x, largest[-1] / (order + 1)))


def _horner(coefficients, x):
    total = coefficients[-1]
    for c in coefficients[-2::-1]:
        total = c + x * total
    return jnp.broadcast_to(total, jnp.shape(x))


LOCAL: dict[str, Local] = {
    **{name: by_ranges(taylor) for name, taylor in TAYLOR.items()},
    "exp": exp, "log": log, "logistic": _logistic, "softplus": _softplus,
}  # fmt: skip
