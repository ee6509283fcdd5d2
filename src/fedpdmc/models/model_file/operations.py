"""The table of allowed operations: how each is written in a model file, found in a JAX program, and rebuilt from JAX.

Nothing outside this table can be in a model file. Every operation is a pure function of numbers: none reads a file, opens
a connection, draws a random number or calls back into Python.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.scipy import special

from fedpdmc.models.model_file.program import Type

# Parameters are a whole number or a list of whole numbers.
WHOLE, WHOLES = "whole", "wholes"


class Operation(NamedTuple):
    """One operation.

    Attributes
    ----------
    apply : callable
        ``apply(type of the result, params, *values)`` rebuilds it.
    operands : (int, int)
        The least and largest number of operands.
    params : dict
        Kinds of the parameters by name, in the order of the file.
    found : callable
        From the parameters of the equation of a JAX program to those of the file; raises `NotAllowed`.
    """

    apply: Callable[..., Any]
    operands: tuple[int, int]
    params: dict[str, str] = {}
    found: Callable[[dict[str, Any]], dict[str, Any]] = lambda params: {}


class NotAllowed(Exception):
    """An operation, or a use of one, that a model file cannot hold; says why."""


def _plain(function: Callable, operands: int) -> Operation:
    return Operation(lambda type, params, *values: function(*values), (operands, operands))


def _along(function: Callable, param: str, kind: str, theirs: str, keyword: str) -> Operation:
    """An operation with one parameter of axes."""

    def found(params: dict[str, Any]) -> dict[str, Any]:
        value = params[theirs]
        return {param: tuple(int(i) for i in value) if kind == WHOLES else int(value)}

    return Operation(lambda type, params, x: function(x, **{keyword: params[param]}), (1, 1), {param: kind}, found)


def _cumulative(function: Callable) -> Operation:
    return Operation(
        lambda type, params, x: function(x, axis=params["axis"], reverse=bool(params["reverse"])),
        (1, 1),
        {"axis": WHOLE, "reverse": WHOLE},
        lambda params: {"axis": int(params["axis"]), "reverse": int(params["reverse"])},
    )


def _dot_general() -> Operation:
    def apply(type: Type, params: dict[str, Any], x, y):
        contracted, batched = (params["left"], params["right"]), (params["left_batch"], params["right_batch"])
        return lax.dot_general(x, y, (contracted, batched))

    def found(params: dict[str, Any]) -> dict[str, Any]:
        (left, right), (left_batch, right_batch) = params["dimension_numbers"]
        lists = {"left": left, "right": right, "left_batch": left_batch, "right_batch": right_batch}
        return {name: tuple(map(int, axes)) for name, axes in lists.items()}

    kinds: dict[str, str] = dict.fromkeys(("left", "right", "left_batch", "right_batch"), WHOLES)
    return Operation(apply, (2, 2), kinds, found)


def _slice() -> Operation:
    def found(params: dict[str, Any]) -> dict[str, Any]:
        start, stop = params["start_indices"], params["limit_indices"]
        strides = params["strides"] or (1,) * len(start)
        return {"start": tuple(map(int, start)), "stop": tuple(map(int, stop)), "strides": tuple(map(int, strides))}

    kinds: dict[str, str] = dict.fromkeys(("start", "stop", "strides"), WHOLES)
    return Operation(
        lambda type, params, x: lax.slice(x, params["start"], params["stop"], params["strides"]), (1, 1), kinds, found
    )


# How entries beyond the end of a table are read.
MODES = (lax.GatherScatterMode.CLIP, lax.GatherScatterMode.PROMISE_IN_BOUNDS, lax.GatherScatterMode.FILL_OR_DROP)
DIMENSIONS = ("offset_dims", "collapsed_slice_dims", "start_index_map", "operand_batching_dims",
              "start_indices_batching_dims")  # fmt: skip


def _gather() -> Operation:
    def apply(type: Type, params: dict[str, Any], x, index):
        numbers = lax.GatherDimensionNumbers(**{name: params[name] for name in DIMENSIONS})
        return lax.gather(x, index, numbers, params["sizes"], mode=MODES[params["mode"]])

    def found(params: dict[str, Any]) -> dict[str, Any]:
        numbers = {name: tuple(map(int, getattr(params["dimension_numbers"], name))) for name in DIMENSIONS}
        if params["fill_value"] is not None or params["mode"] not in MODES:
            raise NotAllowed("its fill value or mode is unusual")
        return {**numbers, "sizes": tuple(map(int, params["slice_sizes"])), "mode": MODES.index(params["mode"])}

    kinds = {**dict.fromkeys((*DIMENSIONS, "sizes"), WHOLES), "mode": WHOLE}
    return Operation(apply, (2, 2), kinds, found)


def _pad() -> Operation:
    def apply(type: Type, params: dict[str, Any], x, value):
        return lax.pad(x, value, list(zip(params["low"], params["high"], params["interior"], strict=True)))

    def found(params: dict[str, Any]) -> dict[str, Any]:
        parts = zip(("low", "high", "interior"), zip(*params["padding_config"], strict=True), strict=True)
        return {name: tuple(map(int, part)) for name, part in parts}

    return Operation(apply, (2, 2), dict.fromkeys(("low", "high", "interior"), WHOLES), found)


def _reshape() -> Operation:
    def found(params: dict[str, Any]) -> dict[str, Any]:
        if params["dimensions"] is not None:
            raise NotAllowed("it reorders the axes")
        return {}

    return Operation(lambda type, params, x: lax.reshape(x, type.shape), (1, 1), {}, found)


# Functions of one, two and three arrays of the same shape, as JAX names them.
UNARY = {
    "neg": lax.neg, "exp": lax.exp, "exp2": lax.exp2, "expm1": lax.expm1, "log": lax.log, "log1p": lax.log1p,
    "logistic": lax.logistic, "sqrt": lax.sqrt, "rsqrt": lax.rsqrt, "cbrt": lax.cbrt, "square": lax.square,
    "abs": lax.abs, "sign": lax.sign, "floor": lax.floor, "ceil": lax.ceil, "sin": lax.sin, "cos": lax.cos,
    "tanh": lax.tanh, "sinh": lax.sinh, "cosh": lax.cosh, "asinh": lax.asinh, "atan": lax.atan, "erf": lax.erf,
    "erfc": lax.erfc, "erf_inv": lax.erf_inv, "lgamma": lax.lgamma, "digamma": lax.digamma,
    "is_finite": lax.is_finite, "not": lax.bitwise_not, "stop_gradient": lax.stop_gradient,
    # Functions of JAX that have a derivative or an enclosure of their own as a whole.
    "log_ndtr": special.log_ndtr, "ndtr": special.ndtr,
}  # fmt: skip
BINARY = {
    "add": lax.add, "sub": lax.sub, "mul": lax.mul, "div": lax.div, "rem": lax.rem, "pow": lax.pow, "max": lax.max,
    "min": lax.min, "eq": lax.eq, "ne": lax.ne, "lt": lax.lt, "le": lax.le, "gt": lax.gt, "ge": lax.ge,
    "and": lax.bitwise_and, "or": lax.bitwise_or, "xor": lax.bitwise_xor, "polygamma": lax.polygamma,
    "logaddexp": jnp.logaddexp, "xlogy": special.xlogy, "xlog1py": special.xlog1py, "betaln": special.betaln,
}  # fmt: skip
# Functions that are kept as a whole; all others are written out.
WHOLE_CALLS = ("log_ndtr", "ndtr", "logaddexp", "xlogy", "xlog1py", "betaln")

OPERATIONS: dict[str, Operation] = {
    **{name: _plain(function, 1) for name, function in UNARY.items()},
    **{name: _plain(function, 2) for name, function in BINARY.items()},
    "clamp": _plain(lax.clamp, 3),
    "select_n": Operation(lambda type, params, which, *cases: lax.select_n(which, *cases), (3, 9)),
    "integer_pow": _along(lax.integer_pow, "power", WHOLE, "y", "y"),
    "convert": Operation(lambda type, params, x: lax.convert_element_type(x, type.dtype), (1, 1)),
    "broadcast": Operation(
        lambda type, params, x: lax.broadcast_in_dim(x, type.shape, params["axes"]), (1, 1), {"axes": WHOLES},
        lambda params: {"axes": tuple(map(int, params["broadcast_dimensions"]))},
    ),
    "reshape": _reshape(),
    "squeeze": _along(lax.squeeze, "axes", WHOLES, "dimensions", "dimensions"),
    "transpose": _along(lax.transpose, "order", WHOLES, "permutation", "permutation"),
    "reverse": _along(lax.rev, "axes", WHOLES, "dimensions", "dimensions"),
    "concatenate": Operation(
        lambda type, params, *parts: lax.concatenate(parts, params["axis"]), (1, 64), {"axis": WHOLE},
        lambda params: {"axis": int(params["dimension"])},
    ),
    "slice": _slice(),
    "dynamic_slice": Operation(
        lambda type, params, x, *start: lax.dynamic_slice(x, start, params["sizes"]), (2, 8), {"sizes": WHOLES},
        lambda params: {"sizes": tuple(map(int, params["slice_sizes"]))},
    ),
    "gather": _gather(),
    "pad": _pad(),
    "iota": Operation(
        lambda type, params: lax.broadcasted_iota(type.dtype, type.shape, params["axis"]), (0, 0), {"axis": WHOLE},
        lambda params: {"axis": int(params["dimension"])},
    ),
    "reduce_sum": _along(lax.reduce_sum, "axes", WHOLES, "axes", "axes"),
    "reduce_max": _along(lax.reduce_max, "axes", WHOLES, "axes", "axes"),
    "reduce_min": _along(lax.reduce_min, "axes", WHOLES, "axes", "axes"),
    "reduce_prod": _along(lax.reduce_prod, "axes", WHOLES, "axes", "axes"),
    "reduce_and": _along(lax.reduce_and, "axes", WHOLES, "axes", "axes"),
    "reduce_or": _along(lax.reduce_or, "axes", WHOLES, "axes", "axes"),
    "cumsum": _cumulative(lax.cumsum),
    "cumprod": _cumulative(lax.cumprod),
    "cumlogsumexp": _cumulative(lax.cumlogsumexp),
    "dot": _dot_general(),
}  # fmt: skip

# Names in the file of primitives that are called otherwise in JAX.
RENAMED = {"broadcast_in_dim": "broadcast", "convert_element_type": "convert", "rev": "reverse", "dot_general": "dot"}
