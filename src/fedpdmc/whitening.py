"""Whitened coordinates: the map from a run's coordinates to the parameters, and the one place where a covariance lives.

A reference is ``x = T(c + S a)``. T bends the log spreads of grouped effects, so that a Gaussian has the tails of a
posterior; elsewhere it is the identity.
The log s of a spread τ has a posterior that falls like ``e^s`` as ``s → −∞``: the density of τ is positive at zero, and the
likelihood of a small spread tends to a constant. A rotation follows a Gaussian, which falls faster than any exponential:
it would reach that tail rarely and leave it late. So the run moves in u, with

    s = T(u) = b + c u + Σ_κ (β_κ e^{κu} − α_κ e^{−κu})/κ,        κ ∈ {½, 1},

where c is positive and α, β are not negative: T increases from −∞ to ∞. The target has the density ``π(T(u)) T'(u)``, which
is exact for any such numbers; they decide how close it is to a Gaussian. T has no poles, which makes bounds simple.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int

LEAST_STRAIGHT = 0.05  # c over ``T'(0)`` in maps that sites accept, so that ``T'(0) / 20 ≤ T'(u) ≤ T'(0) e^{|u|}``
# The largest ``T'(0)`` that sites accept: a posterior has about one standard deviation of a log spread, priors up to π/2.
STEEPEST = 4.5
RATES = (0.5, 1.0)  # κ, multiples of the first
NUMBERS = 2 + 2 * len(RATES)  # of a bend: b, c, α and β


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


# Kinds of references from the sites' derivatives: at the mode, or as averages over the reference itself.
LAPLACE, VB = "laplace", "vb"


class Starts(NamedTuple):
    """Where chains start, about the centre of a reference: a Gaussian that is stretched on some sides.

    Attributes
    ----------
    scale : array of shape (d, d)
        Of the Gaussian.
    forms, moves : array of shape (d, k)
        A point x with ``f·(x − c) > 0`` is moved by ``f·(x − c)`` times its column of ``moves``, one side after the other.
    """

    scale: np.ndarray
    forms: np.ndarray
    moves: np.ndarray

    def about(self, center: np.ndarray, z: np.ndarray) -> np.ndarray:
        """Starts (n, d) from standard normal numbers of that shape."""
        away = z @ self.scale.T
        for form, move in zip(self.forms.T, self.moves.T, strict=True):
            away = away + np.maximum(away @ form, 0.0)[:, None] * move
        return center + away


class Reference(eqx.Module):
    """Public coordinates ``x = T(c + S a)`` in which all dynamics run; T is the identity where nothing is bent.

    Parameters
    ----------
    center : array of shape (d,)
        The point ``c``.
    scale_tril : array of shape (d, d), or (d,) for a diagonal one
        The matrix ``S``; ``S Sᵀ`` plays the part of a covariance.
    control : dict, optional
        The sites' public quadratics by name, as `fedpdmc.laplace` and `fedpdmc.sampling.vb_reference` make them.
    rounds : int
        Serial exchanges with the sites that its making took.
    bytes : dict, optional
        Bytes exchanged with each site to make it.
    name : str
        How it was made: "laplace", "vb", or nothing if it was given.
    why : str
        The reason for this kind.
    bend : Bend, optional
        T, of log spreads (`fedpdmc.whitening`). ``c``, ``S`` and the control variates are in coordinates before it.
    wide : array of shape (d, k), optional
        W, if ``W Wᵀ`` was taken off the precision so that the reference is as wide as the posterior's tails.
    starts : Starts, optional
        Where chains start; if None, from the reference.
    narrow : pair of int and float, optional
        The parameter whose tail is wider than the reference by the largest factor, and that factor of its variance.
    ridged : bool
        Whether that is so along a curved ridge only: rotations mix there, but need a long burn-in.
    modes : tuple of dict, optional
        Other modes of the posterior: where, and with which share of its mass. None if they were not searched for.
    """

    center: Float[Array, " d"]
    scale_tril: Float[Array, "d d"] | Float[Array, " d"]
    control: dict[str, Any] | None = None
    rounds: int = eqx.field(default=0, static=True)
    bytes: dict[str, int] | None = eqx.field(default=None, static=True)
    name: str = eqx.field(default="", static=True)
    why: str = eqx.field(default="", static=True)
    bend: Bend | None = None
    wide: np.ndarray | None = None
    starts: Starts | None = None
    narrow: tuple[int, float] | None = eqx.field(default=None, static=True)
    ridged: bool = eqx.field(default=False, static=True)
    modes: tuple[dict[str, Any], ...] | None = eqx.field(default=None, static=True)

    @property
    def dim(self) -> int:
        """Number of parameters."""
        return self.center.shape[0]

    @property
    def diagonal(self) -> bool:
        """Whether ``S`` is stored as its diagonal, so that a flip moves one coordinate of x only."""
        return self.scale_tril.ndim == 1

    @property
    def matrix(self) -> Float[Array, "d d"]:
        """``S`` as a full matrix."""
        return jnp.diag(self.scale_tril) if self.diagonal else self.scale_tril

    def rows_of(self, columns: Any) -> tuple[Float[Array, "k d"], Float[Array, " k"]]:
        """The rows of ``S`` and the entries of ``c`` that belong to these parameters; None for all."""
        return (self.matrix, self.center) if columns is None else (self.matrix[columns], self.center[columns])

    def to_x(self, a: Any) -> Any:
        """``x = T(c + S a)`` of arrays (…, d); of NumPy's by NumPy, so that nothing is compiled outside of a run."""
        center, scale = _beside(a, self.center, self.scale_tril)
        straight = center + (a * scale if self.diagonal else a @ scale.T)
        return straight if self.bend is None else self.bend(straight)

    def to_a(self, x: Any) -> Any:
        """``a = S⁻¹ (T⁻¹(x) − c)``; as `to_x`."""
        return self.whiten(x if self.bend is None else self.bend.inverse(x))

    def whiten(self, x: Any) -> Any:
        """``a = S⁻¹ (x − c)`` of a point before the bend."""
        center, scale = _beside(x, self.center, self.scale_tril)
        shifted = x - center
        if self.diagonal:
            return shifted / scale
        solve = np.linalg.solve if isinstance(scale, np.ndarray) else jnp.linalg.solve
        return solve(scale, shifted.reshape(-1, self.dim).T).T.reshape(shifted.shape)

    def restricted(self, index: Int[Array, " k"]) -> Reference:
        """Reference of the coordinates ``index`` alone; only a diagonal one has it."""
        return Reference(self.center[index], self.scale_tril[index])


def _beside(x: Any, *arrays: Any) -> tuple[Any, ...]:
    """The arrays as NumPy's where x is one of those and they are known."""
    if not isinstance(x, np.ndarray) or any(isinstance(array, Tracer) for array in arrays):
        return arrays
    return tuple(np.asarray(array) for array in arrays)
