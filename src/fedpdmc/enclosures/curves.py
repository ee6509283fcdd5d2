"""Curves: values along a stretch of path as polynomials of time with a proved error (Taylor models).

A stretch is read in ``τ ∈ [−1, 1]``. Sums and products of curves are those of polynomials cut off at the order n; what is
cut off, and what a smooth function leaves beyond its own n-th derivative, joins the error: with ``δ = w − c_0`` and
``D ≥ |δ|``, ``f(w) ∈ Σ_{k≤n} f_k(c_0) δ^k ± sup |f_{n+1}| D^{n+1}`` with ``f_k = f^{(k)}/k!``. The error of a stretch shrinks
with its (n+1)-th power, where that of a `Series` shrinks with its square. Rounding is as in `forms`.

Many stretches go side by side, along the last axis of every array, so that processors work on vectors of them whatever the
shape of a value is.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives
from jaxtyping import Array

from fedpdmc.compilation import apart
from fedpdmc.enclosures import linear
from fedpdmc.enclosures.arithmetic import is_static
from fedpdmc.enclosures.forms import TINY, Assumed, Form, Interval, Truth, is_point, unit
from fedpdmc.enclosures.registry import RULES
from fedpdmc.enclosures.smooth import softplus
from fedpdmc.enclosures.taylor import TAYLOR, Taylor, integer_power, polygamma, real_power

# Relative room for the rounding of a bound.
ROOM = 1 + 1e-12
# An index into so few entries is a product with a matrix of zeros and ones, which is faster than to fetch them.
FEW = 32


class Stretch(NamedTuple):
    """A piece of path, read in ``[−1, 1]``, and the order of its polynomials."""

    order: int


class Curve(eqx.Module):
    """``w(τ) ∈ Σ_k parts[k] τ^k ± error`` for all ``|τ| ≤ 1``; None, or beyond the last, stands for zero.

    The last axis of the arrays is that of stretches, and no axis of the value.
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
        return _total(self.parts[1:], self.error)

    @property
    def size(self) -> Array:
        """A bound of ``|w|`` and of every term it is made of."""
        return _total(self.parts, self.error) + self.error

    @property
    def range(self) -> Interval:
        """All its values."""
        far = (self.reach + self.error) * ROOM
        middle = _first(self)
        return Interval(middle - far, middle + far).widened()


def _total(parts, like) -> Array:
    there = [jnp.abs(part) for part in parts if part is not None]
    return sum(there[1:], there[0]) if there else jnp.zeros_like(like)


def _first(w: Curve) -> Array:
    return jnp.zeros_like(w.error) if not w.parts or w.parts[0] is None else w.parts[0]


def wide(x: Any) -> Array:
    """A point that is the same on all stretches."""
    return jnp.asarray(x)[..., None]


def lifted(x: Form) -> Curve:
    """A form as a curve: a point does not move."""
    return x if isinstance(x, Curve) else Curve((wide(x),), jnp.zeros_like(wide(x)))


def fields(function: Callable, *forms: Form) -> Curve:
    """A structural operation (it moves entries and may set them to zero) on every part, stretch by stretch."""
    curves = [lifted(form) for form in forms]
    length, count = max(len(curve.parts) for curve in curves), max(curve.error.shape[-1] for curve in curves)
    along = jax.vmap(function, in_axes=-1, out_axes=-1)

    def each(parts):
        if all(part is None for part in parts):
            return None
        shapes = [(*curve.shape, count) for curve in curves]
        there = [
            jnp.zeros_like(curve.error) if part is None else part for part, curve in zip(parts, curves, strict=True)
        ]
        return along(*(jnp.broadcast_to(part, shape) for part, shape in zip(there, shapes, strict=True)))

    parts = [[curve.parts[k] if k < len(curve.parts) else None for curve in curves] for k in range(length)]
    return Curve(tuple(map(each, parts)), each([curve.error for curve in curves]))


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


def multiplied(stretch: Stretch, x: Curve, y: Curve, times: Callable = jnp.multiply, terms: int = 0) -> Curve:
    """A bilinear map of two curves, of so many terms: the product of the polynomials, cut off."""
    parts, tail = _cut_product(x.parts, y.parts, stretch.order, times)
    wide, tall = x.size, y.size
    share = unit(x.error) + terms * float(jnp.finfo(x.dtype).eps)
    error = times(wide, y.error) + times(x.error, tall) + share * times(wide, tall) + TINY
    return Curve(parts, error if tail is None else error + tail * ROOM)


