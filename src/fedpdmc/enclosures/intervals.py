"""The domain of boxes: of each value an interval, and of each primitive the rule that maps intervals to one.

Linear maps take centre and radius, ``A [m − r, m + r] ⊂ A m ± |A| r``, which is the smallest box.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives
from jaxtyping import Array

from fedpdmc.enclosures.domain import (
    TINY,
    Assumed,
    Domain,
    Form,
    Interval,
    Rule,
    Truth,
    is_point,
    is_zero,
    shape_of,
    unit,
    whole_number,
)
from fedpdmc.enclosures.special_functions import (
    FUNCTIONS,
    Function,
    by_point,
    integer_power,
    product,
    real_power,
)


class Box(Domain):
    """A box of arguments: forms are intervals."""

    rules: ClassVar[dict[str, Rule]] = {}
    title: ClassVar[str] = "on intervals"

    def fields(self, function: Callable, *forms: Form) -> Form:
        """Apply to both ends of intervals, and to points."""
        if all(map(is_point, forms)):
            return function(*forms)
        if any(isinstance(form, Truth) for form in forms):
            truths = self.truths(*forms)
            return Truth(function(*(x.value for x in truths)), function(*(x.known for x in truths)))
        spans = [span(form) for form in forms]
        return Interval(function(*(x.lo for x in spans)), function(*(x.hi for x in spans)))

    def smooth(self, function: Function, x: Form) -> Interval:
        """Its range."""
        return function.on(x)

    def spans(self, *forms: Form) -> list[Interval]:
        """The intervals themselves."""
        if any(isinstance(form, (Truth, Assumed)) for form in forms):
            raise NotImplementedError("a comparison as a number")
        return [span(form) for form in forms]

    def truths(self, *forms: Form) -> list[Truth]:
        """Truths with the shape of the value."""

        def one(x: Form) -> Truth:
            if isinstance(x, Assumed):
                where = span(x.witness)
                return Truth(jnp.full(x.shape, x.value), jnp.isfinite(where.lo) & jnp.isfinite(where.hi))
            return x if isinstance(x, Truth) else Truth(jnp.asarray(x), jnp.ones(jnp.shape(x), bool))

        return [one(form) for form in forms]

    def choose(self, which: Truth, no: Form, yes: Form, either: Interval | None = None) -> Interval:
        """Where undecided, the hull of both."""
        one, other = span(no), span(yes)
        either = Interval(jnp.minimum(one.lo, other.lo), jnp.maximum(one.hi, other.hi)) if either is None else either
        lo, hi = jnp.where(which.value, other.lo, one.lo), jnp.where(which.value, other.hi, one.hi)
        return Interval(jnp.where(which.known, lo, either.lo), jnp.where(which.known, hi, either.hi))

    def poisoned(self, x: Form, witness: Form) -> Form:
        """Both ends become NaN where the witness is not finite."""
        if x is witness:
            return x
        room, where = 0.0 * size(witness), span(x)
        return Interval(where.lo - room, where.hi + room)

    def filled(self, x: Interval, where: Any, fill: float) -> Interval:
        """Both ends."""
        return Interval(*(jnp.where(where, jnp.asarray(fill, end.dtype), end) for end in (x.lo, x.hi)))

    def full(self, x: Form, like: Form) -> Interval:
        """Both ends as arrays."""
        (where,) = self.spans(x)
        return Interval(jnp.asarray(where.lo), jnp.asarray(where.hi))

    def still(self, function: Callable, x: Form) -> list[Interval]:
        """Of the middle; a number without an error stays a number."""
        return [
            around(value, error + jnp.where(error == 0, 0.0, unit(value) * jnp.abs(value)))
            for value, error in function(_middle(span(x)))
        ]

    def wider(self, function: Callable, x: Form) -> Interval:
        """By the largest absolute values."""
        room, where = function(size(x)), span(x)
        return Interval(where.lo - room, where.hi + room).widened()

    def stopped(self, x: Form, among: Form | None, axes: tuple[int, ...]) -> tuple[Form, Form] | None:
        """All of it is the shift."""
        return (np.zeros(x.shape, x.dtype), x) if isinstance(x, Interval) else None


def span(x: Form) -> Interval:
    """A form as an interval."""
    return x if isinstance(x, Interval) else Interval(x, x)


def size(x: Form) -> Array:
    """A bound of the absolute value."""
    return jnp.abs(jnp.asarray(x)) if is_point(x) else x.magnitude


def around(middle: Any, radius: Any) -> Interval:
    """An interval by its middle."""
    return Interval(middle - radius, middle + radius)


def _middle(x: Interval) -> Any:
    return 0.5 * (x.lo + x.hi)


def _centred(x: Interval) -> tuple[Any, Any, Any]:
    """Middle, radius, and a bound of the absolute value."""
    middle = _middle(x)
    radius = jnp.maximum(x.hi - middle, middle - x.lo) + unit(x.lo) * x.magnitude
    return middle, radius, jnp.abs(middle) + radius


rule = Box.enter


@rule("neg")
def _neg(box: Box, params: Any, x: Interval) -> Interval:
    return Interval(-x.hi, -x.lo)


@rule("add", "add_any")
def _add(box: Box, params: Any, x: Form, y: Form) -> Form:
    for one, other in ((x, y), (y, x)):
        if is_zero(other) and one.shape == np.broadcast_shapes(one.shape, np.shape(other)):
            return one
    one, other = span(x), span(y)
    return Interval(one.lo + other.lo, one.hi + other.hi).widened(one.magnitude + other.magnitude)


@rule("mul")
def _mul(box: Box, params: Any, x: Form, y: Form) -> Form:
    """Of a value with itself, its square. Zeros that autodiff leaves behind stay points."""
    for one, other in ((x, y), (y, x)):
        if is_zero(other):
            return np.zeros(np.broadcast_shapes(one.shape, np.shape(other)), one.dtype)
    if x is y:
        return FUNCTIONS["square"].on(x)
    if is_point(x):
        return by_point(y, x).widened()
    return by_point(x, y).widened() if is_point(y) else product(x, y).widened()


@rule("integer_pow")
def _integer_pow(box: Box, params: Any, x: Interval) -> Interval:
    return integer_power(params["y"]).on(x)


@rule("pow")
def _pow(box: Box, params: Any, x: Form, y: Form) -> Interval:
    if is_point(y):
        whole, shape = whole_number(y), np.broadcast_shapes(x.shape, jnp.shape(y))
        wide = x if shape == x.shape else box.fields(lambda end: jnp.broadcast_to(end, shape), x)
        return (real_power(y) if whole is None else integer_power(whole)).on(wide)
    logs = jnp.log(x) if is_point(x) else FUNCTIONS["log"].on(x)
    return FUNCTIONS["exp"].on(_mul(box, params, y, logs))


@rule("sign")
def _sign(box: Box, params: Any, x: Interval) -> Interval:
    return Interval(jnp.sign(x.lo), jnp.sign(x.hi))


@rule("floor", "ceil", "round")
def _steps(box: Box, params: Any, x: Interval) -> Interval:
    return Interval(jnp.floor(x.lo), jnp.ceil(x.hi))


@rule("convert_element_type")
def _convert(box: Box, params: Any, x: Form) -> Form:
    """A truth becomes zero, one, or the interval between."""
    dtype = params["new_dtype"]
    if isinstance(x, (Truth, Assumed)):
        (x,) = box.truths(x)
        return x if jnp.issubdtype(dtype, jnp.bool_) else numbers_of(x, dtype)
    lo, hi = x.lo, x.hi
    if jnp.issubdtype(x.dtype, jnp.floating) and not jnp.issubdtype(dtype, jnp.floating):
        lo, hi = jnp.floor(lo), jnp.ceil(hi)
    found = Interval(lax.convert_element_type(lo, dtype), lax.convert_element_type(hi, dtype))
    both = jnp.issubdtype(x.dtype, jnp.floating) and jnp.issubdtype(dtype, jnp.floating)
    return found.widened() if both and jnp.finfo(dtype).eps > jnp.finfo(x.dtype).eps else found


def numbers_of(x: Truth, dtype: Any) -> Interval:
    """A truth as a number."""
    value = jnp.asarray(x.value, dtype)
    return Interval(jnp.where(x.known, value, jnp.zeros_like(value)), jnp.where(x.known, value, jnp.ones_like(value)))


# Sums and linear maps with constant coefficients ------------------------------------------------------------------------


def _totalled(x: Interval, total: Callable[[Any], Any], terms: int) -> Interval:
    """A sum with weights zero or one of at most ``terms`` entries."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return Interval(total(x.lo), total(x.hi))
    room = (unit(x.dtype) + terms * float(jnp.finfo(x.dtype).eps)) * total(x.magnitude) + TINY
    return Interval(total(x.lo) - room, total(x.hi) + room)


