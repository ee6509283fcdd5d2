"""Formulas in a normal form, choices among them, and whether the cases of a choice meet.

A formula is a polynomial of atoms, entry by entry, with numbers as coefficients. An atom is a parameter, a function of
formulas, or anything else that is only known by its name. Two formulas with one normal form are equal for all parameters;
two with different ones may be equal too, which is then not known.

A choice has a value for each sign of a formula, its surface. It is continuous if its cases are equal where that is zero.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from fedpdmc.enclosures.domain import Varying
from fedpdmc.enclosures.primitives import ANY, HALF, known

# A product of sums with more terms than this becomes an atom.
MOST_TERMS = 24
# A choice with more cases than this is replaced by an atom if it is continuous.
FEW_CASES = 5
# A choice with more cases than this must be.
MOST_CASES = 48
# Numbers that differ by less than this, relative to what was added up in them, are the same but for rounding.
SAME = 2.0**-47
# A coefficient that is this small beside what was added up in it has cancelled.
GONE = 2.0**-30
# Rounding above this share of what is left decides a comparison.
NOISE = 1e-6
# Numbers below this are nothing: a probability just before it is rounded to zero.
TINY = 1e-290
# A number this small beside its terms may have either sign.
NEAR = 1e-9

_NUMBERS = itertools.count()


class Atom:
    """A value with a name.

    Attributes
    ----------
    own : hashable
        What tells it from others of this name with the same arguments.
    depends : bool
        Whether it depends on the parameters.
    evaluate : callable, optional
        A function of arrays, where an entry depends on the same entry of the arguments alone.
    whole : bool
        Whether it is a whole number or a truth.
    bounds : pair of numbers
        That it lies between, ends included; ``positive`` if it is not zero either.
    """

    def __init__(
        self, name: str, own: Any, args: tuple[NormalForm, ...], shape, depends: bool, evaluate: Callable | None, whole: bool
    ):  # fmt: skip
        self.name, self.own, self.args, self.shape, self.depends = name, own, args, tuple(shape), depends
        self.evaluate, self.whole, self.number = evaluate, whole, next(_NUMBERS)
        self.bounds = _range(name, [arg.bounds for arg in args])
        kept = name in ("move", "reciprocal", "sqrt", "rsqrt", "mul") and all(arg.sign == 2 for arg in args)
        self.positive = known(name).positive or (kept and bool(args)) or self.bounds[0] > 0

    @functools.cached_property
    def within(self) -> frozenset[Atom]:
        """The atom and those in its arguments, at any depth."""
        return frozenset({self}).union(*(arg.within for arg in self.args))

    @functools.cached_property
    def seen(self) -> frozenset[Atom]:
        """The atom and those in its arguments whose derivatives the gradient has wherever they are evaluated."""
        return frozenset({self}).union(*(() if known(self.name).chooses else (arg.seen for arg in self.args)))

    @functools.cached_property
    def total(self) -> bool:
        """Whether it is a finite number wherever its arguments are."""
        return known(self.name).total and all(arg.finite for arg in self.args)

    @functools.cached_property
    def partial(self) -> bool:
        """Whether it may be no number for some parameters, though its arguments are."""
        name = known(self.name)
        number = name.number or (name.of_positive and self.args[0].sign > 0)
        inside = name.chooses and any(atom.partial for arg in self.args for atom in arg.within)
        return self.depends and (inside or not (number and all(arg.finite_numbers for arg in self.args)))


def _range(name: str, args: list[tuple[float, float]]) -> tuple[float, float]:
    """Bounds of a function of numbers between these bounds."""
    if not args or known(name).range != ANY:
        return known(name).range
    lows, highs = zip(*args, strict=True)
    if known(name).hull:
        return min(lows), max(highs)
    if name in ("max", "min"):
        pick = max if name == "max" else min
        return pick(lows), pick(highs)
    if name == "clamp":
        return min(max(lows[1], lows[0]), lows[2]), min(max(highs[1], highs[0]), highs[2])
    return HALF if known(name).keeps_sign and min(lows) >= 0 else ANY


Monomial = tuple[tuple[Atom, int], ...]


class NormalForm(Varying):
    """``Σ c_m m`` over monomials m, products of powers of atoms; coefficients are arrays, or numbers for all entries.

    Attributes
    ----------
    sizes : dict
        For each monomial the sum of the absolute values that were added up in its coefficient, to which the rounding of that
        is relative.
    gone : float
        The largest coefficient that has cancelled; ``noisy`` if something that depends on the parameters has.
    """

    dtype = np.dtype(float)

    def __init__(
        self, terms: dict[Monomial, Any], shape, sizes: dict | None = None, noisy: bool = False, gone: float = 0.0
    ):
        self.terms = {m: c for m, value in terms.items() if np.any((c := np.asarray(value)) != 0)}
        self.sizes = {m: np.abs(c) if sizes is None else sizes[m] for m, c in self.terms.items()}
        self.shape, self.noisy, self.gone = tuple(shape), noisy, gone

    def part(self, keep: Callable[[Monomial], bool]) -> NormalForm:
        """The terms whose monomials are to be kept."""
        return NormalForm(
            {m: c for m, c in self.terms.items() if keep(m)}, self.shape, self.sizes, self.noisy, self.gone
        )

    @property
    def atoms(self) -> set[Atom]:
        """The atoms of the polynomial, not those within other atoms."""
        return {atom for monomial in self.terms for atom, _ in monomial}

    @property
    def within(self) -> frozenset[Atom]:
        """All atoms, at any depth."""
        return frozenset().union(*(atom.within for atom in self.atoms))

    @property
    def seen(self) -> frozenset[Atom]:
        """The atoms whose derivatives the gradient has wherever they are evaluated."""
        return frozenset().union(*(atom.seen for atom in self.atoms))

    @property
    def depends(self) -> bool:
        """Whether it depends on the parameters, by rounding at least."""
        return self.noisy or any(atom.depends for atom in self.atoms)

    @property
    def whole(self) -> bool:
        """Whether it is a whole number or a truth of which nothing is known."""
        return any(atom.whole for atom in self.atoms)

    @property
    def finite_numbers(self) -> bool:
        """Whether all coefficients are finite."""
        return all(np.all(np.isfinite(c)) for c in self.terms.values())

    @property
    def finite(self) -> bool:
        """Whether it is a finite number for all parameters."""
        return self.finite_numbers and all(atom.total for atom in self.atoms)

    @property
    def constant(self) -> np.ndarray | None:
        """The number that it is, if it is one."""
        return None if any(self.terms) else np.broadcast_to(self.terms.get((), np.zeros(())), self.shape)

    @property
    def key(self) -> Any:
        """Equal for equal normal forms."""
        return self.shape, frozenset((m, _digest(c)) for m, c in self.terms.items())

    @property
    def bounds(self) -> tuple[float, float]:
        """Numbers that it lies between, ends included, all entries."""
        low = high = np.zeros(())
        for monomial, c in self.terms.items():
            ends = [c]
            with np.errstate(invalid="ignore"):
                for atom, power in monomial:
                    least, most = atom.bounds
                    if power % 2 == 0:
                        least, most = 0.0 if least < 0 else least, max(abs(least), abs(most))
                    ends = [np.where(end == 0, 0.0, end * side**power) for end in ends for side in (least, most)]
                low, high = low + np.minimum.reduce(ends), high + np.maximum.reduce(ends)
        low, high = float(np.min(low, initial=np.inf)), float(np.max(high, initial=-np.inf))
        return -math.inf if math.isnan(low) else low, math.inf if math.isnan(high) else high

    @property
    def computed_bounds(self) -> tuple[float, float]:
        """Numbers that it is between as it is computed too: without sums and products, which are rounded."""
        if (constant := self.constant) is not None:
            entries = constant.astype(float)
            return float(np.min(entries, initial=np.inf)), float(np.max(entries, initial=-np.inf))
        ((monomial, c), *others) = self.terms.items()
        if others or len(monomial) != 1 or monomial[0][1] != 1 or not np.all(c == 1):
            return ANY
        atom = monomial[0][0]
        return _range(atom.name, [arg.computed_bounds for arg in atom.args])

    @property
    def sign(self) -> int:
        """±2 if positive or negative, ±1 if not negative or not positive, 0 if nothing is known."""
        low, high = self.bounds
        for side, least in ((1, low), (-1, -high)):
            if least > 0 or (least == 0 and any(_is_positive(m, side * c) for m, c in self.terms.items())):
                return side * 2
            if least == 0:
                return side
        return 0

    @property
    def decided_by_rounding(self) -> bool:
        """Whether the rounding of what has cancelled hides what is left of it, where parameters are of usual size."""
        left = max([_largest(c) for m, c in self.terms.items() if any(atom.depends for atom, _ in m)], default=0.0)
        return left > 0 and self.gone * 2.0**-52 > NOISE * left


def _is_positive(monomial: Monomial, c: np.ndarray) -> bool:
    return bool(np.all(c > 0)) and all(atom.positive for atom, _ in monomial)


def _digest(array: np.ndarray) -> Any:
    if array.size and np.all(array == array.flat[0]):
        return array.flat[0].item()
    return array.shape, hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def number(value: Any) -> NormalForm:
    """A constant."""
    array = np.asarray(value)
    return NormalForm({(): array}, array.shape)


def of_atom(atom: Atom) -> NormalForm:
    """An atom alone."""
    return NormalForm({((atom, 1),): np.ones(())}, atom.shape)


def add(x: NormalForm, y: NormalForm) -> NormalForm:
    """``x + y`` of one shape."""
    terms, sizes = dict(x.terms), dict(x.sizes)
    with np.errstate(invalid="ignore"):
        for m, c in y.terms.items():
            terms[m], sizes[m] = (terms[m] + c, sizes[m] + y.sizes[m]) if m in terms else (c, y.sizes[m])
    both = x.terms.keys() & y.terms.keys()
    noisy = any(np.any(terms[m] == 0) and any(atom.depends for atom, _ in m) for m in both)
    gone = max([x.gone, y.gone, *(_largest(sizes[m], np.abs(terms[m]) <= GONE * sizes[m]) for m in both)])
    return NormalForm(terms, x.shape, sizes, x.noisy or y.noisy or noisy, gone)


def _largest(c: Any, where: Any = True) -> float:
    sizes = np.abs(np.asarray(c, float))
    return float(np.max(np.where(where & np.isfinite(sizes), sizes, 0.0), initial=0.0))


def scale(x: NormalForm, factor: Any) -> NormalForm:
    """Times numbers."""
    with np.errstate(invalid="ignore"):
        sizes = {m: size * np.abs(factor) for m, size in x.sizes.items()}
        terms = {m: c * factor for m, c in x.terms.items()}
    return NormalForm(terms, x.shape, sizes, x.noisy, x.gone * _largest(factor) if x.gone else 0.0)


def subtract(x: NormalForm, y: NormalForm) -> NormalForm:
    """``x − y`` of one shape."""
    return add(x, scale(y, -1.0))


def multiply(x: NormalForm, y: NormalForm) -> NormalForm | None:
    """``x y`` of one shape; None if it has too many terms."""
    if len(x.terms) * len(y.terms) > MOST_TERMS:
        return None
    gone = max(w.gone * max(map(_largest, v.terms.values()), default=0.0) for w, v in ((x, y), (y, x)))
    found = NormalForm({}, x.shape, noisy=x.noisy or y.noisy, gone=gone)
    for (m, c), (n, d) in itertools.product(x.terms.items(), y.terms.items()):
        powers: dict[Atom, int] = dict(m)
        for atom, power in n:
            powers[atom] = powers.get(atom, 0) + power
        both = tuple(sorted(powers.items(), key=lambda pair: pair[0].number))
        with np.errstate(invalid="ignore"):
            found = add(found, NormalForm({both: c * d}, x.shape, {both: x.sizes[m] * y.sizes[n]}))
    return found


def choose(mask: np.ndarray, yes: NormalForm, no: NormalForm) -> NormalForm:
    """``yes`` where a constant mask is true, ``no`` elsewhere."""
    if np.all(mask) or not np.any(mask):
        return yes if np.all(mask) else no

    def merge(one: dict[Monomial, Any], other: dict[Monomial, Any]) -> dict[Monomial, Any]:
        return {m: np.where(mask, one.get(m, 0.0), other.get(m, 0.0)) for m in {**one, **other}}

    terms, sizes = merge(yes.terms, no.terms), merge(yes.sizes, no.sizes)
    return NormalForm(terms, yes.shape, sizes, yes.noisy or no.noisy, max(yes.gone, no.gone))


def equal(x: NormalForm, y: NormalForm) -> np.ndarray:
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


# Choices ---------------------------------------------------------------------------------------------------------------


class Surface:
    """Where a formula is zero.

    Attributes
    ----------
    free : bool
        Whether the cases need not agree there: the data decide, or the function is known to be continuous.
    thin : bool
        Whether the formula is a parameter less a number, which is zero on a null set: what happens there does not matter.
    guards : frozenset of Atom
        Where there are some, the question is whether these atoms are numbers: they are on the positive side. ``compared``
        if they are asked by a comparison with another number.
    """

    def __init__(
        self, place: int, terms: NormalForm, where: str, free: bool, thin: bool, guards: frozenset[Atom], compared: bool
    ):  # fmt: skip
        self.place, self.terms, self.where, self.guards = place, terms, where, guards
        self.thin, self.compared, self.free = thin, compared, free or not terms.depends


class PiecewiseValue(Varying):
    """A value for each sign of a surface's formula; whether it is continuous, None if that is not known yet."""

    dtype = np.dtype(float)

    def __init__(self, surface: Surface, cases: dict[int, Value]):
        self.surface, self.cases = surface, cases
        self.continuous: bool | None = None
        self.count: int = sum(case.count if isinstance(case, PiecewiseValue) else 1 for case in cases.values())

    @property
    def shape(self):
        """Shape of the value."""
        return self.cases[1].shape

    @property
    def depends(self) -> bool:
        """Whether it depends on the parameters."""
        return self.surface.terms.depends or any(map(depends, self.cases.values()))


