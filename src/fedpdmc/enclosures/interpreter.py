"""The interpreter: the jaxpr of a function, evaluated on forms in place of numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend import core
from jax.interpreters import partial_eval

from fedpdmc.enclosures.cancelling_shifts import Shifted, settled, shifted, shifted_rule
from fedpdmc.enclosures.intervals import Assumed, Cell, Form, Interval, Series, Truth, full, is_point, is_static, span
from fedpdmc.enclosures.jets import jet_rules
from fedpdmc.enclosures.jets.jet import Balls, Jet, rearranged, stacked
from fedpdmc.enclosures.recognised_calls import INNER, largest_of, line_of, name_of_call, sigmoid_of
from fedpdmc.enclosures.registry import CALLS, RULES
from fedpdmc.enclosures.series import elementwise, linear
from fedpdmc.enclosures.series.smooth_functions import FUNCTIONS, apply
from fedpdmc.enclosures.taylor_models import taylor_rules
from fedpdmc.enclosures.taylor_models.taylor_model import Curve, Stretch
from fedpdmc.errors import NoEnclosure

_LOADED = (elementwise, linear)
# Computed while tracing where all arguments are constants of the program, so that zeros are known to be zeros.
FOLDED = {"add", "broadcast_in_dim", "convert_element_type", "mul", "neg", "reshape", "squeeze", "sub"}


def enclose(function: Callable, cell: Cell | Balls | Stretch | None = None) -> Callable:
    """``function`` on forms: where it is given intervals it returns intervals that hold all its values.

    Parameters
    ----------
    function : callable
        Of any pytrees of arrays, to a pytree of arrays.
    cell : Cell, Balls or Stretch, optional
        The times that `Series` among the arguments speak of, the balls of a `Jet`, or the stretch of a `Curve`.

    Returns
    -------
    callable
        Of the same arguments, any array of which may be an `Interval` or a `Series`. What no interval enters is computed
        plainly.

    Raises
    ------
    NoEnclosure
        At a primitive without a rule.
    """
    place: Any = Cell(0.0) if cell is None else cell

    def enclosed(*args):
        leaves, structure = jax.tree.flatten(args, is_leaf=_is_form)
        samples = [x if is_point(x) else jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]

        def flat(*values):
            return function(*jax.tree.unflatten(structure, values))

        closed, shape = jax.make_jaxpr(flat, return_shape=True)(*samples)
        found = [settled(place, form) for form in run(place, _pruned(closed.jaxpr), closed.consts, leaves)]
        if not any(isinstance(leaf, Series) for leaf in leaves):
            found = [span(place, form) if isinstance(form, Series) else form for form in found]
        return jax.tree.unflatten(jax.tree.structure(shape), found)

    return enclosed


def _is_form(x: Any) -> bool:
    return isinstance(x, (Assumed, Curve, Interval, Jet, Series, Truth))


def _on_balls(cell: Any) -> bool:
    return isinstance(cell, Balls)


def _pruned(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """Without the equations that nothing depends on; constants and inputs stay."""
    kept, *_ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
    return kept


def run(cell: Any, jaxpr: core.Jaxpr, consts, args) -> list[Form]:
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
        parts = sigmoid_of(producers, equation)
        key = _signature(same, equation) if _on_balls(cell) else None
        if key is not None and key in made:
            # Written twice, meant once: what is to cancel must be one and the same.
            found = [known[variable] for variable in made[key]]
            same.update(zip(equation.outvars, made[key], strict=True))
        elif parts is not None and not all(is_point(read(atom)) for atom in parts) and not _on_balls(cell):
            one, other = (settled(cell, read(atom)) for atom in parts)
            found = [_logistic_of_difference(cell, one, other)]
        elif equation.primitive.name == "stop_gradient":
            found = [_stopped(cell, equation, forms[0], producers, read)]
        elif equation.primitive.name in ("reduce_max", "reduce_min") and isinstance(forms[0], (Curve, Jet)):
            # The largest of values has kinks; where it is only taken off and put back they do not matter.
            found = [shifted(cell, *_evaluate(cell, equation, forms), stopped=False)]
        else:
            found = _evaluate(cell, equation, forms)
        if key is not None:
            made.setdefault(key, equation.outvars)
        producers.update((variable, equation) for variable in equation.outvars)
        known.update(zip(equation.outvars, found, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _signature(same: dict[Any, Any], equation) -> Any:
    """Equal for equations that compute the same; None where programs within would have to be compared."""
    name, params = equation.primitive.name, equation.params
    if name in INNER or name in CONTROL or any(isinstance(x, (np.ndarray, jax.Array)) for x in params.values()):
        return None
    atoms = [_constant(x) if isinstance(x, core.Literal) else same.get(x, x) for x in equation.invars]
    return (name, *atoms, str(sorted(params.items())))


def _constant(literal: core.Literal) -> Any:
    value = np.asarray(literal.val)
    return str(value.dtype), value.shape, value.tobytes()


def _logistic_of_difference(cell: Any, one: Form, other: Form) -> Form:
    if isinstance(cell, Stretch):
        return taylor_rules.rule(cell, "logistic", {}, taylor_rules.rule(cell, "sub", {}, one, other))
    return apply(cell, FUNCTIONS["logistic"], elementwise.sub(cell, {}, one, other))


def _stopped(cell: Cell, equation, form: Form, producers, read) -> Form:
    """A value that is not differentiated stands for itself: as a shift, it may cancel."""
    form = settled(cell, form) if _on_balls(cell) else form
    if is_point(form) or not isinstance(form, (Interval, Jet, Series)):
        return form
    source = largest_of(producers, equation.invars[0])
    among = None if source is None else read(source[0])
    if isinstance(form, Jet):
        return shifted(cell, form)
    if source is None or not isinstance(among, Series) or math.prod(form.shape) != _kept(among, source[1]):
        return shifted(cell, form)
    return shifted(cell, form, among, source[1])


def _kept(form: Form, axes) -> int:
    return math.prod(n for axis, n in enumerate(form.shape) if axis not in axes)


def _evaluate(cell: Cell, equation, forms) -> list[Form]:
    """One equation: plainly where nothing varies, else by its rule."""
    name, params = equation.primitive.name, equation.params
    if name in INNER:
        return _call(cell, equation, forms)
    if all(is_point(form) for form in forms):
        if name in FOLDED and all(is_static(form) for form in forms):
            with jax.ensure_compile_time_eval():
                return [np.asarray(equation.primitive.bind(*forms, **params))]
        found = equation.primitive.bind(*forms, **params)
        return list(found) if equation.primitive.multiple_results else [found]
    if any(isinstance(form, Shifted) for form in forms):
        carried = shifted_rule(cell, name, params, forms)
        if carried is not None:
            return [carried]
        return _evaluate(cell, equation, [_settled(cell, equation, form) for form in forms])
    if isinstance(cell, Stretch) and name != "custom_linear_solve":
        try:
            return taylor_rules.evaluate(cell, equation, forms)
        except NotImplementedError as error:
            raise NoEnclosure(name, line_of(equation), str(error)) from error
    if name in CONTROL:
        return CONTROL[name](cell, equation, forms)
    if isinstance(cell, Balls):
        try:
            return jet_rules.evaluate(cell, equation, forms)
        except NotImplementedError as error:
            raise NoEnclosure(name, line_of(equation), str(error)) from error
    if name not in RULES and name not in linear.MOVES:
        raise NoEnclosure(name, line_of(equation))
    try:
        if name not in RULES:
            return linear.move(cell, equation.primitive, params, forms)
        found = RULES[name](cell, params, *forms)
    except NotImplementedError as error:
        raise NoEnclosure(name, line_of(equation), str(error)) from error
    return list(found) if equation.primitive.multiple_results else [found]


def _settled(cell: Cell, equation, form: Form) -> Form:
    try:
        return settled(cell, form)
    except NotImplementedError as error:
        raise NoEnclosure("stop_gradient", line_of(equation), str(error)) from error


def _call(cell: Cell, equation, forms) -> list[Form]:
    """A function within the program; some are known as a whole."""
    name, params = equation.primitive.name, equation.params
    inner = params[INNER[name]]
    jaxpr, consts = (inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, ())
    called = name_of_call(equation)
    varies = not all(is_point(form) for form in forms)
    if varies and called in CALLS and len(jaxpr.outvars) == 1:
        known = [_settled(cell, equation, form) for form in forms]
        try:
            if isinstance(cell, Balls):
                return [jet_rules.rule(cell, called, {}, *known)]
            own = taylor_rules.rule(cell, called, {}, *known) if isinstance(cell, Stretch) else None
            return [CALLS[called](cell, {}, *known) if own is None else own]
        except NotImplementedError as error:
            raise NoEnclosure(called, line_of(equation), str(error)) from error
    try:
        return run(cell, jaxpr, consts, forms)
    except NoEnclosure as error:
        # Functions of JAX that are compiled once do not know who called them: the caller's line is the user's.
        if error.where:
            raise
        raise NoEnclosure(error.primitive, line_of(equation), error.reason) from error


# Control flow ---------------------------------------------------------------------------------------------------------


def _cond(cell: Cell, equation, forms) -> list[Form]:
    """Branches: the index must be a point."""
    index, *operands = forms
    if not is_point(index):
        raise NoEnclosure("cond", line_of(equation), "its condition depends on the parameters")
    branches = equation.params["branches"]
    if isinstance(cell, Balls):
        branch = branches[min(max(int(index), 0), len(branches) - 1)]
        return run(cell, branch.jaxpr, branch.consts, operands)
    outs = [[settled(cell, form) for form in run(cell, branch.jaxpr, branch.consts, operands)] for branch in branches]
    chosen = []
    for cases in zip(*outs, strict=True):
        chosen.append(elementwise.pick_case(cell, index, cases))
    return chosen


def _scan(cell: Cell, equation, forms) -> list[Form]:
    """A loop of fixed length: what is carried becomes a full series where it may vary."""
    params = equation.params
    n_consts, n_carry = scan_lengths(params)
    consts, carry, xs = forms[:n_consts], list(forms[n_consts : n_consts + n_carry]), forms[n_consts + n_carry :]
    inner = params["jaxpr"]

    def body(carry, x):
        out = [settled(cell, form) for form in run(cell, inner.jaxpr, inner.consts, [*consts, *carry, *x])]
        return out[:n_carry], out[n_carry:]

    if isinstance(cell, Balls):
        return _unrolled(cell, body, carry, xs, params["length"], params["reverse"])
    first = [elementwise.entry(x, 0) for x in xs]
    for _ in range(len(carry) + 1):
        after = body(carry, first)[0]
        varies = [is_point(old) and not is_point(new) for old, new in zip(carry, after, strict=True)]
        carry = [full(old) if new or not is_point(old) else old for old, new in zip(carry, varies, strict=True)]
        if not any(varies):
            break

    def step(carry, x):
        out, ys = body(carry, x)
        return [full(new) if not is_point(old) else new for old, new in zip(carry, out, strict=True)], ys

    last, ys = lax.scan(step, carry, list(xs), params["length"], params["reverse"])
    return [*last, *ys]


def _unrolled(balls: Balls, body: Callable, carry: list[Form], xs, length: int, reverse: bool) -> list[Form]:
    """A loop on jets, step by step."""
    steps = []
    for i in range(length)[:: -1 if reverse else 1]:
        now = [rearranged(x, lambda part, i=i: part[i]) if isinstance(x, Jet) else np.asarray(x)[i] for x in xs]
        carry, ys = body(carry, now)
        steps.append(ys)
    return [*carry, *(stacked(balls, list(ys)) for ys in zip(*steps[:: -1 if reverse else 1], strict=True))]


def scan_lengths(params: dict[str, Any]) -> tuple[int, int]:
    """How many constants and carried values a scan has; as of JAX 0.11 a tree of (constants, carried, scanned) says it."""
    if "ft_in" in params:
        consts, carry, _ = params["ft_in"].unpack()
        return len(consts), len(carry)
    return params["num_consts"], params["num_carry"]


def _while(cell: Cell, equation, forms) -> list[Form]:
    raise NoEnclosure("while", line_of(equation), "a loop whose length is not fixed")


def _linear_solve(cell: Cell, equation, forms) -> list[Form]:
    """``A⁻¹ b`` by the program's own solver, for a constant matrix."""
    params = equation.params
    counts, solver = params["const_lengths"], params["jaxprs"].solve
    total = sum(counts)
    before = counts.matvec + counts.vecmat
    consts = forms[before : before + counts.solve]
    if not all(is_point(form) for form in forms[:total]):
        raise NoEnclosure(equation.primitive.name, line_of(equation), "its matrix depends on the parameters")
    return [settled(cell, form) for form in run(cell, solver.jaxpr, solver.consts, [*consts, *forms[total:]])]


CONTROL: dict[str, Callable[..., list[Form]]] = {
    "cond": _cond,
    "scan": _scan,
    "while": _while,
    "custom_linear_solve": _linear_solve,
}
