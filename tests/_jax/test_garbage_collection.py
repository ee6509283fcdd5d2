"""Garbage is not collected while programs are made, and is again afterwards."""

import gc
import threading

import jax.numpy as jnp
import numpy as np
import pytest

import fedpdmc as fp
from fedpdmc._jax.garbage_collection import Uncollected


@pytest.fixture(autouse=True)
def collected():
    """Tests begin and end with a collector that works."""
    assert gc.isenabled()
    yield
    assert gc.isenabled()


def test_nested_and_after_errors():
    with Uncollected():
        assert not gc.isenabled()
        with pytest.raises(ValueError, match="inside"), Uncollected():
            raise ValueError("inside")
        assert not gc.isenabled()
    assert gc.isenabled()


def test_stays_off_for_those_who_turned_it_off():
    gc.disable()
    try:
        with Uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_threads_end_in_any_order():
    first, second = threading.Event(), threading.Event()

    @Uncollected()
    def work():
        first.set()
        assert second.wait(10)

    thread = threading.Thread(target=work)
    with Uncollected():
        thread.start()
        assert first.wait(10)
    assert not gc.isenabled()
    second.set()
    thread.join()
    assert gc.isenabled()


def test_a_run_collects_between_its_chunks():
    y, seen = np.random.default_rng(1).normal(1.0, 2.0, 30), []

    def likelihood(x, data):
        seen.append(gc.isenabled())
        return 0.5 * jnp.sum((data["y"] - x[0]) ** 2)

    post = fp.sample(
        [fp.Site(likelihood, data={"y": y}, name="a")], fp.models.normal_prior(1), ess=100, seed=1, progress=False
    )
    assert gc.isenabled()
    assert not seen[0]
    assert abs(post.mean()[0] - y.mean()) < 0.5
