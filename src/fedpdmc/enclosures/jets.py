"""Jets on balls: all derivatives of a value up to an order, each enclosed on balls about a point.

A jet holds for every multi-index α of degree at most n an interval of ``c_α(y) = D^α w(y)/α!`` over all ``|y| ≤ r``, for
every radius r of a table. Sums and products of jets are those of polynomials cut off at degree n, with intervals as
coefficients; the first radius is zero, and its intervals hold the point's own values and their rounding.

Ranges are cut by the mean value theorem: ``|c_α(y) − c_α(0)| ≤ r sup |∇c_α|``, with the Euclidean norm of the intervals of
the next degree, so that an affine function of y has the range that it has on a ball and not on a box.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import primitives
from jaxtyping import Array

from fedpdmc.enclosures import linear
from fedpdmc.enclosures.forms import Assumed, Form, Interval, Truth, is_point, unit
from fedpdmc.enclosures.registry import RULES
from fedpdmc.enclosures.taylor import TAYLOR, Taylor, integer_power, polygamma, real_power

# Relative room for the rounding of a norm and of its square.
ROOM = 1 + 1e-12
# Of so many exponentials the logarithm of a sum is made term by term.
MOST_TERMS = 16
# Pieces into which the range of one number is cut, and the least half width of their balls.
PIECES, SMALLEST = 8, 1e-2


class Monomials(NamedTuple):
    """The multi-indices of ``dim`` variables up to a degree, by degree, and how they are joined."""

    exponents: np.ndarray
    degree: np.ndarray
    following: np.ndarray
    factor: np.ndarray

    @property
    def order(self) -> int:
        """The largest degree."""
        return int(self.degree[-1])

    def pairs(self, least: int, other: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Indices α, β of at least these degrees, by their sum: where each sum starts among them, and its place."""
        return _pairs(self.exponents.shape[1], self.order, least, other)


@functools.cache
def monomials(dim: int, order: int) -> Monomials:
    """All multi-indices; ``following[k, i]`` is the place of ``α_k + e_i``, or one beyond the last."""
    found = [
        tuple(np.bincount(np.asarray(places, int), minlength=dim))
        for degree in range(order + 1)
        for places in itertools.combinations_with_replacement(range(dim), degree)
    ]
    place = {alpha: k for k, alpha in enumerate(found)}
    exponents, steps = np.asarray(found), np.eye(dim, dtype=int)
    following = np.asarray([[place.get(tuple(row), len(found)) for row in alpha + steps] for alpha in exponents])
    return Monomials(exponents, exponents.sum(1), following, exponents + 1.0)


@functools.cache
def _pairs(dim: int, order: int, least: int, other: int):
    table = monomials(dim, order)
    place = {tuple(alpha): k for k, alpha in enumerate(table.exponents)}
    one, two = np.nonzero(
        (table.degree[:, None] >= least)
        & (table.degree[None] >= other)
        & (table.degree[:, None] + table.degree[None] <= order)
    )
    total = np.asarray([place[tuple(row)] for row in table.exponents[one] + table.exponents[two]], int)
    by_sum = np.argsort(total, kind="stable")
    places, starts = np.unique(total[by_sum], return_index=True)
    return one[by_sum], two[by_sum], starts, places


class Balls(NamedTuple):
    """Balls of these radii about a point, the first zero."""

    radii: np.ndarray
    table: Monomials

    @property
    def length(self) -> float:
        """No time passes."""
        return 0.0

    @property
    def rotating(self) -> bool:
        """No path turns."""
        return False


