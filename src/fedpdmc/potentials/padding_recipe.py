"""How a program is changed so that it can run on padded records: masks for sums, replacements for numbers."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from jax.extend import core

from fedpdmc._jax.by_numpy import INNER


class Unpaddable(Exception):
    """The program is not known to be a function of sums over records."""


class Masked(NamedTuple):
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

    masks: dict[int, Masked]
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
        found += numbers_of(inner, called(closed.jaxpr.eqns[place]))
    return found


def called(equation) -> core.ClosedJaxpr:
    """The program that an equation calls."""
    inner = equation.params[INNER[equation.primitive.name]]
    return inner if hasattr(inner, "consts") else core.ClosedJaxpr(inner, ())
