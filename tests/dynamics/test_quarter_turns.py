"""Turns: phases that are spread, and velocities with the same bits in every program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import fedpdmc as fp
from fedpdmc._jax import random_streams as streams
from fedpdmc._jax.compilation import compiled
from fedpdmc.dynamics import QUARTER, first_waits, turn_durations, turn_velocities
from fedpdmc.errors import InputError

pytestmark = pytest.mark.usefixtures("double")

CHAINS, DIM = 16, 3


@pytest.mark.parametrize("chains", [1, 2, 16, 64, 1000])
def test_the_phases_of_chains_are_spread_evenly_and_do_not_depend_on_their_number(chains):
    waits = first_waits(chains)
    assert np.all((waits > 0) & (waits < QUARTER))
    np.testing.assert_array_equal(waits, first_waits(2000)[:chains])
    gaps = np.diff(np.sort(np.concatenate([waits, [waits.min() + QUARTER]])))
    assert gaps.max() < 3 * QUARTER / chains + 1e-12


def test_segments_between_turns_are_a_quarter_period_and_end_at_the_horizon():
    made = turn_durations(np.array([0.3, 1.0, 0.3]), np.array([5.0, 0.6, 0.3 + QUARTER]), 5)
    np.testing.assert_array_equal(made[0, :3], [0.3, QUARTER, QUARTER])
    np.testing.assert_allclose(made.sum(1), [5.0, 0.6, 0.3 + QUARTER])
    np.testing.assert_array_equal((made > 0).sum(1), [5 - 1, 1, 2])


def in_numpy(u):
    """The normals of these uniforms, operation by operation: nothing can be fused."""

    def ratio(r, coefficients):
        above, below = (np.full_like(r, part[-1]) for part in coefficients)
        for p, q in zip(coefficients[0][-2::-1], coefficients[1][-2::-1], strict=True):
            above, below = above * r + p, below * r + q
        return above / below

    def logarithm(x):
        raised = x.view(np.uint64) + (streams.ONE - streams.ROOT_HALF)
        k = ((raised >> np.uint64(52)) | streams.EXPONENT_OF_2_52).view(np.float64) - (2.0**52 + 1023)
        f = ((raised & streams.MANTISSA) + streams.ROOT_HALF).view(np.float64) - 1.0
        s, rest = f / (2.0 + f), np.full_like(f, streams.LOG_SERIES[-1])
        for coefficient in streams.LOG_SERIES[-2::-1]:
            rest = rest * (s * s) + coefficient
        half = 0.5 * f * f
        return k * streams.LN2_HIGH - ((half - (s * (half + rest * (s * s)) + k * streams.LN2_LOW)) - f)

    q = u - 0.5 + 2.0**-53
    r = np.sqrt(-logarithm(0.5 - np.abs(q)))
    tail = np.sign(q) * np.where(r <= 5.0, ratio(r - 1.6, streams.TAIL), ratio(r - 5.0, streams.FAR_TAIL))
    return np.where(np.abs(q) <= 0.425, q * ratio(0.180625 - q * q, streams.MIDDLE), tail)


def test_velocities_at_turns_have_the_bits_that_the_arithmetic_fixes():
    """Compiled with fused operations allowed, they are those of separate operations; plain normals need not be."""
    keys, first = streams.chain_keys(jax.random.key(3), CHAINS), jnp.arange(CHAINS) * 1000
    found = np.asarray(compiled(lambda k, n: turn_velocities(k, n, 200, DIM))(keys, first))
    uniform = streams.unit_interval(
        *streams.threefry(
            (keys[None, None, :, 0], keys[None, None, :, 1]),
            (
                jnp.broadcast_to((first[None] + jnp.arange(200)[:, None])[:, None], (200, DIM, CHAINS)).astype(
                    jnp.uint32
                ),
                jnp.broadcast_to(jnp.arange(DIM)[None, :, None], (200, DIM, CHAINS)).astype(jnp.uint32),
            ),
        )
    )
    wanted = np.swapaxes(in_numpy(np.array(uniform)), 1, 2)
    np.testing.assert_array_equal(found, wanted)
    assert stats.kstest(found.ravel(), "norm").pvalue > 1e-3
    # A turn has its velocity whatever else is made with it, and however many chains there are.
    alone = np.asarray(compiled(lambda k, n: turn_velocities(k, n, 1, DIM))(keys[4:5], first[4:5] + 7))
    np.testing.assert_array_equal(alone[0, 0], found[7, 4])


def test_far_out_the_bits_are_fixed_too():
    u = np.concatenate([2.0 ** -np.arange(1.0, 53.0), 1 - 2.0 ** -np.arange(1.0, 53.0), [0.0]])
    found = compiled(streams.portable_normals)(jnp.asarray(u), jnp.zeros(len(u), int))
    np.testing.assert_array_equal(found, in_numpy(u))


def test_the_name_of_turns_or_a_rate_and_nothing_else():
    assert fp.Boomerang().turns and fp.Boomerang(refresh="quarter-turns") == fp.Boomerang()
    assert not fp.Boomerang(refresh=1.2).turns and fp.Boomerang(refresh=1.2).refresh_rate == 1.2
    assert fp.FactorisedBoomerang("quarter-turns", 0.1).turns and not fp.FactorisedBoomerang().turns
    assert repr(fp.Boomerang()) == "Boomerang(refresh='quarter-turns')"
    for wrong in ("half-turns", -1.0, float("nan")):
        with pytest.raises(InputError, match=r"^Boomerang\(refresh\)"):
            fp.Boomerang(refresh=wrong)
