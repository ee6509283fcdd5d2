"""Thinning on a polynomial: the arrivals are those of thinning on the records, with a pass over them now and then."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.clocks.laws import agree, answered, heard
from tests.support import DYNAMICS, predictor

from fedpdmc._jax.random_streams import chain_keys
from fedpdmc.clocks import VIOLATED, clock_for
from fedpdmc.clocks.cell_thinning import ThinnedClock
from fedpdmc.clocks.envelopes.record_polynomial import RecordPolynomial
from fedpdmc.plan import Plan
from fedpdmc.potentials import Quadratic, Sum

pytestmark = pytest.mark.usefixtures("double")

CHAINS, ZIGZAG = 4000, DYNAMICS["zigzag"]


def clock(name="logistic") -> ThinnedClock:
    prior = Quadratic(jnp.diag(jnp.asarray([1.0, 2.0, 0.5])), jnp.asarray([0.3, -1.0, 0.0]))
    made = clock_for(Sum((predictor(name, seed=2, n=300, d=3).with_cubic(), prior)), ZIGZAG)
    assert isinstance(made.envelope, RecordPolynomial)
    return made


def plan(center, offset, length=0.6):
    """All chains from one state."""
    start = jnp.broadcast_to(center + jnp.asarray(offset), (CHAINS, 3))
    v = jnp.broadcast_to(jnp.asarray([1.0, -1.0, 1.0]), (CHAINS, 3))
    return Plan(jnp.zeros(CHAINS, int), start, jnp.full((CHAINS, 2), length), jnp.stack([v, -v], 1))


@pytest.mark.parametrize("name", ["logistic", pytest.param("student_t", marks=pytest.mark.long)])
@pytest.mark.parametrize("offset", [[-0.1, 0.05, 0.1], [-4.0, 3.0, -5.0]], ids=["near", "far"])
def test_arrivals_have_the_law_of_thinning_on_the_records(name, offset):
    squeezed = clock(name)
    route = plan(squeezed.envelope.expansion.center, offset)
    one = heard(squeezed, route, 1)
    other = heard(ThinnedClock(squeezed.potential, ZIGZAG), route, 2)
    assert min(agree(one, other)) > 1e-3
    # Near the mode the records are hardly asked; far from it they always are.
    assert (one[2].mean() < 0.2 * other[2].mean()) if offset[0] > -1 else (one[2].mean() >= 0.5)


def test_arrivals_where_covariates_are_collinear():
    records, prior = predictor("logistic", seed=2, n=300, d=3), Quadratic(0.01 * jnp.eye(3), jnp.zeros(3))
    alike = dataclasses.replace(records, design=jnp.repeat(records.design[:, :1], 3, 1)).with_cubic()
    squeezed = clock_for(Sum((alike, prior)), ZIGZAG)
    assert isinstance(squeezed.envelope, RecordPolynomial)
    route = plan(squeezed.envelope.expansion.center, [9.0, -12.0, 3.0])
    assert min(agree(heard(squeezed, route, 1), heard(ThinnedClock(squeezed.potential, ZIGZAG), route, 2))) > 1e-3


def test_a_wrong_polynomial_gives_other_arrivals():
    squeezed = clock()
    known = squeezed.envelope.expansion
    wrong = dataclasses.replace(known, terms=1.1 * known.terms, rest=0 * known.rest, spread=0 * known.spread)
    route = plan(known.center, [-0.1, 0.05, 0.1])
    one = heard(eqx.tree_at(lambda c: c.envelope.expansion, squeezed, wrong), route, 1)
    assert min(agree(one, heard(ThinnedClock(squeezed.potential, ZIGZAG), route, 2))) < 1e-3


def test_a_polynomial_beyond_its_error_is_caught_by_the_records():
    squeezed = clock()
    known = squeezed.envelope.expansion
    wrong = dataclasses.replace(known, terms=known.terms.at[:, 0].add(3.0))
    route = plan(known.center, [-0.2, 0.1, 0.2])
    _, walk = answered(
        eqx.tree_at(lambda c: c.envelope.expansion, squeezed, wrong), chain_keys(jax.random.key(1), CHAINS), route
    )
    assert np.any(np.asarray(walk.fault) == VIOLATED)
