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
    asked : (sites, C, rows), optional
        Number of the plan that a site was asked about in a row, −1 if it was not; None where every site always is.
    """

    numbers: Float[Array, "C rows S n"]
    valid: Bool[Array, "C rows S"]
    asked: Int[Array, "sites C rows"] | None = None

    @classmethod
    def empty(cls, rows: int, chains: int, dim: int, segments: int, sites: int | None = None) -> Record:
        """No knots yet; ``sites`` where it is to be noted who was asked."""
        asked = None if sites is None else jnp.full((sites, chains, rows), -1)
        return cls(jnp.zeros((chains, rows, segments, 1 + 2 * dim)), jnp.zeros((chains, rows, segments), bool), asked)

    def written(self, knots: Knots, row: Int[Array, ""], asked: Int[Array, "sites C"] | None = None) -> Record:
        """With the knots of one round in the given row."""
        numbers = jnp.concatenate([knots.t[..., None], knots.a, knots.v], -1)
        return Record(
            jax.lax.dynamic_update_index_in_dim(self.numbers, numbers, row, 1),
            jax.lax.dynamic_update_index_in_dim(self.valid, knots.valid, row, 1),
            self.asked if asked is None else jax.lax.dynamic_update_index_in_dim(self.asked, asked, row, 2),
        )

    def questions(self, rows: int, first: np.ndarray) -> list[np.ndarray] | None:
        """For each site the plans in the first rows that it was asked about, counted from each chain's ``first``."""
        if self.asked is None:
            return None
        asked = np.asarray(self.asked)[:, :, :rows]
        return [(site - first[:, None])[site >= 0] for site in asked]

    def chunk(self, rows: int) -> Chunk:
        """The first rows as arrays of the skeleton."""
        numbers, valid = np.asarray(self.numbers)[:, :rows], np.asarray(self.valid)[:, :rows]
        chains, _, segments, width = numbers.shape
        numbers, valid = numbers.reshape(chains, rows * segments, width), valid.reshape(chains, rows * segments)
        counts = np.count_nonzero(valid, 1)
        most = int(counts.max(initial=0))
        if most > LEAST_FILLED * self.valid.shape[1] * segments:
            return Chunk(numbers, valid)
        # A view would keep the whole record: of knots that are few, or mostly void, copies are kept.
        order = np.argsort(~valid, 1, kind="stable")[:, :most]
        return Chunk(np.take_along_axis(numbers, order[..., None], 1), np.arange(most) < counts[:, None])
