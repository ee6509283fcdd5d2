"""A model file mapped over the records of a site: the sum of its minus log likelihoods, as any other model of a site."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from fedpdmc._jax.precision import double_precision
from fedpdmc.errors import InputError
from fedpdmc.models.model_file.allowed_operations import FileColumn, Source, evaluate
from fedpdmc.models.user_function import UserModel
from fedpdmc.potentials import Potential, Program
from fedpdmc.potentials.padding import bucket
from fedpdmc.validation import record_weights

if TYPE_CHECKING:
    from fedpdmc.models.model_file.model import Model

# The name of the matrix of the linear predictors among the data, which no column can have.
# Fewer records than this cost nothing compared with a compilation.
LEAST_ROWS = 128
DESIGN, WEIGHTS, CONSTANTS = "X ", "weights ", "constants "


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the coordinates are: coefficients of the predictors first, one row of them for each entry, then parameters."""

    source: Source
    width: int

    @property
    def dim(self) -> int:
        """Number of coordinates."""
        coefficients = sum(one.type.size for one in self.source.predictors) * self.width
        return coefficients + sum(one.type.size for one in self.source.parameters)

    def split(self, x: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Coefficients of shape (…, width) by predictor, and parameters by name."""
        begin, found = 0, ({}, {})
        for kind, part in enumerate((self.source.predictors, self.source.parameters)):
            for one in part:
                shape = (*one.type.shape, self.width) if kind == 0 else one.type.shape
                size = int(np.prod(shape, dtype=int))
                found[kind][one.name] = jnp.reshape(x[begin : begin + size], shape)
                begin += size
        return found

    def names(self, terms: Sequence[str] | None, entries: Sequence[str] = ()) -> tuple[str, ...]:
        """Names of the coordinates; terms name the columns of X, entries those of a predictor of several numbers."""
        names: list[str] = []
        for one in self.source.predictors:
            for entry in np.ndindex(one.type.shape):
                label = str(entries[int(entry[0])]) if len(entries) == one.type.size and entry else ""
                names += self._coefficients(one.name, entry, label, terms)
        for one in self.source.parameters:
            index = [f"[{','.join(map(str, i))}]" if i else "" for i in np.ndindex(one.type.shape)]
            names += [f"{one.name}{i}" for i in index]
        return tuple(names)

    def _coefficients(
        self, predictor: str, entry: tuple[int, ...], label: str, terms: Sequence[str] | None
    ) -> list[str]:
        """Named after the terms alone where there is one predictor."""
        single = len(self.source.predictors) == 1
        of = "" if single else f"{predictor}: "
        if terms is not None:
            return [f"{of}{term}" + (f"[{label or entry[0]}]" if entry else "") for term in terms]
        name = "beta" if single else f"beta_{predictor}"
        return [f"{name}[{','.join(map(str, (*entry, j)))}]" for j in range(self.width)]


@dataclasses.dataclass(frozen=True)
class RecordSum:
    """``Σ_i w_i f(x, row_i)``: weights are those of records, and zero for copies of one that fill up the arrays."""

    model: Model
    width: int

    def terms(self, x, data):
        """``w_i f(x, row_i)`` of all records."""
        source = self.model.source
        coefficients, parameters = Layout(source, self.width).split(x)
        rows = {name: value for name, value in data.items() if name not in (DESIGN, WEIGHTS, CONSTANTS)}
        for name, value in coefficients.items():
            rows[name] = data[DESIGN] @ value.T

        def one(row):
            return evaluate(source.likelihood, {**parameters, **data[CONSTANTS], **row})[""]

        return jax.vmap(one)(rows) * data[WEIGHTS]

    def __call__(self, x, data):
        """Minus the log likelihood of all records."""
        return jnp.sum(self.terms(x, data))


@dataclasses.dataclass(frozen=True, eq=False)
class FileVariables:
    """The variables of a model file: the coefficients, and what its program makes of the parameters."""

    source: Source
    width: int
    own: tuple[str, ...]

    def named(self, names: tuple[str, ...]) -> FileVariables:
        """The same variables with other names of the coordinates."""
        return dataclasses.replace(self, own=names)

    def __call__(self, x) -> dict[str, Any]:
        """Variables by name; a coordinate that no variable replaces keeps its own."""
        program = self.source.variables
        if program is None:
            return {name: x[i] for i, name in enumerate(self.own)}
        layout = Layout(self.source, self.width)
        _, parameters = layout.split(x)
        kept = layout.dim - sum(one.type.size for one in self.source.parameters)
        found = {name: x[i] for i, name in enumerate(self.own[:kept])}
        at, made = kept, evaluate(program, parameters)
        for one in self.source.parameters:
            if one.name not in program.used():
                found |= {self.own[i]: x[i] for i in range(at, at + one.type.size)}
            at += one.type.size
        return {**found, **made}


@dataclasses.dataclass(frozen=True, eq=False)
class RecordModel(UserModel):
    """A model file with the records of a site."""

    @property
    def records(self) -> int:
        """Number of records."""
        return int(self.data[WEIGHTS].shape[0])

    @double_precision
    def sized(self, dim: int, name: str) -> Potential:
        """The potential, with its records filled up to a number that other sites share."""
        super().sized(dim, name)
        return self.padded(dim, name, max(bucket(self.records), LEAST_ROWS))

    @double_precision
    def padded(self, dim: int, name: str, size: int) -> Potential:
        """The potential with its records filled up to ``size`` by copies of the first, of weight zero."""
        n = self.records
        rows = np.where(np.arange(size) < n, np.arange(size), 0)

        def longer(key, value):
            return value if key == CONSTANTS else jnp.asarray(np.asarray(value)[rows])

        data = {key: longer(key, value) for key, value in self.data.items()}
        data[WEIGHTS] = data[WEIGHTS] * jnp.asarray((np.arange(size) < n).astype(float))
        return Program(self.function, data, dim, records=size)


@double_precision
def record_model(
    model: Model, columns: Mapping[str, Any], X: Any, constants: Mapping[str, Any], terms: Sequence[str] | None,
    weights: Any = None,
) -> RecordModel:  # fmt: skip
    """See `Model.of`."""
    source = model.source
    wanted = {column.name: column for column in source.columns}
    _same_names("columns", columns, [*wanted, *([] if source.group is None else [source.group.mask])])
    _same_names("constants", constants, [one.name for one in source.constants])
    data: dict[str, Any] = {name: check_column(column, columns[name]) for name, column in wanted.items()}
    if source.group is not None:
        mask = FileColumn(source.group.mask, source.inputs[source.group.mask], "binary")
        data[source.group.mask] = check_column(mask, columns[source.group.mask])
    lengths = {name: len(value) for name, value in data.items()}
    width = 0
    if source.predictors:
        data[DESIGN] = _design(X)
        lengths["X"], width = data[DESIGN].shape
    elif X is not None:
        raise InputError("Model.of(X)", "a matrix", "This model has no linear predictor: leave X out.")
    if len(set(lengths.values())) > 1:
        raise InputError("Model.of", f"numbers of records {lengths}", "Give one entry of every column for each record.")
    if terms is not None and len(terms) != width:
        raise InputError("Model.of(names)", f"{len(terms)} names", f"Give one for each of {width} columns of X.")
    count = next(iter(lengths.values()), 0)
    layout = Layout(source, width)
    names = layout.names(terms)
    arrays: dict[str, Any] = {name: jnp.asarray(value) for name, value in data.items()}
    arrays[CONSTANTS] = {one.name: _constant(one, constants[one.name]) for one in source.constants}
    arrays[WEIGHTS] = jnp.ones(count) if weights is None else jnp.asarray(record_weights("weights", weights, count))
    return RecordModel(RecordSum(model, width), arrays, layout.dim, names, FileVariables(source, width, names))


def _same_names(argument: str, given: Mapping[str, Any], wanted: Sequence[str]) -> None:
    if set(given) != set(wanted):
        raise InputError(
            f"Model.of({argument})", f"{', '.join(map(repr, given)) or 'none'}", f"Give {', '.join(wanted) or 'none'}."
        )


def _design(X: Any) -> np.ndarray:
    if X is None:
        raise InputError("Model.of(X)", "None", "Give the matrix of the linear predictor, of shape (n, p).")
    array = np.asarray(X, float)
    if array.ndim != 2 or not array.shape[1] or not np.isfinite(array).all():
        raise InputError("Model.of(X)", f"shape {array.shape}", "Give a finite matrix of shape (n, p), p at least one.")
    return array


def _constant(one, value: Any) -> Any:
    array = np.asarray(value, float)
    if array.shape != one.type.shape or not np.isfinite(array).all():
        raise InputError(
            f"Model.of(constants: {one.name})",
            f"shape {array.shape}",
            f"Give finite numbers of shape {one.type.shape}.",
        )
    return jnp.asarray(array)


# What values of a domain satisfy, and words for it.
CHECKS = {
    "real": (lambda v: np.isfinite(v), "finite numbers"),
    "positive": (lambda v: np.isfinite(v) & (v > 0), "positive numbers"),
    "nonnegative": (lambda v: np.isfinite(v) & (v >= 0), "numbers of at least zero"),
    "unit": (lambda v: (v > 0) & (v < 1), "numbers between 0 and 1"),
    "binary": (lambda v: (v == 0) | (v == 1), "zeros and ones"),
    "count": (lambda v: np.isfinite(v) & (v >= 0) & (v == np.round(v)), "whole numbers of at least zero"),
}


def check_column(column: FileColumn, value: Any) -> np.ndarray:
    """The values of a column, or an error that names the first bad one."""
    where = f"column {column.name!r}"
    try:
        array = np.asarray(value, float)
    except (TypeError, ValueError) as error:
        raise InputError(where, f"{type(value).__name__} that is not numeric", "Give an array of numbers.") from error
    if array.ndim != 1 + len(column.type.shape) or array.shape[1:] != column.type.shape:
        raise InputError(
            where, f"shape {array.shape}", f"Give shape (n{''.join(f', {n}' for n in column.type.shape)})."
        )
    if column.domain == "index":
        good, words = (array == np.round(array)) & (array >= 0) & (array < column.levels), f"0 to {column.levels - 1}"
    else:
        test, words = CHECKS[column.domain]
        good = test(array)
    bad = np.argwhere(~good)
    if len(bad):
        index = tuple(int(i) for i in bad[0])
        raise InputError(where, f"{array[index]:g} at index {index}", f"Give {words}.")
    return array.astype(column.type.dtype)
