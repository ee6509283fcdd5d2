"""The checks of this folder must fail on samplers that are wrong: a check that cannot fail is no check."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from tests.statistical import journeys
from tests.statistical.checks import ALPHA, CHAINS, compare, exponential_test
from tests.statistical.targets import target, truth
from tests.statistical.test_arrivals import DYNAMICS, IDENTITY, SOME_DYNAMICS, outing

import fedpdmc as fp
from fedpdmc._jax.precision import double_precision
from fedpdmc.errors import BoundViolation
from fedpdmc.members.run_coordinates import Opening
from fedpdmc.potentials import Field, LinearPredictor, Poisson, Potential


class Scaled(Potential):
    """A site whose rates are wrong by a factor."""

    inner: Potential
    factor: Array

    @property
    def dim(self):
        return self.inner.dim

    def value(self, x):
        return self.factor * self.inner.value(x)

    def whiten(self, reference, columns):
        return Scaled(self.inner.whiten(reference, columns), self.factor)

    def field(self, rotating, flips, a, v):
        found = self.inner.field(rotating, flips, a, v)
        scaled = (self.factor * x for x in (found.gradient, found.slope, found.curve))
        return Field(*scaled, found.reach, found.slack)


class TooLow(Poisson):
    """A loss that claims to be straighter than it is."""

    def third(self, z, y):
        return jnp.zeros_like(z)


@double_precision
def scaled(potential, factor):
    return Scaled(potential, jnp.asarray(factor))


def compensators(factor, dynamics):
    federation = target("logistic", 3)
    member = federation.members[0]
    site = fp.Site(scaled(member.potential, factor), name="wrong")
    journey = outing(truth("logistic", 3), IDENTITY, dynamics, seed=41)
    rates = journeys.rates_of(dynamics, member.records.gradient)
    heard = journeys.listen(site, Opening(IDENTITY, dynamics), journey, seed=42)
    return exponential_test(journeys.levels(journey, rates, heard, seed=43))


@SOME_DYNAMICS
def test_compensators_catch_a_rate_scaled_by_a_tenth(dynamics):
    for factor in (1.1, 0.9):
        assert np.all(compensators(factor, dynamics).p < ALPHA)


def test_the_scaling_itself_is_not_what_is_caught():
    assert compensators(1.0, DYNAMICS["zigzag"]).exact


def scaled_posterior(factor):
    federation, found = target("logistic", 1), truth("logistic", 1)
    sites = [fp.Site(scaled(m.potential, factor), name=f"site{i}") for i, m in enumerate(federation.members)]
    start = found.draws(CHAINS, seed=44)
    return fp.sample(
        sites, federation.prior(), dynamics=fp.ZigZag(), chains=CHAINS, duration=1000.0, burn_in=0.0, init=start,
        seed=45, progress=False, reference="identity",
    )  # fmt: skip


def test_moments_catch_a_rate_scaled_by_a_tenth():
    """The sites alone are scaled, so that the prior keeps its rate."""
    found = truth("logistic", 1)
    assert compare(scaled_posterior(1.0), found).exact
    assert not compare(scaled_posterior(1.1), found).exact


@double_precision
def too_low(records):
    """The records under a loss whose bound is wrong."""
    design, response, offset = (jnp.asarray(x) for x in (records.design, records.response, records.offset))
    return LinearPredictor.from_records(design, response, TooLow(), offset)


@SOME_DYNAMICS
def test_a_bound_set_too_low_is_noticed(dynamics):
    site = fp.Site(too_low(target("poisson", 3).members[0].records), name="low")
    journey = outing(truth("poisson", 3), IDENTITY, dynamics, seed=47)
    with pytest.raises(BoundViolation, match="'low'"):
        journeys.listen(site, Opening(IDENTITY, dynamics), journey, seed=48)


def test_a_bound_set_too_low_stops_the_run():
    federation = target("poisson", 1)
    site = fp.Site(too_low(federation.members[0].records), name="low")
    with pytest.raises(BoundViolation, match="'low'"):
        fp.sample(
            [site], federation.prior(), dynamics=fp.ZigZag(), chains=CHAINS, duration=100.0, init=federation.prior_mean,
            seed=46, progress=False, reference="identity",
        )  # fmt: skip
