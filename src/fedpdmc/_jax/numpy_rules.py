"""The operations of JAX programs in NumPy's arithmetic, by the names of primitives.

`PLAIN` take arrays alone; `WITH_PARAMETERS` the primitive's parameters too; `ROWS` are for whole rows only, and give None
for anything else.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import scipy.special


def _broadcast_in_dim(x, *, shape, broadcast_dimensions, **_):
    whole = [1] * len(shape)
    for axis, n in zip(broadcast_dimensions, x.shape, strict=True):
        whole[axis] = n
    return np.broadcast_to(x.reshape(whole), shape)


def _dot_general(x, y, *, dimension_numbers, **_):
    (left, right), (left_batch, right_batch) = dimension_numbers
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    one, other = [""] * x.ndim, [""] * y.ndim
    for i, j in [*zip(left_batch, right_batch, strict=True), *zip(left, right, strict=True)]:
        one[i] = other[j] = next(letters)
    one, other = ([name or next(letters) for name in names] for names in (one, other))
    kept = [one[i] for i in left_batch]
    kept += [name for i, name in enumerate(one) if i not in (*left, *left_batch)]
    kept += [name for j, name in enumerate(other) if j not in (*right, *right_batch)]
    return np.einsum(f"{''.join(one)},{''.join(other)}->{''.join(kept)}", x, y, optimize=True)


def _reduced(function, x, *, axes, **_):
    return function(x, axis=tuple(axes))


def _cumulated(function, x, *, axis, reverse):
    return np.flip(function(np.flip(x, axis), axis), axis) if reverse else function(x, axis)


def _select(which, *cases):
    return np.where(which, cases[1], cases[0]) if which.dtype == bool else np.choose(which, cases)


def _slice(x, *, start_indices, limit_indices, strides):
    strides = strides or (1,) * x.ndim
    return x[tuple(map(slice, start_indices, limit_indices, strides))]


def _pad(x, filling, *, padding_config):
    """``lax.pad``; negative padding removes entries."""
    spread = [n + gap * max(n - 1, 0) for n, (_, _, gap) in zip(x.shape, padding_config, strict=True)]
    found = np.full(
        [max(low, 0) + n + max(high, 0) for n, (low, high, _) in zip(spread, padding_config, strict=True)], filling
    )
    own = [
        slice(max(low, 0), max(low, 0) + n, gap + 1) for n, (low, _, gap) in zip(spread, padding_config, strict=True)
    ]
    found[tuple(own)] = x
    kept = [
        slice(max(-low, 0), n - max(-high, 0)) for n, (low, high, _) in zip(found.shape, padding_config, strict=True)
    ]
    return found[tuple(kept)]


def _dynamic_slice(x, *starts, slice_sizes):
    corner = [int(np.clip(start, 0, n - size)) for start, n, size in zip(starts, x.shape, slice_sizes, strict=True)]
    return x[tuple(slice(first, first + size) for first, size in zip(corner, slice_sizes, strict=True))]


def _dynamic_update_slice(x, new, *starts):
    corner = [int(np.clip(start, 0, n - size)) for start, n, size in zip(starts, x.shape, new.shape, strict=True)]
    found = x.copy()
    found[tuple(slice(first, first + size) for first, size in zip(corner, new.shape, strict=True))] = new
    return found


def _places(index, axes, shape) -> tuple[np.ndarray, ...] | None:
    """The indices along some axes of an array, of a gather or a scatter; None if one is outside."""
    places = tuple(index[..., k] for k in range(len(axes)))
    inside = all(p.size == 0 or (p.min() >= 0 and p.max() < shape[axis]) for p, axis in zip(places, axes, strict=True))
    return places if inside else None


def _gather(x, index, *, dimension_numbers, slice_sizes, **_):
    """Entries of an array along some axes, whole along the others; None for any other gather."""
    numbers, axes = dimension_numbers, dimension_numbers.start_index_map
    whole = tuple(1 if axis in axes else n for axis, n in enumerate(x.shape))
    if numbers.operand_batching_dims or sorted(axes) != list(numbers.collapsed_slice_dims) or slice_sizes != whole:
        return None
    places = _places(index, axes, x.shape)
    if places is None:
        return None
    found = np.moveaxis(x, axes, range(len(axes)))[places]
    first = index.ndim - 1
    return np.moveaxis(found, range(first, found.ndim), numbers.offset_dims)


def _scatter(function, x, index, new, *, dimension_numbers, **_):
    """``function.at`` along some axes of an array, whole along the others; None for any other scatter."""
    numbers, axes = dimension_numbers, dimension_numbers.scatter_dims_to_operand_dims
    rest = [n for axis, n in enumerate(x.shape) if axis not in axes]
    if numbers.operand_batching_dims or sorted(axes) != list(numbers.inserted_window_dims):
        return None
    places = _places(index, axes, x.shape)
    if places is None or [new.shape[axis] for axis in numbers.update_window_dims] != rest:
        return None
    first, found = index.ndim - 1, x.copy()
    new = np.moveaxis(new, numbers.update_window_dims, range(first, new.ndim))
    function.at(np.moveaxis(found, axes, range(len(axes))), places, new)
    return found


class _Put:
    """In place of a ufunc: replaces entries."""

    at = staticmethod(np.ndarray.__setitem__)


def _put(x, index, new, **params):
    """Replace entries at one place; None for more, which may coincide."""
    return _scatter(_Put, x, index, new, **params) if math.prod(index.shape[:-1]) == 1 else None


def _polygamma(n, x):
    return np.where(
        n == 0, scipy.special.psi(x), (-1) ** (n + 1) * scipy.special.gamma(n + 1) * scipy.special.zeta(n + 1, x)
    )


def _logistic(x):
    return np.where(x < 0, np.exp(np.minimum(x, 0)), 1.0) / (1 + np.exp(-np.abs(x)))


PLAIN = {
    "add": np.add, "add_any": np.add, "sub": np.subtract, "mul": np.multiply, "neg": np.negative,
    "max": np.maximum, "min": np.minimum, "abs": np.abs, "sign": np.sign, "exp": np.exp, "log": np.log, "log1p": np.log1p,
    "expm1": np.expm1, "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "sin": np.sin, "cos": np.cos, "tanh": np.tanh,
    "logistic": _logistic, "erf": scipy.special.erf, "erfc": scipy.special.erfc, "square": np.square,
    "is_finite": np.isfinite, "floor": np.floor, "ceil": np.ceil, "pow": np.power, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal, "copy": lambda x: x,
    "stop_gradient": lambda x: x, "nextafter": np.nextafter, "select_n": _select,
    "dynamic_update_slice": _dynamic_update_slice, "clamp": lambda lo, x, hi: np.clip(x, lo, hi),
    "one_minus_square": lambda x: 1 - x * x, "lgamma": scipy.special.gammaln, "digamma": scipy.special.psi,
    "polygamma": _polygamma, "zeta": scipy.special.zeta, "erf_inv": scipy.special.erfinv, "cbrt": np.cbrt, "tan": np.tan,
    "sinh": np.sinh, "cosh": np.cosh, "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan, "atan2": np.arctan2,
    "asinh": np.arcsinh, "acosh": np.arccosh, "atanh": np.arctanh, "exp2": np.exp2, "shift_left": np.left_shift,
    "shift_right_logical": lambda x, y: (x.view(f"u{x.itemsize}") >> y.view(f"u{y.itemsize}")).view(x.dtype),
    "shift_right_arithmetic": np.right_shift,
}  # fmt: skip
WITH_PARAMETERS = {
    "broadcast_in_dim": _broadcast_in_dim, "dot_general": _dot_general, "slice": _slice, "dynamic_slice": _dynamic_slice,
    "pad": _pad, "reshape": lambda x, *, new_sizes, **_: x.reshape(new_sizes),
    "squeeze": lambda x, *, dimensions: np.squeeze(x, dimensions),
    "transpose": lambda x, *, permutation: np.transpose(x, permutation),
    "rev": lambda x, *, dimensions: np.flip(x, dimensions),
    "stack": lambda *xs, axis, **_: np.stack(xs, axis),
    "concatenate": lambda *xs, dimension: np.concatenate(xs, dimension), "convert_element_type": lambda x, **_: x,
    "integer_pow": lambda x, *, y: 1 / x**-y if y < 0 else x**y,
    "reduce_sum": functools.partial(_reduced, np.sum), "reduce_max": functools.partial(_reduced, np.max),
    "reduce_min": functools.partial(_reduced, np.min), "reduce_prod": functools.partial(_reduced, np.prod),
    "reduce_and": functools.partial(_reduced, np.all), "reduce_or": functools.partial(_reduced, np.any),
    "cumsum": functools.partial(_cumulated, np.cumsum), "cumprod": functools.partial(_cumulated, np.cumprod),
    "iota": lambda *, shape, dimension, **_: np.indices(shape)[dimension],
    "bitcast_convert_type": lambda x, *, new_dtype: x.view(new_dtype),
    "argmax": lambda x, *, axes, **_: np.argmax(x, *axes), "argmin": lambda x, *, axes, **_: np.argmin(x, *axes),
    "cummax": functools.partial(_cumulated, np.maximum.accumulate),
}  # fmt: skip
ROWS = {
    "gather": _gather, "scatter": _put, "scatter-add": functools.partial(_scatter, np.add),
    "scatter-max": functools.partial(_scatter, np.maximum), "scatter-min": functools.partial(_scatter, np.minimum),
}  # fmt: skip


def _logic(whole, single):
    return lambda x, y: single(x, y) if x.dtype == bool else whole(x, y)


PLAIN |= {
    "div": lambda x, y: np.divide(x, y) if x.dtype.kind == "f" else (np.trunc(np.divide(x, y))),
    "and": _logic(np.bitwise_and, np.logical_and), "or": _logic(np.bitwise_or, np.logical_or),
    "xor": _logic(np.bitwise_xor, np.logical_xor), "not": lambda x: ~x,
}  # fmt: skip
