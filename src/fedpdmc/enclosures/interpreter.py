"""The interpreter: the jaxpr of a function, evaluated on forms in place of numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend import core

from fedpdmc._jax.programs import INNER, Frame, called, equations, evaluate, prune
from fedpdmc.enclosures.control_flow import CONTROL, Shifted, settle, shifted, shifted_rule
from fedpdmc.enclosures.domain import (
    Assumed,
    Domain,
    Enclosure,
    Form,
    Truth,
    is_point,
    is_static,
    move,
    shape_of,
)
from fedpdmc.enclosures.intervals import Box, numbers_of
from fedpdmc.enclosures.known_functions import CALLS, largest_of, line_of, name_of_call, order_of, sigmoid_of
from fedpdmc.enclosures.primitives import known
from fedpdmc.enclosures.taylor_models import Curve, TimeInterval
from fedpdmc.errors import NoEnclosure


def enclose(function: Callable, domain: Domain | None = None) -> Callable:
    """``function`` on forms: given intervals, it returns intervals that contain all its values.

    Parameters
    ----------
    function : callable
        Of any pytrees of arrays, to a pytree of arrays.
    domain : Domain, optional
        Where the enclosures among the arguments hold: the `TimeInterval` of a `Curve`. An `Interval` needs none.

    Returns
    -------
    callable
        Of the same arguments, any array of which may be an `Interval`, or a `Curve`. Values that depend on none are computed
        as usual.

    Raises
    ------
    NoEnclosure
        At a primitive without a rule.
    """
    place = Box() if domain is None else domain

    def enclosed(*args):
        leaves, structure = jax.tree.flatten(args, is_leaf=lambda x: isinstance(x, Enclosure))
        samples = [x if is_point(x) else jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]

        def flat(*values):
            return function(*jax.tree.unflatten(structure, values))

        closed, shape = jax.make_jaxpr(flat, return_shape=True)(*samples)
        consts = [_not_static(const) for const in closed.consts]
        found = [settle(place, form) for form in run(place, prune(closed).jaxpr, consts, leaves)]
        return jax.tree.unflatten(jax.tree.structure(shape), found)

    return enclosed


def _not_static(const: Any) -> Any:
    """Zeros of a user's array, which are not left out as those of autodiff are: zero times NaN is NaN."""
    zero = isinstance(const, np.ndarray) and const.ndim and const.dtype.kind == "f" and not np.any(const)
    return jnp.asarray(const) if zero else const


def run(domain: Domain, jaxpr: core.Jaxpr, consts, args) -> list[Form]:
    """Evaluate a program equation by equation."""
    frame = Frame()

    def step(equation, forms):
        found = _recognised(domain, equation, forms, frame.makers, frame.read)
        return _evaluate(domain, equation, forms) if found is None else found

    return evaluate(jaxpr, consts, args, step, frame)


def _recognised(domain: Domain, equation, forms, producers, read) -> list[Form] | None:
    """The result of an equation that is recognised as part of a larger function; None for any other."""
    name = equation.primitive.name
    parts = sigmoid_of(producers, equation)
    if parts is not None and not all(is_point(read(atom)) for atom in parts):
        one, other = (settle(domain, read(atom)) for atom in parts)
        return [domain.rule("logistic", {}, domain.rule("sub", {}, one, other))]
    order = order_of(producers, equation)
    if order is not None and not all(map(is_point, forms)):
        comparison, *atoms = order
        return [domain.rule(comparison, {}, *(settle(domain, read(atom)) for atom in atoms))]
    if name == "stop_gradient":
        return [_stopped(domain, equation, forms[0], producers, read)]
    if name in ("reduce_max", "reduce_min") and not all(map(is_point, forms)):
        # A maximum has kinks, which do not matter if it is only subtracted and added back.
        found = _evaluate(domain, equation, forms)
        split = domain.extreme(found[0])
        return found if split is None else [shifted(*split)]
    return None


def _stopped(domain: Domain, equation, form: Form, producers, read) -> Form:
    """A value that is not differentiated is kept as a symbol: as a shift, it may cancel."""
    if is_point(form):
        return form
    source = largest_of(producers, equation.invars[0])
    among, axes = (None, ()) if source is None else (read(source[0]), source[1])
    if among is not None:
        kept = math.prod(n for axis, n in enumerate(shape_of(among)) if axis not in axes)
        among = among if math.prod(form.shape) == kept else None
    split = domain.stopped(form, among, axes)
    return form if split is None else shifted(*split)


def _evaluate(domain: Domain, equation, forms) -> list[Form]:
    """One equation: computed as usual if nothing varies, else by its rule."""
    name, params = equation.primitive.name, equation.params
    if name in INNER:
        return _call(domain, equation, forms)
    if all(is_point(form) for form in forms):
        if known(name).folded and all(is_static(form) for form in forms):
            with jax.ensure_compile_time_eval():
                return [np.asarray(equation.primitive.bind(*forms, **params))]
        found = equation.primitive.bind(*forms, **params)
        return list(found) if equation.primitive.multiple_results else [found]
    if any(isinstance(form, Shifted) for form in forms):
        carried = shifted_rule(domain, name, params, forms)
        if carried is not None:
            return [carried]
        return _evaluate(domain, equation, [_settle(domain, equation, form) for form in forms])
    try:
        found = CONTROL[name](domain, run, equation, forms) if name in CONTROL else None
        return _by_rule(domain, equation, forms) if found is None else found
    except NoEnclosure as error:
        raise _placed(error, equation) from error
    except NotImplementedError as error:
        raise NoEnclosure(name, line_of(equation), str(error)) from error