Value = Any  # an array, a NormalForm or a PiecewiseValue
SIGNS = (1, 0, -1)


class _Pair:
    """Two formulas that must be equal, as the leaf of a choice."""

    def __init__(self, one: Any, other: Any):
        self.one, self.other = as_normal_form(one), as_normal_form(other)
        self.shape, self.key = self.one.shape, (self.one.key, self.other.key)


def depends(x: Value) -> bool:
    """Whether a value depends on the parameters."""
    return isinstance(x, (NormalForm, PiecewiseValue)) and x.depends


def as_normal_form(x: Value) -> NormalForm:
    """A leaf as a formula."""
    return x if isinstance(x, NormalForm) else number(x)


def key(x: Value) -> Any:
    """Equal for equal values."""
    if isinstance(x, PiecewiseValue):
        return (x.surface.place, *(key(x.cases[s]) for s in SIGNS))
    return x.key if isinstance(x, _Pair) else as_normal_form(x).key


def apply(function: Callable[..., Value], *values: Value) -> Value:
    """An operation on the leaves of choices; it may return a choice itself."""
    surfaces = [value.surface for value in values if isinstance(value, PiecewiseValue)]
    if not surfaces:
        return function(*values)
    first = min(surfaces, key=lambda surface: surface.place)
    return join(first, {s: apply(function, *(_branch(value, first, s) for value in values)) for s in SIGNS})


