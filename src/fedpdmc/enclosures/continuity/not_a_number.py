"""Values that are not a number for some parameters: what a program makes of them, its gradient does not show.

A logarithm, a root or a Cholesky factor is NaN beyond its domain. Where its derivative is a part of the gradient nothing
is hidden: that is not finite at the edge of the domain, and no bound is made of it. A comparison, however, is false for
NaN, and has no derivative: ``where(sqrt(x) >= 0, 0, 3)`` jumps at zero, though its formula is zero wherever it has a value.
So a comparison of such a value first asks whether it is a number. A choice may take that for granted only if one of its
cases contains the value, and the gradient its derivative.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fedpdmc.enclosures.continuity.decision_trees import Value, as_terms, leaves_of, restricted, surfaces_of
from fedpdmc.enclosures.continuity.formulas import Formulas
from fedpdmc.enclosures.continuity.normal_form import STOPPED, Atom, Terms

# Between which numbers the (first) argument of a function must be.
DOMAINS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("log", "sqrt", "rsqrt", "pow", "polygamma", "igamma", "igammac"), (0.0, np.inf)),
    **dict.fromkeys(("asin", "acos", "atanh", "erf_inv"), (-1.0, 1.0)), "log1p": (-1.0, np.inf), "acosh": (1.0, np.inf),
}  # fmt: skip
# Values of which nothing is known here: what loops and branches return, and functions of several numbers with a domain.
UNKNOWN = {"scanned", "carried", "scan", "cond", "cholesky", "triangular_solve", "custom_linear_solve",
           "regularized_incomplete_beta", "ndtri", "_ndtri"}  # fmt: skip
# Functions without bounds that are finite for finite arguments, but for those beyond any that a path visits.
TAME = {"parameters", "log", "log1p", "asinh", "atan", "cbrt", "sqrt", "reduce_sum", "dot_general", "cumsum", "move", "mul",
        "reduce_max", "reduce_min", "choice", "sort", "cummax", "cummin"}  # fmt: skip


def undefined(x: Value, overflows: bool = False) -> frozenset[Atom]:
    """The atoms of a value that are not a number for some parameters; with those that may be infinite if ``overflows``."""
    return frozenset(atom for atom in _atoms_of(x) if _is_partial(atom, overflows))


def guarded(formulas: Formulas, answer: Value, otherwise: np.ndarray, atoms: frozenset[Atom], where: str) -> Value:
    """``answer`` where all atoms are numbers."""
    if not atoms or formulas.trusted:
        return answer
    sign = formulas.sign(formulas.fresh("number", answer.shape, True, False), where, guards=atoms)
    return formulas.by_sign(sign, answer, otherwise, otherwise)


def assumed(which: Value, cases: tuple[Value, ...]) -> Value:
    """A choice that takes for numbers the values that its cases contain."""
    guards = [surface for surface in surfaces_of(which).values() if surface.guards]
    seen = (atom for case in cases for atom in _atoms_of(case) if atom.name != STOPPED)
    inside = frozenset(seen) if guards else frozenset()
    for surface in guards:
        which = restricted(which, surface, 1) if surface.guards <= inside else which
    return which


def _atoms_of(x: Value) -> Iterator[Atom]:
    """All atoms of a value, at any depth."""
    for leaf in leaves_of(x):
        yield from _within(as_terms(leaf))


def _within(x: Terms) -> Iterator[Atom]:
    for atom in x.atoms:
        yield atom
        for arg in atom.args:
            yield from _within(arg)


def _is_partial(atom: Atom, overflows: bool) -> bool:
    if not atom.depends:
        return False
    if atom.name in UNKNOWN:
        return True
    if atom.name == "reciprocal":
        # Zero over zero, on more than a null set.
        return overflows or (not atom.args[0].analytic and abs(atom.args[0].sign) < 2)
    low, high = atom.args[0].bounds if atom.name in DOMAINS else (0.0, 0.0)
    least, most = DOMAINS.get(atom.name, (0.0, 0.0))
    if not (np.all(low >= least) and np.all(high <= most)):
        return True
    return overflows and atom.name not in TAME and not np.all(np.isfinite(atom.bounds))
