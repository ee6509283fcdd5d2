"""Values that depend on the sign of others: decision trees with formulas as leaves, and the proof that they do not jump.

A node asks for the sign of a formula D, entry by entry, and has a value for each answer. Such a value is continuous if for
every D that it asks for, the values on both sides are equal on the surface ``D = 0``. It is proved by solving ``D = 0`` for
one atom and putting the solution in. The value on the surface itself must be equal to them too where the surface can have a
volume. A polynomial is zero nowhere but on a null set, or everywhere; then the value is that of the third case everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from fedpdmc.enclosures.continuity.normal_form import (
    Atom,
    Terms,
    added,
    equal,
    number,
    of_atom,
    remainder,
    replaced,
    scaled,
)

# Number of leaves above which a tree is replaced by one formula, if it can be proved continuous.
MOST_LEAVES = 48
# Relative tolerance: a formula this small on a surface may have either sign.
NEAR = 1e-9


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


# The proof ------------------------------------------------------------------------------------------------------------

Rebuild = Callable[[Atom, tuple[Terms, ...]], Terms]


def jump_of(value: Value, rebuild: Rebuild) -> Surface | None:
    """A surface at which a value is not shown to be continuous; None if it is continuous."""
    for surface in surfaces_of(value).values():
        if surface.free:
            continue
        plus, zero, minus = (restricted(value, surface, s) for s in SIGNS)
        if not _meet(surface.terms, plus, minus, rebuild):
            return surface
        if surface.thick and not _meet(surface.terms, plus, zero, rebuild):
            return surface
    return None


def _meet(zero: Terms, one: Value, other: Value, rebuild: Rebuild) -> bool:
    """Whether two values are equal wherever ``zero`` is."""
    pairs = apply(Pair, one, other)

    def agree(by: dict[Atom, Terms] | None, there: np.ndarray) -> bool:
        seen: dict[Atom, Terms] = {}

        def put(x: Terms) -> Terms:
            if by is None:
                return replaced(x, {}, rebuild, seen, lambda y: remainder(y, zero) if y.shape == zero.shape else y)
            return replaced(x, by, rebuild, seen) if by else x

        for mask, pair in _reached(pairs, put, there):
            x, y = put(pair.one), put(pair.other)
            same = equal(x, y)
            if by == {}:
                # They may differ by the formula itself.
                same = same | equal(x, added(y, zero)) | equal(added(x, zero), y)
            if not np.all(same | ~mask):
                return False
        return True

    everywhere = np.ones(zero.shape, bool)
    return _on_surface(zero, everywhere, agree) or agree(None, everywhere)


def _reached(value: Value, put: Callable[[Terms], Terms], mask: np.ndarray) -> Iterator[tuple[np.ndarray, Pair]]:
    """The leaves that can be reached on a surface, with the entries that can."""
    if not np.any(mask) and mask.size:
        return
    if not isinstance(value, Choice):
        yield mask, value
        return
    terms = put(value.surface.terms)
    constant, sign = terms.constant, terms.sign
    can: dict[int, np.ndarray] = dict.fromkeys(SIGNS, np.ones(mask.shape, bool))
    if constant is not None:
        near = np.abs(constant) <= NEAR * _scale(value.surface.terms, put)
        can = {1: near | (constant > 0), 0: near, -1: near | (constant < 0)}
    for known in (sign, value.surface.terms.sign):
        if known:
            can[-1 if known > 0 else 1] = np.zeros(mask.shape, bool)
        if abs(known) == 2:
            can[0] = np.zeros(mask.shape, bool)
    for s, case in value.cases.items():
        yield from _reached(case, put, mask & can[s])


def _scale(terms: Terms, put: Callable[[Terms], Terms]) -> np.ndarray:
    """The size of the terms that cancel where a formula is a number."""
    total = np.zeros(())
    for monomial, c in terms.terms.items():
        size = np.abs(c)
        for atom, power in monomial:
            value = put(of_atom(atom)).constant
            with np.errstate(invalid="ignore", divide="ignore"):
                size = size * (1.0 if value is None else np.abs(value) ** power)
        total = total + size
    return total


def _on_surface(zero: Terms, there: np.ndarray, agree: Callable[[dict[Atom, Terms] | None, np.ndarray], bool]) -> bool:
    """Whether a claim holds where ``zero = 0``, by solving for one atom after the other; ``there`` masks entries."""
    if agree({}, there):
        return True
    if len(zero.terms) == 1 and len(factors := next(iter(zero.terms))) > 1:
        # A product is zero where a factor is.
        return all(_on_surface(of_atom(atom), there, agree) for atom, power in factors if power > 0)
    for atom, power in [pair for monomial in zero.terms for pair in monomial if len(monomial) == 1]:
        own = ((atom, power),)
        rest = zero.part(lambda m: m != own)  # noqa: B023
        if np.any(zero.terms[own] == 0) or _within(rest, atom):
            continue
        solution = scaled(rest, -1 / zero.terms[own])
        if power == 1:
            if agree({atom: solution}, there):
                return True
            inverse, value = INVERSE.get(atom.name), solution.constant
            if inverse is not None and value is not None:
                with np.errstate(all="ignore"):
                    exact = inverse(value)
                known = ~np.isnan(exact)
                ends = [np.clip(np.where(known, exact, 0.0), *limits) for limits in SATURATED.get(atom.name, [FINITE])]
                ends = ends[:1] if all(np.array_equal(end, ends[0]) for end in ends) else ends
                if all(_on_surface(added(atom.args[0], number(-end)), there & known, agree) for end in ends):
                    return True
        elif power > 1 and (value := solution.constant) is not None:
            roots = [np.sign(value) * np.abs(value) ** (1 / power)]
            if power % 2 == 0:
                there, roots = there & (value >= 0), [roots[0], -roots[0]]
            if all(_on_surface(added(of_atom(atom), number(-root)), there, agree) for root in roots):
                return True
    return False


def _within(terms: Terms, atom: Atom) -> bool:
    return any(other is atom or any(_within(arg, atom) for arg in other.args) for other in terms.atoms)


# Inverses of functions that are one to one; NaN where no argument has the value.
INVERSE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "exp": np.log, "log": np.exp, "log1p": np.expm1, "expm1": np.log1p, "tanh": np.arctanh, "sinh": np.arcsinh,
    "exp2": np.log2, "logistic": lambda p: np.log(p) - np.log1p(-p), "asinh": np.sinh, "atan": np.tan,
    "sqrt": lambda r: np.where(r >= 0, r * r, np.nan),
}  # fmt: skip
# Arguments between which a function is not rounded to the limits of its range. A surface at a limit is crossed somewhere
# beyond, so what is claimed of it must hold at two places.
FINITE = (-1e300, 1e300)
SATURATED: dict[str, list[tuple[float, float]]] = {
    "exp": [(-708.0, 1e300), (-700.0, 1e300)], "exp2": [(-1021.0, 1e300), (-1000.0, 1e300)],
    "tanh": [(-18.6, 18.6), (-18.4, 18.4)], "logistic": [(-708.0, 36.5), (-700.0, 36.0)],
    "expm1": [(-36.5, 1e300), (-36.0, 1e300)],
}  # fmt: skip
