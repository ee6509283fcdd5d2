import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support import LOSS_NAMES, loss, responses

from fedpdmc.potentials import Logistic, StudentT

pytestmark = pytest.mark.usefixtures("double")

Z = np.concatenate([np.linspace(-30, 30, 241), [-1e-8, 0.0, 1e-8]])


def grid(name):
    """Predictors against responses of a loss."""
    z, y = np.meshgrid(Z, responses(name, np.random.default_rng(1), 5), indexing="ij")
    return jnp.asarray(z.ravel()), jnp.asarray(y.ravel())


def derivative(function, order):
    for _ in range(order):
        function = jax.grad(function)
    return jax.jit(jax.vmap(function))


@pytest.mark.parametrize("name", LOSS_NAMES)
def test_first_and_second_are_the_derivatives_of_the_value(name):
    model, (z, y) = loss(name), grid(name)
    np.testing.assert_allclose(model.first(z, y), derivative(model.value, 1)(z, y), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(model.second(z, y), derivative(model.value, 2)(z, y), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", LOSS_NAMES)
@given(st.floats(-20, 20), st.floats(-1, 1), st.integers(0, 4))
def test_third_bounds_the_third_derivative_within_reach(name, z, part, record):
    model = loss(name)
    y = responses(name, np.random.default_rng(1), 5)[record]
    moved = z + part * min(model.reach, 30.0)
    actual = abs(float(jax.grad(jax.grad(model.first))(jnp.asarray(moved), jnp.asarray(y))))
    bound = float(model.third(jnp.asarray(z), jnp.asarray(y)))
    assert actual <= bound * (1 + 1e-9) + 1e-12


def student(df, scale=1.0):
    return StudentT(jnp.asarray(df), jnp.asarray(scale))


@pytest.mark.parametrize("build", [Logistic, lambda: student(3.5, 0.6), lambda: student(0.5, 2.0)])
def test_third_is_attained(build):
    model, z = build(), jnp.linspace(-20, 20, 400_001)
    largest = float(jnp.max(jnp.abs(jax.vmap(jax.grad(jax.grad(model.first)), (0, None))(z, jnp.asarray(0.0)))))
    np.testing.assert_allclose(largest, float(model.third(jnp.asarray(0.0), jnp.asarray(0.0))), rtol=1e-6)


def test_logistic_curvature_is_that_of_half_the_predictor():
    z = jnp.linspace(-8, 8, 101)
    np.testing.assert_allclose(Logistic().second(z, jnp.zeros_like(z)), 1 / (4 * np.cosh(z / 2) ** 2), rtol=1e-12)


@pytest.mark.parametrize("df", [0.5, 1.0, 4.0])
def test_student_gradient_peaks_at_half_of_df_plus_one_over_root_df(df):
    z = jnp.linspace(-50, 50, 1_000_001)
    peak = float(jnp.max(jnp.abs(student(df).first(z, jnp.zeros_like(z)))))
    assert peak == pytest.approx((df + 1) / (2 * math.sqrt(df)), rel=1e-8)


@pytest.mark.parametrize("z", [-1e4, -800.0, 800.0, 1e4])
def test_logistic_stays_finite_far_out(z):
    for y in (0.0, 1.0):
        for part in (Logistic().value, Logistic().first, Logistic().second, Logistic().third):
            assert np.isfinite(part(jnp.asarray(z), jnp.asarray(y)))
