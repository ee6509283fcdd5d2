"""Draws are a pure function of key, chain, plan and count: with the bits of Threefry."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from fedpdmc._jax.random_streams import chain_keys, exponentials, logarithm, normals, threefry, uniforms

pytestmark = pytest.mark.usefixtures("double")

CHAINS = 5


def draw(keys, number, count=3, draws=0):
    return np.asarray(uniforms(keys, jnp.full(len(keys), number), jnp.full(len(keys), draws), count))


def test_threefry_gives_the_published_bits():
    # Random123, kat_vectors: threefry2x32 with 20 rounds.
    known = [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ]
    for key, counter, bits in known:
        found = threefry(*((jnp.uint32(x), jnp.uint32(y)) for x, y in (key, counter)))
        assert tuple(int(x) for x in found) == bits


def test_uniforms_are_in_the_unit_interval_and_of_64_bits():
    u = draw(chain_keys(jax.random.key(0), CHAINS), 0, count=4000)
    assert u.dtype == np.float64 and u.shape == (4000, CHAINS)
    assert u.min() >= 0 and u.max() < 1
    assert abs(u.mean() - 0.5) < 6 * np.sqrt(1 / 12 / u.size)
    assert len(np.unique(u)) == u.size


def test_chains_plans_and_draws_have_randomness_of_their_own():
    keys = chain_keys(jax.random.key(0), CHAINS)
    number, draws = (jnp.asarray(x.ravel()) for x in np.meshgrid(np.arange(20), np.arange(20)))
    everything = [uniforms(jnp.tile(key, (400, 1)), number, draws, 3) for key in keys]
    assert len(np.unique(everything)) == 20 * 20 * 3 * CHAINS


def test_a_chain_draws_the_same_beside_any_number_of_others():
    few, many = (draw(chain_keys(jax.random.key(0), n), 3) for n in (CHAINS, 16))
    np.testing.assert_array_equal(few, many[:, :CHAINS])


def test_transforms_are_finite_at_both_ends():
    ends = jnp.asarray([0.0, 2.0**-52, 0.5, 1 - 2.0**-52])
    assert np.all(np.isfinite(exponentials(ends))) and np.all(np.isfinite(normals(ends)))
    np.testing.assert_allclose(exponentials(ends)[:2], [0.0, 2.0**-52], rtol=1e-12)
    np.testing.assert_allclose(normals(ends)[2], 0.0, atol=1e-15)


def test_logarithms_are_right_to_the_last_place():
    x = np.concatenate([np.random.default_rng(5).random(10**5), 2.0 ** -np.arange(1, 60), [1.0, 1 - 2.0**-53, 3.7e8]])
    exact = np.log(x.astype(np.longdouble))
    error = np.abs(np.asarray(logarithm(jnp.asarray(x))) - exact)
    assert np.all(error <= np.spacing(np.abs(exact.astype(float))))


def test_normals_are_quantiles_to_the_last_places():
    u = np.concatenate(
        [np.random.default_rng(6).random(10**5), [0.0, 2.0**-52, 1e-9, 1e-14, 0.075, 0.925, 1 - 2.0**-52]]
    )
    u = np.round(u * 2.0**52) / 2.0**52
    np.testing.assert_allclose(normals(jnp.asarray(u)), special.ndtri(u + 2.0**-53), rtol=2e-15, atol=2e-15)
