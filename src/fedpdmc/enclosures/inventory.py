"""The parts of a proof about a program: its primitives, and the functions that have a rule as a whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedpdmc._jax.by_numpy import INNER
from fedpdmc.enclosures.origins import name_of_call
from fedpdmc.enclosures.recognised_calls import CALLS
from fedpdmc.enclosures.registry import TAUGHT


class Inventory(NamedTuple):
    """Sorted names: primitives with rules proved here, functions with a rule as a whole, and rules registered by a user."""

    primitives: list[str]
    functions: list[str]
    taught: list[str]


def inventory(function: Callable, dim: int) -> Inventory:
    """The inventory of a function of ``dim`` numbers."""
    found: tuple[set[str], set[str]] = set(), set()
    _collect(jax.make_jaxpr(lambda x: function(x))(jax.ShapeDtypeStruct((dim,), jnp.float64)).jaxpr, *found)
    primitives, functions = found
    return Inventory(sorted(primitives - TAUGHT), sorted(functions), sorted(primitives & TAUGHT))


def _collect(jaxpr, primitives: set[str], functions: set[str]) -> None:
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in INNER:
            called = name_of_call(equation)
            if called in CALLS:
                functions.add(called)
                continue
        else:
            primitives.add(name)
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    _collect(inner, primitives, functions)
