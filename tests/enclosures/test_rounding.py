"""Rounding: fewer bits, offsets and differences that cancel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedpdmc as fp
from fedpdmc._jax.by_numpy import mapped_by_numpy
from fedpdmc.enclosures import Cell, Curve, Series, TimeInterval, control_flow, enclose
from fedpdmc.errors import InputError, NoEnclosure

DATA = np.random.default_rng(0).exponential(1.0, 20)


def in_32_bits(x):
    return jnp.sum((jnp.asarray(DATA, jnp.float32) - x[0].astype(jnp.float32)) ** 2).astype(float)


def product_in_32_bits(x):
    return jnp.dot(x, x, preferred_element_type=jnp.float32).astype(float)


@pytest.mark.usefixtures("double")
def test_fewer_bits_are_allowed_for_on_cells():
    f, x = in_32_bits, np.array([0.3, 0.1])
    v = np.array([1.0, -2.0])
    found = enclose(f, Cell(0.1))(Series(jnp.asarray(x), jnp.full(2, 1e-14), jnp.asarray(v)))
    for s in np.linspace(0.0, 0.1, 7):
        value, middle = float(f(jnp.asarray(x + s * v))), float(found.value + s * found.slope)
        low, high = (0.0 if end is None else float(end) for end in (found.low, found.high))
        assert middle - found.error + low * s * s <= value <= middle + found.error + high * s * s
    assert 1e-7 < found.error < 1e-2


@pytest.mark.usefixtures("double")
def test_a_product_in_fewer_bits_is_refused_everywhere():
    x = np.array([0.3, 0.1])
    still = jnp.zeros(2)
    for domain, form in (
        (Cell(0.1), Series(jnp.asarray(x), still)),
        (TimeInterval(2), Curve((jnp.asarray(x)[:, None],), still[:, None])),
    ):
        with pytest.raises(NoEnclosure, match="fewer bits"):
            enclose(product_in_32_bits, domain)(form)


@pytest.mark.usefixtures("double")
def test_an_offset_that_cancels_leaves_its_rounding_behind():
    def difference(x):
        return (1e6 + jnp.exp(x)) - 1e6

    at = np.linspace(-12.0, -11.9, 50)
    found = enclose(difference, Cell(0.1))(Series(jnp.asarray(at[0]), jnp.asarray(1e-14), jnp.asarray(1.0)))
    computed, true = np.asarray(difference(jnp.asarray(at))), np.exp(at)
    room = float(found.error)
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

    found = enclose(solved, Cell(0.0))(Series(jnp.asarray(1.0), jnp.asarray(0.0), jnp.asarray(1.0)))
    for values in (solved(jnp.asarray(1.0)), jax.jit(jax.vmap(solved))(jnp.ones(2))[0]):
        assert np.all(np.abs(values - found.value) <= found.error) and np.all(np.isfinite(found.error))


@pytest.mark.usefixtures("double")
def test_factors_of_a_smooth_kernel_keep_their_digits():
    """A condition of 1e5: a recursion of intervals would lose all of them."""
    place, scale = np.linspace(0.0, 4.0, 12), np.arange(1.0, 13.0)

    def slope(length):
        def field(x):
            kernel = jnp.exp(-0.5 * ((place[:, None] - place) / x) ** 2) + 1e-4 * jnp.eye(12)
            return scale @ (jnp.linalg.cholesky(kernel) @ scale)

        return jax.jvp(field, (length,), (1.0,))[1]

    def series(length):
        return enclose(slope, Cell(0.0))(Series(length, jnp.asarray(0.0), jnp.asarray(1.0)))

    found = mapped_by_numpy(series, np.array([0.7, 1.0]))
    computed = jax.jit(jax.vmap(slope))(jnp.array([0.7, 1.0]))
    assert np.all(np.abs(computed - found.value) <= found.error)
    assert np.all(found.error < 1e-3 * np.abs(computed))


@pytest.mark.usefixtures("double")
def test_a_matrix_with_more_rows_is_refused():
    rows = control_flow.MOST_ROWS + 1
    with pytest.raises(NoEnclosure, match=f"'cholesky'.*{rows} rows"):
        enclose(lambda x: jnp.linalg.cholesky(x * jnp.eye(rows)), Cell(0.1))(
            Series(jnp.asarray(1.0), jnp.asarray(0.0), jnp.asarray(1.0))
        )