def _cut_product(x, y, order: int, times: Callable = jnp.multiply) -> tuple[tuple[Any, ...], Any]:
    """The product of two polynomials up to an order, and a bound of the rest (None if there is none)."""
    parts: list[Any] = [None] * min(len(x) + len(y) - 1, order + 1)
    tail = None
    beyond: list[Any] = [None] * (len(y) + 1)
    for j in range(len(y) - 1, -1, -1):
        beyond[j] = _plus(beyond[j + 1], None if y[j] is None else jnp.abs(y[j]))
    for i, one in enumerate(x):
        if one is None:
            continue
        kept = min(max(order + 1 - i, 0), len(y))
        for j, other in enumerate(y[:kept]):
            if other is not None:
                parts[i + j] = _plus(parts[i + j], times(one, other))
        if beyond[kept] is not None:
            tail = _plus(tail, times(jnp.abs(one), beyond[kept]))
    return tuple(parts), tail


def _plus(x: Any, y: Any) -> Any:
    return y if x is None else x if y is None else x + y


class Known(NamedTuple):
    """A smooth function about a point: ``f_k`` with their errors, up to the order, and a bound of the next on the range."""

    values: list[Any]
    errors: list[Any]
    beyond: Any


Local = Callable[[Any, Any, int], Known]


def composed(stretch: Stretch, f: Local, w: Curve) -> Curve:
    """A smooth function of a curve, by Horner's rule in what the curve moves by."""
    far = (w.reach + w.error) * ROOM
    known = f(_first(w), far, stretch.order)
    moved = (None, *w.parts[1:])
    if all(part is None for part in moved):
        moved = ()
    reach = far - w.error
    g: tuple[Any, ...] = (known.values[-1],)
    error = known.errors[-1]
    size = jnp.abs(known.values[-1])
    for k in range(stretch.order - 1, -1, -1):
        own = _total(g, w.error)
        product, tail = _cut_product(moved, g, stretch.order - k) if moved else ((), None)
        error = known.errors[k] + reach * error + w.error * (own + error)
        error = error if tail is None else error + tail * ROOM
        g = (known.values[k], *product[1:])
        size = jnp.abs(known.values[k]) + far * size
    error = error + known.beyond * far ** (stretch.order + 1)
    return Curve(g, error * ROOM + unit(w.error) * size + TINY)


def by_ranges(f: Taylor) -> Local:
    """From the ranges of the derivatives."""

    def found(x, far, order: int) -> Known:
        here = f(Interval(x, x), order)
        beyond = f(Interval(x - far, x + far).widened(), order + 1)[-1].magnitude
        return Known([0.5 * (y.lo + y.hi) for y in here], [0.5 * (y.hi - y.lo) for y in here], beyond)

    return found


def _exact(values: list[Any], noise: float, absolute: float, beyond: Any) -> Known:
    """With the rounding of the values, relative and absolute."""
    errors = [unit(value) * (noise * jnp.abs(value) + absolute) + TINY for value in values]
    return Known(values, errors, beyond)


def _exp(x, far, order: int) -> Known:
    value = jnp.exp(x)
    beyond = value * jnp.exp(far) * (ROOM / math.factorial(order + 1))
    return _exact([value / math.factorial(k) for k in range(order + 1)], 4.0, 0.0, beyond)


def _log(x, far, order: int) -> Known:
    """``−(−1)^k x^{−k}/k``."""
    inverse, least = 1 / x, x - far
    values = [jnp.log(x), *(-((-1.0) ** k) / k * inverse**k for k in range(1, order + 1))]
    beyond = jnp.where(least > 0, ROOM / ((order + 1) * jnp.where(least > 0, least, 1.0) ** (order + 1)), jnp.inf)
    return _exact(values, 4.0, 1.0, beyond)