def _branch(value: Value, surface: Surface, sign: int) -> Value:
    return value.cases[sign] if isinstance(value, PiecewiseValue) and value.surface is surface else value


def join(surface: Surface, cases: dict[int, Value]) -> Value:
    """A choice in which surfaces are asked for in the order of their places."""
    if len({key(case) for case in cases.values()}) == 1:
        return cases[1]
    asked = [case.surface for case in cases.values() if isinstance(case, PiecewiseValue)]
    if all(other.place > surface.place for other in asked):
        return PiecewiseValue(surface, cases)
    first = min(asked, key=lambda other: other.place)
    if first is surface:
        return join(surface, {s: restrict(case, surface, s) for s, case in cases.items()})
    inner = {s: join(surface, {t: _branch(case, first, s) for t, case in cases.items()}) for s in SIGNS}
    return join(first, inner)


def restrict(value: Value, surface: Surface, sign: int) -> Value:
    """A value reduced to the case of a known sign."""
    if not isinstance(value, PiecewiseValue):
        return value
    if value.surface is surface:
        return restrict(value.cases[sign], surface, sign)
    return join(value.surface, {s: restrict(case, surface, sign) for s, case in value.cases.items()})


def surfaces_of(value: Value) -> dict[int, Surface]:
    """All surfaces that a value asks for, by place."""
    if not isinstance(value, PiecewiseValue):
        return {}
    found = {value.surface.place: value.surface}
    for case in value.cases.values():
        found |= surfaces_of(case)
    return found


