"""Sites of unequal size, padded to share their compiled program: the posterior of the records, and of nothing else."""

import jax.numpy as jnp
import numpy as np
from tests.statistical.checks import CHAINS, t_test

import fedpdmc as fp
from fedpdmc.potentials import padding

TIMES = np.random.default_rng(11).exponential(1.6, 11)
PARTS = (TIMES[:1], TIMES[1:4], TIMES[4:])


def survival(x, t):
    """Exponential survival times; the number of them is a number in the program."""
    return jnp.sum(t) * jnp.exp(x[0]) - t.shape[0] * x[0] + jnp.mean(0.2 * t * (x[0] - 0.5) ** 4) * len(t)


def _truth():
    grid = np.linspace(-6.0, 4.0, 200_001)
    log = -TIMES.sum() * np.exp(grid) + len(TIMES) * grid - 0.2 * TIMES.sum() * (grid - 0.5) ** 4 - 0.5 * grid**2
    weight = np.exp(log - log.max())
    return grid, weight / weight.sum()


def _compared():
    grid, weight = _truth()
    mean = grid @ weight
    sd = np.sqrt((grid - mean) ** 2 @ weight)
    below = np.cumsum(weight)
    init = np.interp(np.random.default_rng(5).random(CHAINS), below, grid)[:, None]
    sites = [fp.Site(survival, data=part, name=f"h{k}") for k, part in enumerate(PARTS)]
    prior = fp.models.normal_prior(1)
    post = fp.sample(sites, prior, chains=CHAINS, burn_in=0.0, duration=30.0, init=init, seed=7, progress=False)
    u = (np.asarray(post.draws(240))[..., 0] - mean) / sd
    tails = np.interp([0.05, 0.95], below, grid)
    values = np.stack([u, u**2, u**3, u < (tails[0] - mean) / sd, u > (tails[1] - mean) / sd], -1).mean(1)
    expected = np.array([0.0, 1.0, ((grid - mean) / sd) ** 3 @ weight, 0.05, 0.05])
    return t_test(["mean", "square", "cube", "low", "high"], values, expected)


def test_padded_sites_draw_from_the_posterior_of_their_records(monkeypatch):
    found = _compared()
    assert found.exact, found
    assert np.all(found.ess[:2] > 200)
    # The negative control: the same programs with copies that count.
    right = padding._padded_data

    def wrong(leaves, axes, n, size, numbers):
        data = right(leaves, axes, n, size, numbers)
        return data._replace(weights=jnp.maximum(data.weights, 0.2))

    monkeypatch.setattr(padding, "_padded_data", wrong)
    assert not _compared().exact
