"""Curves: values along an interval of path as polynomials of time with a proved error (Taylor models).

Time on an interval is rescaled to ``τ ∈ [−1, 1]``. Sums and products of curves are those of polynomials truncated at the
order n. The truncated terms are added to the error, and so is the remainder of a smooth function beyond its n-th derivative:
with ``δ = w − c_0`` and ``D ≥ |δ|``, ``f(w) ∈ Σ_{k≤n} f_k(c_0) δ^k ± sup |f_{n+1}| D^{n+1}`` with ``f_k = f^{(k)}/k!``. The
error shrinks with the (n+1)-th power of the interval's length; that of a `Series` shrinks with the square. Rounding is
treated as in `fedpdmc.enclosures.cell_values`.

The last axis of every array is a batch of intervals, so that processors work on vectors whatever the shape of a value is.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives
from jaxtyping import Array

from fedpdmc._jax.compilation import computed_first
from fedpdmc.enclosures import cell_rules, special_functions
from fedpdmc.enclosures.cell_values import TINY, Cell, Interval, hull, unit
from fedpdmc.enclosures.domain import (
    Assumed,
    Domain,
    Enclosure,
    Form,
    Rule,
    Truth,
    is_point,
    is_static,
    is_zero,
    shape_of,
)
from fedpdmc.enclosures.special_functions import (
    TAYLOR,
    Taylor,
    softplus,
    taylor_of_integer_power,
    taylor_of_real_power,
)

# Relative room for the rounding of a bound.
ROOM = 1 + 1e-12


class TimeInterval(Domain):
    """A piece of path, read in ``[−1, 1]``, and the order of its polynomials: forms are curves."""

    rules: ClassVar[dict[str, Rule]] = {}
    title: ClassVar[str] = "on curves"

    order: int = eqx.field(static=True)

    def rule(self, name: str, params: dict[str, Any], *forms: Form) -> Any:
        """Vectors in pieces are assembled first, except for sums of them."""
        if name not in ("add", "add_any"):
            forms = tuple(whole(form) for form in forms)
        return super().rule(name, params, *forms)

    def fields(self, function: Callable, *forms: Form) -> Form:
        """Apply to every coefficient, interval by interval."""
        if any(isinstance(form, Truth) for form in forms):
            truths, along = self.truths(*forms), jax.vmap(function, in_axes=-1, out_axes=-1)
            count = max(x.value.shape[-1] for x in truths)

            def all_of(part):
                return along(*(jnp.broadcast_to(x, (*x.shape[:-1], count)) for x in part))

            return Truth(all_of([x.value for x in truths]), all_of([x.known for x in truths]))
        return fields(function, *forms)

    def spans(self, *forms: Form) -> list[Interval]:
        """Ranges with the batch of intervals along the last axis."""
        if any(isinstance(form, (Truth, Assumed)) for form in forms):
            raise NotImplementedError("a comparison as a number")
        return [x.range if isinstance(x, Curve) else Interval(wide(x), wide(x)) for x in forms]

    def truths(self, *forms: Form) -> list[Truth]:
        """Truths with the batch of intervals along the last axis."""

        def one(x: Form) -> Truth:
            if isinstance(x, Assumed):
                return Truth(jnp.full(x.witness.size.shape, x.value), jnp.isfinite(x.witness.size))
            return x if isinstance(x, Truth) else Truth(wide(x), jnp.ones_like(wide(x), bool))

        return [one(form) for form in forms]

    def choose(self, which: Truth, no: Form, yes: Form, either: Interval | None = None) -> Curve:
        """If no case holds on the whole interval, a constant curve."""
        shape = np.broadcast_shapes(shape_of(no), shape_of(yes), jnp.shape(which.value)[:-1])
        no, yes = shaped(lifted(no), shape), shaped(lifted(yes), shape)
        unknown = steady(hull(no.range, yes.range) if either is None else either)

        def pick(one, other, neither):
            one, other = (jnp.zeros_like(neither) if part is None else part for part in (one, other))
            return jnp.where(which.known, jnp.where(which.value, other, one), neither)

        def part(w: Curve, k: int):
            return w.parts[k] if k < len(w.parts) else None

        still = jnp.zeros_like(unknown.error)
        parts = [
            pick(part(no, k), part(yes, k), still if k else unknown.parts[0])
            for k in range(max(len(no.parts), len(yes.parts)))
        ]
        return Curve(tuple(parts), pick(no.error, yes.error, unknown.error))

    def poisoned(self, x: Form, witness: Form) -> Curve:
        """The error becomes NaN where the witness is not finite."""
        case = lifted(x)
        return Curve(case.parts, case.error + 0.0 * witness.size)

    def filled(self, x: Form, where: Any, fill: float) -> Curve:
        """Only the first coefficient is replaced: the others are zero there already."""
        return Curve((jnp.where(wide(where), fill, first_of(x)), *x.parts[1:]), x.error)

    def full(self, x: Form, like: Form) -> Curve:
        """A curve with all coefficients, on as many intervals as ``like``."""
        if any(isinstance(form, (Truth, Assumed)) for form in (x, like)):
            raise NotImplementedError("a comparison that a loop carries")
        curve = lifted(x)
        shape = np.broadcast_shapes(jnp.shape(curve.error), jnp.shape(lifted(like).error))
        parts = [*curve.parts, *(None,) * (self.order + 1 - len(curve.parts)), curve.error]
        *parts, error = (jnp.zeros(shape, curve.dtype) if p is None else jnp.broadcast_to(p, shape) for p in parts)
        return Curve(tuple(parts), error)

    def still(self, function: Callable, x: Form) -> list[Curve]:
        """Interval by interval."""
        found = jax.vmap(function, in_axes=-1, out_axes=-1)(first_of(lifted(x)))
        return [Curve((value,), error) for value, error in found]

    def wider(self, function: Callable, x: Form) -> Curve:
        """Interval by interval."""
        curve = lifted(x)
        return Curve(curve.parts, curve.error + jax.vmap(function, in_axes=-1, out_axes=-1)(curve.size))

    def extreme(self, x: Form) -> tuple[Form, Form] | None:
        """The number in the middle, and the rest."""
        if not isinstance(x, Curve):
            return None
        middle = Curve(x.parts[:1], jnp.zeros_like(x.error))
        return middle, self.rule("sub", {}, x, middle)


class Curve(Enclosure):
    """``w(τ) ∈ Σ_k parts[k] τ^k ± error`` for all ``|τ| ≤ 1``; None, or beyond the last, stands for zero.

    The last axis of the arrays is the batch of intervals, not an axis of the value.
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
        """All its values. One that neither moves nor has an error is a number of the data, and compares as such."""
        far = (self.reach + self.error) * ROOM
        middle = first_of(self)
        wide = Interval(middle - far, middle + far).widened()
        return Interval(jnp.where(far == 0, middle, wide.lo), jnp.where(far == 0, middle, wide.hi))


