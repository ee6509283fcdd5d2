"""Bent coordinates: derivative, inverse, and bounds in the complex plane."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedpdmc._jax.precision import double_precision
from fedpdmc.whitening import Bend, Reference, bent, enclosed, increasing, log_volume, steepness, straight

NUMBERS = np.array([-0.3, 0.4, 0.1, 0.3, 0.05, 0.02])


@double_precision
def test_steepness_is_the_derivative_and_the_map_increases():
    u = jnp.linspace(-4, 4, 33)
    slope = jax.vmap(jax.grad(lambda x: bent(x, NUMBERS)))(u)
    np.testing.assert_allclose(steepness(u, NUMBERS), slope, rtol=1e-12)
    np.testing.assert_allclose(log_volume(u, NUMBERS), np.log(slope), rtol=1e-12)
    assert np.all(np.asarray(slope) > 0)
    np.testing.assert_allclose(bent(np.asarray(u), straight(1)[:, 0]), u)


@double_precision
def test_reference_maps_there_and_back():
    bend = Bend((1,), jnp.asarray(NUMBERS[:, None]))
    reference = Reference(jnp.array([0.2, -0.1]), jnp.array([[0.5, 0.0], [0.3, 1.1]]), bend=bend)
    a = np.random.default_rng(0).normal(size=(3, 5, 2))
    x = reference.to_x(a)
    straightened = np.asarray(reference.center) + a @ np.asarray(reference.scale_tril).T
    np.testing.assert_allclose(x[..., 0], straightened[..., 0])
    np.testing.assert_allclose(x[..., 1], bent(straightened[..., 1], NUMBERS))
    np.testing.assert_allclose(reference.to_x(jnp.asarray(a)), x, rtol=1e-13)
    np.testing.assert_allclose(reference.to_a(x), a, atol=1e-10)
    far = np.array([[0.0, -400.0], [0.0, 300.0]])
    np.testing.assert_allclose(reference.to_x(reference.to_a(far)), far, rtol=1e-9)


@double_precision
def test_enclosures_hold_the_map_at_complex_points():
    rng = np.random.default_rng(1)
    for _ in range(200):
        numbers = rng.exponential(size=6) * rng.integers(0, 2, 6)
        numbers[1] += 0.1
        now, wide, aside = 2 * rng.normal(), 2 * rng.random(2), 2 * rng.random()
        u = now + rng.uniform(-wide[0], wide[1], 100) + 1j * rng.uniform(-aside, aside, 100)
        slope, least, most = enclosed(jnp.asarray(now - wide[0]), now + wide[1], aside, jnp.asarray(numbers))
        value = bent(u, numbers)
        assert np.all(np.abs(steepness(u, numbers)) <= slope * (1 + 1e-12))
        assert np.all(np.abs(value.imag) <= slope * aside * (1 + 1e-12))
        assert np.all((value.real >= least - 1e-9) & (value.real <= most + 1e-9))


def test_packed_and_unpacked_or_refused():
    bend = Bend((1,), jnp.asarray(NUMBERS[:, None]))
    again = Bend.unpacked(bend.packed())
    assert again is not None
    assert again.index == (1,)
    np.testing.assert_array_equal(again.numbers, bend.numbers)
    assert Bend.unpacked({}) is None
    for place, value in ((1, 0.0), (2, -1.0), (3, np.nan)):
        wrong = NUMBERS.copy()
        wrong[place] = value
        assert not increasing(wrong)
        with pytest.raises(ValueError, match="increase"):
            Bend.unpacked({"bend_index": np.array([1]), "bend_numbers": wrong[:, None]})
