"""The pass over the records as one kernel of a GPU: nothing but the sums is written to memory.

The compiler makes of the same sums as array operations a product that is written to memory and read once for every two of
them: two thirds of the time of an iteration. Here a program has a tile of chains and a block of records, takes some records
at a time and keeps the sums in registers. The numbers of a record and of the sums are the same, in another order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float32

# Threads of a program, in units of 32.
WARPS = 4


def summed(
    value: Callable,
    error: Callable,
    rows: Float32[Array, "B b d"],
    terms: Float32[Array, "B b m"],
    both: Float32[Array, "d two_C"],
    of_chains: tuple[Float32[Array, "K C"], Float32[Array, "K C"], Float32[Array, " C"]],
    tile: tuple[int, int],
    interpret: bool = False,
) -> tuple[Float32[Array, "B K C"], Float32[Array, "B C"]]:
    """Sums of ``value(α, β, cos, sin, c)`` and ``error(α, β, slip, c)`` over the records of every block.

    ``of_chains`` are the cosines, sines and slip. A ``tile`` is the records that are taken at a time, of which a
    block has a multiple, and the chains of a program.
    """
    chains, (blocks, records, dim) = both.shape[1] // 2, rows.shape
    nodes, count, (at_a_time, own_chains) = of_chains[0].shape[0], terms.shape[2], tile
    width = -(-chains // own_chains) * own_chains

    def kernel(a, v, cos, sin, slip, rows, terms, values, errors):
        own, block = pl.ds(pl.program_id(0) * own_chains, own_chains), pl.program_id(1)
        angles = [(cos[k, own][None], sin[k, own][None]) for k in range(nodes)]
        size = slip[own][None]

        def some(i, totals):
            here = pl.ds(i * at_a_time, at_a_time)
            x = [rows[block, here, j][:, None] for j in range(dim)]
            c = [terms[block, here, k][:, None] for k in range(count)]
            alpha, beta = (functools.reduce(jnp.add, [x[j] * y[j, own][None] for j in range(dim)]) for y in (a, v))
            new = [value(alpha, beta, *angle, c) for angle in angles]
            return tuple(x + y for x, y in zip(totals, (*new, error(alpha, beta, size, c)), strict=True))

        zero = jnp.zeros(tile, jnp.float32)
        totals = jax.lax.fori_loop(jnp.int32(0), jnp.int32(records // at_a_time), some, (zero,) * (nodes + 1))
        for k in range(nodes):
            values[block, k, own] = jnp.sum(totals[k], 0)
        errors[block, own] = jnp.sum(totals[nodes], 0)

    def padded(x):
        return x if width == chains else jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - chains)])

    values, errors = pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((blocks, nodes, width), (blocks, width))],
        grid=(width // own_chains, blocks),
        interpret=interpret,
        compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=1),
    )(*map(padded, (both[:, :chains], both[:, chains:], *of_chains)), rows, terms)
    return values[..., :chains], errors[..., :chains]
