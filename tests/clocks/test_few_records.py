"""Few records, and priors of spreads, on rotations: the arrivals have the law of the rates."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from tests.clocks.laws import answered
from tests.potentials.test_bent_spread_prior import LAWS, remainder
from tests.support import LOSS_NAMES, predictor

import fedpdmc as fp
from fedpdmc._jax.random_streams import chain_keys
from fedpdmc.clocks import VIOLATED, ThinnedClock
from fedpdmc.dynamics import Boomerang
from fedpdmc.plan import Plan
from fedpdmc.potentials import BentSpreadPrior, LinearPredictor

pytestmark = pytest.mark.usefixtures("double")

CHAINS = 20_000


def few(name):
    """Two records, or the prior of two spreads of which one is bent."""
    if name in LAWS:
        return remainder(name)
    scale = {"logistic": 3.0, "poisson": 0.5, "student_t": 0.9}[name]
    records = dataclasses.replace(predictor(name, seed=3, n=2, d=3, scale=scale), weight=jnp.asarray([0.7, 1.4]))
    return records if name == "poisson" else records.expanded_at(jnp.asarray([0.2, -0.1, 0.1]), 2)


def plan_of(dim):
    """One plan of three segments for all chains."""
    rng = np.random.default_rng(5)
    duration = np.array([0.6, 1.2, 0.9])
    start, velocity = rng.normal(size=dim), 1.5 * rng.normal(size=(3, dim))

    def all_chains(x):
        return jnp.broadcast_to(jnp.asarray(x), (CHAINS, *np.shape(x)))

    return Plan(jnp.ones(CHAINS, int), all_chains(start), all_chains(duration), all_chains(velocity), jnp.zeros(CHAINS))


def hazard(potential, plan, steps=4000):
    """Times along the plan, and the integral of the rate up to them."""
    a, times, totals, began, total = np.asarray(plan.start)[0], [0.0], [0.0], 0.0, 0.0
    flow = Boomerang().flow
    for velocity, duration in zip(np.asarray(plan.velocity)[0], np.asarray(plan.duration)[0], strict=True):
        middles = (np.arange(steps) + 0.5) * duration / steps
        there, moving = flow.move(
            jnp.broadcast_to(a, (steps, len(a))), jnp.broadcast_to(velocity, (steps, len(a))), jnp.asarray(middles)
        )
        rates = np.maximum(np.sum(np.asarray(potential.gradients(there)) * np.asarray(moving), 1), 0)
        times.extend(began + (np.arange(steps) + 1) * duration / steps)
        totals.extend(total + np.cumsum(rates) * duration / steps)
        began, total = times[-1], totals[-1]
        a = np.asarray(flow.move(a[None], velocity[None], jnp.asarray([duration]))[0])[0]
    return np.array(times), np.array(totals)


def deviation(clock, potential):
    """How unlikely the arrivals of a clock are under the rates of a potential: of their number, and of their times."""
    plan = plan_of(potential.dim)
    arrival, walk = answered(clock, chain_keys(jax.random.key(7), CHAINS), plan)
    assert not np.any(walk.fault)
    rang, time = np.asarray(arrival.rang), np.asarray(arrival.time)
    times, totals = hazard(potential, plan)
    share = 1 - np.exp(-totals[-1])
    assert 0.05 < share < 0.98
    number = stats.binomtest(int(rang.sum()), CHAINS, share).pvalue
    uniform = (1 - np.exp(-np.interp(time[rang], times, totals))) / share
    return min(number, stats.kstest(uniform, "uniform").pvalue)


@pytest.mark.parametrize("name", [*LOSS_NAMES, *LAWS])
def test_arrivals_have_the_law_of_the_rates(name):
    potential = few(name)
    assert deviation(ThinnedClock(potential, Boomerang()), potential) > 1e-3


def test_other_rates_have_other_arrivals():
    potential = few("poisson")
    other = dataclasses.replace(potential, response=potential.response + 0.1)
    assert deviation(ThinnedClock(other, Boomerang()), potential) < 1e-6


def test_normals_are_unit_gradients_where_the_event_is():
    potential, dynamics = few("logistic"), Boomerang()
    plan, keys = plan_of(3), chain_keys(jax.random.key(1), CHAINS)
    arrival, _ = answered(ThinnedClock(potential, dynamics), keys, plan)
    first = np.asarray(arrival.rang) & (np.asarray(arrival.time) < 0.6)
    there, _ = dynamics.flow.move(plan.start, plan.velocity[:, 0], arrival.time)
    gradient = np.asarray(potential.gradients(there))
    unit = gradient / np.linalg.norm(gradient, axis=1, keepdims=True)
    np.testing.assert_allclose(np.asarray(arrival.mark)[first], unit[first], atol=1e-12)
    assert first.sum() > 50


class TooLow(BentSpreadPrior):
    """Bounds without the part that follows the slope, and less."""

    def field(self, rotating, flips, a, v):
        found = super().field(rotating, flips, a, v)
        return found._replace(slope=found.slope - 0.5, curve=0.0 * found.curve)


def test_a_bound_that_is_too_low_is_a_fault():
    spreads = remainder(next(iter(LAWS)))
    lower = TooLow(**{field.name: getattr(spreads, field.name) for field in dataclasses.fields(spreads)})
    _, walk = answered(ThinnedClock(lower, Boomerang()), chain_keys(jax.random.key(7), CHAINS), plan_of(lower.dim))
    assert np.any(np.asarray(walk.fault) == VIOLATED)


@pytest.mark.parametrize("bend", [True, pytest.param(False, marks=pytest.mark.long)])
def test_the_prior_of_a_spread_has_it(bend):
    """In a run with effects that are weakly known, and well known: only the former is bent."""
    rng = np.random.default_rng(2)
    n, groups = (40, 8) if bend else (1600, 40)
    group = np.arange(n) % groups
    X = np.c_[np.ones(n), rng.normal(size=n)]
    chance = 1 / (1 + np.exp(-X @ [0.2, 0.5] - 0.6 * rng.normal(size=groups)[group]))
    model = fp.models.random_effects(X, (rng.random(n) < chance).astype(float), group)
    post = fp.sample([fp.Site(model, name="one")], fp.models.effects_prior(model), ess=40, seed=1, progress=False)
    clocks = {entry["site"]: entry["clock"] for entry in post.settings["clocks"]}
    assert clocks == {"one": "LatentClock", "prior": "ThinnedClock"}
    assert (post.reference.bend is not None) == bend


def test_both_kinds_of_potential_are_tried():
    assert {type(few(name)) for name in (*LOSS_NAMES, *LAWS)} == {LinearPredictor, BentSpreadPrior}
