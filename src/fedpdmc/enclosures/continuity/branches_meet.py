"""The proof that the branches of a choice meet, so that a value does not jump where it is chosen.

A value that depends on the sign of a formula D (`decision_trees`) is continuous if for every D that it asks for, the values
on both sides are equal on the surface ``D = 0``. It is proved by solving ``D = 0`` for one atom and putting the solution in.
The value on the surface itself must be equal to them too where the surface can have a volume. A polynomial is zero nowhere
but on a null set, or everywhere; then the value is that of the third case everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from fedpdmc.enclosures.continuity.decision_trees import (
    SIGNS,
    Choice,
    Pair,
    Surface,
    Value,
    apply,
    restricted,
    surfaces_of,
)
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

# Relative tolerance: a formula this small on a surface may have either sign.
NEAR = 1e-9

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
