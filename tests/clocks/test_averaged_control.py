"""Bounds of rates after control variates of averaged derivatives, against fifty digits."""

import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
from tests.support import DYNAMICS, LOSS_NAMES, predictor, states

from fedpdmc.clocks import SegmentClock
from fedpdmc.clocks.choose import third_order
from fedpdmc.potentials import Quadratic, Sum, beside_taylor

pytestmark = pytest.mark.usefixtures("double")

CENTER = np.array([0.2, -0.1, 0.1])
SPREAD = np.array([[0.6, 0.0, 0.0], [-0.3, 0.5, 0.0], [0.2, 0.1, 0.4]])


def controlled(name, n=40):
    """Records less their averaged polynomials."""
    return predictor(name, seed=0, n=n, d=3, scale=0.4).expanded_at(jnp.asarray(CENTER), 2, jnp.asarray(SPREAD))


def slope(name, z, y):
    """``ℓ'`` in many digits, with the parameters of `tests.support`."""
    if name == "logistic":
        return 1 / (1 + mpmath.exp(-z)) - y
    if name == "poisson":
        return mpmath.exp(z) - y
    df, scale = mpmath.mpf(3.5), mpmath.mpf(0.6)
    r = (z - y) / scale
    return (df + 1) * r / (df + r * r) / scale


def exact_gradient(name, potential, a):
    """``∇R`` in fifty digits, from the numbers that the potential holds."""
    total = [mpmath.mpf(0)] * 3
    arrays = (potential.design, potential.offset, potential.response, potential.weight, *potential.control)
    for row, offset, y, weight, point, f, s in zip(*(np.asarray(x).tolist() for x in arrays), strict=True):
        z = mpmath.fsum(mpmath.mpf(x) * mpmath.mpf(w) for x, w in zip(row, a, strict=True)) + mpmath.mpf(offset)
        rest = mpmath.mpf(weight) * slope(name, z, mpmath.mpf(y)) - f - s * (z - mpmath.mpf(point))
        total = [t + rest * mpmath.mpf(x) for t, x in zip(total, row, strict=True)]
    return total


@pytest.mark.parametrize("kind", ["boomerang", "factorised", "zigzag"])
@pytest.mark.parametrize("name", LOSS_NAMES)
def test_the_bound_holds_in_fifty_digits(name, kind):
    dynamics, potential = DYNAMICS[kind], controlled(name)
    envelope = third_order(potential, jnp.asarray(CENTER))
    assert envelope is not None and envelope.quadratic is not None
    # Near the centre, where the third order vanishes and only the quadratic is left, and far from it.
    parts = [states(seed, 6, 3, dynamics, spread) for seed, spread in ((1, 1e-6), (2, 0.3), (3, 1.5), (4, 6.0))]
    a, v = (jnp.concatenate(x) for x in zip(*parts, strict=True))
    a = a.at[:6].add(jnp.asarray(CENTER))
    bound = np.asarray(envelope.bound(dynamics, a, v))
    constants, cell = envelope.constants(dynamics, a, v, jnp.full(len(a), 0.7))
    there, velocity = dynamics.flow.move(a, v, cell)
    later = np.asarray(envelope.bound(dynamics, there, velocity))
    assert np.all(bound <= constants) and np.all(later <= constants)
    with mpmath.workdps(50):
        for k in range(len(a)):
            gradient = exact_gradient(name, potential, np.asarray(a[k]).tolist())
            terms = [g * mpmath.mpf(x) for g, x in zip(gradient, np.asarray(v[k]).tolist(), strict=True)]
            rates = terms if dynamics.flips else [mpmath.fsum(terms)]
            assert all(rate <= mpmath.mpf(float(b)) for rate, b in zip(rates, bound[k], strict=True))


def test_it_is_needed_and_nothing_is_beside_a_taylor_polynomial():
    """Without the quadratic beside the Taylor remainder rates exceed the bound: the test above can fail."""
    dynamics, potential = DYNAMICS["boomerang"], controlled("poisson")
    envelope = third_order(potential, jnp.asarray(CENTER))
    blind = type(envelope)(envelope.remainder)
    a, v = states(2, 200, 3, dynamics, 0.1)
    a = a + jnp.asarray(CENTER)
    rates = np.sum(np.asarray(potential.gradients(a)) * np.asarray(v), 1)
    assert np.any(rates > np.asarray(blind.bound(dynamics, a, v))[:, 0])
    taylor = predictor("poisson", n=40, scale=0.4).expanded_at(jnp.asarray(CENTER), 2)
    assert beside_taylor(taylor, jnp.asarray(CENTER)) is None


def test_a_quadratic_beside_the_records_adds_to_the_one_within():
    share = Quadratic(jnp.asarray(np.diag([0.5, 0.3, 0.4])), jnp.asarray([0.2, -0.3, 0.1]))
    alone, beside = controlled("logistic"), Sum((controlled("logistic"), share))
    center, a = jnp.asarray(CENTER), states(1, 5, 3)[0]
    one, other = third_order(alone, center), third_order(beside, center)
    added = other.quadratic.gradient(a) - one.quadratic.gradient(a)
    np.testing.assert_allclose(added, share.gradients(a + center), rtol=1e-9, atol=1e-12)
    assert isinstance(SegmentClock(beside, DYNAMICS["boomerang"], other).envelope.quadratic, type(one.quadratic))