def _reciprocal(x, far, order: int) -> Known:
    """``(−1)^k x^{−k−1}``."""
    inverse, least = 1 / x, jnp.abs(x) - far
    values = [(-1.0) ** k * inverse ** (k + 1) for k in range(order + 1)]
    beyond = jnp.where(least > 0, ROOM / jnp.where(least > 0, least, 1.0) ** (order + 2), jnp.inf)
    return _exact(values, 4.0, 0.0, beyond)


@functools.cache
def _logistic_derivatives(order: int) -> tuple[list[np.ndarray], list[float]]:
    """``σ^{(k)}/k!`` as polynomials in σ, lowest power first, and the largest absolute value of each."""
    p, found, largest = np.polynomial.Polynomial([0.0, 1.0]), [], []
    for k in range(order + 1):
        scaled = p / math.factorial(k)
        found.append(scaled.coef)
        largest.append(float(np.abs(scaled(np.linspace(0, 1, 10001))).max()) * (1 + 1e-3))
        p = p.deriv() * np.polynomial.Polynomial([0.0, 1.0, -1.0])
    return found, largest


def _logistic(x, far, order: int) -> Known:
    coefficients, largest = _logistic_derivatives(order + 1)
    p = lax.logistic(x)
    return _exact([_horner(c, p) for c in coefficients[:-1]], 16.0, 16.0, jnp.full_like(x, largest[-1]))


def _softplus(x, far, order: int) -> Known:
    coefficients, largest = _logistic_derivatives(order)
    p = lax.logistic(x)
    slopes = [_horner(c, p) / (k + 1) for k, c in enumerate(coefficients[:-1])]
    return _exact([softplus(x), *slopes], 16.0, 16.0, jnp.full_like(x, largest[-1] / (order + 1)))


def _horner(coefficients, x):
    total = coefficients[-1]
    for c in coefficients[-2::-1]:
        total = c + x * total
    return jnp.broadcast_to(total, jnp.shape(x))


LOCAL: dict[str, Local] = {
    **{name: by_ranges(taylor) for name, taylor in TAYLOR.items()},
    "exp": _exp, "log": _log, "logistic": _logistic, "softplus": _softplus,
}  # fmt: skip


# Rules ----------------------------------------------------------------------------------------------------------------


def evaluate(stretch: Stretch, equation: Any, forms: list[Form]) -> list[Form]:
    """One equation on curves; raises ``NotImplementedError`` where there is no rule."""
    name, params = equation.primitive.name, equation.params
    if name not in ("add", "add_any"):
        forms = [form.whole() if isinstance(form, Placed) else form for form in forms]
    if name in linear.MOVES and not (name == "gather" and _is_few(params, forms)):
        return _moved(equation.primitive, params, forms)
    return [rule(stretch, name, params, *forms)]


def rule(stretch: Stretch, name: str, params: dict[str, Any], *forms: Form) -> Form:
    """The result of a primitive with one value."""
    if name in SPECIAL:
        return SPECIAL[name](stretch, params, *forms)
    if name in LOCAL:
        return composed(stretch, LOCAL[name], forms[0])
    if name in ("lt", "le", "gt", "ge"):
        return RULES[name](stretch, params, *map(_range, forms))
    raise NotImplementedError(f"no rule for {name!r} on curves")


def _range(x: Form) -> Interval:
    return x.range if isinstance(x, Curve) else Interval(wide(x), wide(x))


def _moved(primitive: Any, params: dict[str, Any], forms: list[Form]) -> list[Form]:
    """A primitive that moves entries."""
    count = linear.MOVES[primitive.name]
    data, rest = (forms, []) if count is None else (forms[:count], forms[count:])
    if not all(isinstance(form, Curve) or is_point(form) for form in data) or not all(map(is_point, rest)):
        raise NotImplementedError("of a comparison, or at a place that depends on the parameters")
    if primitive.multiple_results:
        raise NotImplementedError(f"{primitive.name} on curves")
    if primitive.name == "pad" and isinstance(data[0], Curve) and _is_zero(data[1]) and len(data[0].shape) == 1:
        before, after, between = map(int, params["padding_config"][0])
        if before >= 0 and after >= 0 and between == 0:
            return [Placed(((before, data[0]),), before + data[0].shape[0] + after)]
    return [fields(lambda *parts: primitive.bind(*parts, *rest, **params), *data)]


