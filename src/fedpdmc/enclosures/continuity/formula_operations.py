"""Operations that are polynomials, choices or comparisons, as operations on formulas."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from fedpdmc.enclosures.continuity.decision_trees import (
    Surface,
    Value,
    apply,
    as_terms,
    depends,
    joined,
    key,
    leaves_of,
)
from fedpdmc.enclosures.continuity.formulas import ANY, Formulas
from fedpdmc.enclosures.continuity.normal_form import STOPPED, Atom, Terms, added, chosen, number, of_atom, scaled
from fedpdmc.enclosures.continuity.not_a_number import assumed, guarded, undefined
from fedpdmc.errors import Discontinuous


def _add(formulas: Formulas, params, where, x: Value, y: Value) -> Value:
    return apply(lambda p, q: added(as_terms(p), as_terms(q)), x, y)


def _neg(formulas: Formulas, params, where, x: Value) -> Value:
    return apply(lambda p: scaled(as_terms(p), -1.0), x)


def _sub(formulas: Formulas, params, where, x: Value, y: Value) -> Value:
    return _add(formulas, params, where, x, _neg(formulas, params, where, y))


def _mul(formulas: Formulas, params, where, x: Value, y: Value) -> Value:
    found = formulas.product(x, y)
    for one, other in ((x, y), (y, x)):
        # Arrays of data are no constants of the enclosures, so that zeros among them hide nothing.
        if isinstance(one, np.ndarray) and one.size and not np.any(one) and not formulas.knows_data:
            return guarded(formulas, found, np.asarray(np.nan), undefined(other), where)
    return found


def _div(formulas: Formulas, params, where, x: Value, y: Value) -> Value:
    def inverse(p):
        if isinstance(p, np.ndarray):
            with np.errstate(all="ignore"):
                return 1 / p
        return formulas.function("reciprocal", None, lambda v: 1 / v, p)

    return formulas.product(x, apply(inverse, y))


def _integer_pow(formulas: Formulas, params, where, x: Value) -> Value:
    n, found = params["y"], x
    if abs(n) > 8:
        return apply(lambda p: formulas.function("integer_pow", n, lambda v: np.power(v, float(n)), as_terms(p)), x)
    if n == 0:
        return np.ones(x.shape)
    for _ in range(abs(n) - 1):
        found = formulas.product(found, x)
    return found if n > 0 else _div(formulas, params, where, np.ones(x.shape), found)


def _square(formulas: Formulas, params, where, x: Value) -> Value:
    return formulas.product(x, x)


def _one_minus_square(formulas: Formulas, params, where, x: Value) -> Value:
    return _sub(formulas, params, where, np.ones(x.shape), formulas.product(x, x))


def _max(formulas: Formulas, params, where, x: Value, y: Value) -> Value:
    for one, other in ((x, y), (y, x)):
        if isinstance(one, np.ndarray) and np.all(one == -np.inf):
            return other
    return formulas.by_sign(formulas.sign(_sub(formulas, params, where, x, y), where), x, x, y)


def _min(formulas: Formulas, params, where, x: Value, y: Value) -> Value:
    for one, other in ((x, y), (y, x)):
        if isinstance(one, np.ndarray) and np.all(one == np.inf):
            return other
    return formulas.by_sign(formulas.sign(_sub(formulas, params, where, x, y), where), y, y, x)


def _clamp(formulas: Formulas, params, where, least: Value, x: Value, most: Value) -> Value:
    if depends(least) or depends(most):
        raise Discontinuous(
            "clamp", where, "limits that depend on the parameters, whose derivative JAX leaves out where they cross"
        )
    return _min(formulas, params, where, _max(formulas, params, where, x, least), most)


def _abs(formulas: Formulas, params, where, x: Value) -> Value:
    return formulas.by_sign(formulas.sign(x, where), x, x, _neg(formulas, params, where, x))


def _sign(formulas: Formulas, params, where, x: Value) -> Value:
    return guarded(formulas, formulas.sign(x, where), np.asarray(np.nan), undefined(x), where)


def _compare(plus: bool, zero: bool, minus: bool) -> Callable[..., Value]:
    answers, differ = [np.asarray(answer) for answer in (plus, zero, minus)], plus and minus

    def found(formulas: Formulas, params, where, x: Value, y: Value) -> Value:
        for one, side in ((x, 1), (y, -1)):
            if isinstance(one, np.ndarray) and one.dtype.kind == "f" and one.size and np.all(np.isinf(one)):
                # A finite number is below infinity.
                known = np.where(side * one > 0, *(np.broadcast_to(a, one.shape) for a in (answers[0], answers[2])))
                return guarded(formulas, known, ~known, undefined(x, True) | undefined(y, True), where)
        difference = _sub(formulas, params, where, _plain(x), _plain(y))
        answer = formulas.by_sign(formulas.sign(difference, where), *answers, otherwise=differ)
        # A value is compared with itself to see whether it is a number.
        itself = key(difference) == key(number(np.zeros(difference.shape)))
        return guarded(formulas, answer, np.asarray(differ), undefined(x, itself) | undefined(y, itself), where)

    return found


def _plain(x: Value) -> Value:
    """Truths as numbers."""
    return apply(lambda p: p.astype(float) if isinstance(p, np.ndarray) else p, x)


def _number(x: np.ndarray | Terms) -> np.ndarray | None:
    """A leaf as the numbers that it is, if it is so."""
    return x if isinstance(x, np.ndarray) else x.constant


def _logical(function: Callable) -> Callable[..., Value]:
    def found(formulas: Formulas, params, where, *values: Value) -> Value:
        def one(*leaves):
            if all(isinstance(leaf, np.ndarray) for leaf in leaves):
                return np.asarray(function(*leaves))
            return formulas.atom(function.__name__, None, tuple(map(as_terms, leaves)), leaves[0].shape, analytic=False)

        if any(isinstance(leaf, Terms) and leaf.depends for value in values for leaf in leaves_of(value)):
            raise Discontinuous("and", where, "bits of a value that depends on the parameters")
        return apply(one, *values)

    return found


def _select(formulas: Formulas, params, where, which: Value, *cases: Value) -> Value:
    def one(index, *leaves):
        if isinstance(index, np.ndarray):
            found = as_terms(leaves[-1])
            for i in range(len(leaves) - 2, -1, -1):
                found = chosen(np.asarray(index).astype(int) == i, as_terms(leaves[i]), found)
            if all(isinstance(leaf, np.ndarray) for leaf in leaves):
                return np.select([index.astype(int) == i for i in range(len(leaves))], leaves)
            return found
        # Data that are not known here: by their sign, which has nothing to do with the parameters.
        found = leaves[-1]
        for i in range(len(leaves) - 2, -1, -1):
            sign = formulas.sign(added(index, number(np.full(index.shape, -float(i)))), where)
            found = formulas.by_sign(sign, found, leaves[i], leaves[i])
        return found

    which = assumed(which, cases)
    if any(isinstance(leaf, Terms) and leaf.depends for leaf in leaves_of(which)):
        raise Discontinuous("select_n", where, "a choice by a number that depends on the parameters")
    return apply(one, which, *cases)


def _is_finite(formulas: Formulas, params, where, x: Value) -> Value:
    finite = apply(lambda p: np.ones(p.shape, bool) if (c := _number(p)) is None else np.asarray(np.isfinite(c)), x)
    return guarded(formulas, finite, np.asarray(False), undefined(x, True), where)


def _convert(formulas: Formulas, params, where, x: Value) -> Value:
    dtype = params["new_dtype"]

    def one(p):
        # As the program does it where a number has no value of the other type.
        constant = _number(p)
        return p if constant is None else np.asarray(jax.lax.convert_element_type(jnp.asarray(constant), dtype))

    whole = not jnp.issubdtype(dtype, jnp.floating)
    if whole and any(isinstance(leaf, Terms) and leaf.depends for leaf in leaves_of(x)):
        raise Discontinuous("convert_element_type", where, "a value that depends on the parameters as a whole number")
    if not whole and jnp.finfo(dtype).bits < 32 and depends(x):
        raise Discontinuous(
            "convert_element_type", where, f"a value that depends on the parameters in {jnp.finfo(dtype).bits} bits"
        )
    return apply(one, x)


def _stop(formulas: Formulas, params, where, x: Value) -> Value:
    if not depends(x):
        return x
    axes = tuple(None if n == 1 else i for i, n in enumerate(x.shape))
    return formulas.atom(STOPPED, ((next(formulas.numbers), where), axes), (), x.shape, analytic=False)


def _truths(formulas: Formulas, params, where, x: Value) -> Value:
    """Whether all or any are true: nothing is known of where that changes."""
    shape = tuple(n for i, n in enumerate(x.shape) if i not in params["axes"])
    if not depends(x):
        return formulas.atom("truths", str(params), tuple(map(as_terms, leaves_of(x))), shape, analytic=False)
    some = Atom("truths", next(formulas.numbers), (), shape, ANY, True, False, False)
    surface = Surface(len(formulas.surfaces), of_atom(some), where)
    formulas.surfaces[surface.terms.key] = surface
    return joined(surface, {1: np.ones(shape, bool), 0: np.zeros(shape, bool), -1: np.zeros(shape, bool)})


RULED: dict[str, Callable[..., Value]] = {
    "add": _add, "add_any": _add, "sub": _sub, "neg": _neg, "mul": _mul, "div": _div, "integer_pow": _integer_pow,
    "square": _square, "one_minus_square": _one_minus_square, "max": _max, "min": _min,
    "clamp": _clamp, "abs": _abs, "sign": _sign,
    "gt": _compare(True, False, False), "ge": _compare(True, True, False), "lt": _compare(False, False, True),
    "le": _compare(False, True, True), "eq": _compare(False, True, False), "ne": _compare(True, False, True),
    "and": _logical(np.logical_and), "or": _logical(np.logical_or), "xor": _logical(np.logical_xor),
    "not": _logical(np.logical_not), "select_n": _select, "convert_element_type": _convert, STOPPED: _stop,
    "reduce_and": _truths, "reduce_or": _truths, "is_finite": _is_finite,
}  # fmt: skip
