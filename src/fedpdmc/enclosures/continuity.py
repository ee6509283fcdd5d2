"""Continuity of a program in its parameters: a part of every certificate.

The processes follow gradients. A jump has none, so they would walk through it as if it were not there. A program is
therefore read once, and refused unless every operation is one of a closed list of continuous ones, and every choice one of
these idioms. Kinks are allowed: values must meet, slopes need not.

- Continuous: operations with enclosures, but for those that round or look for places; maxima, `abs`, sorting, limits by
  data, loops of fixed length and branches by data whose parts are continuous.
- Choices: ``where(p > q, f, g)`` with f and g equal if a solution of p = q for one value is put into both
  (`fedpdmc.enclosures.formulas`): a Huber loss, a broken line, a safe argument within a choice.
- ``where(p == 0, c, f)`` where p is a parameter: it is zero on a null set.
- Whether a value is a number: ``where(isfinite(v), f, g)``, `nan_to_num`, where v is a part of f. The gradient then has
  the derivative of v, which is not finite at the edge.
- No derivative: ``stop_gradient(m)`` that cancels, as in `logsumexp`.
- Functions of JAX that `fedpdmc.enclosures.known_functions` knows, whatever their formulas.
- What the user vouches for (`continuous`), which no certificate takes for shown.

Derivatives given by hand are not trusted, because they need not be those of the value.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import source_info_util

from fedpdmc._jax.programs import INNER, called, equations, evaluate, scan_lengths
from fedpdmc.enclosures.control_flow import Shifted, settle, shifted, shifted_rule
from fedpdmc.enclosures.domain import PLAIN, is_point, is_zero
from fedpdmc.enclosures.formulas import (
    GUARD,
    SAME,
    SIGN,
    Formula,
    Formulas,
    Value,
    depends,
    is_positive,
    pick,
    questions_of,
    range_of,
    reach,
    text,
)
from fedpdmc.enclosures.intervals import Box
from fedpdmc.enclosures.known_functions import (
    VOUCHED,
    derivatives_by_hand,
    is_by_hand,
    is_of_jax,
    line_of,
    place_of,
    within_known,
)
from fedpdmc.enclosures.primitives import PARAMETERS, STOPPED, known
from fedpdmc.errors import Discontinuous

# Arrays of data of at most this size are known in a proof: none first, then all. `model_trial` leaves out the second.
KNOWN_SIZES: tuple[float, ...] = (1, math.inf)
# Data above this are huge: their powers may overflow.
HUGE = 1e60
# A choice that more questions than this decide is replaced by one value, if it is continuous.
FEW_QUESTIONS = 4
# With more than this it must be.
MOST_QUESTIONS = 16
# The name of what decides a choice whose cases are known to meet.
KNOWN_TO_MEET = "known to meet"
# The line of a function that a user vouches for is the one that calls it.
source_info_util.register_exclusion(__file__)
# Programs, with the data they were examined with, that were shown to be continuous.
_SHOWN: set[str] = set()


@dataclasses.dataclass(frozen=True)
class _Vouched:
    """A function that is marked in the programs which call it."""

    function: Callable

    def __call__(self, *args):
        leaves, structure = jax.tree.flatten(args)
        arrays = [hasattr(leaf, "dtype") for leaf in leaves]

        def call(*given):
            left = iter(given)
            parts = [next(left) if array else leaf for array, leaf in zip(arrays, leaves, strict=True)]
            return self.function(*jax.tree.unflatten(structure, parts))

        call.__name__ = VOUCHED
        return jax.jit(call)(*(leaf for array, leaf in zip(arrays, leaves, strict=True) if array))


def continuous(function: Callable) -> Callable:
    """Vouch that a model, or a function that a model calls, is continuous in the parameters and its gradient its own.

    For functions that the package cannot show to be continuous. A posterior is then not ``certified``: its certificate says
    that continuity is asserted, and jumps that are there make draws wrong without a word. Sites on a network and model files
    take no assertions.

    Parameters
    ----------
    function : callable
        In JAX, of arrays, to an array or several.

    Returns
    -------
    callable
        The same function, marked.
    """
    return _Vouched(function)


def is_vouched(equation: Any) -> bool:
    """Whether an equation calls a function that a user vouches for."""
    return equation.primitive.name in INNER and equation.params.get("name") == VOUCHED


def assertions(function: Callable, dim: int) -> tuple[str, ...]:
    """Where a function calls one that a user vouches for."""
    closed = jax.make_jaxpr(lambda x: function(x))(jax.ShapeDtypeStruct((dim,), jnp.float64))
    return tuple(dict.fromkeys(line_of(equation) for equation in equations(closed.jaxpr) if is_vouched(equation)))


def check_continuity(function: Callable, dim: int, lenient: bool = False) -> None:
    """Show that a function of ``dim`` parameters is continuous, and that its gradient is its own.

    It is shown for all data if that is possible, else for these. Where ``lenient``, primitives without rules are taken for
    continuous.

    Raises
    ------
    Discontinuous
        Where that is not shown: it may jump there.
    """
    closed = jax.make_jaxpr(lambda x: function(x))(jax.ShapeDtypeStruct((dim,), jnp.float64))
    text = str(closed.jaxpr), derivatives_by_hand(closed.jaxpr)
    consts = [np.asarray(const) for const in closed.consts]
    # What is shown for all data is shown for those that are finite.
    for small in KNOWN_SIZES if all(map(_is_tame, consts)) else KNOWN_SIZES[-1:]:
        known = [const.tobytes() if const.size <= small else b"" for const in consts]
        shapes = [(const.shape, str(const.dtype)) for const in consts]
        digest = hashlib.sha256(repr((text, shapes, known, lenient)).encode()).hexdigest()
        if digest in _SHOWN:
            return
        try:
            _read(closed.jaxpr, consts, small, lenient)
        except Discontinuous:
            if small == KNOWN_SIZES[-1] or all(const.size <= small for const in consts):
                raise
        else:
            _SHOWN.add(digest)
            return


def _is_tame(x: np.ndarray) -> bool:
    """Whether data are finite, and not huge."""
    return x.dtype.kind != "f" or bool(np.all(np.abs(x) < HUGE))


def _read(jaxpr, consts: list[np.ndarray], small: float, lenient: bool) -> None:
    """Read a program, with arrays above this size as anything."""
    reader = _Reader(lenient)
    values = [
        jnp.asarray(const) if const.size <= small else reader.fresh("data", const.shape, False) for const in consts
    ]
    inputs = [reader.fresh(PARAMETERS, variable.aval.shape) for variable in jaxpr.invars]
    for value in reader.run(jaxpr, values, inputs):
        reader.finish(value)


JUMPS = "a choice whose branches are not shown to meet"
NO_NUMBER = "a choice by a value that is not a number for some parameters"
INFINITE = "a comparison of numbers that are not finite"
ONE_SIDED = "of a matrix that is not shown to be symmetric, which its derivative needs; jnp.linalg.cholesky makes it so"
HAND = "a derivative given by hand, which need not be that of the function"


class _Reader(Formulas):
    """One reading of a program; where ``lenient``, primitives without rules are taken for continuous."""

    def __init__(self, lenient: bool):
        super().__init__()
        self.lenient, self.rules = lenient, RULES
        self.where, self._name, self._marks = "the function", "", itertools.count()
        self._continuous: set[Formula] = set()

    def run(self, jaxpr, consts, args) -> list[Value]:
        """Read a program equation by equation."""
        return evaluate(jaxpr, consts, args, self.equation)

    def refuse(self, reason: str) -> Discontinuous:
        """The error for what is being read."""
        return Discontinuous(self._name, self.where, reason)

    def settle(self, x: Value) -> Value:
        """A value that is continuous, or the program is refused."""
        found = self.assume_numbers(settle(self, x))
        jump = self._jump_of(found)
        if jump is not None:
            raise Discontinuous("select_n", jump.where or self.where, NO_NUMBER if jump.name == GUARD else JUMPS)
        return found

    def _jump_of(self, x: Value) -> Formula | None:
        if isinstance(x, Formula) and x in self._continuous:
            return None
        jump = self.jump_of(x)
        if jump is None and isinstance(x, Formula):
            self._continuous.add(x)
        return jump

    def hold(self, x: Value) -> Value:
        """A value that is small enough to continue with; one with many choices is replaced by a name if it is continuous."""
        count = len(questions_of(x))
        if count <= FEW_QUESTIONS or (count <= MOST_QUESTIONS and self._jump_of(x) is not None):
            return x
        return self.make("choice", None, (self.settle(x),), x.shape)

    def finish(self, x: Value) -> None:
        """A value without jumps and without anything that is not differentiated."""
        for one in reach(self.settle(x), lambda one: one.name not in (SIGN, GUARD)):
            if one.name == STOPPED:
                raise Discontinuous(STOPPED, one.own[1], "a value that is not differentiated and does not cancel")

    def opaque(self, name: str, own: Any, values: list[Value], shape) -> Formula:
        """A continuous function of which nothing else is known."""
        return self.make(name, own, map(self.settle, values), shape)

    def equation(self, equation, values: list[Value]) -> list[Value]:
        """The results of one equation."""
        name, params, outer = equation.primitive.name, equation.params, (self.where, self.trusted)
        self.where, self.trusted, self._name = line_of(equation) or self.where, within_known(equation), name
        shapes = [variable.aval.shape for variable in equation.outvars]
        kinds = [variable.aval.dtype.kind for variable in equation.outvars]
        dtypes = [variable.aval.dtype for variable in equation.invars]
        try:
            if is_vouched(equation):
                return [self.opaque(VOUCHED, next(self._marks), values, shape) for shape in shapes]
            if name in INNER:
                return self._call(equation, values)
            if all(map(is_point, values)):
                return _compute(equation, values)
            if name == "optimization_barrier":
                return values
            if name == "mul":
                self._check_zero(*values)
            if name == STOPPED and any(map(_varies, values)):
                own, parts = (next(self._marks), self.where), (settle(self, values[0]),)
                stopped = self.make(STOPPED, own, parts, values[0].shape)
                return [shifted(np.zeros(values[0].shape), stopped)]
            if any(isinstance(value, Shifted) for value in values):
                carried = shifted_rule(self, name, params, values)
                if carried is not None:
                    return [carried]
                values = [settle(self, value) for value in values]
            if name in FLOW:
                return FLOW[name](self, equation, values)
            if any(map(depends, values)):
                if any(kind not in "fb" for kind in kinds):
                    raise self.refuse("whole numbers that depend on the parameters")
            elif any(kind != "f" for kind in kinds) or any(dtype.kind != "f" for dtype in dtypes):
                # Whole numbers wrap around.
                return [self.make(name, (text(params), i), values, s) for i, s in enumerate(shapes)]
            if known(name).one_array and (places := _places(equation, values)) is not None:
                return [self.move_entries(index, values[0]) for index in places]
            if name == STOPPED:
                return values
            if name in RULES or known(name).entrywise:

                def compute(*x):
                    return _compute(equation, list(map(np.asarray, x, dtypes)))[0]

                return [self.hold(self.entrywise(name, params, compute, *values))]
            return self._others(equation, values, shapes)
        finally:
            self.where, self.trusted = outer

    def rule(self, name: str, params: dict[str, Any], *values: Value) -> Value:
        """The result of a primitive, for values that carry what is not differentiated (`control_flow`)."""
        if name == "reduce_sum":
            shape = tuple(n for i, n in enumerate(values[0].shape) if i not in params["axes"])
            return self.opaque(name, text(params), list(values), shape)
        return self.entrywise(name, params, PLAIN.get(name, pick), *values)

    def _check_zero(self, x: Value, y: Value) -> None:
        """Refuse zero times what may be no number: the gradient does not show that."""
        for zero, other in ((x, y), (y, x)):
            if is_point(zero) and is_zero(zero) and np.size(zero) and not is_point(other):
                if not settle(self, other).numeric:
                    raise self.refuse("zero times a value that is not a number for some parameters")

    def _others(self, equation, values: list[Value], shapes) -> list[Value]:
        """Functions of whole arrays: linear maps, extremes, and what a user has registered."""
        name, varies = equation.primitive.name, any(map(depends, values))
        places = (
            values[1:] if name in ("gather", "dynamic_slice") else values[1:2] if name.startswith("scatter") else []
        )
        if varies and name in ("reduce_and", "reduce_or"):
            # Nothing is known of where that changes.
            return [self.fresh(KNOWN_TO_MEET if self.trusted else name, shapes[0])]
        if varies:
            jump = known(name).jumps or any(map(depends, places)) or (name == "sort" and len(values) > 1)
            if jump or not (self.lenient or Box.knows(name) or known(name).moves or known(name).continuous):
                raise self.refuse("of a value that depends on the parameters")
        if name == "cholesky" and varies and not self._is_symmetric(values[0]):
            raise self.refuse(ONE_SIDED)
        own = text(equation.params), str(equation.outvars[0].aval.dtype)
        name = FILLED if _fills(equation) else name
        return [self.opaque(name, (own, i), values, shape) for i, shape in enumerate(shapes)]

    def _is_symmetric(self, x: Value) -> bool:
        """Whether a matrix is shown to be symmetric; JAX differentiates its factor as if it were."""
        return self.fields(lambda part: np.swapaxes(part, -1, -2), x) is x

    def _call(self, equation, values: list[Value]) -> list[Value]:
        if equation.primitive.name.startswith("custom_") and any(map(_varies, values)) and is_by_hand(equation):
            raise self.refuse(HAND)
        return self.run(*called(equation), values)

    def scan(self, equation, values: list[Value]) -> list[Value]:
        """A loop of fixed length: its body is shown to be continuous in all that enters it, whatever is carried."""
        params, inner = equation.params, equation.params["jaxpr"]
        n_consts, n_carry = scan_lengths(params)
        consts, carry, xs = values[:n_consts], values[n_consts : n_consts + n_carry], values[n_consts + n_carry :]
        slices = [self.fresh("scanned", np.shape(x)[1:], depends(x)) for x in xs]
        needs = [depends(value) for value in carry]
        while True:
            state = [self.fresh("carried", np.shape(x), need) for x, need in zip(carry, needs, strict=True)]
            found = self.run(inner.jaxpr, inner.consts, [*consts, *state, *slices])
            for value in found:
                self.finish(value)
            after = [old or depends(self.settle(new)) for old, new in zip(needs, found[:n_carry], strict=True)]
            if after == needs:
                break
            needs = after
        for value in (*carry, *xs):
            self.finish(value)
        flags = [*needs, *(depends(self.settle(value)) for value in found[n_carry:])]
        return [self.fresh("scan", out.aval.shape, need) for out, need in zip(equation.outvars, flags, strict=True)]

    def cond(self, equation, values: list[Value]) -> list[Value]:
        """Branches: by a number, or by data, each continuous."""
        index, *operands = values
        branches = equation.params["branches"]
        if depends(index):
            raise self.refuse("a condition that depends on the parameters")
        if is_point(index):
            branch = branches[min(max(int(index), 0), len(branches) - 1)]
            return self.run(branch.jaxpr, branch.consts, operands)
        outs = [self.run(branch.jaxpr, branch.consts, operands) for branch in branches]
        for value in sum(outs, []):
            self.finish(value)
        return [
            self.fresh("cond", out.aval.shape, any(map(depends, cases)))
            for out, cases in zip(equation.outvars, zip(*outs, strict=True), strict=True)
        ]

    def while_loop(self, equation, values: list[Value]) -> list[Value]:
        """A loop of unknown length, of data alone."""
        if any(map(depends, values)):
            raise self.refuse("a loop whose length may depend on the parameters")
        return [self.fresh("while", out.aval.shape, False) for out in equation.outvars]

    def solve(self, equation, values: list[Value]) -> list[Value]:
        """A linear system, by a solver of JAX: the derivative is that of an exact solution."""
        if not is_of_jax(place_of(equation.params["jaxprs"].solve.jaxpr.debug_info)[1]):
            raise self.refuse(HAND)
        return [
            self.opaque(self._name, (self.where, i), values, variable.aval.shape)
            for i, variable in enumerate(equation.outvars)
        ]


# Entries of an array at places that may be outside of it, where there is a NaN.
FILLED = "filled"
FLOW: dict[str, Callable[..., list[Value]]] = {
    "scan": _Reader.scan, "cond": _Reader.cond, "while": _Reader.while_loop, "custom_linear_solve": _Reader.solve,
}  # fmt: skip


def _varies(x: Value) -> bool:
    return isinstance(x, Shifted) or depends(x)


def _compute(equation, values: list[Any]) -> list[Any]:
    """Results for numbers; those of constants of the program alone are known to be such (`is_zero`)."""
    with jax.ensure_compile_time_eval():
        found = equation.primitive.bind(*map(jnp.asarray, values), **equation.params)
    found = list(found) if equation.primitive.multiple_results else [found]
    return found if any(isinstance(x, jax.Array) for x in values) else [np.asarray(x) for x in found]


def _fills(equation) -> bool:
    """Whether an equation puts NaN in place of entries that are not there."""
    params = equation.params
    if equation.primitive.name != "gather" or params["mode"] != jax.lax.GatherScatterMode.FILL_OR_DROP:
        return False
    return params["fill_value"] is None or bool(np.isnan(params["fill_value"]))


def _places(equation, values: list[Value]) -> list[np.ndarray] | None:
    """From where an equation takes the entries of its first operand; None if that is not known, or they are not of it."""
    x, *rest = values
    params, size, primitive = equation.params, math.prod(np.shape(x)), equation.primitive
    if not all(map(is_point, rest)) or size == 0:
        return None
    if primitive.name == "gather" and params["mode"] == jax.lax.GatherScatterMode.FILL_OR_DROP:
        params = {**params, "fill_value": -1}
    with jax.ensure_compile_time_eval():
        found = primitive.bind(jnp.arange(size).reshape(x.shape), *map(jnp.asarray, rest), **params)
    places = [np.asarray(part) for part in (found if primitive.multiple_results else [found])]
    return None if any(np.any(part < 0) for part in places) else places


# Rules: of the reader, the parameters, the operation on numbers, and operands, one of which is a formula ----------------


def _sub(reader: _Reader, params, compute, x, y) -> Value:
    if is_point(y):
        return reader.entrywise("add", {}, np.add, x, -np.asarray(y))
    return np.zeros(x.shape) if reader.proves and x is y else reader.function("sub", params, compute, x, y)


def _div(reader: _Reader, params, compute, x, y) -> Value:
    return x if reader.proves and _is_nothing(x) else reader.function("div", params, compute, x, y)


def _mul(reader: _Reader, params, compute, x, y) -> Value:
    if reader.proves and (_is_nothing(x) or _is_nothing(y)):
        return np.zeros(x.shape)
    if x is y:
        return reader.function("square", {}, np.square, x)
    for one, other in ((x, y), (y, x)):
        if isinstance(other, Formula) and other.name == "log" and other.args[0] is one:
            return reader.function("x log x", {}, lambda v: jax.scipy.special.xlogy(v, v), one)
    return reader.function("mul", params, compute, *_in_order(x, y))


def _in_order(x: Value, y: Value) -> tuple[Value, Value]:
    """The operands of an operation that does not depend on their order, a number first."""
    swapped = is_point(y) or (isinstance(x, Formula) and x.number > y.number)
    return (y, x) if swapped else (x, y)


def _is_nothing(x: Value) -> bool:
    return is_point(x) and not np.any(x)


def _add(reader: _Reader, params, compute, x, y) -> Value:
    """Numbers that are added one after another are one number, where formulas are compared."""
    x, y = _in_order(x, y)
    if not is_point(x):
        return reader.function("add", {}, np.add, x, y)
    if reader.proves and y.name == "add" and is_point(y.args[0]):
        before, y = y.args
        total = x + before
        x = np.where(np.abs(total) <= SAME * (np.abs(x) + np.abs(before)), 0.0, total)
    return y if _is_nothing(x) else reader.function("add", {}, np.add, x, y)


def _integer_pow(reader: _Reader, params, compute, x) -> Value:
    if params["y"] == 2:
        return reader.function("square", {}, np.square, x)
    return reader.function("integer_pow", params, compute, x)


def _pow(reader: _Reader, params, compute, x, y) -> Value:
    """Zero to a power jumps where the power is zero."""
    if depends(y) and not (is_positive(x) or is_positive(y)):
        raise reader.refuse("zero to a power that may be zero")
    return reader.function("pow", params, compute, x, y)


def _clamp(reader: _Reader, params, compute, least, x, most) -> Value:
    if depends(least) or depends(most):
        raise reader.refuse("limits that depend on the parameters, whose derivative JAX leaves out where they cross")
    return reader.function("clamp", params, compute, least, x, most)


def _extreme(name: str, nothing: float) -> Callable[..., Value]:
    def rule(reader: _Reader, params, compute, x, y) -> Value:
        for one, other in ((x, y), (y, x)):
            if is_point(one) and np.all(np.asarray(one) == nothing):
                return other
        return x if x is y else reader.function(name, params, compute, *_in_order(x, y))

    return rule


def _sign(reader: _Reader, params, compute, x) -> Value:
    return _order(reader, x, np.zeros(x.shape), {1: 1.0, 0: 0.0, -1: -1.0}, (1, 0, -1))


def _compare(plus: bool, zero: bool, minus: bool) -> Callable[..., Value]:
    answers = {1: plus, 0: zero, -1: minus}

    def rule(reader: _Reader, params, compute, x, y) -> Value:
        if all(is_point(value) or value.steps for value in (x, y)):
            return reader.function(f"compared {answers}", params, compute, x, y)
        if x is y and plus == minus:
            return _if_number(reader, x, zero)
        for one, other, swapped in ((x, y, False), (y, x, True)):
            if is_point(other) and np.all(np.isinf(other)) and np.size(other):
                below = -1 if np.all(np.asarray(other) > 0) else 1 if np.all(np.asarray(other) < 0) else None
                if below is None:
                    raise reader.refuse(INFINITE)
                return _if_number(reader, one, answers[-below if swapped else below])
        # A parameter is a number on a null set alone.
        thin = any(_is_parameter(one) and is_point(other) for one, other in ((x, y), (y, x)))
        return _order(reader, x, y, answers, (1, -1) if thin else (1, 0, -1))

    return rule


def _is_parameter(x: Value) -> bool:
    return isinstance(x, Formula) and (x.args[0] if x.name == "move" else x).name == PARAMETERS


def _order(reader: _Reader, p: Value, q: Value, answers: dict[int, Any], sides: tuple[int, ...]) -> Value:
    """The answers for each sign of ``p − q``, of which some sides matter."""
    if any(is_point(x) and not np.all(np.isfinite(x)) for x in (p, q)):
        raise reader.refuse(INFINITE)
    (p_low, p_high), (q_low, q_high) = range_of(p), range_of(q)
    if p_low > q_high or p_high < q_low:
        sign: Value = np.full(p.shape, 1.0 if p_low > q_high else -1.0)
    else:
        sides = (1, 0) if p_low >= q_high else (0, -1) if p_high <= q_low else sides
        p, q = (p, q) if reader.trusted else (reader.settle(p), reader.settle(q))
        sign = reader.sign(p, q, sides, KNOWN_TO_MEET if reader.trusted else SIGN)

    def answer(s):
        return np.where(s > 0, answers[1], np.where(s < 0, answers[-1], answers[0]))

    found = reader.entrywise("answer", {"of": answers}, answer, sign)
    unknown = np.nan if isinstance(answers[1], float) else answers[1] and answers[-1]
    return reader.guard(found, np.full(p.shape, unknown), p, q, sign=sign)


def _if_number(reader: _Reader, x: Value, answer: bool) -> Value:
    """The answer where a formula is a finite number, and the other one elsewhere."""
    return reader.guard(np.full(x.shape, answer), np.full(x.shape, not answer), x)


def _logical(name: str, neutral: bool) -> Callable[..., Value]:
    """An operation on truths, of which one may decide."""

    def rule(reader: _Reader, params, compute, x, y) -> Value:
        for one, other in ((x, y), (y, x)):
            if is_point(one) and np.size(one) and len(set(np.asarray(one, bool).flat)) == 1:
                return other if bool(np.ravel(one)[0]) == neutral else one
        return reader.function(name, params, compute, *_in_order(x, y))

    return rule


def _select(reader: _Reader, params, compute, which, *cases) -> Value:
    chosen = np.unique(np.asarray(which).astype(int)) if is_point(which) else ()
    if len(chosen) == 1:
        return cases[chosen[0]]
    found = reader.function("select_n", {}, pick, which, *cases)
    return found if reader.proves else reader.assume_numbers(found)


def _convert(reader: _Reader, params, compute, x) -> Value:
    dtype = np.dtype(params["new_dtype"])
    if depends(x) and not jnp.issubdtype(dtype, jnp.floating):
        raise reader.refuse("a value that depends on the parameters as a whole number")
    if depends(x) and jnp.finfo(dtype).bits < 32:
        raise reader.refuse(f"a value that depends on the parameters in {jnp.finfo(dtype).bits} bits")
    return reader.function("convert_element_type", params, compute, x)


RULES: dict[str, Callable[..., Value]] = {
    "add": _add, "add_any": _add, "sub": _sub,
    "mul": _mul, "div": _div,
    "integer_pow": _integer_pow, "pow": _pow, "max": _extreme("max", -np.inf), "min": _extreme("min", np.inf),
    "clamp": _clamp, "sign": _sign, "select_n": _select, "convert_element_type": _convert,
    "is_finite": lambda reader, params, compute, x: _if_number(reader, x, True),
    "gt": _compare(True, False, False), "ge": _compare(True, True, False), "lt": _compare(False, False, True),
    "le": _compare(False, True, True), "eq": _compare(False, True, False), "ne": _compare(True, False, True),
    "and": _logical("and", True), "or": _logical("or", False),
}  # fmt: skip
