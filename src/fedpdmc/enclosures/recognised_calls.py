"""Recognises the formulas that differentiation makes of stable functions, and encloses each as one function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from fedpdmc.enclosures.clamped_indices import clamped
from fedpdmc.enclosures.origins import is_of_jax, name_of_call

# Functions of JAX that have a rule as a whole.
CALLS = {"log_ndtr", "logaddexp", "ndtr"}


def sigmoid_of(producers: dict[Any, Any], equation) -> tuple[Any, Any] | None:
    """Atoms (x, y) if the equation is ``exp(x − logaddexp(x, y))``, the derivative of logaddexp: ``logistic(x − y)``."""
    difference = producers.get(_key(equation.invars[0])) if equation.primitive.name == "exp" else None
    if difference is None or difference.primitive.name != "sub":
        return None
    own, total = (_unguarded(producers, atom) for atom in difference.invars)
    call = producers.get(_key(total))
    if call is None or call.primitive.name != "custom_jvp_call" or name_of_call(call) != "logaddexp":
        return None
    x, y = call.invars
    if _same(own, x):
        return x, y
    return (y, x) if _same(own, y) else None


def order_of(producers: dict[Any, Any], equation) -> tuple[str, Any, Any] | None:
    """A comparison and its atoms if the equation is ``x == max(x, y)``, which is ``x >= y``, or ``x == min(x, y)``.

    The derivatives of `max`, `min` and `clip` contain it. Enclosures of x and of the maximum overlap unless they are points,
    so the equality itself could never be decided.
    """
    if equation.primitive.name != "eq":
        return None
    for own, extreme in (equation.invars, equation.invars[::-1]):
        made = producers.get(_key(extreme))
        if made is None or made.primitive.name not in ("max", "min"):
            continue
        for x, y in (made.invars, made.invars[::-1]):
            if _same(own, x):
                return "ge" if made.primitive.name == "max" else "le", x, y
    return None


def largest_of(producers: dict[Any, Any], atom: Any) -> tuple[Any, tuple[int, ...]] | None:
    """Atom and axes if this is the maximum of an array over some axes, apart from guards and reshapes."""
    made = producers.get(_key(atom))
    if made is None:
        return None
    if made.primitive.name == "reduce_max":
        return made.invars[0], made.params["axes"]
    if made.primitive.name not in ("max", "select_n", "broadcast_in_dim", "reshape", "squeeze", "copy"):
        return None
    return next((found for other in made.invars if (found := largest_of(producers, other)) is not None), None)


def _unguarded(producers: dict[Any, Any], atom: Any) -> Any:
    """The atom behind ``where(atom == inf, 0, atom)``."""
    choice = producers.get(_key(atom))
    if choice is None or choice.primitive.name != "select_n" or len(choice.invars) != 3:
        return atom
    which, no, _ = choice.invars
    test = producers.get(_key(which))
    if test is None or test.primitive.name != "eq" or not _same(test.invars[0], no):
        return atom
    bound = test.invars[1]
    return no if isinstance(bound, core.Literal) and np.isinf(bound.val) else atom


def _key(atom: Any) -> Any:
    return None if isinstance(atom, core.Literal) else atom


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, core.Literal) and isinstance(other, core.Literal):
        return bool(np.all(one.val == other.val))
    return one is other


# Stable formulas with kinks --------------------------------------------------------------------------------------------


class _Node:
    """A value of a program with the operation that made it."""

    def __init__(self, value: Any, name: str = "", inputs: tuple[_Node, ...] = (), equation: Any = None):
        self.value, self.name, self.inputs, self.equation = value, name, inputs, equation


def smoothed(function: Callable) -> Callable:
    """The same function with formulas of the softplus, ``2 Φ`` and ``log B`` written as the smooth functions that they are.

    The terms of ``max(x, 0) + log1p(exp(−|x|))`` have kinks that cancel. The intermediate values of ``log(1 + c exp(x)^n)``
    overflow where the result is nearly linear. For the normal distribution function and the beta function JAX chooses
    among formulas, and the derivative of each formula alone jumps at the choice. Indices that promise to be in range are
    clamped (`fedpdmc.enclosures.clamped_indices`).
    """

    def rewritten(*args):
        leaves, structure = jax.tree.flatten(args)
        closed, shape = jax.make_jaxpr(
            lambda *values: function(*jax.tree.unflatten(structure, values)), return_shape=True
        )(*leaves)
        names, program = _primitives(closed.jaxpr), clamped(closed.jaxpr)
        if program is closed.jaxpr and not any(pattern <= names for pattern in PATTERNS):
            return function(*args)
        found = _rewritten(program, closed.consts, [_Node(leaf) for leaf in leaves])
        return jax.tree.unflatten(jax.tree.structure(shape), [node.value for node in found])

    return rewritten


def _primitives(jaxpr) -> set[str]:
    names = set()
    for equation in jaxpr.eqns:
        names.add(equation.primitive.name)
        if equation.primitive.name in INLINED:
            names |= _primitives(equation.params["jaxpr"].jaxpr)
    return names


INLINED = {"jit", "pjit"}
PATTERNS = ({"exp", "log1p"}, {"exp", "log"}, {"abs", "erf", "erfc", "select_n"}, {"lgamma", "log1p", "select_n"})


def _rewritten(jaxpr, consts, args: list[_Node]) -> list[_Node]:
    known: dict[Any, _Node] = dict(zip(jaxpr.invars, args, strict=True))
    known.update((variable, _Node(value)) for variable, value in zip(jaxpr.constvars, consts, strict=True))

    def read(atom) -> _Node:
        return _Node(atom.val, "literal") if isinstance(atom, core.Literal) else known[atom]

    for equation in jaxpr.eqns:
        name, nodes = equation.primitive.name, [read(atom) for atom in equation.invars]
        if name in INLINED:
            inner = equation.params["jaxpr"]
            known.update(zip(equation.outvars, _rewritten(inner.jaxpr, inner.consts, nodes), strict=True))
            continue
        inside = _softplus_argument(nodes) if name == "add" else _exponent_of_one_more(name, nodes)
        below = _normal_argument(nodes) if name == "select_n" else None
        plain = _log_beta(nodes) if name == "select_n" else None
        if inside is not None:
            values = [jnp.logaddexp(inside.value, jnp.zeros((), jnp.result_type(inside.value)))]
        elif below is not None:
            values = [lax.erfc(-below.value)]
        elif plain is not None:
            x, y = (jnp.broadcast_to(part.value, jnp.shape(nodes[1].value)) for part in plain)
            values = [lax.lgamma(x) + (lax.lgamma(y) - lax.lgamma(x + y))]
        else:
            values = _bound(equation, [node.value for node in nodes])
        for variable, value in zip(equation.outvars, values, strict=True):
            known[variable] = _Node(value, name, tuple(nodes), equation)
    return [read(atom) for atom in jaxpr.outvars]


def _bound(equation, values) -> list[Any]:
    """An equation evaluated without change."""
    from jax._src import source_info_util

    params = equation.primitive.get_bind_params(equation.params)
    functions, params = params if isinstance(params, tuple) else ((), params)
    with source_info_util.user_context(equation.source_info.traceback):
        found = equation.primitive.bind(*functions, *values, **params)
    return list(found) if equation.primitive.multiple_results else [found]


def _softplus_argument(nodes: list[_Node]) -> _Node | None:
    """``x`` if these two are ``max(x, 0)`` and ``log1p(exp(−|x|))``."""
    for larger, rest in (nodes, nodes[::-1]):
        chain = rest
        for name in ("log1p", "exp", "neg", "abs"):
            if chain.name != name:
                break
            chain = chain.inputs[0]
        else:
            if larger.name == "max" and any(
                one is chain and _is_zero(other) for one, other in (larger.inputs, larger.inputs[::-1])
            ):
                return chain
    return None


def _normal_argument(nodes: list[_Node]) -> _Node | None:
    """``x`` if this is the choice between ``1 + erf(x)`` and, by the sign of x, ``2 − erfc(|x|)`` and ``erfc(|x|)``."""
    if [node.name for node in nodes] != ["lt", "select_n", "add"]:
        return None
    which, far, near = nodes
    if near.inputs[1].name != "erf" or len(far.inputs) != 3:
        return None
    x, (sign, below, above) = near.inputs[1].inputs[0], far.inputs
    size = which.inputs[0]
    found = (
        (size.name, below.name, above.name, sign.name) == ("abs", "erfc", "sub", "gt")
        and size.inputs[0] is x and sign.inputs[0] is x and _is(0.0, sign.inputs[1])
        and below.inputs[0] is size and _is(1.0, near.inputs[0]) and _is(2.0, above.inputs[0])
        and above.inputs[1].name == "erfc" and above.inputs[1].inputs[0] is size
    )  # fmt: skip
    return x if found else None


def _log_beta(nodes: list[_Node]) -> tuple[_Node, ...] | None:
    """The arguments of JAX's ``betaln`` if this is its choice of a formula; the one with three `lgamma` always holds."""
    which, near = nodes[0], nodes[-1]
    if which.name != "lt" or near.name != "add" or [part.name for part in near.inputs] != ["lgamma", "sub"]:
        return None
    trace = which.equation.source_info.traceback
    frames = () if trace is None else trace.frames
    smaller = near.inputs[0].inputs[0]
    if not any(frame.function_name == "betaln" and is_of_jax(frame.file_name) for frame in frames):
        return None
    return smaller.inputs if smaller.name == "min" else None


