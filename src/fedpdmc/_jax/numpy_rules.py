"""The operations of JAX programs in NumPy's arithmetic, by the names of primitives.

`PLAIN` take arrays alone; `WITH_PARAMETERS` the primitive's parameters too; `ROWS` are for whole rows only, and give None
for anything else.
"""

from __future__ import annotations

import functools

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


def _rows(index, count: int) -> np.ndarray | None:
    """Numbers of rows from the indices of a gather or a scatter; None if one is outside."""
    rows = index[..., 0]
    return rows if rows.size == 0 or (rows.min() >= 0 and rows.max() < count) else None


def _gather(x, index, *, dimension_numbers, slice_sizes, **_):
    """``x[index]`` of whole rows; None for any other gather."""
    numbers, first = dimension_numbers, index.ndim - 1
    if (numbers.collapsed_slice_dims, numbers.start_index_map, numbers.operand_batching_dims) != ((0,), (0,), ()):
        return None
    if numbers.offset_dims != tuple(range(first, first + x.ndim - 1)) or slice_sizes != (1, *x.shape[1:]):
        return None
    rows = _rows(index, x.shape[0])
    return None if rows is None else x[rows]


def _scatter(function, x, index, new, *, dimension_numbers, **_):
    """``function.at(x, index, new)`` of whole rows; None for any other scatter."""
    numbers, first = dimension_numbers, index.ndim - 1
    places = (numbers.inserted_window_dims, numbers.scatter_dims_to_operand_dims, numbers.operand_batching_dims)
    if places != ((0,), (0,), ()) or numbers.update_window_dims != tuple(range(first, new.ndim)):
        return None
    rows = _rows(index, x.shape[0])
    if rows is None or new.shape[first:] != x.shape[1:]:
        return None
    found = x.copy()
    function.at(found, rows, new)
    return found


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
    "gather": _gather, "scatter-add": functools.partial(_scatter, np.add),
    "scatter-max": functools.partial(_scatter, np.maximum), "scatter-min": functools.partial(_scatter, np.minimum),
}  # fmt: skip


def _logic(whole, single):
    return lambda x, y: single(x, y) if x.dtype == bool else whole(x, y)


PLAIN |= {
    "div": lambda x, y: np.divide(x, y) if x.dtype.kind == "f" else (np.trunc(np.divide(x, y))),
    "and": _logic(np.bitwise_and, np.logical_and), "or": _logic(np.bitwise_or, np.logical_or),
    "xor": _logic(np.bitwise_xor, np.logical_xor), "not": lambda x: ~x,
}  # fmt: skip
