"""The clock of private latents: laws of arrivals, and going back."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from tests.potentials.test_random_effects import grouped, remainder

from fedpdmc import dynamics
from fedpdmc._jax.compilation import compiled
from fedpdmc._jax.precision import double_precision
from fedpdmc._jax.random_streams import chain_keys
from fedpdmc.clocks import LatentClock, follow
from fedpdmc.clocks.private_latents import LatentWalk
from fedpdmc.plan import Plan

CHAINS, SEGMENTS = 1024, 3


@functools.cache
def clock(rate=1.0):
    model, x = grouped("poisson", sizes=(2, 3))
    part, _, _ = remainder(model, x, spread=0.6)
    return LatentClock(part, dynamics.Boomerang(), rate)


@double_precision
def plans(same=True, number=0):
    """Three segments of 1.2, 0.7 and 0.9, the same on all chains or not."""
    rng, dim = np.random.default_rng(3), clock().dim
    start, velocity = rng.normal(size=(CHAINS, dim)), rng.normal(size=(CHAINS, SEGMENTS, dim))
    if same:
        start, velocity = np.broadcast_to(start[:1], start.shape), np.broadcast_to(velocity[:1], velocity.shape)
    duration = np.broadcast_to([1.2, 0.7, 0.9], (CHAINS, SEGMENTS))
    plan = Plan(jnp.full(CHAINS, number), jnp.asarray(start), jnp.asarray(duration), jnp.asarray(velocity))
    return follow(dynamics.Boomerang(), plan)


@compiled
def walked(clock, state: LatentWalk, path, keys):
    """To the first arrival or the horizon on every chain."""
    state = clock.restart(state, jnp.ones(path.number.shape, bool), path)
    return jax.lax.while_loop(lambda s: jnp.any(~s.walk.done), lambda s: clock.step(s, path, keys), state)


settled = compiled(lambda clock, state, path, elapsed, keys: clock.settle(state, path, elapsed, elapsed >= 0, keys))


@double_precision
def test_arrivals_given_frozen_latents_have_the_rate():
    """``∫ rate`` up to the arrival is exponential, censored at its value at the horizon."""
    silent, path, keys = clock(1e-12), plans(), chain_keys(jax.random.key(1), CHAINS)
    state = silent.idle(CHAINS)
    zeta = jnp.broadcast_to(jnp.asarray([1.3, -0.9]), (CHAINS, silent.potential.latents))
    state = walked(silent, eqx.tree_at(lambda s: s.settled, state, zeta), path, keys)
    assert not np.any(state.walk.fault)
    grid = np.linspace(0, 2.8, 2801)
    segment = np.searchsorted([1.2, 1.9], grid, side="right")
    a, v = jax.vmap(lambda s, t: jax.tree.map(lambda x: x[0], path_at(path, s, t)))(
        jnp.asarray(segment), jnp.asarray(grid - np.array([0.0, 1.2, 1.9])[segment])
    )
    part: Any = silent.potential
    rate = np.maximum(part.rates(a.T, v.T, part._columns(jnp.broadcast_to(zeta[0], (len(grid), zeta.shape[1])))), 0)
    hazard = np.concatenate([[0], np.cumsum((rate[1:] + rate[:-1]) / 2 * np.diff(grid))])
    assert 0.3 < hazard[-1] < 5
    rang, time = np.asarray(state.walk.rang), np.asarray(state.walk.time)
    for quantile in (0.2, 0.5, 0.8, 1.0):
        level = quantile * hazard[-1]
        at = np.interp(level, hazard, grid)
        share, wanted = np.mean(rang & (time <= at)), 1 - np.exp(-level)
        assert abs(share - wanted) < 4 * np.sqrt(wanted * (1 - wanted) / CHAINS)


def path_at(path, segment, offset):
    one = jax.tree.map(lambda x: x[:1], path)
    return one.state(dynamics.Boomerang(), segment[None], offset[None])


@double_precision
def test_going_back_gives_the_walks_own_state():
    """At its own arrival, and at the horizon, a site is where it walked; before, at what it was; and it repeats itself."""
    own, path, keys = clock(), plans(same=False), chain_keys(jax.random.key(2), CHAINS)
    state = walked(own, own.idle(CHAINS), path, keys)
    back = settled(own, state, path, state.walk.time, keys)
    np.testing.assert_allclose(back.settled, state.zeta, rtol=1e-9, atol=1e-9)
    start = settled(own, state, path, jnp.zeros(CHAINS), keys)
    np.testing.assert_array_equal(start.settled, state.settled)
    middle = settled(own, state, path, 0.5 * state.walk.time, keys).settled
    moved = np.any(np.asarray(middle) != np.asarray(state.settled), 1)
    further = np.any(np.asarray(middle) != np.asarray(state.zeta), 1)
    assert 0.2 < moved.mean() < 0.9
    assert 0.2 < further.mean() < 0.9
    again = settled(own, walked(own, own.idle(CHAINS), path, keys), path, 0.5 * state.walk.time, keys).settled
    np.testing.assert_array_equal(middle, again)


@double_precision
def test_latents_start_standard_normal_and_differ_by_plan():
    own, path, keys = clock(), plans(), chain_keys(jax.random.key(4), CHAINS)
    state = walked(own, own.idle(CHAINS), path, keys)
    first = np.asarray(state.settled)
    assert abs(first.mean()) < 4 / np.sqrt(first.size)
    assert abs(first.var() - 1) < 4 * np.sqrt(2 / first.size)
    later = walked(own, settled(own, state, path, state.walk.time, keys), plans(number=1), keys)
    assert not np.any(np.asarray(later.walk.time)[np.asarray(later.walk.rang)] == 0)
    np.testing.assert_allclose(later.settled, state.zeta, rtol=1e-9, atol=1e-9)