def _by_rule(domain: Domain, equation, forms) -> list[Form]:
    """Evaluate an equation by the domain's rule, or as a move of entries."""
    name = equation.primitive.name
    if not domain.knows(name) and not known(name).moves:
        raise NoEnclosure(name, line_of(equation))
    found = domain.rule(name, equation.params, *forms) if domain.knows(name) else NotImplemented
    if found is NotImplemented:
        return move(domain, equation, forms)
    return list(found) if equation.primitive.multiple_results else [found]


def _settle(domain: Domain, equation, form: Form) -> Form:
    try:
        return settle(domain, form)
    except NotImplementedError as error:
        raise NoEnclosure("stop_gradient", line_of(equation), str(error)) from error


def _call(domain: Domain, equation, forms) -> list[Form]:
    """A function within the program; some are known as a whole."""
    (jaxpr, consts), function = called(equation), name_of_call(equation)
    varies = not all(is_point(form) for form in forms)
    if varies and function in CALLS and len(jaxpr.outvars) == 1:
        known = [_settle(domain, equation, form) for form in forms]
        try:
            return [domain.rule(function, {}, *known)]
        except NotImplementedError as error:
            raise NoEnclosure(function, line_of(equation), str(error)) from error
    try:
        return run(domain, jaxpr, consts, forms)
    except NoEnclosure as error:
        raise _placed(error, equation) from error


def _placed(error: NoEnclosure, equation) -> NoEnclosure:
    """The error with the caller's line in the user's code: functions that JAX compiles once do not record their caller."""
    return error if error.where else NoEnclosure(error.primitive, line_of(equation), error.reason)


# Primitives that users teach -------------------------------------------------------------------------------------------


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
        def rule(box: Box, params: dict[str, Any], *forms: Form):
            numbers = (
                numbers_of(box.truths(form)[0], int) if isinstance(form, (Truth, Assumed)) else form for form in forms
            )
            return function(*numbers, **params)

        Box.rules[primitive] = rule
        TAUGHT.add(primitive)
        return function

    return enter


# Inventory -------------------------------------------------------------------------------------------------------------


class Inventory(NamedTuple):
    """Sorted names: primitives with rules proved here, functions with a rule as a whole, and rules registered by a user."""

    primitives: list[str]
    functions: list[str]
    taught: list[str]


def inventory(function: Callable, dim: int) -> Inventory:
    """The inventory of a function of ``dim`` numbers."""
    jaxpr = jax.make_jaxpr(lambda x: function(x))(jax.ShapeDtypeStruct((dim,), jnp.float64)).jaxpr
    primitives: set[str] = set()
    functions: set[str] = set()

    def enters(equation) -> bool:
        return equation.primitive.name not in INNER or name_of_call(equation) not in CALLS

    for equation in equations(jaxpr, enters):
        if equation.primitive.name not in INNER:
            primitives.add(equation.primitive.name)
        elif not enters(equation):
            functions.add(name_of_call(equation))
    return Inventory(sorted(primitives - TAUGHT), sorted(functions), sorted(primitives & TAUGHT))


# Which operation is not finite -----------------------------------------------------------------------------------------


# Which operation of a program is not finite, and on which line: for error messages.
#
# A program is evaluated equation by equation, and the result that is not finite is followed back to an equation whose
# arguments are all finite. Where all values are finite, the program is evaluated on a short interval of the path instead:
# the first rule without a finite enclosure is the operation that is not smooth there.

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
    leaves = jax.tree.leaves(form) if isinstance(form, Enclosure) or is_point(form) else ()
    known = [leaf for leaf in leaves if not isinstance(leaf, Tracer)]
    return all(bool(np.all(np.isfinite(np.asarray(leaf)))) for leaf in known)


def _culprit(jaxpr: core.Jaxpr, consts, args) -> tuple[str, str] | None:
    """Primitive and line of the equation that makes a result not finite, or None."""
    frame = _evaluated(jaxpr, consts, args)
    bad = next((atom for atom in jaxpr.outvars if not _finite(frame.read(atom))), None)
    while bad is not None and bad in frame.makers:
        equation = frame.makers[bad]
        values = [frame.read(atom) for atom in equation.invars]
        following = next((equation.invars[k] for k in _sources(equation, values) if not _finite(values[k])), None)
        if following is None or isinstance(following, core.Literal) or following not in frame.makers:
            return _within(equation, values) or (equation.primitive.name, line_of(equation))
        bad = following
    return None


def _evaluated(jaxpr: core.Jaxpr, consts, args) -> Frame:
    """All values of a program and the equations that make them."""
    frame = Frame()

    def step(equation, values):
        if equation.primitive.name in INNER:
            inner, own = called(equation)
            reads = _evaluated(inner, own, values)
            return [reads.read(atom) for atom in inner.outvars]
        found = equation.primitive.bind(*values, **equation.params)
        return found if equation.primitive.multiple_results else [found]

    evaluate(jaxpr, consts, args, step, frame)
    return frame


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
    found = _culprit(*called(equation), values)
    return None if found is None else (found[0], found[1] or line_of(equation))


def _finite(value: Any) -> bool:
    value = np.asarray(value)
    return value.dtype.kind not in "fc" or bool(np.all(np.isfinite(value)))
