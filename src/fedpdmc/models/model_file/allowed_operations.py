"""Programs of model files: typed values, each made by one operation of a table from values before it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy import special

from fedpdmc._jax.precision import double_precision
from fedpdmc.errors import InputError

KINDS = {"f64": np.dtype(np.float64), "i64": np.dtype(np.int64), "bool": np.dtype(np.bool_)}


class Type(NamedTuple):
    """Kind of number and shape of a value, written ``f64[3,2]``."""

    kind: str
    shape: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind}[{','.join(map(str, self.shape))}]"

    @property
    def dtype(self) -> np.dtype:
        """The type of NumPy."""
        return KINDS[self.kind]

    @property
    def size(self) -> int:
        """Number of entries."""
        return math.prod(self.shape)


class Name(NamedTuple):
    """An operand: the result of an equation, by its number, or an input, by its name."""

    label: int | str

    def __str__(self) -> str:
        return f"%{self.label}" if isinstance(self.label, int) else self.label


class Literal(NamedTuple):
    """An operand: a number."""

    value: float | int | bool

    def __str__(self) -> str:
        return str(self.value).lower() if isinstance(self.value, bool) else repr(self.value)

    @property
    def type(self) -> Type:
        """A scalar of its kind."""
        kind = "bool" if isinstance(self.value, bool) else "i64" if isinstance(self.value, int) else "f64"
        return Type(kind)

    @property
    def array(self) -> np.ndarray:
        """The number as a value of a program."""
        return np.asarray(self.value, self.type.dtype)


Operand = Name | Literal


class Equation(NamedTuple):
    """One line of a program.

    Attributes
    ----------
    operation : str
        Its name in the table of `OPERATIONS`.
    operands : tuple of Operand
    params : tuple of (name, value)
        Numbers and lists of numbers that belong to the operation, such as axes.
    type : Type
        Of the result.
    """

    operation: str
    operands: tuple[Operand, ...]
    params: tuple[tuple[str, Any], ...]
    type: Type


class FileProgram(NamedTuple):
    """Equations, numbered from one, and what they return.

    Attributes
    ----------
    equations : tuple of Equation
    results : tuple of (name, operand)
        The name is empty where there is one result without a name.
    """

    equations: tuple[Equation, ...]
    results: tuple[tuple[str, Operand], ...]

    def types(self, inputs: dict[str, Type]) -> dict[int | str, Type]:
        """Types of all inputs and results of equations."""
        return {**inputs, **{i: equation.type for i, equation in enumerate(self.equations, 1)}}

    def used(self) -> set[str]:
        """Names of the inputs that occur."""
        operands = [x for equation in self.equations for x in equation.operands] + [x for _, x in self.results]
        return {x.label for x in operands if isinstance(x, Name) and isinstance(x.label, str)}


# What the values of a column can be. ``index`` is a whole number from zero, with its number of levels.
DOMAINS = ("real", "positive", "nonnegative", "unit", "binary", "count", "index")


class Parameter(NamedTuple):
    """Unconstrained coordinates by one name."""

    name: str
    type: Type


class Predictor(NamedTuple):
    """Linear predictors ``X·β``, one for each entry; the contract's formula gives X. Without intercept, X has none."""

    name: str
    type: Type
    intercept: bool = True


class FileColumn(NamedTuple):
    """A value of each record, or of each row of a group of rows."""

    name: str
    type: Type
    domain: str
    levels: int = 0


class Constant(NamedTuple):
    """Numbers that the contract gives, the same for all records of a site."""

    name: str
    type: Type


class RowGroup(NamedTuple):
    """A record is a group of at most ``length`` rows; ``mask`` is one for its rows and zero for what fills it up."""

    length: int
    mask: str


