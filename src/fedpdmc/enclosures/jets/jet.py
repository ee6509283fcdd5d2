"""Jets on balls: all derivatives of a value up to an order, each enclosed on balls about a point.

A jet holds for every multi-index α of degree at most n an interval of ``c_α(y) = D^α w(y)/α!`` over all ``|y| ≤ r``, for
every radius r of a table. Sums and products of jets are those of polynomials cut off at degree n, with intervals as
coefficients; the first radius is zero, and its intervals hold the point's own values and their rounding.

Ranges are cut by the mean value theorem: ``|c_α(y) − c_α(0)| ≤ r sup |∇c_α|``, with the Euclidean norm of the intervals of
the next degree, so that an affine function of y gets its range on a ball, not on a box.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from fedpdmc.enclosures.cell_values import Interval, fields, unit
from fedpdmc.enclosures.domain import Assumed, Domain, Enclosure, Form, Rule, Truth, is_point, shape_of
from fedpdmc.enclosures.multi_index import Monomials, monomials
from fedpdmc.enclosures.taylor_coefficients import Taylor

# Relative room for the rounding of a norm and of its square.
ROOM = 1 + 1e-12
# Pieces into which the range of one number is cut, and the least half width of their balls.
PIECES, SMALLEST = 8, 1e-2


class Balls(Domain):
    """Balls of these radii about a point, the first zero: forms are jets."""

    rules: ClassVar[dict[str, Rule]] = {}
    title: ClassVar[str] = "on balls"
    eager: ClassVar[bool] = True
    keeps_exponents: ClassVar[bool] = True
    # As a cell: no time passes, no path turns.
    length: ClassVar[float] = 0.0
    rotating: ClassVar[bool] = False

    radii: np.ndarray
    table: Monomials

    @np.errstate(all="ignore")
    def rule(self, name: str, params: dict[str, Any], *forms: Form) -> Any:
        """Apply a rule in NumPy. An interval is a shift without known derivatives: it must cancel."""
        if any(isinstance(form, Interval) for form in forms):
            raise NotImplementedError("stop_gradient of a value that does not cancel")
        return super().rule(name, params, *(np.asarray(form) if is_point(form) else form for form in forms))

    def fields(self, function: Callable, *forms: Form) -> Form:
        """Applied to the numbers of entries, where the number zero means an entry that is zero."""
        if any(isinstance(form, Truth) for form in forms):
            raise NotImplementedError("a comparison that is moved, on balls")
        if any(isinstance(form, Interval) for form in forms):
            return fields(function, *forms)
        jets = [lifted(self, form) for form in forms]
        starts = 1 + np.cumsum([0, *(math.prod(jet.shape) for jet in jets)])
        numbers = [
            jnp.arange(start, end, dtype=float).reshape(jet.shape)
            for start, end, jet in zip(starts[:-1], starts[1:], jets, strict=True)
        ]
        place = np.asarray(function(*numbers))
        if np.any(np.isnan(place)):
            raise NotImplementedError("beyond the end of an array")
        zero = [lifted(self, np.zeros(()))] if np.any(place == 0) else []
        return picked([*zero, *jets], place.astype(int) - 1 + len(zero))

    def spans(self, *forms: Form) -> list[Interval]:
        """Ranges with the radii along the first axis."""
        if any(isinstance(form, (Truth, Assumed)) for form in forms):
            raise NotImplementedError("a comparison as a number")
        axes = max(len(shape_of(form)) for form in forms)
        ranges = [lifted(self, form).range for form in forms]
        return [Interval(*aligned(axes, x.lo, x.hi)) for x in ranges]

    def truths(self, *forms: Form) -> list[Truth]:
        """Truths with the radii along the first axis."""

        def one(x: Form) -> Truth:
            if isinstance(x, Truth):
                return x
            if isinstance(x, Assumed):
                known = np.isfinite(x.witness.range.lo) & np.isfinite(x.witness.range.hi)
                return Truth(np.full(known.shape, x.value), known)
            return Truth(*(np.broadcast_to(part, (len(self.radii), *np.shape(x))) for part in (x, True)))

        found = [one(form) for form in forms]
        axes = max(np.ndim(x.value) for x in found) - 1
        return [Truth(*aligned(axes, x.value, x.known)) for x in found]

    def choose(self, which: Truth, no: Form, yes: Form, either: Interval | None = None) -> Jet:
        """If no case holds on the whole ball, the derivatives need not exist."""
        no, yes = lifted(self, no), lifted(self, yes)
        shape = np.broadcast_shapes(no.shape, yes.shape, np.shape(which.value)[1:])
        no, yes = broadcast(no, shape), broadcast(yes, shape)
        value, known = (np.expand_dims(part, 1) for part in aligned(len(shape), which.value, which.known))
        lo, hi = np.where(value, yes.lo, no.lo), np.where(value, yes.hi, no.hi)
        return Jet(np.where(known, lo, -np.inf), np.where(known, hi, np.inf))

    def poisoned(self, x: Form, witness: Form) -> Jet:
        """The width becomes NaN where the witness is not finite."""
        case, size = lifted(self, x), np.asarray(witness.range.magnitude)
        shape = np.broadcast_shapes(case.shape, size.shape[1:])
        case, (size,) = broadcast(case, shape), aligned(len(shape), size)
        room = 0.0 * np.expand_dims(size, 1)
        return Jet(case.lo - room, case.hi + room)

    def filled(self, x: Form, where: Any, fill: float) -> Jet:
        """Only the value is replaced: the derivatives are zero there already."""
        lo, hi = x.lo.copy(), x.hi.copy()
        lo[:, 0], hi[:, 0] = np.where(where, fill, lo[:, 0]), np.where(where, fill, hi[:, 0])
        return Jet(lo, hi)

    def full(self, x: Form, like: Form) -> Jet:
        """The form as a jet."""
        return lifted(self, x)

    def stopped(self, x: Form, among: Form | None, axes: tuple[int, ...]) -> tuple[Form, Form] | None:
        """The number at the centre; the rest must cancel, because the program does not differentiate it."""
        anything = jnp.full(x.shape, jnp.inf)
        return (_middle(x), Interval(-anything, anything)) if isinstance(x, Jet) else None

    def extreme(self, x: Form) -> tuple[Form, Form] | None:
        """The number at the centre, and the rest."""
        return (_middle(x), self.rule("sub", {}, x, _middle(x))) if isinstance(x, Jet) else None


def _middle(x: Jet) -> np.ndarray:
    return 0.5 * (x.lo[0, 0] + x.hi[0, 0])


def aligned(axes: int, *parts: Any) -> list[np.ndarray]:
    """Parts with one entry for every radius, single numbers included, as arrays with this many additional axes."""
    arrays = [np.asarray(part) for part in parts]
    return [x.reshape(len(x), *(1,) * (axes + 1 - x.ndim), *x.shape[1:]) for x in arrays]


class Jet(Enclosure):
    """Intervals of all derivatives, of shape (R, K, ...), in NumPy: they are computed once and need not be compiled.

    ``origin`` says how the value was made, if a function of it has tighter bounds than the steps to it: ``("exp", e)`` is
    ``Σ exp(e)`` over the last axis of e, ``("raised", e)`` is ``y + exp(e)`` with e from ``("by", y)``, ``("square", r)``
    is ``r²``, ``("one more", r)`` is ``1 + r²``, ``("erf", z)`` is ``erf(z)``, and ``("tail", z)`` is ``c erfc(z)`` with z
    from ``("by", c)``.
    """

    lo: np.ndarray
    hi: np.ndarray
    origin: tuple[str, Jet] | None = None

    def of(self, kind: str) -> Jet | None:
        """What it came from, if in this way."""
        return self.origin[1] if self.origin is not None and self.origin[0] == kind else None

    @property
    def shape(self):
        """Shape of the value."""
        return self.lo.shape[2:]

    @property
    def dtype(self):
        """Type of the value."""
        return self.lo.dtype

    @property
    def magnitude(self) -> np.ndarray:
        """The largest absolute values."""
        return np.maximum(np.abs(self.lo), np.abs(self.hi))

    @property
    def range(self) -> Interval:
        """The intervals of the value itself, of shape (R, ...)."""
        return Interval(self.lo[:, 0], self.hi[:, 0])

    def widened(self, size: np.ndarray) -> Jet:
        """The jet with room for the rounding of values of this size; values that are certainly infinite are unchanged."""
        room = np.where(np.isinf(self.lo) & (self.lo == self.hi), 0.0, unit(self.lo) * size)
        return Jet(self.lo - room, self.hi + room)


def identity(balls: Balls, center: np.ndarray) -> Jet:
    """``y ↦ center + y``."""
    dim = center.shape[0]
    lo = np.zeros((len(balls.radii), len(balls.table.degree), dim))
    lo[:, 0], lo[:, 1 : dim + 1] = center, np.eye(dim)
    hi = lo.copy()
    lo[:, 0] -= balls.radii[:, None]
    hi[:, 0] += balls.radii[:, None]
    return Jet(lo, hi)


def lifted(balls: Balls, x: Form) -> Jet:
    """A form as a jet: a point does not vary."""
    if isinstance(x, Jet):
        return x
    value = np.zeros((len(balls.radii), len(balls.table.degree), *np.shape(x)), np.result_type(np.asarray(x)))
    value[:, 0] = x
    return Jet(value, value)


def contracted(balls: Balls, x: Jet) -> Jet:
    """The same with ranges tightened by the mean value theorem, of first and of second order."""
    r = balls.radii.reshape(-1, *(1,) * (x.lo.ndim - 1))
    for _ in range(2):
        slope = _slopes(balls.table, x.magnitude**2)
        bend = _slopes(balls.table, slope)
        reach = np.minimum(r * np.sqrt(slope), r * np.sqrt(slope[:1]) + 0.5 * r * r * np.sqrt(bend)) * ROOM
        reach = np.where((r > 0) & (reach < np.inf), reach, np.inf)
        x = Jet(np.fmax(x.lo[:1] - reach, x.lo), np.fmin(x.hi[:1] + reach, x.hi))
    return x


def _slopes(table: Monomials, squares: np.ndarray) -> np.ndarray:
    """``Σ_i ((α_i + 1) c_{α+e_i})²`` for every α; infinite where the next degree is not known."""
    known = np.concatenate([squares, np.full_like(squares[:, :1], np.inf)], 1)
    factors = (table.factor**2).T.reshape(table.factor.shape[1], -1, *(1,) * (squares.ndim - 2))
    parts = [known[:, place] * factor for place, factor in zip(table.following.T, factors, strict=True)]
    return np.sum(parts, 0)


def _product(x: Jet, y: Jet) -> Jet:
    """Product of the intervals, entry by entry."""
    if x.lo is x.hi and y.lo is y.hi:
        value = x.lo * y.lo
        return Jet(value, value)
    ends = [x.lo * y.lo, x.lo * y.hi, x.hi * y.lo, x.hi * y.hi]
    return Jet(
        np.minimum(np.minimum(ends[0], ends[1]), np.minimum(ends[2], ends[3])),
        np.maximum(np.maximum(ends[0], ends[1]), np.maximum(ends[2], ends[3])),
    )


def multiplied(balls: Balls, x: Jet, y: Jet, least: int = 0, other: int = 0, times: Callable = _product) -> Jet:
    """The product cut off at the order, of the parts of at least these degrees."""
    one, two, starts, places = balls.table.pairs(least, other)
    found = times(Jet(x.lo[:, one], x.hi[:, one]), Jet(y.lo[:, two], y.hi[:, two]))

    def gathered(part):
        total = np.zeros((part.shape[0], len(balls.table.degree), *part.shape[2:]))
        total[:, places] = np.add.reduceat(part, starts, 1)
        return total

    return Jet(gathered(found.lo), gathered(found.hi)).widened(gathered(found.magnitude))


def composed(balls: Balls, f: Taylor, x: Jet) -> Jet:
    """``f(x) = Σ_k f_k(X) δ^k`` with ``f_k`` the range of ``f^{(k)}/k!`` over that of x, and δ what x moves by."""
    x = contracted(balls, x)
    order = balls.table.order
    coefficients = [Jet(np.asarray(y.lo), np.asarray(y.hi)) for y in f(x.range, order)]
    lo, hi, move = np.zeros_like(x.lo), np.zeros_like(x.hi), Jet(x.lo.copy(), x.hi.copy())
    lo[:, 0], hi[:, 0] = coefficients[0].lo, coefficients[0].hi
    move.lo[:, 0] = move.hi[:, 0] = 0.0
    size, power = np.maximum(np.abs(lo), np.abs(hi)), move
    for k in range(1, order + 1):
        term = _product(Jet(coefficients[k].lo[:, None], coefficients[k].hi[:, None]), power)
        lo, hi, size = lo + term.lo, hi + term.hi, size + term.magnitude
        if k < order:
            power = multiplied(balls, power, move, k, 1)
    return Jet(lo, hi).widened(size)


def refined(function: Callable[[Balls, Jet], Jet]) -> Taylor:
    """The derivatives of a function of one number, from jets on small pieces of its range."""

    def found(x: Interval, order: int) -> list[Interval]:
        lo, hi = np.asarray(x.lo), np.asarray(x.hi)
        own = (hi - lo)[..., None] / (2 * PIECES) * ROOM
        half = np.maximum(own, SMALLEST)
        middle = lo[..., None] + (hi - lo)[..., None] * (2 * np.arange(PIECES) + 1) / (2 * PIECES)
        small = Balls(np.asarray([0.0, 1.0]), monomials(1, order + 3))
        coefficients = np.zeros((2, order + 4, *middle.shape))
        coefficients[:, 0], coefficients[:, 1] = middle, half
        moved = np.zeros_like(coefficients)
        moved[1, 0] = half
        jet = contracted(small, function(small, Jet(coefficients - moved, coefficients + moved)))
        ranges = []
        for k in range(order + 1):
            # The mean value theorem about the middle, where a piece is smaller than its ball.
            reach = own * (k + 1) * jet.magnitude[1, k + 1] / half ** (k + 1)
            least = np.fmax(jet.lo[1, k], jet.lo[0, k] - reach * half**k) / half**k
            most = np.fmin(jet.hi[1, k], jet.hi[0, k] + reach * half**k) / half**k
            ranges.append(Interval(np.min(least, -1), np.max(most, -1)).widened())
        return ranges

    return found


def broadcast(x: Jet, shape: tuple[int, ...]) -> Jet:
    """A jet broadcast to values of this shape."""
    if x.shape == shape:
        return x

    def wide(part: Jet, more: tuple[int, ...]) -> Jet:
        ones = (1,) * (len(shape) - len(x.shape))
        lo, hi = (
            np.broadcast_to(end.reshape(*end.shape[:2], *ones, *part.shape), (*end.shape[:2], *shape, *more))
            for end in (part.lo, part.hi)
        )
        return Jet(lo, hi)

    return with_origin(x, lambda part: wide(part, part.shape[len(x.shape) :]))


def picked(jets: list[Jet], place: np.ndarray) -> Jet:
    """The entries at these places among those of all jets, one after the other."""
    more = len(jets[0].shape)

    def pick(*parts: Jet) -> Jet:
        rest = parts[0].shape[more:]
        lo, hi = (
            np.concatenate([end.reshape(*end.shape[:2], -1, *rest) for end in ends], 2)[:, :, place]
            for ends in ([part.lo for part in parts], [part.hi for part in parts])
        )
        return Jet(lo, hi)

    return with_origin(jets[0], pick) if len(jets) == 1 else pick(*jets)


def with_origin(x: Jet, move: Callable[[Jet], Jet]) -> Jet:
    """Move the entries of a jet, and those of its origin."""
    found = move(x)
    if x.origin is None or x.origin[1].origin is not None:
        return found
    return Jet(found.lo, found.hi, (x.origin[0], move(x.origin[1])))
