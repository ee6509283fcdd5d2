"""The standard library of families at three unequal sites, against a grid and against NUTS on the pooled records."""

import jax.numpy as jnp
import numpy as np
import pytest
from tests.family_cases import CASES
from tests.statistical.checks import CHAINS, compare
from tests.statistical.targets import Truth
from tests.statistical.test_pooled_nuts import nuts
from tests.statistical.test_zoo import compare as compare_draws

import fedpdmc as fp

PARTS = (slice(0, 9), slice(9, 14), slice(14, 16))
TIME = np.random.default_rng(8).weibull(1.6, 16) * 1.5
DIED = (np.arange(16) % 4 != 1).astype(float)


def truth():
    """Weibull with an intercept alone, flat on the scale's logarithm but for the prior N(0, 2²) of both, on a grid."""
    center, half = np.zeros(2), np.full(2, 4.0)
    for n in (150, 150, 300):
        axes = tuple(np.linspace(c - h, c + h, n) for c, h in zip(center, half, strict=True))
        eta, log_k = np.meshgrid(*axes, indexing="ij")
        energy = (eta**2 + log_k**2) / 8
        for t, died in zip(TIME, DIED, strict=True):
            u = np.exp(log_k) * (np.log(t) - eta)
            energy = energy + np.exp(np.minimum(u, 600.0)) - died * (log_k + u)
        weights = np.exp(energy.min() - energy)
        found = Truth(axes, weights / weights.sum())
        center, half = found.mean, 9 * found.sd
    return found


def sampled(start, died=DIED):
    sites = [fp.Site(fp.models.weibull(np.ones((16, 1))[p], TIME[p], died[p]), name=f"{p.start}") for p in PARTS]
    prior = fp.models.normal_prior(2, scale=2.0)
    return fp.sample(
        sites, prior, chains=CHAINS, duration=60.0, burn_in=0.0, init=start, seed=3, progress=False
    )  # fmt: skip


@pytest.mark.long
def test_a_skewed_posterior_is_exact_and_a_wrong_likelihood_is_seen():
    right = truth()
    start = right.draws(CHAINS, seed=2)
    post = sampled(start)
    comparison = compare(post, right)
    assert post.certified and comparison.exact, str(comparison)
    assert comparison.ess[:2].min() > 500 and np.abs(right.skew).max() > 0.2
    # Two of the four censored times count as deaths.
    assert not compare(sampled(start, np.where(np.arange(16) < 6, 1.0, DIED)), right).exact


@pytest.mark.filterwarnings("ignore:The posterior is far")
@pytest.mark.long
@pytest.mark.parametrize("family", CASES, ids=lambda family: family.__name__)
def test_a_family_agrees_with_pooled_nuts(family):
    sites, log_likelihood = family()
    dim = sites[0].dim
    reference = nuts(lambda x: log_likelihood(x) - jnp.sum(x**2) / 8, dim, seed=4, chains=64, warm_up=300, draws=800)
    prior = fp.models.normal_prior(dim, scale=2.0)
    post = fp.sample(sites, prior, chains=CHAINS, duration=80.0, burn_in=15.0, seed=5, progress=False)
    comparison = compare_draws(post, reference)
    assert post.certified and comparison.exact, str(comparison)
    assert comparison.ess[:dim].min() > 300, "no power"
