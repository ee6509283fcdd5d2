"""Every dynamics on every model, with 1, 3 and 10 unequal sites, against a grid."""

import numpy as np
import pytest
from tests.statistical.checks import CHAINS, assert_exact
from tests.statistical.targets import MODELS, SIZES, target, truth

import fedpdmc as fp

DYNAMICS = {
    "zigzag": fp.ZigZag(),
    "zigzag-excess": fp.ZigZag(excess=0.5),
    "bouncy": fp.BouncyParticle(refresh=0.8),
    "boomerang": fp.Boomerang(),
    "factorised": fp.FactorisedBoomerang(refresh=1.0, excess=0.3),
    "bouncy-draw": fp.BouncyParticle(refresh=0.8, bounce="draw"),
    "boomerang-draw": fp.Boomerang(bounce="draw"),
}
# Long enough for about a thousand effective samples.
DURATION = {"zigzag": 100.0, "zigzag-excess": 150.0, "bouncy": 120.0, "boomerang": 120.0, "factorised": 150.0,
            "bouncy-draw": 150.0, "boomerang-draw": 150.0}  # fmt: skip


def sampled(model, sites, dynamics, duration=None, **settings):
    """A run of chains that start in stationarity."""
    found = target(model, sites)
    duration = DURATION[dynamics] if duration is None else duration
    start = truth(model, sites).draws(CHAINS, seed=17)
    options = {"chains": CHAINS, "burn_in": 0.0, "init": start, "seed": 29, "progress": False, "reference": "identity"}
    return fp.sample(found.sites(), found.prior(), dynamics=DYNAMICS[dynamics], duration=duration, **options | settings)


# Models that the package compiles to the same code when they have the same number of sites.
ALIKE = (
    ("gaussian_mean", "linear"), ("logistic",), ("poisson",), ("student_t", "ar1_student_t"), ("log_gaussian_cox",)
)  # fmt: skip


def everyday(model, sites, dynamics):
    """Every fourth pair of dynamics and model runs every day with one number of sites; the rest in the long run.

    Of models that are alike one is enough, and zig-zags on the Cox process are in `test_selective_requests`.
    """
    if model in ("gaussian_mean", "ar1_student_t") or (model, dynamics) == ("log_gaussian_cox", "zigzag"):
        return False
    place = next(k for k, models in enumerate(ALIKE) if model in models) + list(DYNAMICS).index(dynamics)
    return place % 4 == 0 and sites == list(SIZES)[place // 4 % 3]


CASES = [
    pytest.param(model, sites, dynamics, marks=() if everyday(model, sites, dynamics) else pytest.mark.long)
    for dynamics in DYNAMICS
    for sites in SIZES
    for model in MODELS
]


@pytest.mark.parametrize(("model", "sites", "dynamics"), CASES)
def test_posterior_is_exact(model, sites, dynamics):
    assert_exact(sampled(model, sites, dynamics), truth(model, sites), least_ess=500)


@pytest.mark.long
@pytest.mark.parametrize("dynamics", DYNAMICS)
@pytest.mark.parametrize("model", MODELS)
def test_posterior_is_exact_to_a_few_percent(model, dynamics):
    assert_exact(sampled(model, 3, dynamics, 8 * DURATION[dynamics]), truth(model, 3), least_ess=5000)


@pytest.mark.parametrize("model", MODELS)
def test_targets_are_not_trivial(model):
    found = truth(model, 3)
    assert np.all(np.abs(found.mean) > 0.1)
    assert np.all(np.abs(found.sd - 1) > 0.1)
    if model not in ("gaussian_mean", "linear"):
        assert np.max(np.abs(found.skew)) > 0.05


@pytest.mark.parametrize("model", ["gaussian_mean", "linear"])
def test_the_grid_agrees_with_closed_forms(model):
    federation, found = target(model, 3), truth(model, 3)
    precision = federation.prior_precision.copy()
    shift = federation.prior_precision @ federation.prior_mean
    for member in federation.members:
        scaled = member.records.design / member.records.scale[:, None]
        precision += scaled.T @ scaled
        shift += scaled.T @ (member.records.response / member.records.scale)
    covariance = np.linalg.inv(precision)
    np.testing.assert_allclose(found.mean, covariance @ shift, atol=1e-9)
    np.testing.assert_allclose(found.cov, covariance, atol=1e-9)
    np.testing.assert_allclose(found.skew, 0, atol=1e-9)
    width = 1.6448536 * np.sqrt(np.diag(covariance))
    np.testing.assert_allclose(found.low, found.mean - width, atol=2e-3 * found.sd.max())
    np.testing.assert_allclose(found.high, found.mean + width, atol=2e-3 * found.sd.max())
