"""What a value of a program is known to be on a cell: a point, an interval, or a series in time with a remainder.

Rounding. A rule that makes a value of size at most ``m`` from others adds ``UNIT m`` to its error, 64 units in the last
place. This is more than the error of the operation and of the coefficients computed here; sums of n terms add n units. So an
enclosure contains the value in real arithmetic and that of the compiled program, whatever the order of its additions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from fedpdmc.enclosures.domain import Assumed, Domain, Enclosure, Form, Rule, Truth, is_point

# The smallest number that is not rounded to zero.
TINY = 1e-290


def unit(x: Any) -> float:
    """The relative rounding of one operation: 64 units in the last place of the type of ``x``."""
    dtype = jnp.result_type(x)
    return 32 * float(jnp.finfo(dtype).eps) if jnp.issubdtype(dtype, jnp.floating) else 0.0


class Interval(Enclosure):
    """All numbers from ``lo`` to ``hi``, entry by entry."""

    lo: Any
    hi: Any

    @property
    def shape(self):
        """Shape of the value."""
        return jnp.shape(self.lo)

    @property
    def dtype(self):
        """Type of the value."""
        return jnp.result_type(self.lo)

    @property
    def magnitude(self) -> Array:
        """The largest absolute value."""
        return jnp.maximum(jnp.abs(self.lo), jnp.abs(self.hi))

    def widened(self, size: Any = None) -> Interval:
        """The interval with room for the rounding of a value of this size (its own if None)."""
        room = unit(self.lo) * (self.magnitude if size is None else size) + TINY
        return Interval(self.lo - room, self.hi + room)


class Cell(Domain):
    """Times ``s`` in ``[0, length]`` with the two functions in which a path is exact: forms are intervals and series.

    On a line ``σ(s) = s`` and ``κ = 0``; on a rotation ``σ = sin s`` and ``κ = 1 − cos s``.
    """

    rules: ClassVar[dict[str, Rule]] = {}
    title: ClassVar[str] = "in cells"

    length: Any
    rotating: bool = eqx.field(static=True, default=False)

    @property
    def least_sine(self) -> Any:
        """Least ``σ(s)/s``."""
        return jnp.sinc(self.length / jnp.pi) if self.rotating else 1.0

    @property
    def least_turn(self) -> Any:
        """Least ``κ(s)/s²``; the largest is one half."""
        return 0.5 * jnp.sinc(self.length / (2 * jnp.pi)) ** 2

    def fields(self, function: Callable, *forms: Form) -> Form:
        """Apply to every part of intervals or series, and to points."""
        return fields(function, *forms)

    def spans(self, *forms: Form) -> list[Interval]:
        """Ranges over the cell."""
        if any(isinstance(form, (Truth, Assumed)) for form in forms):
            raise NotImplementedError("a comparison as a number")
        return [span(self, form) for form in forms]

    def truths(self, *forms: Form) -> list[Truth]:
        """Truths with the shape of the value."""
        return [truth(self, form) for form in forms]

    def choose(self, which: Truth, no: Form, yes: Form, either: Interval | None = None) -> Form:
        """Where undecided, an interval or a series that is constant in time."""
        either = hull(span(self, no), span(self, yes)) if either is None else either
        shape = np.broadcast_shapes(jnp.shape(which.value), jnp.shape(either.lo))
        if not isinstance(no, Series) and not isinstance(yes, Series):
            one, other = span(self, no), span(self, yes)
            lo, hi = jnp.where(which.value, other.lo, one.lo), jnp.where(which.value, other.hi, one.hi)
            return Interval(jnp.where(which.known, lo, either.lo), jnp.where(which.known, hi, either.hi))
        unknown = centred(Interval(jnp.broadcast_to(either.lo, shape), jnp.broadcast_to(either.hi, shape)))

        def pick(n, y, u):
            return jnp.where(which.known, jnp.where(which.value, y, n), u)

        return fields(pick, no, yes, unknown)

    def poisoned(self, x: Form, witness: Form) -> Form:
        """The error becomes NaN where the witness is not finite."""
        if x is witness:
            return x
        room = 0.0 * size(self, witness)
        if isinstance(x, Interval) or (is_point(x) and isinstance(witness, Interval)):
            where = span(self, x)
            return Interval(where.lo - room, where.hi + room)
        w = lifted(x)
        return Series(w.value, w.error + room, w.slope, w.turn, w.low, w.high)

    def filled(self, x: Form, where: Any, fill: float) -> Form:
        """Only the value is replaced: the other parts are zero there already."""

        def put(part):
            return jnp.where(where, jnp.asarray(fill, part.dtype), part)

        if isinstance(x, Interval):
            return Interval(put(x.lo), put(x.hi))
        return Series(put(x.value), x.error, x.slope, x.turn, x.low, x.high)

    def full(self, x: Form, like: Form) -> Series:
        """A series with every part an array."""
        if isinstance(x, (Truth, Assumed)):
            raise NotImplementedError("a comparison that a loop carries")
        series = lifted(x)
        zero = jnp.zeros(series.shape, series.dtype)
        return Series(*(zero if part is None else jnp.broadcast_to(part, series.shape) for part in (
            series.value, series.error, series.slope, series.turn, series.low, series.high
        )))  # fmt: skip

    def still(self, function: Callable, x: Form) -> list[Series]:
        """The middle is the value at the start."""
        return [Series(value, error) for value, error in function(lifted(x).value)]

    def wider(self, function: Callable, x: Form) -> Series:
        """The series with a larger error."""
        w = lifted(x)
        return Series(w.value, w.error + function(size(self, w)), w.slope, w.turn, w.low, w.high)

    def stopped(self, x: Form, among: Form | None, axes: tuple[int, ...]) -> tuple[Form, Form] | None:
        """The smooth part of a maximum is the mean with the softmax weights at the start.

        With this mean the terms of ``Σ exp(x − M)`` vary least, and their sum is constant to first order.
        """
        if not isinstance(x, (Interval, Series)):
            return None
        if not isinstance(among, Series):
            return np.zeros(x.shape, x.dtype), x
        weights = jax.nn.softmax(among.value, axes)
        mean = self.rule("reduce_sum", {"axes": axes}, self.rule("mul", {}, among, weights))
        smooth = fields(lambda part: jnp.reshape(part, x.shape), mean)
        return smooth, self.rule("sub", {}, x, smooth)


class Series(Enclosure):
    """``w(s) ∈ value ± error + slope σ(s) + turn κ(s) + [low, high] s²`` for all s of a cell.

    Linear operations keep the first four exact, so that a path contracted with data stays a path. None stands for zero.
    """

    value: Any
    error: Any
    slope: Any = None
    turn: Any = None
    low: Any = None
    high: Any = None

    @property
    def shape(self):
        """Shape of the value."""
        return jnp.shape(self.value)

    @property
    def dtype(self):
        """Type of the value."""
        return jnp.result_type(self.value)


def centred(x: Interval) -> Series:
    """An interval as a series that does not move."""
    middle = 0.5 * (x.lo + x.hi)
    room = unit(x.lo) * x.magnitude
    return Series(middle, jnp.maximum(x.hi - middle, middle - x.lo) + room)


def lifted(x: Form) -> Series:
    """A form as a series."""
    if isinstance(x, Series):
        return x
    if isinstance(x, Interval):
        return centred(x)
    return Series(jnp.asarray(x), jnp.zeros(jnp.shape(x), jnp.result_type(x)))


def _least(x):
    return jnp.minimum(x, 0.0)


def _most(x):
    return jnp.maximum(x, 0.0)


def drift(cell: Cell, w: Series) -> Interval:
    """The range of ``(w(s) − value)/s`` over the cell, the error apart."""
    lo = hi = jnp.zeros(w.shape, w.dtype)
    if w.slope is not None:
        lo = hi = w.slope
        if cell.rotating:
            lo, hi = jnp.minimum(lo, cell.least_sine * lo), jnp.maximum(hi, cell.least_sine * hi)
    if w.turn is not None:
        lo, hi = lo + _least(0.5 * cell.length * w.turn), hi + _most(0.5 * cell.length * w.turn)
    if w.low is not None:
        lo, hi = lo + _least(cell.length * w.low), hi + _most(cell.length * w.high)
    return Interval(lo, hi)


def span(cell: Cell, w: Form) -> Interval:
    """The range of a value over the cell. One that neither moves nor has an error is a number of the data."""
    if isinstance(w, Interval):
        return w
    if is_point(w):
        return Interval(w, w)
    move = drift(cell, w)
    moves = cell.length * move.magnitude
    room = w.error + jnp.where((w.error == 0) & (moves == 0), 0.0, unit(w.value) * (jnp.abs(w.value) + moves))
    return Interval(
        w.value - room + _least(cell.length * move.lo),
        w.value + room + _most(cell.length * move.hi),
    )


def size(cell: Cell, w: Form) -> Array:
    """A bound of ``|w(s)|`` and of every term it is made of."""
    if is_point(w):
        return jnp.abs(jnp.asarray(w))
    if isinstance(w, Interval):
        return w.magnitude
    return jnp.abs(w.value) + w.error + cell.length * drift(cell, w).magnitude


def bent(cell: Cell, w: Series) -> Interval | None:
    """The coefficient of ``s²`` including the turn: ``κ(s)/s²`` is between its minimum and one half."""
    low, high = w.low, w.high
    if w.turn is None:
        return None if low is None else Interval(low, high)
    least, most = cell.least_turn * w.turn, 0.5 * w.turn
    lo, hi = jnp.minimum(least, most), jnp.maximum(least, most)
    return Interval(lo, hi) if low is None else Interval(lo + low, hi + high)


def plus(*terms: Any) -> Any:
    """The sum of those that are not None."""
    there = [term for term in terms if term is not None]
    return None if not there else sum(there[1:], there[0])


def times(x: Any, factor: Any) -> Any:
    """``x factor``, or None."""
    return None if x is None else x * factor


def by_point(x: Interval | None, factor: Any) -> Interval | None:
    """An interval times a number."""
    if x is None:
        return None
    one, other = x.lo * factor, x.hi * factor
    return Interval(jnp.minimum(one, other), jnp.maximum(one, other))


def product(x: Interval, y: Interval) -> Interval:
    """The range of a product of two independent numbers."""
    if x.lo is x.hi:
        return by_point(y, x.lo)  # type: ignore[return-value]
    if y.lo is y.hi:
        return by_point(x, y.lo)  # type: ignore[return-value]
    ends = [x.lo * y.lo, x.lo * y.hi, x.hi * y.lo, x.hi * y.hi]
    return Interval(
        jnp.minimum(jnp.minimum(ends[0], ends[1]), jnp.minimum(ends[2], ends[3])),
        jnp.maximum(jnp.maximum(ends[0], ends[1]), jnp.maximum(ends[2], ends[3])),
    )


def squared(x: Interval) -> Interval:
    """The range of a square."""
    if x.lo is x.hi:
        square = x.lo * x.lo
        return Interval(square, square)
    least = jnp.maximum(_most(x.lo), _most(-x.hi))
    most = x.magnitude
    return Interval(least * least, most * most)


def hull(*spans: Interval) -> Interval:
    """The smallest interval around all of them."""
    lo, hi = spans[0].lo, spans[0].hi
    for other in spans[1:]:
        lo, hi = jnp.minimum(lo, other.lo), jnp.maximum(hi, other.hi)
    return Interval(lo, hi)


def truth(cell: Cell, x: Form) -> Truth:
    """A point, an assumption or a truth as a truth."""
    if isinstance(x, Assumed):
        where = span(cell, x.witness)
        return Truth(jnp.full(x.shape, x.value), jnp.isfinite(where.lo) & jnp.isfinite(where.hi))
    return x if isinstance(x, Truth) else Truth(jnp.asarray(x), jnp.ones(jnp.shape(x), bool))


def fields(function, *forms: Form) -> Form:
    """A structural operation (it moves entries and may set them to zero) on every part of forms of one kind."""
    if all(is_point(form) for form in forms):
        return function(*forms)
    if all(isinstance(form, Interval) or is_point(form) for form in forms):
        spans = [form if isinstance(form, Interval) else Interval(form, form) for form in forms]
        return Interval(function(*(x.lo for x in spans)), function(*(x.hi for x in spans)))
    if any(isinstance(form, Truth) for form in forms):
        truths = [form if isinstance(form, Truth) else Truth(form, jnp.ones(jnp.shape(form), bool)) for form in forms]
        return Truth(function(*(x.value for x in truths)), function(*(x.known for x in truths)))
    series = [lifted(form) for form in forms]

    def each(name):
        parts = [getattr(x, name) for x in series]
        if all(part is None for part in parts):
            return None
        zeros = [jnp.zeros(x.shape, x.dtype) for x in series]
        return function(*(zero if part is None else part for part, zero in zip(parts, zeros, strict=True)))

    return Series(*(each(name) for name in ("value", "error", "slope", "turn", "low", "high")))
