"""Coordinates that are bent, so that a Gaussian has the tails of a posterior.

The log s of a spread τ has a posterior that falls like ``e^s`` as ``s → −∞``: the density of τ is positive at zero, and the
likelihood of a small spread tends to a constant. A rotation follows a Gaussian, which falls faster than any exponential:
it would reach that tail rarely and leave it late. So the run moves in u, with

    s = T(u) = b + c u + Σ_κ (β_κ e^{κu} − α_κ e^{−κu})/κ,        κ ∈ {½, 1},

where c is positive and α, β are not negative: T increases from −∞ to ∞. The target has the density ``π(T(u)) T'(u)``, which
is exact for any such numbers; they decide how close it is to a Gaussian. T has no poles, which makes bounds simple.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

# In maps that sites accept: the least straight part of ``T'(0)``, so that ``T'(0) / 20 ≤ T'(u) ≤ T'(0) e^{|u|}``, and the
# largest ``T'(0)``, to which a posterior has about one standard deviation of a log spread. Priors of spreads have up to π/2.
LEAST_STRAIGHT, STEEPEST = 0.05, 4.5
# κ of the exponentials, multiples of the first, and how many numbers a bend has: b, c, α and β.
RATES = (0.5, 1.0)
NUMBERS = 2 + 2 * len(RATES)


def straight(count: int) -> np.ndarray:
    """The numbers of coordinates that are not bent, of shape (6, count)."""
    numbers = np.zeros((NUMBERS, count))
    numbers[1] = 1.0
    return numbers


def _terms(u: Any, numbers: Any) -> list[tuple[float, Any, Any, Any, Any]]:
    """Of each κ: κ, α and β, ``e^{−κu}`` and ``e^{κu}``. They are powers of one exponential of each sign."""
    exp, k = np.exp if isinstance(u, np.ndarray) else jnp.exp, len(RATES)
    down, up = exp(-RATES[0] * u), exp(RATES[0] * u)
    return [(RATES[i], numbers[2 + i], numbers[2 + k + i], down ** (i + 1), up ** (i + 1)) for i in range(k)]


def bent(u: Any, numbers: Any) -> Any:
    """``T(u)``, with the numbers along their first axis."""
    total = numbers[0] + numbers[1] * u
    for rate, below, above, down, up in _terms(u, numbers):
        total = total + (above * up - below * down) / rate
    return total


def steepness(u: Any, numbers: Any) -> Any:
    """``T'(u)``."""
    total = numbers[1] + 0.0 * u
    for _, below, above, down, up in _terms(u, numbers):
        total = total + above * up + below * down
    return total


def curvatures(u: Any, numbers: Any) -> tuple[Any, Any]:
    """``T''(u)`` and ``T'''(u)``."""
    second, third = 0.0 * u, 0.0 * u
    for rate, below, above, down, up in _terms(u, numbers):
        rising, falling = rate * above * up, rate * below * down
        second, third = second + rising - falling, third + rate * (rising + falling)
    return second, third


def increasing(numbers: np.ndarray) -> bool:
    """Whether T increases from −∞ to ∞: finite numbers, c positive, α and β not negative."""
    return bool(np.all(np.isfinite(numbers)) and np.all(numbers[1] > 0) and np.all(numbers[2:] >= 0))


def moderate(numbers: np.ndarray) -> bool:
    """Whether T increases, and is neither flatter nor steeper than sites accept."""
    if not increasing(numbers):
        return False
    slope = steepness(np.zeros(numbers.shape[1]), numbers)
    return bool(np.all(numbers[1] >= LEAST_STRAIGHT * slope) and np.all(slope <= STEEPEST))


def log_volume(u: Any, numbers: Any) -> Any:
    """``log T'(u)``, by which the density of u differs from that of s."""
    return jnp.log(steepness(u, numbers))


