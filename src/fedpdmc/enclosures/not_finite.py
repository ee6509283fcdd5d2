"""Which operation of a program is not finite, and on which line: for error messages.

A program is evaluated equation by equation, and the result that is not finite is followed back to an equation whose
arguments are all finite. Where all values are finite, the program is evaluated on a short interval of the path instead: the
first rule without a finite enclosure is the operation that is not smooth there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend import core

from fedpdmc._jax.by_numpy import INNER
from fedpdmc.enclosures.domain import Enclosure, Form, is_point
from fedpdmc.enclosures.interpreter import enclose
from fedpdmc.enclosures.origins import line_of
from fedpdmc.enclosures.taylor_models.taylor_model import Curve, TimeInterval
from fedpdmc.errors import NoEnclosure

# Length of the interval that is examined, relative to the largest coordinate.
SHORT = 1e-6


class _Watched(TimeInterval):
    """An interval on which a result without a finite enclosure is an error, if its arguments have one."""

    def rule(self, name: str, params: dict[str, Any], *forms: Form) -> Any:
        found = super().rule(name, params, *forms)
        if not _bounded(found) and all(map(_bounded, forms)):
            raise NotImplementedError("not finite")
        return found


def not_finite_at(function: Callable, x: Any) -> str | None:
    """The operation of ``function`` or its derivatives that makes them not finite at a point; None if all is finite.

    Parameters
    ----------
    function : callable
        Of an array, to a number.
    x : array

    Returns
    -------
    str or None
        Such as ``"'sqrt' at model.py:12 (likelihood)"``.
    """
    for program in (function, jax.grad(function), jax.hessian(function)):
        closed = jax.make_jaxpr(program)(jnp.asarray(x))
        found = _culprit(closed.jaxpr, closed.consts, [jnp.asarray(x)])
        if found is not None:
            name, line = found
            return f"{name!r} at {line}"
    return None


def not_finite_along(function: Callable, rates: Callable, a: Any, v: Any) -> str | None:
    """The same for the rates along a path, where a value or an enclosure on a short interval is not finite.

    Parameters
    ----------
    function : callable
        The potential, of a position.
    rates : callable
        Of position and velocity.
    a, v : arrays
        Where the path is, and its velocity.
    """
    found = not_finite_at(function, a)
    if found is not None:
        return found
    a, v = np.asarray(a)[:, None], np.asarray(v)[:, None]
    half = SHORT * (1 + np.abs(a).max(initial=0.0)) / max(np.abs(v).max(initial=0.0), 1e-300)
    zero = jnp.zeros(a.shape)
    try:
        enclose(rates, _Watched(1))(
            Curve((jnp.asarray(a), jnp.asarray(half * v)), zero), Curve((jnp.asarray(v),), zero)
        )
    except NoEnclosure as error:
        return f"{error.primitive!r} at {error.where}"
    return None


def _bounded(form: Any) -> bool:
    """Whether all numbers of a form are known to be finite; what is being traced counts as finite."""
    leaves = jax.tree.leaves(form) if isinstance(form, Enclosure) or is_point(form) else ()
    known = [leaf for leaf in leaves if not isinstance(leaf, Tracer)]
    return all(bool(np.all(np.isfinite(np.asarray(leaf)))) for leaf in known)


def _culprit(jaxpr: core.Jaxpr, consts, args) -> tuple[str, str] | None:
    """Primitive and line of the equation that makes a result not finite, or None."""
    read, made = _evaluated(jaxpr, consts, args)
    bad = next((atom for atom in jaxpr.outvars if not _finite(read(atom))), None)
    while bad is not None and bad in made:
        equation = made[bad]
        values = [read(atom) for atom in equation.invars]
        following = next((equation.invars[k] for k in _sources(equation, values) if not _finite(values[k])), None)
        if following is None or isinstance(following, core.Literal) or following not in made:
            return _within(equation, values) or (equation.primitive.name, line_of(equation))
        bad = following
    return None


def _evaluated(jaxpr: core.Jaxpr, consts, args) -> tuple[Callable, dict[Any, Any]]:
    """A function that gives the value of each variable of a program, and the equations that make them."""
    known: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    made: dict[Any, Any] = {}

    def read(atom):
        return atom.val if isinstance(atom, core.Literal) else known[atom]

    for equation in jaxpr.eqns:
        values = [read(atom) for atom in equation.invars]
        if equation.primitive.name in INNER:
            inner, own = _inner(equation)
            reads, _ = _evaluated(inner, own, values)
            found = [reads(atom) for atom in inner.outvars]
        else:
            found = equation.primitive.bind(*values, **equation.params)
            found = found if equation.primitive.multiple_results else [found]
        known.update(zip(equation.outvars, found, strict=True))
        made.update((variable, equation) for variable in equation.outvars)
    return read, made


def _inner(equation) -> tuple[core.Jaxpr, Any]:
    """The program within an equation, and its constants."""
    inner = equation.params[INNER[equation.primitive.name]]
    return (inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, ())


def _sources(equation, values) -> list[int]:
    """The arguments from which a result that is not finite may come; for a choice, those that are chosen somewhere."""
    if equation.primitive.name != "select_n":
        return list(range(len(values)))
    which = np.asarray(values[0]).astype(int)
    cases = [np.asarray(value) for value in values[1:]]
    return [k for k, case in enumerate(cases, 1) if not np.all(np.isfinite(case) | (which != k - 1))]


def _within(equation, values) -> tuple[str, str] | None:
    """The equation inside a function that the program calls; its line is that of the call if it has none of its own."""
    if equation.primitive.name not in INNER:
        return None
    found = _culprit(*_inner(equation), values)
    return None if found is None else (found[0], found[1] or line_of(equation))


def _finite(value: Any) -> bool:
    value = np.asarray(value)
    return value.dtype.kind not in "fc" or bool(np.all(np.isfinite(value)))
