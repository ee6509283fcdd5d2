"""The rules by which a program is evaluated on jets: products, functions of one number, and choices."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from fedpdmc.enclosures.domain import Assumed, Form, Rule, Truth, is_point
from fedpdmc.enclosures.jets.jet import Balls, Jet, broadcast, composed, contracted, lifted, multiplied, refined
from fedpdmc.enclosures.jets.jet_linear import add, scaled, tail
from fedpdmc.enclosures.shared_rules import abs_, select_n, sub
from fedpdmc.enclosures.taylor_coefficients import TAYLOR, integer_power, polygamma, real_power

# The logarithm of a sum of up to this many exponentials is made term by term.
MOST_TERMS = 16


# Functions of one number ----------------------------------------------------------------------------------------------


def _exp(balls: Balls, params, x: Jet) -> Jet:
    found = composed(balls, TAYLOR["exp"], x)
    return Jet(found.lo, found.hi, ("exp", Jet(x.lo[..., None], x.hi[..., None])))


def _exponents(balls: Balls, x: Jet) -> Jet | None:
    """``e`` if x is known to be ``Σ exp(e)``, of a few terms."""
    exponents, raised = x.of("exp"), x.of("raised")
    if raised is not None and (constant := raised.of("by")) is not None and np.all(constant.lo[0, 0] >= 0):
        log = lifted(balls, np.broadcast_to(np.log(constant.lo[0, 0]), x.shape)[..., None])
        exponents = Jet(np.concatenate([raised.lo, log.lo], -1), np.concatenate([raised.hi, log.hi], -1))
    return None if exponents is None or exponents.shape[-1] > MOST_TERMS else exponents


def _exponent(x: Form) -> Jet | None:
    """``e`` if x is known to be ``exp(e)``."""
    found = x.of("exp") if isinstance(x, Jet) else None
    return None if found is None or found.shape[-1] != 1 else Jet(found.lo[..., 0], found.hi[..., 0])


def _log(balls: Balls, params, x: Jet) -> Jet:
    """The logarithm; for a sum of a few exponentials by ``log(e^a + e^b) = b + softplus(a − b)``, term by term."""
    root, beyond, exponents = x.of("one more"), x.of("tail"), _exponents(balls, x)
    if root is not None:
        return composed(balls, TAYLOR["log1p_square"], root)
    if beyond is not None and (factor := beyond.of("by")) is not None:
        return _log_erfc(balls, beyond, factor.lo[0, 0])
    if exponents is None:
        return composed(balls, TAYLOR["log"], x)
    terms = [Jet(exponents.lo[..., j], exponents.hi[..., j]) for j in range(exponents.shape[-1])]
    return functools.reduce(lambda one, other: _logaddexp(balls, params, one, other), terms)


def _log_erfc(balls: Balls, x: Jet, factor: np.ndarray) -> Jet:
    """``log(c erfc(x)) = log(2c) + log Φ(−√2 x)``, whose derivatives are those of one function and not of a quotient."""
    log = composed(balls, TAYLOR["log_ndtr"], scaled(balls, x, np.asarray(-np.sqrt(2.0))))
    return add(balls, {}, log, np.log(2 * factor))


def _log1p(balls: Balls, params, x: Jet) -> Jet:
    root = x.of("square")
    if root is not None:
        return composed(balls, TAYLOR["log1p_square"], root)
    if x.of("exp") is not None:
        return _log(balls, params, add(balls, params, x, _exp(balls, params, lifted(balls, np.zeros(x.shape)))))
    return composed(balls, TAYLOR["log1p"], x)


def _logaddexp(balls: Balls, params, x: Form, y: Form) -> Jet:
    """``y + softplus(x − y)``; x where ``e^y`` is zero."""
    found = add(balls, params, composed(balls, TAYLOR["softplus"], sub(balls, params, x, y)), y)
    x, y = (broadcast(lifted(balls, form), found.shape) for form in (x, y))
    gone = y.hi[:, :1] == -np.inf
    return Jet(np.where(gone, x.lo, found.lo), np.where(gone, x.hi, found.hi)) if np.any(gone) else found


def _erf(balls: Balls, params, x: Jet) -> Jet:
    found = composed(balls, TAYLOR["erf"], x)
    return Jet(found.lo, found.hi, ("erf", x))


def _erfc(balls: Balls, params, x: Jet) -> Jet:
    return tail(balls, composed(balls, TAYLOR["erfc"], x), x, np.ones(()))


def _lgamma(balls: Balls, params, x: Jet) -> Jet:
    """``y + e^l`` with a constant y as one function of l: its derivatives are small where those through ``e^l`` cancel."""
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


def _polygamma(balls: Balls, params, n: Form, x: Form) -> Form:
    if not is_point(n) or np.ndim(n):
        raise NotImplementedError("polygamma needs an order that is a constant of the program")
    return composed(balls, polygamma(int(n)), x)


# Products and powers --------------------------------------------------------------------------------------------------


def _mul(balls: Balls, params, x: Form, y: Form) -> Form:
    if x is y:
        return _square(balls, params, x)
    if is_point(x) or is_point(y):
        return scaled(balls, y, x) if is_point(x) else scaled(balls, x, y)
    one, other = _exponent(x), _exponent(y)
    if one is not None and other is not None:
        return _exp(balls, params, add(balls, params, one, other))
    shape = np.broadcast_shapes(x.shape, y.shape)
    return multiplied(balls, contracted(balls, broadcast(x, shape)), contracted(balls, broadcast(y, shape)))


def _div(balls: Balls, params, x: Form, y: Form) -> Form:
    """Quotients of exponentials and of their sums, by logarithms, which hardly vary if both grow at the same rate."""
    if is_point(y):
        return _mul(balls, params, x, 1 / y)
    exponent = _exponent(x)
    if exponent is not None and _exponents(balls, y) is not None:
        return _exp(balls, params, sub(balls, params, exponent, _log(balls, params, y)))
    return _mul(balls, params, x, _power(balls, -1.0, y))


def _power(balls: Balls, y: float, x: Jet) -> Jet:
    """``x^y``; by the logarithm for an exponential, and for a sum of exponentials with a power below one."""
    if _exponent(x) is not None or (y < 1 and _exponents(balls, x) is not None):
        return _exp(balls, {}, scaled(balls, _log(balls, {}, x), np.asarray(y)))
    if y == 2:
        found = composed(balls, integer_power(2), x)
        return Jet(found.lo, found.hi, ("square", x))
    return composed(balls, real_power(y), x)


def _square(balls: Balls, params, x: Jet) -> Jet:
    return _power(balls, 2.0, x)


def _integer_pow(balls: Balls, params, x: Jet) -> Jet:
    return _power(balls, float(params["y"]), x)


def _pow(balls: Balls, params, x: Form, y: Form) -> Form:
    if not is_point(y):
        logs = np.log(x) if is_point(x) else _log(balls, params, x)
        return _exp(balls, params, _mul(balls, params, y, logs))
    if np.ndim(y) == 0:
        return _power(balls, float(y), x)
    return composed(balls, real_power(y), broadcast(x, np.broadcast_shapes(x.shape, y.shape)))


def _convert(balls: Balls, params, x: Form) -> Form:
    if not isinstance(x, Jet) or not jnp.issubdtype(params["new_dtype"], jnp.floating):
        raise NotImplementedError("a value that is rounded to an integer, or a comparison as a number")
    if jnp.finfo(params["new_dtype"]).bits < jnp.finfo(x.dtype).bits:
        # Rounding is allowed for in 64 bits, here and in all that follows.
        raise NotImplementedError("a value in fewer bits")
    return x


# Kinks ----------------------------------------------------------------------------------------------------------------


def _select(balls: Balls, params, which: Form, *cases: Form) -> Form:
    """A choice by a point keeps exponents; a choice by a comparison is made as in every domain."""
    if isinstance(which, Assumed) or len(cases) != 2 or not any(isinstance(case, Jet) for case in cases):
        return select_n(balls, params, which, *cases)
    found = balls.choose(balls.truths(which)[0], *cases)
    exponents = [case.of("exp") if isinstance(case, Jet) else _nothing(case) for case in cases]
    if isinstance(which, np.ndarray) and any(map(is_point, cases)) and all(e is not None for e in exponents):
        mask = np.broadcast_to(which, found.shape)[..., None]
        return Jet(found.lo, found.hi, ("exp", balls.choose(balls.truths(mask)[0], exponents[0], exponents[1])))
    return found


def _nothing(x: Form) -> np.ndarray | None:
    """The exponents of zero."""
    return np.full((*np.shape(x), 1), -np.inf) if not np.any(x) else None


def _abs(balls: Balls, params, x: Form) -> Form:
    if x.of("exp") is not None:
        return x
    return abs_(balls, params, x)


def _sign(balls: Balls, params, x: Form) -> Form:
    least, most = x.range.lo, x.range.hi
    return balls.choose(Truth(least > 0, (least > 0) | (most < 0)), np.full(x.shape, -1.0), np.ones(x.shape))


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


def _composed(name: str) -> Rule:
    return lambda balls, params, x: composed(balls, TAYLOR[name], x)


Balls.rules.update({name: _composed(name) for name in TAYLOR})
Balls.rules.update({
    "mul": _mul, "div": _div, "pow": _pow, "integer_pow": _integer_pow, "square": _square,
    "sqrt": lambda balls, params, x: _power(balls, 0.5, x), "rsqrt": lambda balls, params, x: _power(balls, -0.5, x),
    "exp": _exp, "log": _log, "log1p": _log1p, "logaddexp": _logaddexp, "erf": _erf, "erfc": _erfc, "lgamma": _lgamma,
    "polygamma": _polygamma, "convert_element_type": _convert, "select_n": _select, "abs": _abs, "sign": _sign,
    "reduce_max": _extreme(True), "reduce_min": _extreme(False),
})  # fmt: skip
