"""Rules of primitives on curves."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives

from fedpdmc.enclosures.cell_values import TINY, Cell, Interval, unit
from fedpdmc.enclosures.domain import Assumed, Form, Rule, Truth, is_point, is_static, is_zero, shape_of
from fedpdmc.enclosures.series import linear
from fedpdmc.enclosures.taylor_coefficients import integer_power, real_power
from fedpdmc.enclosures.taylor_models.compositions import LOCAL, by_ranges, composed, exp, log, polygamma, reciprocal
from fedpdmc.enclosures.taylor_models.taylor_model import (
    Curve,
    Placed,
    TimeInterval,
    fields,
    lifted,
    multiplied,
    plus,
    shaped,
    steady,
    total,
    whole,
    wide,
)

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
    return Placed(((before, x),), before + x.shape[0] + after)


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
    """Entries replaced where constant indices say."""
    if not is_point(index):
        raise NotImplementedError("scatter at a place that depends on the parameters")
    return fields(lambda part, new: primitives.scatter_p.bind(part, index, new, **params), operand, updates)


def _add(interval: TimeInterval, params, x: Form, y: Form) -> Form:
    if isinstance(x, Placed) and isinstance(y, Placed):
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
    return composed(interval, by_ranges(integer_power(n)), x)


def _pow(interval: TimeInterval, params, x: Form, y: Form) -> Form:
    if not is_point(y):
        logs = jnp.log(x) if is_point(x) else composed(interval, log, x)
        return composed(interval, exp, _mul(interval, params, y, logs))
    if is_static(y) and np.ndim(y) == 0 and y in (2.0, 3.0):
        return _integer_pow(interval, {"y": int(y)}, x)
    return composed(
        interval,
        by_ranges(real_power(y if np.ndim(y) == 0 else wide(y))),
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
    """A function of one interval on all of them."""
    return jax.vmap(function, in_axes=-1, out_axes=-1)


def _dot(interval: TimeInterval, params, x: Form, y: Form) -> Curve:
    linear.refuse_fewer_bits(params, x, y)
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
    solve, absolute, loss = linear.substitution(params, a)
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
    "reduce_and": linear.reduce_and, "reduce_or": linear.reduce_or,
})  # fmt: skip
