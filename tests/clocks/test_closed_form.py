"""The two clocks that are inverted in closed form, against arithmetic of fifty digits."""

import math
from decimal import Decimal, localcontext

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from fedpdmc.clocks.closed_form import affine_clock, exponential_clock

pytestmark = pytest.mark.usefixtures("double")

sizes = st.floats(1e-60, 1e60)
signed = st.one_of(st.just(0.0), sizes, sizes.map(lambda x: -x))
levels = st.floats(1e-15, 40.0)


def exact_affine(b, c, e):
    """The time at which ``∫ (b + c s)_+`` reaches e."""
    with localcontext(prec=50):
        b, c, e = Decimal(b), Decimal(c), Decimal(e)
        if b > 0:
            inside = b * b + 2 * c * e
            return math.inf if inside < 0 else float(2 * e / (b + inside.sqrt()))
        return float(-b / c + (2 * e / c).sqrt()) if c > 0 else math.inf


@given(signed, signed, levels)
@example(1.0, 0.0, 0.5)
@example(0.0, 1.0, 0.5)
@example(0.0, 0.0, 0.5)
@example(-1.0, 1e-60, 1e-15)
@example(1e-60, 1e60, 1.0)
@example(1e60, -1e60, 1e-15)
def test_affine_clock_rings_when_its_integral_reaches_the_level(b, c, e):
    # Where the integral only just fails to get there, the last bit of b decides.
    assume(not (b > 0 > c) or abs(b * b + 2 * c * e) > 1e-6 * b * b)
    found = float(affine_clock(jnp.asarray(b), jnp.asarray(c), jnp.asarray(e)))
    assert found == pytest.approx(exact_affine(b, c, e), rel=1e-9, abs=0)


@given(signed, signed)
def test_affine_clock_of_level_zero_rings_when_the_rate_turns_positive(b, c):
    found = float(affine_clock(jnp.asarray(b), jnp.asarray(c), jnp.asarray(0.0)))
    expected = 0.0 if b > 0 or (b == 0 and c > 0) else -b / c if c > 0 else math.inf
    assert found == pytest.approx(expected, rel=1e-12)


@given(st.floats(-700, 700), st.floats(1e-6, 1e6), levels)
@example(700.0, 1.0, 1e-15)
@example(-700.0, 1.0, 40.0)
def test_exponential_clock_rings_when_its_integral_reaches_the_level(x, speed, e):
    # ∫ speed e^{x + speed s} ds = e^x (e^{speed τ} − 1)
    expected = math.log1p(e * math.exp(-x)) / speed if x > -700 + 45 else (math.log(e) - x) / speed
    found = float(exponential_clock(jnp.asarray(x), jnp.asarray(speed), jnp.asarray(e)))
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-13 * max(1.0, abs(x)) / speed)


@pytest.mark.parametrize("x", [20.0, 30.0])
def test_exponential_clock_does_not_cancel_where_the_rate_is_large(x):
    found = float(exponential_clock(jnp.asarray(x), jnp.asarray(1.0), jnp.asarray(0.7)))
    assert found == pytest.approx(math.log1p(0.7 * math.exp(-x)), rel=1e-9, abs=0)


def test_clocks_work_on_arrays():
    b, c, e = (jnp.asarray(x) for x in ([1.0, -1.0, 1.0, -1.0], [1.0, 1.0, -1.0, -1.0], [1.5, 0.5, 2.0, 1.0]))
    np.testing.assert_allclose(affine_clock(b, c, e), [1.0, 2.0, np.inf, np.inf])
