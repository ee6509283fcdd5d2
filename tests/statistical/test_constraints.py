"""Posteriors limited to ``A x ≤ b``: against quadrature, for every dynamics, and without the walls."""

import jax.numpy as jnp
import numpy as np
import pytest
from tests.statistical.checks import t_test

import fedpdmc as fp

X = np.array([[1.0, 0.2], [1.0, -0.7], [1.0, 1.1], [1.0, 0.4]])
Y = np.array([2.0, 1.0, 4.0, 0.0])
# The first parameter below a limit, and not above the second.
LIMITS = (np.array([[1.0, 0.0], [1.0, -1.0]]), np.array([0.6, 0.0]))
DYNAMICS = (
    (fp.ZigZag(), {}),
    (fp.BouncyParticle(), {}),
    (fp.Boomerang(), {"reference": fp.Reference([0.3, 0.5], [[0.4, 0.0], [-0.1, 0.5]])}),
    (fp.Boomerang(bounce="draw"), {"reference": fp.Reference([0.3, 0.5], [[0.4, 0.0], [-0.1, 0.5]])}),
    (fp.FactorisedBoomerang(excess=0.2), {"reference": fp.Reference([0.3, 0.5], [0.4, 0.5])}),
)


def truth(limits=LIMITS):
    """Moments on a grid whose cells the limits do not cut but along the diagonal, which is shared by halves."""
    axis = np.linspace(-4.0, 4.0, 2001)
    x = np.stack(np.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2)
    z = x @ X.T
    energy = np.sum(np.exp(z) - Y * z, 1) + 0.5 * np.sum(x**2, 1)
    gap = limits[1] - x @ limits[0].T
    share = np.prod(np.where(np.abs(gap) < 1e-9, 0.5, gap > 0), 1)
    weight = share * np.exp(energy.min() - energy)
    weight /= weight.sum()
    center = weight @ x
    return center, weight @ features(x, center)


def features(draws, center):
    u = draws - center
    return np.concatenate([u, u**2, u**3, (u[..., :1] * u[..., 1:])], -1)


def run(dynamics, options, limits=LIMITS, **others):
    return fp.sample(
        fp.Site(fp.models.poisson(X, Y), name="all"), fp.models.normal_prior(2), dynamics=dynamics, constraints=limits,
        init=[0.0, 0.5], chains=256, duration=60.0, burn_in=10.0, seed=7, progress=False, **options, **others,
    )  # fmt: skip


def compared(post):
    center, expected = truth()
    names = [f"{what}{k}" for what in ("mean", "square", "cube") for k in range(2)] + ["product"]
    return t_test(names, features(post.draws(240), center).mean(1), expected)


@pytest.mark.long
@pytest.mark.parametrize("dynamics, options", DYNAMICS, ids=lambda d: type(d).__name__)
def test_draws_have_the_moments_of_quadrature(dynamics, options):
    post = run(dynamics, options)
    draws = post.draws(240)
    assert post.certified and np.all(draws @ LIMITS[0].T <= LIMITS[1] + 1e-9)
    found = compared(post)
    assert found.exact, str(found)


@pytest.mark.long
def test_without_walls_the_moments_are_others():
    assert not compared(run(fp.ZigZag(), {}, limits=None)).exact


def test_the_shifted_exponential_has_its_mean():
    """Waiting times that begin at the parameter: its posterior ends at the shortest of them."""
    waits = 1.0 + np.random.default_rng(3).exponential(1.0, 30)
    limit = waits.min()

    def shifted(x, data):
        return jnp.sum(data["t"] - x[0])

    post = fp.sample(
        fp.Site(shifted, data={"t": waits}, name="clinic"), fp.models.normal_prior(1, scale=3.0), dynamics=fp.ZigZag(),
        reference=fp.Reference([limit - 0.03], [0.03]), constraints=([[1.0]], [limit]), init=[limit - 0.1], chains=64,
        duration=200.0, seed=1, progress=False,
    )  # fmt: skip
    axis = np.linspace(limit - 2.0, limit, 200_001)
    weight = np.exp(30 * (axis - limit) - 0.5 * (axis / 3) ** 2)
    mean = weight @ axis / weight.sum()
    means = post.draws(400).mean((1, 2))
    assert post.certified
    assert abs(means.mean() - mean) < 5 * means.std(ddof=1) / 8
    assert abs(means.mean() - limit) > 0.02
