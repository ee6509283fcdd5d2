"""The buffer of knots that the compiled loop fills in one chunk."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt8

from fedpdmc.results.skeleton import Chunk
from fedpdmc.sampling.coordinator import Knots

# A record is kept as it is if at least this share of it is knots.
LEAST_FILLED = 0.5


class Record(eqx.Module):
    """Rows of knots, chain after chain.

    Attributes
    ----------
    numbers : (C, rows, S, 1 + d)
        Time and position of a knot side by side: one write for each chain and row.
    velocities : (C, rows, S, d), or (C, rows, S, ⌈d/8⌉) bytes
        Velocities, or the bits of their signs as `fedpdmc.results.skeleton.signs` has them.
    valid : (C, rows, S)
    asked : (sites, C, rows), optional
        Number of the plan that a site was asked about in a row, −1 if it was not; None where every site always is.
    """

    numbers: Float[Array, "C rows S n"]
    velocities: Float[Array, "C rows S d"] | UInt8[Array, "C rows S bytes"]
    valid: Bool[Array, "C rows S"]
    asked: Int[Array, "sites C rows"] | None = None

    @classmethod
    def empty(cls, rows: int, chains: int, dim: int, segments: int, signs: bool, sites: int | None = None) -> Record:
        """No knots yet. ``signs``: of velocities they are all that is kept; ``sites``: it is noted who was asked."""
        shape, asked = (chains, rows, segments), None if sites is None else jnp.full((sites, chains, rows), -1)
        velocities = jnp.zeros((*shape, -(-dim // 8)), jnp.uint8) if signs else jnp.zeros((*shape, dim))
        return cls(jnp.zeros((*shape, 1 + dim)), velocities, jnp.zeros(shape, bool), asked)

    def written(self, knots: Knots, row: Int[Array, ""], asked: Int[Array, "sites C"] | None = None) -> Record:
        """The record with the knots of one round in the given row."""
        packed = self.velocities.dtype == jnp.uint8
        velocities = jnp.packbits(knots.v < 0, axis=-1, bitorder="little") if packed else knots.v
        numbers = jnp.concatenate([knots.t[..., None], knots.a], -1)
        return Record(
            lax.dynamic_update_index_in_dim(self.numbers, numbers, row, 1),
            lax.dynamic_update_index_in_dim(self.velocities, velocities, row, 1),
            lax.dynamic_update_index_in_dim(self.valid, knots.valid, row, 1),
            self.asked if asked is None else lax.dynamic_update_index_in_dim(self.asked, asked, row, 2),
        )

    def questions(self, rows: int, first: np.ndarray) -> list[np.ndarray] | None:
        """For each site the plans in the first rows that it was asked about, counted from each chain's ``first``."""
        if self.asked is None:
            return None
        asked = np.asarray(self.asked)[:, :, :rows]
        return [(site - first[:, None])[site >= 0] for site in asked]

    def on_device(self, rows: int) -> Chunk:
        """At least the first rows, where they were made: they are copied to the host when they are read.

        Half of the record, a quarter and so on, as rows allow, because every length needs its own compiled program.
        """
        kept = self.valid.shape[1]
        while rows <= -(-kept // 2) < kept:
            kept = -(-kept // 2)
        arrays: list[Any] = [
            (x if kept == x.shape[1] else x[:, :kept]).reshape(x.shape[0], -1, *x.shape[3:])
            for x in (self.numbers, self.velocities, self.valid)
        ]
        return Chunk(*arrays)

    def chunk(self, rows: int) -> Chunk:
        """The first rows as arrays of the skeleton."""
        numbers, velocities, valid = (
            np.asarray(x)[:, :rows].reshape(x.shape[0], rows * x.shape[2], *x.shape[3:])
            for x in (self.numbers, self.velocities, self.valid)
        )
        counts = np.count_nonzero(valid, 1)
        most = int(counts.max(initial=0))
        if most > LEAST_FILLED * self.valid.shape[1] * self.valid.shape[2]:
            return Chunk(numbers, velocities, valid)
        # A view would keep the whole record: of knots that are few, or mostly void, copies are kept.
        order = np.argsort(~valid, 1, kind="stable")[:, :most, None]
        numbers, velocities = (np.take_along_axis(x, order, 1) for x in (numbers, velocities))
        return Chunk(numbers, velocities, np.arange(most) < counts[:, None])
