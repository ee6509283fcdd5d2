"""Linear regression with an unknown scale, against its conjugate posterior: a skewed one, of few records."""

import functools

import numpy as np
import pytest
from scipy import stats

import fedpdmc as fp
from fedpdmc.errors import BoundViolation
from fedpdmc.models.user_function import variables
from fedpdmc.potentials import LinearUnknownScale

RNG = np.random.default_rng(4)
X = np.column_stack([np.ones(11), RNG.normal(3.0, 1.5, 11)])
Y = X @ [4.0, -2.0] + 2.5 * RNG.normal(size=11)
# Unequal, one of them with fewer records than parameters.
PARTS = (slice(0, 6), slice(6, 9), slice(9, 11))
CHAINS = 64


def sites():
    return [fp.Site(fp.models.linear(X[rows], Y[rows]), name=f"{rows.start}") for rows in PARTS]


def deviations(post, extra=0):
    """Of chain means, in standard errors: distribution functions of the marginals at their quantiles.

    Under a flat prior on (x, log σ), ``x_i`` is t with ν = n − d degrees of freedom, and ``νs²/σ²`` is χ² with ν.
    """
    fit, rest = np.linalg.lstsq(X, Y, rcond=None)[:2]
    nu = len(Y) - X.shape[1] + extra
    sd = np.sqrt(np.diag(np.linalg.inv(X.T @ X)) * rest[0] / nu)
    draws, found = post.draws(400), []
    for level in (0.1, 0.5, 0.9):
        for i in range(2):
            found.append((draws[..., i] < stats.t.ppf(level, nu, fit[i], sd[i])) - level)
        most = 0.5 * np.log(rest[0] / stats.chi2.ppf(1 - level, nu))
        found.append((draws[..., 2] < most) - level)
    means = np.stack(found).mean(-1)
    return np.abs(means.mean(1)) / (means.std(1, ddof=1) / np.sqrt(CHAINS))


KINDS = {
    "default": {},
    "zig-zag": {"dynamics": fp.ZigZag(), "reference": "laplace", "duration": 60.0, "burn_in": 10.0},
    "bouncy": {"dynamics": fp.BouncyParticle(), "reference": "laplace", "duration": 120.0, "burn_in": 15.0},
    "factorised": {"dynamics": fp.FactorisedBoomerang(), "reference": "laplace", "duration": 120.0, "burn_in": 15.0},
}
DAILY = [pytest.param(name, marks=[] if name in ("default", "zig-zag") else pytest.mark.long) for name in KINDS]


@functools.cache
def sampled(name):
    options = {"duration": 150.0, "burn_in": 15.0} | KINDS[name]
    return fp.sample(sites(), **options, chains=CHAINS, seed=5, progress=False)


# Eleven records are few: the tails are those of t with nine degrees of freedom.
@pytest.mark.filterwarnings("ignore:The posterior is far from its reference")
@pytest.mark.parametrize("name", DAILY)
def test_it_is_the_conjugate_posterior(name):
    post = sampled(name)
    assert post.certified
    assert deviations(post).max() < 4.5
    # Two degrees of freedom more are seen.
    assert deviations(post, extra=2).max() > 6.0


def test_a_bound_that_is_too_low_is_found(monkeypatch):
    bounds = LinearUnknownScale._line_curve
    monkeypatch.setattr(LinearUnknownScale, "_line_curve", lambda *given: -3 * bounds(*given))
    with pytest.raises(BoundViolation):
        # A number of chains of its own, for which nothing is compiled yet.
        fp.sample(sites(), **KINDS["zig-zag"], chains=CHAINS - 1, seed=5, progress=False)


def test_names_and_variables():
    post = sampled("zig-zag")
    assert post.names == ["beta[0]", "beta[1]", "log_sigma"]
    found = post.variables(5)
    assert found["beta"].shape == (CHAINS, 5, 2)
    np.testing.assert_allclose(found["sigma"], np.exp(post.draws(5)[..., 2]))
    named = variables(sites(), ["intercept", "slope", "log_sigma"]).of(post.draws(5))
    assert list(named) == ["intercept", "slope", "sigma"]
    np.testing.assert_array_equal(named["sigma"], found["sigma"])
