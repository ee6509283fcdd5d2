"""The rules by which a program is evaluated on jets: products, functions of one number, and choices."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from fedpdmc.enclosures import linear
from fedpdmc.enclosures.forms import Assumed, Form, Interval, Truth, is_point
from fedpdmc.enclosures.jet_linear import LINEAR, add, moved, neg, scaled, sub
from fedpdmc.enclosures.jets import Balls, Jet, broadcast, composed, contracted, lifted, multiplied, refined
from fedpdmc.enclosures.registry import RULES
from fedpdmc.enclosures.taylor import TAYLOR, integer_power, polygamma, real_power

# Of so many exponentials the logarithm of a sum is made term by term.
MOST_TERMS = 16


@np.errstate(all="ignore")
def evaluate(balls: Balls, equation: Any, forms: list[Form]) -> list[Form]:
    """One equation on jets; raises ``NotImplementedError`` where there is no rule."""
    name, params = equation.primitive.name, equation.params
    forms = [np.asarray(form) if is_point(form) else form for form in forms]
    if name in linear.MOVES:
        return [moved(balls, equation.primitive, params, forms)]
    return [rule(balls, name, params, *forms)]


@np.errstate(all="ignore")
def rule(balls: Balls, name: str, params: dict[str, Any], *forms: Form) -> Form:
    """The result of a primitive with one value."""
    if name in SPECIAL:
        return SPECIAL[name](balls, params, *forms)
    if name in TAYLOR:
        return composed(balls, TAYLOR[name], forms[0])
    if name in COMPARED:
        return _compared(balls, name, params, *forms)
    raise NotImplementedError(f"no bounds of the derivatives of {name!r} on balls")


# Products and powers --------------------------------------------------------------------------------------------------


def _square(balls: Balls, params, x: Jet) -> Jet:
    found = composed(balls, integer_power(2), x)
    return Jet(found.lo, found.hi, ("square", x))


def _integer_pow(balls: Balls, params, x: Jet) -> Jet:
    return _square(balls, params, x) if params["y"] == 2 else composed(balls, integer_power(params["y"]), x)


def _exp(balls: Balls, params, x: Jet) -> Jet:
    found = composed(balls, TAYLOR["exp"], x)
    return Jet(found.lo, found.hi, ("exp", Jet(x.lo[..., None], x.hi[..., None])))


def _log(balls: Balls, params, x: Jet) -> Jet:
    """Of a sum of a few exponentials as ``log(e^a + e^b) = b + softplus(a − b)``, term by term."""
    exponents, root = x.of("exp"), x.of("one more")
    if root is not None:
        return composed(balls, TAYLOR["log1p_square"], root)
    if exponents is None or exponents.shape[-1] > MOST_TERMS:
        return composed(balls, TAYLOR["log"], x)
    terms = [Jet(exponents.lo[..., j], exponents.hi[..., j]) for j in range(exponents.shape[-1])]
    return functools.reduce(lambda one, other: _logaddexp(balls, params, one, other), terms)


def _log1p(balls: Balls, params, x: Jet) -> Jet:
    root = x.of("square")
    return composed(balls, TAYLOR["log1p" if root is None else "log1p_square"], x if root is None else root)


def _lgamma(balls: Balls, params, x: Jet) -> Jet:
    """Of ``y + e^l`` with a constant y as one function of l: its derivatives are small where those by ``e^l`` cancel."""
    alone, raised_by = x.of("exp"), x.of("raised")
    exponent = raised_by if alone is None else alone
    if exponent is None or exponent.shape[-1] != 1:
        return composed(balls, TAYLOR["lgamma"], x)
    constant = exponent.of("by")
    assert (constant is None) == (raised_by is None)
    y = np.zeros(()) if constant is None else constant.lo[0, 0]

    def function(small: Balls, z: Jet) -> Jet:
        raised = add(small, params, composed(small, TAYLOR["exp"], z), np.expand_dims(y, -1))
        return composed(small, TAYLOR["lgamma"], raised)

    return composed(balls, refined(function), Jet(exponent.lo[..., 0], exponent.hi[..., 0]))


def _mul(balls: Balls, params, x: Form, y: Form) -> Form:
    if x is y:
        return _square(balls, params, x)
    if is_point(x) or is_point(y):
        return scaled(y, x) if is_point(x) else scaled(x, y)
    shape = np.broadcast_shapes(x.shape, y.shape)
    return multiplied(balls, contracted(balls, broadcast(x, shape)), contracted(balls, broadcast(y, shape)))


def _div(balls: Balls, params, x: Form, y: Form) -> Form:
    return _mul(balls, params, x, 1 / y if is_point(y) else composed(balls, integer_power(-1), y))


def _pow(balls: Balls, params, x: Form, y: Form) -> Form:
    if not is_point(y):
        logs = np.log(x) if is_point(x) else composed(balls, TAYLOR["log"], x)
        return composed(balls, TAYLOR["exp"], _mul(balls, params, y, logs))
    if np.ndim(y):
        x = broadcast(x, np.broadcast_shapes(x.shape, y.shape))
    return _square(balls, params, x) if np.ndim(y) == 0 and y == 2.0 else composed(balls, real_power(y), x)


def _convert(balls: Balls, params, x: Form) -> Form:
    if not isinstance(x, Jet) or not jnp.issubdtype(params["new_dtype"], jnp.floating):
        raise NotImplementedError("a value that is rounded to an integer, or a comparison as a number")
    return x


def _logaddexp(balls: Balls, params, x: Form, y: Form) -> Form:
    return add(balls, params, composed(balls, TAYLOR["softplus"], sub(balls, params, x, y)), y)


@np.errstate(all="ignore")
def log_erfc(balls: Balls, x: Jet, factor: Array) -> Jet:
    """``log(c erfc(x)) = log(2c) + log Φ(−√2 x)``, whose derivatives are those of one function and not of a quotient."""
    tail = composed(balls, TAYLOR["log_ndtr"], _mul(balls, {}, x, np.asarray(-np.sqrt(2.0))))
    return add(balls, {}, tail, np.log(2 * np.asarray(factor)))


def _polygamma(balls: Balls, params, n: Form, x: Form) -> Form:
    if not is_point(n) or np.ndim(n):
        raise NotImplementedError("polygamma needs an order that is a constant of the program")
    return composed(balls, polygamma(int(n)), x)


# Kinks ----------------------------------------------------------------------------------------------------------------


def chosen(balls: Balls, which: Truth, no: Form, yes: Form) -> Jet:
    """The case that holds on a whole ball; where none does the derivatives need not exist."""
    no, yes = lifted(balls, no), lifted(balls, yes)
    shape = np.broadcast_shapes(no.shape, yes.shape, np.shape(which.value)[1:])
    no, yes = broadcast(no, shape), broadcast(yes, shape)
    value, known = (np.expand_dims(np.asarray(x), 1) for x in (which.value, which.known))
    lo, hi = np.where(value, yes.lo, no.lo), np.where(value, yes.hi, no.hi)
    return Jet(np.where(known, lo, -np.inf), np.where(known, hi, np.inf))


def _spread(balls: Balls, which: Form) -> Truth:
    """A truth for every radius."""
    if isinstance(which, Truth):
        return which
    return Truth(*(np.broadcast_to(x, (len(balls.radii), *np.shape(which))) for x in (which, True)))


def _select(balls: Balls, params, which: Form, *cases: Form) -> Form:
    if isinstance(which, Assumed):
        case, witness = lifted(balls, cases[which.value]), which.witness
        room = 0.0 * np.asarray(witness.range.magnitude)[:, None]
        return Jet(case.lo - room, case.hi + room)
    if len(cases) != 2 or not isinstance(which, (Truth, np.ndarray)):
        raise NotImplementedError("a choice between more than two cases")
    return chosen(balls, _spread(balls, which), *cases)


def _compared(balls: Balls, name: str, params, x: Form, y: Form) -> Form:
    if name in ("eq", "ne"):
        if x is y or _infinite(y):
            return Assumed((x is y) == (name == "eq"), x)
        raise NotImplementedError(f"{name} of values that vary")
    one, other = (form.range if isinstance(form, Jet) else Interval(form, form) for form in (x, y))
    return RULES[name](balls, params, one, other)


def _infinite(x: Form) -> bool:
    return is_point(x) and np.ndim(x) == 0 and bool(np.isinf(x))


COMPARED = {"lt", "le", "gt", "ge", "eq", "ne"}


def _larger(balls: Balls, params, x: Form, y: Form) -> Form:
    return chosen(balls, _compared(balls, "ge", params, x, y), y, x)


def _smaller(balls: Balls, params, x: Form, y: Form) -> Form:
    return chosen(balls, _compared(balls, "le", params, x, y), y, x)


def _abs(balls: Balls, params, x: Form) -> Form:
    if x.of("exp") is not None:
        return x
    return chosen(balls, _compared(balls, "ge", params, x, np.zeros(())), neg(balls, params, x), x)


def _extreme(largest: bool) -> Callable[..., Form]:
    """The range alone: the derivatives need not exist."""
    reduce = np.max if largest else np.min

    def found(balls: Balls, params, x: Form) -> Form:
        axes = tuple(axis + 1 for axis in params["axes"])
        low, high = reduce(x.range.lo, axes), reduce(x.range.hi, axes)
        hi = np.full((low.shape[0], len(balls.table.degree), *low.shape[1:]), np.inf)
        lo = -hi
        lo[:, 0], hi[:, 0] = low, high
        return Jet(lo, hi)

    return found


def _not(balls: Balls, params, x: Form) -> Form:
    return Assumed(not x.value, x.witness) if isinstance(x, Assumed) else Truth(~x.value, x.known)


SPECIAL: dict[str, Callable[..., Form]] = LINEAR | {
    "mul": _mul, "div": _div, "pow": _pow, "logaddexp": _logaddexp,
    "convert_element_type": _convert, "polygamma": _polygamma, "select_n": _select, "max": _larger, "min": _smaller,
    "abs": _abs, "reduce_max": _extreme(True), "reduce_min": _extreme(False), "not": _not,
    "integer_pow": _integer_pow, "square": _square, "exp": _exp, "log": _log, "log1p": _log1p, "lgamma": _lgamma,
    "is_finite": lambda balls, params, x: Assumed(True, x),
}  # fmt: skip