def total(parts, like) -> Array:
    """``Σ |c_k|``."""
    there = [jnp.abs(part) for part in parts if part is not None]
    return sum(there[1:], there[0]) if there else jnp.zeros_like(like)


def first_of(w: Curve) -> Array:
    """The value in the middle."""
    return jnp.zeros_like(w.error) if not w.parts or w.parts[0] is None else w.parts[0]


def wide(x: Any) -> Array:
    """A point that is the same on all intervals."""
    return jnp.asarray(x)[..., None]


def lifted(x: Form) -> Curve:
    """A form as a curve: a point does not move."""
    x = whole(x)
    return x if isinstance(x, Curve) else Curve((wide(x),), jnp.zeros_like(wide(x)))


def shaped(x: Curve, shape: tuple[int, ...]) -> Curve:
    """Broadcast to this shape."""
    return x if x.shape == shape else fields(lambda part: jnp.broadcast_to(part, shape), x)


def steady(x: Interval) -> Curve:
    """An interval as a curve that does not move."""
    middle = 0.5 * (x.lo + x.hi)
    return Curve((middle,), (jnp.maximum(x.hi - middle, middle - x.lo) + unit(x.lo) * x.magnitude) * ROOM)


def fields(function: Callable, *forms: Form) -> Curve:
    """A structural operation (it moves entries and may set them to zero) on every part, interval by interval."""
    curves = [lifted(form) for form in forms]
    length, count = max(len(curve.parts) for curve in curves), max(curve.error.shape[-1] for curve in curves)

    def row(parts):
        if all(part is None for part in parts):
            return None
        there = [
            jnp.zeros_like(curve.error) if part is None else part for part, curve in zip(parts, curves, strict=True)
        ]
        return [jnp.broadcast_to(part, (*curve.shape, count)) for part, curve in zip(there, curves, strict=True)]

    parts = [[curve.parts[k] if k < len(curve.parts) else None for curve in curves] for k in range(length)]
    rows = [row(part) for part in (*parts, [curve.error for curve in curves])]
    # Mapped once for all parts: there is less to trace.
    along = jax.vmap(lambda rows: [function(*row) for row in rows], in_axes=-1, out_axes=-1)
    moved = iter(along([row for row in rows if row is not None]))
    *found, error = (None if row is None else next(moved) for row in rows)
    return Curve(tuple(found), error)


