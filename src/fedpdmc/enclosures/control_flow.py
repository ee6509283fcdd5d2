"""Branches, loops, linear solves and factorisations within a program that is evaluated on enclosures."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedpdmc._jax.programs import scan_lengths
from fedpdmc.enclosures.domain import (
    Assumed,
    Domain,
    Enclosure,
    Form,
    Rules,
    applied,
    is_point,
    is_zero,
    picked_case,
    shape_of,
)

# Shifts that cancel ----------------------------------------------------------------------------------------------------


# Shifts that cancel: the largest entry, which a stable log-sum-exp subtracts first and adds back last.
#
# A value under ``stop_gradient`` may be a maximum with kinks, whose enclosure is loose. In ``M + log Σ exp(x − M)`` and in
# the softmax ``exp(x − M)/Σ exp(x − M)`` it cancels. It is therefore kept as a symbol: values carry ``γ M`` as a term, or
# ``e^{γ M}`` as a factor, until it cancels or an operation needs the number.

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

    def like(self, domain: Rules, form: Form, count: int | None = None, shift: Form | None = None) -> Form:
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


def settle(domain: Rules, x: Form) -> Form:
    """The form with its shift added or multiplied."""
    if not isinstance(x, Shifted):
        return x
    times = applied(domain, "mul", x.shift, np.asarray(float(x.count), x.dtype))
    return (
        applied(domain, "mul", x.form, applied(domain, "exp", times))
        if x.factor
        else applied(domain, "add", x.form, times)
    )


def _moved(domain: Rules, move: Callable, x: Form) -> Form:
    return move(x) if is_point(x) else domain.fields(move, x)


def shifted_rule(domain: Rules, name: str, params: dict[str, Any], forms: list[Form]) -> Form | None:
    """The result of an operation that can propagate a shift; None if it needs the numbers."""
    rule = CARRIED.get(name)
    return None if rule is None else rule(domain, params, *forms)


def _add(sign: int):
    def found(domain: Rules, params, x: Form, y: Form) -> Form | None:
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


def _add_factors(domain: Rules, x: Shifted, y: Form) -> Form | None:
    if x.same(y) and x.count == y.count:
        return x.like(domain, applied(domain, "add", x.form, y.form))
    return x if is_zero(y) else None


def _neg(domain: Rules, params, x: Shifted) -> Form:
    return x.like(domain, applied(domain, "neg", x.form), x.count if x.factor else -x.count)


def _mul(domain: Rules, params, x: Form, y: Form) -> Form | None:
    if not isinstance(x, Shifted):
        x, y = y, x
    if is_zero(y):
        return np.zeros(np.broadcast_shapes(x.shape, np.shape(y)), x.dtype)
    if not x.factor or (isinstance(y, Shifted) and not x.same(y)):
        return None
    if isinstance(y, Shifted):
        return x.like(domain, applied(domain, "mul", x.form, y.form), x.count + y.count)
    return x.like(domain, applied(domain, "mul", x.form, y))


def _div(domain: Rules, params, x: Form, y: Form) -> Form | None:
    if isinstance(x, Shifted) and isinstance(y, Shifted):
        if not x.factor or not x.same(y):
            return None
        return x.like(domain, applied(domain, "div", x.form, y.form), x.count - y.count)
    if isinstance(x, Shifted):
        return x.like(domain, applied(domain, "div", x.form, y)) if x.factor else None
    return y.like(domain, applied(domain, "div", x, y.form), -y.count) if y.factor else None


def _exp(domain: Rules, params, x: Shifted) -> Form | None:
    return None if x.factor else Shifted(applied(domain, "exp", x.form), x.shift, x.count, True, x.symbol)


def _log(domain: Rules, params, x: Shifted) -> Form | None:
    return Shifted(applied(domain, "log", x.form), x.shift, x.count, False, x.symbol) if x.factor else None


def _abs(domain: Rules, params, x: Shifted) -> Form | None:
    return x.like(domain, applied(domain, "abs", x.form)) if x.factor else None


def _sign(domain: Rules, params, x: Shifted) -> Form | None:
    return applied(domain, "sign", x.form) if x.factor else None


def _compare(name: str):
    def found(domain: Rules, params, x: Form, y: Form) -> Form | None:
        """A positive factor does not change signs."""
        return applied(domain, name, x.form, y) if isinstance(x, Shifted) and x.factor and is_zero(y) else None

    return found


def _reduce_sum(domain: Rules, params, x: Shifted) -> Form | None:
    axes = params["axes"]
    if not x.factor or any(x.shift.shape[axis] != 1 for axis in axes):
        return None
    kept = tuple(n for axis, n in enumerate(x.shift.shape) if axis not in axes)
    shift = _moved(domain, lambda part: part.reshape(kept), x.shift)
    return x.like(domain, applied(domain, "reduce_sum", x.form, axes=axes), None, shift)


def _broadcast(domain: Rules, params, x: Shifted) -> Form:
    shape, places = params["shape"], params["broadcast_dimensions"]
    narrow = [1] * len(shape)
    for axis, place in enumerate(places):
        narrow[place] = x.shift.shape[axis]
    wide = [1] * len(shape)
    for axis, place in enumerate(places):
        wide[place] = x.shape[axis]
    form = _moved(domain, lambda part: jnp.broadcast_to(jnp.reshape(part, wide), shape), x.form)
    return x.like(domain, form, None, _moved(domain, lambda part: jnp.reshape(part, narrow), x.shift))


def _squeeze(domain: Rules, params, x: Shifted) -> Form:
    def squeezed(part):
        return jnp.squeeze(part, params["dimensions"])

    return x.like(domain, _moved(domain, squeezed, x.form), None, _moved(domain, squeezed, x.shift))


def _reshape(domain: Rules, params, x: Shifted) -> Form | None:
    """A reshape that only adds or removes axes of length one."""
    new = params["new_sizes"]
    if [n for n in new if n != 1] != [n for n in x.shape if n != 1] or x.shift.shape != x.shape:
        return None

    def reshaped(part):
        return jnp.reshape(part, new)

    return x.like(domain, _moved(domain, reshaped, x.form), None, _moved(domain, reshaped, x.shift))


def _larger(domain: Rules, params, x: Form, y: Form) -> Form | None:
    """The maximum with minus infinity is the other operand; None for any other maximum."""
    for one, other in ((x, y), (y, x)):
        if isinstance(other, (float, np.generic, np.ndarray)) and np.all(other == -np.inf):
            return one
    return None


def _select(domain: Rules, params, which: Form, *cases: Form) -> Form | None:
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


# Evaluates a program on a domain: the interpreter's `run`.
Run = Callable[..., list[Form]]


def _cond(domain: Domain, run: Run, equation, forms) -> list[Form]:
    """Branches: the index must be a point."""
    index, *operands = forms
    if not is_point(index):
        raise NotImplementedError("its condition depends on the parameters")
    branches = equation.params["branches"]
    outs = [
        [settle(domain, form) for form in run(domain, branch.jaxpr, branch.consts, operands)] for branch in branches
    ]
    return [picked_case(domain, index, cases) for cases in zip(*outs, strict=True)]


def _scan(domain: Domain, run: Run, equation, forms) -> list[Form]:
    """A loop of fixed length: carried values that may vary are enclosures with every part an array."""
    params = equation.params
    n_consts, n_carry = scan_lengths(params)
    consts, carry, xs = forms[:n_consts], list(forms[n_consts : n_consts + n_carry]), forms[n_consts + n_carry :]
    inner, length, reverse = params["jaxpr"], params["length"], params["reverse"]

    def body(carry, x):
        out = [settle(domain, form) for form in run(domain, inner.jaxpr, inner.consts, [*consts, *carry, *x])]
        return out[:n_carry], out[n_carry:]

    if length == 0:
        return [
            *carry,
            *(np.zeros(variable.aval.shape, variable.aval.dtype) for variable in equation.outvars[n_carry:]),
        ]
    first = [_entry(domain, x, 0) for x in xs]
    # A carried zero hides what it is multiplied with: the loop is then traced once more with the value after the first step.
    hidden, probe = any(is_point(form) and is_zero(form) for form in carry), carry
    for _ in range(len(carry) + 2):
        after = body(probe, first)[0]
        varies = [is_point(old) and not is_point(new) for old, new in zip(carry, after, strict=True)]
        carry = [
            domain.full(old, new) if varied or not is_point(old) else old
            for old, new, varied in zip(carry, after, varies, strict=True)
        ]
        if not any(varies) and not hidden:
            break
        hidden = False
        probe = [new if is_point(old) else old for old, new in zip(carry, after, strict=True)]

    def step(carry, x):
        out, ys = body(carry, x)
        return [domain.full(new, old) if not is_point(old) else new for old, new in zip(carry, out, strict=True)], ys

    xs = [x if is_point(x) else domain.fields(lambda part: part, x) for x in xs]
    last, ys = lax.scan(step, carry, xs, length, reverse)
    return [*last, *ys]


def _entry(domain: Domain, x: Form, at: int) -> Form:
    return jnp.asarray(x)[at] if is_point(x) else domain.fields(lambda part: part[at], x)


def _while(domain: Domain, run: Run, equation, forms) -> list[Form]:
    raise NotImplementedError("a loop whose length is not fixed")


def _linear_solve(domain: Domain, run: Run, equation, forms) -> list[Form]:
    """``A⁻¹ b`` by the program's own solver, for a constant matrix."""
    params = equation.params
    counts, solver = params["const_lengths"], params["jaxprs"].solve
    total = sum(counts)
    before = counts.matvec + counts.vecmat
    consts = forms[before : before + counts.solve]
    if not all(is_point(form) for form in forms[:total]):
        raise NotImplementedError("its matrix depends on the parameters")
    return [settle(domain, form) for form in run(domain, solver.jaxpr, solver.consts, [*consts, *forms[total:]])]


