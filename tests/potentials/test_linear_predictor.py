import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.potentials.paths import derivatives, fields
from tests.support import LOSS_NAMES, predictor, states

from fedpdmc.potentials import Quadratic, Sum, local_quadratic
from fedpdmc.potentials.padding import bucket
from fedpdmc.whitening import Reference

pytestmark = pytest.mark.usefixtures("double")

POINT = np.array([0.2, -0.4, 0.1])
CHAINS = 40


def reference(d, dense=True, seed=0):
    rng = np.random.default_rng(seed)
    scale = np.tril(rng.normal(size=(d, d))) + 2 * np.eye(d) if dense else 0.5 + rng.random(d)
    return Reference(jnp.asarray(rng.normal(size=d)), jnp.asarray(scale))


def quadratic(d=3):
    rng = np.random.default_rng(5)
    half = rng.normal(size=(d, d))
    return Quadratic(jnp.asarray(half @ half.T), jnp.asarray(rng.normal(size=d)))


@pytest.mark.parametrize("diagonal", [False, True], ids=["records", "cells"])
@pytest.mark.parametrize("name", LOSS_NAMES)
def test_gradient_and_hessian_are_those_of_the_value(name, diagonal):
    own, automatic = derivatives(predictor(name, diagonal=diagonal), states(0, CHAINS, 3)[0])
    for found, expected in zip(own, automatic, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("name", LOSS_NAMES)
def test_expansion_takes_the_taylor_polynomial_away(name, order):
    potential, point = predictor(name), jnp.asarray(POINT)
    rest, polynomial = potential.expanded_at(point, order), local_quadratic(potential, point, order)
    xs, _ = states(0, CHAINS, 3)
    whole = jax.vmap(potential.value)(xs) - potential.value(point)
    split = jax.vmap(rest.value)(xs) - rest.value(point) + jax.vmap(polynomial.value)(xs) - polynomial.value(point)
    np.testing.assert_allclose(split, whole, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(rest.gradient(point), np.zeros(3), atol=1e-12)
    assert order == 1 or np.allclose(rest.hessian(point), 0.0, atol=1e-11)


def assert_same_fields(one, other):
    a, v = states(1, CHAINS, 3)
    for kind, left in fields(one, a, v).items():
        right = fields(other, a, v)[kind]
        for part in ("gradient", "slope", "curve", "reach"):
            np.testing.assert_allclose(getattr(left, part), getattr(right, part), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", LOSS_NAMES)
def test_padding_changes_nothing(name):
    potential = predictor(name).expanded_at(jnp.asarray(POINT), 2)
    padded = potential.padded(16)
    assert padded.design.shape == (16, 3)
    here, there = jnp.asarray(POINT), jnp.asarray(POINT + 1)
    np.testing.assert_allclose(
        padded.value(there) - padded.value(here), potential.value(there) - potential.value(here), rtol=1e-12
    )
    assert_same_fields(padded, potential)


@pytest.mark.parametrize("name", LOSS_NAMES)
def test_cells_are_the_records_of_a_diagonal_design(name):
    cells = predictor(name, diagonal=True)
    full = dataclasses.replace(cells, design=jnp.diag(cells.design))
    assert cells.dim == full.dim == 3
    assert_same_fields(cells, full)


def potentials():
    point = jnp.asarray(POINT)
    yield "records", predictor("logistic").expanded_at(point, 2)
    yield "cells", predictor("poisson", diagonal=True)
    yield "quadratic", quadratic()
    yield "sum", Sum((predictor("student_t"), quadratic()))


@pytest.mark.parametrize("dense", [False, True], ids=["diagonal", "dense"])
@pytest.mark.parametrize("kind", ["records", "cells", "quadratic", "sum"])
def test_whitened_potential_is_the_same_function_of_a(kind, dense):
    potential, whiten_by = dict(potentials())[kind], reference(3, dense)
    whitened = potential.whiten(whiten_by, None)
    a, _ = states(2, CHAINS, 3)
    (gradient, hessian), _ = derivatives(potential, whiten_by.to_x(a))
    (found, curvature), _ = derivatives(whitened, a)
    scale = np.asarray(whiten_by.matrix)
    np.testing.assert_allclose(found, gradient @ scale, rtol=1e-8, atol=1e-9)
    np.testing.assert_allclose(curvature, scale.T @ hessian @ scale, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("dense", [False, True], ids=["diagonal", "dense"])
@pytest.mark.parametrize("kind", ["records", "cells", "quadratic", "sum"])
def test_whitening_reads_the_columns_that_the_potential_sees(kind, dense):
    potential, whiten_by, columns = dict(potentials())[kind], reference(5, dense), np.array([4, 0, 2])
    whitened = potential.whiten(whiten_by, jnp.asarray(columns))
    assert whitened.dim == 5
    a, v = states(3, CHAINS, 5)
    (gradient, _), _ = derivatives(potential, whiten_by.to_x(a)[:, columns])
    expected = gradient @ np.asarray(whiten_by.matrix)[columns]
    np.testing.assert_allclose(derivatives(whitened, a)[0][0], expected, rtol=1e-8, atol=1e-9)
    np.testing.assert_allclose(fields(whitened, a, v)[False, True].gradient, expected, rtol=1e-8, atol=1e-9)


def test_coordinates_go_there_and_back():
    for dense in (False, True):
        made, (a, _) = reference(4, dense), states(0, 5, 4)
        np.testing.assert_allclose(made.to_a(made.to_x(a)), a, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(made.to_x(a[0]), made.to_x(a)[0], rtol=1e-14)
        np.testing.assert_allclose(made.to_a(made.to_x(a[0])), a[0], rtol=1e-12, atol=1e-12)


def test_a_quadratic_can_be_embedded_added_and_scaled():
    small, columns, x = quadratic(), jnp.asarray([4, 0, 2]), jnp.arange(5.0)
    wide = small.embedded(5, columns)
    assert float(wide.value(x)) == pytest.approx(float(small.value(x[columns])))
    assert float(wide.plus(wide, -0.5).value(x)) == pytest.approx(0.5 * float(wide.value(x)))
    assert float(wide.scaled(3.0).value(x)) == pytest.approx(3 * float(wide.value(x)))


@pytest.mark.parametrize("name", ["logistic", "student_t"])
def test_the_cubic_tensor_bounds_as_the_records_do(name):
    potential = predictor(name).expanded_at(jnp.asarray(POINT), 2)
    assert_same_fields(potential.with_cubic(), potential)


def test_a_site_without_records_has_a_field_of_zeros():
    empty = predictor("poisson", n=0)
    for potential in (empty, empty.padded(16)):
        for field in fields(potential, *states(0, CHAINS, 3)).values():
            assert not np.any(field.gradient) and not np.any(field.slope) and not np.any(field.curve)


@given(st.integers(0, 10**7))
def test_bucket_holds_the_records_and_wastes_little(n):
    size = bucket(n)
    assert size >= n
    assert size == 32 or size < 2 * n
    assert n <= 1024 or size <= 1.125 * n + 1
    assert bucket(size) == size
