"""Private latents of any function: the marginal, the private map, bounds along a path, and the kernel."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedpdmc._jax.precision import double_precision
from fedpdmc.models.user_function import user_model
from fedpdmc.potentials import Quadratic
from fedpdmc.potentials.chebyshev import interpolant

CHAINS = 4096


def counts(x, z, data):
    """Counts of two groups whose effects have a learned spread."""
    eta = x[0] + z[data["group"]]
    return jnp.sum(jnp.exp(eta) - data["y"] * eta) + jnp.sum(0.5 * jnp.exp(-2 * x[1]) * z**2 + x[1])


def bent(x, z, data):
    """The same with an operation that has no rule for polynomials of time."""
    return counts(x, z, data) + 0.1 * jnp.sinh(x[0]) ** 2


@functools.cache
def opened(function=counts):
    """The potential, its centre, and the remainder in coordinates with correlations."""
    data = {"group": np.array([0, 0, 1, 1, 1]), "y": np.array([3.0, 1.0, 0.0, 1.0, 0.0])}
    with jax.enable_x64(True):
        potential: Any = user_model(function, data, 2).sized(2, "s")
        center, rows = jnp.array([0.2, -0.3]), jnp.array([[0.5, 0.0], [0.2, 0.6]])
        control = Quadratic(jnp.array([[3.0, 0.5], [0.5, 2.0]]), jnp.array([0.3, -0.2]))
        return potential, center, rows, potential.opened(center, rows, control)


@double_precision
def test_the_marginal_of_a_gaussian_is_exact():
    def joint(x, z, data):
        return 0.5 * jnp.sum((data - x[0] - z) ** 2) + 0.5 * jnp.sum(z**2)

    potential: Any = user_model(joint, jnp.array([1.0, -0.5]), 2).sized(1, "s")
    value = eqx.filter_jit(potential.value)
    exact = 0.25 * np.array([(1.0 - x) ** 2 + (-0.5 - x) ** 2 for x in (0.0, 0.7)])
    found = [float(value(jnp.array([x]))) for x in (0.0, 0.7)]
    np.testing.assert_allclose(np.diff(found), np.diff(exact), atol=1e-9)
    np.testing.assert_allclose(jax.jit(lambda x: potential.hessian(x))(jnp.array([0.3])), [[1.0]], atol=1e-9)


@double_precision
def test_the_remainder_is_the_joint_potential_through_the_map():
    potential, center, rows, part = opened()
    rng = np.random.default_rng(1)
    a, zeta = jnp.asarray(rng.normal(size=(4, 2))), jnp.asarray(rng.normal(size=(4, 2)))

    def joint(a, zeta):
        z = part.to_z(a[None], zeta[None])[0]
        jacobian = jax.jacfwd(lambda one: part.to_z(a[None], one[None])[0])(zeta)
        theta = center + rows @ a
        quadratic = part.program.control.value(a)
        return potential.energy(theta, z) - jnp.linalg.slogdet(jacobian)[1] - quadratic

    exact = jax.jit(jax.vmap(jax.grad(joint)))(a, zeta)
    np.testing.assert_allclose(eqx.filter_jit(part.gradients)(a, zeta), exact, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("function", [counts, pytest.param(bent, marks=pytest.mark.long)])
@double_precision
def test_rates_are_within_the_error_of_their_polynomial(function):
    *_, part = opened(function)
    rng = np.random.default_rng(2)
    a, v, zeta = (jnp.asarray(rng.normal(size=(64, 2)) * size) for size in (1.0, 1.0, 1.5))
    cell = eqx.filter_jit(part.cell)(a, v, zeta, jnp.full(64, 0.8))
    assert np.all((np.asarray(cell.length) > 0) & (np.asarray(cell.length) <= 0.8))
    gradients = eqx.filter_jit(part.gradients)
    for share in (0.0, 0.3, 0.7, 1.0):
        s = (share * cell.length)[:, None]
        rate = jnp.sum(gradients(a * jnp.cos(s) + v * jnp.sin(s), zeta) * (v * jnp.cos(s) - a * jnp.sin(s)), -1)
        assert np.all(np.abs(rate - interpolant(cell.values, share)) <= cell.error)
    assert np.median(cell.error) < 1


@double_precision
def test_the_kernel_leaves_the_conditional_law_invariant():
    """Latents from their conditional on a grid have its moments after the kernel; those of a wrong law move towards it."""
    *_, part = opened()
    a = jnp.array([0.4, -0.7])
    grid = np.linspace(-6, 6, 121)
    points = np.stack(np.meshgrid(grid, grid, indexing="ij"), -1).reshape(-1, 2)
    energy = jax.jit(jax.vmap(lambda zeta: part._at(zeta).value(a)))(jnp.asarray(points))
    weight = np.exp(-(energy - energy.min()))
    rng = np.random.default_rng(3)
    drawn = points[rng.choice(len(points), CHAINS, p=weight / weight.sum())] + rng.uniform(-0.05, 0.05, (CHAINS, 2))
    kernel = eqx.filter_jit(part.kernel)
    place, u = jnp.broadcast_to(a, (CHAINS, 2)), jnp.asarray(rng.random((part.chances, CHAINS)))
    moved = np.asarray(kernel(place, jnp.asarray(drawn), u))
    assert np.mean(np.any(moved != drawn, 1)) > 0.7
    mean = (weight @ points) / weight.sum()
    for power in (1, 2, 3):
        exact = (weight @ (points - mean) ** power) / weight.sum()
        values = (moved - mean) ** power
        assert np.all(np.abs(values.mean(0) - exact) < 4 * values.std(0) / np.sqrt(CHAINS) + 1e-3)
    wrong = np.asarray(kernel(place, jnp.asarray(drawn + 1.0), u))
    assert np.all(np.abs(wrong.mean(0) - mean) < 0.8)