class PlacedPieces(Enclosure):
    """A vector of zeros except for pieces that start at these places: the gradient of slices, before it is added up."""

    pieces: tuple[tuple[int, Curve], ...]
    length: int = eqx.field(static=True)

    @property
    def shape(self):
        """Shape of the value."""
        return (self.length,)

    @property
    def dtype(self):
        """Type of the value."""
        return self.pieces[0][1].dtype

    def plus(self, interval: TimeInterval, other: PlacedPieces) -> Form:
        """Piece by piece, unless pieces overlap in part."""
        own = {(start, piece.shape[0]): piece for start, piece in self.pieces}
        for start, piece in other.pieces:
            key = (start, piece.shape[0])
            own[key] = interval.rule("add", {}, own[key], piece) if key in own else piece
        ends = sorted((start, start + size) for start, size in own)
        if any(end > start for (_, end), (start, _) in itertools.pairwise(ends)):
            return interval.rule("add", {}, self.whole(), other.whole())
        return PlacedPieces(tuple((start, own[start, end - start]) for start, end in ends), self.length)

    def whole(self) -> Curve:
        """The vector; its pieces are computed first: fused into a concatenation they would not be vectorised."""
        held = computed_first([piece for _, piece in self.pieces], number=self.pieces[0][1].error.reshape(-1))
        there, row = [], 0
        for (start, _), piece in zip(self.pieces, held, strict=True):
            there += [np.zeros(start - row, self.dtype), piece]
            row = start + piece.shape[0]
        there.append(np.zeros(self.length - row, self.dtype))
        return fields(lambda *parts: jnp.concatenate(parts), *there)


def whole(x: Form) -> Form:
    """A vector in pieces, assembled; anything else unchanged."""
    return x.whole() if isinstance(x, PlacedPieces) else x


def multiplied(interval: TimeInterval, x: Curve, y: Curve, times: Callable = jnp.multiply, terms: int = 0) -> Curve:
    """A bilinear map of two curves, of so many terms: the product of the polynomials, cut off."""
    parts, tail = cut_product(x.parts, y.parts, interval.order, times)
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


# Rules of primitives on curves -----------------------------------------------------------------------------------------


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


def polygammas_about(first: int, x: Any, far: Any, order: int) -> tuple[list[Any], list[Any], Any]:
    """``f_k`` of ``f = ψ⁽ⁿ⁾``, n = first, or ``log Γ`` for n = −1, at x; their errors; a bound of the next on the range."""
    least = x - far
    inside = least > 0
    low = jnp.where(inside, least, 1.0)
    orders = range(max(first, 0), first + order + 1)
    found = polygammas(jnp.where(inside, x, 1.0), orders)
    if first < 0:
        logs = lax.lgamma(x)
        found = [(logs, unit(x) * (POLYGAMMA_NOISE * jnp.abs(logs) + POLYGAMMA_ABSOLUTE) + TINY), *found]
    values = [value / math.factorial(k) for k, (value, _) in enumerate(found)]
    errors = [error * POLYGAMMA_ROOM / math.factorial(k) for k, (_, error) in enumerate(found)]
    # The size of ``ψ⁽ᵐ⁾`` falls for m ≥ 1.
    (top, left), *_ = polygammas(low, range(first + order + 1, first + order + 2))
    beyond = (jnp.abs(top) + left) * POLYGAMMA_ROOM / math.factorial(order + 1)
    return values, errors, jnp.where(inside, beyond, jnp.inf)


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
    return lambda x, far, order: Known(*polygammas_about(n, x, far, order))