def leaves_of(value: Value) -> Iterator[Value]:
    """The leaves."""
    if not isinstance(value, PiecewiseValue):
        yield value
        return
    for case in value.cases.values():
        yield from leaves_of(case)


# Where cases meet ------------------------------------------------------------------------------------------------------


Rebuild = Callable[[Atom, tuple[NormalForm, ...]], NormalForm]


def jump_of(value: Value, rebuild: Rebuild) -> Surface | None:
    """A surface at which a value is not shown to be continuous; None if it is continuous.

    The two sides of each surface must be equal where its formula is zero, and so must the value on it, unless that is a null
    set.
    """
    for surface in surfaces_of(value).values():
        if surface.free:
            continue
        plus, zero, minus = (restrict(value, surface, s) for s in SIGNS)
        if surface.guards or not _meet(surface.terms, plus, minus, rebuild):
            return surface
        if not surface.thin and not _meet(surface.terms, plus, zero, rebuild):
            return surface
    return None


def _meet(zero: NormalForm, one: Value, other: Value, rebuild: Rebuild) -> bool:
    """Whether two values are equal wherever ``zero`` is."""
    pairs = apply(_Pair, one, other)

    def agree(by: dict[Atom, NormalForm], here: NormalForm, there: np.ndarray) -> bool:
        seen: dict[Atom, NormalForm] = {}

        def put(x: NormalForm) -> NormalForm:
            return replace_atoms(x, by, rebuild, seen) if by else x

        for mask, pair in _reach(pairs, put, there):
            x, y = put(pair.one), put(pair.other)
            if not np.all(equal(x, y) | ~mask):
                # They may differ by a multiple of what is zero here.
                rest = remainder(subtract(x, y), here)
                if not np.all(equal(rest, NormalForm({}, rest.shape)) | ~mask):
                    return False
        return True

    return _on_surface(zero, np.ones(zero.shape, bool), {}, agree)


