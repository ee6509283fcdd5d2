"""Rules of elementwise primitives in cells: arithmetic, powers, steps and conversions."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from fedpdmc.enclosures.cell_values import (
    Cell,
    Interval,
    Series,
    centred,
    fields,
    lifted,
    plus,
    size,
    span,
    truth,
    unit,
)
from fedpdmc.enclosures.domain import Assumed, Form, Truth, is_point, is_zero
from fedpdmc.enclosures.series.special_functions import (
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
