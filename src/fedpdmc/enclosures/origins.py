"""Whose code an equation comes from: what is known of functions of JAX must not be taken for known of a user's.

Names say little. A user's function may have any, and `functools.wraps` gives it the name, the file and the line of another
one. So a function is one of JAX only if the frames in which its equations were made are; one that has rules as a whole only
if its equations are those of the function itself; and a derivative only if all functions that its rule can call are.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy import special

from fedpdmc._jax.by_numpy import INNER


def line_of(equation) -> str:
    """The line of the user's function that an equation comes from."""
    from jax._src import source_info_util

    return source_info_util.summarize(equation.source_info)


# Functions of JAX that are smooth although their formulas have branches.
BRANCHED = {"betaln", "algdiv", "log_ndtr", "_ndtr", "ndtr", "_ndtri", "ndtri", "logaddexp", "sinc"}
# Null sets for which NumPyro checks membership: values are in them by construction, up to rounding.
THIN = {f"{name}.__call__" for name in ("_Simplex", "_CorrCholesky", "_CorrMatrix", "_PositiveDefinite",
                                        "_PositiveSemiDefinite", "_Sphere", "_ZeroSum")}  # fmt: skip
CONSTRAINTS = "/numpyro/distributions/constraints.py"
# With the separator: other packages have names that begin alike.
_FOLDERS = tuple(folder.rstrip("/\\") + separator for folder in jax.__path__ for separator in "/\\")


def is_of_jax(place: str) -> bool:
    """Whether a file, or a line of one, belongs to JAX."""
    return place.startswith(_FOLDERS)


def place_of(debug_info: Any) -> tuple[str, str]:
    """Name and line of a function as JAX reports them, which may be those of a function that it wraps."""
    name, _, place = str(debug_info.func_src_info).partition(" at ")
    return name, place


def within_known(equation) -> bool:
    """Whether an equation belongs to a function that is known to be continuous, whatever its formula."""
    for frame in _frames(equation):
        if frame.function_name in THIN and frame.file_name.replace("\\", "/").endswith(CONSTRAINTS):
            return True
        if not is_of_jax(frame.file_name):
            return False
        if frame.function_name in BRANCHED:
            return True
    return False


def _frames(equation) -> tuple[Any, ...]:
    """The frames in which an equation was made, the innermost first."""
    trace = equation.source_info.traceback
    return () if trace is None else tuple(trace.frames)


def name_of_call(equation) -> str:
    """The name of the function of JAX that was called; empty for a user's function, even one of the same name.

    A function of `WHOLE` has rules as a whole: only its own text is it, since others may be composed of functions of JAX.
    """
    jaxpr = _inner(equation)
    name, place = place_of(jaxpr.debug_info)
    if not is_of_jax(place):
        return ""
    return name if (_is_text_of(jaxpr, name) if name in WHOLE else _made_by(jaxpr, name)) else ""


def _inner(equation) -> Any:
    """The program that an equation calls."""
    inner = equation.params[INNER[equation.primitive.name]]
    return inner.jaxpr if hasattr(inner, "jaxpr") else inner


def _made_by(jaxpr, name: str) -> bool:
    """Whether all equations of a program were made by a function of JAX of this name, with none of a user's between."""

    def own(equation) -> bool:
        for frame in _frames(equation):
            if not is_of_jax(frame.file_name):
                break
            if frame.function_name.rpartition(".")[2] == name:
                return True
        # A function that is compiled calls itself under its name.
        return equation.primitive.name in INNER and _made_by(_inner(equation), name)

    return bool(jaxpr.eqns) and all(map(own, jaxpr.eqns))


# Functions that have rules as a whole. They may be called without a frame of their name.
WHOLE = {
    "log_ndtr": special.log_ndtr, "ndtr": special.ndtr, "logaddexp": jnp.logaddexp, "xlogy": special.xlogy,
    "xlog1py": special.xlog1py, "betaln": special.betaln,
}  # fmt: skip
ONE_ARGUMENT = {"log_ndtr", "ndtr"}


def _is_text_of(jaxpr, name: str) -> bool:
    """Whether a program is, equation by equation, that of the function of JAX of this name, mapped over axes or not.

    A text has all numbers but those of constant arrays: a program with these is none of them.
    """
    kinds = tuple((x.aval.shape, str(x.aval.dtype)) for x in jaxpr.invars if hasattr(x.aval, "dtype"))
    if len(kinds) != len(jaxpr.invars) or len(kinds) != (1 if name in ONE_ARGUMENT else 2) or _has_constants(jaxpr):
        return False
    return _text(jaxpr) in _texts_of(name, kinds)