def remainder(x: NormalForm, zero: NormalForm) -> NormalForm:
    """The remainder of x after division by a polynomial that is zero; x itself if it cannot be divided by it."""
    atoms = sorted(x.atoms | zero.atoms, key=lambda atom: atom.number)

    def order(monomial: Monomial) -> tuple:
        degrees = tuple(dict(monomial).get(atom, 0) for atom in atoms)
        return sum(degrees), degrees

    leading = max(zero.terms, key=order, default=())
    if not leading or np.any(zero.terms[leading] == 0):
        return x
    rest = scale(zero.part(lambda m: m != leading), -1 / zero.terms[leading])
    for _ in range(MOST_TERMS):
        high = next((m for m in x.terms if all(dict(m).get(atom, 0) >= power for atom, power in leading)), None)
        if high is None:
            return x
        left = tuple((atom, n) for atom, power in high if (n := power - dict(leading).get(atom, 0)))
        product = multiply(NormalForm({left: x.terms[high]}, x.shape, {left: x.sizes[high]}), rest)
        if product is None:
            return x
        x = add(x.part(lambda m: m != high), product)  # noqa: B023
    return x


def replace_atoms(
    x: NormalForm, by: dict[Atom, NormalForm], rebuild: Rebuild, seen: dict[Atom, NormalForm]
) -> NormalForm:
    """The formula with atoms replaced, within entrywise functions too; ``rebuild`` makes a function of new arguments."""

    def one(atom: Atom) -> NormalForm:
        if atom not in seen:
            seen[atom] = by.get(atom, of_atom(atom))
            if atom not in by and atom.evaluate is not None:
                args = tuple(replace_atoms(arg, by, rebuild, seen) for arg in atom.args)
                same = all(new.key == old.key for new, old in zip(args, atom.args, strict=True))
                seen[atom] = seen[atom] if same else rebuild(atom, args)
        return seen[atom]

    total = NormalForm({}, x.shape)
    for monomial, c in x.terms.items():
        product: NormalForm | None = NormalForm({(): np.broadcast_to(c, x.shape)}, x.shape, {(): x.sizes[monomial]})
        for atom, power in monomial:
            for _ in range(power):
                product = None if product is None else multiply(product, one(atom))
        if product is None:
            return x
        total = add(total, product)
    return total


