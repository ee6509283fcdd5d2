"""Functions mapped over chains and points, with calls of LAPACK one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

# Primitives that call LAPACK on a processor.
LIBRARY = frozenset(
    {
        "cholesky", "triangular_solve", "lu", "qr", "geqrf", "geqp3", "householder_product", "eig", "eigh", "svd", "schur",
        "hessenberg", "tridiagonal", "tridiagonal_solve",
    }
)  # fmt: skip


def mapped(function: Callable, library: bool | None = None) -> Callable:
    """``jax.vmap(function)``, but point after point on a processor if the function calls LAPACK.

    jaxlib 0.10 divides a LAPACK call on a stack of matrices among its threads, and waits for them on one of these threads.
    With as many such calls at a time as there are threads, all of them wait forever: on two cores the derivatives of a
    Cholesky factor are enough.

    Parameters
    ----------
    function : callable
        Of arrays.
    library : bool, optional
        Whether it calls LAPACK; None: it is traced to find out.
    """

    def call(*args):
        calls = library
        if calls is None and jax.default_backend() == "cpu":
            calls = calls_library(function, *jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), args))
        if not calls or jax.default_backend() != "cpu":
            return jax.vmap(function)(*args)
        return jax.lax.map(lambda point: function(*point), args)

    return call


def calls_library(function: Callable, *args: Any) -> bool:
    """Whether a function of such arguments calls LAPACK."""
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), args)
    return any(name in LIBRARY for name in _names(jax.make_jaxpr(function)(*like).jaxpr))


def _names(jaxpr: core.Jaxpr) -> Iterator[str]:
    """Of all primitives, those of inner programs included."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_program):
            if _is_program(value):
                yield from _names(getattr(value, "jaxpr", value))


def _is_program(value: Any) -> bool:
    return isinstance(value, (core.Jaxpr, core.ClosedJaxpr))
