"""The interpreter: the jaxpr of a function, evaluated on forms in place of numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters import partial_eval

from fedpdmc._jax.by_numpy import INNER
from fedpdmc.enclosures.cancelling_shifts import Shifted, settled, shifted, shifted_rule
from fedpdmc.enclosures.cell_values import Cell, Series
from fedpdmc.enclosures.control_flow import CONTROL
from fedpdmc.enclosures.domain import Domain, Enclosure, Form, is_point, is_static, shape_of
from fedpdmc.enclosures.jets import jet_linear, jet_rules
from fedpdmc.enclosures.origins import line_of, name_of_call
from fedpdmc.enclosures.recognised_calls import CALLS, largest_of, order_of, sigmoid_of
from fedpdmc.enclosures.series import arithmetic, linear
from fedpdmc.enclosures.shared_rules import MOVES, move
from fedpdmc.enclosures.taylor_models import taylor_rules
from fedpdmc.errors import NoEnclosure

# Modules that enter the rules of the domains.
_LOADED = (arithmetic, jet_linear, jet_rules, linear, taylor_rules)
# Computed while tracing if all arguments are constants of the program, so that zeros are known to be zeros.
FOLDED = {"add", "broadcast_in_dim", "convert_element_type", "mul", "neg", "reshape", "squeeze", "sub"}


def enclose(function: Callable, domain: Domain | None = None) -> Callable:
    """``function`` on forms: given intervals, it returns intervals that contain all its values.

    Parameters
    ----------
    function : callable
        Of any pytrees of arrays, to a pytree of arrays.
    domain : Domain, optional
        Where the enclosures among the arguments hold: the `Cell` of a `Series`, the `TimeInterval` of a `Curve`, or the
        `Balls` of a `Jet`. An `Interval` needs none.

    Returns
    -------
    callable
        Of the same arguments, any array of which may be an `Interval` or a `Series`. Values that depend on no interval are
        computed as usual.

    Raises
    ------
    NoEnclosure
        At a primitive without a rule.
    """
    place = Cell(0.0) if domain is None else domain

    def enclosed(*args):
        leaves, structure = jax.tree.flatten(args, is_leaf=lambda x: isinstance(x, Enclosure))
        samples = [x if is_point(x) else jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]

        def flat(*values):
            return function(*jax.tree.unflatten(structure, values))

        closed, shape = jax.make_jaxpr(flat, return_shape=True)(*samples)
        consts = closed.consts if place.eager else [_not_static(const) for const in closed.consts]
        found = [settled(place, form) for form in run(place, _pruned(closed.jaxpr), consts, leaves)]
        if not any(isinstance(leaf, Series) for leaf in leaves):
            found = [place.spans(form)[0] if isinstance(form, Series) else form for form in found]
        return jax.tree.unflatten(jax.tree.structure(shape), found)

    return enclosed


def _not_static(const: Any) -> Any:
    """Zeros of a user's array, which are not left out as those of autodiff are: zero times NaN is NaN."""
    zero = isinstance(const, np.ndarray) and const.ndim and const.dtype.kind == "f" and not np.any(const)
    return jnp.asarray(const) if zero else const