def _log_ndtr(x, far, order: int) -> Known:
    """``log Φ``, the next derivative by its largest value anywhere; of other orders from ranges."""
    if order != 3:
        return by_ranges(TAYLOR["log_ndtr"])(x, far, order)
    values, errors = [], []
    for k, (value, left) in enumerate(special_functions.log_ndtr_derivatives_at(x)):
        values.append(value / math.factorial(k))
        errors.append((left * ROOM + unit(x) * (NOISE * jnp.abs(value) + 4.0)) / math.factorial(k) + TINY)
    return Known(values, errors, jnp.full_like(x, special_functions.MOST_FOURTH / math.factorial(4)))


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


# An index into so few entries is a product with a matrix of zeros and ones, which is faster than to fetch them; a sum of
# more is a product with ones.
FEW = 32


def _is_few(params: dict[str, Any], x: Form, index: Form) -> bool:
    """Whether it fetches single entries of a short vector."""
    numbers = params["dimension_numbers"]
    plain = numbers.collapsed_slice_dims == (0,) and numbers.start_index_map == (0,) and not numbers.offset_dims
    plain = plain and params["slice_sizes"] == (1,) and params["mode"] in FETCHED
    return isinstance(x, Curve) and len(x.shape) == 1 and x.shape[0] <= FEW and plain and is_point(index)


MODES = lax.GatherScatterMode
FETCHED = (MODES.CLIP, MODES.PROMISE_IN_BOUNDS, MODES.FILL_OR_DROP)


def _gather(interval: TimeInterval, params, x: Form, index: Form) -> Form:
    """Single entries of a short vector; for places out of range the nearest, or the fill value (NaN by default)."""
    if not _is_few(params, x, index):
        return NotImplemented
    place, count = index[..., 0], x.shape[0]
    gone, filled = (place < 0) | (place >= count), params["mode"] == MODES.FILL_OR_DROP
    place = place if filled else jnp.clip(place, 0, count - 1)
    ones = jnp.asarray(place[..., None] == np.arange(count), x.dtype)
    found = Curve(tuple(None if part is None else ones @ part for part in x.parts), ones @ x.error)
    fill = np.nan if params["fill_value"] is None else float(params["fill_value"])
    if not filled or fill == 0:
        return found
    error = jnp.where(wide(gone), 0.0 if np.isfinite(fill) else np.nan, found.error)
    return Curve(interval.filled(found, gone, fill).parts, error)


def _pad(interval: TimeInterval, params, x: Form, value: Form) -> Form:
    """Zeros around a vector, which is kept in pieces."""
    if not isinstance(x, Curve) or not is_zero(value) or len(x.shape) != 1:
        return NotImplemented
    before, after, between = map(int, params["padding_config"][0])
    if before < 0 or after < 0 or between != 0:
        return NotImplemented
    return PlacedPieces(((before, x),), before + x.shape[0] + after)


def _scatter_add(interval: TimeInterval, params, operand: Form, index: Form, updates: Form) -> Curve:
    """Entries added where constant indices say."""
    if not is_point(index):
        raise NotImplementedError("scatter-add at a place that depends on the parameters")
    old, new, numbers = lifted(operand), lifted(updates), params["dimension_numbers"]
    plain = numbers.inserted_window_dims == (0,) and not numbers.update_window_dims and len(new.shape) == 1
    plain &= params["mode"] in (MODES.FILL_OR_DROP, MODES.CLIP)
    if plain and len(old.shape) == 1 and old.shape[0] <= FEW:
        place = index[..., 0]
        place = jnp.clip(place, 0, old.shape[0] - 1) if params["mode"] == MODES.CLIP else place
        ones = jnp.asarray(place == np.arange(old.shape[0])[:, None], new.dtype)
        added = _mapped(new, lambda part: ones @ part, lambda part: ones @ part, new.shape[0])
        return added if is_zero(operand) else _add(interval, params, old, added)

    def one(part, more):
        return primitives.scatter_add_p.bind(part, index, more, **params)

    terms = int(np.prod(new.shape, initial=1)) + 1
    joined, size = fields(one, old, new), fields(one, Curve((), old.size), Curve((), new.size)).error
    return Curve(joined.parts, joined.error + (unit(size) + terms * float(jnp.finfo(size.dtype).eps)) * size + TINY)


