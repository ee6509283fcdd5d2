"""Dense clocks: compensators at arrivals are Exp(1), and posteriors of the lockstep engine are those on a grid."""

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
from fedpdmc.clocks import answer, choose_lockstep, dense_settings
from fedpdmc.clocks.dense_settings import Setting, dense_clocks
from fedpdmc.errors import BoundViolation
from fedpdmc.plan import Plan
from fedpdmc.sampling.engines.lockstep_blocks import LockstepEngine

SIZES = {1: (40,), 3: (24, 12, 4), 10: (10, 8, 6, 4, 4, 3, 2, 1, 1, 1)}
answered = compiled(answer)


@functools.cache
def found(model, sites):
    """A federation of forty records, and its posterior."""
    make, seed = MODELS[model]
    target = Target(tuple(make(np.random.default_rng([seed, sites, 2]), SIZES[sites])))
    return target, on_grid(target)


@pytest.fixture
def dense(monkeypatch):
    """Every other clock is too dear."""
    dear = dense_settings.PRICES["cpu"]._replace(time=1e15)
    monkeypatch.setitem(dense_settings.PRICES, "cpu", dear)


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
def test_posteriors_are_those_on_a_grid(model, sites, dense):
    post, truth = sampled(model, sites)
    assert isinstance(post._run.engine, LockstepEngine)
    assert post.certified and post.settings["clocks"][0]["clock"] == "DenseClock"
    assert_exact(post, truth)


@pytest.mark.long
def test_refreshment_at_random_times_is_exact_too(dense):
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
        return eqx.tree_at(lambda c: c.curves, clock, Off(*(getattr(own, name) for name in own.__dataclass_fields__)))

    return [off(clock) for clock in clocks]


def test_curves_that_are_too_low_are_found_out(dense, monkeypatch):
    monkeypatch.setattr(choose_lockstep, "dense_clocks", lambda *args: scaled(dense_clocks(*args), value=0.5))
    with pytest.raises(BoundViolation):
        sampled("logistic", 3)


@pytest.mark.long
def test_without_the_error_the_posterior_is_wrong_or_the_run_stops(dense, monkeypatch):
    monkeypatch.setattr(
        choose_lockstep, "dense_clocks", lambda *args: scaled(dense_clocks(*args), value=0.97, error=0.0)
    )
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
    """Compensators at the arrivals of a dense clock along random plans."""
    target, truth = found(model, 1)
    member = target.members[0]
    reference = fp.Reference(truth.mean, np.linalg.cholesky(3.0 * truth.cov))
    potential = member.potential.whiten(reference, None)
    clock = dense_clocks([potential], fp.Boomerang(), setting, 1024)[0]
    journey = journeys.wander(fp.Boomerang(), np.zeros(2), 0.5, seed=6, reach=1.2)
    whitened = journeys.whitened(lambda x: wrong * member.records.gradient(x), reference)
    rates = journeys.rates_of(fp.Boomerang(), whitened)
    arrivals = heard(clock, journey)
    assert 0.3 < arrivals.rang.mean() < 0.999
    return exponential_test(journeys.levels(journey, rates, arrivals, seed=12))


@pytest.mark.parametrize(
    ("model", "setting"),
    [
        pytest.param("logistic", Setting(0, 8, 2, 0.0), marks=pytest.mark.long),
        pytest.param("logistic", Setting(8, 6, 1, 0.0), marks=pytest.mark.long),
        pytest.param("poisson", Setting(8, 8, 1, 0.0), marks=pytest.mark.long),
        pytest.param("student_t", Setting(8, 8, 1, 0.0), marks=pytest.mark.long),
    ],
)
def test_compensators_at_arrivals_are_exponential(model, setting):
    comparison = levels_of(model, setting)
    assert comparison.exact, str(comparison)


@pytest.mark.long
def test_compensators_of_another_rate_are_not():
    assert not levels_of("logistic", Setting(0, 8, 2, 0.0), wrong=1.1).exact


@pytest.mark.long
def test_a_comparison_sees_a_wrong_posterior(dense):
    post, _ = sampled("logistic", 3)
    assert not compare(post, found("logistic", 1)[1]).exact
