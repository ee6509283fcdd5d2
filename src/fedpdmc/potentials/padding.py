"""A user's function of records, padded to a number of records that other sites share: compiled once for all of them."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jaxtyping import Array, Float

from fedpdmc._jax.compilation import on_device
from fedpdmc._jax.programs import INNER, called, prune
from fedpdmc.enclosures.known_functions import bind, is_by_hand


class Unpaddable(Exception):
    """The program is not known to be a function of sums over records."""


class MaskedSum(NamedTuple):
    """An equation that sums over records: the operand in which copies must be masked, and the axis."""

    operand: int
    axis: int


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The changes to a program.

    Attributes
    ----------
    masks : dict
        By the place of an equation.
    inner : dict
        Recipes of the programs that equations call, by the place of the equation, for those that need changes.
    numbers : tuple
        Places of the scalars that depend on the number of records: equation and operand, or −1 and a constant.
    """

    masks: dict[int, MaskedSum]
    inner: dict[int, Recipe]
    numbers: tuple[tuple[int, int], ...]

    @property
    def empty(self) -> bool:
        """Whether the program can be run as it is."""
        return not (self.masks or self.inner or self.numbers)


def numbers_of(recipe: Recipe, closed: core.ClosedJaxpr) -> list[float]:
    """The scalars at the places that the recipe names, in a trace with the same equations."""
    found = []
    for place, operand in recipe.numbers:
        value = closed.consts[operand] if place < 0 else closed.jaxpr.eqns[place].invars[operand].val
        found.append(float(value))
    for place, inner in recipe.inner.items():
        found += numbers_of(inner, _closed(closed.jaxpr.eqns[place]))
    return found


def _closed(equation) -> core.ClosedJaxpr:
    return core.ClosedJaxpr(*called(equation))


# The least padded number of records, and records of a vector.
FEWEST, VECTOR = 32, 16


class PaddedData(NamedTuple):
    """Data with their records padded by copies of the first one.

    Attributes
    ----------
    leaves : tuple of arrays
    weights : (N,)
        One for records, zero for copies.
    numbers : (k,)
        The numbers in the function that depend on how many records there are.
    """

    leaves: tuple[Any, ...]
    weights: Float[Array, " N"]
    numbers: Float[Array, " k"]


class Shape(NamedTuple):
    """Shape and type of an array, and the axis of the records."""

    shape: tuple[int, ...]
    dtype: str
    axis: int | None

    def at(self, records: int) -> jax.ShapeDtypeStruct:
        """The shape for this many records."""
        shape = list(self.shape)
        if self.axis is not None:
            shape[self.axis] = records
        return jax.ShapeDtypeStruct(tuple(shape), np.dtype(self.dtype))


@dataclasses.dataclass(frozen=True)
class Padded:
    """``f(x, data)`` on `PaddedData`: the same number as on the data without their padding.

    Every sum over records gets weights; `fedpdmc.potentials.padding` has the proof that nothing else is needed. Equal
    for sites with the same function whose data agree in all but the number of records. ``following`` are the places of
    Python numbers among the data, ``function.rest``, that say how many records there are.
    """

    function: Callable[[Any, Any], Any]
    structure: Any
    shapes: tuple[Shape, ...]
    records: int
    dim: int
    following: tuple[int, ...] = ()

    def __call__(self, x, data: PaddedData):
        """``f(x, data)``."""
        closed, recipe = _padded_program(self)
        return _run(closed, recipe, data, [x, *data.leaves], iter(range(data.numbers.shape[0])))[0]


@functools.lru_cache(256)
def _padded_program(padded: Padded) -> tuple[core.ClosedJaxpr, Recipe]:
    closed = _traced(padded, padded.records)
    # A third number of records shows what depends on it even if there is nothing to pad.
    more = 2 * padded.records + 3
    return closed, compare(closed, _traced(padded, more), (padded.records, more))


def _at(function: Any, following: tuple[int, ...], records: int) -> Any:
    if not following:
        return function
    rest = tuple((records,) if i in following else part for i, part in enumerate(function.rest))
    return dataclasses.replace(function, rest=rest)


