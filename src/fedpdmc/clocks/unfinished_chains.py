"""Batches of the chains that still have work, so that finished chains cost nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

# Chains whose records are passed over together.
MOST_LANES, LEAST_LANES = 16, 8
# Chains in one batch: an eighth of them, within these limits.
MOST_SERVED = 64

S = TypeVar("S")


def lane_count(chains: int) -> int:
    """How many chains are walked at a time: enough to fill vectors, few enough to stay in the cache."""
    return min(chains, max(LEAST_LANES, min(MOST_LANES, chains // 4)))


def in_lanes(step: Callable[[Any, Any, Any], Any], state: Any, path: Any, keys: Any, fair: bool = False) -> Any:
    """``step`` on some of the chains that are not done. The state holds a ``walk``, and arrays with a row for each chain.

    ``path`` and ``keys`` have rows for the chains too. If ``fair``, the chains with the fewest passes so far are taken, so
    that with short plans no chain waits until others have reached the end of the block; else the first ones.
    """
    walk = state.walk
    chains = walk.done.shape[0]
    lanes = lane_count(chains)
    if lanes == chains:
        return step(state, path, keys)
    if fair:
        _, index = jax.lax.top_k(jnp.where(walk.done, jnp.iinfo(walk.passes.dtype).min, -walk.passes), lanes)
        index = jnp.where(walk.done[index], chains, index)
    else:
        index = first_of(~walk.done)[:lanes]
    some = gathered(index, (state, path, keys))
    some = eqx.tree_at(lambda s: s[0].walk.done, some, some[0].walk.done | (index >= chains))
    return scattered(index, state, some[0], step(*some))


def first_of(which: Bool[Array, " C"]) -> Int[Array, " C"]:
    """The places of these chains, in order; the number of chains in place of all others.

    By a sort: the sums of ``jnp.nonzero`` are twenty kernels to compile.
    """
    chains = which.shape[0]
    return jnp.sort(jnp.where(which, jnp.arange(chains), chains))


def gathered(index: Int[Array, " L"], rows: S) -> S:
    """Some rows of all arrays, the last one in place of those beyond it."""
    return jax.tree.map(lambda x: x.at[index].get(mode="clip"), rows)


def scattered(index: Int[Array, " L"], old: S, some: S, new: S) -> S:
    """The old rows with the new ones in their places; ``some`` are those that were gathered.

    Arrays that are still the gathered ones are the old ones. Each chain looks up its new row: a row that is written to its
    place is another kernel, or a loop, to compile.
    """
    chains = jax.tree.leaves(old)[0].shape[0]
    own = index[:, None] == jnp.arange(chains)
    place = jnp.sum(jnp.where(own, jnp.arange(1, index.shape[0] + 1)[:, None], 0), 0)

    def put(before, gathered, after):
        if gathered is after:
            return before
        fresh = (place > 0).reshape(chains, *(1,) * (before.ndim - 1))
        return jnp.where(fresh, after.at[place - 1].get(mode="clip"), before)

    return jax.tree.map(put, old, some, new)


def in_turns(
    function: Callable[[Any], Shaped[Array, "L n"]], which: Bool[Array, " C"], rows: Any, width: int
) -> Float[Array, "C n"]:
    """``function`` of the rows of these chains, some at a time; zeros for the others.

    It gathers few arrays and writes one back, because each of them adds a kernel to compile.
    """
    chains = which.shape[0]
    lanes = lane_count(chains)
    # These chains first; all others are beyond the last row, which ends the loop: a sum is three kernels to compile.
    order = jnp.pad(first_of(which), (0, lanes), constant_values=chains)

    def some(carry):
        turn, out = carry
        index = jax.lax.dynamic_slice(order, (turn * lanes,), (lanes,))
        return turn + 1, out.at[index].set(function(gathered(index, rows)), mode="drop")

    start = (jnp.zeros((), order.dtype), jnp.zeros((chains, width)))
    return jax.lax.while_loop(lambda carry: order[carry[0] * lanes] < chains, some, start)[1]


def enough(which: Bool[Array, "k C"], moving: Bool[Array, " C"]) -> Bool[Array, "k C"]:
    """Of several kinds of chains those that fill a batch, or that few others are moving to join; else none of the kind."""
    counts = jnp.sum(jnp.concatenate([which, moving[None]]), 1)
    full = counts[:-1] >= jnp.minimum(lane_count(which.shape[1]), 1 + counts[-1] // LEAST_LANES)
    return which & full[:, None]


def served(
    walk: Callable[[S], Any],
    state: S,
    path: Any,
    which: Callable[[S], Any],
    inspect: Callable[[S, Any], S],
    in_rows: Callable[[S], S] = lambda state: state,
) -> S:
    """``inspect`` the waiting chains in batches, as long as there are enough of them.

    ``inspect`` keeps the rows of chains that do not wait; ``in_rows`` is its own inverse and gives a state with a row for
    each chain.
    """
    chains = walk(state).done.shape[0]
    lanes = min(chains, max(LEAST_LANES, min(MOST_SERVED, chains // LEAST_LANES)))

    def due(now):
        # If most chains wait for other sites, few are left that could join a batch.
        moving = jnp.sum(~(which(now) | walk(now).done))
        return jnp.sum(which(now)) >= jnp.minimum(lanes, 1 + moving // LEAST_LANES)

    def serve(now):
        # Those that had the fewest passes.
        passes, waiting = walk(now).passes, which(now)
        _, index = jax.lax.top_k(jnp.where(waiting, -passes, jnp.iinfo(passes.dtype).min), lanes)
        index = jnp.where(waiting[index], index, chains)
        rows = in_rows(now)
        some, own = gathered(index, (rows, path))
        return in_rows(scattered(index, rows, some, inspect(some, own)))

    return jax.lax.while_loop(due, serve, state)