def terms_of(shape: tuple[int, ...], axes: Any) -> int:
    """Number of terms of a sum over axes."""
    return int(np.prod([shape[i] for i in axes], initial=1))


@rule("reduce_sum")
def _reduce_sum(box: Box, params: Any, x: Interval) -> Interval:
    axes = params["axes"]

    def summed(part):
        """As a product with ones: the compiler does not fuse its argument into it, which would be slow."""
        if not jnp.issubdtype(part.dtype, jnp.floating):
            return jnp.sum(part, axes)
        kept = [i for i in range(part.ndim) if i not in axes]
        flat = jnp.transpose(part, (*kept, *axes)).reshape(*(part.shape[i] for i in kept), -1)
        return flat @ jnp.ones(flat.shape[-1], flat.dtype)

    return _totalled(x, summed, terms_of(x.shape, axes))


@rule("cumsum")
def _cumsum(box: Box, params: Any, x: Interval) -> Interval:
    return _totalled(x, lambda part: lax.cumsum(part, params["axis"], params["reverse"]), x.shape[params["axis"]])


@rule("scatter-add", "scatter_add")
def _scatter_add(box: Box, params: Any, operand: Form, indices: Form, updates: Form) -> Interval:
    if not is_point(indices):
        raise NotImplementedError("scatter-add at a place that depends on the parameters")

    def one(part, new):
        return primitives.scatter_add_p.bind(part, indices, new, **params)

    terms = int(np.prod(shape_of(updates), initial=1)) + 1
    joined, magnitude = box.fields(one, operand, updates), one(size(operand), size(updates))
    room = (unit(magnitude) + terms * float(jnp.finfo(magnitude.dtype).eps)) * magnitude + TINY
    return Interval(joined.lo - room, joined.hi + room)


