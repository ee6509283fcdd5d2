"""``log Φ``, the logarithm of the normal distribution function: ranges of its derivatives, and the error of JAX's own.

With ``t = −x``, ``Φ(x) = φ(t) ∫_0^∞ e^{−tu − u²/2} du``. So its derivatives of order k ≥ 2 are the cumulants of the density
``∝ e^{−tu − u²/2}``, except for −1 in the second. For large t they are those of the exponential distribution,
``(k−1)!/t^k``, times a factor that rises to one with t. Elsewhere they follow from ``m = φ/Φ`` with ``m' = −m (m + x)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedpdmc.enclosures.cell_values import Interval
from fedpdmc.enclosures.known_extremes import rising, with_peaks

# Below, ``m + x`` cancels; above, the k-th derivative is computed up to ``ERROR (2 + |x|)^k``. The share there.
NEAR, ERROR = -8.0, 3e-14
SHARES = {2: 0.9167, 3: 0.8427, 4: 0.7545}
# The fourth is at most this in absolute value: its minimum, with room; for large t it is at most ``6/t⁴``.
MOST_FOURTH = 0.18896
# The third is positive with one peak; the fourth rises to a peak, falls to a trough and rises to zero.
PEAKS = {
    2: (),
    3: ((1.0023693422683706, 0.2957188191931231),),
    4: ((-0.029833620926059145, 0.11483629895508604), (2.071288938808874, -0.18895683512084606)),
}
# Below this number JAX sums three terms of an alternating series; the error is less than the next term, ``105/t⁸``.
SERIES = -20.0


def slope(x):
    """``m(x) = φ(x)/Φ(x)``."""
    return jnp.exp(-0.5 * x * x - jax.scipy.special.log_ndtr(x) - 0.5 * math.log(2 * math.pi))


def _derivative(k: int, x: Any):
    """The derivative of order 2, 3 or 4."""
    m = slope(x)
    q = m + x
    second = -m * q
    third = -(second * q + m * (1 + second))
    return (second, third, -(third * q + 2 * second * (1 + second) + m * third))[k - 2]


def _cumulant(k: int, share: float, x: Any):
    """So much of the exponential distribution's, as a derivative."""
    return share * math.factorial(k - 1) / (-x) ** k - (k == 2)


def derivatives_at(x: Any) -> list[tuple[Any, Any]]:
    """The function and its first three derivatives at points, each with a bound of its error.

    The errors of `derivative_range`, and twice those of JAX's own functions.
    """
    off, slope_off = series_error(Interval(x, x))
    found = [(jax.scipy.special.log_ndtr(x), 2 * off), (slope(x), 2 * slope_off)]
    near = jnp.maximum(x, NEAR)
    m = slope(near)
    q = m + near
    second = -m * q
    for k, inside in ((2, second), (3, -(second * q + m * (1 + second)))):
        least, most = (_cumulant(k, share, jnp.minimum(x, NEAR)) for share in (SHARES[k], 1.0))
        room = ERROR * (2 + jnp.clip(-x, 0.0, -NEAR)) ** k
        below = x < NEAR
        found.append(
            (jnp.where(below, 0.5 * (least + most), inside), jnp.where(below, 0.5 * (most - least), 0.0) + room)
        )
    return found


def derivative_range(k: int) -> Callable[[Interval], Interval]:
    """The range of the derivative of order 2, 3 or 4."""
    inside = (rising if k == 2 else with_peaks)(lambda x: _derivative(k, x), *PEAKS[k])

    def found(x: Interval) -> Interval:
        near = inside(Interval(jnp.maximum(x.lo, NEAR), jnp.maximum(x.hi, NEAR)))
        least = _cumulant(k, SHARES[k], x.lo)
        most = _cumulant(k, 1.0, jnp.minimum(x.hi, NEAR))
        lo = jnp.where(x.lo < NEAR, jnp.minimum(near.lo, least), near.lo)
        hi = jnp.where(x.hi < NEAR, most, jnp.where(x.lo < NEAR, jnp.maximum(near.hi, most), near.hi))
        room = ERROR * (2 + jnp.clip(-x.lo, 0.0, -NEAR)) ** k
        return Interval(lo - room, jnp.minimum(hi + room, 0.0) if k == 2 else hi + room)

    return found


def series_error(x: Interval) -> tuple[Any, Any]:
    """Bounds of the errors of JAX's ``log Φ`` and of its derivative."""
    t = jnp.maximum(-x.hi, -SERIES)
    inverse = 1 / t
    off = jnp.where(x.lo <= SERIES, 105 * inverse**8, 0.0)
    return off, off * (t + inverse)
