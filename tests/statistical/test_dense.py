"""Dense clocks: compensators at arrivals are Exp(1), and posteriors of the lockstep engine are those on a grid."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.statistical import journeys
from tests.statistical.checks import CHAINS, assert_exact, compare, exponential_test
from tests.statistical.targets import MODELS, Target, on_grid

import fedpdmc as fp
from fedpdmc._jax.compilation import compiled
from fedpdmc._jax.precision import double_precision
from fedpdmc._jax.random_streams import chain_keys
from fedpdmc.clocks import SegmentClock, answer, choose, dense
from fedpdmc.clocks.choose import third_order
from fedpdmc.clocks.dense import Setting, cubic_clock, dense_clocks
from fedpdmc.clocks.thinning import ThirdOrder
from fedpdmc.errors import BoundViolation
from fedpdmc.plan import Plan
from fedpdmc.sampling.engines.lockstep import LockstepEngine

SIZES = {1: (40,), 3: (24, 12, 4), 10: (10, 8, 6, 4, 4, 3, 2, 1, 1, 1)}
answered = compiled(answer)


@functools.cache
def found(model, sites):
    """A federation of forty records, and its posterior."""
    make, seed = MODELS[model]
    target = Target(tuple(make(np.random.default_rng([seed, sites, 2]), SIZES[sites])))
    return target, on_grid(target)


@pytest.fixture
def only_dense(monkeypatch):
    """Every other clock is too dear."""
    monkeypatch.setattr(choose, "best_setting", lambda *args: dense.best_setting(*args)._replace(cost=0.0))


@pytest.fixture
def only_cubic(monkeypatch):
    """Third orders cost nothing, and dense clocks too much."""
    monkeypatch.setattr(choose, "best_setting", lambda *args: dense.best_setting(*args)._replace(cost=1e15))
    monkeypatch.setattr(ThirdOrder, "_cost", lambda *args: 0.0)


def sampled(model, sites, duration=100.0, **settings):
    """A run of chains that start in stationarity."""
    target, truth = found(model, sites)
    options = {"chains": CHAINS, "burn_in": 0.0, "init": truth.draws(CHAINS, seed=17), "seed": 31, "progress": False}
    options |= {"reference": "laplace", "control": "quadratic", "dynamics": fp.Boomerang(), "duration": duration}
    return fp.sample(target.sites(), target.prior(), **options | settings), truth


CASES = [
    pytest.param(model, sites, marks=() if (model, sites) == ("logistic", 3) else pytest.mark.long)
    for model in ("logistic", "poisson", "student_t")
    for sites in SIZES
]


@pytest.mark.parametrize(("model", "sites"), CASES)
def test_posteriors_are_those_on_a_grid(model, sites, only_dense):
    post, truth = sampled(model, sites)
    assert isinstance(post.run.engine, LockstepEngine)
    assert post.certified and post.settings["clocks"][0]["clock"] == "DenseClock"
    assert_exact(post, truth)


@pytest.mark.parametrize(("model", "sites"), [CASES[1], pytest.param("poisson", 1, marks=pytest.mark.long)])
def test_posteriors_by_third_orders_are_those_on_a_grid(model, sites, only_cubic):
    post, truth = sampled(model, sites)
    assert isinstance(post.run.engine, LockstepEngine)
    assert post.certified and {entry["clock"] for entry in post.settings["clocks"]} == {"ThirdOrder"}
    assert_exact(post, truth)


@pytest.mark.parametrize("part", ["polynomial", "bound"])
def test_third_orders_that_are_too_low_are_found_out(part, only_cubic, monkeypatch):
    """The polynomial of a segment with its error, and the bound at a point that rejects candidates after it."""

    class Low(ThirdOrder):
        def _along(self, *args):
            factor = 0.03 if part == "polynomial" else 1.0
            return tuple(factor * x for x in super()._along(*args))

        def bound(self, *args):
            return (0.03 if part == "bound" else 1.0) * super().bound(*args)

    def low(clock):
        envelope = clock.envelope
        return dataclasses.replace(cubic_clock(clock), curves=Low(envelope.remainder, envelope.quadratic))

    monkeypatch.setattr(choose, "cubic_clock", low)
    with pytest.raises(BoundViolation):
        sampled("logistic", 3)


@pytest.mark.long
def test_refreshment_at_random_times_is_exact_too(only_dense):
    assert_exact(*sampled("logistic", 3, dynamics=fp.Boomerang(refresh=1.0)))


def scaled(clocks, value=1.0, error=1.0):
    """Clocks whose curves are off: by a factor of the rates, or of the error."""

    class Off(type(clocks[0].curves)):
        def _value(self, *args):
            return jnp.float32(value) * super()._value(*args)

        def _error(self, *args):
            return jnp.float32(error) * super()._error(*args)

    def off(clock):
        own = clock.curves
        return eqx.tree_at(
            lambda c: c.curves, clock, Off(*(getattr(own, field.name) for field in dataclasses.fields(own)))
        )

    return [off(clock) for clock in clocks]


def test_curves_that_are_too_low_are_found_out(only_dense, monkeypatch):
    monkeypatch.setattr(choose, "dense_clocks", lambda *args: scaled(dense_clocks(*args), value=0.5))
    with pytest.raises(BoundViolation):
        sampled("logistic", 3)


@pytest.mark.long
def test_without_the_error_the_posterior_is_wrong_or_the_run_stops(only_dense, monkeypatch):
    monkeypatch.setattr(choose, "dense_clocks", lambda *args: scaled(dense_clocks(*args), value=0.97, error=0.0))
    with pytest.raises(BoundViolation):
        sampled("logistic", 3)


def heard(clock, journey):
    """The arrivals of a clock along random plans."""
    count = len(journey.start)
    keys = chain_keys(jax.random.key(5), count)
    plan = Plan(jnp.arange(count), *(jnp.asarray(x) for x in (journey.start, journey.duration, journey.velocity)))
    arrival, walk = answered(clock, keys, plan)
    assert not np.any(walk.fault)
    return journeys.Heard(*(np.asarray(x) for x in (arrival.time, arrival.rang, arrival.mark)))


@double_precision
def levels_of(model, setting, wrong=1.0):
    """Compensators at the arrivals of a clock along random plans: of a dense clock's setting, or of a third order (None)."""
    target, truth = found(model, 1)
    member = target.members[0]
    reference = fp.Reference(truth.mean, np.linalg.cholesky(3.0 * truth.cov))
    potential = member.potential.whiten(reference, None)
    if setting is None:
        potential = potential.expanded_at(jnp.zeros(2), 2)
        clock = cubic_clock(SegmentClock(potential, fp.Boomerang(), third_order(potential, jnp.zeros(2))))
    else:
        clock = dense_clocks([potential], fp.Boomerang(), setting, 1024)[0]
    journey = journeys.wander(fp.Boomerang(), np.zeros(2), 0.5, seed=6, reach=1.2)
    whitened = journeys.whitened(lambda x: member.records.gradient(x), reference)

    def gradient(a):
        return wrong * (whitened(a) if setting else np.asarray(potential.gradients(jnp.asarray(a))))

    rates = journeys.rates_of(fp.Boomerang(), gradient)
    arrivals = heard(clock, journey)
    assert 0.15 < arrivals.rang.mean() < 0.999
    return exponential_test(journeys.levels(journey, rates, arrivals, seed=12))


@pytest.mark.parametrize(
    ("model", "setting"),
    [
        ("logistic", None),
        pytest.param("poisson", None, marks=pytest.mark.long),
        pytest.param("logistic", Setting(0, 8, 2, 0.0), marks=pytest.mark.long),
        pytest.param("logistic", Setting(8, 6, 1, 0.0), marks=pytest.mark.long),
        pytest.param("poisson", Setting(8, 8, 1, 0.0), marks=pytest.mark.long),
        pytest.param("student_t", Setting(8, 8, 1, 0.0), marks=pytest.mark.long),
    ],
)
def test_compensators_at_arrivals_are_exponential(model, setting):
    comparison = levels_of(model, setting)
    assert comparison.exact, str(comparison)


@pytest.mark.parametrize(
    ("setting", "wrong"), [(None, 1.3), pytest.param(Setting(0, 8, 2, 0.0), 1.1, marks=pytest.mark.long)]
)
def test_compensators_of_another_rate_are_not(setting, wrong):
    assert not levels_of("logistic", setting, wrong).exact


@pytest.mark.long
def test_a_comparison_sees_a_wrong_posterior(only_dense):
    post, _ = sampled("logistic", 3)
    assert not compare(post, found("logistic", 1)[1]).exact