def _is_few(params: dict[str, Any], forms: list[Form]) -> bool:
    """Whether it fetches single entries of a short vector."""
    numbers, data = params["dimension_numbers"], forms[0]
    plain = numbers.collapsed_slice_dims == (0,) and numbers.start_index_map == (0,) and not numbers.offset_dims
    return isinstance(data, Curve) and len(data.shape) == 1 and data.shape[0] <= FEW and plain and is_point(forms[1])


def _gather(stretch: Stretch, params, x: Curve, index: Any) -> Curve:
    """Single entries of a short vector; NaN for places that are not there."""
    place, entries = index[..., 0], np.arange(x.shape[0])
    ones = jnp.asarray(place[..., None] == entries, x.dtype)
    absent = jnp.where((place < 0) | (place >= x.shape[0]), jnp.nan, 0.0)
    found = Curve(tuple(None if part is None else ones @ part for part in x.parts), ones @ x.error)
    return Curve(found.parts, found.error + wide(absent))


def _scatter_add(stretch: Stretch, params, operand: Form, index: Form, updates: Form) -> Curve:
    """Entries added where constant indices say."""
    if not is_point(index):
        raise NotImplementedError("scatter-add at a place that depends on the parameters")
    old, new, numbers = lifted(operand), lifted(updates), params["dimension_numbers"]
    plain = numbers.inserted_window_dims == (0,) and not numbers.update_window_dims and len(new.shape) == 1
    if plain and len(old.shape) == 1 and old.shape[0] <= FEW:
        ones = jnp.asarray(index[..., 0] == np.arange(old.shape[0])[:, None], new.dtype)
        total = _mapped(new, lambda part: ones @ part, lambda part: ones @ part, new.shape[0])
        return total if _is_zero(operand) else _add(stretch, params, old, total)

    def one(part, more):
        return primitives.scatter_add_p.bind(part, index, more, **params)

    terms = int(np.prod(new.shape, initial=1)) + 1
    joined, size = fields(one, old, new), fields(one, Curve((), old.size), Curve((), new.size)).error
    return Curve(joined.parts, joined.error + (unit(size) + terms * float(jnp.finfo(size.dtype).eps)) * size + TINY)


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
    parts = tuple(_plus(*(w.parts[k] if k < len(w.parts) else None for w in (x, y))) for k in range(length))
    return Curve(parts, x.error + y.error + unit(x.error) * _total(parts, x.error))


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
    return _scaled(x, 1 / y) if is_point(y) else _mul(stretch, params, x, composed(stretch, _reciprocal, y))


def _square(stretch: Stretch, params, x: Curve) -> Curve:
    return multiplied(stretch, x, x)


def _integer_pow(stretch: Stretch, params, x: Curve) -> Curve:
    n = params["y"]
    if n == -1:
        return composed(stretch, _reciprocal, x)
    if 0 < n <= 4:
        root = _square(stretch, {}, x) if n > 1 else x
        return root if n < 3 else multiplied(stretch, root, x if n == 3 else root)
    return composed(stretch, by_ranges(integer_power(n)), x)


def _pow(stretch: Stretch, params, x: Form, y: Form) -> Form:
    if not is_point(y):
        logs = jnp.log(x) if is_point(x) else composed(stretch, _log, x)
        return composed(stretch, _exp, _mul(stretch, params, y, logs))
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
    return _add(stretch, params, composed(stretch, _softplus, _sub(stretch, params, x, y)), y)


def _convert(stretch: Stretch, params, x: Form) -> Form:
    if not isinstance(x, Curve) or params["new_dtype"] != x.dtype:
        raise NotImplementedError("a value as another type of number")
    return x


# Linear maps ----------------------------------------------------------------------------------------------------------


def _mapped(x: Curve, along: Callable, absolute: Callable, terms: int) -> Curve:
    """A linear map with constant coefficients; ``absolute`` is the map of their absolute values."""
    along, absolute = (jax.vmap(map_, in_axes=-1, out_axes=-1) for map_ in (along, absolute))
    share = unit(x.error) + (terms + 2) * float(jnp.finfo(x.dtype).eps)
    parts = tuple(None if part is None else along(part) for part in x.parts)
    return Curve(parts, absolute(x.error + share * x.size) + TINY)


