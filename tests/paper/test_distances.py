"""The floor must tell an exact run from one that is off."""

from types import SimpleNamespace

import numpy as np
import pytest

from paper.distances import Exact, bias, effective_size, measure, ratio

RUNS, DRAWS, EACH = 20, 600, 4


def paths(rng, shift=0.0, stretch=1.0):
    """Runs in which every draw stays for a while: a correlation of known length."""
    fresh = stretch * rng.normal(size=(RUNS, DRAWS // EACH, 3)) + shift
    return np.repeat(fresh, EACH, axis=1)


@pytest.fixture(scope="module")
def exact():
    return Exact(np.random.default_rng(1).normal(size=(8, 4000, 3)))


def posterior(draws):
    return SimpleNamespace(draws=lambda n: draws, names=["x", "y", "z"], most_draws=DRAWS)


def test_the_effective_size_is_that_of_the_draws_made(exact):
    sizes = [effective_size(paths(np.random.default_rng(2))[..., i], exact.reference[:, i]) for i in range(3)]
    assert np.mean(sizes) == pytest.approx(DRAWS / EACH, rel=0.35)


def test_exact_runs_lie_on_the_floor(exact):
    found = ratio(measure(posterior(paths(np.random.default_rng(3))), exact, seed=4))
    assert found.on_the_floor and abs(found.value - 1) < 0.15


@pytest.mark.parametrize(("shift", "stretch"), [(0.15, 1.0), (0.0, 1.3)])
def test_runs_that_are_off_do_not(exact, shift, stretch):
    found = ratio(measure(posterior(paths(np.random.default_rng(5), shift, stretch)), exact, seed=6))
    assert not found.on_the_floor and found.value > 1.2


def test_pooled_means_show_a_bias_that_the_floor_does_not(exact):
    fair, shifted = (measure(posterior(paths(np.random.default_rng(8), shift)), exact, seed=9) for shift in (0.0, 0.08))
    assert ratio(shifted).on_the_floor
    assert bias(fair).none_seen and not bias(shifted).none_seen


def test_chance_is_called_a_bias_as_rarely_as_it_says(exact):
    z = [
        bias([
            {"parameter": "x", "run": run, "mean": mean, "hmc_mean": 0.0, "hmc_error": 0.0}
            for run, mean in enumerate(np.random.default_rng(seed).normal(size=RUNS))
        ])
        for seed in range(1000)
    ]  # fmt: skip
    assert np.mean([not one.none_seen for one in z]) < 0.001 + 4 * np.sqrt(0.001 / 1000)
    assert np.mean([one.z > 2.093 for one in z]) == pytest.approx(0.05, abs=0.028)


def test_the_distance_is_the_one_of_scipy(exact):
    from scipy.stats import wasserstein_distance

    sample = np.random.default_rng(7).normal(0.2, 1.1, (500, 3))
    expected = [wasserstein_distance(x, y) for x, y in zip(sample.T, exact.reference.T, strict=True)] / exact.sd
    np.testing.assert_allclose(exact.distances(sample.T), expected, rtol=2e-3)
