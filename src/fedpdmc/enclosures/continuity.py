"""Continuity of a program in its parameters: a part of every certificate.

The processes follow gradients. A jump has none, so they would walk through it as if it were not there. A program is
therefore read once, and refused unless every operation is one of a closed list of continuous ones, and every choice one
whose cases are shown to meet (`fedpdmc.enclosures.formulas`). Kinks are allowed: values must meet, slopes need not.

- Continuous: operations with enclosures, but for those that round or look for places; maxima, `abs`, sorting, limits by
  data, loops of fixed length and branches by data whose parts are continuous.
- Choices: ``where(p > q, f, g)`` with f and g equal where p and q are, by putting a solution of p = q into both.
- ``where(p == 0, c, f)`` where p is linear in the parameters: it is zero on a null set.
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
    NOISE,
    Atom,
    NormalForm,
    NormalForms,
    PiecewiseValue,
    Value,
    add,
    apply,
    as_normal_form,
    choose,
    depends,
    jump_of,
    key,
    leaves_of,
    number,
    restrict,
    scale,
    subtract,
    surfaces_of,
)
from fedpdmc.enclosures.intervals import Box
from fedpdmc.enclosures.known_functions import (
    BRANCHED,
    CALLS,
    VOUCHED,
    WHOLE,
    derivatives_by_hand,
    is_by_hand,
    is_of_jax,
    line_of,
    name_of_call,
    place_of,
    within_known,
)
from fedpdmc.enclosures.primitives import PARAMETERS, PRIMITIVES, STOPPED, known
from fedpdmc.errors import Discontinuous

# Arrays of data of at most this size are known in a proof: none first, then all. `model_trial` leaves out the second.
KNOWN_SIZES: tuple[float, ...] = (1, math.inf)
# Data above this are huge: their powers may overflow.
HUGE = 1e60
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
        jnp.asarray(const) if const.size <= small else reader.fresh("data", const.shape, False, const.dtype.kind != "f")
        for const in consts
    ]
    inputs = [reader.fresh(PARAMETERS, variable.aval.shape) for variable in jaxpr.invars]
    for value in reader.run(jaxpr, values, inputs):
        reader.finish(value)


JUMPS = "a choice whose branches are not shown to meet"
NO_NUMBER = "a choice by a value that is not a number for some parameters"
CANCELLED = "the sign of a value in which all that depends on the parameters cancels"
ROUNDED = "a comparison that rounding decides"
INFINITE = "a comparison of numbers that are not finite"
BITS = "bits of a value that depends on the parameters"
ONE_SIDED = "of a matrix that is not shown to be symmetric, which its derivative needs; jnp.linalg.cholesky makes it so"
HAND = "a derivative given by hand, which need not be that of the function"


class _Reader(NormalForms):
    """One reading of a program; where ``lenient``, primitives without rules are taken for continuous."""

    def __init__(self, lenient: bool):
        super().__init__()
        self.lenient = lenient
        self.where, self._name, self._marks = "the function", "", itertools.count()

    def run(self, jaxpr, consts, args) -> list[Value]:
        """Read a program equation by equation."""
        return evaluate(jaxpr, consts, args, self.equation)

    def refuse(self, reason: str) -> Discontinuous:
        """The error for what is being read."""
        return Discontinuous(self._name, self.where, reason)

    def settle(self, x: Value) -> NormalForm:
        """A value as one formula: continuous, or the program is refused."""
        if isinstance(x, Shifted):
            x = settle(self, x)
        if not isinstance(x, PiecewiseValue):
            return as_normal_form(x)
        if not self.continuous(x):
            surface: Any = jump_of(x, self.rebuild)
            raise Discontinuous("select_n", surface.where or self.where, NO_NUMBER if surface.guards else JUMPS)
        return self.atom("choice", key(x), tuple(map(as_normal_form, leaves_of(x))), x.shape)

    def finish(self, x: Value) -> None:
        """A value without jumps and without anything that is not differentiated."""
        for atom in self.settle(x).within:
            if atom.name == STOPPED:
                raise Discontinuous(STOPPED, atom.own[1], "a value that is not differentiated and does not cancel")

    def equation(self, equation, values: list[Value]) -> list[Value]:
        """The results of one equation."""
        name, params, outer = equation.primitive.name, equation.params, (self.where, self.trusted)
        self.where, self.trusted, self._name = line_of(equation) or self.where, within_known(equation), name
        try:
            if is_vouched(equation):
                shapes = [variable.aval.shape for variable in equation.outvars]
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
                parts = tuple(map(as_normal_form, leaves_of(settle(self, values[0]))))
                stopped = self.atom(STOPPED, (next(self._marks), self.where), parts, values[0].shape)
                return [shifted(np.zeros(values[0].shape), stopped)]
            if any(isinstance(value, Shifted) for value in values):
                carried = shifted_rule(self, name, params, values)
                if carried is not None:
                    return [carried]
                values = [settle(self, value) for value in values]
            if name in FLOW:
                return FLOW[name](self, equation, values)
            shapes = [variable.aval.shape for variable in equation.outvars]
            whole = equation.outvars[0].aval.dtype.kind != "f"
            if not any(map(depends, values)) and (whole or any(x.aval.dtype.kind != "f" for x in equation.invars)):
                return [self.opaque(name, (_text(params), i), values, shape, whole) for i, shape in enumerate(shapes)]
            if known(name).one_array and (places := _places(equation, values)) is not None:
                return [self.move_entries(index, values[0]) for index in places]
            if name == STOPPED:
                return values
            if name in RULES:
                dtypes = [variable.aval.dtype for variable in equation.invars]
                return [
                    self._apply_rule(
                        name, params, values, lambda *x: _compute(equation, list(map(np.asarray, x, dtypes)))[0]
                    )
                ]
            return self._others(equation, values, shapes)
        finally:
            self.where, self.trusted = outer

    def rule(self, name: str, params: dict[str, Any], *values: Value) -> Value:
        """The result of a primitive, for values that carry what is not differentiated (`control_flow`)."""
        if name == "reduce_sum":
            shape = tuple(n for i, n in enumerate(values[0].shape) if i not in params["axes"])
            return self.opaque(name, _text(params), list(values), shape)
        return self._apply_rule(name, params, list(values), PLAIN.get(name, jax.lax.select_n))

    def _apply_rule(self, name: str, params: dict[str, Any], values: list[Value], compute: Callable) -> Value:
        """An operation on the entries of arrays, case by case."""
        shape = np.broadcast_shapes(*map(np.shape, values))
        values = [self.widen(value, shape) for value in values]

        def one(*leaves):
            formulas = [leaf for leaf in leaves if isinstance(leaf, NormalForm)]
            if any(leaf.whole for leaf in formulas) and not known(name).of_truths:
                # Whole numbers wrap around.
                return self.atom(name, _text(params), tuple(map(as_normal_form, leaves)), shape, whole=True)
            if not formulas:
                with np.errstate(all="ignore"), jax.ensure_compile_time_eval():
                    return np.asarray(compute(*leaves))
            return RULES[name](self, params, compute, *leaves)

        found = apply(one, *values)
        if name == "select_n":
            found = self.assume_numbers(found)
        if isinstance(found, PiecewiseValue) and (
            not known(name).steps or (name == "select_n" and not depends(values[0]))
        ):
            # A continuous function of continuous values, however many cases it has.
            asks = any(surface.guards for surface in surfaces_of(found).values())
            if not asks and all(map(self.continuous, values[name == "select_n" :])):
                found.continuous = True
        return self.hold(found)

    def assume_numbers(self, found: Value) -> Value:
        """A choice that takes for numbers the values that its case for numbers contains.

        The gradient then contains their derivatives, which have no bound at the edge, and a run stops there. For a
        comparison with another number either of the two cases may contain them.
        """
        for surface in surfaces_of(found).values():
            if not surface.guards:
                continue
            seen: list[bool] = []

            def same(answer, other, surface=surface, seen=seen):
                inside = as_normal_form(answer).seen
                if surface.compared:
                    inside |= as_normal_form(other).seen
                seen.append(key(answer) == key(other) or surface.guards <= inside)
                return answer

            numbers = restrict(found, surface, 1)
            apply(same, numbers, restrict(found, surface, -1))
            found = numbers if all(seen) else found
        return found

    def _check_zero(self, x: Value, y: Value) -> None:
        """Refuse zero times what may be no number: the gradient does not show that."""
        for zero, other in ((x, y), (y, x)):
            if is_point(zero) and is_zero(zero) and np.size(zero) and not is_point(other):
                whole = settle(self, other) if isinstance(other, Shifted) else other
                if any(atom.partial for leaf in leaves_of(whole) for atom in as_normal_form(leaf).within):
                    raise self.refuse("zero times a value that is not a number for some parameters")

    def _others(self, equation, values: list[Value], shapes) -> list[Value]:
        """Functions of whole arrays: linear maps, extremes, and what a user has registered."""
        name, varies = equation.primitive.name, any(map(depends, values))
        places = (
            values[1:] if name in ("gather", "dynamic_slice") else values[1:2] if name.startswith("scatter") else []
        )
        if varies and name in ("reduce_and", "reduce_or"):
            return [self._unknown(shapes[0])]
        if varies:
            jump = known(name).jumps or any(map(depends, places)) or (name == "sort" and len(values) > 1)
            if jump or not (self.lenient or Box.knows(name) or known(name).moves or known(name).continuous):
                raise self.refuse("of a value that depends on the parameters")
        if name == "cholesky" and varies and not self._is_symmetric(values[0]):
            raise self.refuse(ONE_SIDED)
        whole = equation.outvars[0].aval.dtype.kind != "f"
        if whole and varies:
            raise self.refuse("whole numbers that depend on the parameters")
        own = _text(equation.params), str(equation.outvars[0].aval.dtype)
        return [
            self.opaque(FILLED if _fills(equation) else name, (own, i), values, shape, whole)
            for i, shape in enumerate(shapes)
        ]

    def _unknown(self, shape) -> Value:
        """Whether all or any of an array are true: nothing is known of where that changes."""
        surface = self._surface(self.fresh("truths", shape), self.trusted, False)
        return PiecewiseValue(surface, {1: np.ones(shape, bool), 0: np.zeros(shape, bool), -1: np.zeros(shape, bool)})

    def _is_symmetric(self, x: Value) -> bool:
        """Whether a matrix is shown to be symmetric; JAX differentiates its factor as if it were."""
        return key(self.fields(lambda part: np.swapaxes(part, -1, -2), x)) == key(x)

    def _call(self, equation, values: list[Value]) -> list[Value]:
        (jaxpr, consts), function, varies = called(equation), name_of_call(equation), any(map(_varies, values))
        if equation.primitive.name.startswith("custom_") and varies and is_by_hand(equation):
            raise self.refuse(HAND)
        if function in KNOWN and varies and len(jaxpr.outvars) == 1:
            values = [settle(self, value) if isinstance(value, Shifted) else value for value in values]
            shape = jaxpr.outvars[0].aval.shape
            if function not in KNOWN_ENTRYWISE:
                return [self.opaque(function, (), values, shape)]

            def one(*leaves):
                return self.function(function, (), KNOWN_ENTRYWISE[function], *map(as_normal_form, leaves))

            return [self.hold(apply(one, *(self.widen(value, shape) for value in values)))]
        return self.run(jaxpr, consts, values)

    def scan(self, equation, values: list[Value]) -> list[Value]:
        """A loop of fixed length: its body is shown to be continuous in all that enters it, whatever is carried."""
        params, inner = equation.params, equation.params["jaxpr"]
        n_consts, n_carry = scan_lengths(params)
        consts, carry, xs = values[:n_consts], values[n_consts : n_consts + n_carry], values[n_consts + n_carry :]
        whole = [variable.aval.dtype.kind != "f" for variable in inner.jaxpr.invars[n_consts:]]
        slices = [
            self.fresh("scanned", np.shape(x)[1:], depends(x), kind)
            for x, kind in zip(xs, whole[n_carry:], strict=True)
        ]
        needs = [depends(value) for value in carry]
        while True:
            state = [
                self.fresh("carried", np.shape(x), need, kind)
                for x, need, kind in zip(carry, needs, whole[:n_carry], strict=True)
            ]
            found = self.run(inner.jaxpr, inner.consts, [*consts, *state, *slices])
            for value in found:
                self.finish(value)
            after = [old or self.settle(new).depends for old, new in zip(needs, found[:n_carry], strict=True)]
            if after == needs:
                break
            needs = after
        for value in (*carry, *xs):
            self.finish(value)
        flags = [*needs, *(self.settle(value).depends for value in found[n_carry:])]
        return [
            self.fresh("scan", variable.aval.shape, need, variable.aval.dtype.kind != "f")
            for variable, need in zip(equation.outvars, flags, strict=True)
        ]

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
            self.fresh("cond", out.aval.shape, any(map(depends, cases)), out.aval.dtype.kind != "f")
            for out, cases in zip(equation.outvars, zip(*outs, strict=True), strict=True)
        ]

    def while_loop(self, equation, values: list[Value]) -> list[Value]:
        """A loop of unknown length, of data alone."""
        if any(map(depends, values)):
            raise self.refuse("a loop whose length may depend on the parameters")
        return [self.fresh("while", out.aval.shape, False, out.aval.dtype.kind != "f") for out in equation.outvars]

    def solve(self, equation, values: list[Value]) -> list[Value]:
        """A linear system, by a solver of JAX: the derivative is that of an exact solution."""
        if not is_of_jax(place_of(equation.params["jaxprs"].solve.jaxpr.debug_info)[1]):
            raise self.refuse(HAND)
        return [
            self.opaque(self._name, (self.where, i), values, variable.aval.shape)
            for i, variable in enumerate(equation.outvars)
        ]


# Functions of JAX that are continuous although their formulas have branches.
KNOWN = {*CALLS, *BRANCHED, "xlogy", "xlog1py"}
KNOWN_ENTRYWISE: dict[str, Callable] = {**WHOLE, "sinc": jnp.sinc, "ndtri": jax.scipy.special.ndtri}
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


def _text(params: dict[str, Any]) -> str:
    return str(sorted(params.items(), key=lambda pair: pair[0]))


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


def _function(name: str) -> Callable[..., Value]:
    def rule(reader: _Reader, params, compute, *leaves) -> NormalForm:
        return reader.function(name, _text(params), compute, *map(as_normal_form, leaves))

    return rule


def _add(reader: _Reader, params, compute, x, y) -> NormalForm:
    return add(as_normal_form(x), as_normal_form(y))


def _sub(reader: _Reader, params, compute, x, y) -> NormalForm:
    return subtract(as_normal_form(x), as_normal_form(y))


def _mul(reader: _Reader, params, compute, x, y) -> NormalForm:
    p, q = as_normal_form(x), as_normal_form(y)
    if not (p.terms and q.terms) and not (p.finite and q.finite):
        # Zero, but where the other one overflows: no comparison may rely on it.
        return NormalForm({}, p.shape, noisy=True)
    return reader.product(p, q)


def _reciprocal(reader: _Reader, x) -> NormalForm:
    return reader.function("reciprocal", None, lambda v: 1 / v, as_normal_form(x))


def _integer_pow(reader: _Reader, params, compute, x) -> NormalForm:
    n, found = params["y"], x
    if n == 0:
        return number(np.ones(x.shape))
    if abs(n) > 8:
        return _function("integer_pow")(reader, params, compute, x)
    for _ in range(abs(n) - 1):
        found = reader.product(found, x)
    return found if n > 0 else _reciprocal(reader, found)


def _pow(reader: _Reader, params, compute, x, y) -> NormalForm:
    """Zero to a power jumps where the power is zero."""
    if (
        depends(y)
        and as_normal_form(x).sign != 2
        and as_normal_form(y).sign != 2
        and not _is_thin(x, as_normal_form(0.0))
    ):
        raise reader.refuse("zero to a power that may be zero")
    return _function("pow")(reader, params, compute, x, y)


def _clamp(reader: _Reader, params, compute, least, x, most) -> NormalForm:
    if depends(least) or depends(most):
        raise reader.refuse("limits that depend on the parameters, whose derivative JAX leaves out where they cross")
    return _function("clamp")(reader, params, compute, least, x, most)


def _extreme(name: str, nothing: float) -> Callable[..., Value]:
    def rule(reader: _Reader, params, compute, x, y) -> Value:
        for one, other in ((x, y), (y, x)):
            if is_point(one) and np.all(np.asarray(one) == nothing):
                return other
        return x if as_normal_form(x).key == as_normal_form(y).key else _function(name)(reader, params, compute, x, y)

    return rule


def _sign(reader: _Reader, params, compute, x) -> Value:
    return _order(reader, x, number(np.zeros(x.shape)), {1: 1.0, 0: 0.0, -1: -1.0}, False)


def _compare(plus: bool, zero: bool, minus: bool) -> Callable[..., Value]:
    answers = {1: plus, 0: zero, -1: minus}

    def rule(reader: _Reader, params, compute, x, y) -> Value:
        p, q = as_normal_form(x), as_normal_form(y)
        if not (p.depends or q.depends):
            return reader.atom(f"compared {answers}", None, (p, q), p.shape, whole=True)
        if x is y and plus == minus:
            return _if_number(reader, p, zero)
        for one, other, swapped in ((p, y, False), (q, x, True)):
            if is_point(other) and np.all(np.isinf(other)) and np.size(other):
                below = -1 if np.all(np.asarray(other) > 0) else 1 if np.all(np.asarray(other) < 0) else None
                if below is None:
                    raise reader.refuse(INFINITE)
                return _if_number(reader, one, answers[-below if swapped else below])
        thin = (is_point(y) and _is_thin(p, q)) or (is_point(x) and _is_thin(q, p))
        return _order(reader, p, q, answers, thin)

    return rule


def _order(reader: _Reader, p: NormalForm, q: NormalForm, answers: dict[int, Any], thin: bool) -> Value:
    """The answers for each sign of ``p − q``."""
    if not (p.finite_numbers and q.finite_numbers):
        raise reader.refuse(INFINITE)
    (p_low, p_high), (q_low, q_high) = p.computed_bounds, q.computed_bounds
    if p_low > q_high or p_high < q_low:
        answer = np.full(p.shape, answers[1 if p_low > q_high else -1])
    else:
        answer = _order_of_difference(reader, subtract(p, q), p.shape, answers, thin)
    unknown = np.nan if isinstance(answers[1], float) else answers[1] and answers[-1]
    guards = frozenset(atom for atom in p.seen | q.seen if atom.partial)
    return reader.guard(answer, np.full(p.shape, unknown), guards, compared=True)


def _order_of_difference(reader: _Reader, difference: NormalForm, shape, answers: dict[int, Any], thin: bool) -> Value:
    constant = difference.constant
    if not reader.trusted and constant is not None and np.any(np.abs(constant) <= NOISE * max(1.0, difference.gone)):
        raise reader.refuse(CANCELLED)
    if not reader.trusted and difference.decided_by_rounding:
        raise reader.refuse(ROUNDED)
    cases = [np.full(shape, answers[s]) for s in (1, 0, -1)]
    return reader.by_sign(reader.sign(difference, reader.trusted, thin), *cases)


def _if_number(reader: _Reader, p: NormalForm, answer: bool) -> Value:
    """The answer where a formula is a finite number, and the other one elsewhere."""
    if not p.finite_numbers:
        raise reader.refuse(INFINITE)
    guards = frozenset(atom for atom in p.seen if not atom.total)
    return reader.guard(np.full(p.shape, answer), np.full(p.shape, not answer), guards)


def _is_thin(x: Value, level: NormalForm) -> bool:
    """Whether a value is a number on a null set alone, in floating point numbers too.

    It is one monomial of the parameters; a number may be added to it if the sum is compared with zero, because it is zero
    only where both are equal.
    """
    if (
        not isinstance(x, NormalForm)
        or x.noisy
        or x.gone
        or sum(map(bool, x.terms)) != 1
        or (() in x.terms and level.terms)
    ):
        return False
    return x.depends and all(_is_polynomial(atom) for atom in x.atoms)


def _is_polynomial(atom: Atom) -> bool:
    return known(atom.name).polynomial and all(_is_polynomial(inner) for arg in atom.args for inner in arg.atoms)


def _is_finite(reader: _Reader, params, compute, x) -> Value:
    return _if_number(reader, x, True)


def _logical(name: str, neutral: bool | None) -> Callable[..., Value]:
    """An operation on truths, of which some are data; one of them may decide."""

    def rule(reader: _Reader, params, compute, *leaves) -> Value:
        if any(isinstance(leaf, NormalForm) and leaf.depends for leaf in leaves):
            raise reader.refuse(BITS)
        for one, other in (leaves, leaves[::-1]) if len(leaves) == 2 and neutral is not None else ():
            if is_point(one) and (np.all(one) or not np.any(one)) and np.asarray(one).dtype == bool and np.size(one):
                return other if bool(np.all(one)) == neutral else np.asarray(one)
        return reader.atom(name, None, tuple(map(as_normal_form, leaves)), leaves[0].shape, whole=True)

    return rule


def _select(reader: _Reader, params, compute, index, *cases) -> Value:
    if depends(index):
        raise reader.refuse("a choice by a number that depends on the parameters")
    found = as_normal_form(cases[-1])
    if is_point(index):
        for i in range(len(cases) - 2, -1, -1):
            found = choose(np.asarray(index).astype(int) == i, as_normal_form(cases[i]), found)
        return found
    # Data that are not known here: by their sign, which has nothing to do with the parameters.
    for i in range(len(cases) - 2, -1, -1):
        sign = reader.sign(add(index, number(np.full(index.shape, -float(i)))), True)
        found = reader.by_sign(sign, found, cases[i], cases[i])
    return found


def _convert(reader: _Reader, params, compute, x) -> Value:
    dtype = np.dtype(params["new_dtype"])
    if not jnp.issubdtype(dtype, jnp.floating):
        raise reader.refuse("a value that depends on the parameters as a whole number")
    if jnp.finfo(dtype).bits < 32 and depends(x):
        raise reader.refuse(f"a value that depends on the parameters in {jnp.finfo(dtype).bits} bits")
    if dtype == np.float64 and not x.whole:
        return x
    return _function("convert_element_type")(reader, params, compute, x)


RULES: dict[str, Callable[..., Value]] = {
    **{name: _function(name) for name, primitive in PRIMITIVES.items() if primitive.entrywise},
    "add": _add, "add_any": _add, "sub": _sub, "mul": _mul,
    "neg": lambda reader, params, compute, x: scale(x, -1.0),
    "div": lambda reader, params, compute, x, y: reader.product(as_normal_form(x), _reciprocal(reader, y)),
    "square": lambda reader, params, compute, x: reader.product(x, x),
    "one_minus_square": lambda reader, params, compute, x: subtract(number(np.ones(x.shape)), reader.product(x, x)),
    "integer_pow": _integer_pow, "pow": _pow, "max": _extreme("max", -np.inf), "min": _extreme("min", np.inf),
    "clamp": _clamp, "sign": _sign, "is_finite": _is_finite, "select_n": _select, "convert_element_type": _convert,
    "gt": _compare(True, False, False), "ge": _compare(True, True, False), "lt": _compare(False, False, True),
    "le": _compare(False, True, True), "eq": _compare(False, True, False), "ne": _compare(True, False, True),
    "and": _logical("and", True), "or": _logical("or", False), "xor": _logical("xor", None), "not": _logical("not", None),
}  # fmt: skip
