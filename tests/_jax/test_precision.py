"""64 bits within the package, whatever the caller's setting, and the caller's setting left alone."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.support import ZIGZAG, default_run, hospitals, prior, short_run, zigzag_run

import fedpdmc as fp


def floats(post):
    yield from (post.mean(), post.cov(), post.draws(5), post.expectation(lambda x: x))
    yield from (post.skeleton.t, post.skeleton.a, post.skeleton.v)


@pytest.mark.parametrize("make", [default_run, zigzag_run])
def test_results_are_numpy_arrays_of_64_bits(make):
    for array in floats(make()):
        assert type(array) is np.ndarray and array.dtype == np.float64
    post = make()
    for count in (post.events, post.messages, post.bytes, post.gradient_evaluations):
        assert type(count) is np.ndarray and count.dtype == np.int64


def test_a_small_difference_of_large_numbers_survives():
    y = 1.0 + 1e-12 * np.arange(4.0)[:, None]
    site = fp.Site(fp.models.linear(np.ones((4, 1)), y[:, 0], scale=1e-13), name="fine")
    made = fp.laplace([site])
    assert float(made.center[0]) == pytest.approx(1.0 + 1.5e-12, abs=1e-15)


def test_input_of_32_bits_is_taken():
    start = jnp.asarray([0.5, 2.0])
    assert start.dtype == jnp.float32
    reference = fp.Reference(jnp.zeros(2), jnp.ones(2))
    post = short_run(dynamics=ZIGZAG, duration=1.0, burn_in=0.0, init=start, reference=reference)
    same = short_run(dynamics=ZIGZAG, duration=1.0, burn_in=0.0, init=[0.5, 2.0])
    np.testing.assert_array_equal(post.skeleton.t, same.skeleton.t)
    assert post.mean().dtype == np.float64


def test_the_callers_precision_is_left_alone():
    for setting in (False, True):
        with jax.enable_x64(setting):
            post = short_run(dynamics=ZIGZAG, duration=1.0)
            post.summary()
            fp.laplace(hospitals(), prior())
            assert jax.config.jax_enable_x64 is setting
            assert jnp.zeros(1).dtype == (jnp.float64 if setting else jnp.float32)


def test_the_callers_precision_is_left_alone_after_an_error():
    with pytest.raises(fp.models.InputError):
        short_run(chains=0)
    assert jnp.zeros(1).dtype == jnp.float32


def test_the_same_bits_come_from_another_thread_and_precision():
    results = {}

    def work():
        post = short_run(dynamics=ZIGZAG, burn_in=1.0)
        results["path"], results["mean"] = post.skeleton, post.mean()
        results["default"] = jnp.zeros(1).dtype

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert results["default"] == jnp.float32 == jnp.zeros(1).dtype
    np.testing.assert_array_equal(results["mean"], zigzag_run().mean())
    for one, other in zip(results["path"], zigzag_run().skeleton, strict=True):
        np.testing.assert_array_equal(one, other)
    with jax.enable_x64(True):
        wide = short_run(dynamics=ZIGZAG, burn_in=1.0)
    np.testing.assert_array_equal(wide.skeleton.t, zigzag_run().skeleton.t)