def _traced(padded: Padded, records: int) -> core.ClosedJaxpr:
    function = _at(padded.function, padded.following, records)
    x = jax.ShapeDtypeStruct((padded.dim,), jnp.float64)
    leaves = [shape.at(records) for shape in padded.shapes]
    try:
        closed = jax.make_jaxpr(lambda x, *parts: function(x, jax.tree.unflatten(padded.structure, parts)))(x, *leaves)
    except Exception as error:
        raise Unpaddable(f"with {records} records it raises {type(error).__name__}") from error
    return prune(closed)


def _flat(recipe: Recipe, path: tuple[int, ...] = ()) -> tuple[set, set]:
    masks = {(*path, place, *mask) for place, mask in recipe.masks.items()}
    numbers = {(*path, *place) for place in recipe.numbers}
    for place, inner in recipe.inner.items():
        more = _flat(inner, (*path, place))
        masks, numbers = masks | more[0], numbers | more[1]
    return masks, numbers


def pad(function: Callable, data: Any, dim: int, size: int) -> tuple[Padded, PaddedData]:
    """A user's function ``f(x, data)`` of ``dim`` parameters and its data, a pytree of arrays, padded to ``size`` records.

    Raises
    ------
    Unpaddable
        It is not known to be a function of sums over records; says why.
    """
    leaves, structure = jax.tree.flatten(data)
    reason = Unpaddable("its data have no records")
    for n in _candidates(leaves, size):
        axes = [_record_axis(leaf.shape, n) for leaf in leaves]
        shapes = [Shape(leaf.shape, str(leaf.dtype), axis) for leaf, axis in zip(leaves, axes, strict=True)]
        common = tuple(shape._replace(shape=shape.at(size).shape) for shape in shapes)
        rest = getattr(function, "rest", ())
        counts = tuple(i for i, part in enumerate(rest) if part is not None and type(part[0]) is int and part[0] == n)
        for following in (counts, ()) if counts else ((),):
            padded = Padded(_at(function, following, size), structure, common, size, dim, following)
            try:
                numbers = _fitted(padded, n)
            except Unpaddable as error:
                reason = error
                continue
            return padded, _padded_data(leaves, axes, n, size, numbers)
    raise reason


def _fitted(padded: Padded, n: int) -> list[float]:
    """The numbers with which the padded program computes the user's function on n records; proved for this n."""
    closed, recipe = _padded_program(padded)
    own = _traced(padded, n)
    if n == padded.records:
        return numbers_of(recipe, own)
    masks, numbers = _flat(compare(own, closed, (n, padded.records)))
    wanted, known = _flat(recipe)
    if masks != wanted or not numbers <= known:
        raise Unpaddable("it is another program for another number of records")
    return numbers_of(recipe, own)


def _candidates(leaves, most: int) -> list[int]:
    lengths = [leaf.shape[0] for leaf in leaves if leaf.ndim and 0 < leaf.shape[0] <= most]
    return sorted(set(lengths), key=lambda n: (-lengths.count(n), -n))


def _record_axis(shape: tuple[int, ...], n: int) -> int | None:
    return shape.index(n) if n in shape and (n > 1 or shape[0] == n) else None


def _padded_data(leaves, axes, n: int, size: int, numbers: list[float]) -> PaddedData:
    rows = np.where(np.arange(size) < n, np.arange(size), 0)
    longer = tuple(
        leaf if axis is None else on_device(np.take(np.asarray(leaf), rows, axis))
        for leaf, axis in zip(leaves, axes, strict=True)
    )
    weights = on_device((np.arange(size) < n).astype(np.float64))
    return PaddedData(longer, weights, on_device(np.asarray(numbers, np.float64)))