def _text(jaxpr) -> str:
    """The text of a program without equations that nothing uses, which some transformations leave out."""
    used, kept = set(map(id, jaxpr.outvars)), []
    for equation in reversed(jaxpr.eqns):
        if any(id(x) in used for x in equation.outvars):
            kept.append(equation)
            used |= set(map(id, equation.invars))
    return str(jaxpr.replace(eqns=kept[::-1]))


def _has_constants(jaxpr) -> bool:
    inside = [_inner(equation) for equation in jaxpr.eqns if equation.primitive.name in INNER]
    return bool(jaxpr.constvars) or any(map(_has_constants, inside))


@functools.lru_cache(maxsize=256)
def _texts_of(name: str, kinds: tuple[tuple[tuple[int, ...], str], ...]) -> set[str]:
    """The texts of a function of JAX for arguments of these shapes and types."""
    function, found = WHOLE[name], set()
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in kinds]
    # Mapped over the axes that all arguments have.
    shapes = [shape for shape, _ in kinds]
    alike = next(
        (k for k, sizes in enumerate(zip(*shapes, strict=False)) if len(set(sizes)) > 1), min(map(len, shapes))
    )
    for _ in range(1 + alike):
        whole = jax.make_jaxpr(function)(*arguments).jaxpr
        found.add(_text(whole))
        left = [whole]
        while left:
            inside = [equation for equation in left.pop().eqns if equation.primitive.name in INNER]
            found |= {_text(_inner(x)) for x in inside if place_of(_inner(x).debug_info)[0] == name}
            left += map(_inner, inside)
        function = jax.vmap(function)
    return found


# Functions of JAX whose derivative is that of the user, or of a solution which the user's own solver finds.
BY_USER = {"_custom_root", "wrapped_fun"}
RULES = ("jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd")


def is_by_hand(equation) -> bool:
    """Whether the derivative that a call has been given may be a user's."""
    jaxpr = _inner(equation)
    called, place = place_of(jaxpr.debug_info)
    of_jax = is_of_jax(place) and (_made_by(jaxpr, called) or called in WHOLE and _is_text_of(jaxpr, called))
    if not of_jax or called in BY_USER:
        return True
    rules = [rule for name in RULES if (rule := equation.params.get(name))]
    return not rules or not all(is_of_jax(code.co_filename) for rule in rules for code in _codes(rule))


def derivatives_by_hand(jaxpr) -> tuple[bool, ...]:
    """For each call with a derivative of its own, at any depth, whether that may be a user's: its text does not say."""
    found: list[bool] = []
    for equation in jaxpr.eqns:
        if equation.primitive.name.startswith("custom_") and equation.primitive.name in INNER:
            found.append(is_by_hand(equation))
        for part in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(part, "jaxpr", part)
            found += derivatives_by_hand(inner) if hasattr(inner, "eqns") else ()
    return tuple(found)


# Where objects of JAX keep the functions that they call.
_KEPT = ("fun", "jvp", "fwd", "bwd", "f", "f_transformed", "__wrapped__", "__self__", "__func__")


def _codes(rule: Any) -> Iterator[types.CodeType]:
    """The code of all functions that a rule holds: in closures, arguments and objects."""
    seen: dict[int, Any] = {}
    left = [rule]
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen[id(one)] = one
        if isinstance(one, types.FunctionType):
            yield one.__code__
            left += [cell.cell_contents for cell in one.__closure__ or () if _is_filled(cell)]
            left += [*(one.__defaults__ or ()), *(one.__kwdefaults__ or {}).values()]
        elif isinstance(one, functools.partial):
            left += [one.func, *one.args, *one.keywords.values()]
        elif isinstance(one, (tuple, list)):
            left += one
        elif isinstance(one, dict):
            left += one.values()
        elif callable(one) and not isinstance(one, type):
            left += [getattr(one, name) for name in _KEPT if hasattr(one, name)]
            left += [vars(kind)["__call__"] for kind in type(one).__mro__ if "__call__" in vars(kind)]
        elif type(one).__name__ == "WrappedFun":
            left += [one.f, one.f_transformed]


def _is_filled(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True