class Source(NamedTuple):
    """A model file.

    Attributes
    ----------
    title : str
    parameters, predictors, columns, constants : tuples
        The inputs. Together with the names of the group's mask no two have the same name.
    group : Group or None
    likelihood : Program
        Minus the log likelihood of one record, a number.
    variables : Program or None
        Named functions of the parameters, for results.
    prior : Program or None
        Minus the log prior density of the parameters, a number.
    """

    title: str
    parameters: tuple[Parameter, ...]
    predictors: tuple[Predictor, ...]
    columns: tuple[FileColumn, ...]
    constants: tuple[Constant, ...]
    group: RowGroup | None
    likelihood: FileProgram
    variables: FileProgram | None = None
    prior: FileProgram | None = None

    @property
    def inputs(self) -> dict[str, Type]:
        """All inputs of the likelihood."""
        inputs: dict[str, Type] = {}
        for part in (self.parameters, self.predictors, self.columns, self.constants):
            inputs |= {one.name: one.type for one in part}
        return inputs if self.group is None else {**inputs, self.group.mask: Type("f64", (self.group.length,))}

    @property
    def own(self) -> dict[str, Type]:
        """The inputs of variables and prior: the parameters alone."""
        return {one.name: one.type for one in self.parameters}

    @property
    def programs(self) -> dict[str, tuple[FileProgram, dict[str, Type]]]:
        """The programs with their inputs, by their names in the file."""
        found = {"minus_log_likelihood": (self.likelihood, self.inputs)}
        if self.variables is not None:
            found["variables"] = (self.variables, self.own)
        if self.prior is not None:
            found["minus_log_prior"] = (self.prior, self.own)
        return found


# The table of operations --------------------------------------------------------------------------------------------

# Parameters are a whole number or a list of whole numbers.
WHOLE, WHOLES = "whole", "wholes"


class Operation(NamedTuple):
    """One operation.

    Attributes
    ----------
    apply : callable
        ``apply(type of the result, params, *values)`` rebuilds it.
    operands : (int, int)
        The least and largest number of operands.
    params : dict
        Kinds of the parameters by name, in the order of the file.
    found : callable
        From the parameters of the equation of a JAX program to those of the file; raises `NotAllowed`.
    """

    apply: Callable[..., Any]
    operands: tuple[int, int]
    params: dict[str, str] = {}
    found: Callable[[dict[str, Any]], dict[str, Any]] = lambda params: {}


class NotAllowed(Exception):
    """An operation, or a use of one, that a model file cannot hold; says why."""


def _plain(function: Callable, operands: int) -> Operation:
    return Operation(lambda type, params, *values: function(*values), (operands, operands))


def _along(function: Callable, param: str, kind: str, theirs: str, keyword: str) -> Operation:
    """An operation with one parameter of axes."""

    def found(params: dict[str, Any]) -> dict[str, Any]:
        value = params[theirs]
        return {param: tuple(int(i) for i in value) if kind == WHOLES else int(value)}

    return Operation(lambda type, params, x: function(x, **{keyword: params[param]}), (1, 1), {param: kind}, found)


def _cumulative(function: Callable) -> Operation:
    return Operation(
        lambda type, params, x: function(x, axis=params["axis"], reverse=bool(params["reverse"])),
        (1, 1),
        {"axis": WHOLE, "reverse": WHOLE},
        lambda params: {"axis": int(params["axis"]), "reverse": int(params["reverse"])},
    )


def _dot_general() -> Operation:
    def apply(type: Type, params: dict[str, Any], x, y):
        contracted, batched = (params["left"], params["right"]), (params["left_batch"], params["right_batch"])
        return lax.dot_general(x, y, (contracted, batched))

    def found(params: dict[str, Any]) -> dict[str, Any]:
        (left, right), (left_batch, right_batch) = params["dimension_numbers"]
        lists = {"left": left, "right": right, "left_batch": left_batch, "right_batch": right_batch}
        return {name: tuple(map(int, axes)) for name, axes in lists.items()}

    kinds: dict[str, str] = dict.fromkeys(("left", "right", "left_batch", "right_batch"), WHOLES)
    return Operation(apply, (2, 2), kinds, found)


