"""Cholesky factors and triangular solves whose matrix depends on the parameters, as programs that domains can follow.

Rounding. A library adds up the terms of an entry in an order of its own, from entries that it has computed before. By
induction these lie in their enclosures, and an entry made of n terms is off by at most ``n + 2`` units of the sum of their
sizes, whatever the order. The rules of products and sums, by which these programs are enclosed, allow for more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# Of a matrix. Beyond, libraries invert blocks, which is rounded in another way.
MOST_ROWS = 32


def factor_program(name: str, params: dict[str, Any], shapes: list[tuple[int, ...]]) -> Callable:
    """A program for ``cholesky`` or ``triangular_solve``, of arrays of these shapes.

    Raises
    ------
    NotImplementedError
        If the matrix is too large.
    """
    rows = shapes[0][-1]
    if rows > MOST_ROWS:
        raise NotImplementedError(
            f"a matrix of {rows} rows that depends on the parameters; up to {MOST_ROWS} are followed"
        )
    program = _cholesky if name == "cholesky" else lambda a, b: _solved(params, a, b)
    for _ in shapes[0][:-2]:
        program = jax.vmap(program)
    return program


def _cholesky(a):
    """``L_jj = √(A_jj − Σ_k L_jk²)`` and ``L_ij = (A_ij − Σ_k L_ik L_jk)/L_jj``, column by column; zero above."""
    rows = a.shape[0]

    def column(factor, given):
        unit, below, entries = given
        rest = entries - factor @ (unit @ factor)
        corner = jnp.sqrt(unit @ rest)
        return factor + jnp.outer(below * rest / corner + unit * corner, unit), None

    # Columns are zero until it is their turn: sums over all of them are sums over those before.
    given = np.eye(rows), np.tril(np.ones((rows, rows)), -1).T, a.T
    return lax.scan(column, jnp.zeros_like(a), given)[0]


def _solved(params: dict[str, Any], a, b):
    """The x with ``a x = b``, or ``x a = b``, row by row: ``x_i = (b_i − Σ_k a_ik x_k)/a_ii``."""
    if not params["left_side"]:
        turned = {**params, "left_side": True, "transpose_a": not params["transpose_a"]}
        return _solved(turned, a, b.T).T
    lower = params["lower"] != params["transpose_a"]
    a = a.T if params["transpose_a"] else a

    def row(x, given):
        unit, entries, right = given
        rest = right - entries @ x
        found = rest if params["unit_diagonal"] else rest / (unit @ entries)
        return x + jnp.outer(unit, found), None

    return lax.scan(row, jnp.zeros_like(b), (np.eye(len(a)), a, b), reverse=not lower)[0]
