"""Functions that read what is not among their arguments: compiled work is kept by function, so that must not change."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import re
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedpdmc._jax.precision import double_precision
from fedpdmc.errors import InputError
from fedpdmc.models.user_function import UserModel

# A number in the key of JAX's cache of traced functions: with a new one they are traced again.
_TRACE = jax.make_user_context(0) if hasattr(jax, "make_user_context") else None
_NUMBERS = itertools.count(1)
# Hashes of users' functions when they were first traced, by function, and by the arguments they were traced with.
_SEEN: weakref.WeakKeyDictionary[Any, dict[str, str]] = weakref.WeakKeyDictionary()


@double_precision
def check_unchanged(model: UserModel, dim: int, name: str) -> None:
    """Refuse a function that is traced to another program than before in this process.

    A function may close over numbers and arrays or read them from its module. They become a part of the program that is
    compiled, and programs are kept by function: with other values the old program would run.

    It is traced twice, the second time without what JAX remembers of compiled functions that it calls. A function that is
    traced to another program then has bounds of one program and rates of another.

    Raises
    ------
    InputError
        If the function reads something that has changed, or that changes whenever it is called.
    """
    found = program_digest(model, dim)
    own, wrappers = _innermost(model.function)
    with _traced_anew():
        again = program_digest(model, dim)
    if again != found:
        raise InputError(
            f"sites ({name!r})",
            f"the function {getattr(own, '__name__', own)!r}, which is not the same whenever it is traced: it draws "
            "random numbers, changes a value that it reads, or calls a jax.jit function that read another value before",
            "Draw random numbers once and give them as data; give what changes as data; keep no state in the function.",
        )
    shapes = [(leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(model.data)]
    kind = repr((wrappers, dim, str(jax.tree.structure(model.data)), shapes))
    try:
        seen = _SEEN.setdefault(own, {})
    except TypeError:
        return
    if seen.setdefault(kind, found) != found:
        raise InputError(
            f"sites ({name!r})",
            f"the function {getattr(own, '__name__', own)!r}, which reads a value that has changed since it was first used",
            "Give what changes as data, or define a new function: compiled work is kept by function.",
        )


@double_precision
def program_digest(model: UserModel, dim: int) -> str:
    """A hash of the program that a user's function is traced to, with the values that it reads; not of its data."""
    x = jax.ShapeDtypeStruct((dim + len(model.latent_names),), jnp.float64)
    # A new function each time: JAX remembers what it has traced too.
    closed = jax.make_jaxpr(lambda *args: model.function(*args))(x, model.data)
    digest = hashlib.sha256(re.sub(r"0x[0-9a-f]+", "", str(closed.jaxpr)).encode())
    for const in closed.consts:
        digest.update(np.ascontiguousarray(const).tobytes())
    return digest.hexdigest()


def _traced_anew() -> contextlib.AbstractContextManager[Any]:
    """A context in which functions under `jax.jit` are traced again."""
    return contextlib.nullcontext() if _TRACE is None else _TRACE(next(_NUMBERS))


def _innermost(function: Any) -> tuple[Any, list[Any]]:
    """The user's own function, and what it was wrapped in."""
    wrappers = []
    while True:
        inner = getattr(function, "function", None) or getattr(function, "model", None)
        if inner is None or not type(function).__module__.startswith("fedpdmc."):
            return function, wrappers
        wrappers.append(
            (type(function).__name__, getattr(function, "part", None), repr(getattr(function, "rest", None)))
        )
        function = inner
