"""Formulas in a normal form: polynomials of atoms, entry by entry, with numbers as coefficients.

An atom is a parameter, a function of formulas, or anything else that is only known by its name. Two formulas with one normal
form are equal for all parameters; two with different ones may be equal too, which is then not known.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

# A product of sums with more terms than this becomes an atom.
MOST_TERMS = 24
# Relative to what was added up in a coefficient: numbers that differ by less are the same but for rounding.
SAME = 2.0**-47
# What is left of numbers that cancel but for their rounding is below this, where paths go.
NOISE = 1e-6
# A coefficient this small beside what was added up in it has cancelled.
GONE = 2.0**-30
# Numbers below this are nothing: a probability just before it is rounded to zero.
TINY = 1e-290

_NUMBERS = itertools.count()


class Atom:
    """A value with a name.

    Attributes
    ----------
    entrywise : bool
        Whether an entry depends on the same entry of the arguments alone.
    bounds : pair of numbers
        That it lies between, ends included.
    depends : bool
        Whether it depends on the parameters.
    polynomial : bool
        Whether it is a polynomial of them: zero on a null set, or everywhere. Other functions may be zero on more, or be
        rounded to a number that they only approach.
    kinked : bool
        Whether it may be constant on a part of space without being so everywhere.
    """

    def __init__(
        self, name: str, key: Any, args: tuple[Terms, ...], shape, bounds: tuple[float, float], depends: bool,
        polynomial: bool, entrywise: bool,
    ):  # fmt: skip
        self.name, self.key, self.args, self.shape, self.bounds = name, key, args, tuple(shape), bounds
        self.depends, self.polynomial, self.entrywise, self.number = depends, polynomial, entrywise, next(_NUMBERS)
        self.kinked = depends and (name in KINKED or any(arg.kinked for arg in args))
        own = {self} if name == STOPPED else set()
        self.stopped: frozenset[Atom] = frozenset(own.union(*(arg.stopped for arg in args)))

    @functools.cached_property
    def within(self) -> frozenset[Atom]:
        """The atom and those in its arguments, at any depth."""
        return frozenset({self}).union(*(atom.within for arg in self.args for atom in arg.atoms))


# The name of atoms that are not differentiated.
STOPPED = "stop_gradient"
# The names of atoms with kinks, and of those of which nothing is known.
KINKED = {"choice", "reduce_max", "reduce_min", "cummax", "cummin", "sort", "scan", "carried", "scanned", "cond", "number",
          "compared", "truths", STOPPED}  # fmt: skip
Monomial = tuple[tuple[Atom, int], ...]


class Terms:
    """``Σ c_m m`` over monomials m, products of powers of atoms; coefficients are arrays, or numbers for all entries.

    ``sizes`` holds for each monomial the sum of the absolute values that were added up in its coefficient, to which the
    rounding of that is relative. Without them a coefficient counts as exact but for its own last places. ``noisy`` says
    whether something that depends on the parameters has cancelled: what is computed has its rounding. ``gone`` is the
    largest coefficient that has cancelled, of numbers too.
    """

    def __init__(
        self, terms: dict[Monomial, Any], shape, sizes: dict[Monomial, Any] | None = None, noisy: bool = False,
        gone: float = 0.0,
    ):  # fmt: skip
        self.gone = gone
        self.terms = {m: c for m, value in terms.items() if np.any((c := np.asarray(value)) != 0)}
        self.shape, self.noisy = tuple(shape), noisy
        self.sizes = {m: np.abs(c) if sizes is None else sizes[m] for m, c in self.terms.items()}

    def part(self, keep: Callable[[Monomial], bool]) -> Terms:
        """The terms whose monomials are to be kept."""
        return Terms({m: c for m, c in self.terms.items() if keep(m)}, self.shape, self.sizes, self.noisy, self.gone)

    @property
    def atoms(self) -> set[Atom]:
        """The atoms of the polynomial, not those within other atoms."""
        return {atom for monomial in self.terms for atom, _ in monomial}

    @property
    def depends(self) -> bool:
        """Whether it depends on the parameters."""
        return any(atom.depends for atom in self.atoms)

    @property
    def polynomial(self) -> bool:
        """Whether it is a polynomial of the parameters."""
        return all(atom.polynomial for atom in self.atoms)

    @property
    def kinked(self) -> bool:
        """Whether it may be constant on a part of space without being so everywhere."""
        return any(atom.kinked for atom in self.atoms)

    @property
    def stopped(self) -> frozenset[Atom]:
        """The atoms in it, at any depth, that are not differentiated."""
        return frozenset().union(*(atom.stopped for atom in self.atoms))

    @property
    def constant(self) -> np.ndarray | None:
        """The number that it is, if it is one."""
        if any(self.terms):
            return None
        return np.broadcast_to(self.terms.get((), np.zeros(())), self.shape)

    @property
    def key(self) -> Any:
        """Equal for equal normal forms."""
        return self.shape, frozenset((m, _digest(c)) for m, c in self.terms.items())

    @property
    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """Certain bounds of it, ends included: small numbers may be rounded to zero."""
        low = high = np.zeros(())
        for monomial, c in self.terms.items():
            least, most = _bounds(monomial)
            with np.errstate(invalid="ignore"):
                ends = [np.where(c == 0, 0.0, c * end) for end in (least, most)]
                low, high = low + np.minimum(*ends), high + np.maximum(*ends)
        return np.where(np.isnan(low), -np.inf, low), np.where(np.isnan(high), np.inf, high)

    @property
    def sign(self) -> int:
        """±2 if certainly positive or negative, ±1 if not negative or not positive, 0 if nothing is known."""
        low, high = self.bounds
        for side, worst in ((1, low), (-1, -high)):
            if np.all(worst >= 0):
                return side * (2 if np.all(worst > 0) else 1)
        return 0

    @property
    def decided_by_rounding(self) -> bool:
        """Whether the rounding of what has cancelled hides what is left of it, where parameters are of usual size."""
        left = max([_largest(c) for m, c in self.terms.items() if any(atom.depends for atom, _ in m)], default=0.0)
        return left > 0 and self.gone * 2.0**-52 > NOISE * left

    def split(self) -> tuple[Terms, np.ndarray]:
        """What varies, and the constant."""
        return self.part(bool), np.asarray(self.terms.get((), np.zeros(())))


def _bounds(monomial: Monomial) -> tuple[float, float]:
    """Bounds of a monomial."""
    if not monomial:
        return 1.0, 1.0
    if len(monomial) == 1 and monomial[0][1] == 1:
        return monomial[0][0].bounds
    signs = [atom.bounds[0] >= 0 or power % 2 == 0 for atom, power in monomial]
    return (0.0 if all(signs) else -np.inf), np.inf


def _digest(array: np.ndarray) -> Any:
    if array.size and np.all(array == array.flat[0]):
        return array.flat[0].item()
    return array.shape, hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def number(value: Any) -> Terms:
    """A constant."""
    array = np.asarray(value)
    return Terms({(): array}, array.shape)


def of_atom(atom: Atom) -> Terms:
    """An atom alone."""
    return Terms({((atom, 1),): np.ones(())}, atom.shape)


def added(x: Terms, y: Terms) -> Terms:
    """``x + y`` of one shape."""
    terms, sizes = dict(x.terms), dict(x.sizes)
    for monomial, c in y.terms.items():
        with np.errstate(invalid="ignore"):
            for total, own in ((terms, c), (sizes, y.sizes[monomial])):
                total[monomial] = total[monomial] + own if monomial in total else own
    # Numbers that cancel are data, whose rounding is always the same.
    both = x.terms.keys() & y.terms.keys()
    noisy = any(np.any(terms[m] == 0) and any(atom.depends for atom, _ in m) for m in both)
    gone = max([x.gone, y.gone, *(_largest(sizes[m], np.abs(terms[m]) <= GONE * sizes[m]) for m in both)])
    return Terms(terms, x.shape, sizes, x.noisy or y.noisy or noisy, gone)


def _largest(c: Any, where: Any = True) -> float:
    """The largest absolute value of those that are finite."""
    sizes = np.abs(np.asarray(c, float))
    return float(np.max(np.where(where & np.isfinite(sizes), sizes, 0.0), initial=0.0))


def scaled(x: Terms, factor: Any) -> Terms:
    """Times numbers."""
    with np.errstate(invalid="ignore"):
        sizes = {m: size * np.abs(factor) for m, size in x.sizes.items()}
        terms = {m: c * factor for m, c in x.terms.items()}
        return Terms(terms, x.shape, sizes, x.noisy, x.gone * _largest(factor) if x.gone else 0.0)


def multiplied(x: Terms, y: Terms) -> Terms | None:
    """``x y`` of one shape; None if it has too many terms."""
    if len(x.terms) * len(y.terms) > MOST_TERMS:
        return None
    gone = max(
        w.gone * max(map(_largest, v.terms.values()), default=0.0) if w.gone else 0.0 for w, v in ((x, y), (y, x))
    )
    found = Terms({}, x.shape, noisy=x.noisy or y.noisy, gone=gone)
    for (m, c), (n, d) in itertools.product(x.terms.items(), y.terms.items()):
        with np.errstate(invalid="ignore"):
            size = {(both := joined(m, n)): x.sizes[m] * y.sizes[n]}
            found = added(found, Terms({both: c * d}, x.shape, size))
    return found


def joined(one: Monomial, other: Monomial) -> Monomial:
    """The product of two monomials."""
    powers: dict[Atom, int] = dict(one)
    for atom, power in other:
        powers[atom] = powers.get(atom, 0) + power
    there = [(atom, power) for atom, power in powers.items() if power]
    return tuple(sorted(there, key=lambda pair: pair[0].number))


def chosen(mask: np.ndarray, yes: Terms, no: Terms) -> Terms:
    """``yes`` where a constant mask is true, ``no`` elsewhere."""
    if np.all(mask) or not np.any(mask):
        return yes if np.all(mask) else no

    def merged(one: dict[Monomial, Any], other: dict[Monomial, Any]) -> dict[Monomial, Any]:
        return {m: np.where(mask, one.get(m, 0.0), other.get(m, 0.0)) for m in {**one, **other}}

    return Terms(
        merged(yes.terms, no.terms),
        yes.shape,
        merged(yes.sizes, no.sizes),
        yes.noisy or no.noisy,
        max(yes.gone, no.gone),
    )


def equal(x: Terms, y: Terms) -> np.ndarray:
    """Which entries have one normal form, but for the rounding of their numbers.

    Equal infinities are equal values: a path never crosses a surface if the potential rises to infinity on one side of it
    and is infinite on the other, whatever is added to it. NaN is equal to nothing.
    """
    zero, found = np.zeros(()), np.ones((), bool)
    one, other = (w.terms.get((), zero) for w in (x, y))
    endless = np.isinf(one) & (one == other)
    for c in (*x.part(bool).terms.values(), *y.part(bool).terms.values()):
        endless = endless & np.isfinite(c)
    for m in {**x.terms, **y.terms}:
        one, other = (1.0 * w.terms.get(m, zero) for w in (x, y))
        size = np.maximum(*(w.sizes.get(m, zero) for w in (x, y)))
        with np.errstate(invalid="ignore"):
            rounding = np.maximum(SAME * np.where(np.isfinite(size), size, 0.0), TINY)
            found = found & ((np.abs(one - other) <= rounding) | (one == other))
    return np.broadcast_to(found | endless, x.shape)


def remainder(x: Terms, zero: Terms) -> Terms:
    """The remainder of x after division by a polynomial that is zero; x itself if it cannot be divided by it."""
    atoms = sorted(x.atoms | zero.atoms, key=lambda atom: atom.number)

    def order(monomial: Monomial) -> tuple:
        powers = dict(monomial)
        degrees = tuple(powers.get(atom, 0) for atom in atoms)
        return sum(degrees), degrees

    if any(power < 0 for w in (x, zero) for monomial in w.terms for _, power in monomial):
        return x
    leading = max(zero.terms, key=order, default=())
    if not leading or np.any(zero.terms[leading] == 0):
        return x
    rest = scaled(zero.part(lambda m: m != leading), -1 / zero.terms[leading])
    for _ in range(MOST_TERMS):
        high = next((m for m in x.terms if all(dict(m).get(atom, 0) >= power for atom, power in leading)), None)
        if high is None:
            return x
        left = joined(high, tuple((atom, -power) for atom, power in leading))
        factor = Terms({left: x.terms[high]}, x.shape, {left: x.sizes[high]})
        product = multiplied(factor, rest)
        if product is None:
            return x
        x = added(x.part(lambda m: m != high), product)  # noqa: B023
    return x


def replaced(
    x: Terms, by: dict[Atom, Terms], rebuild: Callable[[Atom, tuple[Terms, ...]], Terms], seen: dict,
    finish: Callable[[Terms], Terms] = lambda x: x,
) -> Terms:  # fmt: skip
    """The formula with atoms replaced, within entrywise functions too; ``rebuild`` makes a function of new arguments.

    ``finish`` is applied to every formula that is made.
    """

    def one(atom: Atom) -> Terms:
        if atom not in seen:
            if atom in by:
                seen[atom] = by[atom]
            elif not atom.entrywise or not atom.args:
                seen[atom] = of_atom(atom)
            else:
                args = tuple(replaced(arg, by, rebuild, seen, finish) for arg in atom.args)
                same = all(new.key == old.key for new, old in zip(args, atom.args, strict=True))
                seen[atom] = of_atom(atom) if same else rebuild(atom, args)
        return seen[atom]

    total = Terms({}, x.shape)
    for monomial, c in x.terms.items():
        product: Terms | None = Terms({(): np.broadcast_to(c, x.shape)}, x.shape, {(): x.sizes[monomial]})
        for atom, power in monomial:
            new = one(atom)
            if power < 0:
                kept = of_atom(atom) if new.key == of_atom(atom).key else None
                factor = None if kept is None else Terms({((atom, power),): np.ones(())}, x.shape)
            else:
                factor = number(np.ones(x.shape))
                for _ in range(power):
                    factor = None if factor is None else multiplied(factor, new)
            product = None if product is None or factor is None else multiplied(product, factor)
        if product is None:
            return finish(x)
        total = added(total, product)
    return finish(total)
