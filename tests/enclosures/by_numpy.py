"""Programs computed by NumPy, equation by equation. Nothing is compiled, which is most of the time of one that runs once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special
from jax.extend import core

from fedpdmc.enclosures.control_flow import scan_lengths
from fedpdmc.enclosures.recognised_calls import INNER


def by_numpy(function, *args):
    """The value of a function of arrays, in NumPy's arithmetic."""
    return jax.tree.map(lambda x: x[0], mapped_by_numpy(function, *(np.asarray(x)[None] for x in args)))


def mapped_by_numpy(function, *args):
    """The values of a function at the rows of arrays, read once for all of them."""
    closed, shape = jax.make_jaxpr(function, return_shape=True)(*(x[0] for x in args))
    with np.errstate(all="ignore"):
        rows = [_run(closed.jaxpr, closed.consts, row) for row in zip(*args, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(shape), [np.stack(column) for column in zip(*rows, strict=True)])


def _run(jaxpr, consts, args):
    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), map(np.asarray, (*consts, *args)), strict=True))

    def read(atom):
        return np.asarray(atom.val) if isinstance(atom, core.Literal) else known[atom]

    for equation in jaxpr.eqns:
        found = _one(equation, [read(atom) for atom in equation.invars])
        known.update(zip(equation.outvars, found, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _one(equation, values):
    name, params = equation.primitive.name, equation.params
    if name in INNER:
        return _inner(params[INNER[name]], values)
    if name in PLAIN:
        aval = equation.outvars[0].aval
        return [np.asarray(PLAIN[name](*values), aval.dtype)]
    if name in WITH_PARAMETERS:
        return [np.asarray(WITH_PARAMETERS[name](*values, **params), equation.outvars[0].aval.dtype)]
    if name in CONTROL:
        return CONTROL[name](values, params)
    return _by_jax(equation.primitive, values, params)


def _inner(closed, values):
    return _run(getattr(closed, "jaxpr", closed), getattr(closed, "consts", ()), values)


def _by_jax(primitive, values, params):
    found = primitive.bind(*map(jnp.asarray, values), **params)
    return [np.asarray(x) for x in (found if primitive.multiple_results else [found])]


def _scan(values, params):
    consts, carries = scan_lengths(params)
    fixed, carry, series = values[:consts], values[consts : consts + carries], values[consts + carries :]
    steps, length = [], params["length"]
    for k in reversed(range(length)) if params["reverse"] else range(length):
        found = _inner(params["jaxpr"], [*fixed, *carry, *(x[k] for x in series)])
        carry = found[:carries]
        steps.append(found[carries:])
    steps = steps[::-1] if params["reverse"] else steps
    return [*carry, *(np.stack(column) for column in zip(*steps, strict=True))]


def _while(values, params):
    tests, bodies = params["cond_nconsts"], params["body_nconsts"]
    for_test, for_body, carry = values[:tests], values[tests : tests + bodies], values[tests + bodies :]
    while _inner(params["cond_jaxpr"], [*for_test, *carry])[0]:
        carry = _inner(params["body_jaxpr"], [*for_body, *carry])
    return carry


def _cond(values, params):
    branches = params["branches"]
    return _inner(branches[int(np.clip(values[0], 0, len(branches) - 1))], values[1:])


def _broadcast_in_dim(x, *, shape, broadcast_dimensions, **_):
    whole = [1] * len(shape)
    for axis, n in zip(broadcast_dimensions, x.shape, strict=True):
        whole[axis] = n
    return np.broadcast_to(x.reshape(whole), shape)


def _dot_general(x, y, *, dimension_numbers, **_):
    (left, right), (left_batch, right_batch) = dimension_numbers
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    one, other = [""] * x.ndim, [""] * y.ndim
    for i, j in [*zip(left_batch, right_batch, strict=True), *zip(left, right, strict=True)]:
        one[i] = other[j] = next(letters)
    one, other = ([name or next(letters) for name in names] for names in (one, other))
    kept = [one[i] for i in left_batch]
    kept += [name for i, name in enumerate(one) if i not in (*left, *left_batch)]
    kept += [name for j, name in enumerate(other) if j not in (*right, *right_batch)]
    return np.einsum(f"{''.join(one)},{''.join(other)}->{''.join(kept)}", x, y)


def _reduced(function, x, *, axes, **_):
    return function(x, axis=tuple(axes))


def _cumulated(function, x, *, axis, reverse):
    return np.flip(function(np.flip(x, axis), axis), axis) if reverse else function(x, axis)


def _select(which, *cases):
    return np.where(which, cases[1], cases[0]) if which.dtype == bool else np.choose(which, cases)


def _slice(x, *, start_indices, limit_indices, strides):
    strides = strides or (1,) * x.ndim
    return x[tuple(map(slice, start_indices, limit_indices, strides))]


def _logistic(x):
    return np.where(x < 0, np.exp(np.minimum(x, 0)), 1.0) / (1 + np.exp(-np.abs(x)))


PLAIN = {
    "add": np.add, "add_any": np.add, "sub": np.subtract, "mul": np.multiply, "neg": np.negative,
    "max": np.maximum, "min": np.minimum, "abs": np.abs, "sign": np.sign, "exp": np.exp, "log": np.log, "log1p": np.log1p,
    "expm1": np.expm1, "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "sin": np.sin, "cos": np.cos, "tanh": np.tanh,
    "logistic": _logistic, "erf": scipy.special.erf, "erfc": scipy.special.erfc, "square": np.square,
    "is_finite": np.isfinite, "floor": np.floor, "ceil": np.ceil, "pow": np.power, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal, "copy": lambda x: x,
    "stop_gradient": lambda x: x, "nextafter": np.nextafter, "select_n": _select,
    "clamp": lambda lo, x, hi: np.clip(x, lo, hi),
    "one_minus_square": lambda x: 1 - x * x, "lgamma": scipy.special.gammaln, "digamma": scipy.special.psi,
}  # fmt: skip
WITH_PARAMETERS = {
    "broadcast_in_dim": _broadcast_in_dim, "dot_general": _dot_general, "slice": _slice,
    "reshape": lambda x, *, new_sizes, **_: x.reshape(new_sizes),
    "squeeze": lambda x, *, dimensions: np.squeeze(x, dimensions),
    "transpose": lambda x, *, permutation: np.transpose(x, permutation),
    "rev": lambda x, *, dimensions: np.flip(x, dimensions),
    "concatenate": lambda *xs, dimension: np.concatenate(xs, dimension), "convert_element_type": lambda x, **_: x,
    "integer_pow": lambda x, *, y: 1 / x**-y if y < 0 else x**y,
    "reduce_sum": functools.partial(_reduced, np.sum), "reduce_max": functools.partial(_reduced, np.max),
    "reduce_min": functools.partial(_reduced, np.min), "reduce_prod": functools.partial(_reduced, np.prod),
    "reduce_and": functools.partial(_reduced, np.all), "reduce_or": functools.partial(_reduced, np.any),
    "cumsum": functools.partial(_cumulated, np.cumsum), "cumprod": functools.partial(_cumulated, np.cumprod),
    "iota": lambda *, shape, dimension, **_: np.indices(shape)[dimension],
    "cummax": functools.partial(_cumulated, np.maximum.accumulate),
}  # fmt: skip
CONTROL = {"scan": _scan, "while": _while, "cond": _cond}


def _logic(whole, single):
    return lambda x, y: single(x, y) if x.dtype == bool else whole(x, y)


PLAIN |= {
    "div": lambda x, y: np.divide(x, y) if x.dtype.kind == "f" else (np.trunc(np.divide(x, y))),
    "and": _logic(np.bitwise_and, np.logical_and), "or": _logic(np.bitwise_or, np.logical_or),
    "xor": _logic(np.bitwise_xor, np.logical_xor), "not": lambda x: ~x,
}  # fmt: skip
