"""Formulas that derivatives of stable functions leave behind, recognised and enclosed as the function they are."""

from __future__ import annotations

from typing import Any

import numpy as np
from jax.extend import core

# Primitives that call a program of their own, and the parameter that holds it.
INNER = {
    "jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr", "checkpoint": "jaxpr",
    "remat": "jaxpr", "remat2": "jaxpr", "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
}  # fmt: skip


def name_of_call(equation) -> str:
    """The name of the function that a call came from."""
    inner = equation.params[INNER[equation.primitive.name]]
    jaxpr = inner.jaxpr if hasattr(inner, "jaxpr") else inner
    return str(equation.params.get("name") or getattr(jaxpr.debug_info, "func_name", ""))


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
