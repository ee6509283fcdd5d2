"""Programs evaluated by NumPy, equation by equation, where compiling them would take longer than running them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import scipy.special
from jax.core import Tracer
from jax.extend import core

from fedpdmc._jax.programs import INNER, programs_of


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
    return np.einsum(f"{''.join(one)},{''.join(other)}->{''.join(kept)}", x, y, optimize=True)


def _reduced(function, x, *, axes, **_):
    return function(x, axis=tuple(axes))


def _cumulated(function, x, *, axis, reverse):
    return np.flip(function(np.flip(x, axis), axis), axis) if reverse else function(x, axis)


def _select(which, *cases):
    return np.where(which, cases[1], cases[0]) if which.dtype == bool else np.choose(which, cases)


def _slice(x, *, start_indices, limit_indices, strides):
    strides = strides or (1,) * x.ndim
    return x[tuple(map(slice, start_indices, limit_indices, strides))]


def _pad(x, filling, *, padding_config):
    """``lax.pad``; negative padding removes entries."""
    spread = [n + gap * max(n - 1, 0) for n, (_, _, gap) in zip(x.shape, padding_config, strict=True)]
    found = np.full(
        [max(low, 0) + n + max(high, 0) for n, (low, high, _) in zip(spread, padding_config, strict=True)], filling
    )
    own = [
        slice(max(low, 0), max(low, 0) + n, gap + 1) for n, (low, _, gap) in zip(spread, padding_config, strict=True)
    ]
    found[tuple(own)] = x
    kept = [
        slice(max(-low, 0), n - max(-high, 0)) for n, (low, high, _) in zip(found.shape, padding_config, strict=True)
    ]
    return found[tuple(kept)]


def _dynamic_slice(x, *starts, slice_sizes):
    corner = [int(np.clip(start, 0, n - size)) for start, n, size in zip(starts, x.shape, slice_sizes, strict=True)]
    return x[tuple(slice(first, first + size) for first, size in zip(corner, slice_sizes, strict=True))]


def _dynamic_update_slice(x, new, *starts):
    corner = [int(np.clip(start, 0, n - size)) for start, n, size in zip(starts, x.shape, new.shape, strict=True)]
    found = x.copy()
    found[tuple(slice(first, first + size) for first, size in zip(corner, new.shape, strict=True))] = new
    return found


def _places(index, axes, shape) -> tuple[np.ndarray, ...] | None:
    """The indices along some axes of an array, of a gather or a scatter; None if one is outside."""
    places = tuple(index[..., k] for k in range(len(axes)))
    inside = all(p.size == 0 or (p.min() >= 0 and p.max() < shape[axis]) for p, axis in zip(places, axes, strict=True))
    return places if inside else None


def _gather(x, index, *, dimension_numbers, slice_sizes, **_):
    """Entries of an array along some axes, whole along the others; None for any other gather."""
    numbers, axes = dimension_numbers, dimension_numbers.start_index_map
    whole = tuple(1 if axis in axes else n for axis, n in enumerate(x.shape))
    if numbers.operand_batching_dims or sorted(axes) != list(numbers.collapsed_slice_dims) or slice_sizes != whole:
        return None
    places = _places(index, axes, x.shape)
    if places is None:
        return None
    found = np.moveaxis(x, axes, range(len(axes)))[places]
    first = index.ndim - 1
    return np.moveaxis(found, range(first, found.ndim), numbers.offset_dims)


def _scatter(function, x, index, new, *, dimension_numbers, **_):
    """``function.at`` along some axes of an array, whole along the others; None for any other scatter."""
    numbers, axes = dimension_numbers, dimension_numbers.scatter_dims_to_operand_dims
    rest = [n for axis, n in enumerate(x.shape) if axis not in axes]
    if numbers.operand_batching_dims or sorted(axes) != list(numbers.inserted_window_dims):
        return None
    places = _places(index, axes, x.shape)
    if places is None or [new.shape[axis] for axis in numbers.update_window_dims] != rest:
        return None
    first, found = index.ndim - 1, x.copy()
    new = np.moveaxis(new, numbers.update_window_dims, range(first, new.ndim))
    function.at(np.moveaxis(found, axes, range(len(axes))), places, new)
    return found


class _Put:
    """In place of a ufunc: replaces entries."""

    at = staticmethod(np.ndarray.__setitem__)


def _put(x, index, new, **params):
    """Replace entries at one place; None for more, which may coincide."""
    return _scatter(_Put, x, index, new, **params) if math.prod(index.shape[:-1]) == 1 else None


def _polygamma(n, x):
    return np.where(
        n == 0, scipy.special.psi(x), (-1) ** (n + 1) * scipy.special.gamma(n + 1) * scipy.special.zeta(n + 1, x)
    )


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
    "dynamic_update_slice": _dynamic_update_slice, "clamp": lambda lo, x, hi: np.clip(x, lo, hi),
    "one_minus_square": lambda x: 1 - x * x, "lgamma": scipy.special.gammaln, "digamma": scipy.special.psi,
    "polygamma": _polygamma, "zeta": scipy.special.zeta, "erf_inv": scipy.special.erfinv, "cbrt": np.cbrt, "tan": np.tan,
    "sinh": np.sinh, "cosh": np.cosh, "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan, "atan2": np.arctan2,
    "asinh": np.arcsinh, "acosh": np.arccosh, "atanh": np.arctanh, "exp2": np.exp2, "shift_left": np.left_shift,
    "shift_right_logical": lambda x, y: (x.view(f"u{x.itemsize}") >> y.view(f"u{y.itemsize}")).view(x.dtype),
    "shift_right_arithmetic": np.right_shift,
}  # fmt: skip
WITH_PARAMETERS = {
    "broadcast_in_dim": _broadcast_in_dim, "dot_general": _dot_general, "slice": _slice, "dynamic_slice": _dynamic_slice,
    "pad": _pad, "reshape": lambda x, *, new_sizes, **_: x.reshape(new_sizes),
    "squeeze": lambda x, *, dimensions: np.squeeze(x, dimensions),
    "transpose": lambda x, *, permutation: np.transpose(x, permutation),
    "rev": lambda x, *, dimensions: np.flip(x, dimensions),
    "stack": lambda *xs, axis, **_: np.stack(xs, axis),
    "concatenate": lambda *xs, dimension: np.concatenate(xs, dimension), "convert_element_type": lambda x, **_: x,
    "integer_pow": lambda x, *, y: 1 / x**-y if y < 0 else x**y,
    "reduce_sum": functools.partial(_reduced, np.sum), "reduce_max": functools.partial(_reduced, np.max),
    "reduce_min": functools.partial(_reduced, np.min), "reduce_prod": functools.partial(_reduced, np.prod),
    "reduce_and": functools.partial(_reduced, np.all), "reduce_or": functools.partial(_reduced, np.any),
    "cumsum": functools.partial(_cumulated, np.cumsum), "cumprod": functools.partial(_cumulated, np.cumprod),
    "iota": lambda *, shape, dimension, **_: np.indices(shape)[dimension],
    "bitcast_convert_type": lambda x, *, new_dtype: x.view(new_dtype),
    "argmax": lambda x, *, axes, **_: np.argmax(x, *axes), "argmin": lambda x, *, axes, **_: np.argmin(x, *axes),
    "cummax": functools.partial(_cumulated, np.maximum.accumulate),
}  # fmt: skip
ROWS = {
    "gather": _gather, "scatter": _put, "scatter-add": functools.partial(_scatter, np.add),
    "scatter-max": functools.partial(_scatter, np.maximum), "scatter-min": functools.partial(_scatter, np.minimum),
}  # fmt: skip


def _logic(whole, single):
    return lambda x, y: single(x, y) if x.dtype == bool else whole(x, y)


PLAIN |= {
    "div": lambda x, y: np.divide(x, y) if x.dtype.kind == "f" else (np.trunc(np.divide(x, y))),
    "and": _logic(np.bitwise_and, np.logical_and), "or": _logic(np.bitwise_or, np.logical_or),
    "xor": _logic(np.bitwise_xor, np.logical_xor), "not": lambda x: ~x,
}  # fmt: skip


T = TypeVar("T")

# Cost model: seconds to compile a program, and for each equation of it; seconds of NumPy for an equation and for a number;
# and the number of calls that a program is expected to get.
LEAST_COMPILED, COMPILED, CALLED, NUMBER, CALLS = 0.1, 6e-4, 5e-6, 3e-9, 8
# The types of computed results, and the placeholder for such a result among the static ones.
ARRAYS, COMPUTED = (jax.Array, np.ndarray, np.generic), object()


class _Read(NamedTuple):
    """A program as it was read: its equations, and how its results are put together."""

    closed: Any
    structure: Any
    static: tuple[Any, ...]


def once(function: Callable[..., T]) -> Callable[..., T]:
    """Like ``eqx.filter_jit``, for a function that is called only a few times: it is not compiled if it is little work.

    Its values are those of NumPy's arithmetic, which differ from compiled ones by rounding.
    """
    compiled, read = eqx.filter_jit(function), {}

    @functools.wraps(function)
    def call(*args):
        leaves, structure = jax.tree.flatten(args)
        if any(isinstance(leaf, Tracer) for leaf in leaves):
            return function(*args)
        arrays = [leaf for leaf in leaves if isinstance(leaf, ARRAYS)]
        rest = tuple(None if isinstance(leaf, ARRAYS) else leaf for leaf in leaves)
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in arrays)
        key = structure, rest, shapes, jax.dtypes.canonicalize_dtype(np.float64)
        if key not in read:
            read[key] = _read(function, structure, rest, arrays)
        found = read[key]
        if found is None:
            return compiled(*args)
        values = iter(_called(found.closed, arrays))
        parts = [jax.device_put(next(values)) if part is COMPUTED else part for part in found.static]
        return jax.tree.unflatten(found.structure, parts)

    return call


def _read(function, structure, rest, arrays) -> _Read | None:
    """The program; None where it is better compiled."""
    told: list[Any] = []

    def flat(*arrays):
        left = iter(arrays)
        args = jax.tree.unflatten(structure, [next(left) if part is None else part for part in rest])
        leaves, shape = jax.tree.flatten(function(*args))
        told[:] = shape, tuple(COMPUTED if isinstance(leaf, ARRAYS) else leaf for leaf in leaves)
        return [leaf for leaf in leaves if isinstance(leaf, ARRAYS)]

    closed = jax.make_jaxpr(flat)(*arrays)
    equations, calls, numbers = _work(closed.jaxpr)
    if CALLS * (CALLED * calls + NUMBER * numbers) > LEAST_COMPILED + COMPILED * equations:
        return None
    return _Read(closed, told[0], told[1])


def _work(jaxpr) -> np.ndarray:
    """Number of equations, of evaluations of equations, and of numbers computed (infinite for random keys)."""
    total = np.zeros(3)
    for equation in jaxpr.eqns:
        sizes = [math.prod(out.aval.shape) for out in equation.outvars]
        total += 1, 1, np.inf if any(_is_key(out) for out in equation.outvars) else sum(sizes)
        turns = equation.params["length"] if equation.primitive.name == "scan" else 1
        for inner in programs_of(equation):
            total += np.array([1, turns, turns]) * _work(inner)
    return total


def _is_key(variable) -> bool:
    return jnp.issubdtype(variable.aval.dtype, jax.dtypes.extended)


def by_numpy(function: Callable, *args: Any) -> Any:
    """The value of a function of arrays, in NumPy's arithmetic."""
    return jax.tree.map(lambda x: x[0], mapped_by_numpy(function, *(np.asarray(x)[None] for x in args)))


