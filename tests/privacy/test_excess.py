import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import fedpdmc as fp
from fedpdmc.arrivals import follow
from fedpdmc.arrivals.excess import first_excess
from fedpdmc.plan import Plan
from fedpdmc.private import chain_secrets

CHAINS, RHO = 3000, 0.8


def paths(dynamics, seed):
    """Plans of two segments, long enough for nearly all to ring."""
    rng = np.random.default_rng(seed)
    a, v = rng.normal(size=(CHAINS, 3)), rng.normal(size=(CHAINS, 2, 3))
    if dynamics.unit_speed:
        v = np.sign(v)
    duration = np.stack([rng.uniform(0, 0.5, CHAINS), np.full(CHAINS, 30.0)], 1)
    return follow(dynamics, Plan(jnp.zeros(CHAINS, int), jnp.asarray(a), jnp.asarray(duration), jnp.asarray(v)))


def compensators(dynamics, path, time, steps=401):
    """``∫ ρ |v_i| dt`` up to each time, by coordinate."""
    total = np.zeros((CHAINS, 3))
    begin, duration = np.asarray(path.begin), np.asarray(path.duration)
    for s in range(2):
        seen = np.clip(time - begin[:, s], 0, duration[:, s])
        if dynamics.unit_speed:
            total += RHO * seen[:, None]
            continue
        t = seen[:, None] * np.linspace(0, 1, steps)
        a, v = (np.asarray(x)[:, s] for x in (path.start, path.velocity))
        for i in range(3):
            speed = np.abs(v[:, i, None] * np.cos(t) - a[:, i, None] * np.sin(t))
            total[:, i] += RHO * np.trapezoid(speed, t, axis=1)
    return total


@pytest.mark.parametrize("dynamics", [fp.ZigZag(), fp.FactorisedBoomerang()], ids=["lines", "rotations"])
def test_excess_flips_ring_at_their_rate_and_with_the_right_index(double, dynamics):
    path = paths(dynamics, 3)
    time, mark = (
        np.asarray(x) for x in first_excess(dynamics, jnp.asarray(RHO), path, chain_secrets(b"k", b"p", CHAINS))
    )
    assert np.all(np.isfinite(time))
    by_coordinate = compensators(dynamics, path, time)
    assert stats.kstest(by_coordinate.sum(1), "expon").pvalue > 1e-3
    # Given the path, mark i has compensator ∫ρ|v_i|: rings and compensator agree in the mean.
    for i in range(3):
        difference = (mark == i) - by_coordinate[:, i]
        assert abs(difference.mean()) < 4 * difference.std() / np.sqrt(CHAINS)
    # Half the rate would be seen.
    assert stats.kstest(0.9 * by_coordinate.sum(1), "expon").pvalue < 1e-3


def test_a_plan_that_ends_sooner_is_silent(double):
    path = follow(
        fp.ZigZag(), Plan(jnp.zeros(2, int), jnp.zeros((2, 3)), jnp.asarray([[0.0], [1e-9]]), jnp.ones((2, 1, 3)))
    )
    time, _ = first_excess(fp.ZigZag(), jnp.asarray(1.0), path, chain_secrets(b"k", b"p", 2))
    assert not np.any(np.isfinite(np.asarray(time)))
