"""Smooth functions of curves, from their derivatives at the middle and a bound of the next one on the range."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from fedpdmc.enclosures import log_ndtr
from fedpdmc.enclosures.cell_values import TINY, Interval, unit
from fedpdmc.enclosures.series.special_functions import softplus
from fedpdmc.enclosures.taylor_coefficients import TAYLOR, Taylor
from fedpdmc.enclosures.taylor_models import polygammas
from fedpdmc.enclosures.taylor_models.taylor_model import ROOM, Curve, TimeInterval, cut_product, first_of, total

# Rounding of JAX's own special functions, in units in the last place.
NOISE = 320.0


class Known(NamedTuple):
    """A smooth function about a point: ``f_k`` with errors up to the order, and a bound of the next one on the range."""

    values: list[Any]
    errors: list[Any]
    beyond: Any


Local = Callable[[Any, Any, int], Known]


def composed(interval: TimeInterval, f: Local, w: Curve) -> Curve:
    """A smooth function of a curve, by Horner's rule in the curve minus its middle."""
    far = (w.reach + w.error) * ROOM
    known = f(first_of(w), far, interval.order)
    moved = (None, *w.parts[1:])
    if all(part is None for part in moved):
        moved = ()
    reach = far - w.error
    g: tuple[Any, ...] = (known.values[-1],)
    error = known.errors[-1]
    size = jnp.abs(known.values[-1])
    for k in range(interval.order - 1, -1, -1):
        own = total(g, w.error)
        product, tail = cut_product(moved, g, interval.order - k) if moved else ((), None)
        error = known.errors[k] + reach * error + w.error * (own + error)
        error = error if tail is None else error + tail * ROOM
        g = (known.values[k], *product[1:])
        size = jnp.abs(known.values[k]) + far * size
    error = error + known.beyond * far ** (interval.order + 1)
    return Curve(g, error * ROOM + unit(w.error) * size + TINY)


def by_ranges(f: Taylor) -> Local:
    """The function from the ranges of its derivatives."""

    def found(x, far, order: int) -> Known:
        here = f(Interval(x, x), order)
        beyond = f(Interval(x - far, x + far).widened(), order + 1)[-1].magnitude
        return Known([0.5 * (y.lo + y.hi) for y in here], [0.5 * (y.hi - y.lo) for y in here], beyond)

    return found


def _exact(values: list[Any], noise: float, absolute: float, beyond: Any) -> Known:
    """Values with their rounding errors, relative and absolute."""
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


def polygamma(n: int) -> Local:
    """``ψ⁽ⁿ⁾``; for n = −1 ``log Γ``."""
    return lambda x, far, order: Known(*polygammas.about(n, x, far, order))


def _log_ndtr(x, far, order: int) -> Known:
    """``log Φ``, the next derivative by its largest value anywhere; of other orders from ranges."""
    if order != 3:
        return by_ranges(TAYLOR["log_ndtr"])(x, far, order)
    values, errors = [], []
    for k, (value, left) in enumerate(log_ndtr.derivatives_at(x)):
        values.append(value / math.factorial(k))
        errors.append((left * ROOM + unit(x) * (NOISE * jnp.abs(value) + 4.0)) / math.factorial(k) + TINY)
    return Known(values, errors, jnp.full_like(x, log_ndtr.MOST_FOURTH / math.factorial(4)))


def _horner(coefficients, x):
    total = coefficients[-1]
    for c in coefficients[-2::-1]:
        total = c + x * total
    return jnp.broadcast_to(total, jnp.shape(x))


LOCAL: dict[str, Local] = {
    **{name: by_ranges(taylor) for name, taylor in TAYLOR.items()},
    "exp": exp, "log": log, "logistic": _logistic, "softplus": _softplus, "lgamma": polygamma(-1), "digamma": polygamma(0),
    "log_ndtr": _log_ndtr,
}  # fmt: skip
