"""Larger posteriors against long runs of NUTS (BlackJAX) on the pooled records."""

import blackjax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.statistical.checks import CHAINS, welch_test

import fedpdmc as fp
from fedpdmc._jax.precision import double_precision

pytestmark = pytest.mark.long

RECORDS = (150, 40, 9, 1)


def designs(rng, dim):
    return [np.concatenate([np.ones((n, 1)), rng.normal(0.2, 0.8, (n, dim - 1))], 1) for n in RECORDS]


def logistic():
    rng, truth = np.random.default_rng(1), np.array([-1.0, 0.8, -0.5, 0.3, 0.0, 1.2])
    X = designs(rng, 6)
    y = [(rng.random(len(x)) < 1 / (1 + np.exp(-x @ truth))).astype(float) for x in X]
    sites = [fp.Site(fp.models.logistic(a, b), name=f"{i}") for i, (a, b) in enumerate(zip(X, y, strict=True))]
    pooled, response = np.concatenate(X), np.concatenate(y)

    def log_density(x):
        z = pooled @ x
        return jnp.sum(response * z - jnp.logaddexp(0.0, z)) - 0.5 * jnp.sum(x**2) / 4

    return sites, fp.models.normal_prior(6, scale=2.0), log_density, 6


def student_t():
    rng, truth = np.random.default_rng(2), np.array([0.5, 1.0, -1.5, 0.2])
    X = designs(rng, 4)
    y = [x @ truth + 0.7 * rng.standard_t(2.5, len(x)) for x in X]
    sites = [
        fp.Site(fp.models.student_t(a, b, df=2.5, scale=0.7), name=f"{i}")
        for i, (a, b) in enumerate(zip(X, y, strict=True))
    ]
    pooled, response = np.concatenate(X), np.concatenate(y)

    def log_density(x):
        r = (response - pooled @ x) / 0.7
        return -1.75 * jnp.sum(jnp.log(1 + r**2 / 2.5)) - 0.5 * jnp.sum(x**2) / 4

    return sites, fp.models.normal_prior(4, scale=2.0), log_density, 4


def log_gaussian_cox():
    """A grid of four by four cells in three rectangles."""
    rng, alpha, beta = np.random.default_rng(3), 0.2, 1.0
    cells = np.arange(16).reshape(4, 4)
    counts = rng.poisson(np.exp(0.6 * rng.normal(size=16) + 0.3)).astype(float)
    parts = [cells[:2].ravel(), cells[2:, :3].ravel(), cells[2:, 3:].ravel()]
    sites = [fp.Site(fp.models.log_gaussian_cox(counts[p]), name=f"{i}", coordinates=p) for i, p in enumerate(parts)]

    def log_density(x):
        grid = x.reshape(4, 4)
        edges = jnp.sum(grid[:, 1:] * grid[:, :-1]) + jnp.sum(grid[1:] * grid[:-1])
        return jnp.sum(counts * x - jnp.exp(x)) - beta * (0.5 * jnp.sum(x**2) - alpha * edges)

    return sites, fp.models.grid_prior((4, 4), alpha, beta), log_density, 16


@double_precision
def nuts(log_density, dim, *, seed, chains=64, warm_up=500, draws=2000, start=0.0):
    """Draws of independent chains, of shape (chains, draws, dim)."""
    centre = jnp.asarray(start, float)

    def chain(key):
        start_key, adapt_key, draw_key = jax.random.split(key, 3)
        start = centre + 0.3 * jax.random.normal(start_key, (dim,))
        adaptation = blackjax.window_adaptation(blackjax.nuts, log_density)
        (state, parameters), _ = adaptation.run(adapt_key, start, num_steps=warm_up)
        step = blackjax.nuts(log_density, **parameters).step

        def body(state, key):
            after, _ = step(key, state)
            return after, after.position

        return jax.lax.scan(body, state, jax.random.split(draw_key, draws))[1]

    return np.asarray(jax.jit(jax.vmap(chain))(jax.random.split(jax.random.key(seed), chains)))


METHODS = {
    "default": {},
    "zigzag": {"dynamics": fp.ZigZag(), "reference": "laplace", "control": "linear"},
    "bouncy": {"dynamics": fp.BouncyParticle(), "reference": "laplace"},
    "factorised": {"dynamics": fp.FactorisedBoomerang(excess=0.1), "reference": "laplace", "control": "quadratic"},
}


@pytest.mark.filterwarnings("ignore:The posterior is far")
@pytest.mark.parametrize("model", [logistic, student_t, log_gaussian_cox])
def test_every_method_agrees_with_pooled_nuts(model):
    sites, prior, log_density, dim = model()
    reference = nuts(log_density, dim, seed=4)
    mean, sd = reference.mean((0, 1)), reference.std((0, 1))

    def averages(draws):
        u = (draws - mean) / sd
        return np.concatenate([u, u**2, u**3, u > 1.5, u < -1.5], -1).mean(1)

    names = [f"{kind}{i}" for kind in ("mean", "square", "cube", "high", "low") for i in range(dim)]
    for name, method in METHODS.items():
        post = fp.sample(sites, prior, **method, chains=CHAINS, duration=300.0, burn_in=20.0, seed=5, progress=False)
        comparison = welch_test(names, averages(post.draws(600)), averages(reference))
        assert comparison.exact, f"{name}: {comparison}"
        assert comparison.ess[:dim].min() > 1000, name