def _slice() -> Operation:
    def found(params: dict[str, Any]) -> dict[str, Any]:
        start, stop = params["start_indices"], params["limit_indices"]
        strides = params["strides"] or (1,) * len(start)
        return {"start": tuple(map(int, start)), "stop": tuple(map(int, stop)), "strides": tuple(map(int, strides))}

    kinds: dict[str, str] = dict.fromkeys(("start", "stop", "strides"), WHOLES)
    return Operation(
        lambda type, params, x: lax.slice(x, params["start"], params["stop"], params["strides"]), (1, 1), kinds, found
    )


# How entries beyond the end of a table are read.
MODES = (lax.GatherScatterMode.CLIP, lax.GatherScatterMode.PROMISE_IN_BOUNDS, lax.GatherScatterMode.FILL_OR_DROP)
DIMENSIONS = ("offset_dims", "collapsed_slice_dims", "start_index_map", "operand_batching_dims",
              "start_indices_batching_dims")  # fmt: skip


def _gather() -> Operation:
    def apply(type: Type, params: dict[str, Any], x, index):
        numbers = lax.GatherDimensionNumbers(**{name: params[name] for name in DIMENSIONS})
        return lax.gather(x, index, numbers, params["sizes"], mode=MODES[params["mode"]])

    def found(params: dict[str, Any]) -> dict[str, Any]:
        numbers = {name: tuple(map(int, getattr(params["dimension_numbers"], name))) for name in DIMENSIONS}
        if params["fill_value"] is not None or params["mode"] not in MODES:
            raise NotAllowed("its fill value or mode is unusual")
        return {**numbers, "sizes": tuple(map(int, params["slice_sizes"])), "mode": MODES.index(params["mode"])}

    kinds = {**dict.fromkeys((*DIMENSIONS, "sizes"), WHOLES), "mode": WHOLE}
    return Operation(apply, (2, 2), kinds, found)


def _pad() -> Operation:
    def apply(type: Type, params: dict[str, Any], x, value):
        return lax.pad(x, value, list(zip(params["low"], params["high"], params["interior"], strict=True)))

    def found(params: dict[str, Any]) -> dict[str, Any]:
        parts = zip(("low", "high", "interior"), zip(*params["padding_config"], strict=True), strict=True)
        return {name: tuple(map(int, part)) for name, part in parts}

    return Operation(apply, (2, 2), dict.fromkeys(("low", "high", "interior"), WHOLES), found)


def _reshape() -> Operation:
    def found(params: dict[str, Any]) -> dict[str, Any]:
        if params["dimensions"] is not None:
            raise NotAllowed("it reorders the axes")
        return {}

    return Operation(lambda type, params, x: lax.reshape(x, type.shape), (1, 1), {}, found)


# Functions of one, two and three arrays of the same shape, as JAX names them.
UNARY = {
    "neg": lax.neg, "exp": lax.exp, "exp2": lax.exp2, "expm1": lax.expm1, "log": lax.log, "log1p": lax.log1p,
    "logistic": lax.logistic, "sqrt": lax.sqrt, "rsqrt": lax.rsqrt, "cbrt": lax.cbrt, "square": lax.square,
    "abs": lax.abs, "sign": lax.sign, "floor": lax.floor, "ceil": lax.ceil, "sin": lax.sin, "cos": lax.cos,
    "tanh": lax.tanh, "sinh": lax.sinh, "cosh": lax.cosh, "asinh": lax.asinh, "atan": lax.atan, "erf": lax.erf,
    "erfc": lax.erfc, "erf_inv": lax.erf_inv, "lgamma": lax.lgamma, "digamma": lax.digamma,
    "is_finite": lax.is_finite, "not": lax.bitwise_not, "stop_gradient": lax.stop_gradient,
    # Functions of JAX that have a derivative or an enclosure of their own as a whole.
    "log_ndtr": special.log_ndtr, "ndtr": special.ndtr,
}  # fmt: skip
BINARY = {
    "add": lax.add, "sub": lax.sub, "mul": lax.mul, "div": lax.div, "rem": lax.rem, "pow": lax.pow, "max": lax.max,
    "min": lax.min, "eq": lax.eq, "ne": lax.ne, "lt": lax.lt, "le": lax.le, "gt": lax.gt, "ge": lax.ge,
    "and": lax.bitwise_and, "or": lax.bitwise_or, "xor": lax.bitwise_xor, "polygamma": lax.polygamma,
    "logaddexp": jnp.logaddexp, "xlogy": special.xlogy, "xlog1py": special.xlog1py, "betaln": special.betaln,
}  # fmt: skip
# Functions that are kept as a whole; all others are written out.
WHOLE_CALLS = ("log_ndtr", "ndtr", "logaddexp", "xlogy", "xlog1py", "betaln")

