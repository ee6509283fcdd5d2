"""Shifts that cancel: the largest entry, which a stable log-sum-exp subtracts first and adds back last.

A value under ``stop_gradient`` may be a maximum with kinks, whose enclosure is loose. In ``M + log Σ exp(x − M)`` and in the
softmax ``exp(x − M)/Σ exp(x − M)`` it cancels. It is therefore kept as a symbol: values carry ``γ M`` as a term, or
``e^{γ M}`` as a factor, until it cancels or an operation needs the number.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from fedpdmc.enclosures.domain import Assumed, Domain, Enclosure, Form, is_point, is_zero, shape_of
from fedpdmc.enclosures.shared_rules import applied

_SYMBOLS = itertools.count()


class Shifted(Enclosure):
    """``form + count · shift``, or ``form · exp(count · shift)`` if ``factor``; the shift is a single number if possible."""

    form: Any
    shift: Any
    count: int = eqx.field(static=True)
    factor: bool = eqx.field(static=True)
    symbol: int = eqx.field(static=True)

    @property
    def shape(self):
        """Shape of the value."""
        return jnp.shape(self.form) if is_point(self.form) else self.form.shape

    @property
    def dtype(self):
        """Type of the value."""
        return jnp.result_type(self.form) if is_point(self.form) else self.form.dtype

    def like(self, domain: Domain, form: Form, count: int | None = None, shift: Form | None = None) -> Form:
        """The same shift on another form, in an array with as many axes; no shift if it cancels."""
        count, moved = self.count if count is None else count, self.shift if shift is None else shift
        if count == 0:
            return form
        more = len(shape_of(form)) - len(moved.shape)
        if more > 0:
            wide = (*(1,) * more, *moved.shape)
            moved = _moved(domain, lambda part: jnp.reshape(part, wide), moved)
        return Shifted(form, moved, count, self.factor, self.symbol)

    def same(self, other: Form) -> bool:
        """Whether the other carries the same symbol in the same way."""
        return isinstance(other, Shifted) and self.symbol == other.symbol and self.factor == other.factor


def shifted(form: Form, shift: Form) -> Shifted:
    """A value as a smooth part and a symbol of its own (`Domain.stopped`, `Domain.extreme`)."""
    return Shifted(form, shift, 1, False, next(_SYMBOLS))


def settled(domain: Domain, x: Form) -> Form:
    """The form with its shift added or multiplied."""
    if not isinstance(x, Shifted):
        return x
    times = applied(domain, "mul", x.shift, np.asarray(float(x.count), x.dtype))
    return (
        applied(domain, "mul", x.form, applied(domain, "exp", times))
        if x.factor
        else applied(domain, "add", x.form, times)
    )


def _moved(domain: Domain, move: Callable, x: Form) -> Form:
    """The form with its entries moved."""
    return move(x) if is_point(x) else domain.fields(move, x)


def shifted_rule(domain: Domain, name: str, params: dict[str, Any], forms: list[Form]) -> Form | None:
    """The result of an operation that can propagate a shift; None if it needs the numbers."""
    rule = CARRIED.get(name)
    return None if rule is None else rule(domain, params, *forms)


def _add(sign: int):
    def found(domain: Domain, params, x: Form, y: Form) -> Form | None:
        if sign < 0:
            y = _neg(domain, params, y) if isinstance(y, Shifted) else applied(domain, "neg", y)
        if not isinstance(x, Shifted):
            x, y = y, x
        if x.factor:
            return _add_factors(domain, x, y)
        if not isinstance(y, Shifted):
            return x.like(domain, applied(domain, "add", x.form, y))
        return x.like(domain, applied(domain, "add", x.form, y.form), x.count + y.count) if x.same(y) else None

    return found


def _add_factors(domain: Domain, x: Shifted, y: Form) -> Form | None:
    if x.same(y) and x.count == y.count:
        return x.like(domain, applied(domain, "add", x.form, y.form))
    return x if is_zero(y) else None


def _neg(domain: Domain, params, x: Shifted) -> Form:
    return x.like(domain, applied(domain, "neg", x.form), x.count if x.factor else -x.count)


def _mul(domain: Domain, params, x: Form, y: Form) -> Form | None:
    if not isinstance(x, Shifted):
        x, y = y, x
    if is_zero(y):
        return np.zeros(np.broadcast_shapes(x.shape, np.shape(y)), x.dtype)
    if not x.factor or (isinstance(y, Shifted) and not x.same(y)):
        return None
    if isinstance(y, Shifted):
        return x.like(domain, applied(domain, "mul", x.form, y.form), x.count + y.count)
    return x.like(domain, applied(domain, "mul", x.form, y))


def _div(domain: Domain, params, x: Form, y: Form) -> Form | None:
    if isinstance(x, Shifted) and isinstance(y, Shifted):
        if not x.factor or not x.same(y):
            return None
        return x.like(domain, applied(domain, "div", x.form, y.form), x.count - y.count)
    if isinstance(x, Shifted):
        return x.like(domain, applied(domain, "div", x.form, y)) if x.factor else None
    return y.like(domain, applied(domain, "div", x, y.form), -y.count) if y.factor else None


def _exp(domain: Domain, params, x: Shifted) -> Form | None:
    return None if x.factor else Shifted(applied(domain, "exp", x.form), x.shift, x.count, True, x.symbol)


def _log(domain: Domain, params, x: Shifted) -> Form | None:
    return Shifted(applied(domain, "log", x.form), x.shift, x.count, False, x.symbol) if x.factor else None


def _abs(domain: Domain, params, x: Shifted) -> Form | None:
    return x.like(domain, applied(domain, "abs", x.form)) if x.factor else None


def _sign(domain: Domain, params, x: Shifted) -> Form | None:
    return applied(domain, "sign", x.form) if x.factor else None


def _compare(name: str):
    def found(domain: Domain, params, x: Form, y: Form) -> Form | None:
        """A positive factor does not change signs."""
        return applied(domain, name, x.form, y) if isinstance(x, Shifted) and x.factor and is_zero(y) else None

    return found


def _reduce_sum(domain: Domain, params, x: Shifted) -> Form | None:
    axes = params["axes"]
    if not x.factor or any(x.shift.shape[axis] != 1 for axis in axes):
        return None
    kept = tuple(n for axis, n in enumerate(x.shift.shape) if axis not in axes)
    shift = _moved(domain, lambda part: part.reshape(kept), x.shift)
    return x.like(domain, applied(domain, "reduce_sum", x.form, axes=axes), None, shift)


def _broadcast(domain: Domain, params, x: Shifted) -> Form:
    shape, places = params["shape"], params["broadcast_dimensions"]
    narrow = [1] * len(shape)
    for axis, place in enumerate(places):
        narrow[place] = x.shift.shape[axis]
    wide = [1] * len(shape)
    for axis, place in enumerate(places):
        wide[place] = x.shape[axis]
    form = _moved(domain, lambda part: jnp.broadcast_to(jnp.reshape(part, wide), shape), x.form)
    return x.like(domain, form, None, _moved(domain, lambda part: jnp.reshape(part, narrow), x.shift))


def _squeeze(domain: Domain, params, x: Shifted) -> Form:
    def squeezed(part):
        return jnp.squeeze(part, params["dimensions"])

    return x.like(domain, _moved(domain, squeezed, x.form), None, _moved(domain, squeezed, x.shift))


def _reshape(domain: Domain, params, x: Shifted) -> Form | None:
    """A reshape that only adds or removes axes of length one."""
    new = params["new_sizes"]
    if [n for n in new if n != 1] != [n for n in x.shape if n != 1] or x.shift.shape != x.shape:
        return None

    def reshaped(part):
        return jnp.reshape(part, new)

    return x.like(domain, _moved(domain, reshaped, x.form), None, _moved(domain, reshaped, x.shift))


def _larger(domain: Domain, params, x: Form, y: Form) -> Form | None:
    """The maximum with minus infinity is the other operand; None for any other maximum."""
    for one, other in ((x, y), (y, x)):
        if isinstance(other, (float, np.generic, np.ndarray)) and np.all(other == -np.inf):
            return one
    return None


def _select(domain: Domain, params, which: Form, *cases: Form) -> Form | None:
    if isinstance(which, Assumed):
        chosen = cases[which.value]
        form = chosen.form if isinstance(chosen, Shifted) else chosen
        form = applied(domain, "select_n", which, *(form,) * len(cases))
        return chosen.like(domain, form) if isinstance(chosen, Shifted) else form
    if isinstance(which, Shifted):
        return None
    carrier = next(case for case in cases if isinstance(case, Shifted))
    alike = [carrier.same(case) and case.count == carrier.count or (carrier.factor and is_zero(case)) for case in cases]
    if not all(alike):
        return None
    forms = [case.form if isinstance(case, Shifted) else np.broadcast_to(case, carrier.shape) for case in cases]
    if is_point(which) and all(is_point(form) for form in forms):
        return None
    return carrier.like(domain, applied(domain, "select_n", which, *forms))


CARRIED: dict[str, Callable[..., Form | None]] = {
    "add": _add(1), "add_any": _add(1), "sub": _add(-1), "neg": _neg, "mul": _mul, "div": _div, "exp": _exp,
    "log": _log, "abs": _abs, "sign": _sign, "ge": _compare("ge"), "gt": _compare("gt"), "le": _compare("le"),
    "lt": _compare("lt"), "reduce_sum": _reduce_sum, "broadcast_in_dim": _broadcast, "squeeze": _squeeze,
    "reshape": _reshape, "copy": lambda domain, params, x: x, "max": _larger, "select_n": _select,
}  # fmt: skip
