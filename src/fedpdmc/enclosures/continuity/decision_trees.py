"""Values that depend on the sign of others: decision trees with formulas as leaves.

A node asks for the sign of a formula D, entry by entry, and has a value for each answer. That the values meet where D is
zero is shown in `branches_meet`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from fedpdmc.enclosures.continuity.normal_form import Atom, Terms, number

# Number of leaves above which a tree is replaced by one formula, if it can be proved continuous.
MOST_LEAVES = 48


class Surface:
    """Where a formula is zero; free if the values need not agree there, because the data decide or the function is known.

    Where there are ``guards`` the question is whether these atoms are numbers: they are on the positive side
    (`fedpdmc.enclosures.continuity.not_a_number`).
    """

    def __init__(self, place: int, terms: Terms, where: str, free: bool = False, guards: frozenset[Atom] = frozenset()):
        self.guards = guards
        self.place, self.terms, self.where, self.free = place, terms, where, free or not terms.depends
        self.moving, constant = terms.split()
        self.kind, self.level = self.moving.key, -constant
        # Whether it can be zero on more than a null set but not everywhere: it has kinks, or it may be rounded to zero, also
        # from zero where two ways to compute one polynomial are compared.
        self.thick = not terms.polynomial or terms.sign != 0 or _may_vanish(terms)


def _may_vanish(terms: Terms) -> bool:
    """Whether a polynomial that is written with sums and products of arrays may be zero everywhere."""
    moving = [monomial for monomial in terms.terms if any(atom.depends for atom, _ in monomial)]
    return len(moving) > 1 and any(_is_composed(atom) for monomial in moving for atom, _ in monomial)


def _is_composed(atom: Atom) -> bool:
    if atom.name == "move":
        return any(map(_is_composed, atom.args[0].atoms))
    return atom.depends and bool(atom.args)


class Choice:
    """A value for each sign of a surface's formula; whether it is continuous, None if that is not known yet."""

    def __init__(self, surface: Surface, cases: dict[int, Value]):
        self.surface, self.cases = surface, cases
        self.continuous: bool | None = None
        self.leaves: int = sum(case.leaves if isinstance(case, Choice) else 1 for case in cases.values())

    @property
    def shape(self):
        """Shape of the value."""
        return self.cases[1].shape

    @property
    def depends(self) -> bool:
        """Whether it depends on the parameters."""
        return self.surface.terms.depends or any(map(depends, self.cases.values()))


class Pair:
    """Two values that must be equal."""

    def __init__(self, one: Any, other: Any):
        self.one, self.other = as_terms(one), as_terms(other)
        self.shape = self.one.shape


Value = Any  # an array, Terms or a Choice
SIGNS = (1, 0, -1)


def depends(x: Value) -> bool:
    """Whether a value depends on the parameters."""
    return isinstance(x, (Terms, Choice)) and x.depends


def as_terms(x: Value) -> Terms:
    """A leaf as a formula."""
    return x if isinstance(x, Terms) else number(x)


def key(x: Value) -> Any:
    """Equal for equal values."""
    if isinstance(x, Choice):
        return (x.surface.place, *(key(x.cases[s]) for s in SIGNS))
    if isinstance(x, Pair):
        return (key(x.one), key(x.other))
    return as_terms(x).key


def apply(function: Callable[..., Value], *values: Value) -> Value:
    """An operation on leaves, entry by entry; it may return a choice itself."""
    surfaces = [value.surface for value in values if isinstance(value, Choice)]
    if not surfaces:
        return function(*values)
    first = min(surfaces, key=lambda surface: surface.place)
    return joined(first, {s: apply(function, *(branch(value, first, s) for value in values)) for s in SIGNS})


def branch(value: Value, surface: Surface, sign: int) -> Value:
    """The case of a value whose first question is this surface; itself if it is another."""
    return value.cases[sign] if isinstance(value, Choice) and value.surface is surface else value


def joined(surface: Surface, cases: dict[int, Value]) -> Value:
    """A choice in which surfaces are asked for in the order of their places."""
    if len({key(case) for case in cases.values()}) == 1:
        return cases[1]
    if all(not isinstance(case, Choice) or case.surface.place > surface.place for case in cases.values()):
        return Choice(surface, cases)
    asked = [case.surface for case in cases.values() if isinstance(case, Choice)]
    first = min(asked, key=lambda other: other.place)
    if first is surface:
        return joined(surface, {s: restricted(case, surface, s) for s, case in cases.items()})
    inner = {s: joined(surface, {t: branch(case, first, s) for t, case in cases.items()}) for s in SIGNS}
    return joined(first, inner)


def restricted(value: Value, surface: Surface, sign: int) -> Value:
    """A value reduced to the case of a known sign."""
    if not isinstance(value, Choice):
        return value
    if value.surface is surface:
        return restricted(value.cases[sign], surface, sign)
    return joined(value.surface, {s: restricted(case, surface, sign) for s, case in value.cases.items()})


def surfaces_of(value: Value) -> dict[int, Surface]:
    """All surfaces that a value asks for, by place."""
    if not isinstance(value, Choice):
        return {}
    found = {value.surface.place: value.surface}
    for case in value.cases.values():
        found |= surfaces_of(case)
    return found


def leaves_of(value: Value) -> Iterator[Value]:
    """The leaves."""
    if not isinstance(value, Choice):
        yield value
        return
    for case in value.cases.values():
        yield from leaves_of(case)


Range = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def pruned(value: Value, known: dict[Any, Range] | None = None) -> Value:
    """The value without impossible cases: formulas that differ by a constant bound each other.

    ``known`` holds for what varies in a formula its bounds, and whether they are not reached. A surface at which values
    need not agree says nothing of others.
    """
    if not isinstance(value, Choice):
        return value
    surface, known = value.surface, known or {}
    low, high = surface.moving.bounds
    no = np.zeros((), bool)
    own = surface.kind, surface.free
    low, high, above, below = known.get(own, (low, high, no, no))
    level = surface.level
    cases: dict[int, Value] = {}
    if np.any(high > level):
        inner = (np.maximum(low, level), high, np.where(level >= low, True, above), below)
        cases[1] = pruned(value.cases[1], {**known, own: inner})
    if np.any((level > low) | ((level == low) & ~above)) and np.any((level < high) | ((level == high) & ~below)):
        cases[0] = pruned(value.cases[0], {**known, own: (level, level, no, no)})
    if np.any(low < level):
        inner = (low, np.minimum(high, level), above, np.where(level <= high, True, below))
        cases[-1] = pruned(value.cases[-1], {**known, own: inner})
    if not cases:
        return value
    # An impossible case gets the value of a possible one.
    spare = cases.get(1, cases.get(-1, cases.get(0)))
    return joined(surface, {s: cases.get(s, spare) for s in SIGNS})