def mapped(x: Interval, linear: Callable, absolute: Callable, terms: int) -> Interval:
    """A linear map with constant coefficients; ``absolute`` is the map of their absolute values."""
    middle, radius, most = _centred(x)
    share = unit(middle) + (terms + 2) * float(jnp.finfo(x.dtype).eps)
    return around(linear(middle), absolute(radius + share * most) + TINY)


@rule("dot_general")
def _dot_general(box: Box, params: Any, x: Form, y: Form) -> Interval:
    refuse_fewer_bits(params, x, y)
    dimensions = params["dimension_numbers"]
    dot = functools.partial(
        lax.dot_general, dimension_numbers=dimensions, preferred_element_type=params["preferred_element_type"]
    )
    terms = terms_of(shape_of(x), dimensions[0][0])
    if is_point(x):
        return mapped(y, lambda part: dot(x, part), lambda part: dot(jnp.abs(x), part), terms)
    if is_point(y):
        return mapped(x, lambda part: dot(part, y), lambda part: dot(part, jnp.abs(y)), terms)
    (m, r, wide), (n, q, tall) = _centred(x), _centred(y)
    share = unit(m) + (terms + 2) * float(jnp.finfo(x.dtype).eps)
    return around(dot(m, n), dot(wide, q) + dot(r, tall) + share * dot(wide, tall) + TINY)


def refuse_fewer_bits(params: Any, *forms: Form) -> None:
    """Refuse a product in fewer bits than its arguments, whose rounding is not known."""
    kind = params["preferred_element_type"]
    if kind is not None and jnp.finfo(kind).bits < max(jnp.finfo(form.dtype).bits for form in forms):
        raise NotImplementedError("a product in fewer bits")


@rule("triangular_solve")
def _triangular_solve(box: Box, params: Any, a: Form, b: Interval) -> Interval:
    solve, absolute, loss = substitution(params, a)
    found = mapped(b, solve, absolute, a.shape[-1])
    room = loss(size(found))
    return Interval(found.lo - room, found.hi + room)


def substitution(params: Any, a: Any) -> tuple[Callable, Callable, Callable]:
    """For a constant triangular matrix: the solution ``A⁻¹ b``, linear in b; a bound of its absolute values; its rounding.

    The error of substitution is at most a few units of ``|A⁻¹||A||x|``.
    """
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


# Extremes: monotone in every entry --------------------------------------------------------------------------------------


for _name, _extreme in (("reduce_max", jnp.max), ("reduce_min", jnp.min)):
    rule(_name)(
        lambda box, params, x, reduce=_extreme: Interval(*(reduce(end, params["axes"]) for end in (x.lo, x.hi)))
    )
for _name, _extreme in (("cummax", lax.cummax), ("cummin", lax.cummin)):
    rule(_name)(lambda box, params, x, scan=_extreme: Interval(*(scan(end, **params) for end in (x.lo, x.hi))))
