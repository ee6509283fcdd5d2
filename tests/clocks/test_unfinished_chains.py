"""Chains that take turns get what they would get alone."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from tests.support import DYNAMICS

from fedpdmc.clocks.base import Walk, in_lanes, lane_count

CHAINS = 40


class Countdown(eqx.Module):
    walk: Walk
    total: jax.Array


def test_every_chain_takes_its_own_steps_and_no_more(double):
    """Chain i is done after i steps, and its total is then that of steps taken alone."""

    def step(state, path, keys):
        walk = state.walk
        passes = walk.passes + ~walk.done
        done = walk.done | (passes >= path)
        new = eqx.tree_at(lambda w: (w.passes, w.done), walk, (passes, done))
        return Countdown(new, jnp.where(walk.done, state.total, state.total + keys))

    lengths, amounts = jnp.arange(CHAINS) % 23, jnp.arange(CHAINS) / 7
    idle = Walk.idle(DYNAMICS["zigzag"], CHAINS, 2)
    state = Countdown(eqx.tree_at(lambda w: w.done, idle, lengths == 0), jnp.zeros(CHAINS))
    calls, spread = 0, 0
    while not bool(jnp.all(state.walk.done)):
        state = in_lanes(step, state, lengths, amounts)
        calls += 1
        passes, open_ = np.asarray(state.walk.passes), ~np.asarray(state.walk.done)
        spread = max(spread, int(passes.max() - passes[open_].min()) if open_.any() else 0)
    assert np.array_equal(state.walk.passes, lengths)
    np.testing.assert_allclose(state.total, np.asarray(lengths) * np.asarray(amounts))
    assert calls < int(lengths.sum()) / lane_count(CHAINS) + 23
    assert spread <= 1
