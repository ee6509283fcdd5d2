"""Bounces that are draws, in every engine, against the truth; wrong kernels are caught."""

import jax.numpy as jnp
import numpy as np
import pytest
from tests.statistical import test_dense
from tests.statistical.checks import ALPHA, CHAINS, assert_exact, compare
from tests.statistical.targets import target, truth
from tests.statistical.test_dense import only_dense  # noqa: F401 (a fixture)

import fedpdmc as fp
from fedpdmc.clocks import base
from fedpdmc.dynamics import draw_bounce
from fedpdmc.errors import InputError
from fedpdmc.sampling.engines import lockstep
from fedpdmc.sampling.engines.lockstep import LockstepEngine

MODEL, SITES = "poisson", 3


def far_reference(shift=0.7):
    """A reference that is off, so that sites have many events."""
    found = truth(MODEL, SITES)
    return fp.Reference(found.mean + shift * found.sd, np.linalg.cholesky(found.cov))


def sampled(duration=60.0, logged=False, **settings):
    """Chains from stationarity: with a log the sites are asked in single rounds, as on a network."""
    found, log = target(MODEL, SITES), []
    sites = found.sites()
    if logged:
        sites = [fp.Site(site.potential, name=site.name, log=lambda *told: log.append(told)) for site in sites]
    options = {
        "chains": CHAINS, "burn_in": 0.0, "init": truth(MODEL, SITES).draws(CHAINS, seed=17), "seed": 31,
        "progress": False, "dynamics": fp.Boomerang(), "reference": far_reference(), "bounce": "draw",
    }  # fmt: skip
    return fp.sample(sites, found.prior(), duration=duration, **options | settings)


def test_rounds_and_the_compiled_loop_are_exact_and_have_the_same_draws():
    alone, rounds = sampled(6.0), sampled(6.0, logged=True)
    np.testing.assert_allclose(alone.draws(20), rounds.draws(20), atol=1e-12)
    assert np.sum(alone.events) > 2 * CHAINS
    assert_exact(sampled(), truth(MODEL, SITES), least_ess=1000)


def wrong_radius(keys, number, normal, which):
    """A velocity whose square has d degrees of freedom in place of d + 1."""
    v = draw_bounce(keys, number, normal, which)
    share = jnp.sqrt(normal.shape[1] / (normal.shape[1] + 1.0))
    return share * v


def wrong_sign(keys, number, normal, which):
    return draw_bounce(keys, number, -normal, which)


def traced_anew():
    """Dynamics of a kind of their own, for which everything is compiled once more."""
    return type("Boomerang", (fp.Boomerang,), {})()


@pytest.mark.parametrize("wrong", [wrong_radius, wrong_sign])
def test_wrong_kernels_are_caught(monkeypatch, wrong):
    monkeypatch.setattr(base, "draw_bounce", wrong)
    assert np.min(compare(sampled(dynamics=traced_anew(), duration=180.0), truth(MODEL, SITES)).p) < ALPHA


def test_dense_clocks_in_lockstep_are_exact(only_dense, monkeypatch):  # noqa: F811
    post, found = test_dense.sampled("logistic", 3, bounce="draw")
    assert isinstance(post.run.engine, LockstepEngine) and post.run.engine.coordinator.dynamics.draws
    assert_exact(post, found)
    monkeypatch.setattr(lockstep, "draw_bounce", wrong_sign)
    assert (
        np.min(compare(*test_dense.sampled("logistic", 3, duration=400.0, bounce="draw", dynamics=traced_anew())).p)
        < ALPHA
    )


def test_what_cannot_be_combined_is_refused():
    with pytest.raises(InputError, match="bounce.*'draw' with ZigZag.*flip single coordinates"):
        sampled(dynamics=fp.ZigZag())
    with pytest.raises(InputError, match="bounce.*found 'bounce'.*'reflect', 'draw'"):
        sampled(bounce="bounce")
