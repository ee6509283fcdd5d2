"""Skewed posteriors of few records: the default method against long runs of NUTS on the pooled records.

Means, standard deviations and the 5 % and 95 % quantiles are compared by averages of independent chains: the squares give
the standard deviations, and the share of draws beyond NUTS's quantiles says whether ours are the same.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from tests.statistical.checks import welch_test
from tests.statistical.test_pooled_nuts import nuts

import fedpdmc as fp
from fedpdmc.datasets import indomethacin


def trial():
    """The four hospitals of the indomethacin trial, the smallest of three patients."""
    hospitals = indomethacin().hospitals
    return [(h.X, h.y) for h in hospitals], 2.5


def no_events():
    """Three sites, of which one has seen no event and one has a single record."""
    rng = np.random.default_rng(81)
    X = [np.concatenate([np.ones((n, 1)), rng.normal(0.3, 1.0, (n, 2))], 1) for n in (14, 9, 1)]
    return [(X[0], (rng.random(14) < 0.4).astype(float)), (X[1], np.zeros(9)), (X[2], np.ones(1))], 2.0


def many_parameters():
    """Twenty parameters and two hundred records."""
    rng = np.random.default_rng(82)
    X = [np.concatenate([np.ones((n, 1)), rng.normal(size=(n, 19))], 1) for n in (120, 50, 25, 5)]
    truth = rng.normal(size=20) / 2
    return [(x, (rng.random(len(x)) < 1 / (1 + np.exp(-x @ truth))).astype(float)) for x in X], 1.5


def pooled(parts, scale):
    """The log density on all records together."""
    X, y = (np.concatenate(all_) for all_ in zip(*parts, strict=True))

    def log_density(x):
        z = X @ x
        return jnp.sum(y * z - jnp.logaddexp(0.0, z)) - 0.5 * jnp.sum(x**2) / scale**2

    return log_density


def compared(make, ess, least_ess, **length):
    """The default method beside NUTS; all that is not said here is as a user has it."""
    parts, scale = make()
    dim = parts[0][0].shape[1]
    reference = nuts(pooled(parts, scale), dim, seed=83, **length)
    sites = [fp.Site(fp.models.logistic(X, y), name=f"site {i}") for i, (X, y) in enumerate(parts)]
    post = fp.sample(sites, prior=fp.models.normal_prior(dim, scale=scale), ess=ess, seed=84, progress=False)
    mean, sd = reference.mean((0, 1)), reference.std((0, 1))
    low, high = np.quantile(reference, [0.05, 0.95], axis=(0, 1))

    def averages(draws):
        u = (draws - mean) / sd
        return np.concatenate([u, u**2, draws < low, draws > high], -1).mean(1)

    names = [f"{kind}{i}" for kind in ("mean", "square", "low", "high") for i in range(dim)]
    comparison = welch_test(names, averages(post.draws(int(2 * post.duration))), averages(reference))
    assert comparison.exact, str(comparison)
    assert comparison.ess[:dim].min() > least_ess
    skew = np.abs((((reference - mean) / sd) ** 3).mean((0, 1))).max()
    assert skew > 0.1


@pytest.mark.long
def test_a_site_without_events():
    compared(no_events, 2000, 1000, chains=32, warm_up=200, draws=300)


# Some of these posteriors are as far from Gaussian as the warning says.
@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The posterior is far")
@pytest.mark.parametrize("make", [trial, no_events, many_parameters])
def test_small_skewed_posteriors(make):
    compared(make, 4000, 2000, chains=64, warm_up=500, draws=1000)
