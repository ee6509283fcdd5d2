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
from fedpdmc.enclosures.continuity.formulas import ANY, TOO_MANY, Formulas
from fedpdmc.enclosures.continuity.jump_surfaces import CANCELLED
from fedpdmc.enclosures.continuity.normal_form import (
    NOISE,
    STOPPED,
    Atom,
    Terms,
    added,
    chosen,
    equal,
    number,
    of_atom,
    scaled,
)
from fedpdmc.enclosures.continuity.not_a_number import assumed, by_data, guarded, is_wild, may_cancel, undefined, wild
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
            return guarded(formulas, found, np.asarray(np.nan), undefined(other) | formulas.lost, where)
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


def _check_noise(name: str, where: str, *leaves: np.ndarray | Terms) -> None:
    """Refuse the sign of a number that is nothing but the rounding of what has cancelled."""
    if any(isinstance(leaf, Terms) and leaf.noisy for leaf in leaves):
        difference = (
            as_terms(leaves[0]) if len(leaves) == 1 else added(as_terms(leaves[0]), scaled(as_terms(leaves[1]), -1.0))
        )
        if (constant := difference.constant) is not None and np.any(np.abs(constant) < NOISE):
            raise Discontinuous(name, where, CANCELLED)
    elif len(leaves) == 2 and depends(leaves[0]) and np.any(equal(as_terms(leaves[0]), as_terms(leaves[1]))):
        # Equal but for rounding.
        raise Discontinuous(name, where, CANCELLED)


def _sign(formulas: Formulas, params, where, x: Value) -> Value:
    for leaf in leaves_of(x):
        _check_noise("sign", where, leaf)
    return guarded(formulas, formulas.sign(x, where), np.asarray(np.nan), undefined(x) | formulas.lost, where)


def _compare(plus: bool, zero: bool, minus: bool) -> Callable[..., Value]:
    answers, differ = [np.asarray(answer) for answer in (plus, zero, minus)], plus and minus

    def found(formulas: Formulas, params, where, x: Value, y: Value) -> Value:
        x, y = _plain(x), _plain(y)
        if not formulas.alike:
            apply(lambda p, q: _check_noise("gt", where, p, q) or np.zeros(p.shape), x, y)
        order = formulas.held(apply(lambda p, q: _order(formulas, where, as_terms(p), as_terms(q)), x, y), where)
        if any(isinstance(leaf, Terms) for leaf in leaves_of(order)):
            raise Discontinuous("gt", where, TOO_MANY)
        answer = formulas.by_sign(order, *answers, otherwise=differ)
        apply(lambda p, q: _check_rounding(where, p, q), x, y)
        # A value is compared with itself to see whether it is a number, and with infinity.
        itself = key(_sub(formulas, params, where, x, y)) == key(number(np.zeros(x.shape)))
        leaves = [as_terms(leaf) for w in (x, y) for leaf in leaves_of(w)]
        infinite = any(np.any(~np.isfinite(leaf.split()[1])) for leaf in leaves)
        asked = infinite or (itself and any(map(may_cancel, leaves)))
        atoms = undefined(x, asked) | undefined(y, asked) | formulas.lost
        otherwise = apply(lambda a: np.asarray(~a), answer) if asked or itself else np.asarray(differ)
        found = guarded(formulas, answer, otherwise, atoms, where, "number" if asked or itself else "compared")
        unsure = wild(x, y) | frozenset(filter(is_wild, formulas.lost))
        if unsure and formulas.knows_less and (depends(x) or depends(y)) and not formulas.trusted:
            raise Discontinuous("gt", where, "a comparison with data that may not be finite")
        if not unsure and not itself and not (depends(x) or depends(y)):
            # Of data that differ by a number, rounding may leave nothing.
            unsure = frozenset(atom for w in leaves for atom in w.atoms if _differ_by_a_number(x, y))
        return by_data(formulas, found, otherwise, unsure)

    return found


def _check_rounding(where: str, p: np.ndarray | Terms, q: np.ndarray | Terms) -> np.ndarray:
    """Refuse a comparison of values of which rounding leaves nothing."""
    if isinstance(p, Terms) or isinstance(q, Terms):
        difference = added(as_terms(p), scaled(as_terms(q), -1.0))
        if difference.decided_by_rounding:
            raise Discontinuous("gt", where, "a comparison that rounding decides")
    return np.zeros(p.shape)


def _differ_by_a_number(x: Value, y: Value) -> bool:
    pairs = [(as_terms(p), as_terms(q)) for p in leaves_of(x) for q in leaves_of(y)]
    return any(added(p, scaled(q, -1.0)).constant is not None for p, q in pairs if p.atoms)


def _order(formulas: Formulas, where: str, p: Terms, q: Terms) -> Value:
    """The sign of ``p - q``: a finite number is below infinity, and infinity is equal to itself."""
    a, b = (np.broadcast_to(w.split()[1].astype(float), p.shape) for w in (p, q))
    known = np.where(a > b, 1.0, np.where(a < b, -1.0, np.where(a == b, 0.0, np.nan)))
    wild = ~(np.isfinite(a) & np.isfinite(b))
    if (p.constant is not None and q.constant is not None) or (np.all(wild) and wild.size):
        return known
    difference = added(p, scaled(q, -1.0))
    if not np.any(wild):
        return formulas.sign(difference, where)
    finite = chosen(wild, number(np.zeros(p.shape)), difference)
    return apply(lambda sign: np.where(wild, known, sign), formulas.sign(finite, where))


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
            return formulas.atom(function.__name__, None, tuple(map(as_terms, leaves)), leaves[0].shape)

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

    if any(isinstance(leaf, Terms) and leaf.depends for leaf in leaves_of(which)):
        raise Discontinuous("select_n", where, "a choice by a number that depends on the parameters")
    return assumed(apply(one, which, *cases), which, cases)


def _is_finite(formulas: Formulas, params, where, x: Value) -> Value:
    def one(p):
        coefficients = (np.broadcast_to(c, p.shape) for c in as_terms(p).terms.values())
        return np.asarray(np.all([np.isfinite(c) for c in (np.zeros(p.shape), *coefficients)], axis=0))

    found = guarded(formulas, apply(one, x), np.asarray(False), undefined(x, True) | formulas.lost, where)
    return by_data(formulas, found, np.asarray(False), wild(x) | frozenset(filter(is_wild, formulas.lost)))


def _convert(formulas: Formulas, params, where, x: Value) -> Value:
    dtype, old = np.dtype(params["new_dtype"]), np.dtype(params["old_dtype"])
    whole = not jnp.issubdtype(dtype, jnp.floating)
    # Whether every number of the one type is a number of the other.
    exact = np.can_cast(old, dtype)

    def evaluate(value):
        return jax.lax.convert_element_type(jnp.asarray(value, old), dtype)

    def one(p):
        # As the program does it where a number has no value of the other type.
        if (constant := _number(p)) is not None:
            return np.asarray(evaluate(constant))
        if exact:
            return p
        if whole:
            return formulas.atom("whole convert_element_type", str(dtype), (p,), p.shape)
        return formulas.function("convert_element_type", str(dtype), evaluate, p)

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
    return formulas.atom(STOPPED, ((next(formulas.numbers), where), axes), (), x.shape)


def _truths(formulas: Formulas, params, where, x: Value) -> Value:
    """Whether all or any are true: nothing is known of where that changes."""
    shape = tuple(n for i, n in enumerate(x.shape) if i not in params["axes"])
    if not depends(x):
        return formulas.atom("truths", (str(params), key(x)), (), shape)
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