OPERATIONS: dict[str, Operation] = {
    **{name: _plain(function, 1) for name, function in UNARY.items()},
    **{name: _plain(function, 2) for name, function in BINARY.items()},
    "clamp": _plain(lax.clamp, 3),
    "select_n": Operation(lambda type, params, which, *cases: lax.select_n(which, *cases), (3, 9)),
    "integer_pow": _along(lax.integer_pow, "power", WHOLE, "y", "y"),
    "convert": Operation(lambda type, params, x: lax.convert_element_type(x, type.dtype), (1, 1)),
    "broadcast": Operation(
        lambda type, params, x: lax.broadcast_in_dim(x, type.shape, params["axes"]), (1, 1), {"axes": WHOLES},
        lambda params: {"axes": tuple(map(int, params["broadcast_dimensions"]))},
    ),
    "reshape": _reshape(),
    "squeeze": _along(lax.squeeze, "axes", WHOLES, "dimensions", "dimensions"),
    "transpose": _along(lax.transpose, "order", WHOLES, "permutation", "permutation"),
    "reverse": _along(lax.rev, "axes", WHOLES, "dimensions", "dimensions"),
    "concatenate": Operation(
        lambda type, params, *parts: lax.concatenate(parts, params["axis"]), (1, 64), {"axis": WHOLE},
        lambda params: {"axis": int(params["dimension"])},
    ),
    "slice": _slice(),
    "dynamic_slice": Operation(
        lambda type, params, x, *start: lax.dynamic_slice(x, start, params["sizes"]), (2, 8), {"sizes": WHOLES},
        lambda params: {"sizes": tuple(map(int, params["slice_sizes"]))},
    ),
    "gather": _gather(),
    "pad": _pad(),
    "iota": Operation(
        lambda type, params: lax.broadcasted_iota(type.dtype, type.shape, params["axis"]), (0, 0), {"axis": WHOLE},
        lambda params: {"axis": int(params["dimension"])},
    ),
    "reduce_sum": _along(lax.reduce_sum, "axes", WHOLES, "axes", "axes"),
    "reduce_max": _along(lax.reduce_max, "axes", WHOLES, "axes", "axes"),
    "reduce_min": _along(lax.reduce_min, "axes", WHOLES, "axes", "axes"),
    "reduce_prod": _along(lax.reduce_prod, "axes", WHOLES, "axes", "axes"),
    "reduce_and": _along(lax.reduce_and, "axes", WHOLES, "axes", "axes"),
    "reduce_or": _along(lax.reduce_or, "axes", WHOLES, "axes", "axes"),
    "cumsum": _cumulative(lax.cumsum),
    "cumprod": _cumulative(lax.cumprod),
    "cumlogsumexp": _cumulative(lax.cumlogsumexp),
    "dot": _dot_general(),
}  # fmt: skip

# Names in the file of primitives that are called otherwise in JAX.
RENAMED = {"broadcast_in_dim": "broadcast", "convert_element_type": "convert", "rev": "reverse", "dot_general": "dot"}


REMEDY = "Give a file from `fedpdmc model build`, unchanged."
# Multiplications and other operations on numbers that all programs of a file together may take.
MOST_WORK = 2**22


def evaluate(program: FileProgram, inputs: dict[str, Any]) -> dict[str, Any]:
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


def _check_results(name: str, program: FileProgram, types: dict[int | str, Type], where: str) -> None:
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
