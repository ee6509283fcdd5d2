"""A program of a model file: typed values, each made by one operation of the table from values before it."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

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
        Its name in the table of `operations`.
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
