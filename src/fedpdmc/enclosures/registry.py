"""How a user adds a rule for a primitive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from fedpdmc.enclosures.cell_values import Cell, Interval, Series, centred, span, truth
from fedpdmc.enclosures.domain import Assumed, Form, Truth, is_point

# Primitives whose rule was registered by a user: it is trusted.
TAUGHT: set[str] = set()


def register(primitive: str) -> Callable[[Callable], Callable]:
    """Teach the package how to bound a primitive.

    The decorated function gets the primitive's arguments, each an array or an `Interval` of arrays (``lo``, ``hi``), and
    the primitive's parameters by name. It returns an `Interval` that contains the result for every point of its arguments,
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

        Cell.rules[primitive] = wrapped
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
