"""Derivatives of log Γ and of log Φ lie within their errors, and below the bound on a range."""

import functools

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest

from fedpdmc.enclosures import special_functions
from fedpdmc.enclosures.special_functions import FUNCTIONS, polygamma

pytestmark = pytest.mark.usefixtures("double")

POINTS = np.concatenate([np.geomspace(1e-6, 1e6, 40), [0.5, 1.0, 1.4616321449683623, 2.0, 9.9]])


def exact(m, x):
    with mpmath.workdps(40):
        return float(mpmath.psi(m, mpmath.mpf(float(x))) if m >= 0 else mpmath.loggamma(mpmath.mpf(float(x))))


@pytest.mark.parametrize("right", [True, False])
def test_values_lie_within_their_errors(right, monkeypatch):
    if not right:
        # One term left out.
        terms = special_functions.BERNOULLI
        monkeypatch.setattr(special_functions, "BERNOULLI", (*terms[:2], 0.0, *terms[3:]))
    found = jax.jit(lambda x: special_functions.polygammas(x, range(6)))(jnp.asarray(POINTS))
    inside = [
        abs(float(v) - exact(m, x)) <= float(e)
        for m, (value, error) in enumerate(found)
        for x, v, e in zip(POINTS, value, error, strict=True)
    ]
    assert all(inside) == right


@pytest.mark.parametrize("first", [-1, 0, 1])
def test_the_next_derivative_is_bounded_on_the_range(first):
    x, far = jnp.asarray([0.3, 2.0, 40.0]), jnp.asarray([0.2, 0.7, 39.9])
    function = {-1: FUNCTIONS["lgamma"], 0: FUNCTIONS["digamma"], 1: polygamma(1)}[first]
    values, errors, beyond = function.local(x, far, 3)
    for i, (middle, reach) in enumerate(zip(np.asarray(x), np.asarray(far), strict=True)):
        for k in range(4):
            wanted = exact(first + k, middle) / float(mpmath.factorial(k))
            assert abs(float(values[k][i]) - wanted) <= float(errors[k][i])
        worst = max(abs(exact(first + 4, y)) for y in (middle - reach, middle + reach)) / 24
        assert worst <= float(beyond[i]) <= 1.001 * worst
    assert np.isinf(function.local(x[:1], jnp.asarray([0.3]), 3).beyond)


@pytest.mark.parametrize("right", [True, False])
def test_log_ndtr_lies_within_its_errors(right):
    """Against many digits, below and above the places where its formula changes; not with one derivative for another."""
    x = np.concatenate([np.linspace(-40, 10, 21), [-20.0, -8.0, -7.999, 0.0, 2.07]])
    known = FUNCTIONS["log_ndtr"].local(jnp.asarray(x), jnp.asarray(0.3), 3)

    @functools.cache
    def wanted(k, at):
        with mpmath.workdps(60):
            return float(
                mpmath.diff(lambda t: mpmath.log(mpmath.ncdf(t)), mpmath.mpf(float(at)), k) / mpmath.factorial(k)
            )

    inside = [
        abs(float(known.values[k][i]) - wanted(k if right or k < 3 else 2, at)) <= float(known.errors[k][i])
        for i, at in enumerate(x)
        for k in range(4)
    ]
    assert all(inside) == right
    assert max(abs(wanted(4, at)) for at in np.linspace(-9, 6, 16)) <= float(known.beyond[0])
