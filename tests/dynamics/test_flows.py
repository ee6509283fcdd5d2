import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support import states

from fedpdmc.dynamics import Line, Rotation

pytestmark = pytest.mark.usefixtures("double")

FLOWS = [pytest.param(Line(), id="line"), pytest.param(Rotation(), id="rotation")]
CHAINS, DIM = 5, 3
moments = st.floats(-10, 10)


def after(flow, t, state=None):
    a, v = states(0, CHAINS, DIM) if state is None else state
    return flow.move(a, v, jnp.full(CHAINS, t))


@pytest.mark.parametrize("flow", FLOWS)
@given(moments, moments)
def test_moving_by_s_then_t_is_moving_by_their_sum(flow, s, t):
    for one, other in zip(after(flow, t, after(flow, s)), after(flow, s + t), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-12)


@pytest.mark.parametrize("flow", FLOWS)
def test_velocity_is_the_derivative_of_position(flow):
    h = 1e-5
    for t in (0.0, 0.4, 3.0):
        slope = (after(flow, t + h)[0] - after(flow, t - h)[0]) / (2 * h)
        np.testing.assert_allclose(slope, after(flow, t)[1], atol=1e-9)


@pytest.mark.parametrize("flow", FLOWS)
def test_weights_give_the_position(flow):
    a, v = states(0, CHAINS, DIM)
    for t in (0.0, 0.4, 3.0):
        p, q = flow.weights(jnp.asarray(t))
        np.testing.assert_allclose(p * a + q * v, after(flow, t)[0], rtol=1e-14, atol=1e-14)


def test_a_rotation_conserves_energy_and_comes_back():
    a, v = states(0, CHAINS, DIM)
    there, speed = after(Rotation(), 1.3)
    np.testing.assert_allclose(there**2 + speed**2, a**2 + v**2, rtol=1e-13)
    np.testing.assert_allclose(after(Rotation(), 2 * np.pi)[0], a, atol=1e-14)


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("t", [0.0, 1e-9, 1e-3, 0.7, 25.0])
def test_integrals_agree_with_quadrature(flow, t):
    nodes, weights = np.polynomial.legendre.leggauss(80)
    s, w = (nodes + 1) * t / 2, weights * t / 2
    p, q = (np.asarray(x) for x in flow.weights(jnp.asarray(s)))
    expected = [w @ p, w @ q, w @ p**2, w @ (p * q), w @ q**2]
    # The last integral of a rotation, t/2 − sin(2t)/4, is a difference: exact to the last bits of t.
    np.testing.assert_allclose(flow.integrals(jnp.asarray(t)), expected, rtol=1e-10, atol=1e-15 * t)