def _dot(stretch: Stretch, params, x: Form, y: Form) -> Curve:
    dimensions = params["dimension_numbers"]
    dot = functools.partial(
        lax.dot_general, dimension_numbers=dimensions, preferred_element_type=params["preferred_element_type"]
    )
    terms = int(np.prod([x.shape[i] for i in dimensions[0][0]], initial=1))
    if is_point(x):
        return _mapped(y, lambda part: dot(x, part), lambda part: dot(jnp.abs(x), part), terms)
    if is_point(y):
        return _mapped(x, lambda part: dot(part, y), lambda part: dot(part, jnp.abs(y)), terms)
    return multiplied(stretch, x, y, jax.vmap(dot, in_axes=-1, out_axes=-1), terms + 2)


def _reduce_sum(stretch: Stretch, params, x: Curve) -> Curve:
    axes = params["axes"]
    total = functools.partial(jnp.sum, axis=axes)
    return _mapped(x, total, total, int(np.prod([x.shape[i] for i in axes], initial=1)))


def _cumsum(stretch: Stretch, params, x: Curve) -> Curve:
    total = functools.partial(lax.cumsum, axis=params["axis"], reverse=params["reverse"])
    return _mapped(x, total, total, x.shape[params["axis"]])


def _solve(stretch: Stretch, params, a: Form, b: Form) -> Curve:
    """``A⁻¹ b`` for a constant triangular matrix."""
    if not is_point(a):
        raise NotImplementedError("triangular_solve with a matrix that depends on the parameters")
    solve, absolute, loss = linear.substitution(params, a)
    found = _mapped(b, solve, absolute, a.shape[-1])
    return Curve(found.parts, found.error + jax.vmap(loss, in_axes=-1, out_axes=-1)(found.size))


# Kinks ----------------------------------------------------------------------------------------------------------------


def _chosen(which: Truth, no: Form, yes: Form) -> Curve:
    """The case that holds on the whole stretch; where none does there is no bound."""
    shape = np.broadcast_shapes(_shape(no), _shape(yes), jnp.shape(which.value)[:-1])
    no, yes = _shaped(lifted(no), shape), _shaped(lifted(yes), shape)
    length = max(len(no.parts), len(yes.parts))

    def either(one, other):
        if one is None and other is None:
            return None
        return jnp.where(which.value, 0.0 if other is None else other, 0.0 if one is None else one)

    parts = (either(*(w.parts[k] if k < len(w.parts) else None for w in (no, yes))) for k in range(length))
    return Curve(tuple(parts), jnp.where(which.known, either(no.error, yes.error), jnp.inf))


def _select(stretch: Stretch, params, which: Form, *cases: Form) -> Form:
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
        raise NotImplementedError("whether values that vary are equal")

    return found


def _either(name: str) -> Callable[..., Form]:
    def found(stretch: Stretch, params, x: Form, y: Form) -> Form:
        return _chosen(rule(stretch, name, params, x, y), y, x)

    return found


def _abs(stretch: Stretch, params, x: Curve) -> Form:
    zero = np.zeros((), x.dtype)
    return _chosen(rule(stretch, "ge", params, x, zero), _neg(stretch, params, x), x)


def _not(stretch: Stretch, params, x: Form) -> Form:
    return RULES["not"](stretch, params, x)


SPECIAL: dict[str, Callable[..., Form]] = {
    "add": _add, "add_any": _add, "sub": _sub, "neg": _neg, "mul": _mul, "div": _div, "pow": _pow, "square": _square,
    "integer_pow": _integer_pow, "polygamma": _polygamma, "logaddexp": _logaddexp, "convert_element_type": _convert,
    "dot_general": _dot, "reduce_sum": _reduce_sum, "cumsum": _cumsum, "triangular_solve": _solve, "gather": _gather,
    "scatter-add": _scatter_add, "scatter_add": _scatter_add, "select_n": _select, "eq": _equal(True), "ne": _equal(False),
    "max": _either("ge"), "min": _either("le"), "abs": _abs, "not": _not,
    "is_finite": lambda stretch, params, x: Assumed(True, x), "copy": lambda stretch, params, x: x,
}  # fmt: skip