def enclosed(least: Any, most: Any, aside: Any, numbers: Any) -> tuple[Any, Any, Any]:
    """Bounds of T for ``least ≤ Re u ≤ most`` and ``|Im u| ≤ aside``: D ≥ ``|T'|``, and the least and the largest ``Re T``.

    ``|e^{±κu}| = e^{±κ Re u}``: every exponential of T' is largest at an end, so ``D = c + Σ_κ (α_κ e^{−κ least} + β_κ
    e^{κ most})``. So ``|Im T| ≤ D |Im u|``; and T at u differs from T at ``Re u`` by at most ``(D − c) |Im u|`` in its real
    part, to which the straight part adds nothing.
    """
    more = 0.0 * least
    # None where the number is zero, also if the exponential overflows.
    for (_, below, _, down, _), (_, _, above, _, up) in zip(_terms(least, numbers), _terms(most, numbers), strict=True):
        more = more + jnp.where(below > 0, below * down, 0.0) + jnp.where(above > 0, above * up, 0.0)
    return numbers[1] + more, _real(least, numbers) - more * aside, _real(most, numbers) + more * aside


def _real(u, numbers):
    """``T(u)``, without exponentials of number zero."""
    total = numbers[0] + numbers[1] * u
    for rate, below, above, down, up in _terms(u, numbers):
        total = total + jnp.where(above > 0, above * up, 0.0) / rate - jnp.where(below > 0, below * down, 0.0) / rate
    return total


class Bend(eqx.Module):
    """Some coordinates of a run, bent.

    Parameters
    ----------
    index : tuple of int
        Which.
    numbers : array of shape (6, r)
        b, c, α and β of each.
    """

    index: tuple[int, ...] = eqx.field(static=True)
    numbers: Float[Array, "6 r"]

    @classmethod
    def unpacked(cls, arrays: Mapping[str, np.ndarray]) -> Bend | None:
        """From `packed`; None where there is none.

        Raises
        ------
        ValueError
            For arrays that are no bend.
        """
        if "bend_index" not in arrays:
            return None
        index, numbers = np.asarray(arrays["bend_index"]), np.asarray(arrays["bend_numbers"], float)
        if numbers.shape != (NUMBERS, len(index)) or not increasing(numbers):
            raise ValueError("a bend that does not increase")
        return cls(tuple(int(i) for i in index), jnp.asarray(numbers))

    def packed(self) -> dict[str, np.ndarray]:
        """As arrays."""
        return {"bend_index": np.asarray(self.index), "bend_numbers": np.asarray(self.numbers)}

    def __call__(self, x: Any) -> Any:
        """The parameters at a point u of shape (…, d)."""
        index = np.asarray(self.index)
        if not isinstance(x, np.ndarray):
            return x.at[..., index].set(bent(x[..., index], self.numbers))
        out = np.array(x, float)
        out[..., index] = bent(out[..., index], np.asarray(self.numbers))
        return out

    def slopes(self, x: np.ndarray) -> np.ndarray:
        """The derivative of every parameter in its coordinate, at a point u of shape (d,)."""
        out, index = np.ones_like(x), np.asarray(self.index)
        out[index] = steepness(x[index], np.asarray(self.numbers))
        return out

    def inverse(self, x: Any) -> np.ndarray:
        """U at parameters of shape (…, d), by bisection."""
        out, numbers = np.array(x, float), np.asarray(self.numbers)
        wanted = out[..., np.asarray(self.index)]
        least, most = np.full_like(wanted, -1.0), np.full_like(wanted, 1.0)
        while np.any(high := (bent(most, numbers) < wanted)):
            most = np.where(high, 2 * most, most)
        while np.any(low := (bent(least, numbers) > wanted)):
            least = np.where(low, 2 * least, least)
        for _ in range(80):
            middle = (least + most) / 2
            over = bent(middle, numbers) > wanted
            least, most = np.where(over, least, middle), np.where(over, middle, most)
        out[..., np.asarray(self.index)] = (least + most) / 2
        return out