def _scatter(interval: TimeInterval, params, operand: Form, index: Form, updates: Form) -> Curve:
    if not is_point(index):
        raise NotImplementedError("scatter at a place that depends on the parameters")
    return fields(lambda part, new: primitives.scatter_p.bind(part, index, new, **params), operand, updates)


def _add(interval: TimeInterval, params, x: Form, y: Form) -> Form:
    if isinstance(x, PlacedPieces) and isinstance(y, PlacedPieces):
        return x.plus(interval, y)
    x, y = whole(x), whole(y)
    shape = np.broadcast_shapes(shape_of(x), shape_of(y))
    for one, other in ((x, y), (y, x)):
        if is_zero(other) and one.shape == shape:
            return one
    x, y = shaped(lifted(x), shape), shaped(lifted(y), shape)
    length = max(len(x.parts), len(y.parts))
    parts = tuple(plus(*(w.parts[k] if k < len(w.parts) else None for w in (x, y))) for k in range(length))
    return Curve(parts, x.error + y.error + unit(x.error) * total(parts, x.error))


def _neg(interval: TimeInterval, params, x: Form) -> Form:
    return -x if is_point(x) else Curve(tuple(None if part is None else -part for part in x.parts), x.error)


def _scaled(x: Curve, factor: Any) -> Curve:
    x, factor = shaped(x, np.broadcast_shapes(x.shape, jnp.shape(factor))), wide(factor)
    parts = tuple(None if part is None else part * factor for part in x.parts)
    return Curve(parts, jnp.abs(factor) * (x.error + unit(x.error) * x.size) + TINY)


def _mul(interval: TimeInterval, params, x: Form, y: Form) -> Form:
    for one, other in ((x, y), (y, x)):
        if is_zero(other):
            return np.zeros(np.broadcast_shapes(one.shape, np.shape(other)), one.dtype)
    if is_point(x):
        return _scaled(y, x)
    if is_point(y):
        return _scaled(x, y)
    shape = np.broadcast_shapes(x.shape, y.shape)
    return multiplied(interval, shaped(x, shape), shaped(y, shape))


def _div(interval: TimeInterval, params, x: Form, y: Form) -> Form:
    return _scaled(x, 1 / y) if is_point(y) else _mul(interval, params, x, composed(interval, reciprocal, y))


def _square(interval: TimeInterval, params, x: Curve) -> Curve:
    return multiplied(interval, x, x)


def _integer_pow(interval: TimeInterval, params, x: Curve) -> Curve:
    n = params["y"]
    if n == -1:
        return composed(interval, reciprocal, x)
    if 0 < n <= 4:
        root = _square(interval, {}, x) if n > 1 else x
        return root if n < 3 else multiplied(interval, root, x if n == 3 else root)
    return composed(interval, by_ranges(taylor_of_integer_power(n)), x)


def _pow(interval: TimeInterval, params, x: Form, y: Form) -> Form:
    if not is_point(y):
        logs = jnp.log(x) if is_point(x) else composed(interval, log, x)
        return composed(interval, exp, _mul(interval, params, y, logs))
    if is_static(y) and np.ndim(y) == 0 and y in (2.0, 3.0):
        return _integer_pow(interval, {"y": int(y)}, x)
    return composed(
        interval,
        by_ranges(taylor_of_real_power(y if np.ndim(y) == 0 else wide(y))),
        shaped(x, np.broadcast_shapes(x.shape, jnp.shape(y))),
    )


def _polygamma(interval: TimeInterval, params, n: Form, x: Form) -> Form:
    if not is_static(n) or np.ndim(n):
        raise NotImplementedError("polygamma needs an order that is a constant of the program")
    return composed(interval, polygamma(int(n)), x)


def _convert(interval: TimeInterval, params, x: Form) -> Form:
    if isinstance(x, (Truth, Assumed)) and jnp.issubdtype(params["new_dtype"], jnp.floating):
        return steady(Cell.rules["convert_element_type"](interval, params, *interval.truths(x)))
    if not isinstance(x, Curve) or params["new_dtype"] != x.dtype:
        raise NotImplementedError("a value as another type of number")
    return x


# Linear maps ----------------------------------------------------------------------------------------------------------


def _mapped(x: Curve, along: Callable, absolute: Callable, terms: int) -> Curve:
    """A linear map with constant coefficients, of all intervals; ``absolute`` is the map of their absolute values."""
    share = unit(x.error) + (terms + 2) * float(jnp.finfo(x.dtype).eps)
    parts = tuple(None if part is None else along(part) for part in x.parts)
    return Curve(parts, absolute(x.error + share * x.size) + TINY)


