"""Ranges of the derivatives of functions of one number."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from fedpdmc.enclosures import Interval
from fedpdmc.enclosures.special_functions import FUNCTIONS as RECORDS
from fedpdmc.enclosures.special_functions import LOG_NDTR, integer_power, real_power

pytestmark = pytest.mark.usefixtures("double")

ORDER = 4
FAST = {"xla_backend_optimization_level": 0}
POSITIVE = {"sqrt", "rsqrt", "power"}
FUNCTIONS = {
    **{name: getattr(jnp, name) for name in ("expm1", "log1p", "tanh", "sqrt", "sin", "cos", "exp2", "cbrt")},
    "sinh": jnp.sinh, "cosh": jnp.cosh,
    "rsqrt": jax.lax.rsqrt, "erf": jax.lax.erf, "erfc": jax.lax.erfc, "ndtr": jax.scipy.special.ndtr,
    "log_ndtr": jax.scipy.special.log_ndtr, "atan": jnp.arctan, "asinh": jnp.arcsinh, "erf_inv": jax.lax.erf_inv,
}  # fmt: skip
POWERS = {
    "power": (lambda x: x**1.7, real_power(1.7).local.taylor), "cube": (lambda x: x**3, integer_power(3).local.taylor),
    "square": (jnp.square, RECORDS["square"].local.taylor), "log_ndtr": (FUNCTIONS["log_ndtr"], LOG_NDTR.local.taylor),
}  # fmt: skip
TAYLOR = {name: record.local.taylor for name, record in RECORDS.items() if hasattr(record.local, "taylor")}
ALL = {name: (f, TAYLOR[name]) for name, f in FUNCTIONS.items() if name in TAYLOR} | POWERS


def test_every_function_of_one_number_is_tested():
    assert set(ALL) >= set(TAYLOR)


def derivatives(f, x):
    """``f^{(k)}(x)/k!`` up to the order."""

    def each(x):
        found, g = [], f
        for k in range(ORDER + 1):
            found.append(g(x) / math.factorial(k))
            g = jax.grad(g)
        return jnp.stack(found)

    return jax.jit(jax.vmap(each), compiler_options=FAST)(x)


NOW = ("tanh", "log_ndtr", "log1p", "atan")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in NOW else pytest.mark.long) for n in ALL])
def test_ranges_of_derivatives_hold_them_and_are_met(name):
    f, taylor = ALL[name]
    rng = np.random.default_rng(0)
    middle, half = rng.normal(size=200) * 3, 10.0 ** rng.uniform(-3, 0.5, 200)
    if name in POSITIVE or name == "log1p":
        middle = np.exp(0.4 * middle) + half
    elif name == "cbrt":
        middle = np.sign(middle) * (np.exp(0.4 * middle) + half)
    elif name == "erf_inv":
        middle, half = 0.9 * np.tanh(middle), 0.05 * np.minimum(half, 1.0)
    share = np.concatenate([[-1.0, 1.0], rng.uniform(-1, 1, 30)])
    x = middle[:, None] + half[:, None] * share
    found = np.asarray(derivatives(f, jnp.asarray(x.ravel()))).reshape(*x.shape, ORDER + 1)
    ranges = taylor(Interval(jnp.asarray(middle - half), jnp.asarray(middle + half)), ORDER)
    for k, interval in enumerate(ranges):
        value, lo, hi = found[..., k], np.asarray(interval.lo), np.asarray(interval.hi)
        room = 1e-8 * (1 + np.abs(value).max(1))
        assert np.all(lo <= value.min(1) + room) and np.all(value.max(1) <= hi + room), k
        # No wider than what is found, where that is more than rounding.
        spread = value.max(1) - value.min(1)
        assert np.median((hi - lo) / (spread + 1e-6)) < 1.3, k


# x and log Φ with its first four derivatives there, from 50 digits.
FAR = {
    -30.0: (-454.3212439563432, 30.033259667433676, -0.9988962284881099, 7.309993015784438e-05, 7.245937210980342e-06),
    -20.5: (-214.0667289632638, 20.548551052435847, -0.9976537796275292, 0.000225711863538964, 3.242094527616975e-05),
    -15.0: (-116.1313848457117, 15.066086827167823, -0.9956698762424401, 0.0005626425236613475, 0.00010874319825105733),
    -9.0: (-43.628149113332114, 9.108523105002869, -0.9884852093452828, 0.0023907474397987585, 0.000728770872712276),
    -3.0: (-6.607726221510349, 3.2830986549304364, -0.9294408132147319, 0.03147067283084249, 0.018930547102077377),
}


def test_far_tails_of_the_normal_distribution_are_held_where_formulas_cancel():
    x = np.asarray([*FAR])
    for half in (0.0, 1e-6, 0.6, 6.0):
        ranges = LOG_NDTR.local.taylor(Interval(jnp.asarray(x - half), jnp.asarray(x + half)), ORDER)
        for k, interval in enumerate(ranges):
            value = np.asarray([row[k] for row in FAR.values()]) / math.factorial(k)
            assert np.all((interval.lo <= value) & (value <= interval.hi)), (half, k)
            if half == 0:
                assert np.all(interval.hi - interval.lo < 1e-6 + 0.35 * np.abs(value + (k == 2) / 2)), k


@pytest.mark.parametrize("order", [2, 6])
@pytest.mark.parametrize("name", ["logistic", "softplus"])
def test_the_remainder_of_a_logistic_falls_with_its_tail(name, order):
    x, far = (part.ravel() for part in np.meshgrid(np.linspace(-40, 40, 41), [0.0, 0.3, 2.0, 50.0]))
    beyond = np.asarray(RECORDS[name].local(jnp.asarray(x), jnp.asarray(far), order).beyond)
    assert 0 < beyond[(x == 30) & (far == 2.0)] < np.exp(-25)
    # The n-th derivative of the logistic in powers of q = σ(−|x|), of which it is the same up to its sign.
    n = order + (name == "logistic")
    derivative = np.polynomial.Polynomial([0.0, 1.0])
    for _ in range(n):
        derivative = derivative.deriv() * np.polynomial.Polynomial([0.0, 1.0, -1.0])
    for center, reach, bound in zip(x, far, beyond, strict=True):
        q = scipy.special.expit(-np.abs(np.linspace(center - reach, center + reach, 501)))
        assert np.abs(derivative(q)).max() / math.factorial(order + 1) <= bound