def _reach(
    value: Value, put: Callable[[NormalForm], NormalForm], mask: np.ndarray
) -> Iterator[tuple[np.ndarray, _Pair]]:
    """The leaves that can be reached on a surface, with the entries that can."""
    if not np.any(mask) and mask.size:
        return
    if not isinstance(value, PiecewiseValue):
        yield mask, value
        return
    terms = put(value.surface.terms)
    can: dict[int, np.ndarray] = dict.fromkeys(SIGNS, np.ones(mask.shape, bool))
    if (constant := terms.constant) is not None and not value.surface.guards:
        near = np.abs(constant) <= NEAR * _scale(value.surface.terms, put)
        can = {1: near | (constant > 0), 0: near, -1: near | (constant < 0)}
    for s, case in value.cases.items():
        yield from _reach(case, put, mask & can[s])


def _scale(terms: NormalForm, put: Callable[[NormalForm], NormalForm]) -> np.ndarray:
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


def _on_surface(zero: NormalForm, there: np.ndarray, by: dict[Atom, NormalForm], agree: Callable[..., bool]) -> bool:
    """Whether a claim holds where ``zero = 0``, by solving for one atom after the other.

    ``there`` masks entries, and ``by`` has the values of atoms that are known there.
    """
    if agree(by, zero, there):
        return True
    if len(zero.terms) == 1 and len(factors := next(iter(zero.terms))) > 1:
        # A product is zero where a factor is.
        return all(_on_surface(of_atom(atom), there, by, agree) for atom, _ in factors)
    for own in [monomial for monomial in zero.terms if len(monomial) == 1]:
        ((atom, power),) = own
        rest = zero.part(lambda m: m != own)  # noqa: B023
        if np.any(zero.terms[own] == 0) or atom in rest.within:
            continue
        solution = scale(rest, -1 / zero.terms[own])
        if power == 1 and agree({**by, atom: solution}, zero, there):
            return True
        if (value := solution.constant) is None:
            continue
        with np.errstate(all="ignore"):
            if power > 1:
                inner, roots = of_atom(atom), [np.sign(value) * np.abs(value) ** (1 / power)]
            elif atom.name == "abs":
                inner, roots = atom.args[0], [value]
            elif atom.name in INVERSE:
                inner, roots = atom.args[0], [INVERSE[atom.name](value)]
            else:
                continue
        if power % 2 == 0 or atom.name == "abs":
            there, roots = there & (value >= 0), [roots[0], -roots[0]]
        if not np.all(np.isfinite(roots[0]) | ~there):
            continue
        roots = [np.where(there, root, 0.0) for root in roots]
        if all(
            _on_surface(add(inner, number(-root)), there, {**by, atom: number(value)} if power == 1 else by, agree)
            for root in roots
        ):
            return True
    return False


# Inverses of functions that are one to one; not finite where no argument has the value.
INVERSE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "exp": np.log, "log": np.exp, "log1p": np.expm1, "expm1": np.log1p, "sinh": np.arcsinh, "exp2": np.log2,
    "logistic": lambda p: np.log(p) - np.log1p(-p), "asinh": np.sinh,
}  # fmt: skip


# Making formulas -------------------------------------------------------------------------------------------------------


