"""Means over a Gaussian: public points, each record's quadrature, and closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import integrate, stats
from tests.support import LOSS_NAMES, loss, predictor

from fedpdmc.potentials import LinearUnknownScale, Potential, Quadratic, Sum
from fedpdmc.potentials.base import hermite, public_points

pytestmark = pytest.mark.usefixtures("double")


def place():
    """A point, and a root of the covariance about it."""
    return jnp.asarray([0.3, -0.4, 0.2]), jnp.asarray([[0.5, 0.0, 0.0], [-0.2, 0.4, 0.0], [0.1, 0.3, 0.3]])


def quadratic():
    return Quadratic(jnp.asarray([[2.0, 0.3, 0.0], [0.3, 1.0, -0.2], [0.0, -0.2, 0.7]]), jnp.asarray([0.1, -0.4, 0.9]))


def unknown_scale():
    rng = np.random.default_rng(1)
    design = rng.normal(size=(9, 2))
    return LinearUnknownScale.of_records(design, design @ [1.0, -0.5] + rng.normal(size=9))


POTENTIALS = {name: lambda name=name: predictor(name) for name in LOSS_NAMES} | {
    "cells": lambda: predictor("poisson", diagonal=True),
    "quadratic": quadratic,
    "unknown scale": unknown_scale,
    "sum": lambda: Sum((predictor("logistic"), quadratic())),
}


@pytest.mark.parametrize("dim", [1, 2, 3, 4, 10, 16, 17, 60])
def test_public_points_have_the_moments_of_a_gaussian(dim):
    points, weights = public_points(dim)
    assert np.all(weights > 0) and abs(weights.sum() - 1) < 1e-12
    np.testing.assert_allclose(weights @ points, 0, atol=1e-12)
    np.testing.assert_allclose(weights @ points**3, 0, atol=1e-12)
    if dim <= 16:
        np.testing.assert_allclose((points * weights[:, None]).T @ points, np.eye(dim), atol=1e-10)
        assert abs(weights @ np.sum(points**2, 1) ** 2 - dim * (dim + 2)) < 1e-8
    np.testing.assert_array_equal(points, public_points.__wrapped__(dim)[0])


@pytest.mark.parametrize("name", LOSS_NAMES)
@pytest.mark.parametrize("deviation", [0.2, 1.5])
def test_means_of_a_loss_agree_with_adaptive_quadrature(name, deviation):
    one, z, y = loss(name), 0.7, 2.0 if name == "poisson" else 1.0
    found = one.averaged(jnp.asarray(z), jnp.asarray(deviation), jnp.asarray(y))
    for mean, function in zip(found, (one.value, one.first, one.second), strict=True):

        def term(u, function=function):
            return float(function(jnp.asarray(z + deviation * u), jnp.asarray(y))) * stats.norm.pdf(u)

        exact = integrate.quad(term, -9, 9, limit=200)[0]
        # The Student-t loss has poles at 1.1 from the axis, so that its quadrature converges slowly; any number is exact.
        assert abs(mean - exact) < (0.02 if name == "student_t" else 1e-5) * (1 + abs(exact))


@pytest.mark.parametrize("name", POTENTIALS)
def test_means_of_derivatives_are_derivatives_of_the_mean(name):
    potential, (at, spread) = POTENTIALS[name](), place()
    _, gradient, hessian = potential.averaged(at, spread)
    slope = jax.grad(lambda x: potential.averaged(x, spread)[0])(at)
    np.testing.assert_allclose(gradient, slope, rtol=1e-9, atol=1e-9)
    bend = jax.jacobian(lambda x: potential.averaged(x, spread)[1])(at)
    np.testing.assert_allclose(hessian, bend, rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(hessian, hessian.T, atol=1e-12)


@pytest.mark.parametrize("name", POTENTIALS)
def test_means_agree_with_points(name):
    potential, (at, spread) = POTENTIALS[name](), place()
    points, weights = hermite(12)
    grid = np.stack(np.meshgrid(points, points, points), -1).reshape(-1, 3)
    weight = jnp.asarray(np.einsum("i,j,k->ijk", weights, weights, weights).ravel())
    there = at + jnp.asarray(grid) @ spread.T
    exact = [weight @ jax.vmap(f)(there) for f in (potential.value, potential.gradient)]
    # Poles of the Student-t loss near the axis slow down its quadrature.
    tight = 0.02 if name == "student_t" else 1e-3
    for some, rtol in ((potential.averaged(at, spread), tight), (Potential.averaged(potential, at, spread), 0.05)):
        for one, other in zip(some, exact, strict=False):
            np.testing.assert_allclose(one, other, rtol=rtol, atol=rtol)


def test_an_average_over_nothing_is_the_value_there():
    for make in POTENTIALS.values():
        potential, (at, _) = make(), place()
        exact = potential.value(at), potential.gradient(at), potential.hessian(at)
        for one, other in zip(potential.averaged(at, jnp.zeros((3, 3))), exact, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-10)
