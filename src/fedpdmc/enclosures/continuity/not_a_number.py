"""Values that are not a number for some parameters: what a program makes of them, its gradient does not show.

A logarithm, a root or a Cholesky factor is NaN beyond its domain. Where its derivative is a part of the gradient nothing
is hidden: that is not finite at the edge of the domain, and no bound is made of it. A comparison, however, is false for
NaN, and has no derivative: ``where(sqrt(x) >= 0, 0, 3)`` jumps at zero, though its formula is zero wherever it has a value.
So a comparison of such a value, or of what was computed from it, first asks whether it is a number. A choice may take that
for granted only if what it chooses for a number contains the value, and the gradient its derivative.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from fedpdmc.enclosures.continuity.decision_trees import Value, apply, as_terms, key, leaves_of, restricted, surfaces_of
from fedpdmc.enclosures.continuity.formulas import Formulas
from fedpdmc.enclosures.continuity.normal_form import Atom, Terms

# Between which numbers the first argument of a function must be, or all of them.
DOMAINS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("log", "sqrt", "rsqrt", "pow", "polygamma", "igamma", "igammac"), (0.0, np.inf)),
    **dict.fromkeys(("asin", "acos", "atanh", "erf_inv"), (-1.0, 1.0)), "log1p": (-1.0, np.inf), "acosh": (1.0, np.inf),
}  # fmt: skip
ALL_ARGUMENTS = {"polygamma", "igamma", "igammac"}
# Values of which nothing is known here: what loops and branches return, and functions of several numbers with a domain.
UNKNOWN = {"scanned", "carried", "scan", "cond", "cholesky", "triangular_solve", "custom_linear_solve",
           "regularized_incomplete_beta", "ndtri", "_ndtri"}  # fmt: skip
# Functions without bounds that are finite for finite arguments, but for those beyond any that a path visits.
TAME = {"parameters", "log", "log1p", "asinh", "atan", "cbrt", "sqrt", "reduce_sum", "dot_general", "cumsum", "move", "mul",
        "reduce_max", "reduce_min", "choice", "sort", "cummax", "cummin", "convert_element_type"}  # fmt: skip


# Functions of data that are finite where those are, if these are not huge.
FINITE = {"data", "move", "mul", "reduce_sum", "dot_general", "cumsum", "reduce_max", "reduce_min", "cummax", "cummin",
          "sort", "concatenate", "stack", "choice", "truths", "asinh", "atan", "cbrt"}  # fmt: skip
# Entries of an array at places that may be outside of it, where there is a NaN.
FILLED = "filled"
# Above this data are huge: their powers may overflow.
HUGE = 1e60


def wild(*values: Value) -> frozenset[Atom]:
    """The atoms in values of which data decide whether they are finite, and may say no."""
    return frozenset(atom for x in values for atom in _within_value(x) if is_wild(atom))


def is_wild(atom: Atom) -> bool:
    """Whether data decide that an atom is finite, and may say no."""
    return atom.name == FILLED or not _is_finite(atom)


def _is_finite(atom: Atom) -> bool:
    """Whether an atom of data is known to be finite; what depends on the parameters is not asked here."""
    if atom.depends or atom.name.startswith("whole"):
        return True
    known = atom.name in FINITE or bool(np.all(np.isfinite(atom.bounds)))
    if atom.name in ("sqrt", "log1p"):
        known = atom.args[0].sign > 0
    elif atom.name in ("log", "reciprocal", "rsqrt"):
        known = atom.args[0].sign == 2
    return known and all(_is_finite(inner) for arg in atom.args for inner in arg.atoms)


def tame(x: Any) -> bool:
    """Whether data are finite, and not huge."""
    array = np.asarray(x)
    return array.dtype.kind != "f" or bool(np.all(np.abs(array) < HUGE))


def undefined(x: Value, overflows: bool = False) -> frozenset[Atom]:
    """The atoms of a value that are not a number for some parameters; with those that may be infinite if ``overflows``."""
    return partial(_within_value(x), overflows)


def partial(atoms: frozenset[Atom], overflows: bool = False) -> frozenset[Atom]:
    """Those that are not a number for some parameters."""
    return frozenset(atom for atom in atoms if _is_partial(atom, overflows))


def may_cancel(x: Terms) -> bool:
    """Whether a formula may be NaN where a part of it overflows: one function alone is not."""
    atoms = [pair for monomial in x.split()[0].terms for pair in monomial]
    if len(atoms) == 1 and atoms[0][1] == 1:
        return bool(partial(atoms[0][0].within - {atoms[0][0]}, True))
    return bool(undefined(x, True))


def lost(sources: frozenset[Atom], operands: list[Value], found: list[Value]) -> frozenset[Atom]:
    """The atoms that are not a number for some parameters, nor are the results then, in whose formulas they are not.

    ``sources`` are those that the operands have lost before.
    """
    before = sources.union(wild(*operands), *map(undefined, operands))
    return before.difference(*map(_within_value, found)) if before else before


def guarded(
    formulas: Formulas, answer: Value, otherwise: Value, atoms: frozenset[Atom], where: str, name: str = "number"
) -> Value:  # fmt: skip
    """``answer`` where all atoms are numbers; ``name`` says whether that is the question, or they are "compared"."""
    atoms = frozenset(atom for atom in atoms if not is_wild(atom))
    if not atoms or formulas.trusted:
        return answer
    sign = formulas.sign(formulas.fresh(name, answer.shape), where, guards=atoms)
    return formulas.by_sign(sign, answer, otherwise, otherwise)


def by_data(formulas: Formulas, answer: Value, otherwise: Value, atoms: Iterable[Atom]) -> Value:
    """``answer`` where all atoms of data are finite numbers, and what else it may be elsewhere."""
    numbers = tuple(sorted(atom.number for atom in atoms))
    if not numbers or formulas.trusted:
        return answer
    asked = formulas.atom("finite data", numbers, (), answer.shape)
    return formulas.by_sign(formulas.sign(asked, ""), answer, otherwise, otherwise)


def assumed(found: Value, which: Value, cases: tuple[Value, ...]) -> Value:
    """A choice that takes for numbers the values that its case for numbers contains.

    For a comparison with another number, which enclosures leave open at the edge, either of the two cases may contain them.
    Of what is infinite beyond any parameters that a path visits it is enough that one of the cases contains it.
    """
    for surface in surfaces_of(which).values():
        if not surface.guards:
            continue
        seen: list[bool] = []
        needed = partial(surface.guards)
        compared = any(atom.name == "compared" for atom in _within(surface.terms))

        def same(number, other, needed=needed, seen=seen, compared=compared):
            inside = _within(as_terms(number)) | (_within(as_terms(other)) if compared else frozenset())
            seen.append(key(number) == key(other) or needed <= inside)
            return number

        numbers = restricted(found, surface, 1)
        apply(same, numbers, restricted(found, surface, -1))
        if all(seen) and (surface.guards == needed or surface.guards <= frozenset().union(*map(_within_value, cases))):
            found = numbers
    return found


def _within_value(x: Value) -> frozenset[Atom]:
    """All atoms of a value, at any depth."""
    return frozenset().union(*(_within(as_terms(leaf)) for leaf in leaves_of(x)))


def _within(x: Terms) -> frozenset[Atom]:
    return frozenset().union(*(atom.within for atom in x.atoms))


def _is_partial(atom: Atom, overflows: bool) -> bool:
    if not atom.depends:
        return False
    if atom.name in UNKNOWN:
        return True
    if atom.name == "reciprocal":
        # Zero over zero, on more than a null set.
        return overflows or (atom.args[0].kinked and abs(atom.args[0].sign) < 2)
    least, most = DOMAINS.get(atom.name, (-np.inf, np.inf))
    for arg in atom.args if atom.name in ALL_ARGUMENTS else atom.args[:1]:
        low, high = arg.bounds if atom.name in DOMAINS else (least, most)
        if not (np.all(low >= least) and np.all(high <= most)):
            return True
    return overflows and atom.name not in TAME and not np.all(np.isfinite(atom.bounds))
