"""Continuity of a program in its parameters: a part of every certificate.

The processes follow gradients. A jump has none, so that they would walk through it as if it were not there. So a program is
read once as formulas (`terms`) with choices (`choices`) where it compares, and is refused unless its value is shown to be
continuous. Kinks are allowed: values must meet, slopes need not. What is not differentiated (``stop_gradient``) must cancel,
and derivatives given by hand are not trusted, because then the gradient need not be that of the value.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from fedpdmc.enclosures.continuity.decision_trees import (
    MOST_LEAVES,
    Choice,
    Surface,
    Value,
    apply,
    as_terms,
    depends,
    joined,
    jump_of,
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
from fedpdmc.enclosures.interpreter import scan_lengths
from fedpdmc.enclosures.recognised_calls import BRANCHED, INNER, line_of, name_of_call, within_known
from fedpdmc.enclosures.registry import CALLS, RULES
from fedpdmc.enclosures.series import linear
from fedpdmc.errors import Discontinuous

# Functions of JAX that are smooth though their formulas have branches.
SMOOTH_CALLS = {*CALLS, *BRANCHED}
# Primitives of one value for each entry that jump.
JUMPS = {"floor", "ceil", "round", "rem", "atan2", "nextafter", "argmax", "argmin", "reduce_precision", "clz",
         "population_count", "shift_left", "shift_right_logical", "shift_right_arithmetic"}  # fmt: skip
# Of one number or a few for each entry, and between what numbers they lie; "same": not negative if the argument is not.
ANY, POSITIVE = (-np.inf, np.inf), (0.0, np.inf)
ENTRYWISE: dict[str, Any] = {
    **dict.fromkeys(("log", "tan", "asin", "acos", "acosh", "lgamma", "digamma", "erf_inv", "pow", "polygamma", "igamma",
                     "igammac", "regularized_incomplete_beta", "bessel_i0e", "bessel_i1e"), ANY),
    **dict.fromkeys(("exp", "exp2", "rsqrt", "sqrt"), (0.0, np.inf)), "erfc": (0.0, 2.0), "logistic": (0.0, 1.0),
    **dict.fromkeys(("sin", "cos", "tanh", "erf"), (-1.0, 1.0)), "cosh": (1.0, np.inf),
    **dict.fromkeys(("sinh", "asinh", "atanh", "atan", "log1p", "expm1", "cbrt", "reciprocal"), "same"),
}  # fmt: skip
MOVES = {"broadcast_in_dim", "reshape", "squeeze", "transpose", "rev", "slice", "gather", "dynamic_slice", "split",
         "unstack", "tile", "copy", "copy_p", "optimization_barrier"}  # fmt: skip
SAME_SIGN = {"reduce_sum", "reduce_max", "reduce_min", "cumsum", "cummax", "cummin", "reduce_prod", "cumprod"}


def check_continuity(function: Callable, dim: int) -> None:
    """Show that a function of ``dim`` parameters is continuous, and that its gradient is its own.

    Raises
    ------
    Discontinuous
        Where that is not shown: it may jump there.
    """
    closed = jax.make_jaxpr(lambda x: function(x))(jax.ShapeDtypeStruct((dim,), jnp.float64))
    text = str(closed.jaxpr)
    for small in (1, math.inf):
        # For all data if that can be shown, else for the data at hand.
        consts = [np.asarray(const) for const in closed.consts]
        known = [const.tobytes() if const.size <= small else b"" for const in consts]
        shapes = [(const.shape, str(const.dtype)) for const in consts]
        digest = hashlib.sha256(repr((text, shapes, known)).encode()).hexdigest()
        if digest in _SHOWN:
            return
        try:
            _read(closed.jaxpr, consts, small)
        except Discontinuous:
            if all(const.size <= small for const in consts):
                raise
        else:
            _SHOWN.add(digest)
            return


# Programs, with the data that were looked at, that were shown to be continuous.
_SHOWN: set[str] = set()


def _read(jaxpr, consts: list[np.ndarray], small: float) -> None:
    """Read a program, with arrays above this size as anything."""
    reader = _Reader()
    values = [const if const.size <= small else reader.fresh("data", const.shape, False) for const in consts]
    with jax.ensure_compile_time_eval():
        inputs = [reader.fresh("parameters", variable.aval.shape) for variable in jaxpr.invars]
        for value in reader.run(jaxpr, values, inputs, "the function"):
            reader.finished(value, "the function's value")


class _Reader:
    """One reading of a program; atoms and surfaces that are the same are made once."""

    def __init__(self):
        self.atoms: dict[Any, Atom] = {}
        self.surfaces: dict[Any, Surface] = {}
        self.numbers = itertools.count()
        self.trusted = False

    # Atoms and surfaces -------------------------------------------------------------------------------------------

    def atom(
        self, name: str, own: Any, args: tuple[Terms, ...], shape, bounds: tuple[float, float] = ANY,
        analytic: bool = True, entrywise: bool = False, evaluate: Callable | None = None,
    ) -> Terms:  # fmt: skip
        """A value with this name of these arguments."""
        identity = (name, own, tuple(arg.key for arg in args), tuple(shape))
        if identity not in self.atoms:
            needs = name == STOPPED or any(arg.depends for arg in args)
            smooth = analytic and all(arg.analytic for arg in args)
            made = Atom(name, (own, evaluate), args, shape, bounds, needs, smooth, entrywise)
            self.atoms[identity] = made
        return of_atom(self.atoms[identity])

    def fresh(self, name: str, shape, needs: bool = True, analytic: bool = True) -> Terms:
        """A value of which nothing is known."""
        return of_atom(Atom(name, next(self.numbers), (), shape, ANY, needs, analytic, False))

    def sign(self, x: Value, where: str, free: bool | None = None) -> Value:
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
            surface = self.surfaces.setdefault((upright.key, free), Surface(len(self.surfaces), upright, where, free))
            cases: dict[int, Value] = {s: np.full(terms.shape, float(side * s)) for s in (1, 0, -1)}
            if known:
                # The other side is never seen.
                cases[-side * known] = cases[side * known]
            return Choice(surface, cases)

        return self.held(apply(one, x), where)

    def by_sign(self, sign: Value, plus: Value, zero: Value, minus: Value) -> Value:
        """The value that a sign tells."""

        def pick(s, p, z, m):
            if all(isinstance(x, np.ndarray) for x in (p, z, m)):
                return np.where(s > 0, p, np.where(s < 0, m, z))
            return chosen(s > 0, as_terms(p), chosen(s < 0, as_terms(m), as_terms(z)))

        shape = sign.shape
        return apply(pick, sign, *(self.wide(x, shape) for x in (plus, zero, minus)))

    def held(self, x: Value, where: str) -> Value:
        """A value that is small enough to go on with, as an atom if need be."""
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
            raise Discontinuous("select_n", surface.where or where, "a choice whose branches are not shown to meet")
        leaves = tuple(as_terms(leaf) for leaf in leaves_of(x))
        ends = [leaf.bounds for leaf in leaves]
        bounds = float(np.min([np.min(low) for low, _ in ends])), float(np.max([np.max(high) for _, high in ends]))
        return self.atom("choice", key(x), leaves, x.shape, bounds, analytic=False)

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
        factors, rest = _stopped_factors(args[0]) if name in ("log", "reciprocal") else ((), args[0])
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
        """With what is not differentiated as a factor of its own, so that it can cancel; zero of minus infinity."""
        moving, constant = x.split()
        if np.any(nothing := constant == -np.inf):
            if np.all(nothing):
                return number(np.zeros(x.shape))
            finite = added(moving, Terms({(): np.where(nothing, 0.0, constant)}, x.shape))
            return scaled(self._exp(own, evaluate, finite), ~nothing)
        rest, powers = dict(x.terms), []
        for monomial, c in x.terms.items():
            if len(monomial) == 1 and monomial[0][0].name == STOPPED and monomial[0][1] == 1 and _whole(c):
                powers.append((of_atom(monomial[0][0]), int(np.ravel(c)[0])))
                del rest[monomial]
        inner = Terms(rest, x.shape)
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
            return self.atom("mul", None, args, x.shape, bounds, entrywise=True, evaluate=np.multiply)

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
            signs = self.sign(self.moved(move, own, x.surface.terms, shape), x.surface.where, x.surface.free)
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
            return self.atom("move", own, (of_atom(old),), shape, old.bounds)

        total = Terms({}, shape)
        for monomial, c in x.terms.items():
            term = number(np.asarray(c if np.ndim(c) == 0 else move(np.broadcast_to(c, x.shape))))
            term = Terms(term.terms, shape)
            for old, power in monomial:
                new = atom(old)
                pair = next(iter(new.terms)) if len(new.terms) == 1 else ()
                if power < 0 and len(pair) == 1:
                    new = Terms({((pair[0][0], power * pair[0][1]),): np.ones(())}, shape)
                for _ in range(max(power, 1)):
                    term = self.product(term, new)
            total = added(total, as_terms(term))
        return total

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
        return self.atom(STOPPED, (symbol, tuple(new)), (), shape, analytic=False, evaluate=None)

    def opaque(self, name: str, own: Any, values: list[Value], shape, where: str, part: int = 0) -> Terms:
        """A continuous function of which nothing else is known."""
        args = tuple(self.settled(value, where) for value in values)
        analytic = name not in ("reduce_max", "reduce_min", "cummax", "cummin", "sort")
        bounds = _bounds_of_sign(args[0]) if name in SAME_SIGN else ANY
        return self.atom(name, (own, part), args, shape, bounds, analytic)

    # The program --------------------------------------------------------------------------------------------------

    def run(self, jaxpr, consts, args, where: str) -> list[Value]:
        """Read a program equation by equation."""
        known: dict[Any, Value] = {}

        def read(atom):
            return np.asarray(atom.val) if isinstance(atom, core.Literal) else known[atom]

        known.update(zip(jaxpr.constvars, map(_value, consts), strict=True))
        known.update(zip(jaxpr.invars, args, strict=True))
        for equation in jaxpr.eqns:
            self.trusted = within_known(equation)
            found = self.equation(equation, [read(atom) for atom in equation.invars], line_of(equation) or where)
            known.update(zip(equation.outvars, found, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def equation(self, equation, values: list[Value], where: str) -> list[Value]:
        """The results of one equation."""
        name, params = equation.primitive.name, equation.params
        if name in INNER:
            return self._call(equation, values, where)
        if all(isinstance(value, np.ndarray) for value in values):
            found = equation.primitive.bind(*map(jnp.asarray, values), **params)
            return [np.asarray(x) for x in (found if equation.primitive.multiple_results else [found])]
        if name in FLOW:
            return FLOW[name](self, equation, values, where)
        if name in MOVES and (found := self._moves(equation, values)) is not None:
            return found
        if name in RULED:
            values = self._alike(values)
            found = RULED[name](self, params, where, *values)
            meets = name in MEETING or (name == "select_n" and not depends(values[0]))
            return [self._composed(found, values[name == "select_n" :], where) if meets else self.held(found, where)]
        if name in ENTRYWISE:
            values = self._alike(values)
            return [self._composed(self._entrywise(name, equation, values), values, where)]
        return self._others(equation, values, where)

    def _alike(self, values: list[Value]) -> list[Value]:
        shape = np.broadcast_shapes(*(value.shape for value in values))
        return [self.wide(value, shape) for value in values]

    def _composed(self, found: Value, values: list[Value], where: str) -> Value:
        """A continuous function of values: continuous where they are, however many pieces it has."""
        if not isinstance(found, Choice):
            return found
        found = pruned(found)
        if isinstance(found, Choice) and all(map(self.continuous, values)):
            found.continuous = True
        return self.held(found, where)

    def _entrywise(self, name: str, equation, values: list[Value]) -> Value:
        def evaluate(*arrays):
            return equation.primitive.bind(*map(jnp.asarray, arrays), **equation.params)

        own = str(sorted(equation.params.items()))
        return apply(lambda *leaves: self.function(name, own, evaluate, *map(as_terms, leaves)), *values)

    def _moves(self, equation, values: list[Value]) -> list[Value] | None:
        name, params, (x, *rest) = equation.primitive.name, equation.params, values
        if name == "optimization_barrier":
            return values
        fills = name == "gather" and params["mode"] == jax.lax.GatherScatterMode.FILL_OR_DROP
        if fills or not all(isinstance(value, np.ndarray) for value in rest):
            return None
        arrays = [jnp.asarray(value) for value in rest]

        def move(i: int, part):
            found = equation.primitive.bind(jnp.asarray(part), *arrays, **params)
            return np.asarray(found[i] if equation.primitive.multiple_results else found)

        places = params.get("broadcast_dimensions", params.get("permutation"))
        own = (name, str(sorted(params.items())), places, *(value.tobytes() for value in rest))
        shapes = [variable.aval.shape for variable in equation.outvars]
        return [self.moved(lambda part, i=i: move(i, part), (*own, i), x, shape) for i, shape in enumerate(shapes)]

    def _others(self, equation, values: list[Value], where: str) -> list[Value]:
        """Functions of whole arrays: linear maps, extremes, and what a user has registered."""
        name, params = equation.primitive.name, equation.params
        shapes = [variable.aval.shape for variable in equation.outvars]
        own = str(sorted((k, v) for k, v in params.items() if not hasattr(v, "eqns")))
        if not any(map(depends, values)):
            args = tuple(leaf for value in values for leaf in map(as_terms, leaves_of(value)))
            return [self.atom(name, (own, i), args, shape, analytic=False) for i, shape in enumerate(shapes)]
        indices = (
            values[1:] if name in ("gather", "dynamic_slice") else values[1:2] if name.startswith("scatter") else []
        )
        jump = name in JUMPS or any(map(depends, indices)) or (name == "sort" and len(values) > 1)
        if jump or not (name in RULES or name in linear.MOVES or name in CONTINUOUS):
            raise Discontinuous(name, where, "of a value that depends on the parameters")
        if name == "reduce_sum":
            factors = _common_factors(values[0])
            if factors and all(_steady(atom, params["axes"]) for atom, _ in factors):
                rest = apply(lambda leaf: _stopped_factors(as_terms(leaf))[1], values[0])
                return [self._summed(own, rest, factors, params["axes"], shapes[0], where)]
        return [self.opaque(name, own, values, shape, where, i) for i, shape in enumerate(shapes)]

    def _summed(self, own: Any, rest: Value, factors: Monomial, axes, shape, where: str) -> Terms:
        """A sum with its common factor taken out."""
        total = self.opaque("reduce_sum", own, [rest], shape, where)
        for atom, power in factors:
            (symbol, places) = next(iter(atom.args[0].atoms)).key[0]
            kept = tuple(place for axis, place in enumerate(places) if axis not in axes)
            inner = self.atom(STOPPED, (symbol, kept), (), shape, analytic=False, evaluate=None)
            (pair,) = self.atom(
                "exp", atom.key[0], (inner,), shape, POSITIVE, entrywise=True, evaluate=atom.key[1]
            ).atoms
            total = multiplied(total, Terms({((pair, power),): np.ones(())}, shape)) or total
        return total

    def _call(self, equation, values: list[Value], where: str) -> list[Value]:
        name, inner = equation.primitive.name, equation.params[INNER[equation.primitive.name]]
        jaxpr, consts = (inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, ())
        called = name_of_call(equation)
        if called in SMOOTH_CALLS and any(map(depends, values)) and len(jaxpr.outvars) == 1:

            def evaluate(*arrays):
                return core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, consts))(*map(jnp.asarray, arrays))[0]

            values = self._alike(values)
            known = apply(lambda *leaves: self.function(called, (), evaluate, *map(as_terms, leaves)), *values)
            return [self._composed(known, values, where)]
        if name.startswith("custom_") and not called and any(map(depends, values)):
            raise Discontinuous(name, where, "a derivative given by hand, which need not be that of the function")
        return self.run(jaxpr, consts, values, where)

    def loop(self, equation, values: list[Value], where: str) -> list[Value]:
        """A scan: its body is shown to be continuous in all that enters it, whatever is carried."""
        params, inner = equation.params, equation.params["jaxpr"]
        n_consts, n_carry = scan_lengths(params)
        consts, carry, xs = values[:n_consts], values[n_consts : n_consts + n_carry], values[n_consts + n_carry :]
        needs = [depends(value) for value in carry]
        slices = [self.fresh("scanned", x.shape[1:], depends(x), False) for x in xs]
        while True:
            state = [self.fresh("carried", x.shape, need, False) for x, need in zip(carry, needs, strict=True)]
            found = self.run(inner.jaxpr, inner.consts, [*consts, *state, *slices], where)
            after = [old or depends(new) for old, new in zip(needs, found[:n_carry], strict=True)]
            if after == needs:
                break
            needs = after
        for value in (*carry, *xs, *found):
            self.finished(value, where)
        flags = [*needs, *map(depends, found[n_carry:])]
        return [
            self.fresh("scan", variable.aval.shape, need, False)
            for variable, need in zip(equation.outvars, flags, strict=True)
        ]

    def cond(self, equation, values: list[Value], where: str) -> list[Value]:
        """Branches: by a number, or by data, each continuous."""
        index, *operands = values
        branches = equation.params["branches"]
        if depends(index):
            raise Discontinuous("cond", where, "a condition that depends on the parameters")
        if isinstance(index, np.ndarray):
            branch = branches[min(max(int(index), 0), len(branches) - 1)]
            return self.run(branch.jaxpr, branch.consts, operands, where)
        outs = [self.run(branch.jaxpr, branch.consts, operands, where) for branch in branches]
        for value in itertools.chain(*outs):
            self.finished(value, where)
        return [
            self.fresh("cond", cases[0].shape, any(map(depends, cases)), False) for cases in zip(*outs, strict=True)
        ]

    def endless(self, equation, values: list[Value], where: str) -> list[Value]:
        """A loop of unknown length, of data alone."""
        if any(map(depends, values)):
            raise Discontinuous("while", where, "a loop whose length may depend on the parameters")
        return [self.fresh("while", variable.aval.shape, False, False) for variable in equation.outvars]

    def solve(self, equation, values: list[Value], where: str) -> list[Value]:
        """A linear system."""
        shapes = [variable.aval.shape for variable in equation.outvars]
        return [self.opaque("custom_linear_solve", where, values, shape, where, i) for i, shape in enumerate(shapes)]


# Continuous functions of their arguments.
MEETING = {"add", "add_any", "sub", "neg", "mul", "div", "integer_pow", "square", "max", "min", "clamp", "abs"}
FLOW: dict[str, Callable[..., list[Value]]] = {
    "scan": _Reader.loop, "cond": _Reader.cond, "while": _Reader.endless, "custom_linear_solve": _Reader.solve,
}  # fmt: skip
# Without rules of their own on cells, but continuous.
CONTINUOUS = {"cholesky", "triangular_solve", "custom_linear_solve", "sort", "conv_general_dilated"}


def _bounds_of_sign(x: Terms) -> tuple[float, float]:
    """Of a function that is not negative where its argument is not."""
    return POSITIVE if x.sign > 0 else ANY


def _value(x: Any) -> Value:
    return x if isinstance(x, (Terms, Choice)) else np.asarray(x)


def _side(terms: Terms) -> int:
    """The sign of the first coefficient, so that a formula and its negative have one surface."""
    monomial = min(terms.terms, key=lambda m: (not m, [(atom.number, power) for atom, power in m]))
    values = np.ravel(terms.terms[monomial])
    first = values[np.flatnonzero(values)[0]]
    return -1 if first < 0 else 1


def _whole(c: np.ndarray) -> bool:
    return bool(np.all(c == np.ravel(c)[0]) and float(np.ravel(c)[0]).is_integer())


def _stopped_factors(x: Terms) -> tuple[Monomial, Terms]:
    """Factors ``e^{kM}`` with M not differentiated that all terms have in common, and the rest."""
    found = [tuple(pair for pair in monomial if _is_stopped_exp(pair[0])) for monomial in x.terms]
    if not found or not found[0] or any(factors != found[0] for factors in found):
        return (), x
    rest = {tuple(pair for pair in m if not _is_stopped_exp(pair[0])): c for m, c in x.terms.items()}
    return found[0], Terms(rest, x.shape)


def _common_factors(x: Value) -> Monomial:
    """Those of all leaves that are not zero."""
    found = {_stopped_factors(as_terms(leaf))[0] for leaf in leaves_of(x) if as_terms(leaf).terms}
    return found.pop() if len(found) == 1 else ()


def _is_stopped_exp(atom: Atom) -> bool:
    inner = atom.args[0].terms if atom.name == "exp" else {}
    return len(inner) == 1 and all(len(m) == 1 and m[0][0].name == STOPPED for m in inner)


def _steady(atom: Atom, axes) -> bool:
    """Whether ``e^M`` is the same along these axes."""
    _, places = next(iter(atom.args[0].atoms)).key[0]
    return all(places[axis] is None for axis in axes)


# Rules of operations that are polynomials, choices or comparisons -------------------------------------------------------


def _add(reader: _Reader, params, where, x: Value, y: Value) -> Value:
    return apply(lambda p, q: added(as_terms(p), as_terms(q)), x, y)


def _neg(reader: _Reader, params, where, x: Value) -> Value:
    return apply(lambda p: scaled(as_terms(p), -1.0), x)


def _sub(reader: _Reader, params, where, x: Value, y: Value) -> Value:
    return _add(reader, params, where, x, _neg(reader, params, where, y))


def _mul(reader: _Reader, params, where, x: Value, y: Value) -> Value:
    return reader.product(x, y)


def _div(reader: _Reader, params, where, x: Value, y: Value) -> Value:
    def inverse(p):
        if isinstance(p, np.ndarray):
            with np.errstate(all="ignore"):
                return 1 / p
        return reader.function("reciprocal", None, lambda v: 1 / v, p)

    return reader.product(x, apply(inverse, y))


def _integer_pow(reader: _Reader, params, where, x: Value) -> Value:
    n, found = params["y"], x
    if abs(n) > 8:
        return apply(lambda p: reader.function("integer_pow", n, lambda v: np.power(v, float(n)), as_terms(p)), x)
    if n == 0:
        return np.ones(x.shape)
    for _ in range(abs(n) - 1):
        found = reader.product(found, x)
    return found if n > 0 else _div(reader, params, where, np.ones(x.shape), found)


def _square(reader: _Reader, params, where, x: Value) -> Value:
    return reader.product(x, x)


def _max(reader: _Reader, params, where, x: Value, y: Value) -> Value:
    for one, other in ((x, y), (y, x)):
        if isinstance(one, np.ndarray) and np.all(one == -np.inf):
            return other
    return reader.by_sign(reader.sign(_sub(reader, params, where, x, y), where), x, x, y)


def _min(reader: _Reader, params, where, x: Value, y: Value) -> Value:
    for one, other in ((x, y), (y, x)):
        if isinstance(one, np.ndarray) and np.all(one == np.inf):
            return other
    return reader.by_sign(reader.sign(_sub(reader, params, where, x, y), where), y, y, x)


def _clamp(reader: _Reader, params, where, least: Value, x: Value, most: Value) -> Value:
    return _min(reader, params, where, _max(reader, params, where, x, least), most)


def _abs(reader: _Reader, params, where, x: Value) -> Value:
    return reader.by_sign(reader.sign(x, where), x, x, _neg(reader, params, where, x))


def _sign(reader: _Reader, params, where, x: Value) -> Value:
    return reader.sign(x, where)


def _compare(plus: bool, zero: bool, minus: bool) -> Callable[..., Value]:
    answers = [np.asarray(answer) for answer in (plus, zero, minus)]

    def found(reader: _Reader, params, where, x: Value, y: Value) -> Value:
        for one, side in ((x, 1), (y, -1)):
            if isinstance(one, np.ndarray) and one.dtype.kind == "f" and one.size and np.all(np.isinf(one)):
                # A finite number is below infinity; one that is not finite stops the run.
                return np.where(side * one > 0, *(np.broadcast_to(a, one.shape) for a in (answers[0], answers[2])))
        difference = _sub(reader, params, where, _plain(x), _plain(y))
        return reader.by_sign(reader.sign(difference, where), *answers)

    return found


def _plain(x: Value) -> Value:
    """Truths as numbers."""
    return apply(lambda p: p.astype(float) if isinstance(p, np.ndarray) else p, x)


def _logical(function: Callable) -> Callable[..., Value]:
    def found(reader: _Reader, params, where, *values: Value) -> Value:
        def one(*leaves):
            if all(isinstance(leaf, np.ndarray) for leaf in leaves):
                return function(*leaves)
            return reader.atom(function.__name__, None, tuple(map(as_terms, leaves)), leaves[0].shape, analytic=False)

        if any(isinstance(leaf, Terms) and leaf.depends for value in values for leaf in leaves_of(value)):
            raise Discontinuous("and", where, "bits of a value that depends on the parameters")
        return apply(one, *values)

    return found


def _select(reader: _Reader, params, where, which: Value, *cases: Value) -> Value:
    def one(index, *leaves):
        if isinstance(index, np.ndarray):
            found = as_terms(leaves[-1])
            for i in range(len(leaves) - 2, -1, -1):
                found = chosen(np.asarray(index).astype(int) == i, as_terms(leaves[i]), found)
            if all(isinstance(leaf, np.ndarray) for leaf in leaves):
                return np.select([index.astype(int) == i for i in range(len(leaves))], leaves)
            return found
        # Data that are not known here: by their sign, which has nothing to do with the parameters.
        return reader.by_sign(reader.sign(index, where), leaves[-1], leaves[0], leaves[0])

    if any(isinstance(leaf, Terms) and leaf.depends for leaf in leaves_of(which)):
        raise Discontinuous("select_n", where, "a choice by a number that depends on the parameters")
    return apply(one, which, *cases)


def _convert(reader: _Reader, params, where, x: Value) -> Value:
    dtype = params["new_dtype"]

    def one(p):
        return p.astype(dtype) if isinstance(p, np.ndarray) else p

    whole = not jnp.issubdtype(dtype, jnp.floating)
    if whole and any(isinstance(leaf, Terms) and leaf.depends for leaf in leaves_of(x)):
        raise Discontinuous("convert_element_type", where, "a value that depends on the parameters as a whole number")
    return apply(one, x)


def _stop(reader: _Reader, params, where, x: Value) -> Value:
    if not depends(x):
        return x
    axes = tuple(None if n == 1 else i for i, n in enumerate(x.shape))
    return reader.atom(STOPPED, ((next(reader.numbers), where), axes), (), x.shape, analytic=False)


def _truths(reader: _Reader, params, where, x: Value) -> Value:
    """Whether all or any are true: nothing is known of where that changes."""
    shape = tuple(n for i, n in enumerate(x.shape) if i not in params["axes"])
    if not depends(x):
        return reader.atom("truths", str(params), tuple(map(as_terms, leaves_of(x))), shape, analytic=False)
    some = Atom("truths", next(reader.numbers), (), shape, ANY, True, False, False)
    surface = Surface(len(reader.surfaces), of_atom(some), where)
    reader.surfaces[surface.terms.key] = surface
    return joined(surface, {1: np.ones(shape, bool), 0: np.zeros(shape, bool), -1: np.zeros(shape, bool)})


RULED: dict[str, Callable[..., Value]] = {
    "add": _add, "add_any": _add, "sub": _sub, "neg": _neg, "mul": _mul, "div": _div, "integer_pow": _integer_pow,
    "square": _square, "max": _max, "min": _min, "clamp": _clamp, "abs": _abs, "sign": _sign,
    "gt": _compare(True, False, False), "ge": _compare(True, True, False), "lt": _compare(False, False, True),
    "le": _compare(False, True, True), "eq": _compare(False, True, False), "ne": _compare(True, False, True),
    "and": _logical(np.logical_and), "or": _logical(np.logical_or), "xor": _logical(np.logical_xor),
    "not": _logical(np.logical_not), "select_n": _select, "convert_element_type": _convert, STOPPED: _stop,
    "reduce_and": _truths, "reduce_or": _truths, "is_finite": lambda reader, params, where, x: np.ones(x.shape, bool),
}  # fmt: skip
