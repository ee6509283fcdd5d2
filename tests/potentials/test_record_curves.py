"""The error of the curves is proved; here it is attacked with exact arithmetic, far out, and with its parts left out."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
from tests.support import LOSS_NAMES, predictor

from fedpdmc.potentials.chebyshev import chebyshev_nodes
from fedpdmc.potentials.logistic_curves import exponential, logistic_curves, tail_bounds
from fedpdmc.potentials.losses import Logistic
from fedpdmc.potentials.record_curves import (
    blocking,
    cosine_and_sine,
    interpolated_curves,
)

pytestmark = pytest.mark.usefixtures("double")
QUARTER = math.pi / 2
RECORDS, DIM, CHAINS = 20, 3, 6
# Of a state, and of the length of a piece: usual ones, far ones, tiny ones.
STATES = [(1.0, QUARTER), (6.0, 0.3), (1e-6, QUARTER)]
KINDS = [*((name, 6, 6) for name in LOSS_NAMES), ("logistic", 10, 8), ("logistic", 0, 8), ("logistic", 0, 12)]


def records(name, offset=0.0, exact=True):
    """Records with a control variate: their Taylor polynomial, or any other quadratic."""
    potential = predictor(name, seed=3, n=RECORDS, d=DIM, scale=0.25)
    potential = dataclasses.replace(potential, offset=potential.offset + offset)
    controlled = potential.expanded_at(jnp.asarray([0.1, -0.2, 0.05]), 2)
    if exact:
        return controlled
    return dataclasses.replace(controlled, control=controlled.control * jnp.asarray([1.0, 0.97, 1.1])[:, None] + 0.01)


def curves_of(potential, degree, nodes, wide=False):
    shape = blocking(RECORDS, wide, CHAINS)
    made = interpolated_curves(potential, degree, nodes, shape, wide) if degree else logistic_curves(
        potential, nodes, shape, wide
    )  # fmt: skip
    return jax.tree.map(lambda x: x[None], made)


def true_rate(potential, name, a, v, t):
    """``d/dt R(a(t))`` to 40 digits."""
    with mpmath.workdps(40):
        a, v, t = [mpmath.mpf(float(x)) for x in a], [mpmath.mpf(float(x)) for x in v], mpmath.mpf(float(t))
        total = mpmath.mpf(0)
        columns = zip(potential.design, potential.offset, potential.response, *potential.control, strict=True)
        for xi, o, y, point, slope, curvature in columns:
            xi = [mpmath.mpf(float(x)) for x in xi]
            o, y, point, slope, curvature = (mpmath.mpf(float(x)) for x in (o, y, point, slope, curvature))
            alpha, beta = mpmath.fdot(xi, a), mpmath.fdot(xi, v)
            z = o + alpha * mpmath.cos(t) + beta * mpmath.sin(t)
            if name == "logistic":
                first = 1 / (1 + mpmath.exp(-z)) - y
            elif name == "poisson":
                first = mpmath.exp(z) - y
            else:
                df, scale = mpmath.mpf("3.5"), mpmath.mpf(float(potential.loss.scale))
                r = (z - y) / scale
                first = (df + 1) * r / (df + r * r) / scale
            total += (first - slope - curvature * (z - point)) * (beta * mpmath.cos(t) - alpha * mpmath.sin(t))
        return float(total)


def misfit(potential, name, curves, spread, length, seed=5, times=4):
    """The largest ``|f − P|/E`` at random times, and the largest error."""
    rng = np.random.default_rng(seed)
    a, v = spread * rng.normal(size=(2, DIM, CHAINS))
    found = curves.along(jnp.asarray(a), jnp.asarray(v), jnp.full(CHAINS, length))
    nodes = found.values.shape[1]
    fit = np.polynomial.chebyshev.chebfit(chebyshev_nodes(nodes), np.asarray(found.values[0]), nodes - 1)
    worst = 0.0
    for t in length * rng.random(times):
        p = np.polynomial.chebyshev.chebval(2 * t / length - 1, fit)
        f = [true_rate(potential, name, a[:, k], v[:, k], t) for k in range(CHAINS)]
        worst = max(worst, float(np.max(np.abs(p - f) / np.asarray(found.error[0]))))
    return worst, float(np.max(found.error))


@pytest.mark.parametrize(("spread", "length"), STATES)
@pytest.mark.parametrize(("name", "degree", "nodes"), KINDS)
def test_the_rate_is_within_the_error(name, degree, nodes, spread, length):
    potential = records(name, exact=nodes != 12)
    worst, error = misfit(potential, name, curves_of(potential, degree, nodes), spread, length)
    assert worst <= 1.0
    assert error < 0.5 or spread > 1.0 or name != "logistic"


@pytest.mark.parametrize("offset", [-90.0, -20.0, 8.0, 60.0])
@pytest.mark.parametrize("degree", [0, 8])
def test_the_rate_is_within_the_error_where_predictors_are_large(degree, offset):
    potential = records("logistic", offset)
    worst, _ = misfit(potential, "logistic", curves_of(potential, degree, 8), 1.5, QUARTER)
    assert worst <= 1.0


@pytest.mark.parametrize("degree", [0, 6])
def test_one_array_operation_is_within_the_error_too(degree):
    potential = records("logistic")
    worst, _ = misfit(potential, "logistic", curves_of(potential, degree, 8, wide=True), 1.0, QUARTER)
    assert worst <= 1.0


@pytest.mark.parametrize("degree", [0, 12])
def test_an_error_without_its_part_in_time_is_too_small(degree):
    potential = records("logistic")
    curves = curves_of(potential, degree, 4)

    class Blind(type(curves)):
        def _error(self, alpha, beta, shrink, slip, c):
            return super()._error(alpha, beta, 0 * shrink, slip, c)

    broken = Blind(*(getattr(curves, field.name) for field in dataclasses.fields(curves)))
    assert misfit(potential, "logistic", broken, 1.5, QUARTER)[0] > 1.0
    assert misfit(potential, "logistic", curves, 1.5, QUARTER)[0] <= 1.0


def test_the_exponential_is_within_ten_units_of_roundoff():
    x = np.concatenate([np.linspace(-87, 87, 200_001), np.linspace(-1e-3, 1e-3, 2001)]).astype(np.float32)
    found = np.asarray(jax.jit(exponential)(jnp.asarray(x)), np.float64)
    assert np.max(np.abs(found / np.exp(x.astype(np.float64)) - 1)) <= 10 * 2.0**-24


def test_cosine_and_sine_are_exact_to_the_last_places():
    angle = np.linspace(0, QUARTER, 10_001)
    cos, sin = cosine_and_sine(jnp.asarray(angle))
    assert np.max(np.abs(cos - np.cos(angle))) < 4e-16
    assert np.max(np.abs(sin - np.sin(angle))) < 4e-16


def test_quotients_of_derivatives_are_within_their_bounds():
    p = np.linspace(0, 1, 4001)
    quotient = np.polynomial.Polynomial([1.0])
    for bound in tail_bounds(13):
        quotient = quotient * np.polynomial.Polynomial([1, -2]) + quotient.deriv() * np.polynomial.Polynomial(
            [0, 1, -1]
        )
        largest = np.abs(quotient(p)).max()
        assert largest <= bound <= 1.05 * largest


@pytest.mark.parametrize("order", [3, 4, 5, 9])
def test_high_derivatives_of_the_logistic_loss_are_below_their_bound(order):
    z = np.linspace(-8, 8, 81)
    with mpmath.workdps(40):
        largest = max(abs(mpmath.diff(lambda u: 1 / (1 + mpmath.exp(-u)), x, order - 1)) for x in z)
    assert 0.5 * Logistic.highest(order) <= float(largest) <= Logistic.highest(order)
