"""Privacy costs rounds and time, never exactness: the draws of private sites are from the same posterior."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.privacy.support import a_ledger
from tests.statistical.checks import CHAINS, assert_exact, compare
from tests.statistical.targets import MODELS, target, truth

import fedpdmc as fp
from fedpdmc.clocks import private_arrivals

COUNTS = ("poisson", "log_gaussian_cox")


def private_sites(model, count, folder, **options):
    """The sites of a target under budgets that do not end."""
    outcome = (0.0, 1e3) if model in COUNTS else (-1e3, 1e3)
    # Student-t and logistic gradients are bounded everywhere.
    region = None if model in ("logistic", "student_t", "ar1_student_t") else 20.0
    # An intensity is the exponential of all that covariates and parameters may be: both are declared closely.
    rows, region = ({"box": [1.0, 4.0]}, 4.5) if model == "poisson" else ({"norm": 8.0}, region)
    bounds = fp.Bounds(**rows, outcome=outcome, region=region, offset=(-10.0, 0.0), most_records=200)
    terms = {"epsilon": 1e250, "delta": 0.1, "bounds": bounds, "excess": 0.3, "ledger": folder / "ledger.db"}
    terms |= {"seeded_for_tests": True} | options
    a_ledger(terms["ledger"])
    return [
        fp.Site(
            site.potential,
            name=site.name,
            coordinates=site.coordinates,
            seed=k,
            budget=fp.Budget(**terms, dataset=site.name),
        )
        for k, site in enumerate(target(model, count).sites())
    ]


def sampled(model, folder, dynamics, duration, count=3, options=None, **settings):
    start = truth(model, count).draws(CHAINS, seed=17)
    sites = private_sites(model, count, folder, **options or {})
    run = {"chains": CHAINS, "burn_in": 0.0, "init": start, "seed": 29, "progress": False} | settings
    return fp.sample(sites, target(model, count).prior(), dynamics=dynamics, duration=duration, **run)


@pytest.mark.parametrize("model", [m if m == "logistic" else pytest.param(m, marks=pytest.mark.long) for m in MODELS])
def test_private_zigzag_is_exact(model, tmp_path):
    post = sampled(model, tmp_path, fp.ZigZag(), 20.0)
    assert_exact(post, truth(model, 3), least_ess=100)
    assert set(post.privacy) == {site.name for site in target(model, 3).sites()}


@pytest.mark.long
def test_private_boomerang_on_a_noisy_reference_is_exact(tmp_path):
    model = "logistic"
    # The control variates are off by a tenth of the curvature, and the draws are not.
    granted = fp.Bounds(norm=8.0, outcome=(-60.0, 60.0), most_records=1000)
    options = {"release": 0.5, "epsilon": 2e4, "bounds": granted, "ledger": tmp_path / "release.db"}
    noisy = fp.laplace(private_sites(model, 3, tmp_path, **options), target(model, 3).prior())
    exact = fp.laplace(target(model, 3).sites(), target(model, 3).prior())
    off = max(
        float(
            np.abs(np.asarray(noisy.control[name].quadratic.precision - exact.control[name].quadratic.precision)).max()
        )
        for name in exact.control
    )
    assert 0.1 < off < 10, off
    post = sampled(model, tmp_path, fp.FactorisedBoomerang(), 20.0, reference=noisy, control="quadratic")
    assert_exact(post, truth(model, 3), least_ess=100)


def test_an_excess_that_is_not_even_is_caught(tmp_path, monkeypatch):
    """A broken site: excess flips only of coordinates that move up, so they do not cancel."""
    with monkeypatch.context() as broken:
        broken.setattr(private_arrivals, "excess_rates", lambda excess, v: excess * jnp.maximum(v, 0.0))
        jax.clear_caches()
        post = sampled("logistic", tmp_path, fp.ZigZag(), 20.0)
    jax.clear_caches()
    assert not compare(post, truth("logistic", 3)).exact
