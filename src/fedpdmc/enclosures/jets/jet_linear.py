"""Linear maps of jets: sums, products with constant arrays, and entries that are moved."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import primitives

from fedpdmc.enclosures.cell_values import Cell, Interval
from fedpdmc.enclosures.domain import Form, is_point
from fedpdmc.enclosures.jets.jet import Balls, Jet, broadcast, contracted, lifted, multiplied
from fedpdmc.enclosures.series import linear


def add(balls: Balls, params, x: Form, y: Form) -> Jet:
    """``x + y``, one of which may be a point."""
    points = [form for form in (x, y) if is_point(form)]
    x, y = lifted(balls, x), lifted(balls, y)
    shape = np.broadcast_shapes(x.shape, y.shape)
    x, y = broadcast(x, shape), broadcast(y, shape)
    found = Jet(x.lo + y.lo, x.hi + y.hi).widened(x.magnitude + y.magnitude)
    exponents, squares = [form.of("exp") for form in (x, y)], [form.of("square") for form in (x, y)]
    if all(exponent is not None for exponent in exponents):
        lo, hi = (np.concatenate(ends, -1) for ends in zip(*((e.lo, e.hi) for e in exponents), strict=True))
        return Jet(found.lo, found.hi, ("exp", Jet(lo, hi)))
    exponent = next((e for e in exponents if e is not None and e.shape[-1] == 1), None)
    if points and exponent is not None:
        return Jet(found.lo, found.hi, ("raised", Jet(exponent.lo, exponent.hi, ("by", lifted(balls, points[0])))))
    if points and np.all(points[0] == 1.0):
        root = next((r for r in squares if r is not None), None)
        if root is not None:
            return Jet(found.lo, found.hi, ("one more", root))
        odd = next((z for z in (x.of("erf"), y.of("erf")) if z is not None), None)
        if odd is not None:
            return tail(balls, found, neg(balls, params, odd), np.ones(()))
    return found


def neg(balls: Balls, params, x: Jet) -> Jet:
    """``−x``."""
    odd = x.of("erf")
    return Jet(-x.hi, -x.lo, None if odd is None else ("erf", Jet(-odd.hi, -odd.lo)))


def tail(balls: Balls, value: Jet, z: Jet, factor: np.ndarray) -> Jet:
    """A value that is ``factor erfc(z)``."""
    return Jet(value.lo, value.hi, ("tail", Jet(z.lo, z.hi, ("by", lifted(balls, factor)))))


def scaled(balls: Balls, x: Jet, factor: np.ndarray) -> Jet:
    """Times a point."""
    x = broadcast(x, np.broadcast_shapes(x.shape, np.shape(factor)))
    one, other = x.lo * factor, x.hi * factor
    found = Jet(np.minimum(one, other), np.maximum(one, other))
    found, (kind, inner) = found.widened(found.magnitude), x.origin or ("", x)
    if kind == "square" and np.all(factor > 0):
        return Jet(found.lo, found.hi, ("square", scaled(balls, inner, np.sqrt(factor))))
    if kind == "exp" and np.all(factor >= 0):
        return Jet(found.lo, found.hi, ("exp", add(balls, {}, inner, np.log(np.asarray(factor, float))[..., None])))
    by = inner.of("by")
    if kind == "tail" and by is not None and np.all(factor > 0):
        return tail(balls, found, inner, by.lo[0, 0] * factor)
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
    linear.refuse_fewer_bits(params, x, y)
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

    return add(balls, params, old, _totalled(new, total, size))


def _solve(balls: Balls, params, a: Form, b: Form) -> Jet:
    """``A⁻¹ b`` for a constant triangular matrix, with the error of substitution."""
    axes = (0, 0)
    return _jet(jax.vmap(jax.vmap(
        lambda lo, hi: Cell.rules["triangular_solve"](balls, params, jnp.asarray(a), Interval(lo, hi)), axes), axes
    )(b.lo, b.hi))  # fmt: skip


def _jet(found: Interval) -> Jet:
    return Jet(np.asarray(found.lo), np.asarray(found.hi))


Balls.rules.update({
    "add": add, "add_any": add, "neg": neg, "reduce_sum": _reduce_sum, "cumsum": _cumsum,
    "scatter-add": _scatter_add, "scatter_add": _scatter_add,
    "dot_general": _dot, "triangular_solve": _solve,
})  # fmt: skip
