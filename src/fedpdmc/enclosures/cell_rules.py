"""Rules in cells of sums, of linear maps with constant matrices, and of extremes and products over axes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives

from fedpdmc.enclosures.cell_values import (
    TINY,
    Cell,
    Interval,
    Series,
    bent,
    centred,
    drift,
    fields,
    lifted,
    plus,
    size,
    span,
    truth,
    unit,
)  # fmt: skip
from fedpdmc.enclosures.domain import Assumed, Domain, Form, Truth, is_point, is_zero
from fedpdmc.enclosures.special_functions import (
    FUNCTIONS,
    apply,
    integer_power,
    multiplied,
    polygamma,
    real_power,
    scaled,
)  # fmt: skip

rule = Cell.enter


def _smooth(name: str):
    def found(cell, params, x):
        return apply(cell, FUNCTIONS[name], x)

    return found


for _name in FUNCTIONS:
    rule(_name)(_smooth(_name))


@rule("neg")
def neg(cell: Cell, params: Any, x: Form) -> Form:
    """``−x``, without rounding."""
    if isinstance(x, Interval):
        return Interval(-x.hi, -x.lo)
    flip = [None if part is None else -part for part in (x.value, x.slope, x.turn, x.high, x.low)]
    return Series(flip[0], x.error, *flip[1:])


@rule("add", "add_any")
def add(cell: Cell, params: Any, x: Form, y: Form) -> Form:
    """``x + y``: what is exact stays exact."""
    for one, other in ((x, y), (y, x)):
        if is_zero(other) and one.shape == np.broadcast_shapes(one.shape, np.shape(other)):
            return one
    if not isinstance(x, Series) and not isinstance(y, Series):
        one, other = span(cell, x), span(cell, y)
        total = Interval(one.lo + other.lo, one.hi + other.hi)
        return total.widened(one.magnitude + other.magnitude)
    x, y = lifted(x), lifted(y)
    return Series(
        x.value + y.value,
        x.error + y.error + unit(x.value) * (size(cell, x) + size(cell, y)),
        *(
            _sum(getattr(x, name), getattr(y, name), x.value, y.value)
            for name in ("slope", "turn", "low", "high")
        ),
    )  # fmt: skip


def _sum(one, other, *shapes):
    total = plus(one, other)
    return None if total is None else jnp.broadcast_to(total, np.broadcast_shapes(*(jnp.shape(x) for x in shapes)))


@rule("mul")
def mul(cell: Cell, params: Any, x: Form, y: Form) -> Form:
    """``x y``; of a value with itself, its square. Zeros that autodiff leaves behind stay points."""
    for one, other in ((x, y), (y, x)):
        if is_zero(other):
            return np.zeros(np.broadcast_shapes(one.shape, np.shape(other)), one.dtype)
    if x is y:
        return apply(cell, FUNCTIONS["square"], x)
    if is_point(x):
        return scaled(cell, _wide(y, x), x)
    return scaled(cell, _wide(x, y), y) if is_point(y) else multiplied(cell, x, y)


def _wide(x: Form, y: Any) -> Form:
    """``x`` in the shape that it has together with ``y``."""
    shape = np.broadcast_shapes(x.shape, jnp.shape(y))
    return x if shape == x.shape else fields(lambda part: jnp.broadcast_to(part, shape), x)


@rule("div")
def div(cell: Cell, params: Any, x: Form, y: Form) -> Form:
    """``x / y``; everything where ``y`` may be zero."""
    if is_point(y):
        return scaled(cell, _wide(x, y), 1 / y)
    return mul(cell, params, x, apply(cell, FUNCTIONS["reciprocal"], y))


@rule("integer_pow")
def integer_pow(cell: Cell, params: Any, x: Form) -> Form:
    """``x**y`` with a fixed integer."""
    return apply(cell, integer_power(params["y"]), x)


@rule("pow")
def pow_(cell: Cell, params: Any, x: Form, y: Form) -> Form:
    """``x**y`` of positive x."""
    if is_point(y):
        whole = _whole(y)
        return apply(cell, real_power(y) if whole is None else integer_power(whole), _wide(x, y))
    if is_point(x):
        return apply(cell, FUNCTIONS["exp"], mul(cell, params, y, jnp.log(x)))
    return apply(cell, FUNCTIONS["exp"], mul(cell, params, y, apply(cell, FUNCTIONS["log"], x)))


def _whole(y: Any) -> int | None:
    """A number known while tracing that is a small integer."""
    if isinstance(y, (int, float, np.generic)) or (isinstance(y, np.ndarray) and y.ndim == 0):
        number = float(y)
        return int(number) if number.is_integer() and abs(number) < 64 else None
    return None


@rule("polygamma")
def polygamma_(cell: Cell, params: Any, n: Form, x: Form) -> Form:
    """``ψ⁽ⁿ⁾(x)`` with n known while tracing."""
    order = _whole(n)
    if order is None or order < 0:
        raise NotImplementedError("polygamma needs an order that is a constant of the program")
    return apply(cell, FUNCTIONS["digamma"] if order == 0 else polygamma(order), x)


@rule("sign")
def sign_(cell: Cell, params: Any, x: Form) -> Form:
    """−1, 0 or 1."""
    where = span(cell, x)
    found = Interval(jnp.sign(where.lo), jnp.sign(where.hi))
    return centred(found) if isinstance(x, Series) else found


@rule("floor", "ceil", "round")
def steps(cell: Cell, params: Any, x: Form) -> Form:
    """Not covered by a slope: the range alone, one step wider for rounding."""
    where = span(cell, x)
    found = Interval(jnp.floor(where.lo), jnp.ceil(where.hi))
    return centred(found) if isinstance(x, Series) else found


@rule("convert_element_type")
def convert(cell: Cell, params: Any, x: Form) -> Form:
    """Conversion to another type of number; a truth becomes zero, one, or the interval between."""
    dtype = params["new_dtype"]
    x = truth(cell, x) if isinstance(x, Assumed) else x
    if isinstance(x, Truth):
        if jnp.issubdtype(dtype, jnp.bool_):
            return x
        value = jnp.asarray(x.value, dtype)
        zero, one = jnp.zeros_like(value), jnp.ones_like(value)
        return Interval(jnp.where(x.known, value, zero), jnp.where(x.known, value, one))
    if jnp.issubdtype(dtype, jnp.floating) and jnp.issubdtype(x.dtype, jnp.floating):
        moved = fields(lambda part: lax.convert_element_type(part, dtype), x)
        if jnp.finfo(dtype).eps <= jnp.finfo(x.dtype).eps:
            return moved
        return moved.widened() if isinstance(x, Interval) else _wider(cell, moved)
    where = span(cell, x)
    lo, hi = (
        (jnp.floor(where.lo), jnp.ceil(where.hi)) if jnp.issubdtype(x.dtype, jnp.floating) else (where.lo, where.hi)
    )
    return Interval(lax.convert_element_type(lo, dtype), lax.convert_element_type(hi, dtype))


def _wider(cell: Cell, x: Series) -> Series:
    return Series(x.value, x.error + unit(x.value) * size(cell, x), x.slope, x.turn, x.low, x.high)


def totalled(cell: Cell, x: Form, total: Callable[[Any], Any], terms: int) -> Form:
    """A sum with weights zero or one of at most ``terms`` entries."""
    if isinstance(x, Interval) and not jnp.issubdtype(x.dtype, jnp.floating):
        return Interval(total(x.lo), total(x.hi))
    share = unit(x.dtype) + terms * float(jnp.finfo(x.dtype).eps)
    if isinstance(x, Interval):
        room = share * total(x.magnitude) + TINY
        return Interval(total(x.lo) - room, total(x.hi) + room)
    slope, turn, low, high = (None if part is None else total(part) for part in (x.slope, x.turn, x.low, x.high))
    return Series(total(x.value), total(x.error + share * size(cell, x)) + TINY, slope, turn, low, high)


@rule("reduce_sum")
def reduce_sum(cell: Cell, params: Any, x: Form) -> Form:
    """A sum over axes."""
    axes = params["axes"]
    return totalled(cell, x, lambda part: _summed(part, axes), int(np.prod([x.shape[i] for i in axes], initial=1)))


def _summed(part, axes):
    """A sum as a product with ones: the compiler does not fuse its argument into it, which would be slow."""
    if not jnp.issubdtype(part.dtype, jnp.floating):
        return jnp.sum(part, axes)
    flat = _flat(part, axes)
    return flat @ jnp.ones(flat.shape[-1], flat.dtype)


@rule("cumsum")
def cumsum(cell: Cell, params: Any, x: Form) -> Form:
    """Partial sums."""
    return totalled(cell, x, lambda part: lax.cumsum(part, params["axis"], params["reverse"]), x.shape[params["axis"]])


@rule("scatter-add", "scatter_add")
def scatter_add(cell: Cell, params: Any, operand: Form, indices: Form, updates: Form) -> Form:
    """Entries added where constant indices say."""
    if not is_point(indices):
        raise NotImplementedError("scatter-add at a place that depends on the parameters")
    terms = int(np.prod(jnp.shape(updates) if is_point(updates) else updates.shape, initial=1)) + 1

    def one(part, new):
        return primitives.scatter_add_p.bind(part, indices, new, **params)

    joined = fields(one, operand, updates)
    magnitude = one(size(cell, operand), size(cell, updates))
    room = (unit(magnitude) + terms * float(jnp.finfo(magnitude.dtype).eps)) * magnitude + TINY
    if isinstance(joined, Interval):
        return Interval(joined.lo - room, joined.hi + room)
    return Series(joined.value, joined.error + room, joined.slope, joined.turn, joined.low, joined.high)


@rule("scatter")
def scatter(cell: Cell, params: Any, operand: Form, indices: Form, updates: Form) -> Form:
    """Entries replaced where constant indices say."""
    if not is_point(indices):
        raise NotImplementedError("scatter at a place that depends on the parameters")
    return fields(lambda part, new: primitives.scatter_p.bind(part, indices, new, **params), operand, updates)


def mapped(cell: Cell, x: Form, linear: Callable, absolute: Callable, terms: int) -> Form:
    """A linear map with constant coefficients; ``absolute`` is the map of their absolute values.

    Centre and radius: ``A [m − r, m + r] ⊂ A m ± |A| r``, the smallest box.
    """
    if isinstance(x, Interval):
        found = mapped(cell, centred(x), linear, absolute, terms)
        return Interval(found.value - found.error, found.value + found.error)
    share = unit(x.value) + (terms + 2) * float(jnp.finfo(x.dtype).eps)
    error = absolute(x.error + share * size(cell, x)) + TINY
    low = high = None
    if x.low is not None:
        middle, radius = linear(0.5 * (x.low + x.high)), absolute(0.5 * (x.high - x.low))
        low, high = middle - radius, middle + radius
    slope, turn = (None if part is None else linear(part) for part in (x.slope, x.turn))
    return Series(linear(x.value), error, slope, turn, low, high)


@rule("dot_general")
def dot_general(cell: Cell, params: Any, x: Form, y: Form) -> Form:
    """A contraction with a constant array, or of two forms."""
    refuse_fewer_bits(params, x, y)
    dimensions = params["dimension_numbers"]
    dot = functools.partial(
        lax.dot_general, dimension_numbers=dimensions, preferred_element_type=params["preferred_element_type"]
    )
    shape, axes = jnp.shape(x) if is_point(x) else x.shape, dimensions[0][0]
    terms = int(np.prod([shape[i] for i in axes], initial=1))
    if is_point(x):
        return mapped(cell, y, lambda part: dot(x, part), lambda part: dot(jnp.abs(x), part), terms)
    if is_point(y):
        return mapped(cell, x, lambda part: dot(part, y), lambda part: dot(part, jnp.abs(y)), terms)
    return contracted(cell, dot, terms, x, y)


def refuse_fewer_bits(params: Any, *forms: Form) -> None:
    """Refuse a product in fewer bits than its arguments, whose rounding is not known."""
    kind = params["preferred_element_type"]
    if kind is not None and jnp.finfo(kind).bits < max(jnp.finfo(form.dtype).bits for form in forms):
        raise NotImplementedError("a product in fewer bits")


def contracted(cell: Cell, dot: Callable, terms: int, x: Form, y: Form) -> Form:
    """A bilinear map of two forms, with `multiplied` as the rule of each term."""
    both_intervals = isinstance(x, Interval) and isinstance(y, Interval)
    x, y = lifted(x), lifted(y)
    share = unit(x.value) + (terms + 2) * float(jnp.finfo(x.dtype).eps)
    wide, tall = size(cell, x), size(cell, y)
    error = dot(wide, y.error) + dot(x.error, tall) + share * dot(wide, tall) + TINY
    value = dot(x.value, y.value)
    if both_intervals:
        return Interval(value - error, value + error)
    slope = None
    if x.slope is not None:
        slope = dot(x.slope, y.value)
    if y.slope is not None:
        slope = dot(x.value, y.slope) if slope is None else slope + dot(x.value, y.slope)
    terms_ = [_dots(dot, drift(cell, x), drift(cell, y))]
    for one, other in ((bent(cell, x), _still(y.value)), (_still(x.value), bent(cell, y))):
        if one is not None and other is not None:
            terms_.append(_dots(dot, one, other))
    return Series(value, error, slope, None, sum(t.lo for t in terms_), sum(t.hi for t in terms_))


def _still(x) -> Interval:
    return Interval(x, x)


def _dots(dot, x: Interval, y: Interval) -> Interval:
    if x.lo is x.hi and y.lo is y.hi:
        value = dot(x.lo, y.lo)
        return Interval(value, value)
    m, r, n, q = 0.5 * (x.lo + x.hi), 0.5 * (x.hi - x.lo), 0.5 * (y.lo + y.hi), 0.5 * (y.hi - y.lo)
    middle, radius = dot(m, n), dot(jnp.abs(m), q) + dot(r, jnp.abs(n) + q)
    return Interval(middle - radius, middle + radius)


@rule("triangular_solve")
def triangular_solve(cell: Cell, params: Any, a: Form, b: Form) -> Form:
    """``A⁻¹ b`` for a constant triangular matrix: linear in b, with the error of substitution, ``|A⁻¹||A||x|``."""
    solve, absolute, loss = substitution(params, a)
    found = mapped(cell, b, solve, absolute, a.shape[-1])
    room = loss(size(cell, found))
    if isinstance(found, Interval):
        return Interval(found.lo - room, found.hi + room)
    return Series(found.value, found.error + room, found.slope, found.turn, found.low, found.high)


def substitution(params: Any, a: Any) -> tuple[Callable, Callable, Callable]:
    """The solution for a triangular matrix, a bound of its absolute values, and one of its rounding from its size."""
    n = a.shape[-1]
    solve = functools.partial(primitives.triangular_solve_p.bind, **params)
    side = jnp.broadcast_to(jnp.eye(n, dtype=a.dtype), a.shape)
    inverse = jnp.abs(solve(a, side))
    triangle = jnp.abs(jnp.tril(a) if params["lower"] else jnp.triu(a))
    if params["unit_diagonal"]:
        triangle = jnp.where(jnp.eye(n, dtype=bool), 1.0, triangle)
    triangle = jnp.swapaxes(triangle, -1, -2) if params["transpose_a"] else triangle

    def absolute(part):
        return inverse @ part if params["left_side"] else part @ inverse

    def loss(part):
        lost = inverse @ (triangle @ part) if params["left_side"] else (part @ triangle) @ inverse
        return (n + 2) * unit(a) * lost

    return functools.partial(solve, a), absolute, loss


# Extremes and products over axes --------------------------------------------------------------------------------------


def _extreme(cell: Cell, x: Form, axes, largest: bool) -> Form:
    """The largest entry: the one that is largest at the start if no other can exceed it on the cell, else the range."""
    reduce = jnp.max if largest else jnp.min
    where = span(cell, x)
    either = Interval(reduce(where.lo, axes), reduce(where.hi, axes))
    if not isinstance(x, Series):
        return either
    moved = fields(lambda part: _flat(part, axes), x)
    where = span(cell, moved)
    index = (jnp.argmax if largest else jnp.argmin)(moved.value, -1)[..., None]
    leader = jnp.arange(moved.shape[-1]) == index
    if largest:
        known = jnp.all(leader | (where.hi <= jnp.take_along_axis(where.lo, index, -1)), -1)
    else:
        known = jnp.all(leader | (where.lo >= jnp.take_along_axis(where.hi, index, -1)), -1)
    first = fields(lambda part: jnp.take_along_axis(part, index, -1)[..., 0], moved)
    return cell.choose(Truth(known, known), first, first, either)


def _flat(part, axes):
    kept = [i for i in range(part.ndim) if i not in axes]
    return jnp.transpose(part, (*kept, *axes)).reshape(*(part.shape[i] for i in kept), -1)


@rule("reduce_max")
def reduce_max(cell: Cell, params: Any, x: Form) -> Form:
    """The largest over axes."""
    return _extreme(cell, x, params["axes"], True)


@rule("reduce_min")
def reduce_min(cell: Cell, params: Any, x: Form) -> Form:
    """The smallest over axes."""
    return _extreme(cell, x, params["axes"], False)


@rule("reduce_prod")
def reduce_prod(cell: Cell, params: Any, x: Form) -> Form:
    """A product over axes, by halves."""
    flat = fields(lambda part: _flat(part, params["axes"]), x)
    while flat.shape[-1] > 1:
        half = flat.shape[-1] // 2
        one, other, rest = (fields(lambda part, at=at: part[..., at], flat) for at in (
            slice(0, half), slice(half, 2 * half), slice(2 * half, None)
        ))  # fmt: skip
        flat = multiplied(cell, one, other)
        if rest.shape[-1]:
            flat = fields(lambda part, more: jnp.concatenate([part, more], -1), flat, rest)
    return fields(lambda part: part[..., 0], flat)


@rule("cummax")
def cummax(cell: Cell, params: Any, x: Form) -> Form:
    """Monotone in every entry: the range alone."""
    where = span(cell, x)
    found = Interval(lax.cummax(where.lo, **params), lax.cummax(where.hi, **params))
    return centred(found) if isinstance(x, Series) else found


@rule("cummin")
def cummin(cell: Cell, params: Any, x: Form) -> Form:
    """Monotone in every entry: the range alone."""
    where = span(cell, x)
    found = Interval(lax.cummin(where.lo, **params), lax.cummin(where.hi, **params))
    return centred(found) if isinstance(x, Series) else found


@rule("cumprod")
def cumprod(cell: Cell, params: Any, x: Form) -> Form:
    """Partial products, doubling: entry i times entry i − 1, then i − 2, i − 4, …."""
    axis, n = params["axis"], x.shape[params["axis"]]
    turned = (lambda part: jnp.flip(part, axis)) if params["reverse"] else (lambda part: part)
    found, step = fields(turned, x), 1
    while step < n:
        late = fields(lambda part, step=step: lax.slice_in_dim(part, step, n, axis=axis), found)
        early = fields(lambda part, step=step: lax.slice_in_dim(part, 0, n - step, axis=axis), found)
        head = fields(lambda part, step=step: lax.slice_in_dim(part, 0, step, axis=axis), found)
        tail = multiplied(cell, late, early)
        found = fields(lambda one, other: jnp.concatenate([one, other], axis), head, tail)
        step *= 2
    return fields(turned, found)


@rule("cumlogsumexp")
def cumlogsumexp(cell: Cell, params: Any, x: Form) -> Form:
    """``log Σ exp`` of partial sums, shifted by a constant."""
    shift = jnp.max(x.value if isinstance(x, Series) else x.hi, params["axis"], keepdims=True)
    risen = apply(cell, FUNCTIONS["exp"], add(cell, {}, x, -shift))
    return add(cell, {}, apply(cell, FUNCTIONS["log"], cumsum(cell, params, risen)), shift)


@rule("reduce_or")
def reduce_or(domain: Domain, params: Any, x: Form) -> Form:
    """Whether any is true; intervals of time, which are along the last axis, have the same rule."""
    (x,), axes = domain.truths(x), params["axes"]
    true = jnp.any(x.value & x.known, axes)
    return Truth(true, true | jnp.all(x.known, axes))


@rule("reduce_and")
def reduce_and(domain: Domain, params: Any, x: Form) -> Form:
    """Whether all are true."""
    (x,), axes = domain.truths(x), params["axes"]
    false = jnp.any(~x.value & x.known, axes)
    return Truth(~false, false | jnp.all(x.known, axes))
