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
from jax.core import Tracer
from jax.extend import core

from fedpdmc._jax.numpy_rules import PLAIN, ROWS, WITH_PARAMETERS

T = TypeVar("T")

# Primitives that call a program of their own, and the parameter that holds it.
INNER = {
    "jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr", "checkpoint": "jaxpr",
    "remat": "jaxpr", "remat2": "jaxpr", "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
}  # fmt: skip
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
        for inner in _programs(equation):
            total += np.array([1, turns, turns]) * _work(inner)
    return total


def _is_key(variable) -> bool:
    return jnp.issubdtype(variable.aval.dtype, jax.dtypes.extended)


def _programs(equation) -> list[Any]:
    """The programs that an equation calls."""
    values = jax.tree.leaves(
        list(equation.params.values()), is_leaf=lambda x: isinstance(x, (core.Jaxpr, core.ClosedJaxpr))
    )
    return [getattr(x, "jaxpr", x) for x in values if isinstance(x, (core.Jaxpr, core.ClosedJaxpr))]


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
