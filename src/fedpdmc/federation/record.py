"""The knots of a chunk as the compiled loop writes them down."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from fedpdmc.coordinator import Knots
from fedpdmc.skeleton import Chunk

# A record is kept as it is if at least this share of it is knots.
LEAST_FILLED = 0.5


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
        numbers, valid = numbers.reshape(chains, rows * segments, width), valid.reshape(chains, rows * segments)
        counts = np.count_nonzero(valid, 1)
        most = int(counts.max(initial=0))
        if most > LEAST_FILLED * self.valid[0].size:
            return Chunk(numbers, valid)
        # A view would keep the whole record: of knots that are few, or mostly void, copies are kept.
        order = np.argsort(~valid, 1, kind="stable")[:, :most]
        return Chunk(np.take_along_axis(numbers, order[..., None], 1), np.arange(most) < counts[:, None])
