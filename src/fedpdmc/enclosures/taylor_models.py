"""Curves: values along an interval of path as polynomials of time with a proved error (Taylor models).

Time on an interval is rescaled to ``τ ∈ [−1, 1]``. Sums and products of curves are those of polynomials truncated at the
order n. The truncated terms are added to the error, and so is the remainder of a smooth function beyond its n-th derivative:
with ``δ = w − c_0`` and ``D ≥ |δ|``, ``f(w) ∈ Σ_{k≤n} f_k(c_0) δ^k ± sup |f_{n+1}| D^{n+1}`` with ``f_k = f^{(k)}/k!``. The
error shrinks with the (n+1)-th power of the interval's length. A primitive that has a rule for intervals alone is a constant
with an error. Rounding is treated as in `fedpdmc.enclosures.domain`.

The last axis of every array is a batch of intervals, so that processors work on vectors whatever the shape of a value is.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives
from jaxtyping import Array

from fedpdmc.enclosures.domain import (
    SHARED,
    TINY,
    Assumed,
    Domain,
    Enclosure,
    Form,
    Interval,
    Rule,
    Truth,
    is_point,
    is_static,
    is_zero,
    shape_of,
    unit,
)
from fedpdmc.enclosures.intervals import Box, numbers_of, refuse_fewer_bits, substitution, terms_of
from fedpdmc.enclosures.special_functions import FUNCTIONS, ROOM, Function, Local, integer_power, real_power


class TimeInterval(Domain):
    """A piece of path, read in ``[−1, 1]``, and the order of its polynomials: forms are curves."""

    rules: ClassVar[dict[str, Rule]] = {}
    title: ClassVar[str] = "on curves"

    order: int = eqx.field(static=True)

    def rule(self, name: str, params: dict[str, Any], *forms: Form) -> Any:
        """By the rule for curves, or else by that for intervals."""
        if name in self.rules or name in SHARED or name not in Box.rules:
            return super().rule(name, params, *forms)
        return self._by_intervals(Box.rules[name], params, forms)

    @classmethod
    def knows(cls, name: str) -> bool:
        """Whether there is a rule for a primitive, on curves or on intervals."""
        return super().knows(name) or name in Box.rules

    def _by_intervals(self, rule: Rule, params: dict[str, Any], forms: tuple[Form, ...]) -> Any:
        """The rule for intervals, on each interval of path."""
        varying = [not is_point(form) for form in forms]
        ranges = [
            self.truths(form)[0] if isinstance(form, (Truth, Assumed)) else lifted(form).range
            for form in itertools.compress(forms, varying)
        ]
        count = max(leaf.shape[-1] for leaf in jax.tree.leaves(ranges))

        def one(ranges):
            left = iter(ranges)
            return rule(Box(), params, *(next(left) if v else form for v, form in zip(varying, forms, strict=True)))

        wide = jax.tree.map(lambda x: jnp.broadcast_to(x, (*x.shape[:-1], count)), ranges)
        found = jax.vmap(one, in_axes=-1, out_axes=-1)(wide)
        return tuple(map(_steady_form, found)) if isinstance(found, (tuple, list)) else _steady_form(found)

    def fields(self, function: Callable, *forms: Form) -> Form:
        """Apply to every coefficient, interval by interval."""
        if any(isinstance(form, Truth) for form in forms):
            truths, along = self.truths(*forms), jax.vmap(function, in_axes=-1, out_axes=-1)
            count = max(x.value.shape[-1] for x in truths)

            def all_of(part):
                return along(*(jnp.broadcast_to(x, (*x.shape[:-1], count)) for x in part))

            return Truth(all_of([x.value for x in truths]), all_of([x.known for x in truths]))
        return fields(function, *forms)

    def smooth(self, function: Function, x: Form) -> Curve:
        """From its Taylor coefficients."""
        return composed(self, function.local, x)

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
        if either is None:
            one, other = no.range, yes.range
            either = Interval(jnp.minimum(one.lo, other.lo), jnp.maximum(one.hi, other.hi))
        unknown = steady(either)

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
        far = (self.reach + self.error) * room(self.error)
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
    return x if isinstance(x, Curve) else Curve((wide(x),), jnp.zeros_like(wide(x)))


def shaped(x: Curve, shape: tuple[int, ...]) -> Curve:
    """Broadcast to this shape."""
    return x if x.shape == shape else fields(lambda part: jnp.broadcast_to(part, shape), x)


def steady(x: Interval) -> Curve:
    """An interval as a curve that does not move."""
    middle = 0.5 * (x.lo + x.hi)
    return Curve((middle,), (jnp.maximum(x.hi - middle, middle - x.lo) + unit(x.lo) * x.magnitude) * room(middle))


def _steady_form(x: Any) -> Form:
    """What a rule for intervals returns, with the batch of intervals along the last axis."""
    if isinstance(x, Interval):
        return steady(x)
    return x if isinstance(x, Enclosure) else Curve((x,), jnp.zeros_like(x))


def room(x: Any) -> float:
    """The factor that makes room for the rounding of a bound."""
    return max(ROOM, 1 + 8 * float(jnp.finfo(jnp.result_type(x)).eps))


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


def multiplied(interval: TimeInterval, x: Curve, y: Curve, times: Callable = jnp.multiply, terms: int = 0) -> Curve:
    """A bilinear map of two curves, of so many terms: the product of the polynomials, cut off."""
    parts, tail = cut_product(x.parts, y.parts, interval.order, times)
    wide, tall = x.size, y.size
    share = unit(x.error) + terms * float(jnp.finfo(x.dtype).eps)
    error = times(wide, y.error) + times(x.error, tall) + share * times(wide, tall) + TINY
    return Curve(parts, error if tail is None else error + tail * room(error))


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


# Rules of primitives ----------------------------------------------------------------------------------------------------


def composed(interval: TimeInterval, f: Local, w: Curve) -> Curve:
    """A smooth function of a curve, by Horner's rule in the curve minus its middle."""
    more = room(w.error)
    far = (w.reach + w.error) * more
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
        error = error if tail is None else error + tail * more
        g = (known.values[k], *product[1:])
        size = jnp.abs(known.values[k]) + far * size
    error = error + known.beyond * far ** (interval.order + 1)
    return Curve(g, error * more + unit(w.error) * size + TINY)


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


