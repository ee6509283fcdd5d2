"""Constraints as a user gives them: what is refused, and where chains set out."""

import jax.numpy as jnp
import numpy as np
import pytest
from tests.support import logistic_site

import fedpdmc as fp
from fedpdmc.errors import InputError
from fedpdmc.sampling.defaults import check_constraints, start_inside, walls_of

LIMITS = (np.array([[2.0, 0.0]]), np.array([1.0]))


@pytest.mark.parametrize(
    ("constraints", "found"),
    [
        (3.0, "3.0"),
        (([[1.0]], [0.0]), r"shapes \(1, 1\) and \(1,\)"),
        (([[1.0, 0.0]], [0.0, 1.0]), r"shapes \(1, 2\) and \(2,\)"),
        (([[1.0, 0.0]], [np.inf]), "not finite"),
        (([[0.0, 0.0]], [1.0]), "a row of zeros"),
        ((np.zeros((0, 2)), []), "shapes"),
    ],
)
def test_constraints_that_cannot_be_used(constraints, found):
    with pytest.raises(InputError, match=f"constraints.*{found}"):
        check_constraints(constraints, 2)


@pytest.mark.usefixtures("double")
def test_walls_in_whitened_coordinates_are_those_of_the_parameters():
    reference = fp.Reference(jnp.asarray([0.1, 0.2]), jnp.asarray([[0.5, 0.0], [0.3, 2.0]]))
    walls, a = walls_of(LIMITS, reference), jnp.asarray(np.random.default_rng(0).normal(size=(50, 2)))
    assert walls is not None
    np.testing.assert_allclose(np.sum(walls.normal**2, 1), 1.0)
    assert np.array_equal(walls.inside(a), reference.to_x(a)[:, 0] <= 0.5)


@pytest.mark.usefixtures("double")
def test_chains_set_out_inside():
    walls = walls_of(LIMITS, fp.Reference(jnp.zeros(2), jnp.ones(2)))
    assert walls is not None
    step = jnp.asarray(np.random.default_rng(1).normal(size=(100, 2)) * 5)
    at = start_inside(walls, jnp.zeros((100, 2)), step, False)
    assert np.all(walls.inside(at)) and np.ptp(np.asarray(at), axis=0).min() > 1
    with pytest.raises(InputError, match="outside the constraints"):
        start_inside(walls, jnp.ones((3, 2)), step[:3], True)


def test_a_mode_outside_needs_another_reference():
    with pytest.raises(InputError, match="a mode outside the constraints"):
        fp.sample(logistic_site("ward"), fp.models.normal_prior(2), constraints=([[1.0, 0.0]], [-50.0]), progress=False)
