"""Thinning in stages: each stage dominates the next, and the arrivals are those of thinning on cells."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats
from tests.support import DYNAMICS, LOSS_NAMES, predictor, states

from fedpdmc._jax.random_streams import chain_keys
from fedpdmc.clocks import VIOLATED, SegmentClock, answer
from fedpdmc.clocks.choose import third_order
from fedpdmc.clocks.envelopes import signed_rates
from fedpdmc.clocks.thinning import Ceilings, ThinnedClock, ThirdOrder
from fedpdmc.plan import Plan
from fedpdmc.potentials import Quadratic, Sum

pytestmark = pytest.mark.usefixtures("double")


def clock(name, dynamics, sharing=False):
    """Of records, alone or beside a share of the prior."""
    center = jnp.asarray([0.2, -0.1, 0.1])
    potential = predictor(name, seed=0, n=40, d=3, scale=0.4).expanded_at(center, 2)
    if sharing:
        precision = jnp.asarray([[0.5, 0.2, 0.0], [0.2, 0.3, -0.1], [0.0, -0.1, 0.4]])
        potential = Sum((potential, Quadratic(precision, jnp.asarray([0.2, -0.3, 0.1]))))
    envelope = third_order(potential, center)
    assert envelope is not None and (envelope.quadratic is not None) == sharing
    return SegmentClock(potential, dynamics, envelope)


# One dynamics of each kind of path every day.
KINDS = [pytest.param(kind, marks=() if kind in ("zigzag", "boomerang") else pytest.mark.long) for kind in DYNAMICS]


@pytest.mark.parametrize(("name", "sharing"), [*((name, False) for name in LOSS_NAMES), ("logistic", True)])
@pytest.mark.parametrize("kind", KINDS)
def test_constants_dominate_the_tensor_which_dominates_the_rate(name, sharing, kind):
    dynamics = DYNAMICS[kind]
    staged = clock(name, dynamics, sharing)
    a, v = states(1, 500, 3, dynamics, spread=1.5)
    constants, cell = staged.envelope.constants(dynamics, a, v, jnp.full(500, 0.8))
    for share in np.linspace(0, 1, 9):
        there, velocity = dynamics.flow.move(a, v, share * cell)
        tensor = staged.envelope.bound(dynamics, there, velocity)
        rates = signed_rates(dynamics, staged.potential.gradients(there), velocity)
        assert np.all(tensor <= constants)
        assert np.all(rates <= tensor)


# Every day lines alone, and rotations beside a share.
DAILY = [("zigzag", False), ("boomerang", True)]


@pytest.mark.parametrize(
    ("kind", "sharing"),
    [
        pytest.param(
            kind, sharing, id=f"{kind}-{'beside a share of the prior' if sharing else 'alone'}",
            marks=() if (kind, sharing) in DAILY else pytest.mark.long,
        )
        for kind in DYNAMICS
        for sharing in (False, True)
    ],
)  # fmt: skip
def test_arrivals_have_the_law_of_thinning_on_cells(kind, sharing):
    dynamics = DYNAMICS[kind]
    staged = clock("logistic", dynamics, sharing)
    cells = ThinnedClock(potential=staged.potential, dynamics=dynamics)
    chains = 4000
    a, v = (jnp.broadcast_to(x, (chains, 3)) for x in states(5, 1, 3, dynamics, spread=3.0))
    plan = Plan(jnp.zeros(chains, int), a, jnp.full((chains, 2), 1.5), jnp.stack([v, -v], 1))
    one, _ = answer(staged, chain_keys(jax.random.key(1), chains), plan)
    other, _ = answer(cells, chain_keys(jax.random.key(2), chains), plan)
    assert 0.2 < float(jnp.mean(other.rang)) < 1.0
    assert stats.ks_2samp(np.asarray(one.time), np.asarray(other.time)).pvalue > 1e-3
    if dynamics.flips:
        table = [np.bincount(np.asarray(x.mark)[np.asarray(x.rang)], minlength=3) for x in (one, other)]
        table = np.asarray(table)[:, np.sum(table, 0) > 0]
        assert stats.chi2_contingency(table).pvalue > 1e-3


def test_a_tensor_bound_set_too_low_is_caught():
    dynamics = DYNAMICS["boomerang"]
    staged = clock("poisson", dynamics)
    wrong = dataclasses.replace(staged.envelope.remainder, quartic=jnp.asarray(0.0), growth=jnp.asarray(0.0))
    low = dataclasses.replace(staged, envelope=ThirdOrder(wrong))
    a, v = states(3, 64, 3, dynamics, spread=4.0)
    plan = Plan(jnp.zeros(64, int), a, jnp.full((64, 1), 5.0), v[:, None])
    _, walk = answer(low, chain_keys(jax.random.key(1), 64), plan)
    assert np.any(np.asarray(walk.fault) == VIOLATED)


def test_a_share_of_the_prior_that_the_envelope_does_not_know_is_caught():
    dynamics = DYNAMICS["boomerang"]
    low = dataclasses.replace(clock("logistic", dynamics), potential=clock("logistic", dynamics, True).potential)
    a, v = states(3, 64, 3, dynamics, spread=2.0)
    plan = Plan(jnp.zeros(64, int), a, jnp.full((64, 1), 5.0), v[:, None])
    _, walk = answer(low, chain_keys(jax.random.key(1), 64), plan)
    assert np.any(np.asarray(walk.fault) == VIOLATED)


@given(
    rates=arrays(float, (5, 2, 3), elements=st.floats(0.0, 20.0)),
    lengths=arrays(float, (5, 3), elements=st.floats(0.0, 3.0)),
    levels=arrays(float, 3, elements=st.floats(1e-6, 120.0)),
)
def test_ceilings_are_inverted_over_the_whole_plan(rates, lengths, levels):
    """The integral up to the point that is found, by the sums over whole cells and the part of the last, is the level."""
    ceilings = Ceilings.of(jnp.asarray(rates), jnp.asarray(lengths))
    found = jax.tree.map(np.asarray, ceilings.point(jnp.asarray(levels), jnp.full(3, 0.5)))
    pieces = rates.sum(1) * lengths
    margin = 1e-12 * (1 + pieces.sum(0))
    assert np.all(found.over | (levels <= pieces.sum(0) + margin))
    assert np.all(~found.over | (levels >= pieces.sum(0) - margin))
    passed = np.asarray(ceilings.passed(jnp.asarray(found.cell), jnp.asarray(found.offset)))
    for chain in np.flatnonzero(~found.over):
        cell, own = found.cell[chain], rates[:, :, chain].sum(1)
        reached = pieces[:cell, chain].sum() + own[cell] * found.offset[chain]
        assert 0 <= found.offset[chain] <= lengths[cell, chain]
        np.testing.assert_allclose([reached, passed[chain]], levels[chain], atol=margin[chain])
        assert found.ceiling[chain] == rates[cell, found.mark[chain], chain]