def _pruned(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """The program without equations that nothing depends on; constants and inputs stay."""
    kept, *_ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
    return kept


def run(domain: Domain, jaxpr: core.Jaxpr, consts, args) -> list[Form]:
    """Evaluate a program equation by equation."""
    known: dict[Any, Form] = {}
    producers: dict[Any, Any] = {}
    made: dict[Any, list[Any]] = {}
    same: dict[Any, Any] = {}

    def read(atom):
        return atom.val if isinstance(atom, core.Literal) else known[atom]

    known.update(zip(jaxpr.constvars, consts, strict=True))
    known.update(zip(jaxpr.invars, args, strict=True))
    for equation in jaxpr.eqns:
        forms = [read(atom) for atom in equation.invars]
        key = _signature(same, equation) if domain.eager else None
        if key is not None and key in made:
            # A value that is computed twice cancels only if both results are the same object.
            found = [known[variable] for variable in made[key]]
            same.update(zip(equation.outvars, made[key], strict=True))
        else:
            found = _recognised(domain, equation, forms, producers, read)
            found = _evaluate(domain, equation, forms) if found is None else found
        if key is not None:
            made.setdefault(key, equation.outvars)
        producers.update((variable, equation) for variable in equation.outvars)
        known.update(zip(equation.outvars, found, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _recognised(domain: Domain, equation, forms, producers, read) -> list[Form] | None:
    """The result of an equation that is recognised as part of a larger function; None for any other."""
    name = equation.primitive.name
    parts = None if domain.keeps_exponents else sigmoid_of(producers, equation)
    if parts is not None and not all(is_point(read(atom)) for atom in parts):
        one, other = (settled(domain, read(atom)) for atom in parts)
        return [domain.rule("logistic", {}, domain.rule("sub", {}, one, other))]
    order = order_of(producers, equation)
    if order is not None and not all(map(is_point, forms)):
        comparison, *atoms = order
        return [domain.rule(comparison, {}, *(settled(domain, read(atom)) for atom in atoms))]
    if name == "stop_gradient":
        return [_stopped(domain, equation, forms[0], producers, read)]
    if name in ("reduce_max", "reduce_min") and not all(map(is_point, forms)):
        # A maximum has kinks, which do not matter if it is only subtracted and added back.
        found = _evaluate(domain, equation, forms)
        split = domain.extreme(found[0])
        return found if split is None else [shifted(*split)]
    return None


def _signature(same: dict[Any, Any], equation) -> Any:
    """Equal for equations that compute the same; None if inner programs would have to be compared."""
    name, params = equation.primitive.name, equation.params
    if name in INNER or name in CONTROL or any(isinstance(x, (np.ndarray, jax.Array)) for x in params.values()):
        return None
    atoms = [_constant(x) if isinstance(x, core.Literal) else same.get(x, x) for x in equation.invars]
    return (name, *atoms, str(sorted(params.items())))


def _constant(literal: core.Literal) -> Any:
    value = np.asarray(literal.val)
    return str(value.dtype), value.shape, value.tobytes()


def _stopped(domain: Domain, equation, form: Form, producers, read) -> Form:
    """A value that is not differentiated is kept as a symbol: as a shift, it may cancel."""
    form = settled(domain, form) if domain.eager else form
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
        if name in FOLDED and all(is_static(form) for form in forms):
            with jax.ensure_compile_time_eval():
                return [np.asarray(equation.primitive.bind(*forms, **params))]
        found = equation.primitive.bind(*forms, **params)
        return list(found) if equation.primitive.multiple_results else [found]
    if any(isinstance(form, Shifted) for form in forms):
        carried = shifted_rule(domain, name, params, forms)
        if carried is not None:
            return [carried]
        return _evaluate(domain, equation, [_settled(domain, equation, form) for form in forms])
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
    if not domain.knows(name) and name not in MOVES:
        raise NoEnclosure(name, line_of(equation))
    found = domain.rule(name, equation.params, *forms) if domain.knows(name) else NotImplemented
    if found is NotImplemented:
        return move(domain, equation, forms)
    return list(found) if equation.primitive.multiple_results else [found]


def _settled(domain: Domain, equation, form: Form) -> Form:
    try:
        return settled(domain, form)
    except NotImplementedError as error:
        raise NoEnclosure("stop_gradient", line_of(equation), str(error)) from error


def _call(domain: Domain, equation, forms) -> list[Form]:
    """A function within the program; some are known as a whole."""
    name, params = equation.primitive.name, equation.params
    inner = params[INNER[name]]
    jaxpr, consts = (inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, ())
    called = name_of_call(equation)
    varies = not all(is_point(form) for form in forms)
    if varies and called in CALLS and len(jaxpr.outvars) == 1:
        known = [_settled(domain, equation, form) for form in forms]
        try:
            return [domain.rule(called, {}, *known)]
        except NotImplementedError as error:
            raise NoEnclosure(called, line_of(equation), str(error)) from error
    try:
        return run(domain, jaxpr, consts, forms)
    except NoEnclosure as error:
        raise _placed(error, equation) from error


def _placed(error: NoEnclosure, equation) -> NoEnclosure:
    """The error with the caller's line in the user's code: functions that JAX compiles once do not record their caller."""
    return error if error.where else NoEnclosure(error.primitive, line_of(equation), error.reason)
