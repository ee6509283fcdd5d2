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


class Program(NamedTuple):
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
