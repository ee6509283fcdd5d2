"""Programs of model files checked and evaluated: rebuilt from the table of operations, equation by equation."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedpdmc._jax.precision import double_precision
from fedpdmc.errors import InputError
from fedpdmc.models.model_file.operations import OPERATIONS, WHOLE
from fedpdmc.models.model_file.program import Equation, Literal, Name, Operand, Program, Type
from fedpdmc.models.model_file.source import Source

REMEDY = "Give a file from `fedpdmc model build`, unchanged."
# Multiplications and other operations on numbers that all programs of a file together may take.
MOST_WORK = 2**22


def evaluate(program: Program, inputs: dict[str, Any]) -> dict[str, Any]:
    """The results of a program by name."""
    known: dict[int | str, Any] = {**inputs}

    def read(operand: Operand) -> Any:
        return operand.array if isinstance(operand, Literal) else known[operand.label]

    for i, equation in enumerate(program.equations, 1):
        known[i] = _apply(equation, [read(operand) for operand in equation.operands])
    return {name: jnp.asarray(read(operand)) for name, operand in program.results}


def _apply(equation: Equation, values: list[Any]) -> Any:
    params = dict(equation.params)
    if equation.operation == "constant":
        return np.asarray(params["values"], equation.type.dtype).reshape(equation.type.shape)
    return OPERATIONS[equation.operation].apply(equation.type, params, *values)


@double_precision
def check(source: Source, where: str = "model file") -> int:
    """Check every type of a file and return its work: operations on numbers for one record.

    Raises
    ------
    InputError
        At an operation that is not in the table, used wrongly, or with another result than the file says; or where the
        file takes too much work.
    """
    work = 0
    for name, (program, inputs) in source.programs.items():
        types: dict[int | str, Type] = {**inputs}
        for i, equation in enumerate(program.equations, 1):
            place = f"{where}, {name}, %{i}"
            operands = [_type(types, operand, place) for operand in equation.operands]
            _check_form(equation, place)
            work += _work(equation, operands)
            if work > MOST_WORK:
                raise InputError(place, f"more than {MOST_WORK:,} operations for a record", "Give a smaller model.")
            _check_result(equation, operands, place)
            types[i] = equation.type
        _check_results(name, program, types, where)
    _check_group(source, where)
    return work


def _type(types: dict[int | str, Type], operand: Operand, place: str) -> Type:
    if isinstance(operand, Literal):
        return operand.type
    if operand.label not in types:
        raise InputError(place, f"the unknown name {operand.label!r}", REMEDY)
    return types[operand.label]


def _check_form(equation: Equation, place: str) -> None:
    """The operation is known, with its operands and parameters."""
    if equation.operation == "constant":
        return
    operation = OPERATIONS.get(equation.operation)
    if operation is None:
        raise InputError(place, f"the unknown operation {equation.operation!r}", REMEDY)
    least, most = operation.operands
    kinds = {key: WHOLE if isinstance(value, int) else "wholes" for key, value in equation.params}
    ordered = [key for key, _ in equation.params]
    if not least <= len(equation.operands) <= most or kinds != operation.params or ordered != list(operation.params):
        raise InputError(place, f"{equation.operation!r} with other operands or parameters than it has", REMEDY)


def _work(equation: Equation, operands: list[Type]) -> int:
    sizes = [equation.type.size, *(type.size for type in operands)]
    if equation.operation == "dot":
        return sizes[1] * sizes[2]
    return max(sizes)


def _check_result(equation: Equation, operands: list[Type], place: str) -> None:
    """JAX, looking at shapes alone, must find the type that the file says."""
    try:
        found = _abstract(equation, tuple(operands))
    except Exception as error:
        raise InputError(place, f"{equation.operation!r} that JAX refuses: {str(error)[:120]!r}", REMEDY) from error
    if found != equation.type:
        raise InputError(place, f"a result of type {found}, where the file says {equation.type}", REMEDY)


@functools.lru_cache(4096)
def _abstract(equation: Equation, operands: tuple[Type, ...]) -> Type | None:
    # Literals stay numbers, since some operations treat them so.
    at = [i for i, operand in enumerate(equation.operands) if isinstance(operand, Name)]
    samples = [jax.ShapeDtypeStruct(operands[i].shape, operands[i].dtype) for i in at]

    def apply(*values):
        whole: list[Any] = [x.array if isinstance(x, Literal) else None for x in equation.operands]
        for i, value in zip(at, values, strict=True):
            whole[i] = value
        return _apply(equation, whole)

    found = jax.eval_shape(apply, *samples)
    kinds = {"float64": "f64", "int64": "i64", "bool": "bool"}
    return Type(kinds[str(found.dtype)], tuple(found.shape)) if str(found.dtype) in kinds else None


def _check_results(name: str, program: Program, types: dict[int | str, Type], where: str) -> None:
    found = [(label, _type(types, operand, f"{where}, {name}, return")) for label, operand in program.results]
    if name != "variables" and found != [("", Type("f64"))]:
        raise InputError(f"{where}, {name}", "a result that is not a number", "Return one number, of type f64[].")
    if name == "variables" and any(not label or type.kind != "f64" for label, type in found):
        raise InputError(f"{where}, {name}", "a variable that is not an array of real numbers", REMEDY)


def _check_group(source: Source, where: str) -> None:
    """Columns of a group have one entry for each of its rows; those of single records are numbers."""
    shape = () if source.group is None else (source.group.length,)
    for column in source.columns:
        if column.type.shape not in ((), shape):
            raise InputError(where, f"column {column.name!r} of type {column.type}", f"Give shape {shape}.")
    if not source.parameters and not source.predictors:
        raise InputError(where, "no parameters", "Give at least one parameter or predictor.")
    if source.group is not None and source.predictors:
        raise InputError(
            where, "a predictor with a group of rows", "Write the predictor out, with a column for each term."
        )