def _is(number: float, node: _Node) -> bool:
    return node.name == "literal" and bool(np.all(node.value == number))


def _exponent_of_one_more(name: str, nodes: list[_Node]) -> _Node | None:
    """``x`` if this is ``log1p(e^x)`` or ``log(1 + e^x)``."""
    if name == "log1p":
        return _exponent(nodes[0])
    if name != "log" or nodes[0].name != "add":
        return None
    for one, other in (nodes[0].inputs, nodes[0].inputs[::-1]):
        if (number := _literal(one)) is not None and np.all(number == 1.0):
            return _exponent(other)
    return None


def _exponent(node: _Node) -> _Node | None:
    """``x`` if the value is ``e^x``: an exponential, a whole power of one, a product of two or with a positive number."""
    if node.name == "exp":
        return _Node(node.inputs[0].value)
    if node.name in ("square", "integer_pow"):
        power, base = node.equation.params.get("y", 2), _exponent(node.inputs[0])
        return None if base is None else _Node(power * base.value)
    if node.name not in ("mul", "div"):
        return None
    exponents = [_exponent(part) for part in node.inputs]
    one, other = (found or _log_of_literal(part) for found, part in zip(exponents, node.inputs, strict=True))
    if one is None or other is None or not any(exponents):
        return None
    return _Node(one.value + other.value if node.name == "mul" else one.value - other.value)


def _log_of_literal(node: _Node) -> _Node | None:
    number = _literal(node)
    return _Node(np.log(number)) if number is not None and np.all(number > 0) else None


def _literal(node: _Node) -> Any:
    """The number that a constant of the program is."""
    while node.name in ("convert_element_type", "broadcast_in_dim"):
        node = node.inputs[0]
    return node.value if node.name == "literal" else None


def _is_zero(node: _Node) -> bool:
    return (number := _literal(node)) is not None and not np.any(number)
