"""Only the sites that must be asked: exact by the rule, and not by two that are as plausible."""

from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest
from tests.statistical.checks import assert_exact, compare
from tests.statistical.targets import Member, Target, on_grid, records

import fedpdmc as fp
from fedpdmc.sampling.engines import one_round
from fedpdmc.sampling.engines.one_round import first_difference

CHAINS, DURATION = 128, 300.0


def cell(own, counts):
    """A site that owns some of two cells."""
    counts = np.array(counts, float)
    return Member(records("poisson", np.eye(2)[list(own)], counts), fp.models.log_gaussian_cox(counts), own)


@cache
def grid():
    """Two cells of three sites, whose prior ties them together: most flips are the coordinator's."""
    precision = 3.0 * np.array([[1.0, -0.8], [-0.8, 1.0]])
    target = Target((cell((0,), [0]), cell((1,), [4]), cell((1,), [1])), np.array([0.5, -0.5]), precision)
    return target, on_grid(target)


def sampled(chains=CHAINS, **settings):
    """A run of chains that start in stationarity."""
    target, truth = grid()
    options = {"duration": DURATION, "burn_in": 0.0, "seed": 5, "progress": False, "reference": "identity"} | settings
    return fp.sample(
        target.sites(), target.prior(), dynamics=fp.ZigZag(), chains=chains, init=truth.draws(chains, seed=3), **options
    )


def test_asking_only_those_that_must_be_asked_is_exact():
    post = sampled()
    assert_exact(post, grid()[1], least_ess=5000)


@pytest.mark.long
def test_excess_flips_are_the_coordinators_too():
    target, truth = grid()
    post = fp.sample(
        target.sites(), target.prior(), dynamics=fp.ZigZag(excess=0.7), chains=64, init=truth.draws(64, seed=3),
        duration=150.0, burn_in=0.0, seed=6, progress=False, reference="identity",
    )  # fmt: skip
    assert_exact(post, truth, least_ess=1000)


def reused(request, arrival, new, left):
    """Wrong: an arrival stands whenever the event missed the site's coordinates."""
    sigma = first_difference(request.path, request.lead, new)
    now = sigma <= 0
    stands = arrival.rang & ~now & (request.time(arrival.time) > 0)
    silent = jnp.maximum(jnp.minimum(jnp.where(now, 0.0, jnp.inf), request.lead + request.path.horizon), 0.0)
    return ~(stands | (silent >= left)), silent


def from_now(request, arrival, new, left):
    """Wrong: a site whose arrival does not stand is asked from now on."""
    ask, since = RIGHT(request, arrival, new, left)
    return ask, jnp.zeros_like(since)


RIGHT = one_round.decide


@pytest.mark.parametrize(("chains", "rule"), [(CHAINS + 1, reused), (CHAINS + 2, from_now)])
def test_plausible_rules_are_caught(chains, rule, monkeypatch):
    # Another number of chains: the rule is compiled again.
    monkeypatch.setattr(one_round, "decide", rule)
    comparison = compare(sampled(chains), grid()[1])
    assert np.max(np.abs(comparison.scores)) > 8, str(comparison)
    assert not comparison.exact


def test_it_saves_messages_and_bytes():
    spared = sampled(1, duration=200.0)
    settings = {"duration": 200.0, "burn_in": 0.0, "chains": 1, "seed": 5, "progress": False, "reference": "identity"}
    target, _ = grid()
    everyone = fp.sample(target.sites(), target.prior(), dynamics=fp.BouncyParticle(), **settings)
    np.testing.assert_array_equal(everyone.messages, 2 * everyone.rounds)
    assert np.all(spared.messages < 2 * 0.75 * spared.rounds)
    assert np.all(spared.messages > 0)
    again = spared.extend(duration=50.0, progress=False)
    assert np.all(again.messages > spared.messages) and np.all(again.bytes > spared.bytes)