class Jet(eqx.Module):
    """Intervals of all derivatives, of shape (R, K, ...), in NumPy: what is done once need not be compiled.

    ``origin`` says how it came about where a function of it is better known than the steps to it: ``("exp", e)`` is
    ``Σ exp(e)`` over the last axis of e, ``("raised", e)`` is ``y + exp(e)`` with e from ``("by", y)``, ``("square", r)``
    is ``r²``, and ``("one more", r)`` is ``1 + r²``.
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
        """With room for the rounding of values of this size."""
        room = unit(self.lo) * size
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
    """The same with ranges cut by the mean value theorem, of first and of second order."""
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
    """Of the intervals, entry by entry."""
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


# Rules ----------------------------------------------------------------------------------------------------------------


@np.errstate(all="ignore")
def evaluate(balls: Balls, equation: Any, forms: list[Form]) -> list[Form]:
    """One equation on jets; raises ``NotImplementedError`` where there is no rule."""
    name, params = equation.primitive.name, equation.params
    forms = [np.asarray(form) if is_point(form) else form for form in forms]
    if name in linear.MOVES:
        return [_moved(balls, equation.primitive, params, forms)]
    return [rule(balls, name, params, *forms)]


@np.errstate(all="ignore")
def rule(balls: Balls, name: str, params: dict[str, Any], *forms: Form) -> Form:
    """The result of a primitive with one value."""
    if name in SPECIAL:
        return SPECIAL[name](balls, params, *forms)
    if name in TAYLOR:
        return composed(balls, TAYLOR[name], forms[0])
    if name in COMPARED:
        return _compared(balls, name, params, *forms)
    raise NotImplementedError(f"no bounds of the derivatives of {name!r} on balls")


# Linear maps ----------------------------------------------------------------------------------------------------------


def _add(balls: Balls, params, x: Form, y: Form) -> Jet:
    points = [form for form in (x, y) if is_point(form)]
    x, y = lifted(balls, x), lifted(balls, y)
    shape = np.broadcast_shapes(x.shape, y.shape)
    x, y = _wide(x, shape), _wide(y, shape)
    found = Jet(x.lo + y.lo, x.hi + y.hi).widened(x.magnitude + y.magnitude)
    exponents, squares = [form.of("exp") for form in (x, y)], [form.of("square") for form in (x, y)]
    if all(exponent is not None for exponent in exponents):
        lo, hi = (np.concatenate(ends, -1) for ends in zip(*((e.lo, e.hi) for e in exponents), strict=True))
        return Jet(found.lo, found.hi, ("exp", Jet(lo, hi)))
    exponent = next((e for e in exponents if e is not None and e.shape[-1] == 1), None)
    if points and exponent is not None:
        return Jet(found.lo, found.hi, ("raised", Jet(exponent.lo, exponent.hi, ("by", lifted(balls, points[0])))))
    root = next((r for r in squares if r is not None), None)
    if points and np.all(points[0] == 1.0) and root is not None:
        return Jet(found.lo, found.hi, ("one more", root))
    return found


def _neg(balls: Balls, params, x: Jet) -> Jet:
    return Jet(-x.hi, -x.lo)


def _sub(balls: Balls, params, x: Form, y: Form) -> Jet:
    return _add(balls, params, x, -y if is_point(y) else _neg(balls, params, y))


def _scaled(x: Jet, factor: np.ndarray) -> Jet:
    """Times a point."""
    x = _wide(x, np.broadcast_shapes(x.shape, np.shape(factor)))
    one, other = x.lo * factor, x.hi * factor
    found = Jet(np.minimum(one, other), np.maximum(one, other))
    found, root = found.widened(found.magnitude), x.of("square")
    if root is not None and np.all(factor > 0):
        return Jet(found.lo, found.hi, ("square", _scaled(root, np.sqrt(factor))))
    return found


def _totalled(x: Jet, total: Callable[[np.ndarray], np.ndarray], terms: int) -> Jet:
    """A sum with weights zero or one of at most ``terms`` entries."""
    return Jet(total(x.lo), total(x.hi)).widened((1 + terms) * total(x.magnitude))


def _reduce_sum(balls: Balls, params, x: Jet) -> Jet:
    axes = tuple(axis + 2 for axis in params["axes"])
    found = _totalled(x, lambda part: np.sum(part, axes), int(np.prod([x.lo.shape[i] for i in axes], initial=1)))
    exponent = x.of("exp")
    if exponent is None:
        return found
    kept = [i for i in range(exponent.lo.ndim - 1) if i not in axes]
    lo, hi = (
        np.transpose(end, (*kept, *axes, end.ndim - 1)).reshape(*(end.shape[i] for i in kept), -1)
        for end in (exponent.lo, exponent.hi)
    )
    return Jet(found.lo, found.hi, ("exp", Jet(lo, hi)))


def _cumsum(balls: Balls, params, x: Jet) -> Jet:
    axis = params["axis"] + 2

    def total(part):
        return np.flip(np.cumsum(np.flip(part, axis), axis), axis) if params["reverse"] else np.cumsum(part, axis)

    return _totalled(x, total, x.lo.shape[axis])


def _mapped(x: Jet, along: Callable[[np.ndarray], np.ndarray], absolute: Callable, terms: int) -> Jet:
    """A linear map with constant coefficients: centre and radius."""
    middle, radius = 0.5 * (x.lo + x.hi), 0.5 * (x.hi - x.lo)
    centre, spread = along(middle), absolute(radius)
    return Jet(centre - spread, centre + spread).widened((1 + terms) * absolute(x.magnitude))


def _dot(balls: Balls, params, x: Form, y: Form) -> Jet:
    (axes, others), (batch, other_batch) = params["dimension_numbers"]
    shapes = [np.ndim(form) if is_point(form) else len(form.shape) for form in (x, y)]
    one, other = list(range(shapes[0])), list(range(shapes[0], sum(shapes)))
    for i, j in zip((*axes, *batch), (*others, *other_batch), strict=True):
        other[j] = one[i]
    free = [k for i, k in enumerate(one) if i not in (*axes, *batch)]
    free += [k for j, k in enumerate(other) if j not in (*others, *other_batch)]
    out = [one[i] for i in batch] + free
    terms = int(np.prod([(x.shape)[i] for i in axes], initial=1))

    def dot(p, q, lead=()):
        return np.einsum(p, [*(lead if p.ndim > len(one) else ()), *one], q,
                         [*(lead if q.ndim > len(other) else ()), *other], [*lead, *out], optimize=True)  # fmt: skip

    lead = [sum(shapes), sum(shapes) + 1]
    if is_point(x):
        return _mapped(y, lambda part: dot(x, part, lead), lambda part: dot(np.abs(x), part, lead), terms)
    if is_point(y):
        return _mapped(x, lambda part: dot(part, y, lead), lambda part: dot(part, np.abs(y), lead), terms)

    def both(p: Jet, q: Jet) -> Jet:
        m, r, n, s = 0.5 * (p.lo + p.hi), 0.5 * (p.hi - p.lo), 0.5 * (q.lo + q.hi), 0.5 * (q.hi - q.lo)
        middle, spread = dot(m, n, lead), dot(np.abs(m), s, lead) + dot(r, np.abs(n) + s, lead)
        return Jet(middle - spread, middle + spread).widened((1 + terms) * dot(p.magnitude, q.magnitude, lead))

    return multiplied(balls, contracted(balls, x), contracted(balls, y), times=both)


def _moved(balls: Balls, primitive: Any, params: dict[str, Any], forms: list[Form]) -> Jet:
    """A primitive that moves entries, found by moving their numbers."""
    count = linear.MOVES[primitive.name]
    data, rest = (forms, []) if count is None else (forms[:count], forms[count:])
    if not all(isinstance(form, Jet) or is_point(form) for form in data) or not all(is_point(form) for form in rest):
        raise NotImplementedError(f"{primitive.name} of a comparison, or at a place that depends on the parameters")
    if primitive.multiple_results or primitive.name == "optimization_barrier":
        raise NotImplementedError(f"{primitive.name} on balls")
    jets = [lifted(balls, form) for form in data]
    starts = np.cumsum([0] + [int(np.prod(jet.shape)) for jet in jets])
    numbers = [
        jnp.arange(start, end, dtype=float).reshape(jet.shape)
        for start, end, jet in zip(starts[:-1], starts[1:], jets, strict=True)
    ]
    place = np.asarray(primitive.bind(*numbers, *map(jnp.asarray, rest), **params))
    if np.any(np.isnan(place)):
        raise NotImplementedError(f"{primitive.name} beyond the end of an array")

    def move(*parts: Jet) -> Jet:
        more = parts[0].shape[len(jets[0].shape) :]
        lo, hi = (
            np.concatenate([end.reshape(*end.shape[:2], -1, *more) for end in ends], 2)[:, :, place.astype(int)]
            for ends in ([part.lo for part in parts], [part.hi for part in parts])
        )
        return Jet(lo, hi)

    return _alike(jets[0], move) if len(jets) == 1 else move(*jets)


def _scatter_add(balls: Balls, params, operand: Form, indices: Form, updates: Form) -> Jet:
    """Entries added where constant indices say: a matrix of zeros and ones."""
    if not is_point(indices):
        raise NotImplementedError("scatter-add at a place that depends on the parameters")
    old, new = lifted(balls, operand), lifted(balls, updates)
    size = int(np.prod(new.shape))

    def column(unit_update):
        zero = jnp.zeros(old.shape)
        return primitives.scatter_add_p.bind(zero, jnp.asarray(indices), unit_update.reshape(new.shape), **params)

    matrix = np.asarray(jax.vmap(column)(jnp.eye(size))).reshape(size, *old.shape)

    def total(part):
        return np.tensordot(part.reshape(*part.shape[:2], -1), matrix, 1)

    return _add(balls, params, old, _totalled(new, total, size))


def _solve(balls: Balls, params, a: Form, b: Form) -> Jet:
    """``A⁻¹ b`` for a constant triangular matrix, with the error of substitution."""
    if not is_point(a):
        raise NotImplementedError("triangular_solve with a matrix that depends on the parameters")
    axes = (0, 0)
    return _jet(jax.vmap(jax.vmap(
        lambda lo, hi: RULES["triangular_solve"](balls, params, jnp.asarray(a), Interval(lo, hi)), axes), axes
    )(b.lo, b.hi))  # fmt: skip


def _jet(found: Interval) -> Jet:
    return Jet(np.asarray(found.lo), np.asarray(found.hi))


# Products and powers --------------------------------------------------------------------------------------------------


def _square(balls: Balls, params, x: Jet) -> Jet:
    found = composed(balls, integer_power(2), x)
    return Jet(found.lo, found.hi, ("square", x))


def _integer_pow(balls: Balls, params, x: Jet) -> Jet:
    return _square(balls, params, x) if params["y"] == 2 else composed(balls, integer_power(params["y"]), x)


def _exp(balls: Balls, params, x: Jet) -> Jet:
    found = composed(balls, TAYLOR["exp"], x)
    return Jet(found.lo, found.hi, ("exp", Jet(x.lo[..., None], x.hi[..., None])))


def _log(balls: Balls, params, x: Jet) -> Jet:
    """Of a sum of a few exponentials as ``log(e^a + e^b) = b + softplus(a − b)``, term by term."""
    exponents, root = x.of("exp"), x.of("one more")
    if root is not None:
        return composed(balls, TAYLOR["log1p_square"], root)
    if exponents is None or exponents.shape[-1] > MOST_TERMS:
        return composed(balls, TAYLOR["log"], x)
    terms = [Jet(exponents.lo[..., j], exponents.hi[..., j]) for j in range(exponents.shape[-1])]
    return functools.reduce(lambda one, other: _logaddexp(balls, params, one, other), terms)


def _log1p(balls: Balls, params, x: Jet) -> Jet:
    root = x.of("square")
    return composed(balls, TAYLOR["log1p" if root is None else "log1p_square"], x if root is None else root)


def _lgamma(balls: Balls, params, x: Jet) -> Jet:
    """Of ``y + e^l`` with a constant y as one function of l: its derivatives are small where those by ``e^l`` cancel."""
    alone, raised_by = x.of("exp"), x.of("raised")
    exponent = raised_by if alone is None else alone
    if exponent is None or exponent.shape[-1] != 1:
        return composed(balls, TAYLOR["lgamma"], x)
    constant = exponent.of("by")
    assert (constant is None) == (raised_by is None)
    y = np.zeros(()) if constant is None else constant.lo[0, 0]

    def function(small: Balls, z: Jet) -> Jet:
        raised = _add(small, params, composed(small, TAYLOR["exp"], z), np.expand_dims(y, -1))
        return composed(small, TAYLOR["lgamma"], raised)

    return composed(balls, refined(function), Jet(exponent.lo[..., 0], exponent.hi[..., 0]))


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


def _mul(balls: Balls, params, x: Form, y: Form) -> Form:
    if x is y:
        return _square(balls, params, x)
    if is_point(x) or is_point(y):
        return _scaled(y, x) if is_point(x) else _scaled(x, y)
    shape = np.broadcast_shapes(x.shape, y.shape)
    return multiplied(balls, contracted(balls, _wide(x, shape)), contracted(balls, _wide(y, shape)))


def _wide(x: Jet, shape: tuple[int, ...]) -> Jet:
    if x.shape == shape:
        return x

    def wide(part: Jet, more: tuple[int, ...]) -> Jet:
        ones = (1,) * (len(shape) - len(x.shape))
        lo, hi = (
            np.broadcast_to(end.reshape(*end.shape[:2], *ones, *part.shape), (*end.shape[:2], *shape, *more))
            for end in (part.lo, part.hi)
        )
        return Jet(lo, hi)

    return _alike(x, lambda part: wide(part, part.shape[len(x.shape) :]))


def _alike(x: Jet, move: Callable[[Jet], Jet]) -> Jet:
    """A move of entries, of what they came from too."""
    found = move(x)
    if x.origin is None or x.origin[1].origin is not None:
        return found
    return Jet(found.lo, found.hi, (x.origin[0], move(x.origin[1])))


def _div(balls: Balls, params, x: Form, y: Form) -> Form:
    return _mul(balls, params, x, 1 / y if is_point(y) else composed(balls, integer_power(-1), y))


def _pow(balls: Balls, params, x: Form, y: Form) -> Form:
    if not is_point(y):
        logs = np.log(x) if is_point(x) else composed(balls, TAYLOR["log"], x)
        return composed(balls, TAYLOR["exp"], _mul(balls, params, y, logs))
    if np.ndim(y):
        x = _wide(x, np.broadcast_shapes(x.shape, y.shape))
    return _square(balls, params, x) if np.ndim(y) == 0 and y == 2.0 else composed(balls, real_power(y), x)


def _convert(balls: Balls, params, x: Form) -> Form:
    if not isinstance(x, Jet) or not jnp.issubdtype(params["new_dtype"], jnp.floating):
        raise NotImplementedError("a value that is rounded to an integer, or a comparison as a number")
    return x


def _logaddexp(balls: Balls, params, x: Form, y: Form) -> Form:
    return _add(balls, params, composed(balls, TAYLOR["softplus"], _sub(balls, params, x, y)), y)


@np.errstate(all="ignore")
def log_erfc(balls: Balls, x: Jet, factor: Array) -> Jet:
    """``log(c erfc(x)) = log(2c) + log Φ(−√2 x)``, whose derivatives are those of one function and not of a quotient."""
    tail = composed(balls, TAYLOR["log_ndtr"], _mul(balls, {}, x, np.asarray(-np.sqrt(2.0))))
    return _add(balls, {}, tail, np.log(2 * np.asarray(factor)))


def _polygamma(balls: Balls, params, n: Form, x: Form) -> Form:
    if not is_point(n) or np.ndim(n):
        raise NotImplementedError("polygamma needs an order that is a constant of the program")
    return composed(balls, polygamma(int(n)), x)


# Kinks ----------------------------------------------------------------------------------------------------------------


def chosen(balls: Balls, which: Truth, no: Form, yes: Form) -> Jet:
    """The case that holds on a whole ball; where none does the derivatives need not exist."""
    no, yes = lifted(balls, no), lifted(balls, yes)
    shape = np.broadcast_shapes(no.shape, yes.shape, np.shape(which.value)[1:])
    no, yes = _wide(no, shape), _wide(yes, shape)
    value, known = (np.expand_dims(np.asarray(x), 1) for x in (which.value, which.known))
    lo, hi = np.where(value, yes.lo, no.lo), np.where(value, yes.hi, no.hi)
    return Jet(np.where(known, lo, -np.inf), np.where(known, hi, np.inf))


def _spread(balls: Balls, which: Form) -> Truth:
    """A truth for every radius."""
    if isinstance(which, Truth):
        return which
    return Truth(*(np.broadcast_to(x, (len(balls.radii), *np.shape(which))) for x in (which, True)))


def _select(balls: Balls, params, which: Form, *cases: Form) -> Form:
    if isinstance(which, Assumed):
        case, witness = lifted(balls, cases[which.value]), which.witness
        room = 0.0 * np.asarray(witness.range.magnitude)[:, None]
        return Jet(case.lo - room, case.hi + room)
    if len(cases) != 2 or not isinstance(which, (Truth, np.ndarray)):
        raise NotImplementedError("a choice between more than two cases")
    return chosen(balls, _spread(balls, which), *cases)


def _compared(balls: Balls, name: str, params, x: Form, y: Form) -> Form:
    if name in ("eq", "ne"):
        if x is y or _infinite(y):
            return Assumed((x is y) == (name == "eq"), x)
        raise NotImplementedError(f"{name} of values that vary")
    one, other = (form.range if isinstance(form, Jet) else Interval(form, form) for form in (x, y))
    return RULES[name](balls, params, one, other)


def _infinite(x: Form) -> bool:
    return is_point(x) and np.ndim(x) == 0 and bool(np.isinf(x))


COMPARED = {"lt", "le", "gt", "ge", "eq", "ne"}


def _larger(balls: Balls, params, x: Form, y: Form) -> Form:
    return chosen(balls, _compared(balls, "ge", params, x, y), y, x)


def _smaller(balls: Balls, params, x: Form, y: Form) -> Form:
    return chosen(balls, _compared(balls, "le", params, x, y), y, x)


def _abs(balls: Balls, params, x: Form) -> Form:
    if x.of("exp") is not None:
        return x
    return chosen(balls, _compared(balls, "ge", params, x, np.zeros(())), _neg(balls, params, x), x)


def _extreme(largest: bool) -> Callable[..., Form]:
    """The range alone: the derivatives need not exist."""
    reduce = np.max if largest else np.min

    def found(balls: Balls, params, x: Form) -> Form:
        axes = tuple(axis + 1 for axis in params["axes"])
        low, high = reduce(x.range.lo, axes), reduce(x.range.hi, axes)
        hi = np.full((low.shape[0], len(balls.table.degree), *low.shape[1:]), np.inf)
        lo = -hi
        lo[:, 0], hi[:, 0] = low, high
        return Jet(lo, hi)

    return found


def _not(balls: Balls, params, x: Form) -> Form:
    return Assumed(not x.value, x.witness) if isinstance(x, Assumed) else Truth(~x.value, x.known)


SPECIAL: dict[str, Callable[..., Form]] = {
    "add": _add, "add_any": _add, "sub": _sub, "neg": _neg, "reduce_sum": _reduce_sum, "cumsum": _cumsum,
    "scatter-add": _scatter_add, "scatter_add": _scatter_add, "copy": lambda balls, params, x: x,
    "mul": _mul, "div": _div, "pow": _pow, "dot_general": _dot, "triangular_solve": _solve, "logaddexp": _logaddexp,
    "convert_element_type": _convert, "polygamma": _polygamma, "select_n": _select, "max": _larger, "min": _smaller,
    "abs": _abs, "reduce_max": _extreme(True), "reduce_min": _extreme(False), "not": _not,
    "integer_pow": _integer_pow, "square": _square, "exp": _exp, "log": _log, "log1p": _log1p, "lgamma": _lgamma,
    "is_finite": lambda balls, params, x: Assumed(True, x),
}  # fmt: skip
