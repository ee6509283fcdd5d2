"""Rules of elementwise primitives: arithmetic, comparisons and choices."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from fedpdmc.enclosures.intervals import (
    Assumed,
    Cell,
    Form,
    Interval,
    Series,
    Truth,
    centred,
    fields,
    hull,
    is_point,
    is_static,
    lifted,
    plus,
    poisoned,
    size,
    span,
    truth,
    unit,
)  # fmt: skip
from fedpdmc.enclosures.registry import CALLS, rule
from fedpdmc.enclosures.series.smooth_functions import (
    FUNCTIONS,
    apply,
    integer_power,
    multiplied,
    polygamma,
    real_power,
    scaled,
)  # fmt: skip


def _smooth(name: str):
    def found(cell, params, x):
        return apply(cell, FUNCTIONS[name], x)

    return found


# Functions that stand in programs as calls, not as primitives.
for _name in FUNCTIONS:
    if _name in ("log_ndtr", "ndtr"):
        rule(_name, table=CALLS)(_smooth(_name))
    elif _name not in ("softplus", "reciprocal"):
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
        if _is_zero(other) and one.shape == np.broadcast_shapes(one.shape, np.shape(other)):
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


def _is_zero(x: Form) -> bool:
    return is_static(x) and not np.any(x)


def _sum(one, other, *shapes):
    total = plus(one, other)
    return None if total is None else jnp.broadcast_to(total, np.broadcast_shapes(*(jnp.shape(x) for x in shapes)))


@rule("sub")
def sub(cell: Cell, params: Any, x: Form, y: Form) -> Form:
    """``x − y``."""
    return add(cell, params, x, -y if is_point(y) else neg(cell, params, y))


@rule("mul")
def mul(cell: Cell, params: Any, x: Form, y: Form) -> Form:
    """``x y``; of a value with itself, its square. Zeros that autodiff leaves behind stay points."""
    for one, other in ((x, y), (y, x)):
        if _is_zero(other):
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


@rule("abs")
def abs_(cell: Cell, params: Any, x: Form) -> Form:
    """``|x|``: x or −x where the sign is known."""
    where = span(cell, x)
    sign = Truth(where.lo >= 0, (where.lo >= 0) | (where.hi <= 0))
    folded = power_abs(where)
    return choose(cell, sign, neg(cell, params, x), x, folded)


def power_abs(x: Interval) -> Interval:
    """The range of an absolute value."""
    return Interval(jnp.maximum(jnp.maximum(x.lo, -x.hi), 0.0), x.magnitude)


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


@rule("max")
def max_(cell: Cell, params: Any, x: Form, y: Form) -> Form:
    """The larger one where it is known which, else the range."""
    one, other = span(cell, x), span(cell, y)
    larger = Truth(one.lo >= other.hi, (one.lo >= other.hi) | (one.hi <= other.lo))
    either = Interval(jnp.maximum(one.lo, other.lo), jnp.maximum(one.hi, other.hi))
    return choose(cell, larger, y, x, either)


@rule("min")
def min_(cell: Cell, params: Any, x: Form, y: Form) -> Form:
    """The smaller one where it is known which, else the range."""
    one, other = span(cell, x), span(cell, y)
    smaller = Truth(one.hi <= other.lo, (one.lo >= other.hi) | (one.hi <= other.lo))
    either = Interval(jnp.minimum(one.lo, other.lo), jnp.minimum(one.hi, other.hi))
    return choose(cell, smaller, y, x, either)


@rule("clamp")
def clamp(cell: Cell, params: Any, least: Form, x: Form, most: Form) -> Form:
    """``min(max(x, least), most)``."""
    above = jnp.maximum(x, least) if is_point(x) and is_point(least) else max_(cell, params, x, least)
    return jnp.minimum(above, most) if is_point(above) and is_point(most) else min_(cell, params, above, most)


def choose(cell: Cell, which: Truth, no: Form, yes: Form, either: Interval | None = None) -> Form:
    """``yes`` where true, ``no`` where false, where undecided the range of both (or a better one)."""
    either = hull(span(cell, no), span(cell, yes)) if either is None else either
    shape = np.broadcast_shapes(jnp.shape(which.value), jnp.shape(either.lo))
    if not isinstance(no, Series) and not isinstance(yes, Series):
        one, other = span(cell, no), span(cell, yes)
        lo, hi = jnp.where(which.value, other.lo, one.lo), jnp.where(which.value, other.hi, one.hi)
        return Interval(jnp.where(which.known, lo, either.lo), jnp.where(which.known, hi, either.hi))
    unknown = centred(Interval(jnp.broadcast_to(either.lo, shape), jnp.broadcast_to(either.hi, shape)))

    def pick(n, y, u):
        return jnp.where(which.known, jnp.where(which.value, y, n), u)

    return fields(pick, no, yes, unknown)


@rule("select_n")
def select_n(cell: Cell, params: Any, which: Form, *cases: Form) -> Form:
    """The case that a point or a comparison tells."""
    if is_point(which):
        return fields(lambda *parts: lax.select_n(jnp.asarray(which), *parts), *_alike(cases))
    if isinstance(which, Assumed):
        return poisoned(cell, cases[which.value], which.witness)
    if isinstance(which, Truth) and len(cases) == 2:
        return choose_forms(cell, which, *cases)
    return hull(*(span(cell, case) for case in cases))


def choose_forms(cell: Cell, which: Truth, no: Form, yes: Form) -> Form:
    """`choose` between numbers, or between truths."""
    if isinstance(no, Truth) or isinstance(yes, Truth) or jnp.issubdtype(jnp.result_type(_any(no)), jnp.bool_):
        no, yes = truth(cell, no), truth(cell, yes)
        same = (no.value == yes.value) & no.known & yes.known
        value = jnp.where(which.value, yes.value, no.value)
        return Truth(value, jnp.where(which.known, jnp.where(which.value, yes.known, no.known), same))
    return choose(cell, which, no, yes)


def _any(x: Form) -> Any:
    return x.lo if isinstance(x, Interval) else x.value if isinstance(x, (Series, Truth)) else x


def _alike(cases):
    """Points of a choice as arrays of one type."""
    shape = next(case.shape for case in cases if not is_point(case)) if not all(map(is_point, cases)) else None
    return [jnp.broadcast_to(case, shape) if is_point(case) and shape is not None else case for case in cases]


def _compare(name: str, surely, never):
    @rule(name)
    def found(cell, params, x, y):
        one, other = span(cell, x), span(cell, y)
        yes = surely(one, other)
        return Truth(yes, yes | never(one, other))

    return found


_compare("lt", lambda x, y: x.hi < y.lo, lambda x, y: x.lo >= y.hi)
_compare("le", lambda x, y: x.hi <= y.lo, lambda x, y: x.lo > y.hi)
_compare("gt", lambda x, y: x.lo > y.hi, lambda x, y: x.hi <= y.lo)
_compare("ge", lambda x, y: x.lo >= y.hi, lambda x, y: x.hi < y.lo)


@rule("eq")
def eq(cell: Cell, params: Any, x: Form, y: Form) -> Form:
    """Equal only where both are one and the same point; a value equals itself."""
    if any(isinstance(form, (Truth, Assumed)) for form in (x, y)):
        x, y = truth(cell, x), truth(cell, y)
        return Truth(x.value == y.value, x.known & y.known)
    if x is y:
        return Assumed(True, x)
    if _infinite(y):
        return Assumed(False, x)
    one, other = span(cell, x), span(cell, y)
    apart = (one.hi < other.lo) | (one.lo > other.hi)
    same = (one.lo == one.hi) & (other.lo == other.hi) & (one.lo == other.lo)
    return Truth(same, same | apart)


@rule("ne")
def ne(cell: Cell, params: Any, x: Form, y: Form) -> Form:
    """Not `eq`."""
    found = eq(cell, params, x, y)
    return Assumed(not found.value, found.witness) if isinstance(found, Assumed) else Truth(~found.value, found.known)


def _infinite(x: Form) -> bool:
    """Whether it is a constant of the program that is infinite."""
    return isinstance(x, (float, np.generic)) and bool(np.isinf(x))


@rule("is_finite")
def is_finite(cell: Cell, params: Any, x: Form) -> Form:
    """True, or there is no bound."""
    return Assumed(True, x)


@rule("and")
def and_(cell: Cell, params: Any, x: Form, y: Form) -> Form:
    """Of truths."""
    x, y = truth(cell, x), truth(cell, y)
    false = (x.known & ~x.value) | (y.known & ~y.value)
    return Truth(x.value & y.value & ~false, (x.known & y.known) | false)


@rule("or")
def or_(cell: Cell, params: Any, x: Form, y: Form) -> Form:
    """Of truths."""
    x, y = truth(cell, x), truth(cell, y)
    true = (x.known & x.value) | (y.known & y.value)
    return Truth((x.value | y.value) | true, (x.known & y.known) | true)


@rule("xor")
def xor(cell: Cell, params: Any, x: Form, y: Form) -> Form:
    """Of truths."""
    x, y = truth(cell, x), truth(cell, y)
    return Truth(x.value ^ y.value, x.known & y.known)


@rule("not")
def not_(cell: Cell, params: Any, x: Form) -> Form:
    """Of a truth."""
    return Assumed(not x.value, x.witness) if isinstance(x, Assumed) else Truth(~x.value, x.known)


@rule("convert_element_type")
def convert(cell: Cell, params: Any, x: Form) -> Form:
    """To another type of number; a truth becomes zero, one, or between."""
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


@rule("logaddexp", table=CALLS)
def logaddexp(cell: Cell, params: Any, x: Form, y: Form) -> Form:
    """``y + log(1 + e^{x−y})``: softplus is convex and smooth, its formula with a kink is not looked into."""
    difference = sub(cell, params, x, y)
    return add(cell, params, apply(cell, FUNCTIONS["softplus"], difference), y)


def pick_case(cell: Cell, index: Any, cases: tuple[Form, ...]) -> Form:
    """The case that a point index tells."""
    if all(is_point(case) for case in cases):
        return lax.select_n(jnp.asarray(index), *cases)
    wide = _alike(cases)
    return fields(lambda *parts: lax.select_n(jnp.asarray(index), *parts), *wide)


def entry(x: Form, at: int) -> Form:
    """One entry along the first axis."""
    return fields(lambda part: jnp.asarray(part)[at], x)
