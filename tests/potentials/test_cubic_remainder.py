"""Third-order knowledge of a controlled potential bounds its gradient everywhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.support import LOSS_NAMES, loss, predictor, responses

from fedpdmc.potentials.linear_predictor import _cubic_bound, cubic_remainder, quartic_bound

pytestmark = pytest.mark.usefixtures("double")


def expanded(name, seed=0, n=40, d=3):
    center = jnp.asarray(np.random.default_rng([seed, 7]).normal(size=d) * 0.3)
    potential = predictor(name, seed=seed, n=n, d=d, scale=0.4).expanded_at(center, 2)
    return potential, cubic_remainder(potential, center), center


def far_and_near(seed, d=3, count=4000):
    rng = np.random.default_rng(seed)
    b = rng.normal(size=(count, d))
    return jnp.asarray(b / np.linalg.norm(b, axis=1, keepdims=True) * rng.uniform(0, 4, (count, 1)))


@pytest.mark.parametrize("name", LOSS_NAMES)
@pytest.mark.parametrize("flips", [True, False])
def test_error_of_the_cubic_term_stays_within_its_bound(name, flips):
    potential, remainder, center = expanded(name)
    b = far_and_near(1)
    error = np.abs(potential.gradients(center + b) - remainder.gradient(b))
    size = jnp.linalg.norm(b, axis=1)
    found = error if flips else np.linalg.norm(error, axis=1, keepdims=True)
    assert np.all(found <= remainder.beyond(size, flips) * (1 + 1e-9) + 1e-12)


@pytest.mark.parametrize("name", LOSS_NAMES)
def test_bound_of_the_cubic_term_is_not_idle(name):
    potential, remainder, center = expanded(name)
    b = 0.3 * far_and_near(2)
    error = np.linalg.norm(potential.gradients(center + b) - remainder.gradient(b), axis=1)
    assert np.max(error / remainder.beyond(jnp.linalg.norm(b, axis=1), False)[:, 0]) > 0.1


@pytest.mark.parametrize("name", LOSS_NAMES)
@pytest.mark.parametrize("flips", [True, False])
def test_largest_holds_for_everything_nearer(name, flips):
    potential, remainder, center = expanded(name)
    b = far_and_near(3)
    gradient = potential.gradients(center + b)
    found = np.abs(gradient) if flips else np.linalg.norm(gradient, axis=1, keepdims=True)
    assert np.all(found <= remainder.largest(jnp.linalg.norm(b, axis=1) * 1.1, flips))


@pytest.mark.parametrize("d", [1, 2, 5])
def test_norms_of_forms_lie_above_what_a_search_finds(d):
    rng = np.random.default_rng(d)
    design, weight = rng.normal(size=(30, d)), rng.uniform(size=30)
    tensor = np.einsum("n,ni,nj,nk->ijk", rng.normal(size=30), design, design, design)
    b = rng.normal(size=(20000, d))
    b /= np.linalg.norm(b, axis=1, keepdims=True)
    quartic = ((b @ design.T) ** 4 @ weight).max()
    cubic = np.linalg.norm(np.einsum("ijk,ci,cj->ck", tensor, b, b), axis=1).max()
    assert quartic <= quartic_bound(design, weight) * (1 + 1e-12)
    assert cubic <= _cubic_bound(tensor) * (1 + 1e-12)
    assert quartic_bound(design, weight) <= 2 * quartic or d > 2


def test_many_parameters_have_a_bound_too():
    rng = np.random.default_rng(0)
    design, weight = rng.normal(size=(60, 40)), rng.uniform(size=60)
    b = rng.normal(size=(5000, 40))
    b /= np.linalg.norm(b, axis=1, keepdims=True)
    assert ((b @ design.T) ** 4 @ weight).max() <= quartic_bound(design, weight)


@pytest.mark.parametrize("name", LOSS_NAMES)
def test_fifth_bounds_the_fifth_derivative(name):
    made, rng = loss(name), np.random.default_rng(9)
    z, u = jnp.asarray(rng.normal(size=4000) * 3), jnp.asarray(rng.normal(size=4000) * 2)
    y = jnp.asarray(responses(name, rng, 4000))
    derivative = jax.vmap(jax.grad(jax.grad(jax.grad(made.second))))(z + u, y)
    bound = made.beyond(5, z, y) * jnp.exp(made.growth * jnp.abs(u))
    assert np.all(np.abs(derivative) <= bound * (1 + 1e-9))
    if made.uniform and name == "logistic":
        assert np.max(np.abs(derivative) / bound) > 0.999
