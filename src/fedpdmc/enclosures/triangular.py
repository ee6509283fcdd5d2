"""Cholesky factors and triangular solves whose matrix depends on the parameters, as programs that domains can follow.

Both recursions lose the dependence between intervals: the width of an entry grows with every row, exponentially if rows are
nearly dependent. So the matrix is first brought close to the identity. With R the inverse, computed in floating point and
then treated as exact, of the factor ``L_0`` in the middle of the domain,

    chol A = R⁻¹ chol(R A Rᵀ),        T x = b  ⇔  (R T) x = R b  with R about T_0⁻¹,

and the recursions run on matrices near the identity, where they lose little. ``R⁻¹ = X ± δ``: with ``R X = I + F`` and
``f = ‖F‖_∞ < 1`` every entry of ``(I + F)⁻¹ − I`` is at most ``f/(1 − f)``, so ``δ_ij ≤ Σ_k |X_ik| f/(1 − f)``.

Rounding. The result of a library is exact for a nearby matrix, in any order of additions (Higham, Accuracy and Stability of
Numerical Algorithms, theorems 10.3 and 8.5): ``L̂ L̂ᵀ = A + Δ`` with ``|Δ_ij| ≤ γ √(a_ii a_jj)``, and ``(T + Δ) x̂ = b`` with
``|Δ| ≤ γ |T|``, where ``γ`` is about ``n + 1`` units. The matrix is widened by more than that, so that its exact factor or
solution and the computed one are both enclosed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

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
