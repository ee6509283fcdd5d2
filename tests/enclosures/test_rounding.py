"""Rounding: fewer bits, offsets and differences that cancel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedpdmc as fp
from fedpdmc._jax.by_numpy import by_numpy
from fedpdmc.enclosures import Curve, Interval, TimeInterval, control_flow, enclose
from fedpdmc.errors import InputError, NoEnclosure

DATA = np.random.default_rng(0).exponential(1.0, 20)


def in_32_bits(x):
    return jnp.sum((jnp.asarray(DATA, jnp.float32) - x[0].astype(jnp.float32)) ** 2).astype(float)


def product_in_32_bits(x):
    return jnp.dot(x, x, preferred_element_type=jnp.float32).astype(float)


def path(start, velocity, length, slack=1e-14):
    """A line from a number or a vector; the middle of its interval is where time is one half of the length."""
    start, half = jnp.asarray(start)[..., None], 0.5 * length * jnp.asarray(velocity)[..., None]
    return Curve((start + half, half), jnp.full(start.shape, slack))


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("order", [1, 3])
def test_fewer_bits_are_allowed_for(order):
    f, x = in_32_bits, np.array([0.3, 0.1])
    v = np.array([1.0, -2.0])
    found = enclose(f, TimeInterval(order))(path(x, v, 0.1))
    for s in np.linspace(0.0, 0.1, 7):
        value = float(f(jnp.asarray(x + s * v)))
        middle = sum(float(part[0]) * (20 * s - 1) ** k for k, part in enumerate(found.parts))
        assert abs(value - middle) <= found.error[0]
    assert 1e-7 < found.error[0] < 0.3


@pytest.mark.usefixtures("double")
def test_a_product_in_fewer_bits_is_refused_everywhere():
    x = np.array([0.3, 0.1])
    for domain, form in ((None, Interval(jnp.asarray(x), x + 0.1)), (TimeInterval(2), path(x, 0 * x, 0.1))):
        with pytest.raises(NoEnclosure, match="fewer bits"):
            enclose(product_in_32_bits, domain)(form)


@pytest.mark.usefixtures("double")
def test_an_offset_that_cancels_leaves_its_rounding_behind():
    def difference(x):
        return (1e6 + jnp.exp(x)) - 1e6

    at = np.linspace(-12.0, -11.9, 50)
    found = enclose(difference, TimeInterval(5))(path(at[0], 1.0, 0.1))
    computed, true = np.asarray(difference(jnp.asarray(at))), np.exp(at)
    room = float(found.error[0])
    assert np.max(np.abs(computed - true)) > 1e-11
    assert np.all(np.abs(computed - true) <= room) and room < 1e-7


def test_a_run_whose_rates_are_lost_in_rounding_is_refused():
    def offset(x, data):
        return 0.5 * jnp.sum(((data + 1e12 + x[0]) - 1e12 - 2 * data) ** 2)

    with pytest.raises(InputError, match=r"lost in rounding.*centred data"):
        fp.sample(fp.Site(offset, name="a", data=DATA), fp.models.normal_prior(1), dynamics=fp.ZigZag(), duration=1.0)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("condition", [pytest.param(1e2, marks=pytest.mark.long), 1e4])
def test_factors_of_large_matrices_are_held_as_the_library_computes_them(condition):
    rows = control_flow.MOST_ROWS
    turn, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(rows, rows)))
    matrix = turn * np.geomspace(1, condition, rows) @ turn.T

    def solved(x):
        factor = jnp.linalg.cholesky(matrix * x)
        return jax.scipy.linalg.solve_triangular(factor, x * jnp.ones(rows), lower=True)

    found = enclose(solved, TimeInterval(1))(path(1.0, 1.0, 0.0, 0.0))
    middle, error = found.parts[0][:, 0], found.error[:, 0]
    for values in (solved(jnp.asarray(1.0)), jax.jit(jax.vmap(solved))(jnp.ones(2))[0]):
        assert np.all(np.abs(values - middle) <= error) and np.all(np.isfinite(error))


@pytest.mark.usefixtures("double")
def test_factors_of_a_smooth_kernel_keep_their_digits():
    """A condition of 1e5: a recursion of intervals would lose all of them."""
    place, scale = np.linspace(0.0, 4.0, 12), np.arange(1.0, 13.0)

    def slope(length):
        def field(x):
            kernel = jnp.exp(-0.5 * ((place[:, None] - place) / x) ** 2) + 1e-4 * jnp.eye(12)
            return scale @ (jnp.linalg.cholesky(kernel) @ scale)

        return jax.jvp(field, (length,), (1.0,))[1]

    lengths = np.array([0.7, 1.0])
    found = by_numpy(lambda x: enclose(slope, TimeInterval(1))(Curve((x,), 0.0 * x)), lengths)
    computed = jax.jit(jax.vmap(slope))(lengths)
    assert np.all(np.abs(computed - found.parts[0]) <= found.error)
    assert np.all(found.error < 1e-3 * np.abs(computed))


@pytest.mark.usefixtures("double")
def test_a_matrix_with_more_rows_is_refused():
    rows = control_flow.MOST_ROWS + 1
    with pytest.raises(NoEnclosure, match=f"'cholesky'.*{rows} rows"):
        enclose(lambda x: jnp.linalg.cholesky(x * jnp.eye(rows)), TimeInterval(1))(path(1.0, 1.0, 0.1))