def _each(function: Callable) -> Callable:
    return jax.vmap(function, in_axes=-1, out_axes=-1)


def _dot(interval: TimeInterval, params, x: Form, y: Form) -> Curve:
    cell_rules.refuse_fewer_bits(params, x, y)
    dimensions = params["dimension_numbers"]
    dot = functools.partial(lax.dot_general, preferred_element_type=params["preferred_element_type"])
    (axes, others), (batch, other_batch) = dimensions
    terms = int(np.prod([x.shape[i] for i in axes], initial=1))
    if is_point(x):
        first = functools.partial(dot, dimension_numbers=dimensions)
        return _mapped(y, lambda part: first(x, part), lambda part: first(jnp.abs(x), part), terms)
    if is_point(y):
        # The constant first, so that intervals stay last; then its own axes after those of the curve.
        swapped = functools.partial(dot, dimension_numbers=((others, axes), (other_batch, batch)))
        own = len(y.shape) - len(others) - len(other_batch)
        order = [*range(len(batch)), *range(len(batch) + own, len(x.shape) - len(axes) + own)]
        order += [*range(len(batch), len(batch) + own), len(x.shape) - len(axes) + own]

        def turned(constant):
            return lambda part: jnp.transpose(swapped(constant, part), order)

        return _mapped(x, turned(y), turned(jnp.abs(y)), terms)
    both = functools.partial(dot, dimension_numbers=dimensions)
    return multiplied(interval, x, y, _each(both), terms + 2)


def _reduce_sum(interval: TimeInterval, params, x: Curve) -> Curve:
    axes, terms = params["axes"], int(np.prod([x.shape[i] for i in params["axes"]], initial=1))

    def summed(part):
        if terms <= FEW:
            return jnp.sum(part, axes)
        # A product with ones: the compiler does not fuse its argument into it, which would be slow.
        return jnp.tensordot(jnp.ones([x.shape[i] for i in axes], x.dtype), part, (tuple(range(len(axes))), axes))

    return _mapped(x, summed, summed, terms)


def _cumsum(interval: TimeInterval, params, x: Curve) -> Curve:
    summed = functools.partial(lax.cumsum, axis=params["axis"], reverse=params["reverse"])
    return _mapped(x, summed, summed, x.shape[params["axis"]])


def _solve(interval: TimeInterval, params, a: Form, b: Form) -> Curve:
    """``A⁻¹ b`` for a constant triangular matrix."""
    solve, absolute, loss = cell_rules.substitution(params, a)
    found = _mapped(b, _each(solve), _each(absolute), a.shape[-1])
    return Curve(found.parts, found.error + _each(loss)(found.size))


# Kinks ----------------------------------------------------------------------------------------------------------------


def _extreme(name: str) -> Callable[..., Form]:
    """The range alone."""
    reduce = jnp.max if name == "max" else jnp.min

    def found(interval: TimeInterval, params, x: Curve) -> Curve:
        return steady(Interval(*(reduce(end, params["axes"]) for end in (x.range.lo, x.range.hi))))

    return found


def _sign(interval: TimeInterval, params, x: Curve) -> Form:
    return steady(Interval(jnp.sign(x.range.lo), jnp.sign(x.range.hi)))


def _composed(name: str) -> Rule:
    return lambda interval, params, x: composed(interval, LOCAL[name], x)


TimeInterval.rules.update({name: _composed(name) for name in LOCAL})
TimeInterval.rules.update({
    "add": _add, "add_any": _add, "neg": _neg, "mul": _mul, "div": _div, "pow": _pow, "square": _square,
    "integer_pow": _integer_pow, "polygamma": _polygamma, "convert_element_type": _convert,
    "dot_general": _dot, "reduce_sum": _reduce_sum, "cumsum": _cumsum, "triangular_solve": _solve,
    "gather": _gather, "pad": _pad, "scatter-add": _scatter_add, "scatter_add": _scatter_add, "scatter": _scatter,
    "sign": _sign, "reduce_max": _extreme("max"), "reduce_min": _extreme("min"),
    "reduce_and": cell_rules.reduce_and, "reduce_or": cell_rules.reduce_or,
})  # fmt: skip
