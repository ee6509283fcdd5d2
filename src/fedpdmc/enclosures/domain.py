"""The interface of an abstract domain: the kind of enclosures that a program is evaluated on, and the rules common to all.

A `Domain` is a set of points of the input (a box, an interval of path). Values of the program on that set are *forms*:
arrays where nothing varies ("points"), else an `Enclosure`. Each domain has a table of rules, one for each primitive, from
forms to forms: if the arguments are in their enclosures, the result is in its own.

Rounding. A rule that makes a value of size at most ``m`` from others adds ``unit · m`` to its error, 64 units in the last
place. This is more than the error of the operation and of the coefficients computed here; sums of n terms add n units. So an
enclosure contains the value in real arithmetic and that of the compiled program, whatever the order of its additions.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives
from jaxtyping import Array

from fedpdmc.enclosures.primitives import known

# rule(domain, params, *forms) -> form, or a tuple of them for primitives with several results
Rule = Callable[..., Any]
Form = Any  # an array, or an Enclosure
# Rules that are the same in every domain; a rule of the domain itself comes first.
SHARED: dict[str, Rule] = {}
# The smallest number that is not rounded to zero.
TINY = 1e-290


def unit(x: Any) -> float:
    """The relative rounding of one operation: 64 units in the last place of the type of ``x``."""
    dtype = jnp.result_type(x)
    return 32 * float(jnp.finfo(dtype).eps) if jnp.issubdtype(dtype, jnp.floating) else 0.0


class Varying:
    """A value that varies over the domain."""


class Enclosure(Varying, eqx.Module):
    """What is known of a value that varies over the domain. It has a ``shape`` and, unless it is a `Truth`, a ``dtype``."""


class Interval(Enclosure):
    """All numbers from ``lo`` to ``hi``, entry by entry."""

    lo: Any
    hi: Any

    @property
    def shape(self):
        """Shape of the value."""
        return jnp.shape(self.lo)

    @property
    def dtype(self):
        """Type of the value."""
        return jnp.result_type(self.lo)

    @property
    def magnitude(self) -> Array:
        """The largest absolute value."""
        return jnp.maximum(jnp.abs(self.lo), jnp.abs(self.hi))

    def widened(self, size: Any = None) -> Interval:
        """The interval with room for the rounding of a value of this size (its own if None)."""
        room = unit(self.lo) * (self.magnitude if size is None else size) + TINY
        return Interval(self.lo - room, self.hi + room)


def is_point(x: Form) -> bool:
    """Whether nothing varies."""
    return not isinstance(x, Varying)


def is_static(x: Form) -> bool:
    """Whether its value is known while tracing."""
    return isinstance(x, (bool, int, float, np.generic, np.ndarray))


def is_zero(x: Form) -> bool:
    """Whether it is known while tracing to be zero."""
    return is_static(x) and not np.any(x)


def whole_number(x: Form) -> int | None:
    """A number known while tracing that is a small integer."""
    if not is_static(x) or np.ndim(x):
        return None
    number = float(x)
    return int(number) if number.is_integer() and abs(number) < 64 else None


def shape_of(x: Form) -> tuple[int, ...]:
    """The shape of the value."""
    return np.shape(x) if is_point(x) else x.shape


class Truth(Enclosure):
    """A comparison: its ``value`` where ``known``, undecided elsewhere. Arrays as the domain has them."""

    value: Any
    known: Any

    @property
    def shape(self):
        """Shape of the arrays."""
        return np.shape(self.value)


class Assumed(Enclosure):
    """A comparison that is ``value`` if ``witness`` is finite: a guard against infinities and NaN.

    Where the comparison decides a choice, the result becomes NaN if the witness is not finite, and no bound is made of it.
    A finite witness does not change the result.
    """

    value: bool = eqx.field(static=True)
    witness: Any

    @property
    def shape(self):
        """Shape of the value."""
        return self.witness.shape


class Rules(Protocol):
    """What applies rules of primitives to forms."""

    def rule(self, name: str, params: dict[str, Any], /, *forms: Form) -> Any:
        """The result of a primitive."""
        ...

    def fields(self, function: Callable, x: Form, /) -> Form:
        """The form with its entries moved."""
        ...


class Domain(eqx.Module):
    """A set of inputs on which a program is evaluated, and the kind of enclosures.

    Class attributes
    ----------------
    rules : dict
        The domain's own rules by the name of the primitive.
    title : str
        What errors call it.
    """

    rules: ClassVar[dict[str, Rule]]
    title: ClassVar[str]

    @classmethod
    def enter(cls, *names: str) -> Callable[[Rule], Rule]:
        """Enter a rule under these names of primitives."""

        def entered(function: Rule) -> Rule:
            cls.rules.update(dict.fromkeys(names, function))
            return function

        return entered

    @classmethod
    def knows(cls, name: str) -> bool:
        """Whether there is a rule for a primitive."""
        return name in cls.rules or name in SHARED

    def rule(self, name: str, params: dict[str, Any], *forms: Form) -> Any:
        """The result of a primitive by its rule.

        Raises
        ------
        NotImplementedError
            If there is none, or none for these arguments.
        """
        found = self.rules.get(name) or SHARED.get(name)
        if found is None:
            raise NotImplementedError(f"no rule for {name!r} {self.title}")
        return found(self, params, *forms)

    @abc.abstractmethod
    def fields(self, function: Callable, *forms: Form) -> Form:
        """A structural operation (it moves entries and may set them to zero) on every part of the forms."""

    @abc.abstractmethod
    def smooth(self, function: Any, x: Form) -> Form:
        """An entrywise function that is known by its range and its Taylor coefficients (`special_functions.Function`)."""

    @abc.abstractmethod
    def spans(self, *forms: Form) -> list[Any]:
        """The ranges of values, as `Interval` that can be compared with each other."""

    @abc.abstractmethod
    def truths(self, *forms: Form) -> list[Truth]:
        """Points, assumptions and truths as truths that can be combined with each other."""

    @abc.abstractmethod
    def choose(self, which: Truth, no: Form, yes: Form, either: Any = None) -> Form:
        """``yes`` where true, ``no`` where false, and where undecided all values of both (or those in ``either``)."""

    @abc.abstractmethod
    def poisoned(self, x: Form, witness: Form) -> Form:
        """The form itself, NaN where the witness is not finite."""

    @abc.abstractmethod
    def filled(self, x: Form, where: Any, fill: float) -> Form:
        """A number at the entries where ``where``."""

    @abc.abstractmethod
    def full(self, x: Form, like: Form) -> Form:
        """An enclosure with every part an array of the shape that ``like`` needs, as a loop carries it."""

    def still(self, function: Callable, x: Form) -> list[Form]:
        """A function of the middles of forms, which returns pairs (value, error), as constant enclosures."""
        raise NotImplementedError(f"the middle of a value {self.title}")

    def wider(self, function: Callable, x: Form) -> Form:
        """The form with an additional error: a function of the bound of its absolute values."""
        raise NotImplementedError(f"a wider value {self.title}")

    def stopped(self, x: Form, among: Form | None, axes: tuple[int, ...]) -> tuple[Form, Form] | None:
        """A value under ``stop_gradient``, split into a smooth part and a shift that may cancel; None leaves it whole.

        ``among`` are the values whose maximum over ``axes`` it is, where that is so.
        """
        return None

    def extreme(self, x: Form) -> tuple[Form, Form] | None:
        """The largest or smallest of values, split in the same way."""
        return None


def shared(*names: str) -> Callable[[Rule], Rule]:
    """Enter a rule for all domains."""

    def entered(function: Rule) -> Rule:
        SHARED.update(dict.fromkeys(names, function))
        return function

    return entered


# The operations themselves, on points.
PLAIN: dict[str, Callable] = {
    "add": jnp.add, "sub": jnp.subtract, "mul": jnp.multiply, "div": jnp.divide, "exp": jnp.exp, "log": jnp.log,
    "max": jnp.maximum, "min": jnp.minimum, "neg": jnp.negative, "abs": jnp.abs, "sign": jnp.sign,
    "ge": jnp.greater_equal, "gt": jnp.greater, "le": jnp.less_equal, "lt": jnp.less,
    "reduce_sum": lambda x, axes: jnp.sum(x, axes),
}  # fmt: skip


def applied(domain: Rules, name: str, *forms: Form, **params) -> Form:
    """A rule, or the operation itself on points."""
    return PLAIN[name](*forms, **params) if all(map(is_point, forms)) else domain.rule(name, params, *forms)


# Comparisons and logic ------------------------------------------------------------------------------------------------


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
def _eq(domain: Domain, params: Any, x: Form, y: Form) -> Form:
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
def _ne(domain: Domain, params: Any, x: Form, y: Form) -> Form:
    return _not(domain, params, _eq(domain, params, x, y))


@shared("is_finite")
def _is_finite(domain: Domain, params: Any, x: Form) -> Form:
    """Assumed to be true: where it is not, there is no bound."""
    return Assumed(True, x)


@shared("and")
def _and(domain: Domain, params: Any, x: Form, y: Form) -> Form:
    one, other = domain.truths(x, y)
    false = (one.known & ~one.value) | (other.known & ~other.value)
    return Truth(one.value & other.value & ~false, (one.known & other.known) | false)


@shared("or")
def _or(domain: Domain, params: Any, x: Form, y: Form) -> Form:
    one, other = domain.truths(x, y)
    true = (one.known & one.value) | (other.known & other.value)
    return Truth((one.value | other.value) | true, (one.known & other.known) | true)


@shared("xor")
def _xor(domain: Domain, params: Any, x: Form, y: Form) -> Form:
    one, other = domain.truths(x, y)
    return Truth(one.value ^ other.value, one.known & other.known)


@shared("not")
def _not(domain: Domain, params: Any, x: Form) -> Form:
    return Assumed(not x.value, x.witness) if isinstance(x, Assumed) else Truth(~x.value, x.known)


# Arithmetic -----------------------------------------------------------------------------------------------------------


@shared("sub")
def _sub(domain: Domain, params: Any, x: Form, y: Form) -> Form:
    return domain.rule("add", {}, x, -y if is_point(y) else domain.rule("neg", {}, y))


@shared("logaddexp")
def _logaddexp(domain: Domain, params: Any, x: Form, y: Form) -> Form:
    """``y + log(1 + e^{x−y})``: the softplus is convex and smooth, where its formula in JAX has a kink."""
    return domain.rule("add", {}, domain.rule("softplus", {}, domain.rule("sub", {}, x, y)), y)


@shared("one_minus_square")
def _one_minus_square(domain: Domain, params: Any, x: Form) -> Form:
    """The derivative of tanh by its value as of JAX 0.11."""
    return domain.rule("sub", {}, np.ones((), x.dtype), domain.rule("square", {}, x))


# Choices --------------------------------------------------------------------------------------------------------------


@shared("select_n")
def _select(domain: Domain, params: Any, which: Form, *cases: Form) -> Form:
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
def _max(domain: Domain, params: Any, x: Form, y: Form) -> Form:
    """The larger one where it is known which, else the range."""
    one, other = domain.spans(x, y)
    larger = Truth(one.lo >= other.hi, (one.lo >= other.hi) | (one.hi <= other.lo))
    return domain.choose(larger, y, x, Interval(jnp.maximum(one.lo, other.lo), jnp.maximum(one.hi, other.hi)))


@shared("min")
def _min(domain: Domain, params: Any, x: Form, y: Form) -> Form:
    one, other = domain.spans(x, y)
    smaller = Truth(one.hi <= other.lo, (one.lo >= other.hi) | (one.hi <= other.lo))
    return domain.choose(smaller, y, x, Interval(jnp.minimum(one.lo, other.lo), jnp.minimum(one.hi, other.hi)))


@shared("clamp")
def _clamp(domain: Domain, params: Any, least: Form, x: Form, most: Form) -> Form:
    return applied(domain, "min", applied(domain, "max", x, least), most)


@shared("abs")
def _abs(domain: Domain, params: Any, x: Form) -> Form:
    """The value or its negative where the sign is known."""
    (where,) = domain.spans(x)
    sign = Truth(where.lo >= 0, (where.lo >= 0) | (where.hi <= 0))
    folded = Interval(jnp.maximum(jnp.maximum(where.lo, -where.hi), 0.0), where.magnitude)
    return domain.choose(sign, domain.rule("neg", {}, x), x, folded)


@shared("reduce_or")
def _reduce_or(domain: Domain, params: Any, x: Form) -> Truth:
    (x,), axes = domain.truths(x), params["axes"]
    true = jnp.any(x.value & x.known, axes)
    return Truth(true, true | jnp.all(x.known, axes))


@shared("reduce_and")
def _reduce_and(domain: Domain, params: Any, x: Form) -> Truth:
    (x,), axes = domain.truths(x), params["axes"]
    false = jnp.any(~x.value & x.known, axes)
    return Truth(~false, false | jnp.all(x.known, axes))


# Products over axes -----------------------------------------------------------------------------------------------------


@shared("reduce_prod")
def _reduce_prod(domain: Domain, params: Any, x: Form) -> Form:
    """By halves."""
    axes = params["axes"]

    def flatten(part):
        kept = [i for i in range(part.ndim) if i not in axes]
        return jnp.transpose(part, (*kept, *axes)).reshape(*(part.shape[i] for i in kept), -1)

    flat = domain.fields(flatten, x)
    while flat.shape[-1] > 1:
        half = flat.shape[-1] // 2
        one, other, rest = (domain.fields(lambda part, at=at: part[..., at], flat) for at in (
            slice(0, half), slice(half, 2 * half), slice(2 * half, None)
        ))  # fmt: skip
        flat = domain.rule("mul", {}, one, other)
        if rest.shape[-1]:
            flat = domain.fields(lambda part, more: jnp.concatenate([part, more], -1), flat, rest)
    return domain.fields(lambda part: part[..., 0], flat)


@shared("cumprod")
def _cumprod(domain: Domain, params: Any, x: Form) -> Form:
    """Doubling: entry i times entry i − 1, then i − 2, i − 4, …."""
    axis, n = params["axis"], x.shape[params["axis"]]
    turned = (lambda part: jnp.flip(part, axis)) if params["reverse"] else (lambda part: part)
    found, step = domain.fields(turned, x), 1
    while step < n:
        late, early, head = (
            domain.fields(lambda part, ends=ends: lax.slice_in_dim(part, *ends, axis=axis), found)
            for ends in ((step, n), (0, n - step), (0, step))
        )
        tail = domain.rule("mul", {}, late, early)
        found = domain.fields(lambda one, other: jnp.concatenate([one, other], axis), head, tail)
        step *= 2
    return domain.fields(turned, found)


@shared("cumlogsumexp")
def _cumlogsumexp(domain: Domain, params: Any, x: Form) -> Form:
    """Shifted by a constant."""

    def largest(middle):
        shift = jnp.max(middle, params["axis"], keepdims=True)
        return [(shift, jnp.zeros_like(shift))]

    (shift,) = domain.still(largest, x)
    risen = domain.rule("exp", {}, domain.rule("sub", {}, x, shift))
    return domain.rule("add", {}, domain.rule("log", {}, domain.rule("cumsum", params, risen)), shift)


# Moves ----------------------------------------------------------------------------------------------------------------


@shared("scatter")
def _scatter(domain: Domain, params: Any, operand: Form, indices: Form, updates: Form) -> Form:
    """Entries replaced where constant indices say."""
    if not is_point(indices):
        raise NotImplementedError("scatter at a place that depends on the parameters")
    return domain.fields(lambda part, new: primitives.scatter_p.bind(part, indices, new, **params), operand, updates)


def move(domain: Domain, equation: Any, forms: list[Form]) -> list[Form]:
    """The results of a primitive that only moves entries, so that every part of a form moves in the same way."""
    primitive = equation.primitive
    params, fill = _split_fill(primitive.name, equation.params)
    count = known(primitive.name).moves
    data, rest = (forms, []) if count < 0 else (forms[:count], forms[count:])
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
