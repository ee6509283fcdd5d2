"""The knots of a chunk as the compiled loop writes them down."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from fedpdmc.coordinator import Knots
from fedpdmc.skeleton import Chunk


class Record(eqx.Module):
    """Rows of knots, chain after chain.

    Attributes
    ----------
    numbers : (C, rows, S, 1 + 2d)
        Time, position and velocity of a knot side by side: one write for each chain and row.
    valid : (C, rows, S)
    """

    numbers: Float[Array, "C rows S n"]
    valid: Bool[Array, "C rows S"]

    @classmethod
    def empty(cls, rows: int, chains: int, dim: int, segments: int) -> Record:
        """No knots yet."""
        return cls(jnp.zeros((chains, rows, segments, 1 + 2 * dim)), jnp.zeros((chains, rows, segments), bool))

    def written(self, knots: Knots, row: Int[Array, ""]) -> Record:
        """With the knots of one round in the given row."""
        numbers = jnp.concatenate([knots.t[..., None], knots.a, knots.v], -1)
        return Record(
            jax.lax.dynamic_update_index_in_dim(self.numbers, numbers, row, 1),
            jax.lax.dynamic_update_index_in_dim(self.valid, knots.valid, row, 1),
        )

    def chunk(self, rows: int) -> Chunk:
        """The first rows as arrays of the skeleton."""
        numbers, valid = np.asarray(self.numbers)[:, :rows], np.asarray(self.valid)[:, :rows]
        chains, _, segments, width = numbers.shape
        return Chunk(numbers.reshape(chains, rows * segments, width), valid.reshape(chains, rows * segments))
