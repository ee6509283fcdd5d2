"""A certified bound is never below the rate: on the chord that thinning uses, at any time of the cell."""

import dataclasses

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
from tests.support import DYNAMICS, LOSS_NAMES, loss, predictor, states

import fedpdmc as fp
from fedpdmc.clocks import SegmentClock
from fedpdmc.clocks.envelopes import certified, signed_rates, taylor
from fedpdmc.clocks.thinning import cell_length
from fedpdmc.members.run_coordinates import Opening, open_site
from fedpdmc.potentials import LinearPredictor, Logistic, Quadratic, Sum

pytestmark = pytest.mark.usefixtures("double")

CHAINS, DIM, LONGEST = 100, 3, 3.0
POINT = np.array([0.2, -0.4, 0.1])
# From the anchor itself, where only rounding can do harm, to the far end of the cell.
FRACTIONS = np.concatenate([[0.0], 10.0 ** np.arange(-16, -2, 2), np.linspace(0.01, 1.0, 24)])


@eqx.filter_jit
def bound_and_rates(potential, dynamics, a, v):
    """The chord bound on each chain's cell and the signed rates, both of shape (C, times, marks)."""
    rotating, flips, n = dynamics.flow.rotating, dynamics.flips, len(FRACTIONS)
    bound = certified(dynamics, potential.field(rotating, flips, a, v), a, v)
    cell = jnp.minimum(LONGEST, jnp.minimum(bound.reach, cell_length(bound)))
    s = cell[:, None] * FRACTIONS
    chord = bound.value[:, None] + (bound.slope + 0.5 * bound.curve * cell[:, None])[:, None] * s[..., None]
    there, speed = dynamics.flow.move(jnp.repeat(a, n, 0), jnp.repeat(v, n, 0), s.ravel())
    rates = signed_rates(dynamics, potential.field(rotating, flips, there, speed).gradient, speed)
    return chord, rates.reshape(chord.shape)


def assert_bounded(potential, dynamics, center=0.0, spreads=(1e-9, 1e-3, 1.0, 5.0), slow=1.0):
    for seed, spread in enumerate(spreads):
        a, v = states(seed, CHAINS, DIM, dynamics, spread=spread)
        chord, rates = bound_and_rates(potential, dynamics, a + center, v if dynamics.unit_speed else slow * v)
        assert np.all(rates <= chord)


@pytest.mark.parametrize("kind", DYNAMICS)
@pytest.mark.parametrize("name", LOSS_NAMES)
def test_every_loss_on_every_dynamics(name, kind):
    potential, dynamics = predictor(name), DYNAMICS[kind]
    assert_bounded(potential, dynamics)
    for order in (1, 2):
        rest = potential.expanded_at(jnp.asarray(POINT), order)
        assert_bounded(rest, dynamics)
        # Next to the point of expansion the remainder is a difference of large numbers.
        assert_bounded(rest, dynamics, center=POINT)


@pytest.mark.parametrize("kind", DYNAMICS)
def test_cells_of_a_grid(kind):
    assert_bounded(predictor("poisson", d=DIM, diagonal=True), DYNAMICS[kind])


@pytest.mark.parametrize("kind", DYNAMICS)
def test_quadratics_and_sums(kind):
    half = np.random.default_rng(0).normal(size=(DIM, DIM))
    quadratic = Quadratic(jnp.asarray(half + half.T), jnp.asarray(POINT))
    assert_bounded(quadratic, DYNAMICS[kind])
    assert_bounded(Sum((predictor("logistic"), quadratic)), DYNAMICS[kind])


@pytest.mark.parametrize("kind", ["zigzag", "boomerang"])
@pytest.mark.parametrize("name", LOSS_NAMES)
def test_covariates_of_a_million(name, kind):
    potential = predictor(name, scale=1e6).expanded_at(jnp.asarray(POINT * 1e-6), 2)
    assert_bounded(potential, DYNAMICS[kind], spreads=(1e-15, 1e-9, 1e-6), slow=1e-6)


@pytest.mark.parametrize("kind", ["zigzag", "boomerang"])
@pytest.mark.parametrize("name", LOSS_NAMES)
def test_far_from_the_origin(name, kind):
    potential, far = predictor(name), np.array([1e6, -2e6, 0.5e6])
    moved = dataclasses.replace(potential, offset=potential.offset - potential.design @ far)
    assert_bounded(moved, DYNAMICS[kind], center=far, spreads=(1e-3, 1.0))


@pytest.mark.parametrize("kind", ["zigzag", "boomerang"])
def test_counts_of_a_million_million(kind):
    design = np.random.default_rng(0).normal(size=(12, DIM))
    counts = jnp.asarray(np.round(np.exp(design @ POINT + 27.0)))
    potential = LinearPredictor.from_records(jnp.asarray(design), counts, loss("poisson"), jnp.full(12, 27.0))
    assert_bounded(potential, DYNAMICS[kind], center=POINT, spreads=(1e-9, 1e-6, 1e-3), slow=1e-6)


def test_counts_of_a_million_million_in_stages():
    dynamics, design = DYNAMICS["boomerang"], np.random.default_rng(0).normal(size=(12, 2))
    site = fp.Site(fp.models.poisson(design, np.round(np.exp(design @ POINT[:2] + 27.0))), name="many")
    made = fp.laplace([site])
    clock = open_site(site, Opening(made, dynamics, made.control["many"]))
    assert isinstance(clock, SegmentClock)
    a, v = states(0, 1000, 2)
    rates = signed_rates(dynamics, clock.potential.gradients(a), v)
    assert np.all(rates <= clock.envelope.bound(dynamics, a, v))


@pytest.mark.parametrize("kind", DYNAMICS)
def test_nearly_collinear_columns_with_the_cubic_tensor(kind):
    rng = np.random.default_rng(0)
    column = rng.normal(size=(16, 1))
    design = 1e3 * np.concatenate([column, column * (1 + 1e-7 * rng.normal(size=(16, 1))), 1e-3 * column], 1)
    labels = jnp.asarray(rng.integers(0, 2, 16).astype(float))
    potential = LinearPredictor.from_records(jnp.asarray(design), labels, Logistic()).with_cubic()
    assert potential.cubic is not None
    assert_bounded(potential, DYNAMICS[kind], spreads=(1e-9, 1e-3))


def test_a_rate_raised_by_a_tenth_breaks_the_bound():
    potential, dynamics = predictor("logistic"), DYNAMICS["zigzag"]
    chord, rates = bound_and_rates(potential, dynamics, *states(0, CHAINS, DIM, dynamics))
    assert np.any(1.1 * rates > chord)


@pytest.mark.parametrize("kind", DYNAMICS)
def test_the_bound_is_the_rate_at_the_anchor(kind):
    dynamics, potential = DYNAMICS[kind], predictor("logistic")
    a, v = states(0, CHAINS, DIM, dynamics)
    field = potential.field(dynamics.flow.rotating, dynamics.flips, a, v)
    exact, loose = taylor(dynamics, field, a, v), certified(dynamics, field, a, v)
    np.testing.assert_allclose(loose.value, exact.value, rtol=1e-8, atol=1e-11)
    np.testing.assert_allclose(loose.slope, exact.slope, rtol=1e-8, atol=1e-11)
