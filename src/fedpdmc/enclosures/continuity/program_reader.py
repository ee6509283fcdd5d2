"""A program read equation by equation as formulas with choices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from fedpdmc._jax.by_numpy import INNER
from fedpdmc.enclosures.cell_values import Cell
from fedpdmc.enclosures.continuity.computations import Computations
from fedpdmc.enclosures.continuity.decision_trees import (
    Choice,
    Value,
    apply,
    as_terms,
    depends,
    key,
    leaves_of,
    pruned,
    surfaces_of,
)
from fedpdmc.enclosures.continuity.formula_operations import RULED
from fedpdmc.enclosures.continuity.formulas import (
    ENTRYWISE,
    POSITIVE,
    Formulas,
    common_factors,
    steady_along,
    stopped_factors,
)
from fedpdmc.enclosures.continuity.normal_form import STOPPED, Atom, Monomial, Terms, multiplied
from fedpdmc.enclosures.continuity.not_a_number import FILLED, lost, tame, undefined, wild
from fedpdmc.enclosures.control_flow import scan_lengths
from fedpdmc.enclosures.origins import BRANCHED, is_by_hand, is_of_jax, line_of, name_of_call, place_of, within_known
from fedpdmc.enclosures.recognised_calls import CALLS
from fedpdmc.enclosures.shared_rules import MOVES as MOVED
from fedpdmc.errors import Discontinuous

# Functions of JAX that are smooth although their formulas have branches.
SMOOTH_CALLS = {*CALLS, *BRANCHED}
# Primitives that are discontinuous.
JUMPS = {"floor", "ceil", "round", "rem", "atan2", "nextafter", "argmax", "argmin", "reduce_precision", "clz",
         "population_count", "shift_left", "shift_right_logical", "shift_right_arithmetic"}  # fmt: skip
MOVES = {"broadcast_in_dim", "reshape", "squeeze", "transpose", "rev", "slice", "gather", "dynamic_slice", "split",
         "unstack", "tile", "copy", "copy_p", "optimization_barrier"}  # fmt: skip


class Reader(Formulas):
    """One reading of a program.

    Where ``lenient``, primitives without rules are taken for continuous. The comparisons in ``fixed``, equations by their
    identity, have results that do not depend on the parameters, but may be anything.
    """

    def __init__(self, lenient: bool = False, fixed: frozenset[int] = frozenset()):
        super().__init__()
        self.lenient, self.fixed = lenient, fixed
        # Values, by identity, with the atoms that they have lost.
        self.hidden: dict[int, tuple[Value, frozenset[Atom]]] = {}
        self.computations = Computations()

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
        name = equation.primitive.name
        if name in INNER:
            return self._call(equation, values, where)
        if all(isinstance(value, np.ndarray) for value in values):
            self.lost = self._lost_by(values)
            return self._remembered(self._computed(equation, values), self.lost)
        if name in FLOW:
            return FLOW[name](self, equation, values, where)
        self.lost = self._lost_by(values)
        if name in MOVES and (found := self._moves(equation, values)) is not None:
            self.computations.remember(equation, values, found)
            return self._remembered(found, self.lost)
        given = values
        numbers = {self.computations.number(value) for value in values}
        self.alike = len(values) == 2 and len(numbers) == 1
        before = self._lost_by(values[name == "select_n" :])
        if name in RULED or name in ENTRYWISE:
            values = self._alike(values)
        found = self._ruled(equation, values, where)
        self.computations.remember(equation, given, found)
        if equation.outvars[0].aval.dtype.kind != "f":
            # Whether all of it was a number has been asked for.
            return found
        if name == "mul":
            # Zero times infinity.
            zero = [isinstance(value, np.ndarray) and value.size and not np.any(value) for value in values]
            before = before.union(
                *(undefined(y, True) for y, other in zip(values, reversed(zero), strict=True) if other)
            )
        return self._remembered(found, lost(before, values[name == "select_n" :], found))

    def _ruled(self, equation, values: list[Value], where: str) -> list[Value]:
        name, params = equation.primitive.name, equation.params
        if id(equation) in self.fixed:
            side = self.fresh("side", equation.outvars[0].aval.shape, False)
            values = [side, np.zeros(side.shape)][: len(values)]
        if name in RULED:
            if name == "convert_element_type":
                params = {**params, "old_dtype": equation.invars[0].aval.dtype}
            whole = name in WHOLE and equation.invars[0].aval.dtype.kind != "f"
            found = self._whole(equation, values, where) if whole else RULED[name](self, params, where, *values)
            meets = name in MEETING or (name == "select_n" and not depends(values[0]))
            return [self._composed(found, values[name == "select_n" :], where) if meets else self.held(found, where)]
        if name in ENTRYWISE:
            if name == "pow":
                _check_power(values[0], values[1], where)
            return [self._composed(self._entrywise(name, equation, values), values, where)]
        return self._others(equation, values, where)

    def _lost_by(self, values: list[Value]) -> frozenset[Atom]:
        return frozenset().union(*(self.hidden[id(value)][1] for value in values if id(value) in self.hidden))

    def _remembered(self, found: list[Value], atoms: frozenset[Atom]) -> list[Value]:
        """Results, with what they have lost."""
        for value in found if atoms else ():
            self.hidden[id(value)] = value, atoms
        return found

    def _computed(self, equation, values: list[np.ndarray]) -> list[np.ndarray]:
        found = equation.primitive.bind(*map(jnp.asarray, values), **equation.params)
        return [np.asarray(x) for x in (found if equation.primitive.multiple_results else [found])]

    def _whole(self, equation, values: list[Value], where: str) -> Value:
        """An operation on whole numbers or truths, which has rules of its own: division, bits, overflow."""
        name, dtypes = equation.primitive.name, [variable.aval.dtype for variable in equation.invars]

        def one(*leaves):
            numbers = [leaf if isinstance(leaf, np.ndarray) else leaf.constant for leaf in leaves]
            if all(x is not None for x in numbers):
                return self._computed(equation, list(map(np.asarray, numbers, dtypes)))[0]
            if name in WRAPPING:
                own = str(equation.params), str(dtypes[0])
                return self.atom(f"whole {name}", own, tuple(map(as_terms, leaves)), leaves[0].shape)
            return RULED[name](self, equation.params, where, *leaves)

        return apply(one, *values)

    def _alike(self, values: list[Value]) -> list[Value]:
        shape = np.broadcast_shapes(*(value.shape for value in values))
        return [self.wide(value, shape) for value in values]

    def _composed(self, found: Value, values: list[Value], where: str) -> Value:
        """A continuous function of values: continuous where they are, however many pieces it has."""
        if not isinstance(found, Choice):
            return found
        found = pruned(found)
        asks = any(surface.guards for surface in surfaces_of(found).values())
        if isinstance(found, Choice) and not asks and all(map(self.continuous, values)):
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
        if not all(isinstance(value, np.ndarray) for value in rest):
            return None
        arrays = [jnp.asarray(value) for value in rest]
        if _fills(equation):
            there = equation.primitive.bind(jnp.ones(x.shape), *arrays, **{**params, "fill_value": np.nan})
            if np.any(np.isnan(there)):
                return None

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
        own = (
            str(sorted((k, v) for k, v in params.items() if not hasattr(v, "eqns"))),
            str(equation.outvars[0].aval.dtype),
        )
        if not any(map(depends, values)):
            own = own, tuple(map(key, values))
            return [self.atom(name, (own, i), (), shape) for i, shape in enumerate(shapes)]
        indices = (
            values[1:] if name in ("gather", "dynamic_slice") else values[1:2] if name.startswith("scatter") else []
        )
        jump = name in JUMPS or any(map(depends, indices)) or (name == "sort" and len(values) > 1)
        if jump or not (self.lenient or Cell.knows(name) or name in MOVED or name in CONTINUOUS):
            raise Discontinuous(name, where, "of a value that depends on the parameters")
        if name == "reduce_sum":
            factors = common_factors(values[0])
            if factors and all(steady_along(atom, params["axes"]) for atom, _ in factors):
                rest = apply(lambda leaf: stopped_factors(as_terms(leaf))[1], values[0])
                return [self._summed(own, rest, factors, params["axes"], shapes[0], where)]
        if name == "cholesky" and not self._is_symmetric(values[0], equation):
            raise Discontinuous(name, where, ONE_SIDED)
        name = FILLED if _fills(equation) else name
        return [self.opaque(name, own, values, shape, where, i) for i, shape in enumerate(shapes)]

    def _is_symmetric(self, x: Value, equation) -> bool:
        """Whether a matrix is shown to be symmetric; JAX differentiates its factor as if it were."""
        if self.computations.is_sum_with_transposed(x):
            return True
        n = len(x.shape)
        places = (*range(n - 2), n - 1, n - 2)
        own = ("transpose", str([("permutation", places)]), places, 0)
        mirrored = self.moved(lambda part: np.swapaxes(part, -1, -2), own, self.settled(x, line_of(equation)), x.shape)
        return key(mirrored) == key(self.settled(x, line_of(equation)))

    def _summed(self, own: Any, rest: Value, factors: Monomial, axes, shape, where: str) -> Terms:
        """A sum with its common factor taken out."""
        total = self.opaque("reduce_sum", own, [rest], shape, where)
        for atom, power in factors:
            (symbol, places) = next(iter(atom.args[0].atoms)).key[0]
            kept = tuple(place for axis, place in enumerate(places) if axis not in axes)
            inner = self.atom(STOPPED, (symbol, kept), (), shape)
            (pair,) = self.atom(
                "exp", atom.key[0], (inner,), shape, POSITIVE, entrywise=True, evaluate=atom.key[1]
            ).atoms
            total = multiplied(total, Terms({((pair, power),): np.ones(())}, shape)) or total
        return total

    def _call(self, equation, values: list[Value], where: str) -> list[Value]:
        name, inner = equation.primitive.name, equation.params[INNER[equation.primitive.name]]
        jaxpr, consts = (inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, ())
        called = name_of_call(equation)
        if name.startswith("custom_") and is_by_hand(equation) and any(map(depends, values)):
            raise Discontinuous(name, where, HAND)
        if called in SMOOTH_CALLS and any(map(depends, values)) and len(jaxpr.outvars) == 1:

            def evaluate(*arrays):
                return _entry_by_entry(core.ClosedJaxpr(jaxpr, consts), arrays)

            values = self._alike(values)
            known = apply(lambda *leaves: self.function(called, (), evaluate, *map(as_terms, leaves)), *values)
            return [self._composed(known, values, where)]
        return self.run(jaxpr, consts, values, where)

    def loop(self, equation, values: list[Value], where: str) -> list[Value]:
        """A scan: its body is shown to be continuous in all that enters it, whatever is carried."""
        params, inner = equation.params, equation.params["jaxpr"]
        n_consts, n_carry = scan_lengths(params)
        consts, carry, xs = values[:n_consts], values[n_consts : n_consts + n_carry], values[n_consts + n_carry :]
        needs = [depends(value) for value in carry]
        kinds = [variable.aval.dtype.kind for variable in inner.jaxpr.invars[n_consts:]]
        slices = [
            self.fresh(_name_of_part("scanned", x, kind), x.shape[1:], depends(x))
            for x, kind in zip(xs, kinds[n_carry:], strict=True)
        ]
        while True:
            state = [
                self.fresh("whole" if kind != "f" and not need else "carried", x.shape, need)
                for x, need, kind in zip(carry, needs, kinds, strict=False)
            ]
            found = self.run(inner.jaxpr, inner.consts, [*consts, *state, *slices], where)
            after = [old or depends(new) for old, new in zip(needs, found[:n_carry], strict=True)]
            if after == needs:
                break
            needs = after
        for value in (*carry, *xs, *found):
            self.finished(value, where)
        flags = [*needs, *map(depends, found[n_carry:])]
        return [
            self.fresh("scan", variable.aval.shape, need)
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
        return [self.fresh("cond", cases[0].shape, any(map(depends, cases))) for cases in zip(*outs, strict=True)]

    def endless(self, equation, values: list[Value], where: str) -> list[Value]:
        """A loop of unknown length, of data alone."""
        if any(map(depends, values)):
            raise Discontinuous("while", where, "a loop whose length may depend on the parameters")
        return [self.fresh("while", variable.aval.shape, False) for variable in equation.outvars]

    def solve(self, equation, values: list[Value], where: str) -> list[Value]:
        """A linear system, by a solver of JAX: the derivative is that of an exact solution."""
        if not is_of_jax(place_of(equation.params["jaxprs"].solve.jaxpr.debug_info)[1]):
            raise Discontinuous("custom_linear_solve", where, HAND)
        shapes = [variable.aval.shape for variable in equation.outvars]
        return [self.opaque("custom_linear_solve", where, values, shape, where, i) for i, shape in enumerate(shapes)]


def _check_power(base: Value, power: Value, where: str) -> None:
    """Zero to a power jumps where the power is zero."""
    if not depends(power):
        return
    positive = all(x.sign == 2 or (x.sign == 1 and x.depends and not x.kinked) for x in map(as_terms, leaves_of(power)))
    flat = any(x.sign != 2 and (x.kinked or not x.depends) for x in map(as_terms, leaves_of(base)))
    if flat and not positive:
        raise Discontinuous("pow", where, "zero to a power that may be zero")


# Operations with rules of their own for whole numbers.
WHOLE = {"add", "sub", "neg", "mul", "div", "integer_pow", "square", "max", "min", "clamp", "abs", "sign", "gt", "ge", "lt",
         "le", "eq", "ne", "and", "or", "xor", "not"}  # fmt: skip
# Those whose results wrap around, or depend on bits.
WRAPPING = {"add", "sub", "neg", "mul", "div", "integer_pow", "square", "abs", "and", "or", "xor", "not"}
# Continuous functions of their arguments.
MEETING = {"add", "add_any", "sub", "neg", "mul", "div", "integer_pow", "square", "one_minus_square", "max", "min", "clamp",
           "abs"}  # fmt: skip
FLOW: dict[str, Callable[..., list[Value]]] = {
    "scan": Reader.loop, "cond": Reader.cond, "while": Reader.endless, "custom_linear_solve": Reader.solve,
}  # fmt: skip
# Without rules of their own on cells, but continuous.
CONTINUOUS = {"cholesky", "triangular_solve", "custom_linear_solve", "sort", "conv_general_dilated"}


ONE_SIDED = "of a matrix that is not shown to be symmetric, which its derivative needs; jnp.linalg.cholesky makes it so"
HAND = "a derivative given by hand, which need not be that of the function"


def _fills(equation) -> bool:
    """Whether an equation puts NaN in place of entries that are not there."""
    params = equation.params
    if equation.primitive.name != "gather" or params["mode"] != jax.lax.GatherScatterMode.FILL_OR_DROP:
        return False
    return params["fill_value"] is None or bool(np.isnan(params["fill_value"]))


def _name_of_part(name: str, x: Value, kind: str) -> str:
    """The name of a part of an array: one of data that are finite is known to be so."""
    if depends(x):
        return name
    if kind != "f":
        return "whole"
    return "data" if (tame(x) if isinstance(x, np.ndarray) else not wild(x)) else name


def _entry_by_entry(closed: core.ClosedJaxpr, arrays: tuple[Any, ...]) -> np.ndarray:
    """An entrywise program of arrays of one shape, of arrays of another: so many numbers at a time as it has."""
    call, (own, *others) = core.jaxpr_as_fun(closed), (variable.aval.shape for variable in closed.jaxpr.invars)
    shape, size = np.broadcast_shapes(*map(np.shape, arrays)), math.prod(own)
    if shape == own or size == 0 or any(other != own for other in others):
        return np.asarray(call(*map(jnp.asarray, arrays))[0])
    flat = [np.ravel(np.broadcast_to(array, shape)) for array in arrays]
    parts = [
        np.ravel(call(*(jnp.asarray(np.resize(x[k : k + size], own)) for x in flat))[0])
        for k in range(0, len(flat[0]), size)
    ]
    return np.concatenate([*parts, np.zeros(0)])[: len(flat[0])].reshape(shape)


def _value(x: Any) -> Value:
    return x if isinstance(x, (Terms, Choice)) else np.asarray(x)
