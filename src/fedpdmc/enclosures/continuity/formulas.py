"""Formulas of a program with the choices among them: how they are made, combined and moved, and when they have no jumps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from fedpdmc.enclosures.continuity.branches_meet import jump_of
from fedpdmc.enclosures.continuity.decision_trees import (
    MOST_LEAVES,
    Choice,
    Surface,
    Value,
    apply,
    as_terms,
    key,
    leaves_of,
    pruned,
)
from fedpdmc.enclosures.continuity.normal_form import (
    STOPPED,
    Atom,
    Monomial,
    Terms,
    added,
    chosen,
    multiplied,
    number,
    of_atom,
    scaled,
)
from fedpdmc.errors import Discontinuous

# Elementwise functions and their ranges; "same": not negative if the argument is not.
ANY, POSITIVE = (-np.inf, np.inf), (0.0, np.inf)
ENTRYWISE: dict[str, Any] = {
    **dict.fromkeys(("log", "tan", "asin", "acos", "acosh", "lgamma", "digamma", "erf_inv", "pow", "polygamma", "igamma",
                     "igammac", "regularized_incomplete_beta", "bessel_i0e", "bessel_i1e"), ANY),
    **dict.fromkeys(("exp", "exp2", "rsqrt", "sqrt"), (0.0, np.inf)), "erfc": (0.0, 2.0), "logistic": (0.0, 1.0),
    **dict.fromkeys(("sin", "cos", "tanh", "erf"), (-1.0, 1.0)), "cosh": (1.0, np.inf),
    **dict.fromkeys(("sinh", "asinh", "atanh", "atan", "log1p", "expm1", "cbrt", "reciprocal"), "same"),
}  # fmt: skip
JUMPS = "a choice whose branches are not shown to meet"
TOO_MANY = "a choice by a value that has too many cases of its own"
# Functions of whole arrays that are polynomials of their entries.
POLYNOMIAL = {"reduce_sum", "cumsum", "reduce_prod", "cumprod", "dot_general", "concatenate", "stack", "pad", "gather",
              "dynamic_slice", "dynamic_update_slice", "scatter", "scatter-add", "conv_general_dilated"}  # fmt: skip
SAME_SIGN = {"reduce_sum", "reduce_max", "reduce_min", "cumsum", "cummax", "cummin", "reduce_prod", "cumprod"}


class Formulas:
    """One reading of a program; atoms and surfaces that are the same are made once."""

    def __init__(self):
        self.atoms: dict[Any, Atom] = {}
        self.surfaces: dict[Any, Surface] = {}
        self.numbers = itertools.count()
        self.trusted = self.knows_data = False
        # Whether the two operands of an equation were computed in the same way.
        self.alike = False
        # Whether there are data that are read as anything, though they are known.
        self.knows_less = False
        # Atoms of what an equation's operands were computed from that are not in their formulas.
        self.lost: frozenset[Atom] = frozenset()

    # Atoms and surfaces -------------------------------------------------------------------------------------------

    def atom(
        self, name: str, own: Any, args: tuple[Terms, ...], shape, bounds: tuple[float, float] = ANY,
        polynomial: bool = False, entrywise: bool = False, evaluate: Callable | None = None,
    ) -> Terms:  # fmt: skip
        """A value with this name of these arguments."""
        identity = (name, own, tuple(arg.key for arg in args), tuple(shape))
        if identity not in self.atoms:
            needs = name == STOPPED or any(arg.depends for arg in args)
            plain = not needs or (polynomial and all(arg.polynomial for arg in args))
            made = Atom(name, (own, evaluate), args, shape, bounds, needs, plain, entrywise)
            self.atoms[identity] = made
        return of_atom(self.atoms[identity])

    def fresh(self, name: str, shape, needs: bool = True, polynomial: bool = False) -> Terms:
        """A value of which nothing is known."""
        return of_atom(Atom(name, next(self.numbers), (), shape, ANY, needs, polynomial or not needs, False))

    def sign(
        self, x: Value, where: str, free: bool | None = None, guards: frozenset[Atom] = frozenset()
    ) -> Value:  # fmt: skip
        """The sign of a value: a choice where it is not known."""
        free = self.trusted if free is None else free

        def one(leaf: Value) -> Value:
            terms = as_terms(leaf)
            if (constant := terms.constant) is not None:
                return np.sign(constant.astype(float))
            known = terms.sign
            if abs(known) == 2:
                return np.full(terms.shape, float(np.sign(known)))
            side = _side(terms)
            upright = scaled(terms, side)
            new = Surface(len(self.surfaces), upright, where, free, guards)
            surface = self.surfaces.setdefault((upright.key, free), new)
            cases: dict[int, Value] = {s: np.full(terms.shape, float(side * s)) for s in (1, 0, -1)}
            if known:
                # The other side is never seen.
                cases[-side * known] = cases[side * known]
            return Choice(surface, cases)

        found = self.held(apply(one, x), where)
        if any(isinstance(leaf, Terms) for leaf in leaves_of(found)):
            raise Discontinuous("select_n", where, TOO_MANY)
        return found

    def by_sign(self, sign: Value, plus: Value, zero: Value, minus: Value, otherwise: Any = np.nan) -> Value:
        """The value that a sign selects; ``otherwise`` where it is the sign of a number that is none."""

        def pick(s, p, z, m):
            none = np.isnan(s)
            if all(isinstance(x, np.ndarray) for x in (p, z, m)):
                found = np.where(s > 0, p, np.where(s < 0, m, z))
                return np.where(none, otherwise, found) if np.any(none) else found
            found = chosen(s > 0, as_terms(p), chosen(s < 0, as_terms(m), as_terms(z)))
            return chosen(none, number(np.full(s.shape, otherwise)), found)

        shape = sign.shape
        return apply(pick, sign, *(self.wide(x, shape) for x in (plus, zero, minus)))

    def held(self, x: Value, where: str) -> Value:
        """A value that is small enough to continue with; a large one is replaced by an atom."""
        known = x.continuous if isinstance(x, Choice) else None
        x = pruned(x)
        if isinstance(x, Choice) and known:
            x.continuous = True
        return x if not isinstance(x, Choice) or x.leaves <= MOST_LEAVES else self.settled(x, where)

    def continuous(self, x: Value) -> bool:
        """Whether a value is shown to be continuous."""
        if not isinstance(x, Choice):
            return True
        if x.continuous is None:
            x.continuous = jump_of(x, self.rebuilt) is None
        return x.continuous

    def settled(self, x: Value, where: str) -> Terms:
        """A value as one formula: continuous, or the program is refused."""
        if not isinstance(x, Choice):
            return as_terms(x)
        surface = None if self.continuous(x) else jump_of(x, self.rebuilt)
        if surface is not None:
            reason = "a choice by a value that is not a number for some parameters" if surface.guards else JUMPS
            raise Discontinuous("select_n", surface.where or where, reason)
        leaves = tuple(as_terms(leaf) for leaf in leaves_of(x))
        return self.atom("choice", key(x), leaves, x.shape, _hull(leaves))

    def finished(self, x: Value, where: str) -> None:
        """A value without jumps and without anything that is not differentiated."""
        for atom in self.settled(x, where).stopped:
            (_, line), _ = atom.key[0]
            raise Discontinuous(STOPPED, line, "a value that is not differentiated and does not cancel")

    # Operations on formulas ---------------------------------------------------------------------------------------

    def rebuilt(self, atom: Atom, args: tuple[Terms, ...]) -> Terms:
        """An entrywise function of new arguments."""
        own, evaluate = atom.key
        return self.function(atom.name, own, evaluate, *args)

    def function(self, name: str, own: Any, evaluate: Callable, *args: Terms) -> Terms:
        """A function of one or a few numbers for each entry."""
        constants = [arg.constant for arg in args]
        if all(constant is not None for constant in constants):
            with np.errstate(all="ignore"):
                return number(np.asarray(evaluate(*constants)))
        shape = np.broadcast_shapes(*(arg.shape for arg in args))
        if name == "exp":
            return self._exp(own, evaluate, args[0])
        factors, rest = stopped_factors(args[0]) if name in ("log", "reciprocal") else ((), args[0])
        if factors and name == "log":
            found = self.function(name, own, evaluate, rest)
            for atom, power in factors:
                found = added(found, scaled(atom.args[0], float(power)))
            return found
        if factors:
            inverse = tuple((atom, -power) for atom, power in factors)
            return multiplied(self.function(name, own, evaluate, rest), Terms({inverse: np.ones(())}, shape)) or args[0]
        bounds = ENTRYWISE.get(name, ANY)
        if bounds == "same" or name == "pow":
            bounds = _bounds_of_sign(args[0])
        return self.atom(name, own, args, shape, bounds, entrywise=True, evaluate=evaluate)

    def _exp(self, own: Any, evaluate: Callable, x: Terms) -> Terms:
        """The exponential, with what is not differentiated as a separate factor that can cancel; zero for minus infinity."""
        moving, constant = x.split()
        if np.any(nothing := constant == -np.inf):
            if np.all(nothing):
                return number(np.zeros(x.shape))
            finite = added(moving, Terms({(): np.where(nothing, 0.0, constant)}, x.shape))
            return scaled(self._exp(own, evaluate, finite), ~nothing)
        apart: set[Monomial] = set()
        powers = []
        for monomial, c in x.terms.items():
            if len(monomial) == 1 and monomial[0][0].name == STOPPED and monomial[0][1] == 1 and _whole(c):
                powers.append((of_atom(monomial[0][0]), int(np.ravel(c)[0])))
                apart.add(monomial)
        inner = x.part(lambda m: m not in apart)
        if inner.constant is None or not powers:
            found = self.atom("exp", own, (inner,), x.shape, POSITIVE, entrywise=True, evaluate=evaluate)
        else:
            found = number(np.asarray(evaluate(inner.constant)))
        for one, power in powers:
            (pair,) = self.atom("exp", own, (one,), x.shape, POSITIVE, entrywise=True, evaluate=evaluate).atoms
            found = multiplied(found, Terms({((pair, power),): np.ones(())}, x.shape)) or found
        return found

    def product(self, x: Value, y: Value) -> Value:
        """``x y``."""

        def one(p, q):
            found = multiplied(as_terms(p), as_terms(q))
            if found is not None:
                return found
            args = tuple(sorted((as_terms(p), as_terms(q)), key=lambda arg: hash(arg.key)))
            bounds = POSITIVE if all(arg.sign > 0 for arg in args) else ANY
            return self.atom("mul", None, args, x.shape, bounds, True, entrywise=True, evaluate=np.multiply)

        return apply(one, x, y)

    def wide(self, x: Value, shape) -> Value:
        """Broadcast as arithmetic does it."""
        if x.shape == tuple(shape):
            return x
        if isinstance(x, np.ndarray):
            return np.broadcast_to(x, shape)
        places = tuple(range(len(shape) - len(x.shape), len(shape)))
        own = ("broadcast_in_dim", tuple(shape), places)
        return self.moved(lambda part: np.broadcast_to(part, shape), own, x, tuple(shape))

    def moved(self, move: Callable, own: Any, x: Value, shape: tuple[int, ...]) -> Value:
        """Entries moved, in every formula of a value, to an array of this shape."""
        if isinstance(x, np.ndarray):
            return np.asarray(move(x))
        if isinstance(x, Choice):
            asked = x.surface
            signs = self.sign(self.moved(move, own, asked.terms, shape), asked.where, asked.free, asked.guards)
            found = self.by_sign(signs, *(self.moved(move, own, x.cases[s], shape) for s in (1, 0, -1)))
            if isinstance(found, Choice):
                found.continuous = x.continuous
            return found

        def atom(old: Atom) -> Terms:
            if old.name == STOPPED:
                return self._stopped_moved(old, own, shape)
            if old.entrywise:
                args = (self.moved(move, own, self.wide(arg, old.shape), shape) for arg in old.args)
                return self.rebuilt(old, tuple(map(as_terms, args)))
            return self._moved_atom(old, own, shape)

        total = Terms({}, shape, noisy=x.noisy, gone=x.gone)
        for monomial, c in x.terms.items():
            c, size = (
                y if np.ndim(y) == 0 else np.asarray(move(np.broadcast_to(y, x.shape))) for y in (c, x.sizes[monomial])
            )
            term = Terms({(): c}, shape, {(): size})
            for old, power in monomial:
                new = atom(old)
                pair = next(iter(new.terms)) if len(new.terms) == 1 else ()
                if power < 0 and len(pair) == 1:
                    new = Terms({((pair[0][0], power * pair[0][1]),): np.ones(())}, shape)
                for _ in range(max(power, 1)):
                    term = self.product(term, new)
            total = added(total, as_terms(term))
        return total

    def _moved_atom(self, old: Atom, own: Any, shape) -> Terms:
        """An atom with its entries moved: there and back again is itself, and one number is the same everywhere."""
        before: tuple[Any, ...] = old.key[0] if old.name == "move" else ()
        inner = old.args[0] if before else of_atom(old)
        if math.prod(inner.shape) == 1:
            return self.atom("move", ("everywhere",), (inner,), shape, old.bounds, True)
        if (
            own[0] == "transpose"
            and before[:1] == ("transpose",)
            and [before[2][i] for i in own[2]] == [*range(len(shape))]
        ):
            return inner
        return self.atom("move", own, (of_atom(old),), shape, old.bounds, True)

    def _stopped_moved(self, old: Atom, own: Any, shape) -> Terms:
        """A value that is not differentiated keeps its name where only axes come, go or change places."""
        (symbol, axes), name = old.key[0], own[0]
        if name == "broadcast_in_dim":
            new: list[Any] = [None] * len(shape)
            for axis, place in enumerate(own[2]):
                new[place] = axes[axis] if old.shape[axis] != 1 else None
        elif name == "transpose":
            new = [axes[i] for i in own[2]]
        elif name in ("reshape", "squeeze") and [n for n in shape if n != 1] == [n for n in old.shape if n != 1]:
            left = iter([axis for axis, n in zip(axes, old.shape, strict=True) if n != 1])
            new = [None if n == 1 else next(left) for n in shape]
        else:
            return self.atom("move", own, (of_atom(old),), shape)
        return self.atom(STOPPED, (symbol, tuple(new)), (), shape)

    def opaque(self, name: str, own: Any, values: list[Value], shape, where: str, part: int = 0) -> Terms:
        """A continuous function of which nothing else is known."""
        args = tuple(self.settled(value, where) for value in values)
        bounds = (
            _bounds_of_sign(args[0]) if name in SAME_SIGN else _hull(args) if name in ("concatenate", "stack") else ANY
        )
        return self.atom(name, (own, part), args, shape, bounds, name in POLYNOMIAL)


def _hull(leaves: tuple[Terms, ...]) -> tuple[float, float]:
    """Bounds of all of them."""
    ends = [leaf.bounds for leaf in leaves]
    lows, highs = (np.concatenate([np.ravel(end[i]) for end in ends]) for i in (0, 1))
    return float(np.min(lows, initial=np.inf)), float(np.max(highs, initial=-np.inf))


def _bounds_of_sign(x: Terms) -> tuple[float, float]:
    """Bounds of a function that is not negative where its argument is not."""
    return POSITIVE if x.sign > 0 else ANY


def _side(terms: Terms) -> int:
    """The sign of the first coefficient, so that a formula and its negative have one surface."""
    monomial = min(terms.terms, key=lambda m: (not m, [(atom.number, power) for atom, power in m]))
    values = np.ravel(terms.terms[monomial])
    first = values[np.flatnonzero(values)[0]]
    return -1 if first < 0 else 1


def _whole(c: np.ndarray) -> bool:
    return bool(np.all(c == np.ravel(c)[0]) and float(np.ravel(c)[0]).is_integer())


def stopped_factors(x: Terms) -> tuple[Monomial, Terms]:
    """Factors ``e^{kM}`` with M not differentiated that all terms have in common, and the rest."""
    found = [tuple(pair for pair in monomial if _is_stopped_exp(pair[0])) for monomial in x.terms]
    if not found or not found[0] or any(factors != found[0] for factors in found):
        return (), x
    rest, sizes = (
        {tuple(pair for pair in m if not _is_stopped_exp(pair[0])): c for m, c in w.items()} for w in (x.terms, x.sizes)
    )
    return found[0], Terms(rest, x.shape, sizes)


def common_factors(x: Value) -> Monomial:
    """Factors that all leaves except zeros have in common."""
    found = {stopped_factors(as_terms(leaf))[0] for leaf in leaves_of(x) if as_terms(leaf).terms}
    return found.pop() if len(found) == 1 else ()


def _is_stopped_exp(atom: Atom) -> bool:
    inner = atom.args[0].terms if atom.name == "exp" else {}
    return len(inner) == 1 and all(len(m) == 1 and m[0][0].name == STOPPED for m in inner)


def steady_along(atom: Atom, axes) -> bool:
    """Whether ``e^M`` is the same along these axes."""
    _, places = next(iter(atom.args[0].atoms)).key[0]
    return all(places[axis] is None for axis in axes)