def _factorised(domain: Domain, run: Run, equation, forms) -> list[Form] | None:
    """A Cholesky factor or a triangular solve; None if the matrix is constant: there is a rule for that."""
    name, params = equation.primitive.name, equation.params
    matrix, *others = forms
    if is_point(matrix):
        return None
    check_rows(shape_of(matrix))
    known = domain.still(lambda middle: inverses(name, params, middle), matrix)
    wider = domain.wider(lambda size: backward_error(name, size), matrix)
    args = [wider, *others, *known]
    program = factor_program(name, params, len(shape_of(matrix)))
    closed = jax.make_jaxpr(program)(*(jax.ShapeDtypeStruct(shape_of(form), matrix.dtype) for form in args))
    return [settle(domain, form) for form in run(domain, closed.jaxpr, closed.consts, args)]


CONTROL: dict[str, Callable[..., list[Form] | None]] = {
    "cond": _cond,
    "scan": _scan,
    "while": _while,
    "custom_linear_solve": _linear_solve,
    "cholesky": _factorised,
    "triangular_solve": _factorised,
}


# Factors and solves of matrices that vary ------------------------------------------------------------------------------


# Cholesky factors and triangular solves whose matrix depends on the parameters, as programs that domains can follow.
#
# Both recursions lose the dependence between intervals: the width of an entry grows with every row, exponentially if rows
# are nearly dependent. So the matrix is first brought close to the identity. With R the inverse, computed in floating point
# and then treated as exact, of the factor ``L_0`` in the middle of the domain,
#
#     chol A = R⁻¹ chol(R A Rᵀ),        T x = b  ⇔  (R T) x = R b  with R about T_0⁻¹,
#
# and the recursions run on matrices near the identity, where they lose little. ``R⁻¹ = X ± δ``: with ``R X = I + F`` and
# ``f = ‖F‖_∞ < 1`` every entry of ``(I + F)⁻¹ − I`` is at most ``f/(1 − f)``, so ``δ_ij ≤ Σ_k |X_ik| f/(1 − f)``.
#
# Rounding. The result of a library is exact for a nearby matrix, in any order of additions (Higham, Accuracy and Stability
# of Numerical Algorithms, theorems 10.3 and 8.5): ``L̂ L̂ᵀ = A + Δ`` with ``|Δ_ij| ≤ γ √(a_ii a_jj)``, and ``(T + Δ) x̂ =
# b`` with ``|Δ| ≤ γ |T|``, where ``γ`` is about ``n + 1`` units. The matrix is widened by more than that, so that its exact
# factor or solution and the computed one are both enclosed.