def mapped_by_numpy(function: Callable, *args: Any) -> Any:
    """The values of a function at the rows of arrays, read once for all of them."""
    closed, shape = jax.make_jaxpr(function, return_shape=True)(*(x[0] for x in args))
    rows = [_called(closed, row) for row in zip(*args, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(shape), [np.stack(column) for column in zip(*rows, strict=True)])


def _called(closed, args) -> list[np.ndarray]:
    with np.errstate(all="ignore"):
        return _run(closed.jaxpr, closed.consts, args)


class _Step(NamedTuple):
    """An operation, the slots that it reads and writes, and those that no later one reads."""

    operation: Callable[[list[Any]], Any]
    read: list[int]
    written: list[int]
    over: list[int]


class _Steps(NamedTuple):
    """The equations that the results need, on numbered slots: first constants and arguments, literals in place."""

    slots: list[Any]
    steps: list[_Step]
    results: list[int]


@functools.lru_cache(maxsize=4096)
def _steps(jaxpr) -> _Steps:
    needed = {atom for atom in jaxpr.outvars if not isinstance(atom, core.Literal)}
    kept = []
    for equation in reversed(jaxpr.eqns):
        if not any(out in needed for out in equation.outvars):
            continue
        inputs = {atom for atom in equation.invars if not isinstance(atom, core.Literal)}
        kept.append((equation, [*(inputs - needed), *(out for out in equation.outvars if out not in needed)]))
        needed |= inputs
    place = {atom: i for i, atom in enumerate((*jaxpr.constvars, *jaxpr.invars))}
    slots: list[Any] = [None] * len(place)

    def slot(atom) -> int:
        if isinstance(atom, core.Literal):
            slots.append(np.asarray(atom.val))
            return len(slots) - 1
        if atom not in place:
            place[atom] = len(slots)
            slots.append(None)
        return place[atom]

    steps = [
        _Step(_operation(e), [slot(x) for x in e.invars], [slot(x) for x in e.outvars], [slot(x) for x in over])
        for e, over in reversed(kept)
    ]
    return _Steps(slots, steps, [slot(atom) for atom in jaxpr.outvars])


def _run(jaxpr, consts, args) -> list[np.ndarray]:
    slots, steps, results = _steps(jaxpr)
    known: list[Any] = [*map(np.asarray, (*consts, *args))]
    known += slots[len(known) :]
    for operation, read, written, over in steps:
        for i, value in zip(written, operation([known[i] for i in read]), strict=True):
            known[i] = value
        for i in over:
            known[i] = None
    return [known[i] for i in results]


def _operation(equation) -> Callable[[list[Any]], Any]:
    """The function of a list of arrays that an equation stands for, whose results are in a sequence."""
    primitive, params = equation.primitive, equation.params
    name = primitive.name
    if name in INNER:
        return functools.partial(_inner, params[INNER[name]])
    if name in CONTROL:
        return lambda values: CONTROL[name](values, params)
    dtype = getattr(equation.outvars[0].aval, "dtype", None) if equation.outvars else None
    if name in PLAIN:
        plain = PLAIN[name]
        return lambda values: (np.asarray(plain(*values), dtype),)
    if name in WITH_PARAMETERS:
        function = functools.partial(WITH_PARAMETERS[name], **params)
        return lambda values: (np.asarray(function(*values), dtype),)

    def by_rows(values):
        found = ROWS[name](*values, **params) if name in ROWS else None
        return _by_jax(primitive, values, params) if found is None else (np.asarray(found, dtype),)

    return by_rows


def _inner(closed, values):
    return _run(getattr(closed, "jaxpr", closed), getattr(closed, "consts", ()), values)


def _by_jax(primitive, values, params):
    found = primitive.bind(*map(jnp.asarray, values), **params)
    return [np.asarray(x) for x in (found if primitive.multiple_results else [found])]


def scan_lengths(params: dict[str, Any]) -> tuple[int, int]:
    """Number of constants and of carried values of a scan; since JAX 0.11 in a tree (constants, carried, scanned)."""
    if "ft_in" in params:
        consts, carry, _ = params["ft_in"].unpack()
        return len(consts), len(carry)
    return params["num_consts"], params["num_carry"]


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


def _split(values, params):
    return np.split(values[0], np.cumsum(params["sizes"])[:-1], params["axis"])


CONTROL = {"scan": _scan, "while": _while, "cond": _cond, "split": _split}
