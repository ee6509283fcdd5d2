"""A prior that the sites hold in random shares (paper, Algorithm 4) leaves the posterior as it is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from tests.statistical import journeys
from tests.statistical.checks import ALPHA, CHAINS, assert_exact, compare, exponential_test
from tests.statistical.targets import target, truth
from tests.statistical.test_arrivals import IDENTITY, outing
from tests.statistical.test_posteriors import DURATION, DYNAMICS

import fedpdmc as fp
from fedpdmc._jax.precision import double_precision
from fedpdmc._jax.random_streams import chain_keys
from fedpdmc.members.run_coordinates import Opening, open_site
from fedpdmc.plan import Plan
from fedpdmc.sampling import factory
from fedpdmc.sampling.coordinator import Coordinator
from fedpdmc.sampling.engines.compiled_loop import LocalFederation

EVERYDAY = ("zigzag",)


def redistributed(dynamics, duration, rate, model="logistic", **settings):
    federation, found = target(model, 3), truth(model, 3)
    options = {"chains": CHAINS, "burn_in": 0.0, "init": found.draws(CHAINS, seed=61), "seed": 62, "progress": False}
    options["reference"] = "identity"
    prior = fp.Redistributed(federation.prior(), rate=rate)
    return fp.sample(federation.sites(), prior, dynamics=dynamics, duration=duration, **options | settings)


@pytest.mark.parametrize(
    "dynamics", [pytest.param(d, marks=() if d in EVERYDAY else pytest.mark.long) for d in DYNAMICS]
)
def test_posterior_is_exact(dynamics):
    assert_exact(redistributed(DYNAMICS[dynamics], DURATION[dynamics], rate=2.0), truth("logistic", 3), least_ess=500)


@pytest.mark.long
@pytest.mark.parametrize("model", ["gaussian_mean", "poisson", "student_t"])
def test_posterior_is_exact_with_plans_of_many_segments(model):
    """On the Laplace reference with quadratic control variates the coordinator walks against the prior."""
    post = redistributed(DYNAMICS["boomerang"], 200.0, 0.5, model, reference="laplace", control="quadratic")
    assert post.settings["segments"] > 1
    assert_exact(post, truth(model, 3), least_ess=500)


class Peeking(Coordinator):
    """Deals the prior by a look at the velocity."""

    def _redistribution(self, keys, state, sites):
        wait, fresh = super()._redistribution(keys, state, sites)
        whole = jnp.zeros_like(fresh)
        return wait, jnp.where(state.v[:, :1] > 0, whole.at[:, 0].set(1.0), whole.at[:, 1].set(1.0))


def test_weights_that_look_at_the_state_are_caught(monkeypatch):
    monkeypatch.setattr(factory, "Coordinator", Peeking)
    comparison = compare(redistributed(fp.ZigZag(), 400.0, rate=4.0), truth("logistic", 3))
    assert comparison.p.min() < ALPHA


@double_precision
def listen(site, journey, prior, dynamics, share):
    """One round with one site that holds a part of the prior on each chain."""
    clock = open_site(site, Opening(IDENTITY, dynamics, None, prior, True))
    federation = LocalFederation(
        [site.name], [clock], [None], [chain_keys(jax.random.key(63), journeys.CHAINS)], journeys.CHAINS
    )
    path = (jnp.asarray(x) for x in (journey.start, journey.duration, journey.velocity))
    (arrival,) = federation.exchange(Plan(jnp.full(journeys.CHAINS, 3), *path, jnp.asarray(share)[:, None]))
    return journeys.Heard(*(np.asarray(x) for x in (arrival.time, arrival.rang, arrival.mark)))


@pytest.mark.parametrize("dynamics", ["zigzag", pytest.param("bouncy", marks=pytest.mark.long)])
def test_arrivals_have_the_rate_of_the_site_and_its_part_of_the_prior(dynamics):
    """And would not pass with the mean weight in place of the one that was sent. The prior is a strong one."""
    federation, dynamics = target("logistic", 3), DYNAMICS[dynamics]
    precision = 10 * federation.prior_precision
    member = federation.members[0]
    journey = outing(truth("logistic", 3), IDENTITY, dynamics, seed=64)
    share = np.random.default_rng(65).dirichlet(np.ones(3), journeys.CHAINS)[:, 0]
    prior = fp.models.normal_prior(2, federation.prior_mean, precision=precision)
    heard = listen(fp.Site(member.potential, name="one"), journey, prior, dynamics, share)

    def compensators(weight):
        def gradient(x):
            prior = (x - federation.prior_mean) @ precision
            return member.records.gradient(x) + weight[:, None] * prior

        return exponential_test(journeys.levels(journey, journeys.rates_of(dynamics, gradient), heard, seed=66))

    assert compensators(share).exact
    assert not compensators(np.full_like(share, 1 / 3)).exact


def test_weights_are_renewed_at_the_requested_rate_and_uniform_on_the_simplex():
    """Sites without records make no events under a prior that hardly counts: every plan ends in a redistribution."""
    sites = [fp.Site(fp.models.logistic(np.zeros((0, 2)), []), name=f"{i}") for i in range(3)]
    prior = fp.Redistributed(fp.models.normal_prior(2, scale=1e9), rate=0.5)
    post = fp.sample(
        sites, prior, dynamics=fp.ZigZag(), chains=CHAINS, duration=100.0, burn_in=0.0, progress=False, seed=1,
        reference="identity",
    )  # fmt: skip
    run = post.run.engine
    renewed = run.plans.sum() - CHAINS
    assert post.events.sum() == 0
    assert 2 * min(stats.poisson.cdf(renewed, 50 * CHAINS), stats.poisson.sf(renewed - 1, 50 * CHAINS)) > ALPHA
    share = np.asarray(run.progress.state.share)
    np.testing.assert_allclose(share.sum(1), 1.0, rtol=1e-12)
    for column in share.T:
        assert stats.kstest(column, stats.beta(1, 2).cdf).pvalue > ALPHA


def test_the_printed_rate_cannot_be_right():
    """``max(0, U_m + α_m U_0)`` is the same for both signs of a velocity, where the difference must be ``v_i ∂_i U``."""
    federation = target("logistic", 3)
    x, v, weights = np.array([0.7, -0.4]), np.array([1.0, -1.0]), np.array([0.5, 0.2, 0.3])
    shift = x - federation.prior_mean
    value, slope = 0.5 * shift @ federation.prior_precision @ shift, federation.prior_precision @ shift

    def printed(v):
        return sum(
            max(0.0, m.records.potential(x) + w * value) for m, w in zip(federation.members, weights, strict=True)
        )

    def corrected(v):
        parts = [m.records.gradient(x) + w * slope for m, w in zip(federation.members, weights, strict=True)]
        return sum(np.maximum(0.0, v * part) for part in parts)

    needed = v * (slope + sum(m.records.gradient(x) for m in federation.members))
    np.testing.assert_allclose(corrected(v) - corrected(-v), needed, atol=1e-12)
    assert printed(v) - printed(-v) == 0.0
    assert np.all(np.abs(needed) > 0.1)