# Rows of a matrix. Libraries invert blocks of larger ones, with other rounding errors.
MOST_ROWS = 32


def check_rows(shape: tuple[int, ...]) -> None:
    """Refuse a matrix that is too large.

    Raises
    ------
    NotImplementedError
    """
    if shape[-1] > MOST_ROWS:
        raise NotImplementedError(
            f"a matrix of {shape[-1]} rows that depends on the parameters; at most {MOST_ROWS} are followed"
        )


def backward_error(name: str, size: Any) -> Any:
    """The distance to the matrix whose exact result a library computes, from the sizes of entries."""
    room = (size.shape[-1] + 4) * float(jnp.finfo(size.dtype).eps)
    if name != "cholesky":
        return room * size
    root = jnp.sqrt(jnp.diagonal(size, axis1=-2, axis2=-1))
    return room * root[..., :, None] * root[..., None, :]


def inverses(name: str, params: dict[str, Any], middle: Any) -> tuple[tuple[Any, Any], ...]:
    """Of the matrix in the middle of a domain: R, and for a factor ``X ≈ R⁻¹``, each with its error."""

    def found(a):
        rows = a.shape[0]
        if name == "cholesky":
            factor, lower = _cholesky(_symmetric(a)), True
        else:
            factor, lower = _triangle(params, a)
        cut = jnp.tril if lower else jnp.triu
        inverse = cut(_solved(lower, factor, jnp.eye(rows, dtype=a.dtype)))
        still = (inverse, jnp.zeros_like(inverse))
        if name != "cholesky":
            return (still,)
        back = jnp.tril(factor)
        away = jnp.abs(inverse @ back - jnp.eye(rows, dtype=a.dtype))
        away = away + (rows + 4) * jnp.finfo(a.dtype).eps * (jnp.abs(inverse) @ jnp.abs(back) + 1)
        worst = jnp.max(jnp.sum(away, 1)) * (1 + 1e-9)
        share = jnp.where(worst < 0.5, worst / (1 - worst), jnp.nan)
        return still, (
            back,
            jnp.tril(jnp.sum(jnp.abs(back), 1, keepdims=True) * share * jnp.ones_like(back)) * (1 + 1e-9),
        )

    return _over_stacks(found, middle.ndim)(middle)


