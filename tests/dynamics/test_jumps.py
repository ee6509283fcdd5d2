import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from tests.support import DYNAMICS, states

import fedpdmc as fp
from fedpdmc import dynamics
from fedpdmc._jax.random_streams import normals, secret_uniforms
from fedpdmc.errors import InputError

CHAINS, DIM = 6, 3
KINDS = {
    "zigzag": fp.ZigZag,
    "bouncy": fp.BouncyParticle,
    "boomerang": fp.Boomerang,
    "factorised": fp.FactorisedBoomerang,
}


def marks(dynamics):
    if dynamics.flips:
        return jnp.arange(CHAINS) % DIM
    normal = states(9, CHAINS, DIM)[0]
    return normal / jnp.linalg.norm(normal, axis=1, keepdims=True)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("kind", DYNAMICS)
def test_a_jump_undoes_itself_and_keeps_the_speed(kind):
    dynamics = DYNAMICS[kind]
    _, v = states(0, CHAINS, DIM, dynamics)
    mark = marks(dynamics)
    jumped = dynamics.jump(v, mark)
    assert np.all(np.any(np.asarray(jumped) != np.asarray(v), 1))
    np.testing.assert_allclose(dynamics.jump(jumped, mark), v, atol=1e-14)
    np.testing.assert_allclose(jnp.linalg.norm(jumped, axis=1), jnp.linalg.norm(v, axis=1), rtol=1e-14)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("kind", ["bouncy", "boomerang"])
def test_a_reflection_turns_the_rate_around(kind):
    dynamics = DYNAMICS[kind]
    _, v = states(0, CHAINS, DIM)
    normal = marks(dynamics)
    np.testing.assert_allclose(jnp.sum(dynamics.jump(v, normal) * normal, 1), -jnp.sum(v * normal, 1), rtol=1e-12)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("kind", ["zigzag", "factorised"])
def test_a_flip_changes_one_sign(kind):
    dynamics = DYNAMICS[kind]
    _, v = states(0, CHAINS, DIM, dynamics)
    changed = np.asarray(dynamics.jump(v, marks(dynamics)) != v)
    np.testing.assert_array_equal(changed, np.arange(DIM) == np.asarray(marks(dynamics))[:, None])
    np.testing.assert_array_equal(dynamics.jump(v, jnp.full(CHAINS, -1)), v)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("kind", DYNAMICS)
def test_velocities_have_their_law(kind):
    dynamics = DYNAMICS[kind]
    u = jnp.asarray(np.random.default_rng(0).random((20_000, 2)))
    v = np.asarray(dynamics.velocity(u))
    if dynamics.unit_speed:
        assert set(np.unique(v)) == {-1.0, 1.0}
    assert np.abs(v.mean(0)).max() < 5 / np.sqrt(20_000)
    assert np.abs((v**2).mean(0) - 1).max() < 5 * np.sqrt(2 / 20_000)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
@pytest.mark.parametrize(
    "kind, name", [("zigzag", "excess"), ("bouncy", "refresh"), ("boomerang", "refresh"), ("factorised", "excess")]
)
def test_a_rate_that_is_none_is_refused(kind, name, value):
    with pytest.raises(InputError, match=rf"{name}.*found {value}.*zero or positive"):
        KINDS[kind](**{name: value})


@pytest.mark.parametrize("value", ["fast", None, [1.0]])
def test_a_rate_that_is_no_number_is_refused(value):
    with pytest.raises(InputError, match=r"ZigZag\(excess\)"):
        fp.ZigZag(excess=value)


@pytest.mark.parametrize("kind", KINDS)
def test_the_name_of_the_dynamics_says_its_rates(kind):
    assert repr(KINDS[kind]()).startswith(KINDS[kind].__name__ + "(")


MANY = 40_000


def secret_keys(chains, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, 2**32, (chains, 10), dtype=np.uint32))


