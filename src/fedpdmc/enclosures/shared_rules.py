"""Rules that are the same in every domain: comparisons, logic, choices between two cases, and moves of entries."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from fedpdmc.enclosures.cell_values import Interval
from fedpdmc.enclosures.domain import Assumed, Domain, Form, Rules, Truth, is_point, is_static, shape_of, shared

# The operations themselves, on points.
PLAIN: dict[str, Callable] = {
    "add": jnp.add, "sub": jnp.subtract, "mul": jnp.multiply, "div": jnp.divide, "exp": jnp.exp, "log": jnp.log,
    "neg": jnp.negative, "abs": jnp.abs, "sign": jnp.sign, "sqrt": jnp.sqrt, "ge": jnp.greater_equal, "gt": jnp.greater,
    "le": jnp.less_equal, "lt": jnp.less, "reduce_sum": lambda x, axes: jnp.sum(x, axes),
}  # fmt: skip


def applied(domain: Rules, name: str, *forms: Form, **params) -> Form:
    """A rule, or the operation itself on points."""
    return PLAIN[name](*forms, **params) if all(map(is_point, forms)) else domain.rule(name, params, *forms)


# Comparisons ----------------------------------------------------------------------------------------------------------


def _compare(name: str, surely: Callable, never: Callable) -> None:
    @shared(name)
    def found(domain: Domain, params: Any, x: Form, y: Form) -> Truth:
        one, other = domain.spans(x, y)
        yes = surely(one, other)
        return Truth(yes, yes | never(one, other))


_compare("lt", lambda x, y: x.hi < y.lo, lambda x, y: x.lo >= y.hi)
_compare("le", lambda x, y: x.hi <= y.lo, lambda x, y: x.lo > y.hi)
_compare("gt", lambda x, y: x.lo > y.hi, lambda x, y: x.hi <= y.lo)
_compare("ge", lambda x, y: x.lo >= y.hi, lambda x, y: x.hi < y.lo)


@shared("eq")
def eq(domain: Domain, params: Any, x: Form, y: Form) -> Form:
    """Equal only where both are one and the same point; a value equals itself."""
    if any(isinstance(form, (Truth, Assumed)) for form in (x, y)):
        one, other = domain.truths(x, y)
        return Truth(one.value == other.value, one.known & other.known)
    if x is y:
        return Assumed(True, x)
    if is_static(y) and np.ndim(y) == 0 and np.isinf(y):
        return Assumed(False, x)
    one, other = domain.spans(x, y)
    apart = (one.hi < other.lo) | (one.lo > other.hi)
    same = (one.lo == one.hi) & (other.lo == other.hi) & (one.lo == other.lo)
    return Truth(same, same | apart)


@shared("ne")
def ne(domain: Domain, params: Any, x: Form, y: Form) -> Form:
    """Not `eq`."""
    return not_(domain, params, eq(domain, params, x, y))


@shared("is_finite")
def is_finite(domain: Domain, params: Any, x: Form) -> Form:
    """Assumed to be true: where it is not, there is no bound."""
    return Assumed(True, x)


@shared("and")
def and_(domain: Domain, params: Any, x: Form, y: Form) -> Form:
    """Conjunction of truths."""
    one, other = domain.truths(x, y)
    false = (one.known & ~one.value) | (other.known & ~other.value)
    return Truth(one.value & other.value & ~false, (one.known & other.known) | false)


@shared("or")
def or_(domain: Domain, params: Any, x: Form, y: Form) -> Form:
    """Disjunction of truths."""
    one, other = domain.truths(x, y)
    true = (one.known & one.value) | (other.known & other.value)
    return Truth((one.value | other.value) | true, (one.known & other.known) | true)


@shared("xor")
def xor(domain: Domain, params: Any, x: Form, y: Form) -> Form:
    """Exclusive disjunction of truths."""
    one, other = domain.truths(x, y)
    return Truth(one.value ^ other.value, one.known & other.known)


@shared("not")
def not_(domain: Domain, params: Any, x: Form) -> Form:
    """Negation of a truth."""
    return Assumed(not x.value, x.witness) if isinstance(x, Assumed) else Truth(~x.value, x.known)


# Arithmetic -----------------------------------------------------------------------------------------------------------


@shared("sub")
def sub(domain: Domain, params: Any, x: Form, y: Form) -> Form:
    """``x − y``."""
    return domain.rule("add", {}, x, -y if is_point(y) else domain.rule("neg", {}, y))


@shared("logaddexp")
def logaddexp(domain: Domain, params: Any, x: Form, y: Form) -> Form:
    """``y + log(1 + e^{x−y})``: the softplus is convex and smooth, where its formula in JAX has a kink."""
    return domain.rule("add", {}, domain.rule("softplus", {}, domain.rule("sub", {}, x, y)), y)


@shared("one_minus_square")
def one_minus_square(domain: Domain, params: Any, x: Form) -> Form:
    """``1 − x²``, the derivative of tanh by its value as of JAX 0.11."""
    return domain.rule("sub", {}, np.ones((), x.dtype), domain.rule("square", {}, x))


# Choices --------------------------------------------------------------------------------------------------------------


@shared("select_n")
def select_n(domain: Domain, params: Any, which: Form, *cases: Form) -> Form:
    """The case that a point or a decided comparison selects; all cases if it is undecided."""
    if isinstance(which, Assumed):
        return domain.poisoned(cases[which.value], which.witness)
    if any(map(_is_logical, cases)):
        if len(cases) != 2:
            raise NotImplementedError("a choice between more than two comparisons")
        return _truth_of_two(*domain.truths(which, *cases))
    if is_point(which):
        return picked_case(domain, which, cases)
    if isinstance(which, Truth) and len(cases) == 2:
        return domain.choose(which, *cases)
    undecided = Truth(np.zeros((), bool), np.zeros((), bool))
    return functools.reduce(functools.partial(domain.choose, *domain.truths(undecided)), cases)


def _is_logical(x: Form) -> bool:
    return isinstance(x, (Truth, Assumed)) or (is_point(x) and jnp.issubdtype(jnp.result_type(x), jnp.bool_))


def _truth_of_two(which: Truth, no: Truth, yes: Truth) -> Truth:
    same = (no.value == yes.value) & no.known & yes.known
    value = jnp.where(which.value, yes.value, no.value)
    return Truth(value, jnp.where(which.known, jnp.where(which.value, yes.known, no.known), same))


def picked_case(domain: Domain, which: Any, cases: tuple[Form, ...]) -> Form:
    """The case that a point selects."""
    if all(is_point(case) for case in cases):
        return lax.select_n(jnp.asarray(which), *cases)
    if any(isinstance(case, (Truth, Assumed)) for case in cases):
        # Of a branch, whose index is one number: comparisons that a gradient keeps.
        truths = domain.truths(*cases)
        shape = np.broadcast_shapes(*(jnp.shape(case.value) for case in truths))
        parts = zip(*((case.value, case.known) for case in truths), strict=True)
        return Truth(*(lax.select_n(jnp.asarray(which), *(jnp.broadcast_to(x, shape) for x in part)) for part in parts))
    shape = next(case.shape for case in cases if not is_point(case))
    wide = [jnp.broadcast_to(case, shape) if is_point(case) else case for case in cases]
    return domain.fields(lambda *parts: lax.select_n(jnp.asarray(which), *parts), *wide)


@shared("max")
def max_(domain: Domain, params: Any, x: Form, y: Form) -> Form:
    """The larger one where it is known which, else the range."""
    one, other = domain.spans(x, y)
    larger = Truth(one.lo >= other.hi, (one.lo >= other.hi) | (one.hi <= other.lo))
    either = Interval(jnp.maximum(one.lo, other.lo), jnp.maximum(one.hi, other.hi))
    return domain.choose(larger, y, x, either)


@shared("min")
def min_(domain: Domain, params: Any, x: Form, y: Form) -> Form:
    """The smaller one where it is known which, else the range."""
    one, other = domain.spans(x, y)
    smaller = Truth(one.hi <= other.lo, (one.lo >= other.hi) | (one.hi <= other.lo))
    either = Interval(jnp.minimum(one.lo, other.lo), jnp.minimum(one.hi, other.hi))
    return domain.choose(smaller, y, x, either)


@shared("clamp")
def clamp(domain: Domain, params: Any, least: Form, x: Form, most: Form) -> Form:
    """``min(max(x, least), most)``."""
    above = jnp.maximum(x, least) if is_point(x) and is_point(least) else domain.rule("max", {}, x, least)
    return jnp.minimum(above, most) if is_point(above) and is_point(most) else domain.rule("min", {}, above, most)


@shared("abs")
def abs_(domain: Domain, params: Any, x: Form) -> Form:
    """``|x|``: x or −x where the sign is known."""
    (where,) = domain.spans(x)
    sign = Truth(where.lo >= 0, (where.lo >= 0) | (where.hi <= 0))
    folded = Interval(jnp.maximum(jnp.maximum(where.lo, -where.hi), 0.0), where.magnitude)
    return domain.choose(sign, domain.rule("neg", {}, x), x, folded)


# Moves ----------------------------------------------------------------------------------------------------------------

# Primitives that only move entries, so that every part of a form moves in the same way: how many leading arguments are data
# (None: all); the others are indices, which must be points.
MOVES: dict[str, int | None] = {
    "broadcast_in_dim": 1, "reshape": 1, "squeeze": 1, "transpose": 1, "rev": 1, "copy": 1, "copy_p": 1, "slice": 1,
    "tile": 1,
    "concatenate": None, "stack": None, "unstack": 1, "split": 1, "pad": 2, "gather": 1, "dynamic_slice": 1,
    "dynamic_update_slice": 2, "optimization_barrier": None,
}  # fmt: skip


def move(domain: Domain, equation: Any, forms: list[Form]) -> list[Form]:
    """The results of a primitive that moves entries."""
    primitive = equation.primitive
    params, fill = _split_fill(primitive.name, equation.params)
    count = MOVES[primitive.name]
    data, rest = (forms, []) if count is None else (forms[:count], forms[count:])
    if not all(is_point(form) for form in rest):
        raise NotImplementedError("at a place that depends on the parameters")
    data = [domain.truths(form)[0] if isinstance(form, Assumed) else form for form in data]
    if fill is not None:
        if isinstance(data[0], Truth):
            raise NotImplementedError("a comparison with a fill value")
        found = domain.fields(lambda part: primitive.bind(part, *rest, **params), data[0])
        gone = primitive.bind(jnp.zeros(shape_of(data[0])), *rest, **{**params, "fill_value": 1.0}) > 0
        return [domain.filled(found, gone, fill)]
    if not primitive.multiple_results:
        return [domain.fields(lambda *parts: primitive.bind(*parts, *rest, **params), *data)]
    return [
        domain.fields(lambda *parts, i=i: primitive.bind(*parts, *rest, **params)[i], *data)
        for i in range(len(equation.outvars))
    ]


def _split_fill(name: str, params: dict[str, Any]) -> tuple[dict[str, Any], float | None]:
    """The parameters of a move that fills with zero, as every part of a form requires, and the number to put there instead.

    The number is None if none is needed: nothing is filled, or it is filled with zero, or with NaN (the default), which
    every part of a form keeps.
    """
    fill = params.get("fill_value") if name == "gather" else None
    if fill is None or params["mode"] != lax.GatherScatterMode.FILL_OR_DROP or fill == 0 or np.isnan(fill):
        return params, None
    return {**params, "fill_value": 0.0}, float(fill)
