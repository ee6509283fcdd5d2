"""What a potential says of its gradient along a path, against automatic differentiation."""

import jax.numpy as jnp
import numpy as np
import pytest
from tests.potentials.paths import along, fields, times_within
from tests.support import LOSS_NAMES, predictor, states

from fedpdmc.potentials import LinearUnknownScale, Quadratic, Sum
from fedpdmc.whitening import Reference

pytestmark = pytest.mark.usefixtures("double")

PATHS = [pytest.param(False, id="line"), pytest.param(True, id="rotation")]
CHAINS, DIM, TIMES = 40, 3, 25


def quadratic(seed=0, d=DIM):
    """Symmetric and indefinite."""
    rng = np.random.default_rng(seed)
    half = rng.normal(size=(d, d))
    return Quadratic(jnp.asarray(half + half.T), jnp.asarray(rng.normal(size=d)))


def build(name):
    """A potential by name, some with a control variate of order 1 or 2 expanded away from the origin."""
    point = jnp.asarray([0.2, -0.4, 0.1])
    kind, _, order = name.partition("-")
    if kind == "quadratic":
        return quadratic()
    if kind == "scale":
        # As it is, or whitened about a point with correlated coordinates, less a control variate.
        rng = np.random.default_rng(5)
        X = rng.normal(size=(9, 2))
        likelihood = LinearUnknownScale.of_records(X, X @ [1.0, -2.0] + 0.7 * rng.normal(size=9))
        reference = Reference(point, 0.3 * jnp.eye(3) + 0.1 * jnp.tril(jnp.ones((3, 3))))
        return Sum((likelihood.whiten(reference, None), quadratic(4))) if order else likelihood
    if kind == "cells":
        return predictor("poisson", diagonal=True)
    if kind == "sum":
        return Sum((predictor("logistic").expanded_at(point, 2), quadratic(3)))
    potential = predictor(kind)
    return potential.expanded_at(point, int(order)) if order else potential


NAMES = [
    *LOSS_NAMES,
    *(f"{name}-{order}" for name in LOSS_NAMES for order in (1, 2)),
    "quadratic",
    "cells",
    "sum",
    "scale",
    "scale-2",
]


@pytest.mark.parametrize("rotating", PATHS)
@pytest.mark.parametrize("name", NAMES)
def test_gradient_and_slopes_are_the_derivatives_along_the_path(name, rotating):
    potential, (a, v) = build(name), states(1, CHAINS, DIM)
    made = fields(potential, a, v)
    flips, reflections = made[rotating, True], made[rotating, False]
    (gradient, change, _), (_, _, second, _) = along(potential, rotating, a, v, jnp.zeros((CHAINS, TIMES)))
    np.testing.assert_allclose(flips.gradient, gradient[:, 0], rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(reflections.gradient, gradient[:, 0], rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(flips.slope, change[:, 0], rtol=1e-8, atol=1e-9)
    np.testing.assert_allclose(reflections.slope, second[:, :1], rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("rotating", PATHS)
@pytest.mark.parametrize("name", NAMES)
def test_curve_bounds_the_second_change_within_reach(name, rotating):
    potential = build(name)
    for spread in (0.01, 1.0, 3.0):
        a, v = states(2, CHAINS, DIM, spread=spread)
        for flips in (True, False):
            made = fields(potential, a, v)[rotating, flips]
            (_, _, bend), (_, _, _, third) = along(potential, rotating, a, v, times_within(made.reach, TIMES))
            actual = jnp.max(jnp.abs(bend), 1) if flips else jnp.max(jnp.abs(third), 1)[:, None]
            room = 1e-9 * (jnp.abs(made.gradient).max() + jnp.abs(made.slope).max() + 1e-3)
            assert jnp.all(actual <= made.curve * (1 + 1e-9) + room)


@pytest.mark.parametrize("rotating", PATHS)
@pytest.mark.parametrize("name", NAMES)
def test_affine_is_said_only_where_the_field_is_exact_for_ever(name, rotating):
    potential, (a, v) = build(name), states(3, CHAINS, DIM)
    for flips in (True, False):
        made = fields(potential, a, v)[rotating, flips]
        exact = bool(jnp.all(made.curve == 0) & jnp.all(jnp.isinf(made.reach)))
        assert exact or not potential.affine(rotating)


def test_a_sum_adds_fields_and_keeps_the_shortest_reach():
    first, second, (a, v) = predictor("logistic"), quadratic(), states(4, CHAINS, DIM)
    total, one, two = (fields(p, a, v)[False, True] for p in (Sum((first, second)), first, second))
    for part in ("gradient", "slope", "curve", "slack"):
        np.testing.assert_array_equal(getattr(total, part), getattr(one, part) + getattr(two, part))
    np.testing.assert_array_equal(total.reach, jnp.minimum(one.reach, two.reach))
