"""Shaping what the compiler makes of a loop."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, ArrayLike, Shaped

from fedpdmc._jax.programs import equations

T = TypeVar("T")

# Wide vectors pay in long loops over chains and records; processors without them ignore it.
OPTIONS = {"xla_cpu_prefer_vector_width": "512"}

# A third less to compile, where the compiler has this option; vectors of exponentials are slower.
QUICK = {"xla_cpu_use_fusion_emitters": False}

# Whole loops are handed to a GPU as graphs, so that they go on without the host. Where they cannot be, they run as usual.
GRAPHS = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE",
    "xla_gpu_graph_min_graph_size": 1,
}

# Below this many chains a loop of its own costs more than it saves.
FEW_CHAINS = 8


def compiled(function: Callable[..., T], graphs: bool = False, quickly: bool = False) -> Callable[..., T]:
    """Compile with the package's options: the same for all that walks or plans, so that the bits are the same too.

    ``graphs``: loops are graphs of a GPU. ``quickly``: for large programs that run for seconds.
    """
    options = OPTIONS | (GRAPHS if graphs else {})
    if not quickly:
        return eqx.filter_jit(function, compiler_options=options)  # type: ignore[call-overload]

    @functools.cache
    def made() -> Callable[..., T]:
        quick = QUICK if _has(*QUICK.items()) else {}
        return eqx.filter_jit(function, compiler_options=options | quick)  # type: ignore[call-overload]

    return functools.wraps(function)(lambda *args: made()(*args))


def compiled_outside(function: Callable[..., T]) -> Callable[..., T]:
    """As `compiled`; within another program the function is a part of that."""
    alone = compiled(function)

    @functools.wraps(function)
    def call(*args):
        inside = any(isinstance(x, Tracer) for x in jax.tree.leaves(args))
        return (function if inside else alone)(*args)

    return call


def _has(*options: tuple[str, Any]) -> bool:
    """Whether this version of the compiler has these options."""
    try:
        jax.jit(lambda x: x, compiler_options=dict(options)).lower(0.0).compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True


def apart(function: Callable[..., T], *args: Array, number: Shaped[Array, " C"]) -> T:
    """``function(*args)`` computed in a loop nest of its own, not inside whatever uses it.

    The CPU compiler fuses a chain of elementwise work into the reduction that consumes it and then no longer vectorises
    it, at half the speed. It does not fuse across the border of a loop, so this is a loop with one iteration. ``number``
    (plan numbers, or whatever is given in their place) is never negative; the compiler does not know this, so it keeps the
    loop.
    """
    if number.shape[0] < FEW_CHAINS or jax.default_backend() != "cpu":
        return function(*args)
    turns = jnp.where(number[0] < 0, 2, 1)
    # Traced once, for its shapes and for the loop.
    traced = jax.jit(function, inline=True)
    empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(traced, *args))
    _, out = jax.lax.while_loop(
        lambda carry: carry[0] < turns,
        lambda carry: (carry[0] + 1, traced(*args)),
        (jnp.zeros((), turns.dtype), empty),
    )
    return out


def on_device(x: ArrayLike) -> Array:
    """A NumPy array as one of JAX's, of the same type where precision allows it; outside of compiled code.

    ``jnp.asarray`` compiles a program for every shape, ten milliseconds each.
    """
    return x if isinstance(x, jax.Array) else jax.device_put(np.asarray(x))


def strong_types(tree: T) -> T:
    """The same arrays without weak types, as compiled programs return them: a loop of programs is then compiled once."""
    return jax.tree.map(lambda x: jax.lax.convert_element_type(x, x.dtype), tree)


def computed_first(tree: T, number: Shaped[Array, " C"]) -> T:
    """The same arrays, computed before anything uses them.

    The CPU compiler repeats the computation of an array in every fused loop that reads it: with many readers the program
    is many times as large and takes as many times longer to compile. See `apart` for what ``number`` is.
    """
    arrays, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, apart(lambda *same: same, *arrays, number=number))


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
    return any(equation.primitive.name in LIBRARY for equation in equations(jax.make_jaxpr(function)(*like).jaxpr))