def drawn(dim, seed=0):
    """Bounces off one oblique normal: along it with the sign turned, and across it."""
    normal = np.random.default_rng(seed + 5).normal(size=dim)
    normal /= np.linalg.norm(normal)
    every = jnp.asarray(np.tile(normal, (MANY, 1)))
    v = np.asarray(dynamics.draw_bounce(secret_keys(MANY, seed), jnp.arange(MANY), every, jnp.ones(MANY, bool)))
    basis = np.linalg.svd(normal[None])[2][1:]
    return -v @ normal, v @ basis.T


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("dim", [1, 2, 5, 30])
def test_a_drawn_bounce_is_rayleigh_along_the_normal_and_normal_across_it(dim):
    along, across = drawn(dim)
    assert stats.kstest(along, "rayleigh").pvalue > 1e-4
    assert all(stats.kstest(column, "norm").pvalue > 1e-4 for column in across.T)
    together = np.atleast_2d(np.corrcoef(np.concatenate([along[:, None], across, across**2], 1).T))
    # The largest standard error is that of a normal variable with its square: √(5/n).
    assert np.abs(together - np.eye(len(together))).max() < 5 * np.sqrt(5 / MANY)


@pytest.mark.usefixtures("double")
def test_a_wrong_radius_and_a_wrong_sign_of_a_bounce_are_caught(monkeypatch):
    monkeypatch.setattr(dynamics, "normals", lambda u: normals(u) * (u.ndim == 3))
    assert stats.kstest(drawn(3)[0], "rayleigh").pvalue < 1e-10
    monkeypatch.undo()
    assert stats.kstest(-drawn(3)[0], "rayleigh").pvalue < 1e-10


@pytest.mark.usefixtures("double")
def test_the_bits_of_a_bounce_come_from_the_key_alone():
    """Whatever the normal is, the velocity is one of the proposals, or minus one, to the last bit."""
    dim, chains, batches = 3, 2000, 8
    keys, number = secret_keys(chains), jnp.arange(chains)
    every = []
    for batch in range(batches):
        u = secret_uniforms(keys, number, jnp.uint32(batch), dynamics.PROPOSALS * (dim + 2))
        u = u.reshape(dynamics.PROPOSALS, dim + 2, chains)
        z, y = normals(u[:, :dim]), normals(u[:, dim])
        every.append(np.asarray(z * jnp.sqrt(1 + (y / jnp.sqrt(jnp.sum(z**2, 1))) ** 2)[:, None]))
    every, found = np.abs(np.concatenate(every)).transpose(2, 0, 1), []
    for seed in (1, 2):
        normal = np.random.default_rng(seed).normal(size=(chains, dim))
        normal /= np.linalg.norm(normal, axis=1, keepdims=True)
        v = np.abs(np.asarray(dynamics.draw_bounce(keys, number, jnp.asarray(normal), jnp.ones(chains, bool))))
        assert np.abs(v[:, None] - every).max(2).min(1).max() < 1e-14
        found.append(v)
    same = np.abs(found[0] - found[1]).max(1) < 1e-12
    assert same.sum() > chains // 10
    np.testing.assert_array_equal(found[0][same], found[1][same])


@pytest.mark.usefixtures("double")
def test_no_velocity_is_drawn_where_there_is_no_event():
    normal, which = jnp.eye(3)[jnp.arange(6) % 3], jnp.arange(6) < 2
    v = np.asarray(dynamics.draw_bounce(secret_keys(6), jnp.arange(6), normal, which))
    assert (v[:2] != 0).all() and (v[2:] == 0).all()


@pytest.mark.parametrize("kind", [fp.Boomerang, fp.BouncyParticle])
def test_a_bounce_is_one_of_two_words(kind):
    assert kind(bounce="draw").draws and not kind().draws
    assert "draw" in repr(kind(bounce="draw")) and "bounce" not in repr(kind())
    with pytest.raises(InputError, match=r"bounce.*found 'jump'.*'reflect', 'draw'"):
        kind(bounce="jump")