def _run(closed: core.ClosedJaxpr, recipe: Recipe, data: PaddedData, args, places) -> list[Any]:
    """Evaluate a program equation by equation, with weights in its sums over records."""
    known: dict[Any, Any] = dict(zip(closed.jaxpr.invars, args, strict=True))
    known.update(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    numbers = {place: next(places) for place in recipe.numbers}

    def read(atom, place) -> Any:
        value = atom.val if isinstance(atom, core.Literal) else known[atom]
        return lax.convert_element_type(data.numbers[numbers[place]], _type(atom)) if place in numbers else value

    for i, variable in enumerate(closed.jaxpr.constvars):
        known[variable] = read(variable, (-1, i))
    inner = {place: _reserved(found, places) for place, found in recipe.inner.items()}
    for place, equation in enumerate(closed.jaxpr.eqns):
        values = [read(atom, (place, i)) for i, atom in enumerate(equation.invars)]
        if place in recipe.masks:
            operand, axis = recipe.masks[place]
            values[operand] = _masked(values[operand], data.weights, axis)
        if place in recipe.inner:
            found = _run(_closed(equation), recipe.inner[place], data, values, iter(inner[place]))
        else:
            found = bind(equation, values)
        known.update(zip(equation.outvars, found, strict=True))
    return [read(atom, None) for atom in closed.jaxpr.outvars]


def _type(atom: Any) -> Any:
    return atom.aval.dtype


def _reserved(recipe: Recipe, places) -> list[int]:
    """The places of all numbers of a program within, in the order of `numbers_of`."""
    own = [next(places) for _ in recipe.numbers]
    return own + [place for inner in recipe.inner.values() for place in _reserved(inner, places)]


def _masked(value, weights, axis: int):
    """Values times their weights, which are zero for copies of records; the copies are finite where the records are."""
    return value * lax.broadcast_in_dim(lax.convert_element_type(weights, value.dtype), value.shape, (axis,))


def bucket(n: int) -> int:
    """The padded number of records: powers of two from 32 to 1024, then steps of an eighth of a power of two."""
    if n <= FEWEST:
        return FEWEST
    power = 1 << (n - 1).bit_length()
    if power <= 1024:
        return power
    step = power // 16
    return -(-n // step) * step


def whole_vectors(n: int) -> int:
    """The number of records with padding that only fills vectors."""
    return -(-n // VECTOR) * VECTOR


# The axis of the records -----------------------------------------------------------------------------------------------


def compare(one: core.ClosedJaxpr, other: core.ClosedJaxpr, sizes: tuple[int, int]) -> Recipe:
    """How the longer of two traces computes the result of the shorter one; their first arguments are parameters.

    Raises
    ------
    Unpaddable
        The invariant is not proved.
    """
    parameters = [True] + [False] * (len(one.jaxpr.invars) - 1)
    recipe = _compare(one.jaxpr, one.consts, other.jaxpr, other.consts, sizes, parameters)
    if any(_axis(a, b, sizes) is not None for a, b in zip(one.jaxpr.outvars, other.jaxpr.outvars, strict=True)):
        raise Unpaddable("its value has one entry for each record")
    return recipe


def _compare(one: core.Jaxpr, consts, other: core.Jaxpr, other_consts, sizes, varying: list[bool]) -> Recipe:
    if len(one.eqns) != len(other.eqns) or len(one.invars) != len(other.invars) or len(consts) != len(other_consts):
        raise Unpaddable("it is another program for another number of records")
    numbers, masks, inner = [], {}, {}
    pairs = dict(zip((*one.constvars, *one.invars), (*other.constvars, *other.invars), strict=True))
    for i, (value, its) in enumerate(zip(consts, other_consts, strict=True)):
        if np.shape(value) == () == np.shape(its) and value != its:
            numbers.append((-1, i))
        elif not _equal(value, its):
            raise Unpaddable("an array that is not among the data depends on the number of records")
    varies = {variable for variable, does in zip(other.invars, varying, strict=True) if does}
    for place, (a, b) in enumerate(zip(one.eqns, other.eqns, strict=True)):
        if a.primitive is not b.primitive:
            raise Unpaddable("it is another program for another number of records")
        for i, (x, y) in enumerate(zip(a.invars, b.invars, strict=True)):
            if _atoms(pairs, x, y):
                numbers.append((place, i))
        axes = [_axis(x, y, sizes) for x, y in zip(a.invars, b.invars, strict=True)]
        outs = [_axis(x, y, sizes) for x, y in zip(a.outvars, b.outvars, strict=True)]
        moved = [not isinstance(y, core.Literal) and y in varies for y in b.invars]
        found = _equation(a, b, axes, outs, sizes, moved)
        if isinstance(found, MaskedSum):
            masks[place] = found
        elif isinstance(found, Recipe) and not found.empty:
            inner[place] = found
        pairs.update(zip(a.outvars, b.outvars, strict=True))
        varies.update(b.outvars if any(moved) else ())
    for x, y in zip(one.outvars, other.outvars, strict=True):
        if _atoms(pairs, x, y):
            raise Unpaddable("its value depends on the number of records alone")
    return Recipe(masks, inner, tuple(numbers))


def _atoms(pairs: dict[Any, Any], x, y) -> bool:
    """Whether two operands are numbers that differ; anything but the same variables or numbers is refused."""
    literals = isinstance(x, core.Literal), isinstance(y, core.Literal)
    if not any(literals):
        if pairs.get(x) is not y:
            raise Unpaddable("it is another program for another number of records")
        return False
    if not all(literals) or np.shape(x.val) or np.shape(y.val):
        raise Unpaddable("it is another program for another number of records")
    return not _equal(x.val, y.val)


def _axis(x, y, sizes: tuple[int, int]) -> int | None:
    """The record axis of a value, None if it has none."""
    one, other = x.aval, y.aval
    if one.dtype != other.dtype or len(one.shape) != len(other.shape):
        raise Unpaddable("it is another program for another number of records")
    found = [i for i, lengths in enumerate(zip(one.shape, other.shape, strict=True)) if lengths[0] != lengths[1]]
    if not found:
        return None
    if len(found) > 1:
        raise Unpaddable("it has a value with an entry for every pair of records")
    if (one.shape[found[0]], other.shape[found[0]]) != sizes:
        raise Unpaddable("it has a value with an axis that grows with the records and is not theirs")
    return found[0]


def _equal(one: Any, other: Any) -> bool:
    """Equality of parameters and constants, exact."""
    if hasattr(one, "eqns") or hasattr(one, "jaxpr"):
        return _same_program(one, other)
    if isinstance(one, (np.ndarray, np.generic, jax.Array)) or isinstance(other, (np.ndarray, np.generic, jax.Array)):
        one, other = np.asarray(one), np.asarray(other)
        same = one.dtype == other.dtype and one.shape == other.shape
        return bool(same and np.array_equal(one, other, equal_nan=one.dtype.kind == "f"))
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one):
        return math.isnan(other)
    return type(one) is type(other) and bool(one == other)


def _same_program(one: Any, other: Any) -> bool:
    parts = [(x.jaxpr, x.consts) if hasattr(x, "consts") else (x, ()) for x in (one, other)]
    try:
        return _compare(*parts[0], *parts[1], (0, 0), [True] * len(parts[1][0].invars)).empty
    except Unpaddable:
        return False


# Parameters of calls that say how they are compiled or differentiated.
IGNORED = ("jvp_jaxpr_fun", "jvp_fun", "fwd_jaxpr_thunk", "bwd", "out_trees", "policy", "in_shardings", "out_shardings",
           "in_layouts", "out_layouts", "ctx_mesh", "donated_invars")  # fmt: skip

# One equation ---------------------------------------------------------------------------------------------------------


def _equation(a, b, axes, outs, sizes, varies) -> MaskedSum | Recipe | None:
    name = b.primitive.name
    if name in INNER:
        return _call(a, b, sizes, varies)
    if all(axis is None for axis in (*axes, *outs)):
        _same_params(a, b)
        return None
    made = all(axis is None for axis in axes) and name != "broadcast_in_dim"
    if name not in RULES or made:
        raise Unpaddable(f"the primitive {name!r} is used across records")
    return RULES[name](a, b, axes, outs, varies)


def _call(a, b, sizes, varies) -> Recipe:
    _same_params(a, b, *IGNORED, INNER[b.primitive.name])
    one, other = _closed(a), _closed(b)
    recipe = _compare(one.jaxpr, one.consts, other.jaxpr, other.consts, sizes, varies)
    if b.primitive.name.startswith("custom"):
        # Its derivative is another program, which is not examined: it is trusted if it is known to be the derivative.
        if not recipe.empty or is_by_hand(b):
            raise Unpaddable("it calls a function with a derivative of its own")
    return recipe


def _same_params(a, b, *but: str) -> None:
    one, other = a.params, b.params
    if one.keys() != other.keys() or not all(_equal(one[k], other[k]) for k in one if k not in but):
        raise Unpaddable(f"the primitive {b.primitive.name!r} depends on the number of records")


def _need(true: Any, what: str = "") -> None:
    if not true:
        raise Unpaddable(f"its records are {what or 'rearranged'}")


def _only(axes) -> int | None:
    found = [i for i, axis in enumerate(axes) if axis is not None]
    return found[0] if len(found) == 1 else None


def _elementwise(a, b, axes, outs, varies) -> None:
    """Row by row: operands are scalars, or have the shape of the result but for axes of length one."""
    _same_params(a, b)
    shape = b.outvars[0].aval.shape
    _need(all(_fits(x.aval.shape, shape) for x in b.invars))
    _need(all(axis in (None, outs[0]) for axis in axes))


def _fits(own: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    return not own or len(own) == len(shape) and all(m in (1, n) for m, n in zip(own, shape, strict=True))


def _broadcast(a, b, axes, outs, varies) -> None:
    """Rows stay rows; a new record axis holds one value throughout."""
    _same_params(a, b, "shape", "sharding")
    _need(len(axes) == 1 and outs[0] is not None)
    dims, shape = b.params["broadcast_dimensions"], b.invars[0].aval.shape
    if axes[0] is not None:
        _need(dims[axes[0]] == outs[0])
    else:
        _need(outs[0] not in dims or shape[dims.index(outs[0])] == 1)


def _reshape(a, b, axes, outs, varies) -> None:
    """The entries before and after the record axis may be distributed differently among axes."""
    _same_params(a, b, "new_sizes", "sharding")
    _need(axes[0] is not None and outs[0] is not None and b.params["dimensions"] is None)
    for equation in (a, b):
        old, new = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
        _need(math.prod(old[: axes[0]]) == math.prod(new[: outs[0]]))


def _without(removed: str) -> Callable:

    def rule(a, b, axes, outs, varies) -> None:
        _same_params(a, b)
        axis, gone = axes[0], b.params[removed]
        _need(_only(axes) == 0 and axis not in gone, "compared with each other")
        _need(all(out == axis - sum(g < axis for g in gone) for out in outs))

    return rule


def _along(parameter: str) -> Callable:
    """The rule of a primitive that acts along an axis other than that of the records."""

    def rule(a, b, axes, outs, varies) -> None:
        _same_params(a, b)
        along = b.params[parameter]
        along = along if isinstance(along, tuple) else (along,)
        _need(len(set(axes)) == 1 and axes[0] is not None and axes[0] not in along, "ordered")
        _need(all(out == axes[0] for out in outs))

    return rule


def _reduce_sum(a, b, axes, outs, varies) -> MaskedSum | None:
    if axes[0] not in b.params["axes"]:
        return _without("axes")(a, b, axes, outs, varies)
    _same_params(a, b)
    _need(len(axes) == 1 and outs[0] is None)
    return MaskedSum(0, axes[0])


def _transpose(a, b, axes, outs, varies) -> None:
    _same_params(a, b)
    _need(outs[0] == b.params["permutation"].index(axes[0]))


def _slice(a, b, axes, outs, varies) -> None:
    """All rows, or the same first ones: those that the shorter program has."""
    _same_params(a, b, "limit_indices")
    axis = axes[0]
    start, strides = b.params["start_indices"], b.params["strides"]
    limits = a.params["limit_indices"], b.params["limit_indices"]
    _need(all(one == other for i, (one, other) in enumerate(zip(*limits, strict=True)) if i != axis))
    if outs[0] is None:
        _need(limits[0][axis] == limits[1][axis])
    else:
        _need(outs[0] == axis and start[axis] == 0 and (strides is None or strides[axis] == 1))


def _dynamic_slice(a, b, axes, outs, varies) -> None:
    """All rows: a slice that is as long as its operand starts at zero, whatever start was given."""
    _same_params(a, b, "slice_sizes")
    _need(_only(axes) == 0 and outs[0] == axes[0])
    sizes = zip(a.params["slice_sizes"], b.params["slice_sizes"], strict=True)
    _need(all(one == other for i, (one, other) in enumerate(sizes) if i != axes[0]))


def _pad(a, b, axes, outs, varies) -> None:
    _same_params(a, b)
    _need(_only(axes) == 0 and outs[0] == axes[0] and tuple(b.params["padding_config"][axes[0]]) == (0, 0, 0))


def _batched(a, b, axes, outs, varies) -> None:
    _same_params(a, b)
    ranks = {len(x.aval.shape) for x in b.invars}
    _need(len(set(axes)) == 1 and axes[0] is not None and len(ranks) == 1 and axes[0] < ranks.pop() - 2)
    _need(all(out == axes[0] for out in outs))


def _dot_general(a, b, axes, outs, varies) -> MaskedSum | None:
    _same_params(a, b, "out_sharding")
    (left, right), (left_batch, right_batch) = b.params["dimension_numbers"]
    one, other = axes
    if one is not None and other is not None:
        if one in left:
            _need(right[left.index(one)] == other and outs[0] is None)
            # Masking a value that does not depend on the parameters is free.
            return MaskedSum(0, one) if not varies[0] or varies[1] else MaskedSum(1, other)
        _need(one in left_batch and right_batch[left_batch.index(one)] == other, "compared with each other")
        _need(outs[0] == left_batch.index(one))
        return None
    side = 0 if one is not None else 1
    axis, taken = axes[side], ((*left, *left_batch), (*right, *right_batch))
    _need(axis not in taken[side])
    free = [[i for i in range(len(x.aval.shape)) if i not in taken[k]] for k, x in enumerate(b.invars)]
    _need(outs[0] == len(left_batch) + (len(free[0]) if side else 0) + free[side].index(axis))
    return None


def _gather(a, b, axes, outs, varies) -> None:
    """Whole rows of other axes, entries of a table for every record, or of a row of its own for every record."""
    _same_params(a, b, "slice_sizes")
    numbers, sizes = b.params["dimension_numbers"], b.params["slice_sizes"]
    table, index = axes
    operand, places = (x.aval.shape for x in b.invars)
    rank = len(b.outvars[0].aval.shape)
    _need(all(p == q for i, (p, q) in enumerate(zip(a.params["slice_sizes"], sizes, strict=True)) if i != table))
    batch = [i for i in range(rank) if i not in numbers.offset_dims]
    if table is None:
        _need(index < len(places) - 1 and index not in numbers.start_indices_batching_dims)
        _need(outs[0] == batch[index])
    elif index is None:
        gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
        _need(table not in gone and table not in numbers.start_index_map)
        _need(all(e.params["slice_sizes"][table] == e.invars[0].aval.shape[table] for e in (a, b)))
        kept = [i for i in range(len(operand)) if i not in gone]
        _need(outs[0] == numbers.offset_dims[kept.index(table)])
    else:
        _need(table in numbers.operand_batching_dims and index < len(places) - 1)
        _need(all(e.params["slice_sizes"][table] == 1 for e in (a, b)))
        _need(numbers.start_indices_batching_dims[numbers.operand_batching_dims.index(table)] == index)
        _need(outs[0] == batch[index])


def _scatter_add(a, b, axes, outs, varies) -> MaskedSum:
    _same_params(a, b)
    numbers, (table, index, update) = b.params["dimension_numbers"], axes
    if table is not None or outs[0] is not None or index is None or update is None:
        raise Unpaddable("its records are rearranged")
    _need(not numbers.operand_batching_dims and not numbers.scatter_indices_batching_dims)
    scattered = [i for i in range(len(b.invars[2].aval.shape)) if i not in numbers.update_window_dims]
    _need(update in scattered and scattered.index(update) == index and index < len(b.invars[1].aval.shape) - 1)
    return MaskedSum(2, update)


ELEMENTWISE = """
abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp convert_element_type copy
copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac integer_pow is_finite
le lgamma log log1p logistic lt max min mul ne neg nextafter not or polygamma pow real reduce_precision
regularized_incomplete_beta rem round rsqrt select_n sign sin sinh sqrt square stop_gradient sub tan tanh xor zeta
""".split()

RULES: dict[str, Callable] = dict.fromkeys(ELEMENTWISE, _elementwise) | {
    "broadcast_in_dim": _broadcast, "cholesky": _batched, "concatenate": _along("dimension"), "dot_general": _dot_general,
    "dynamic_slice": _dynamic_slice, "gather": _gather, "pad": _pad, "reduce_sum": _reduce_sum, "reshape": _reshape,
    "rev": _along("dimensions"), "scatter-add": _scatter_add, "slice": _slice, "sort": _along("dimension"),
    "split": _along("axis"), "squeeze": _without("dimensions"), "transpose": _transpose, "triangular_solve": _batched,
}  # fmt: skip
RULES |= dict.fromkeys(("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum"), _along("axis"))
RULES |= dict.fromkeys(("reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod"), _without("axes"))
