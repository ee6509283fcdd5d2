"""The pass over the records as one kernel of a GPU: nothing but the sums is written to memory.

The compiler makes of the same sums as array operations one array for every node, which is written to memory and read again:
two thirds of the time of an iteration. Here a program has a tile of chains and a block of records, takes some records at a
time and keeps the sums in registers. With few columns it makes the predictors too; with more a matrix product makes them
before. The numbers of a record and of the sums are the same, in another order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float32

# Threads of a program, in units of 32.
WARPS = 4
# Numbers of the products that are in memory at a time.
MOST_NUMBERS = 2**27

Sums = tuple[Float32[Array, "B K C"], Float32[Array, "B C"]]


def summed(
    value: Callable,
    error: Callable,
    rows: Float32[Array, "B b d"],
    terms: Float32[Array, "B b m"],
    both: Float32[Array, "d two_C"],
    of_chains: tuple[Float32[Array, "K C"], Float32[Array, "K C"], Float32[Array, " C"]],
    tile: tuple[int, int],
    products: Callable[..., Sequence[Float32[Array, "n two_C"]]] | None = None,
    interpret: bool = False,
) -> Sums:
    """Sums of ``value(α, β, cos, sin, c)`` and ``error(α, β, slip, c)`` over the records of every block.

    ``of_chains`` are the cosines, sines and slip. A ``tile`` is the records that are taken at a time, of which a
    block has a multiple, and the chains of a program. ``products(rows, both)`` are the parts whose sum is ``(α, β)``; where
    there is none the kernel multiplies.
    """
    chains, blocks, dim = both.shape[1] // 2, rows.shape[0], rows.shape[2]
    beyond = -chains % tile[1]

    def padded(x):
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, beyond)]) if beyond else x

    halves = padded(both[:, :chains]), padded(both[:, chains:])
    sums = functools.partial(_sums, value, error, tile, interpret, [padded(x) for x in of_chains])
    if products is None:
        found = sums(_by_column, terms, *halves, rows)
    else:
        joined = jnp.concatenate(halves, 1) if beyond else both
        at_a_time = _at_a_time(blocks, MOST_NUMBERS // (rows.shape[1] * joined.shape[1]))

        def some(args):
            rows, terms = args
            parts = products(rows.reshape(-1, dim), joined)
            return sums(_by_part, terms, *(x.reshape(*rows.shape[:2], -1) for x in parts))

        turns = [x.reshape(blocks // at_a_time, at_a_time, *x.shape[1:]) for x in (rows, terms)]
        found = jax.lax.map(some, tuple(turns)) if at_a_time < blocks else some((rows, terms))
        found = [x.reshape(blocks, *x.shape[x.ndim - k :]) for x, k in zip(found, (2, 1), strict=True)]
    values, errors = found
    return values[..., :chains], errors[..., :chains]


def _at_a_time(blocks: int, most: int) -> int:
    """The largest divisor of the number of blocks that is not above ``most``, or one."""
    return max(k for k in range(1, blocks + 1) if blocks % k == 0 and k <= max(most, 1))


def _by_column(arrays, block, here, first, own_chains):
    """Predictors from positions, velocities and the design."""
    *halves, rows = arrays
    x = [rows[block, here, j][:, None] for j in range(rows.shape[2])]
    own = pl.ds(first, own_chains)
    return (functools.reduce(jnp.add, [x[j] * y[j, own][None] for j in range(len(x))]) for y in halves)


def _by_part(parts, block, here, first, own_chains):
    """Predictors from the parts of the products: of positions, then of velocities."""
    places = pl.ds(first, own_chains), pl.ds(first + parts[0].shape[2] // 2, own_chains)
    return (functools.reduce(jnp.add, [x[block, here, own] for x in parts]) for own in places)


def _sums(value, error, tile, interpret, of_chains, predictors, terms, *arrays) -> Sums:
    """The kernel; ``predictors`` makes (α, β) of a tile from the arrays."""
    (blocks, records, count), (nodes, width), (at_a_time, own_chains) = terms.shape, of_chains[0].shape, tile

    def kernel(cos, sin, slip, terms, *rest):
        *arrays, values, errors = rest
        first, block = pl.program_id(0) * own_chains, pl.program_id(1)
        own = pl.ds(first, own_chains)
        angles = [(cos[k, own][None], sin[k, own][None]) for k in range(nodes)]
        size = slip[own][None]

        def some(i, totals):
            here = pl.ds(i * at_a_time, at_a_time)
            c = [terms[block, here, k][:, None] for k in range(count)]
            alpha, beta = predictors(arrays, block, here, first, own_chains)
            new = [value(alpha, beta, *angle, c) for angle in angles]
            return tuple(x + y for x, y in zip(totals, (*new, error(alpha, beta, size, c)), strict=True))

        zero = jnp.zeros(tile, jnp.float32)
        totals = jax.lax.fori_loop(jnp.int32(0), jnp.int32(records // at_a_time), some, (zero,) * (nodes + 1))
        for k in range(nodes):
            values[block, k, own] = jnp.sum(totals[k], 0)
        errors[block, own] = jnp.sum(totals[nodes], 0)

    values, errors = pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((blocks, nodes, width), (blocks, width))],
        grid=(width // own_chains, blocks),
        interpret=interpret,
        compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=1),
    )(*of_chains, terms, *arrays)
    return values, errors
