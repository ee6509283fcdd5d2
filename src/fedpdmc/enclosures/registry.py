"""The rules by which a program is enclosed, one for each primitive, and how to add one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from fedpdmc.enclosures.intervals import Assumed, Cell, Form, Interval, Series, Truth, centred, is_point, span, truth

# rule(cell, params, *forms) -> form, or a tuple of them for primitives with several results
Rule = Callable[..., Any]
RULES: dict[str, Rule] = {}
# Jitted and custom functions that are known as a whole.
CALLS: dict[str, Rule] = {}
# Primitives whose rule a user has taught: the package believes it.
TAUGHT: set[str] = set()


def rule(*names: str, table: dict[str, Rule] = RULES) -> Callable[[Rule], Rule]:
    """Enter a rule of the package's own under these names of primitives."""

    def enter(function: Rule) -> Rule:
        for name in names:
            table[name] = function
        return function

    return enter


def register(primitive: str) -> Callable[[Callable], Callable]:
    """Teach the package how to bound a primitive.

    The decorated function gets the primitive's arguments, each an array or an `Interval` of arrays (``lo``, ``hi``), and
    the primitive's parameters by name. It returns an `Interval` that holds the result for every point of its arguments,
    rounding included (`Interval.widened` makes room for it), or a tuple of them.

    Parameters
    ----------
    primitive : str
        Its name, as the error that asked for a rule gives it.
    """

    def enter(function: Callable) -> Callable:
        def wrapped(cell: Cell, params: dict[str, Any], *forms: Form):
            series = any(isinstance(form, Series) for form in forms)
            found = function(*(_plain(cell, form) for form in forms), **params)
            if not series:
                return found
            return tuple(map(_moving, found)) if isinstance(found, (tuple, list)) else _moving(found)

        RULES[primitive] = wrapped
        TAUGHT.add(primitive)
        return function

    return enter


def _plain(cell: Cell, form: Form) -> Any:
    if isinstance(form, (Truth, Assumed)):
        form = truth(cell, form)
        value = jnp.asarray(form.value, int)
        return Interval(jnp.where(form.known, value, 0), jnp.where(form.known, value, 1))
    return form if is_point(form) else span(cell, form)


def _moving(found: Any) -> Any:
    return centred(found) if isinstance(found, Interval) and jnp.issubdtype(found.dtype, jnp.floating) else found