def factor_program(name: str, params: dict[str, Any], axes: int) -> Callable:
    """A program for ``cholesky`` or ``triangular_solve`` of the arguments and `inverses`, for stacks of so many axes."""
    return _over_stacks(_factor if name == "cholesky" else lambda a, b, r: _solution(params, a, b, r), axes)


def _over_stacks(function: Callable, axes: int) -> Callable:
    for _ in range(axes - 2):
        function = jax.vmap(function)
    return function


def _symmetric(a):
    """The symmetric matrix that libraries read: its lower half, mirrored."""
    return jnp.tril(a) + jnp.tril(a, -1).T


def _triangle(params: dict[str, Any], a) -> tuple[Any, bool]:
    """The T of ``T x = b`` for columns x, and whether it is lower triangular; ``x A = b`` is ``Aᵀ xᵀ = bᵀ``."""
    turned = params["transpose_a"] == params["left_side"]
    lower = params["lower"] != turned
    a = a.T if turned else a
    if params["unit_diagonal"]:
        return (jnp.tril(a, -1) if lower else jnp.triu(a, 1)) + np.eye(a.shape[0]), lower
    return jnp.tril(a) if lower else jnp.triu(a), lower


def _factor(a, r, x):
    return x @ _cholesky(r @ _symmetric(a) @ r.T)


def _cholesky(a):
    """``L_jj = √(A_jj − Σ_k L_jk²)`` and ``L_ij = (A_ij − Σ_k L_ik L_jk)/L_jj``, column by column; zero above."""
    rows = a.shape[0]

    def column(factor, given):
        unit, below, entries = given
        rest = entries - factor @ (unit @ factor)
        corner = jnp.sqrt(unit @ rest)
        return factor + jnp.outer(below * rest / corner + unit * corner, unit), None

    # Columns not yet computed are zero: sums over all columns are sums over the previous ones.
    given = np.eye(rows), np.tril(np.ones((rows, rows)), -1).T, a.T
    return lax.scan(column, jnp.zeros_like(a), given)[0]


def _solution(params: dict[str, Any], a, b, r):
    t, lower = _triangle(params, a)
    if not params["left_side"]:
        return _solved(lower, r @ t, r @ b.T).T
    return _solved(lower, r @ t, r @ b)


def _solved(lower: bool, a, b):
    """The x with ``a x = b``, row by row: ``x_i = (b_i − Σ_k a_ik x_k)/a_ii``."""

    def row(x, given):
        unit, entries, right = given
        rest = right - entries @ x
        return x + jnp.outer(unit, rest / (unit @ entries)), None

    return lax.scan(row, jnp.zeros_like(b), (np.eye(len(a)), a, b), reverse=not lower)[0]
