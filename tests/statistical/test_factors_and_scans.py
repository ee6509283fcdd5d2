"""Models with a Cholesky factor, a triangular solve or a `scan` that depends on the parameters, against quadrature."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.statistical.checks import t_test

import fedpdmc as fp

PLACES = np.array([0.0, 0.4, 1.0, 1.7, 2.0])
FIELD = np.array([0.8, 1.1, 0.2, -1.0, -0.9])


def gaussian_process(x, data):
    """Values of a Gaussian process; its log length and log scale are the parameters."""
    distance = data["place"][:, None] - data["place"]
    kernel = jnp.exp(2 * x[1] - 0.5 * (distance / jnp.exp(x[0])) ** 2) + 0.05 * jnp.eye(len(data["place"]))
    factor = jnp.linalg.cholesky(kernel)
    white = jax.scipy.linalg.solve_triangular(factor, data["y"], lower=True)
    return 0.5 * white @ white + jnp.sum(jnp.log(jnp.diagonal(factor)))


def state_space(x, data):
    """An autoregression seen with noise, by the Kalman filter in `scan`; its log scale and tanh⁻¹ memory are parameters."""
    variance, memory = jnp.exp(2 * x[0]), jnp.tanh(x[1])

    def step(carry, y):
        mean, spread = carry
        total = spread + 0.3
        gain = spread / total
        energy = 0.5 * (y - mean) ** 2 / total + 0.5 * jnp.log(total)
        return (memory * (mean + gain * (y - mean)), memory**2 * (1 - gain) * spread + variance), energy

    return jnp.sum(jax.lax.scan(step, (0.0, variance), data["y"])[1])


def hidden_states(x, data):
    """Two hidden states, summed out from left to right; their distance and the odds to stay are parameters."""
    means = jnp.stack([-jnp.exp(x[0]), jnp.exp(x[0])])
    stay, go = jax.nn.log_sigmoid(1 + x[1]), jax.nn.log_sigmoid(-1 - x[1])
    moves = jnp.stack([jnp.stack([stay, go]), jnp.stack([go, stay])])
    seen = -0.5 * (data["y"][:, None] - means) ** 2

    def step(forward, here):
        return jax.scipy.special.logsumexp(forward[:, None] + moves, axis=0) + here, None

    return -jax.scipy.special.logsumexp(jax.lax.scan(step, seen[0], seen[1:])[0])


DATA = {"place": PLACES, "y": FIELD}
MODELS = {"Cholesky": gaussian_process, "Kalman": state_space, "hidden Markov": hidden_states}


def quadrature(function, data):
    """Means, squares and skews of the posterior under a standard normal prior, on a grid; about the grid's own mean."""
    axis = np.linspace(-6.0, 6.0, 241)
    grid = np.stack(np.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2)
    with jax.enable_x64(True):
        data = jax.tree.map(jnp.asarray, data)
        energy = np.asarray(jax.jit(jax.vmap(lambda x: function(x, data)))(jnp.asarray(grid)))
    energy = energy + 0.5 * np.sum(grid**2, 1)
    weight = np.exp(energy.min() - energy)
    weight /= weight.sum()
    center = weight @ grid
    return center, weight @ features(grid, center)


def features(draws, center):
    u = draws - center
    return np.concatenate([u, u**2, u**3], -1)


def compare(post, truth):
    center, expected = truth
    names = [f"{power} of {name}" for power in ("mean", "square", "cube") for name in post.names]
    return t_test(names, features(post.draws(200), center).mean(1), expected)


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_draws_have_the_moments_of_quadrature(name):
    post = fp.sample(
        fp.Site(MODELS[name], data=DATA, name="all"), fp.models.normal_prior(2), dynamics=fp.ZigZag(),
        reference="laplace",
        chains=128, duration=100.0, burn_in=20.0, seed=3, progress=False,
    )  # fmt: skip
    assert post.certified
    found = compare(post, quadrature(MODELS[name], DATA))
    assert found.exact, str(found)
    other = compare(post, quadrature(MODELS[name], {**DATA, "y": 0.9 * FIELD}))
    assert not other.exact, str(other)


@pytest.mark.long
def test_rotations_over_a_scan_have_the_moments_of_quadrature():
    post = fp.sample(
        fp.Site(state_space, data=DATA, name="all"), fp.models.normal_prior(2), chains=128, duration=100.0, burn_in=20.0,
        seed=5, progress=False, dynamics=fp.Boomerang(),
    )  # fmt: skip
    assert post.certified
    found = compare(post, quadrature(state_space, DATA))
    assert found.exact, str(found)
