"""Trees of arrays with the chains along the first axis."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool


def where_chains(chains: Bool[Array, " C"], new, old):
    """A tree of arrays that are ``new`` on some chains and ``old`` on the others."""

    def choose(x, y):
        return jnp.where(chains.reshape(chains.shape + (1,) * (x.ndim - 1)), x, y)

    return jax.tree.map(choose, new, old)


def scan_segments(segment, carry, chances):
    """Scan ``segment`` over the random inputs of each segment, and stack its outputs along axis 1."""
    if chances[0].shape[0] == 1:
        carry, out = segment(carry, jax.tree.map(lambda x: x[0], chances))
        return carry, jax.tree.map(lambda x: x[:, None], out)
    carry, out = jax.lax.scan(segment, carry, chances)
    return carry, jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), out)
