"""What peers get wrong, and the paper's switching rate."""

import numpy as np
import pytest
from scipy import stats

import fedpdmc as fp
from tests.statistical.checks import CHAINS, assert_exact, t_test
from tests.statistical.targets import CENTER, DENSE, Member, Target, on_grid, records

COVARIANCE = DENSE @ DENSE.T


PRECISION = np.linalg.inv(COVARIANCE)


def shared():
    """Two sites and a prior that make N(CENTER, DENSE DENSEᵀ) together."""
    root = np.linalg.cholesky(PRECISION).T
    sites = [fp.Site(fp.models.linear(np.sqrt(w) * root, np.sqrt(w) * root @ CENTER), name=f"{w}") for w in (0.2, 0.5)]
    return sites, fp.models.normal_prior(2, CENTER, precision=0.3 * PRECISION)


def prior_only():
    """A prior N(CENTER, DENSE DENSEᵀ) and a site without records."""
    return [fp.Site(fp.models.logistic(np.zeros((0, 2)), []), name="empty")], fp.models.normal_prior(2, CENTER, cov=COVARIANCE)


def stationary(chains, seed):
    return CENTER + np.random.default_rng(seed).normal(size=(chains, 2)) @ DENSE.T


@pytest.mark.parametrize(("make", "control"), [(shared, "quadratic"), (prior_only, "none")])
def test_boomerang_on_its_own_gaussian_never_bounces(make, control):
    sites, prior = make()
    post = fp.sample(
        sites, prior, dynamics=fp.Boomerang(), reference=fp.Reference(CENTER, DENSE), control=control, chains=CHAINS, duration=300.0, burn_in=0.0, init=stationary(CHAINS, 1), seed=2,
        progress=False,
    )  # fmt: skip
    assert post.events.sum() == 0
    draws = (post.draws(600) - CENTER) @ np.linalg.inv(DENSE).T
    x, y = draws[..., 0], draws[..., 1]
    averages = np.stack([x, y, x**2, y**2, x * y], -1).mean(1)
    comparison = t_test(["x", "y", "x²", "y²", "xy"], averages, np.array([0.0, 0.0, 1.0, 1.0, 0.0]))
    assert comparison.exact, str(comparison)
    assert comparison.ess.min() > 2000
    inverse = np.linalg.inv(DENSE)
    np.testing.assert_allclose(inverse @ post.cov() @ inverse.T, np.eye(2), atol=6 / np.sqrt(comparison.ess.min()))


def doubled(copies, scale):
    rng = np.random.default_rng(5)
    X = rng.normal(0.4, 1.0, (6, 2))
    y = X @ [1.0, 0.5] + 1.5 * rng.normal(size=6)
    model = fp.models.linear(np.tile(X, (copies, 1)), np.tile(y, copies), scale)
    single = Member(records("gaussian", X[:1], y[:1]), fp.models.linear(X[:1], y[:1]))
    return Target((Member(records("gaussian", X, y, scale=1.5 / np.sqrt(2)), model), single))


@pytest.mark.parametrize("dynamics", [fp.ZigZag(), fp.Boomerang()], ids=["zigzag", "boomerang"])
def test_doubling_records_equals_halving_the_variance(dynamics):
    twice, halved = doubled(2, 1.5), doubled(1, 1.5 / np.sqrt(2))
    found = on_grid(halved)
    for target in (twice, halved):
        post = fp.sample(
            target.sites(), target.prior(), dynamics=dynamics, chains=CHAINS, duration=150.0, burn_in=0.0,
            init=found.draws(CHAINS, 6), seed=7, progress=False,
        )  # fmt: skip
        assert_exact(post, found)


def switching_rate(y, sites, seed):
    """Flips per unit of process time of a stationary Zig-Zag on the paper's Gaussian."""
    n, dim = y.shape
    parts = [fp.Site(fp.models.gaussian_mean(part), name=f"{i}") for i, part in enumerate(np.split(y, sites))]
    start = y.mean(0) + np.random.default_rng(seed).normal(size=(CHAINS, dim)) / np.sqrt(n)
    duration = 0.5
    post = fp.sample(
        parts, dynamics=fp.ZigZag(), chains=CHAINS, duration=duration, burn_in=0.0, init=start, seed=seed, progress=False
    )
    return post.events.mean() / duration


@pytest.mark.parametrize("sites", [1, 5, 10, 25, 50])
def test_switching_rate_is_that_of_the_paper_corrected(sites):
    n, dim, datasets = 50, 10, 8
    rng = np.random.default_rng(sites)
    rates = [switching_rate(rng.normal(0.5, 1.0, (n, dim)), sites, seed) for seed in range(datasets)]
    expected = dim * np.sqrt(n * sites / (2 * np.pi))
    assert abs(np.mean(rates) - expected) < 3 * stats.sem(rates), f"{np.mean(rates)} ± {stats.sem(rates)}, not {expected}"
