"""Walls: the time at which a path meets one, and the velocity after."""

import jax.numpy as jnp
import numpy as np
import pytest

import fedpdmc as fp
from fedpdmc.dynamics import Walls

pytestmark = pytest.mark.usefixtures("double")
DYNAMICS = (fp.ZigZag(), fp.BouncyParticle(), fp.Boomerang(), fp.FactorisedBoomerang())


def walls():
    """A box of one coordinate, and an order of two, with unit normals."""
    normal = np.array([[1.0, 0.0, 0.0], [-1.0, 0.0, 0.0], [0.0, np.sqrt(0.5), -np.sqrt(0.5)]])
    return Walls(jnp.asarray(normal), jnp.asarray([0.5, 0.4, 0.3]))


def states(dynamics, chains=200):
    rng = np.random.default_rng(4)
    a = rng.normal(size=(chains, 3)) * [0.15, 1.0, 1.0]
    a = a[np.asarray(walls().inside(jnp.asarray(a)))]
    return jnp.asarray(a), dynamics.velocity(jnp.asarray(rng.random(a.shape)))


@pytest.mark.parametrize("dynamics", DYNAMICS, ids=lambda d: type(d).__name__)
def test_a_path_is_inside_until_it_meets_the_wall_and_comes_back(dynamics):
    here, (a, v) = walls(), states(dynamics)
    wait, wall = here.first(dynamics, a, v)
    met = np.isfinite(wait)
    assert met.sum() > 50
    for share in (0.2, 0.7, 0.999999):
        before, _ = dynamics.flow.move(a, v, jnp.where(met, share * wait, 1.0))
        assert np.all(here.inside(before))
    at, velocity = dynamics.flow.move(a, v, jnp.where(met, wait, 0.0))
    gap = np.take_along_axis(np.asarray(at @ here.normal.T - here.limit), np.asarray(wall)[:, None], 1)[met]
    np.testing.assert_allclose(gap, 0.0, atol=1e-12)
    back = here.bounced(dynamics, velocity, wall)
    speed = np.sum(back * here.normal[wall], -1)[met]
    np.testing.assert_allclose(speed, -np.sum(velocity * here.normal[wall], -1)[met], rtol=1e-9)
    np.testing.assert_allclose(np.sum(back**2, -1), np.sum(velocity**2, -1), rtol=1e-12)
    after, _ = dynamics.flow.move(at, back, jnp.full(len(at), 1e-6))
    inside = np.asarray(here.inside(after))
    corner = np.sum(np.asarray(at @ here.normal.T - here.limit) > -1e-5, 1) > 1
    assert np.all(inside | ~met | corner)


def test_a_rotation_within_the_walls_meets_none():
    wait, _ = walls().first(fp.Boomerang(), jnp.asarray([[0.1, 0.0, 0.0]]), jnp.asarray([[0.2, 0.1, 0.0]]))
    assert np.isinf(wait[0])


@pytest.mark.parametrize("dynamics", DYNAMICS, ids=lambda d: type(d).__name__)
def test_a_chain_on_the_wall_turns_at_once_if_it_leads_out_and_goes_if_it_leads_in(dynamics):
    a = jnp.asarray([[0.5 + 1e-16, 0.0, 0.0]])
    out = jnp.asarray([[1.0, 0.5, 0.5]])
    wait, wall = walls().first(dynamics, a, out)
    assert wait[0] == 0 and wall[0] == 0
    assert walls().bounced(dynamics, -out, wall)[0, 0] == -1.0
    assert walls().first(dynamics, a, -out)[0][0] > 0.1
