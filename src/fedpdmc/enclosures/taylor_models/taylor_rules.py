"""Rules of primitives on curves."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives

from fedpdmc._jax.compilation import apart
from fedpdmc.enclosures.derivative_ranges import integer_power, polygamma, real_power
from fedpdmc.enclosures.intervals import TINY, Assumed, Form, Interval, Truth, hull, is_point, is_static, unit
from fedpdmc.enclosures.registry import RULES
from fedpdmc.enclosures.series import linear
from fedpdmc.enclosures.taylor_models.taylor_model import (
    LOCAL,
    Curve,
    Stretch,
    by_ranges,
    composed,
    exp,
    fields,
    lifted,
    log,
    multiplied,
    plus,
    reciprocal,
    steady,
    total,
    wide,
)

# An index into so few entries is a product with a matrix of zeros and ones, which is faster than to fetch them; a sum of
# more is a product with ones.
FEW = 32


def evaluate(stretch: Stretch, equation: Any, forms: list[Form]) -> list[Form]:
    """One equation on curves; raises ``NotImplementedError`` where there is no rule."""
    name, params = equation.primitive.name, equation.params
    if name in linear.MOVES:
        forms = [form.whole() if isinstance(form, Placed) else form for form in forms]
    if name in linear.MOVES and not (name == "gather" and _is_few(params, forms)):
        return _moved(equation.primitive, params, forms)
    return [rule(stretch, name, params, *forms)]


def rule(stretch: Stretch, name: str, params: dict[str, Any], *forms: Form) -> Form:
    """The result of a primitive with one value."""
    if name not in ("add", "add_any"):
        forms = tuple(form.whole() if isinstance(form, Placed) else form for form in forms)
    if name in SPECIAL:
        return SPECIAL[name](stretch, params, *forms)
    if name in LOCAL:
        return composed(stretch, LOCAL[name], forms[0])
    if name in ("lt", "le", "gt", "ge"):
        return RULES[name](stretch, params, *map(_range, forms))
    if name in ("and", "or", "xor", "not"):
        return RULES[name](stretch, params, *map(_truth, forms))
    raise NotImplementedError(f"no rule for {name!r} on curves")


def _truth(x: Form) -> Truth:
    if isinstance(x, Assumed):
        return Truth(jnp.full(x.witness.size.shape, x.value), jnp.isfinite(x.witness.size))
    return x if isinstance(x, Truth) else Truth(wide(x), jnp.ones_like(wide(x), bool))


def _range(x: Form) -> Interval:
    return x.range if isinstance(x, Curve) else Interval(wide(x), wide(x))


def _moved(primitive: Any, params: dict[str, Any], forms: list[Form]) -> list[Form]:
    """A primitive that moves entries."""
    params, fill = linear.split_fill(primitive.name, params)
    count = linear.MOVES[primitive.name]
    data, rest = (forms, []) if count is None else (forms[:count], forms[count:])
    if not all(isinstance(form, Curve) or is_point(form) for form in data) or not all(map(is_point, rest)):
        raise NotImplementedError("of a comparison, or at a place that depends on the parameters")
    if fill is not None and isinstance(data[0], Curve):
        gone = wide(linear.absent(primitive, params, data[0], rest))
        found = fields(lambda part: primitive.bind(part, *rest, **params), data[0])
        first = jnp.zeros_like(found.error) if not found.parts or found.parts[0] is None else found.parts[0]
        return [Curve((jnp.where(gone, fill, first), *found.parts[1:]), found.error)]
    if primitive.name == "pad" and isinstance(data[0], Curve) and _is_zero(data[1]) and len(data[0].shape) == 1:
        before, after, between = map(int, params["padding_config"][0])
        if before >= 0 and after >= 0 and between == 0:
            return [Placed(((before, data[0]),), before + data[0].shape[0] + after)]
    if not primitive.multiple_results:
        return [fields(lambda *parts: primitive.bind(*parts, *rest, **params), *data)]
    samples = [jax.ShapeDtypeStruct(_shape(form), form.dtype) for form in data]
    count = len(jax.eval_shape(lambda *parts: primitive.bind(*parts, *rest, **params), *samples))
    return [fields(lambda *parts, i=i: primitive.bind(*parts, *rest, **params)[i], *data) for i in range(count)]


def _is_few(params: dict[str, Any], forms: list[Form]) -> bool:
    """Whether it fetches single entries of a short vector."""
    numbers, data = params["dimension_numbers"], forms[0]
    plain = numbers.collapsed_slice_dims == (0,) and numbers.start_index_map == (0,) and not numbers.offset_dims
    plain = plain and params["slice_sizes"] == (1,) and params["mode"] in FETCHED
    return isinstance(data, Curve) and len(data.shape) == 1 and data.shape[0] <= FEW and plain and is_point(forms[1])


MODES = lax.GatherScatterMode
FETCHED = (MODES.CLIP, MODES.PROMISE_IN_BOUNDS, MODES.FILL_OR_DROP)


def _gather(stretch: Stretch, params, x: Curve, index: Any) -> Curve:
    """Single entries of a short vector; for places that are not there the nearest, or what is filled in (NaN by default)."""
    place, count = index[..., 0], x.shape[0]
    gone, filled = (place < 0) | (place >= count), params["mode"] == MODES.FILL_OR_DROP
    place = place if filled else jnp.clip(place, 0, count - 1)
    ones = jnp.asarray(place[..., None] == np.arange(count), x.dtype)
    found = Curve(tuple(None if part is None else ones @ part for part in x.parts), ones @ x.error)
    fill = np.nan if params["fill_value"] is None else float(params["fill_value"])
    if not filled or fill == 0:
        return found
    first = jnp.zeros_like(found.error) if not found.parts or found.parts[0] is None else found.parts[0]
    error = jnp.where(wide(gone), 0.0 if np.isfinite(fill) else np.nan, found.error)
    return Curve((jnp.where(wide(gone), fill, first), *found.parts[1:]), error)


def _scatter_add(stretch: Stretch, params, operand: Form, index: Form, updates: Form) -> Curve:
    """Entries added where constant indices say."""
    if not is_point(index):
        raise NotImplementedError("scatter-add at a place that depends on the parameters")
    old, new, numbers = lifted(operand), lifted(updates), params["dimension_numbers"]
    plain = numbers.inserted_window_dims == (0,) and not numbers.update_window_dims and len(new.shape) == 1
    plain &= params["mode"] == lax.GatherScatterMode.FILL_OR_DROP
    if plain and len(old.shape) == 1 and old.shape[0] <= FEW:
        ones = jnp.asarray(index[..., 0] == np.arange(old.shape[0])[:, None], new.dtype)
        added = _mapped(new, lambda part: ones @ part, lambda part: ones @ part, new.shape[0])
        return added if _is_zero(operand) else _add(stretch, params, old, added)

    def one(part, more):
        return primitives.scatter_add_p.bind(part, index, more, **params)

    terms = int(np.prod(new.shape, initial=1)) + 1
    joined, size = fields(one, old, new), fields(one, Curve((), old.size), Curve((), new.size)).error
    return Curve(joined.parts, joined.error + (unit(size) + terms * float(jnp.finfo(size.dtype).eps)) * size + TINY)


def _scatter(stretch: Stretch, params, operand: Form, index: Form, updates: Form) -> Curve:
    """Entries replaced where constant indices say."""
    if not is_point(index):
        raise NotImplementedError("scatter at a place that depends on the parameters")
    return fields(lambda part, new: primitives.scatter_p.bind(part, index, new, **params), operand, updates)


class Placed(eqx.Module):
    """A vector of zeros but for pieces that start at these places: the gradient of slices, before it is added up."""

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

    def plus(self, stretch: Stretch, other: Placed) -> Form:
        """Piece by piece, where they do not overlap by halves."""
        own = {(start, piece.shape[0]): piece for start, piece in self.pieces}
        for start, piece in other.pieces:
            key = (start, piece.shape[0])
            own[key] = _add(stretch, {}, own[key], piece) if key in own else piece
        ends = sorted((start, start + size) for start, size in own)
        if any(end > start for (_, end), (start, _) in itertools.pairwise(ends)):
            return _add(stretch, {}, self.whole(), other.whole())
        return Placed(tuple((start, own[start, end - start]) for start, end in ends), self.length)

    def whole(self) -> Curve:
        """The vector; its pieces are computed first: in what puts them together the compiler does not make vectors."""
        arrays, structure = jax.tree.flatten([piece for _, piece in self.pieces])
        held = apart(lambda *same: same, *arrays, number=self.pieces[0][1].error.reshape(-1))
        there, row = [], 0
        for (start, _), piece in zip(self.pieces, jax.tree.unflatten(structure, held), strict=True):
            there += [np.zeros(start - row, self.dtype), piece]
            row = start + piece.shape[0]
        there.append(np.zeros(self.length - row, self.dtype))
        return fields(lambda *parts: jnp.concatenate(parts), *there)


def _is_zero(x: Form) -> bool:
    return is_static(x) and not np.any(x)


def _add(stretch: Stretch, params, x: Form, y: Form) -> Form:
    if isinstance(x, Placed) and isinstance(y, Placed):
        return x.plus(stretch, y)
    x, y = (form.whole() if isinstance(form, Placed) else form for form in (x, y))
    shape = np.broadcast_shapes(_shape(x), _shape(y))
    for one, other in ((x, y), (y, x)):
        if _is_zero(other) and one.shape == shape:
            return one
    x, y = _shaped(lifted(x), shape), _shaped(lifted(y), shape)
    length = max(len(x.parts), len(y.parts))
    parts = tuple(plus(*(w.parts[k] if k < len(w.parts) else None for w in (x, y))) for k in range(length))
    return Curve(parts, x.error + y.error + unit(x.error) * total(parts, x.error))


def _shape(x: Form) -> tuple[int, ...]:
    return jnp.shape(x) if is_point(x) else x.shape


def _shaped(x: Curve, shape: tuple[int, ...]) -> Curve:
    return x if x.shape == shape else fields(lambda part: jnp.broadcast_to(part, shape), x)


def _neg(stretch: Stretch, params, x: Form) -> Form:
    return -x if is_point(x) else Curve(tuple(None if part is None else -part for part in x.parts), x.error)


def _sub(stretch: Stretch, params, x: Form, y: Form) -> Form:
    return _add(stretch, params, x, _neg(stretch, params, y))


def _scaled(x: Curve, factor: Any) -> Curve:
    x, factor = _shaped(x, np.broadcast_shapes(x.shape, jnp.shape(factor))), wide(factor)
    parts = tuple(None if part is None else part * factor for part in x.parts)
    return Curve(parts, jnp.abs(factor) * (x.error + unit(x.error) * x.size) + TINY)


def _mul(stretch: Stretch, params, x: Form, y: Form) -> Form:
    for one, other in ((x, y), (y, x)):
        if _is_zero(other):
            return np.zeros(np.broadcast_shapes(one.shape, np.shape(other)), one.dtype)
    if is_point(x):
        return _scaled(y, x)
    if is_point(y):
        return _scaled(x, y)
    shape = np.broadcast_shapes(x.shape, y.shape)
    return multiplied(stretch, _shaped(x, shape), _shaped(y, shape))


def _div(stretch: Stretch, params, x: Form, y: Form) -> Form:
    return _scaled(x, 1 / y) if is_point(y) else _mul(stretch, params, x, composed(stretch, reciprocal, y))


def _square(stretch: Stretch, params, x: Curve) -> Curve:
    return multiplied(stretch, x, x)


def _integer_pow(stretch: Stretch, params, x: Curve) -> Curve:
    n = params["y"]
    if n == -1:
        return composed(stretch, reciprocal, x)
    if 0 < n <= 4:
        root = _square(stretch, {}, x) if n > 1 else x
        return root if n < 3 else multiplied(stretch, root, x if n == 3 else root)
    return composed(stretch, by_ranges(integer_power(n)), x)


def _pow(stretch: Stretch, params, x: Form, y: Form) -> Form:
    if not is_point(y):
        logs = jnp.log(x) if is_point(x) else composed(stretch, log, x)
        return composed(stretch, exp, _mul(stretch, params, y, logs))
    if is_static(y) and np.ndim(y) == 0 and y in (2.0, 3.0):
        return _integer_pow(stretch, {"y": int(y)}, x)
    return composed(
        stretch,
        by_ranges(real_power(y if np.ndim(y) == 0 else wide(y))),
        _shaped(x, np.broadcast_shapes(x.shape, jnp.shape(y))),
    )


def _polygamma(stretch: Stretch, params, n: Form, x: Form) -> Form:
    if not is_static(n) or np.ndim(n):
        raise NotImplementedError("polygamma needs an order that is a constant of the program")
    return composed(stretch, by_ranges(polygamma(int(n))), x)


def _logaddexp(stretch: Stretch, params, x: Form, y: Form) -> Form:
    return _add(stretch, params, composed(stretch, LOCAL["softplus"], _sub(stretch, params, x, y)), y)


def _convert(stretch: Stretch, params, x: Form) -> Form:
    if isinstance(x, (Truth, Assumed)) and jnp.issubdtype(params["new_dtype"], jnp.floating):
        return steady(RULES["convert_element_type"](stretch, params, _truth(x)))
    if not isinstance(x, Curve) or params["new_dtype"] != x.dtype:
        raise NotImplementedError("a value as another type of number")
    return x


# Linear maps ----------------------------------------------------------------------------------------------------------


def _mapped(x: Curve, along: Callable, absolute: Callable, terms: int) -> Curve:
    """A linear map with constant coefficients, of all stretches; ``absolute`` is the map of their absolute values."""
    share = unit(x.error) + (terms + 2) * float(jnp.finfo(x.dtype).eps)
    parts = tuple(None if part is None else along(part) for part in x.parts)
    return Curve(parts, absolute(x.error + share * x.size) + TINY)


def _each(function: Callable) -> Callable:
    """A function of one stretch on all of them."""
    return jax.vmap(function, in_axes=-1, out_axes=-1)


def _dot(stretch: Stretch, params, x: Form, y: Form) -> Curve:
    linear.refuse_fewer_bits(params, x, y)
    dimensions = params["dimension_numbers"]
    dot = functools.partial(lax.dot_general, preferred_element_type=params["preferred_element_type"])
    (axes, others), (batch, other_batch) = dimensions
    terms = int(np.prod([x.shape[i] for i in axes], initial=1))
    if is_point(x):
        first = functools.partial(dot, dimension_numbers=dimensions)
        return _mapped(y, lambda part: first(x, part), lambda part: first(jnp.abs(x), part), terms)
    if is_point(y):
        # The constant first, so that stretches stay last; then its own axes after those of the curve.
        swapped = functools.partial(dot, dimension_numbers=((others, axes), (other_batch, batch)))
        own = len(y.shape) - len(others) - len(other_batch)
        order = [*range(len(batch)), *range(len(batch) + own, len(x.shape) - len(axes) + own)]
        order += [*range(len(batch), len(batch) + own), len(x.shape) - len(axes) + own]

        def turned(constant):
            return lambda part: jnp.transpose(swapped(constant, part), order)

        return _mapped(x, turned(y), turned(jnp.abs(y)), terms)
    both = functools.partial(dot, dimension_numbers=dimensions)
    return multiplied(stretch, x, y, _each(both), terms + 2)


def _reduce_sum(stretch: Stretch, params, x: Curve) -> Curve:
    axes, terms = params["axes"], int(np.prod([x.shape[i] for i in params["axes"]], initial=1))

    def summed(part):
        if terms <= FEW:
            return jnp.sum(part, axes)
        # A product with ones: the compiler does not fuse its argument into it, which would be slow.
        return jnp.tensordot(jnp.ones([x.shape[i] for i in axes], x.dtype), part, (tuple(range(len(axes))), axes))

    return _mapped(x, summed, summed, terms)


def _cumsum(stretch: Stretch, params, x: Curve) -> Curve:
    summed = functools.partial(lax.cumsum, axis=params["axis"], reverse=params["reverse"])
    return _mapped(x, summed, summed, x.shape[params["axis"]])


def _solve(stretch: Stretch, params, a: Form, b: Form) -> Curve:
    """``A⁻¹ b`` for a constant triangular matrix."""
    if not is_point(a):
        raise NotImplementedError("triangular_solve with a matrix that depends on the parameters")
    solve, absolute, loss = linear.substitution(params, a)
    found = _mapped(b, _each(solve), _each(absolute), a.shape[-1])
    return Curve(found.parts, found.error + _each(loss)(found.size))


# Kinks ----------------------------------------------------------------------------------------------------------------


def _chosen(which: Truth, no: Form, yes: Form) -> Curve:
    """The case that holds on the whole stretch; where none does, the range of both."""
    shape = np.broadcast_shapes(_shape(no), _shape(yes), jnp.shape(which.value)[:-1])
    no, yes = _shaped(lifted(no), shape), _shaped(lifted(yes), shape)
    either = steady(hull(no.range, yes.range))
    length = max(len(no.parts), len(yes.parts))

    def pick(one, other, unknown):
        one, other = (jnp.zeros_like(unknown) if part is None else part for part in (one, other))
        return jnp.where(which.known, jnp.where(which.value, other, one), unknown)

    def part(w: Curve, k: int):
        return w.parts[k] if k < len(w.parts) else None

    middle, nothing = either.parts[0], jnp.zeros_like(either.error)
    parts = [pick(part(no, k), part(yes, k), nothing if k else middle) for k in range(length)]
    return Curve(tuple(parts), pick(no.error, yes.error, either.error))


def _extreme(name: str) -> Callable[..., Form]:
    """The range alone."""
    reduce = jnp.max if name == "max" else jnp.min

    def found(stretch: Stretch, params, x: Curve) -> Curve:
        return steady(Interval(*(reduce(end, params["axes"]) for end in (x.range.lo, x.range.hi))))

    return found


def _select(stretch: Stretch, params, which: Form, *cases: Form) -> Form:
    if any(isinstance(case, (Truth, Assumed)) for case in cases):
        if not is_point(which):
            raise NotImplementedError("a choice between comparisons by a comparison")
        truths = [_truth(case) for case in cases]
        pick = functools.partial(jnp.where, wide(which))
        return Truth(*(pick(getattr(truths[1], part), getattr(truths[0], part)) for part in ("value", "known")))
    if is_point(which):
        shape = next(case.shape for case in cases if isinstance(case, Curve))
        return fields(lambda *parts: lax.select_n(jnp.asarray(which), *parts),
                      *(_shaped(lifted(case), shape) for case in cases))  # fmt: skip
    if isinstance(which, Assumed):
        case = lifted(cases[which.value])
        return Curve(case.parts, case.error + 0.0 * which.witness.size)
    if len(cases) != 2 or not isinstance(which, Truth):
        raise NotImplementedError("a choice between more than two cases")
    return _chosen(which, *cases)


def _equal(same: bool) -> Callable[..., Form]:
    def found(stretch: Stretch, params, x: Form, y: Form) -> Form:
        if x is y or (is_static(y) and np.ndim(y) == 0 and np.isinf(y)):
            return Assumed((x is y) == same, x)
        if any(isinstance(form, (Truth, Assumed)) for form in (x, y)):
            raise NotImplementedError("whether comparisons are equal")
        return RULES["eq" if same else "ne"](stretch, params, _range(x), _range(y))

    return found


def _either(name: str) -> Callable[..., Form]:
    def found(stretch: Stretch, params, x: Form, y: Form) -> Form:
        return _chosen(rule(stretch, name, params, x, y), y, x)

    return found


def _abs(stretch: Stretch, params, x: Curve) -> Form:
    zero = np.zeros((), x.dtype)
    return _chosen(rule(stretch, "ge", params, x, zero), _neg(stretch, params, x), x)


def _sign(stretch: Stretch, params, x: Curve) -> Form:
    return steady(Interval(jnp.sign(x.range.lo), jnp.sign(x.range.hi)))


def _clamp(stretch: Stretch, params, least: Form, x: Form, most: Form) -> Form:
    above = jnp.maximum(x, least) if is_point(x) and is_point(least) else rule(stretch, "max", params, x, least)
    return jnp.minimum(above, most) if is_point(above) and is_point(most) else rule(stretch, "min", params, above, most)


SPECIAL: dict[str, Callable[..., Form]] = {
    "add": _add, "add_any": _add, "sub": _sub, "neg": _neg, "mul": _mul, "div": _div, "pow": _pow, "square": _square,
    "integer_pow": _integer_pow, "polygamma": _polygamma, "logaddexp": _logaddexp, "convert_element_type": _convert,
    "dot_general": _dot, "reduce_sum": _reduce_sum, "cumsum": _cumsum, "triangular_solve": _solve, "gather": _gather,
    "scatter-add": _scatter_add, "scatter_add": _scatter_add, "scatter": _scatter,
    "select_n": _select, "eq": _equal(True), "ne": _equal(False),
    "max": _either("ge"), "min": _either("le"), "abs": _abs, "sign": _sign, "clamp": _clamp,
    "reduce_max": _extreme("max"), "reduce_min": _extreme("min"),
    "is_finite": lambda stretch, params, x: Assumed(True, x), "copy": lambda stretch, params, x: x,
}  # fmt: skip
