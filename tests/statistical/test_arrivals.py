"""The compensator at each arrival is Exp(1), and marks come in proportion to their rates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import integrate, stats
from tests.statistical import journeys
from tests.statistical.checks import ALPHA, exponential_test, mark_test
from tests.statistical.targets import CENTER, DENSE, MODELS, mixed, target, truth

import fedpdmc as fp
from fedpdmc._jax.precision import double_precision
from fedpdmc.members.run_coordinates import Opening
from fedpdmc.potentials import Quadratic
from fedpdmc.sampling.coordinator import JUMPED, REFRESHED, Coordinator, PublicKeys, State

DYNAMICS = {
    "zigzag": fp.ZigZag(),
    "bouncy": fp.BouncyParticle(),
    "boomerang": fp.Boomerang(),
    "factorised": fp.FactorisedBoomerang(),
}
IDENTITY = fp.Reference(np.zeros(2), np.ones(2))
SOME_DYNAMICS = pytest.mark.parametrize(
    "dynamics",
    [
        pytest.param(dynamics, id=name, marks=() if name in ("zigzag", "boomerang") else pytest.mark.long)
        for name, dynamics in DYNAMICS.items()
    ],
)


def dense():
    return fp.Reference(CENTER, DENSE)


def check(site, opening, gradient, journey):
    """Arrivals and marks of one site along random plans are those of its gradient."""
    whitened = journeys.whitened(gradient, opening.reference)
    rates = journeys.rates_of(opening.dynamics, whitened)
    heard = journeys.listen(site, opening, journey, seed=11)
    assert 0.3 < heard.rang.mean() < 0.999
    comparison = exponential_test(journeys.levels(journey, rates, heard, seed=12))
    assert comparison.exact, str(comparison)
    a, v = (x[heard.rang] for x in journey.at(heard.time))
    marks = heard.mark[heard.rang]
    if opening.dynamics.flips:
        comparison = mark_test(marks, rates(a, v))
        assert comparison.exact, str(comparison)
    else:
        normal = whitened(a)
        np.testing.assert_allclose(marks, normal / np.linalg.norm(normal, axis=-1, keepdims=True), atol=1e-6)


def outing(found, reference, dynamics, seed, spread=1.5, reach=2.5):
    """Random plans around a posterior."""
    inverse = np.linalg.inv(np.asarray(reference.matrix))
    center = (found.mean - np.asarray(reference.center)) @ inverse.T
    deviation = np.sqrt(np.diag(inverse @ found.cov @ inverse.T))
    length = 1.0 if dynamics.flow.rotating else reach * deviation.mean()
    return journeys.wander(dynamics, center, spread * deviation, seed, reach=length)


# Every clock on every kind of path and jump; the other models run in the long part.
EVERYDAY = {
    "zigzag": list(MODELS),
    "bouncy": ["linear", "poisson"],
    "boomerang": ["linear", "student_t"],
    "factorised": ["linear", "poisson", "log_gaussian_cox"],
}
PAIRS = [
    pytest.param(model, dynamics, id=f"{model}-{name}", marks=() if model in EVERYDAY[name] else pytest.mark.long)
    for name, dynamics in DYNAMICS.items()
    for model in MODELS
]


@pytest.mark.parametrize(("model", "dynamics"), PAIRS)
def test_arrivals_have_the_rate_of_the_records(model, dynamics):
    federation = target(model, 3)
    journey = outing(truth(model, 3), IDENTITY, dynamics, seed=21)
    check(federation.sites()[0], Opening(IDENTITY, dynamics), federation.members[0].records.gradient, journey)


@SOME_DYNAMICS
def test_arrivals_in_dense_coordinates(dynamics):
    federation, reference = target("logistic", 3), dense()
    journey = outing(truth("logistic", 3), reference, dynamics, seed=22)
    check(federation.sites()[0], Opening(reference, dynamics), federation.members[0].records.gradient, journey)


# Every day on rotations with the averaged control variates of `test_vb`.
@pytest.mark.parametrize(
    "dynamics",
    [
        pytest.param(dynamics, id=name, marks=() if name == "zigzag" else pytest.mark.long)
        for name, dynamics in DYNAMICS.items()
    ],
)
def test_arrivals_of_the_remainder_after_quadratic_control(dynamics):
    federation = target("poisson", 3)
    sites, member = federation.sites(), federation.members[0]
    reference = fp.laplace(sites, federation.prior())
    control = reference.control["site0"]
    precision, linear = np.asarray(control.quadratic.precision), np.asarray(control.quadratic.linear)

    def gradient(x):
        return member.records.gradient(x) - x @ precision - linear

    journey = outing(truth("poisson", 3), reference, dynamics, seed=23, spread=2.5)
    check(sites[0], Opening(reference, dynamics, control), gradient, journey)


@SOME_DYNAMICS
def test_arrivals_with_a_share_of_the_prior(dynamics):
    federation = target("logistic", 3)
    member, prior = federation.members[0], federation.prior()

    def gradient(x):
        return member.records.gradient(x) + 0.5 * (x - federation.prior_mean) @ federation.prior_precision

    journey = outing(truth("logistic", 3), IDENTITY, dynamics, seed=24)
    opening = Opening(IDENTITY, dynamics, None, double_precision(prior.scaled)(0.5))
    check(federation.sites()[0], opening, gradient, journey)


@pytest.mark.parametrize("dynamics", [DYNAMICS["zigzag"], DYNAMICS["bouncy"]], ids=["own entries", "whole path"])
def test_arrivals_of_a_site_that_sees_one_coordinate(dynamics):
    federation = mixed()
    journey = outing(truth("logistic", 3), IDENTITY, dynamics, seed=25)
    check(federation.sites()[3], Opening(IDENTITY, dynamics), federation.members[3].records.gradient, journey)


def test_the_integral_along_plans_agrees_with_scipy():
    dynamics, records = fp.Boomerang(), target("poisson", 3).members[0].records
    journey = outing(truth("poisson", 3), IDENTITY, dynamics, seed=26)
    rates = journeys.rates_of(dynamics, records.gradient)
    until = 0.8 * journey.duration.sum(1)
    found = journey.integral(lambda a, v: rates(a, v).sum(-1), until)[-20:]
    last = journeys.Journey(True, *(x[-20:] for x in journey[1:]))

    def rate(t, chain):
        a, v = last.at(np.full(20, t))
        return rates(a, v)[chain].sum()

    expected = [integrate.quad(rate, 0, until[c - 20], (c,), limit=200)[0] for c in range(20)]
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=1e-3)


def test_levels_of_different_plans_sites_and_chains_are_independent():
    dynamics, federation = fp.ZigZag(), target("logistic", 3)
    site, gradient = federation.sites()[0], federation.members[0].records.gradient
    journey = outing(truth("logistic", 3), IDENTITY, dynamics, seed=27)
    rates = journeys.rates_of(dynamics, gradient)

    def levels(seed, number):
        heard = journeys.listen(site, Opening(IDENTITY, dynamics), journey, seed, number)
        return journeys.levels(journey, rates, heard, seed=100 * seed + number)

    first = levels(1, 3)
    for other in (levels(1, 4), levels(2, 3), np.roll(first, 1)):
        assert stats.spearmanr(first, other).pvalue > ALPHA


PUBLIC = {
    "zigzag": fp.ZigZag(excess=0.4),
    "bouncy": fp.BouncyParticle(refresh=0.5),
    "boomerang": fp.Boomerang(refresh=0.5),
    "factorised": fp.FactorisedBoomerang(refresh=0.5, excess=0.4),
}


@double_precision
def plan_ahead(dynamics, precision, linear, journey, segments=8):
    """The coordinator's plans from the starts of a journey: NumPy arrays of the itinerary."""
    count = jnp.zeros(journeys.CHAINS, int)
    state = State(
        jnp.asarray(journey.start), jnp.asarray(journey.velocity[:, 0]), jnp.zeros(journeys.CHAINS), *[count] * 4
    )
    coordinator = Coordinator.of(dynamics, Quadratic(jnp.asarray(precision), jnp.asarray(linear)), segments)
    keys = PublicKeys.of(jax.random.key(31), journeys.CHAINS)
    found = jax.jit(Coordinator.plan_ahead)(coordinator, state, keys, jnp.asarray(1.5))
    return jax.tree.map(np.asarray, found)


