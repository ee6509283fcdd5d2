"""Sums over records in groups, a block of records after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

S = TypeVar("S")

# Most records of a block.
MOST_IN_BLOCK = 32


def of_records(z: Num[Array, "G r ..."], effects: Float[Array, "n r"], index: Int[Array, " n"]) -> Num[Array, "n ..."]:
    """``w_i·z_g(i)``."""
    own = z if z.shape[0] == 1 else z[index]
    return jnp.sum(effects.reshape(*effects.shape, *(1,) * (z.ndim - 2)) * own, 1)


def by_group(values: Num[Array, "n ..."], index: Int[Array, " n"], groups: int) -> Num[Array, "G ..."]:
    """Sums over the records of each group, which are together."""
    if groups == 1:
        return jnp.sum(values, 0, keepdims=True)
    return jax.ops.segment_sum(values, index, groups, indices_are_sorted=True)


def block_size(records: int) -> int:
    """Records of a block: whole vectors, and few, so that small sites that are padded skip most of their padding."""
    return next((size for size in range(MOST_IN_BLOCK, 7, -8) if records % size == 0), records)


def in_blocks(
    block: Callable[[Callable[[Array], Array], S], S], size: int, records: Num[Array, ""], start: S
) -> S:  # fmt: skip
    """``sums = block(cut, sums)`` for one block of records after the other; blocks of padding alone are left out.

    Parameters
    ----------
    block : callable
        ``cut`` takes the block's records of an array.
    size : int
        The length of these arrays.
    records : array of shape ()
        How many of them are not padding, which is at the end.
    start : pytree of arrays
        The sums before the first block.
    """
    step = block_size(size)

    def one(k, sums):
        return block(lambda x: jax.lax.dynamic_slice_in_dim(x, k * step, step), sums)

    return jax.lax.fori_loop(0, jnp.ceil(records / step).astype(int), one, start)
