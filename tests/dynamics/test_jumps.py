import jax.numpy as jnp
import numpy as np
import pytest
from tests.support import DYNAMICS, states

import fedpdmc as fp
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
