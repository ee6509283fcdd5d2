"""Records as a polynomial: its error and that of its slope are bounded, near the site's own mode and far from it."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.support import predictor

from fedpdmc.enclosures.multi_index import exponents, factorials, powers
from fedpdmc.potentials import Quadratic, Sum
from fedpdmc.potentials.record_taylor import DEGREE, Expansion, expansion

pytestmark = pytest.mark.usefixtures("double")


@pytest.mark.parametrize("dim", [2, 6])
def test_monomials_are_those_of_the_multinomial_formula(dim):
    b, c = np.random.default_rng(0).normal(size=(2, dim, 7))
    for k in range(5):
        one, other = (powers(jnp.asarray(x), k, k) for x in (b, c))
        assert one.shape[0] == math.comb(dim + k - 1, k)
        expected, factorial = (b * c).sum(0) ** k / math.factorial(k), factorials(exponents(dim, k, k))
        np.testing.assert_allclose((np.asarray(one * other) / factorial[:, None]).sum(0), expected, rtol=1e-10)


def expanded(potential) -> Expansion:
    known = expansion(potential)
    assert known is not None
    return known


def potential_of(name, with_prior):
    """Records, alone or with a share of a prior."""
    records = predictor(name, seed=3, n=400, d=3, scale=0.7)
    prior = Quadratic(jnp.diag(jnp.asarray([1.0, 2.0, 0.5])), jnp.asarray([0.3, -1.0, 0.0]))
    return Sum((records, prior)) if with_prior else records


# Every day each loss once near its mode, with the prior or without, and once far from it.
DAILY = [("logistic", True, 0.1), ("student_t", False, 0.1), ("logistic", False, 3.0), ("student_t", True, 100.0)]


@pytest.mark.parametrize(
    ("name", "with_prior", "spread"),
    [
        pytest.param(*case, marks=() if case in DAILY else pytest.mark.long)
        for case in itertools.product(("logistic", "student_t"), (False, True), (0.1, 3.0, 100.0))
    ],
)
def test_errors_are_bounded(name, with_prior, spread):
    potential, rng = potential_of(name, with_prior), np.random.default_rng(4)
    known = expanded(potential)
    a = known.center + spread * jnp.asarray(rng.normal(size=(400, 3)))
    v = jnp.asarray(rng.choice([-1.0, 1.0], size=(400, 3)))
    b = (a - known.center).T
    gradient, slope = jax.vmap(lambda x, y: jax.jvp(potential.gradient, (x,), (y,)))(a, v)
    off, bound = np.abs(gradient.T - known.gradient(b)), np.asarray(known.error(b))
    assert np.all(off <= bound + known.slip(b))
    tilt = np.asarray(known.slope_error(known.error(b), v.T))
    assert np.all(np.abs(slope.T - known.slope(b, v.T)) <= tilt + 1e-9)
    if spread == 0.1:
        # The bounds are of the order of the errors: they are of use.
        assert np.mean(bound) < 30 * np.mean(off)
        assert np.mean(tilt) < 90 * np.mean(np.abs(slope.T - known.slope(b, v.T)))


@pytest.mark.parametrize("columns", [[1.0, 1.0, 1.0], [1.0, 0.7, -0.2]])
def test_bounds_hold_where_covariates_are_collinear(columns):
    """Where ``|u_n|`` is far below ``|b|`` the monomials of the bound cancel."""
    records, rng = predictor("logistic", seed=3, n=400, d=3), np.random.default_rng(6)
    design = records.design[:, :1] * jnp.asarray(columns)
    potential = type(records).from_records(design, records.response, records.loss)
    known, across = expanded(potential), np.linalg.svd(np.asarray([columns]))[2][1:]
    b = jnp.asarray(10 * rng.normal(size=(2000, 2)) @ across + 1e-3 * rng.normal(size=(2000, 3))).T
    bound = np.asarray(known.error(b))
    off = np.abs(jax.vmap(potential.gradient)(known.center + b.T).T - known.gradient(b))
    assert np.any(np.asarray(known.rest @ powers(b, DEGREE + 1, DEGREE + 1)) < 0)
    assert np.all(bound >= 0) and np.all(off <= bound + known.slip(b))
    assert np.all(np.isfinite(known.slope_error(known.error(b), jnp.ones((3, 2000)))))


def test_a_bound_without_its_records_is_too_small():
    records = predictor("logistic", seed=3, n=400, d=3, scale=0.7)
    known, half = expanded(records), expanded(predictor("logistic", seed=3, n=400, d=3, scale=0.3))
    b = 0.5 * jnp.asarray(np.random.default_rng(5).normal(size=(3, 400)))
    gradient = jax.vmap(records.gradient)(known.center + b.T).T
    assert not np.all(np.abs(gradient - known.gradient(b)) <= half.error(b))


def test_it_applies_to_many_records_of_uniform_losses_alone():
    many = predictor("logistic", seed=0, n=400, d=3)
    assert expansion(many) is not None
    assert expansion(predictor("poisson", seed=0, n=400, d=3)) is None
    assert expansion(predictor("logistic", seed=0, n=200, d=3)) is None
    assert expansion(predictor("logistic", seed=0, n=200, d=3).padded(256)) is None
    assert expansion(predictor("logistic", seed=0, n=400, d=9)) is None
    assert expansion(many.expanded_at(jnp.zeros(3), 2)) is None
    assert expansion(Quadratic(jnp.eye(3), jnp.zeros(3))) is None


def test_derivatives_that_overflow_are_declined():
    records = predictor("student_t", seed=0, n=400, d=3)
    assert (
        expansion(type(records).from_records(records.design, records.response.at[0].set(1e120), records.loss)) is None
    )


def test_records_beyond_a_block_are_counted(monkeypatch):
    records = predictor("logistic", seed=0, n=400, d=3)
    whole = expanded(records)
    monkeypatch.setattr("fedpdmc.potentials.record_taylor.BLOCK", 150)
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(expanded(records)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)


def test_separable_records_have_a_center_too():
    records = predictor("logistic", seed=0, n=400, d=3)
    separable = jnp.sign(records.design[:, 0]) * 0.5 + 0.5
    known = expanded(type(records).from_records(records.design, separable, records.loss))
    assert np.all(np.isfinite(known.center)) and known.center[0] > 2