class NormalForms:
    """Makes formulas and choices; atoms and surfaces that are the same are made once."""

    def __init__(self):
        self._atoms: dict[Any, Atom] = {}
        self._surfaces: dict[Any, Surface] = {}
        # The line of the user's function that is being read, and whether it belongs to a function known to be continuous.
        self.where, self.trusted = "", False

    def atom(
        self,
        name: str,
        own: Any,
        args: tuple[NormalForm, ...],
        shape,
        evaluate: Callable | None = None,
        whole: bool = False,
    ) -> NormalForm:
        """A value with this name of these arguments."""
        identity = (name, own, tuple(arg.key for arg in args), tuple(shape))
        if identity not in self._atoms:
            needs = any(arg.depends for arg in args)
            self._atoms[identity] = Atom(name, own, args, shape, needs, evaluate, whole)
        return of_atom(self._atoms[identity])

    def fresh(self, name: str, shape, depends: bool = True, whole: bool = False) -> NormalForm:
        """A value of which nothing is known."""
        return of_atom(Atom(name, None, (), shape, depends, None, whole))

    def sign(self, leaf: NormalForm, free: bool = False, thin: bool = False) -> Value:
        """The sign of a formula: a choice where it is not known."""
        if (constant := leaf.constant) is not None:
            return np.sign(constant.astype(float))
        monomial = min(leaf.terms, key=lambda m: (not m, [(atom.number, power) for atom, power in m]))
        values = np.ravel(leaf.terms[monomial])
        # A formula and its negative have one surface.
        side = -1 if values[np.flatnonzero(values)[0]] < 0 else 1
        upright, known = scale(leaf, side), np.sign(leaf.sign)
        surface = self._surface(upright, free, thin)
        cases: dict[int, Value] = {s: np.full(leaf.shape, float(side * s)) for s in SIGNS}
        if known:
            # The other side is never seen.
            cases[-side * known] = cases[side * known]
        return PiecewiseValue(surface, cases)

    def _surface(
        self, terms: NormalForm, free: bool, thin: bool, guards=frozenset(), compared: bool = False
    ) -> Surface:
        identity = (guards, compared) if guards else (terms.key, free, thin)
        if identity not in self._surfaces:
            place = len(self._surfaces)
            self._surfaces[identity] = Surface(place, terms, self.where, free, thin, guards, compared)
        return self._surfaces[identity]

    def guard(self, answer: Value, otherwise: Value, guards: frozenset[Atom], compared: bool = False) -> Value:
        """``answer`` where these atoms are numbers, ``otherwise`` elsewhere."""
        if not guards or self.trusted:
            return answer
        surface = self._surface(self.fresh("number", np.shape(answer)), False, False, guards, compared)
        return join(surface, {1: answer, 0: otherwise, -1: otherwise})

    def by_sign(self, sign: Value, plus: Value, zero: Value, minus: Value) -> Value:
        """The value that a sign selects."""

        def pick(s, p, z, m):
            if not any(isinstance(x, NormalForm) for x in (p, z, m)):
                return np.where(s > 0, p, np.where(s < 0, m, z))
            return choose(s > 0, as_normal_form(p), choose(s < 0, as_normal_form(m), as_normal_form(z)))

        return apply(pick, sign, *(self.widen(x, sign.shape) for x in (plus, zero, minus)))

    def hold(self, x: Value) -> Value:
        """A value that is small enough to continue with; a large one is replaced by an atom, if it is continuous."""
        if not isinstance(x, PiecewiseValue) or x.count <= FEW_CASES:
            return x
        return self.settle(x) if x.count > MOST_CASES or self.continuous(x) else x

    def continuous(self, x: Value) -> bool:
        """Whether a value is shown to be continuous."""
        if isinstance(x, PiecewiseValue) and x.continuous is None:
            x.continuous = jump_of(x, self.rebuild) is None
        return not isinstance(x, PiecewiseValue) or bool(x.continuous)

    def settle(self, x: Value) -> NormalForm:
        """A value as one formula: continuous, or the program is refused."""
        raise NotImplementedError

    def rebuild(self, atom: Atom, args: tuple[NormalForm, ...]) -> NormalForm:
        """An entrywise function of new arguments."""
        assert atom.evaluate is not None
        if atom.name == "mul":
            return self.product(*args)
        return self.function(atom.name, atom.own, atom.evaluate, *args, noise=True)

    def function(self, name: str, own: Any, evaluate: Callable, *args: NormalForm, noise: bool = False) -> NormalForm:
        """A function of one or a few numbers for each entry; where ``noise``, what cancelling has left is a number."""
        constants = [None if arg.noisy and not noise else arg.constant for arg in args]
        if all(constant is not None for constant in constants):
            with np.errstate(all="ignore"), jax.ensure_compile_time_eval():
                return number(np.asarray(evaluate(*constants)))
        return self.atom(name, own, args, np.broadcast_shapes(*(arg.shape for arg in args)), evaluate)

    def product(self, x: NormalForm, y: NormalForm) -> NormalForm:
        """``x y``."""
        found = multiply(x, y)
        if found is not None:
            return found
        return self.atom("mul", None, tuple(sorted((x, y), key=lambda arg: hash(arg.key))), x.shape, np.multiply)

    def widen(self, x: Value, shape) -> Value:
        """Broadcast as arithmetic does it."""
        if tuple(np.shape(x)) == tuple(shape):
            return x
        return self.fields(lambda part: np.broadcast_to(part, shape), x)

    def fields(self, move: Callable, x: Value) -> Value:
        """A value with its entries moved, by a function that moves those of arrays."""
        with jax.ensure_compile_time_eval():
            if not isinstance(x, (NormalForm, PiecewiseValue)):
                return np.asarray(move(x))
            return self.move_entries(np.asarray(move(np.arange(math.prod(x.shape)).reshape(x.shape))), x)

    def move_entries(self, index: np.ndarray, x: Value) -> Value:
        """The entries of a value at these places of its flattened array."""
        if isinstance(x, np.ndarray):
            return x.reshape(-1)[index]
        if isinstance(x, PiecewiseValue):
            cases, asked = {s: self.move_entries(index, case) for s, case in x.cases.items()}, x.surface
            if asked.guards:
                forms = (self._move_atom(index, g) if g.shape == x.shape else of_atom(g) for g in asked.guards)
                guards = frozenset(atom for form in forms for atom in form.seen if not atom.total)
                return join(self._surface(asked.terms, False, False, guards, asked.compared), cases)
            here, self.where = self.where, asked.where
            sign = self.sign(self.move_entries(index, asked.terms), asked.free, asked.thin)
            self.where, found = here, self.by_sign(sign, cases[1], cases[0], cases[-1])
            if isinstance(found, PiecewiseValue):
                found.continuous = x.continuous
            return found
        if np.array_equal(index, np.arange(math.prod(x.shape)).reshape(x.shape)):
            return x
        total = NormalForm({}, index.shape, noisy=x.noisy, gone=x.gone)
        for monomial, c in x.terms.items():
            c, size = (
                y if np.ndim(y) == 0 else np.ravel(np.broadcast_to(y, x.shape))[index] for y in (c, x.sizes[monomial])
            )
            term = NormalForm({(): c}, index.shape, {(): size})
            for atom, power in monomial:
                for _ in range(power):
                    term = self.product(term, self._move_atom(index, atom))
            total = add(total, term)
        return total

    def _move_atom(self, index: np.ndarray, atom: Atom) -> NormalForm:
        """An atom with its entries moved: functions of entries are moved with their arguments, moves are combined."""
        if atom.evaluate is not None:
            args = (self.move_entries(index, self.widen(arg, atom.shape)) for arg in atom.args)
            return self.rebuild(atom, tuple(args))
        inner = of_atom(atom)
        if atom.name == "move":
            shape, places = atom.own
            index, inner = np.frombuffer(places, np.int64).reshape(shape).reshape(-1)[index], atom.args[0]
            if np.array_equal(index, np.arange(math.prod(inner.shape)).reshape(inner.shape)):
                return inner
        return self.atom("move", (index.shape, index.astype(np.int64).tobytes()), (inner,), index.shape)

    def opaque(self, name: str, own: Any, values: list[Value], shape, whole: bool = False) -> NormalForm:
        """A continuous function of which nothing else is known."""
        return self.atom(name, own, tuple(map(self.settle, values)), shape, whole=whole)
