"""What a default call returns where the posterior is skewed, over seeds, and that the verdict sees a bias."""

import warnings

import numpy as np
import pandas as pd
import pytest

import fedpdmc as fp
from fedpdmc.sampling.vb_reference import Tails

EVENTS, PATIENTS, SCALE, SEEDS = (11, 0), (50, 40), 5.0, 6


def records():
    """An intercept and an arm without events."""
    X = np.c_[np.ones(sum(PATIENTS)), np.repeat([0.0, 1.0], PATIENTS)]
    y = np.concatenate([np.arange(n) < k for k, n in zip(EVENTS, PATIENTS, strict=True)]).astype(float)
    order = np.random.default_rng(0).permutation(len(y))
    return X[order], y[order]


@pytest.fixture(scope="module")
def truth():
    """Mean, standard deviation and outer quantiles of the effect, by quadrature."""
    a, b = np.linspace(-4, 2, 601), np.linspace(-30, 5, 3501)
    grid_a, grid_b = np.meshgrid(a, b, indexing="ij")
    energy = 0.5 * (grid_a**2 + grid_b**2) / SCALE**2
    for k, eta in enumerate((grid_a, grid_a + grid_b)):
        energy += PATIENTS[k] * np.logaddexp(0, eta) - EVENTS[k] * eta
    weight = np.exp(energy.min() - energy).sum(0)
    weight /= weight.sum()
    mean = weight @ b
    below = np.cumsum(weight)
    return mean, np.sqrt(weight @ (b - mean) ** 2), b[np.searchsorted(below, [0.025, 0.975])]


def default_runs(**options):
    X, y = records()
    for seed in range(SEEDS):
        sites = [fp.Site(fp.models.logistic(X[k::3], y[k::3]), name=f"site{k}") for k in range(3)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield fp.sample(sites, fp.models.normal_prior(2, scale=SCALE), seed=seed, progress=False, **options)


def errors(runs, truth):
    """Mean over runs of the errors of mean, standard deviation and outer quantiles, in standard deviations."""
    mean, sd, quantiles = truth
    found = []
    for post in runs:
        draws = post.draws(post.diagnostic_draws())[..., 1]
        own = np.quantile(draws, [0.025, 0.975])
        found.append([post.mean()[1] - mean, np.sqrt(post.cov()[1, 1]) - sd, *(own - quantiles)])
    return np.mean(found, 0) / sd


def test_an_arm_without_events_is_right_in_few_rounds_and_says_converged(truth):
    runs = list(default_runs())
    assert all(post.verdict for post in runs) and max(post.rounds for post in runs) <= 40
    off = errors(runs, truth)
    # Six runs of 1,400 effective samples: 0.011, 0.02 and 0.03 to 0.06 are one standard error.
    assert abs(off[0]) < 0.045 and abs(off[1]) < 0.06 and np.all(np.abs(off[2:]) < [0.2, 0.12])


def test_a_reference_that_is_not_widened_is_biased_and_the_verdict_says_so(monkeypatch, truth):
    """The negative control: the reference and the burn-in that passed for converged."""
    monkeypatch.setattr(Tails, "widens", False)
    runs = list(default_runs(burn_in=np.pi, dynamics=fp.Boomerang(), chains=256))
    off = errors(runs, truth)
    assert off[0] > 0.05 and off[1] < -0.05 and off[2] > 0.15
    assert not any(post.verdict for post in runs)
    assert all("the tail of x1 is" in str(post.verdict) for post in runs)


def test_the_same_over_a_network_takes_no_further_release(tmp_path, truth):
    X, y = records()
    table = pd.DataFrame({"y": y.astype(int), "arm": X[:, 1], "site": [f"s{k % 3}" for k in range(len(y))]})
    sites = fp.sites(table, by="site", formula="y ~ arm", family="logistic", prior="normal(0, 5)", standardize=False)
    sites.write(tmp_path / "study.toml")
    for name, part in table.groupby("site"):
        part.drop(columns="site").to_csv(tmp_path / f"{name}.csv", index=False)
    data = {name: tmp_path / f"{name}.csv" for name in ("s0", "s1", "s2")}
    runs = []
    for seed in range(SEEDS):
        with fp.connect(str(tmp_path / "study.toml"), data=data, seed=seed) as connection, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            runs.append(fp.sample(connection, progress=False))
    assert all(post.reference.wide is not None and post.rounds < 80 for post in runs)
    off = errors(runs, truth)
    assert abs(off[0]) < 0.06 and abs(off[1]) < 0.08 and np.all(np.abs(off[2:]) < [0.25, 0.15])


def test_the_counts_are_those_of_the_model():
    X, y = records()
    assert y[X[:, 1] == 1].sum() == 0 and y.sum() == 11


def few_events():
    """Weibull times in two arms: 3 events of 30."""
    rng, died = np.random.default_rng(241), np.zeros(30)
    died[[2, 9, 20]] = 1
    return np.c_[np.ones(30), np.arange(30) % 2], rng.uniform(0.5, 3.0, 30), died


def intercept_of_few_events():
    """Mean and standard deviation of the intercept, by quadrature over the arms' log scales and the log shape."""
    X, time, died = few_events()
    grid, shape = np.linspace(-5, 15, 401), np.linspace(-4, 4, 321)
    energy = 0.0
    for k in (0, 1):
        own = X[:, 1] == k
        z = (np.log(time[own]) - grid[:, None, None]) * np.exp(shape)[:, None]
        part = np.sum(np.exp(np.minimum(z, 300.0)) - died[own] * (z + shape[:, None]), -1)
        energy = energy + (part[:, None] if k == 0 else part)
    energy += 0.5 * (grid[:, None, None] ** 2 + (grid[None, :, None] - grid[:, None, None]) ** 2 + shape**2) / 2.5**2
    weight = np.exp(energy.min() - energy).sum((1, 2))
    weight /= weight.sum()
    mean = weight @ grid
    return mean, np.sqrt(weight @ (grid - mean) ** 2)


@pytest.mark.long
def test_lines_forget_a_start_in_the_body_of_long_tails():
    mean, sd = intercept_of_few_events()
    arrays = few_events()

    def off(**options):
        found = []
        for seed in range(SEEDS):
            sites = [fp.Site(fp.models.weibull(*(x[k::2] for x in arrays)), name=f"site{k}") for k in range(2)]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                post = fp.sample(sites, fp.models.normal_prior(3, scale=2.5), seed=seed, progress=False, **options)
            assert post.settings["dynamics"].startswith("ZigZag")
            found.append([post.mean()[0] - mean, np.sqrt(post.cov()[0, 0]) - sd])
        return np.mean(found, 0) / sd

    # Standard errors are 0.014 and 0.02; a burn-in of 5 is the negative control.
    assert np.all(np.abs(off()) < [0.05, 0.08])
    biased = off(burn_in=5.0)
    assert biased[0] < -0.05 and biased[1] < -0.08
