"""What draws at turns are worth: as much as the effective sample size says, and more than the paths between them."""

from __future__ import annotations

import numpy as np
import pytest
from tests.statistical.targets import target

import fedpdmc as fp
from fedpdmc.dynamics import QUARTER
from fedpdmc.results.diagnostics import effective_sizes

CHAINS, TURNS = 512, 32


def run(model):
    found = target(model, 3)
    options = {"chains": CHAINS, "duration": TURNS * QUARTER, "seed": 5, "progress": False}
    return fp.sample(found.sites(), found.prior(), dynamics=fp.Boomerang(), **options)


@pytest.fixture(scope="module")
def gaussian():
    return run("gaussian_mean")


def worth(values):
    """Independent draws that the mean of a chain of (C, n) is worth, by the scatter of the chains' means; and its error."""
    means = values.mean(1)
    return values.var() / means.var(ddof=1), np.sqrt(2 / len(means))


def test_draws_at_turns_are_independent_on_a_gaussian(gaussian):
    draws = gaussian.draws(TURNS)
    for values in np.moveaxis(draws, -1, 0):
        found, error = worth(values)
        assert abs(found / TURNS - 1) < 4 * error
        # No draw of a chain tells anything of the next.
        centred = values - values.mean()
        correlation = (centred[:, 1:] * centred[:, :-1]).mean() / values.var()
        assert abs(correlation) < 4 / np.sqrt(CHAINS * TURNS)
    # Averages are taken there too, and all turns are used.
    np.testing.assert_allclose(gaussian.mean(), draws.reshape(-1, 2).mean(0), rtol=1e-9)
    np.testing.assert_allclose(gaussian.cov(), np.cov(draws.reshape(-1, 2).T, bias=True), rtol=1e-9)
    np.testing.assert_allclose(gaussian.expectation(lambda x: x), gaussian.mean(), rtol=1e-9)
    assert min(gaussian.ess().values()) > 0.9 * CHAINS * TURNS


def test_the_paths_between_turns_are_worth_less_and_are_not_credited_with_more(gaussian):
    """π/8 a unit of time: an effective sample size of turns would be 1.6 times too large for averages along the paths."""
    dense = gaussian.draws(16 * TURNS)
    for values in np.moveaxis(dense, -1, 0):
        found, error = worth(values)
        assert abs(found / (np.pi / 8 * TURNS * QUARTER) - 1) < 4 * error
        assert found < 0.8 * TURNS
    assert np.all(effective_sizes(dense) < 0.75 * CHAINS * TURNS)


def test_chains_are_at_all_phases_so_that_no_common_time_is_one_of_turns(gaussian):
    """Draws of all chains at the same times, a quarter period apart, do not resonate with the turns."""
    times = gaussian.skeleton.begin + QUARTER * (0.25 + np.arange(TURNS - 1))
    values = gaussian.skeleton.at(gaussian.dynamics.flow, times)[..., 0]
    centred = values - values.mean()
    correlation = (centred[:, 1:] * centred[:, :-1]).mean() / values.var()
    # The mean over all phases s of the correlation sin s cos s of draws a quarter period apart.
    assert abs(correlation - 1 / np.pi) < 0.03


@pytest.mark.long
def test_on_a_skewed_posterior_the_effective_sample_size_is_what_the_chains_show():
    post = run("poisson")
    draws = post.draws(TURNS)
    shown = [worth(values)[0] * CHAINS for values in np.moveaxis(draws, -1, 0)]
    claimed = [post.ess()[name] for name in post.names]
    assert np.all(np.abs(np.array(claimed) / shown - 1) < 5 * np.sqrt(2 / CHAINS))


def test_short_chains_are_not_taken_for_more_than_they_are():
    """ArviZ finds 1.38 times as many draws as there are in twelve independent ones of each of many chains."""
    import arviz as az

    rng = np.random.default_rng(0)
    values = rng.standard_normal((1024, 12))
    for c, keep in ((0.0, 1.0), (0.3, 0.57)):
        if c:
            for k in range(1, 12):
                values[:, k] = c * values[:, k - 1] + np.sqrt(1 - c**2) * rng.standard_normal(1024)
        assert float(az.ess(values)) > 1.25 * keep * values.size
        assert abs(effective_sizes(values[..., None])[0] / (keep * values.size) - 1) < 0.08
