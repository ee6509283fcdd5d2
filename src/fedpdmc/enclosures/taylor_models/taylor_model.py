"""Curves: values along an interval of path as polynomials of time with a proved error (Taylor models).

Time on an interval is rescaled to ``τ ∈ [−1, 1]``. Sums and products of curves are those of polynomials truncated at the
order n. The truncated terms are added to the error, and so is the remainder of a smooth function beyond its n-th derivative:
with ``δ = w − c_0`` and ``D ≥ |δ|``, ``f(w) ∈ Σ_{k≤n} f_k(c_0) δ^k ± sup |f_{n+1}| D^{n+1}`` with ``f_k = f^{(k)}/k!``. The
error shrinks with the (n+1)-th power of the interval's length; that of a `Series` shrinks with the square. Rounding is
treated as in `fedpdmc.enclosures.cell_values`.

The last axis of every array is a batch of intervals, so that processors work on vectors whatever the shape of a value is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from fedpdmc._jax.compilation import computed_first
from fedpdmc.enclosures.cell_values import TINY, Interval, hull, unit
from fedpdmc.enclosures.domain import Assumed, Domain, Enclosure, Form, Rule, Truth, shape_of

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


class Placed(Enclosure):
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

    def plus(self, interval: TimeInterval, other: Placed) -> Form:
        """Piece by piece, unless pieces overlap in part."""
        own = {(start, piece.shape[0]): piece for start, piece in self.pieces}
        for start, piece in other.pieces:
            key = (start, piece.shape[0])
            own[key] = interval.rule("add", {}, own[key], piece) if key in own else piece
        ends = sorted((start, start + size) for start, size in own)
        if any(end > start for (_, end), (start, _) in itertools.pairwise(ends)):
            return interval.rule("add", {}, self.whole(), other.whole())
        return Placed(tuple((start, own[start, end - start]) for start, end in ends), self.length)

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
    return x.whole() if isinstance(x, Placed) else x


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
