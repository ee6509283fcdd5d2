"""The choice of a clock: the lowest cost of those that apply, for whatever a site holds beside its records."""

import jax.numpy as jnp
import numpy as np
import pytest
from tests.support import DYNAMICS, predictor

import fedpdmc as fp
from fedpdmc.clocks import CurveClock, ThinnedClock
from fedpdmc.clocks.choose import ClockOffer, _cheapest, choices_in_one_process, choose, cost_of_cells, third_order
from fedpdmc.members.run_coordinates import Opening, choose_clock
from fedpdmc.potentials import Program, Quadratic, Sum

pytestmark = pytest.mark.usefixtures("double")

ZIGZAG, BOOMERANG = DYNAMICS["zigzag"], DYNAMICS["boomerang"]
X = np.concatenate([np.ones((300, 1)), np.random.default_rng(4).normal(size=(300, 2))], 1)


def records():
    outcomes = (np.random.default_rng(5).random(300) < 0.4).astype(float)
    return fp.Site(fp.models.logistic(X, outcomes), name="one")


def prior(factor=1.0):
    return fp.models.normal_prior(3, scale=2.0).scaled(factor)


class Named(ThinnedClock):
    """A clock of another name."""

    called: str = ""

    @property
    def name(self) -> str:
        return self.called


def offers(*costs, made=None):
    for place, (cost, enough) in enumerate(costs):
        if made is not None:
            made.append(place)
        yield ClockOffer(Named(predictor("logistic"), ZIGZAG, called=str(place)), lambda cost=cost: cost, enough)


def test_the_lowest_cost_wins_and_is_reported_with_the_others():
    found = _cheapest(offers((7.0, 3.0), (5.0, 3.0), (6.0, None)))
    assert found.report == {"clock": "1", "why": "the lowest cost", "cost": 5.0, "alternatives": {"0": 7.0, "2": 6.0}}


def test_a_clock_that_is_cheap_enough_spares_the_others():
    made = []
    found = _cheapest(offers((7.0, 3.0), (2.0, 3.0), (1.0, None), made=made))
    assert found.clock.name == "1" and "below 3" in found.why and made == [0, 1]


def test_a_clock_without_alternative_is_not_measured():
    assert _cheapest(offers((7.0, None))).report["why"] == "no other applies"


def test_envelopes_cost_less_than_cells_where_they_are_good():
    center = jnp.zeros(3)
    good = predictor("logistic", n=300, d=3, scale=0.05).expanded_at(center, 2)
    third = third_order(good, center)
    assert third is not None and third.cost(good, BOOMERANG) < 0.1 * cost_of_cells(good, BOOMERANG)
    # Few records with large covariates: the third order says nothing where the process goes.
    poor = predictor("poisson", n=12, d=3, scale=1.5).expanded_at(center, 2)
    found = choose(poor, BOOMERANG, center)
    assert found.clock.name == "ThinnedClock" and found.costs["ThirdOrder"] > found.costs["ThinnedClock"]


def sums(count, n, scale):
    """Sums over records less their quadratics at the centre."""
    return [predictor("logistic", seed=k, n=n, d=3, scale=scale).expanded_at(jnp.zeros(3), 2) for k in range(count)]


def test_no_tensor_is_made_where_dense_clocks_cost_less_whatever_it_says():
    def each():
        raise AssertionError("a clock was made for every site")

    found = choices_in_one_process(sums(40, 16, 0.2), each, BOOMERANG, 64)
    assert {choice.report["clock"] for choice in found} == {"DenseClock"} and len(found) == 40


def test_third_orders_run_in_lockstep_where_they_cost_least():
    potentials = sums(4, 3000, 0.01)

    def each():
        return [choose(potential, BOOMERANG, jnp.zeros(3)) for potential in potentials]

    found = choices_in_one_process(potentials, each, BOOMERANG, 64)
    assert all(isinstance(choice.clock, CurveClock) and choice.report["clock"] == "ThirdOrder" for choice in found)
    assert all(choice.report["cost"] < choice.report["alternatives"]["DenseClock"] for choice in found)
    # Flips have no lockstep.
    assert choices_in_one_process(potentials, lambda: found, ZIGZAG, 64) is found


def clock_of(site, dynamics, share=None):
    made = fp.laplace([site], prior())
    return choose_clock(site, Opening(made, dynamics, made.control[site.name], share)).clock


def test_a_share_of_the_prior_keeps_the_fast_clock():
    alone, sharing = (clock_of(records(), BOOMERANG, share=share) for share in (None, prior(0.5)))
    assert alone.name == sharing.name != "ThinnedClock"
    a = jnp.asarray(np.random.default_rng(6).normal(size=(5, 3)))
    share = prior(0.5).whiten(fp.laplace([records()], prior()), None)
    difference = sharing.potential.gradients(a) - alone.potential.gradients(a)
    np.testing.assert_allclose(difference, share.gradients(a), atol=1e-10)


def test_a_program_takes_a_share_of_the_prior_into_its_control_variate():
    def counts(x, data):
        z = data @ x
        return jnp.sum(jnp.exp(z) - z)

    site = fp.Site(counts, name="one", data=0.3 * X[:20]).sized(3)
    clock = clock_of(site, ZIGZAG, share=prior(0.5))
    assert isinstance(clock.potential, Program) and clock.name != "ThinnedClock"


def test_quadratics_become_one():
    potential = Sum((predictor("logistic").expanded_at(jnp.zeros(3), 2), *[Quadratic(jnp.eye(3), jnp.ones(3))] * 2))
    found = third_order(potential, jnp.zeros(3))
    assert found is not None and found.quadratic is not None
    np.testing.assert_allclose(found.quadratic.matrix, 2 * np.eye(3))
