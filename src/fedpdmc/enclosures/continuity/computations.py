"""How the values of a program were computed: two that are equal as formulas may differ by rounding, unless it was alike."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fedpdmc.enclosures.continuity.decision_trees import Value


class Computation(NamedTuple):
    """An operation with the numbers of the computations of its operands."""

    name: str
    own: Any
    operands: tuple[int, ...]


class Computations:
    """The computations of a program's values, numbered: equal ones have one number."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._all: list[Computation] = []
        # By the identity of a value, which is kept so that no other has the same.
        self._of: dict[int, tuple[Value, int]] = {}

    def number(self, value: Value) -> int:
        """Of the computation of a value."""
        if isinstance(value, np.ndarray):
            return self._numbered(Computation("array", (value.shape, str(value.dtype), value.tobytes()), ()))
        if id(value) not in self._of:
            self._of[id(value)] = value, self._numbered(Computation("value", len(self._all), ()))
        return self._of[id(value)][1]

    def _numbered(self, computation: Computation) -> int:
        found = self._numbers.setdefault(computation, len(self._all))
        if found == len(self._all):
            self._all.append(computation)
        return found

    def remember(self, equation, values: list[Value], found: list[Value]) -> None:
        """That an equation has computed these of those."""
        params = equation.params
        own = (
            tuple(params["permutation"])
            if "permutation" in params
            else str(sorted(params.items(), key=lambda kv: kv[0]))
        )
        operands = tuple(map(self.number, values))
        for i, value in enumerate(found):
            if not isinstance(value, np.ndarray):
                number = self._numbered(Computation(equation.primitive.name, (own, i), operands))
                self._of.setdefault(id(value), (value, number))

    def is_sum_with_transposed(self, value: Value) -> bool:
        """Whether a value is ``a + a.T``, up to a factor."""
        made = self._all[self.number(value)]
        while made.name in ("mul", "div") and self._is_one_number(made.operands[1]):
            made = self._all[made.operands[0]]
        if made.name != "add":
            return False
        return any(self._is_transposed(*pair) for pair in (made.operands, made.operands[::-1]))

    def _is_one_number(self, number: int) -> bool:
        made = self._all[number]
        if made.name != "array":
            return False
        shape, dtype, content = made.own
        array = np.frombuffer(content, np.dtype(dtype))
        return bool(array.size and np.all(array == array[0]))

    def _is_transposed(self, matrix: int, other: int) -> bool:
        made = self._all[other]
        if made.name != "transpose" or made.operands != (matrix,):
            return False
        n = len(made.own[0])
        return n > 1 and made.own[0] == (*range(n - 2), n - 1, n - 2)
