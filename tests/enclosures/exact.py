"""A second implementation: programs evaluated with mpmath's intervals, to forty digits, equation by equation."""

from typing import Any

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
from jax.extend import core

from fedpdmc._jax.programs import INNER

iv: Any = mpmath.iv
iv.prec = 140
ONE = iv.mpf(1)
# Primitives that move entries, and may fill with a number.
MOVES = {
    "broadcast_in_dim", "concatenate", "dynamic_slice", "expand_dims", "gather", "pad", "reshape", "rev", "slice",
    "squeeze", "stack", "transpose",
}  # fmt: skip


def evaluate(function, *points):
    """The values of a function of arrays, or of arrays of intervals, as intervals that hold them in exact arithmetic."""
    closed = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(np.shape(point), float) for point in points))
    return _run(closed.jaxpr, closed.consts, [_lifted(point) for point in points])


def moved(rotating: bool, a, v, s: float):
    """Position and velocity after a time on a line or a rotation, as arrays of intervals."""
    a, v, s = _lifted(a), _lifted(v), iv.mpf(s)
    return (a * iv.cos(s) + v * iv.sin(s), v * iv.cos(s) - a * iv.sin(s)) if rotating else (a + v * s, v)


def ends(value) -> tuple[float, float]:
    """Of a single number."""
    return float(value[()].a), float(value[()].b)


def _lifted(x):
    x = np.asarray(x)
    if x.dtype.kind != "f":
        # Whole numbers, truths, and intervals.
        return x
    found = np.empty(x.shape, object)
    for place in np.ndindex(x.shape):
        found[place] = iv.mpf(float(x[place]))
    return found


def _run(jaxpr, consts, args):
    known = dict(zip(jaxpr.constvars, map(_lifted, consts), strict=True)) | dict(zip(jaxpr.invars, args, strict=True))

    def read(atom):
        return _lifted(atom.val) if isinstance(atom, core.Literal) else known[atom]

    for equation in jaxpr.eqns:
        found = [_array(x) for x in _one(equation, [read(atom) for atom in equation.invars])]
        known.update(zip(equation.outvars, found, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _array(x):
    """Single numbers too."""
    if isinstance(x, np.ndarray):
        return x
    found = np.empty((), bool if isinstance(x, (bool, np.bool_)) else object)
    found[()] = x
    return found


def _one(equation, values):
    name, params = equation.primitive.name, equation.params
    if name in INNER:
        inner = params[INNER[name]]
        jaxpr, consts = (inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, ())
        return _run(jaxpr, consts, values)
    if all(np.asarray(value).dtype != object for value in values):
        found = equation.primitive.bind(*map(jnp.asarray, values), **params)
        found = found if equation.primitive.multiple_results else [found]
        return [_lifted(x) for x in found]
    if name in UNARY:
        return [np.vectorize(UNARY[name], otypes=[object])(values[0])]
    if name in BINARY:
        return [np.vectorize(BINARY[name], otypes=[object])(*map(_numbers, values))]
    if name in COMPARED:
        return [np.vectorize(COMPARED[name], otypes=[bool])(*map(_numbers, values))]
    if name == "select_n":
        return [np.where(values[0], values[2], values[1])]
    if name == "integer_pow":
        return [values[0] ** params["y"]]
    if name == "reduce_sum":
        return [np.sum(values[0], params["axes"])]
    if name == "dot_general":
        (axes, others), (batch, _) = params["dimension_numbers"]
        if batch:
            raise NotImplementedError("products of many matrices")
        return [np.tensordot(_numbers(values[0]), _numbers(values[1]), (axes, others))]
    if name == "cumsum":
        axis = params["axis"]
        return [
            np.flip(np.cumsum(np.flip(values[0], axis), axis), axis)
            if params["reverse"]
            else np.cumsum(values[0], axis)
        ]
    if name in ("convert_element_type", "copy", "stop_gradient"):
        return [values[0]]
    if name in ("scatter-add", "scatter_add"):
        return [_scattered(equation, values)]
    if name not in MOVES:
        raise NotImplementedError(name)
    return [_moved(equation, values)]


def _scattered(equation, values):
    """A sum of updates: the weight of each is what the primitive makes of a unit."""
    old, place, new = values
    old, new = _numbers(old), _numbers(new)
    units = jnp.eye(new.size).reshape(new.size, *new.shape)
    nothing = jnp.zeros(old.shape)
    weights = [np.asarray(equation.primitive.bind(nothing, jnp.asarray(place), u, **equation.params)) for u in units]
    total = np.array(old, object)
    for weight, entry in zip(weights, new.ravel(), strict=True):
        for at in np.argwhere(weight != 0):
            total[tuple(at)] = total[tuple(at)] + entry * float(weight[tuple(at)])
    return total


def _moved(equation, values):
    """A primitive that moves entries: their numbers are moved."""
    data = [value for value in values if value.dtype == object]
    ends = np.cumsum([0, *(x.size for x in data)])
    numbers = iter(
        [np.arange(a, b, dtype=float).reshape(x.shape) for a, b, x in zip(ends, ends[1:], data, strict=False)]
    )
    args = [next(numbers) if value.dtype == object else value for value in values]
    params = dict(equation.params)
    fill = params.get("fill_value")
    if fill is not None:
        params["fill_value"] = float(ends[-1])
    place = np.asarray(equation.primitive.bind(*map(jnp.asarray, args), **params)).astype(int)
    pool = np.concatenate([*(x.ravel() for x in data), np.asarray([iv.mpf(fill or 0.0)], object)])
    return _array(pool[place])


def _numbers(x):
    return x if x.dtype == object else _lifted(np.asarray(x, float))


def _sign(x):
    return ONE if x.a > 0 else -ONE if x.b < 0 else iv.mpf(0)


def _tanh(x):
    grown = iv.exp(2 * x)
    return 1 - 2 / (grown + 1)


UNARY = {
    "neg": lambda x: -x, "exp": iv.exp, "log": iv.log, "log1p": lambda x: iv.log(1 + x), "expm1": lambda x: iv.exp(x) - 1,
    "sin": iv.sin, "cos": iv.cos, "sqrt": iv.sqrt, "rsqrt": lambda x: 1 / iv.sqrt(x), "tanh": _tanh, "abs": abs,
    "logistic": lambda x: 1 / (1 + iv.exp(-x)), "square": lambda x: x * x, "sign": _sign, "is_finite": lambda x: True,
    "one_minus_square": lambda x: 1 - x * x,
}  # fmt: skip
BINARY = {
    "add": lambda x, y: x + y, "add_any": lambda x, y: x + y, "sub": lambda x, y: x - y, "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y, "max": lambda x, y: x if x.a >= y.b else y, "min": lambda x, y: x if x.b <= y.a else y,
    "pow": lambda x, y: iv.exp(y * iv.log(x)),
}  # fmt: skip
COMPARED = {
    "lt": lambda x, y: x.b < y.a, "le": lambda x, y: x.b <= y.a, "gt": lambda x, y: x.a > y.b, "ge": lambda x, y: x.a >= y.b,
    "eq": lambda x, y: x.a == y.a and x.b == y.b, "ne": lambda x, y: not (x.a == y.a and x.b == y.b),
}  # fmt: skip
