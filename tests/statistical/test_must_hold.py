"""What peers get wrong, and the paper's switching rate."""

import numpy as np
import pytest
from scipy import stats
from tests.statistical.checks import CHAINS, assert_exact, t_test
from tests.statistical.targets import CENTER, DENSE, Member, Target, on_grid, records
from tests.statistical.test_posteriors import DYNAMICS

import fedpdmc as fp

COVARIANCE = DENSE @ DENSE.T


PRECISION = np.linalg.inv(COVARIANCE)


def shared():
    """Two sites and a prior that make N(CENTER, DENSE DENSEᵀ) together."""
    root = np.linalg.cholesky(PRECISION).T
    roots = {w: np.sqrt(w) * root for w in (0.2, 0.5)}
    sites = [fp.Site(fp.models.linear(R, R @ CENTER, scale=1.0), name=f"{w}") for w, R in roots.items()]
    return sites, fp.models.normal_prior(2, CENTER, precision=0.3 * PRECISION)


def prior_only():
    """A prior N(CENTER, DENSE DENSEᵀ) and a site without records."""
    site = fp.Site(fp.models.logistic(np.zeros((0, 2)), []), name="empty")
    return [site], fp.models.normal_prior(2, CENTER, cov=COVARIANCE)


def stationary(chains, seed):
    return CENTER + np.random.default_rng(seed).normal(size=(chains, 2)) @ DENSE.T


@pytest.mark.parametrize(("make", "control"), [(shared, "quadratic"), (prior_only, "none")])
def test_boomerang_on_its_own_gaussian_never_bounces(make, control):
    sites, prior = make()
    post = fp.sample(
        sites, prior, dynamics=fp.Boomerang(), reference=fp.Reference(CENTER, DENSE), control=control, chains=CHAINS,
        duration=300.0, burn_in=0.0, init=stationary(CHAINS, 1), seed=2, progress=False,
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
    """Three sites, of which the first has every record ``copies`` times."""
    rng = np.random.default_rng(5)
    X = rng.normal(0.4, 1.0, (8, 2))
    y = X @ [1.0, 0.5] + 1.5 * rng.normal(size=8)
    model = fp.models.linear(np.tile(X[:5], (copies, 1)), np.tile(y[:5], copies), scale)
    first = Member(records("gaussian", X[:5], y[:5], scale=1.5 / np.sqrt(2)), model)
    others = [
        Member(records("gaussian", X[i], y[i]), fp.models.linear(X[i], y[i], scale=1.0))
        for i in (slice(5, 7), slice(7, 8))
    ]
    return Target((first, *others))


@pytest.mark.parametrize("dynamics", ["zigzag-excess", pytest.param("factorised", marks=pytest.mark.long)])
def test_doubling_records_equals_halving_the_variance(dynamics):
    found = on_grid(doubled(1, 1.5 / np.sqrt(2)))
    for target in (doubled(2, 1.5), doubled(1, 1.5 / np.sqrt(2))):
        post = fp.sample(
            target.sites(), target.prior(), dynamics=DYNAMICS[dynamics], chains=CHAINS, duration=150.0, burn_in=0.0,
            init=found.draws(CHAINS, 6), seed=7, progress=False, reference="identity",
        )  # fmt: skip
        assert_exact(post, found, least_ess=500)


def switching_rates(y, sites, seed):
    """Flips of each coordinate per unit of process time, of a stationary Zig-Zag on the paper's Gaussian."""
    n, dim = y.shape
    parts = [fp.Site(fp.models.gaussian_mean(part), name=f"{i}") for i, part in enumerate(np.split(y, sites))]
    start = y.mean(0) + np.random.default_rng(seed).normal(size=(CHAINS, dim)) / np.sqrt(n)
    post = fp.sample(
        parts, dynamics=fp.ZigZag(), chains=CHAINS, duration=0.5, burn_in=0.0, init=start, seed=seed, progress=False,
        reference="identity",
    )  # fmt: skip
    skeleton = post.skeleton
    within = np.diff(skeleton.owners()) == 0
    flips = (np.diff(skeleton.v, axis=0) != 0)[within].sum(0)
    assert flips.sum() == post.events.sum()
    return flips / (CHAINS * post.duration)


@pytest.mark.parametrize("sites", [1, 10, *(pytest.param(m, marks=pytest.mark.long) for m in (5, 25, 50))])
def test_switching_rate_is_that_of_the_paper_corrected(sites):
    """``d √(NM/(2π))`` on average over data sets; every coordinate is an independent data set of its own."""
    n, dim, datasets = 50, 10, 10
    rng = np.random.default_rng([sites, 1])
    rates = np.concatenate([switching_rates(rng.normal(0.5, 1.0, (n, dim)), sites, seed) for seed in range(datasets)])
    found, error = dim * rates.mean(), dim * stats.sem(rates)
    expected = dim * np.sqrt(n * sites / (2 * np.pi))
    assert abs(found - expected) < 3 * error, f"{found} ± {error}, not {expected}"
    assert error < 0.05 * expected
