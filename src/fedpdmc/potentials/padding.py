"""A user's function of records, padded to a number of records that other sites share: compiled once for all of them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jaxtyping import Array, Float

from fedpdmc._jax.compilation import on_device
from fedpdmc.potentials.padding_recipe import Recipe, Unpaddable, called, numbers_of
from fedpdmc.potentials.record_axis import compare, pruned

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

    Every sum over records gets weights; `fedpdmc.potentials.record_axis` has the proof that nothing else is needed. Equal
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
    """The program at the padded number of records, and its recipe."""
    closed = _traced(padded, padded.records)
    # A third number of records shows what depends on it even if there is nothing to pad.
    more = 2 * padded.records + 3
    return closed, compare(closed, _traced(padded, more), (padded.records, more))


def _at(function: Any, following: tuple[int, ...], records: int) -> Any:
    """The function with the numbers that follow its records."""
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
    return pruned(closed)


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
    """Lengths of first axes, those of most arrays first."""
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
    from jax._src import source_info_util

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
        with source_info_util.user_context(equation.source_info.traceback):
            if place in recipe.inner:
                found = _run(called(equation), recipe.inner[place], data, values, iter(inner[place]))
            else:
                # Before JAX 0.10 functions among the parameters came apart from them.
                made = equation.primitive.get_bind_params(equation.params)
                functions, params = made if isinstance(made, tuple) else ((), made)
                found = equation.primitive.bind(*functions, *values, **params)
                found = found if equation.primitive.multiple_results else [found]
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