def first_event(itinerary):
    """Time of the first event, whether there is one, whether it is a refreshment, and the velocity after it."""
    real = np.isin(itinerary.ending, (REFRESHED, JUMPED))
    rang, segment = real.any(1), np.where(real.any(1), real.argmax(1), real.shape[1] - 1)
    rows = np.arange(len(rang))
    ends = np.cumsum(itinerary.path.duration, 1)
    after = np.concatenate([itinerary.path.velocity[:, 1:], itinerary.end_v[:, None]], 1)
    return ends[rows, segment], rang, itinerary.ending[rows, segment] == REFRESHED, after[rows, segment]


@pytest.mark.parametrize("name", PUBLIC)
def test_public_events_have_the_rates_of_prior_excess_and_refreshment(name):
    dynamics = PUBLIC[name]
    precision, linear = np.array([[0.9, 0.3], [0.3, 0.7]]) - np.eye(2) * dynamics.flow.rotating, np.array([-0.4, 0.8])
    journey = journeys.wander(dynamics, np.array([0.5, -0.5]), np.ones(2), seed=28, reach=9.0, segments=1)
    potential = journeys.rates_of(dynamics, lambda a: a @ precision + linear)

    def rates(a, v):
        """Of every flip or of the reflection, and last of refreshment."""
        excess = dynamics.excess * (np.abs(v) if dynamics.flips else np.zeros((len(a), 1)))
        return np.concatenate([potential(a, v) + excess, np.full((len(a), 1), dynamics.refresh)], 1)

    time, rang, refreshed, after = first_event(plan_ahead(dynamics, precision, linear, journey))
    heard = journeys.Heard(time, rang, refreshed)
    comparison = exponential_test(journeys.levels(journey, rates, heard, seed=29))
    assert comparison.exact, str(comparison)
    a, v = (x[rang] for x in journey.at(time))
    flipped = np.argmax(np.abs(after[rang] - v) > 1e-9, 1) if dynamics.flips else 0
    marks = np.where(refreshed[rang], 2 if dynamics.flips else 1, flipped)
    shown = rates(a, v)[:, : 3 if dynamics.refresh else 2]
    comparison = mark_test(marks, shown)
    assert comparison.exact, str(comparison)