def _add(interval: TimeInterval, params, x: Form, y: Form) -> Form:
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


def _square(interval: TimeInterval, params, x: Curve) -> Curve:
    return multiplied(interval, x, x)


def _integer_pow(interval: TimeInterval, params, x: Curve) -> Curve:
    n = params["y"]
    if n == -1:
        return composed(interval, FUNCTIONS["reciprocal"].local, x)
    if 0 < n <= 4:
        root = _square(interval, {}, x) if n > 1 else x
        return root if n < 3 else multiplied(interval, root, x if n == 3 else root)
    return composed(interval, integer_power(n).local, x)


def _pow(interval: TimeInterval, params, x: Form, y: Form) -> Form:
    if not is_point(y):
        logs = jnp.log(x) if is_point(x) else composed(interval, FUNCTIONS["log"].local, x)
        return composed(interval, FUNCTIONS["exp"].local, _mul(interval, params, y, logs))
    if is_static(y) and np.ndim(y) == 0 and y in (2.0, 3.0):
        return _integer_pow(interval, {"y": int(y)}, x)
    return composed(
        interval,
        real_power(y if np.ndim(y) == 0 else wide(y)).local,
        shaped(x, np.broadcast_shapes(x.shape, jnp.shape(y))),
    )


def _convert(interval: TimeInterval, params, x: Form) -> Form:
    dtype = params["new_dtype"]
    if isinstance(x, (Truth, Assumed)):
        (x,) = interval.truths(x)
        return x if jnp.issubdtype(dtype, jnp.bool_) else steady(numbers_of(x, float))
    if not isinstance(x, Curve) or not jnp.issubdtype(dtype, jnp.floating):
        raise NotImplementedError("a value as another type of number")
    found = jax.tree.map(lambda part: lax.convert_element_type(part, dtype), x)
    if jnp.finfo(dtype).eps <= jnp.finfo(x.dtype).eps:
        return found
    return Curve(found.parts, found.error + unit(dtype) * found.size)


# Linear maps ----------------------------------------------------------------------------------------------------------


def _mapped(x: Curve, along: Callable, absolute: Callable, terms: int) -> Curve:
    """A linear map with constant coefficients, of all intervals; ``absolute`` is the map of their absolute values."""
    share = unit(x.error) + (terms + 2) * float(jnp.finfo(x.dtype).eps)
    parts = tuple(None if part is None else along(part) for part in x.parts)
    return Curve(parts, absolute(x.error + share * x.size) + TINY)


def _each(function: Callable) -> Callable:
    return jax.vmap(function, in_axes=-1, out_axes=-1)


def _dot(interval: TimeInterval, params, x: Form, y: Form) -> Curve:
    refuse_fewer_bits(params, x, y)
    dimensions = params["dimension_numbers"]
    dot = functools.partial(lax.dot_general, preferred_element_type=params["preferred_element_type"])
    (axes, others), (batch, other_batch) = dimensions
    terms = terms_of(shape_of(x), axes)
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
    axes, terms = params["axes"], terms_of(x.shape, params["axes"])

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
    solve, absolute, loss = substitution(params, a)
    found = _mapped(b, _each(solve), _each(absolute), a.shape[-1])
    return Curve(found.parts, found.error + _each(loss)(found.size))


TimeInterval.rules.update({
    "add": _add, "add_any": _add, "neg": _neg, "mul": _mul, "pow": _pow, "square": _square,
    "integer_pow": _integer_pow, "convert_element_type": _convert,
    "dot_general": _dot, "reduce_sum": _reduce_sum, "cumsum": _cumsum, "triangular_solve": _solve,
    "gather": _gather, "scatter-add": _scatter_add, "scatter_add": _scatter_add,
})  # fmt: skip
