"""The prior of log spreads in bent coordinates: derivatives, bounds, spreads that stay straight, the law of arrivals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from tests.potentials.paths import along, derivatives, times_within
from tests.support import states

import fedpdmc as fp
from fedpdmc._jax.compilation import compiled
from fedpdmc._jax.random_streams import chain_keys
from fedpdmc.clocks import answer
from fedpdmc.clocks.choose import clock_for
from fedpdmc.dynamics import Boomerang
from fedpdmc.plan import Plan
from fedpdmc.potentials import BentSpreadPrior, Quadratic, Sum
from fedpdmc.whitening import Bend, Reference, bent, steepness, straight

pytestmark = pytest.mark.usefixtures("double")

DIM, CHAINS, TIMES = 4, 40, 25
NUMBERS = np.array([[0.2, -0.4], [0.3, 0.5], [0.2, 0.1], [0.1, 0.3], [0.05, 0.2], [0.1, 0.02]])
LAWS = ("half-normal", "exponential", "half-Cauchy")


def spreads(law, family="linear"):
    """Of two coefficients, σ where the family has one, and one effect or two."""
    rng = np.random.default_rng(0)
    X, y = np.c_[np.ones(30), rng.normal(size=30)], rng.normal(size=30)
    effects = None if family == "linear" else X
    y = y if family == "linear" else (y > 0).astype(float)
    model = fp.models.random_effects(X, y, np.arange(30) % 5, effects=effects, family=family)
    return model, fp.models.effects_prior(model, spread=law, spread_scale=0.7).spreads


def bent_prior(law, numbers=NUMBERS[:, :1], family="linear"):
    model, records = spreads(law, family)
    return BentSpreadPrior.of(records, Bend(model.spreads, jnp.asarray(numbers)))


def remainder(law):
    """Less a control variate and whitened about a point, with correlated coordinates."""
    own = bent_prior(law)
    point = jnp.asarray([0.3, -0.2, 0.1, 0.4])
    control = Quadratic(own.hessian(point), own.gradient(point) - own.hessian(point) @ point)
    less = own.less(control)
    assert isinstance(less, BentSpreadPrior)
    return less.whiten(Reference(point, 0.6 * jnp.eye(DIM) + 0.2 * jnp.tril(jnp.ones((DIM, DIM)))), None)


@pytest.mark.parametrize("law", LAWS)
def test_derivatives_are_those_of_the_value(law):
    for potential in (bent_prior(law), bent_prior(law, NUMBERS, "logistic"), remainder(law)):
        a, _ = states(1, CHAINS, potential.dim)
        (gradient, hessian), (known, bend) = derivatives(potential, a)
        np.testing.assert_allclose(gradient, known, rtol=1e-9, atol=1e-10)
        np.testing.assert_allclose(hessian, bend, rtol=1e-8, atol=1e-9)
        np.testing.assert_allclose(potential.gradients(a), known, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("law", LAWS)
def test_it_is_the_prior_of_the_spreads_with_the_volume_of_the_bend(law):
    """Spreads that are not bent, such as σ of a linear regression, keep their prior."""
    (model, records), x = spreads(law), jnp.asarray([0.1, 0.2, 0.7, -0.3])
    index = np.asarray(model.spreads)
    for numbers in (straight(1), NUMBERS[:, :1]):
        bend = Bend(model.spreads, jnp.asarray(numbers))
        found = jax.grad(BentSpreadPrior.of(records, bend).value)(x)

        def known(u, numbers=numbers, bend=bend):
            return records.value(bend(u)) - jnp.sum(jnp.log(steepness(u[index], jnp.asarray(numbers))))

        np.testing.assert_allclose(found, jax.grad(known)(x), rtol=1e-10)
        assert found[2] != 0


def test_what_is_not_of_single_spreads_is_left_beside_it():
    own, matrix = bent_prior("half-normal"), np.diag([1.0, 2.0, 3.0, 4.0])
    matrix[0, 3] = matrix[3, 0] = 0.5
    quadratic = Quadratic(jnp.asarray(matrix), jnp.asarray([0.1, 0.2, 0.3, 0.4]))
    less, x = own.less(quadratic), jnp.asarray([0.3, -0.1, 0.2, 0.5])
    assert isinstance(less, Sum)
    np.testing.assert_allclose(less.gradient(x), own.gradient(x) - quadratic.gradient(x), rtol=1e-12)


@pytest.mark.parametrize("law", LAWS)
def test_curve_bounds_the_third_derivative_within_reach(law):
    potential, closest = remainder(law), []
    for spread in (0.01, 1.0, 3.0, 6.0):
        a, v = states(2, CHAINS, DIM, spread=spread)
        made = jax.jit(lambda a, v: potential.field(True, False, a, v))(a, v)
        _, (_, rate, second, third) = along(potential, True, a, v, times_within(made.reach, TIMES))
        np.testing.assert_allclose(jnp.sum(made.gradient * v, -1), rate[:, 0], rtol=1e-8, atol=1e-9)
        np.testing.assert_allclose(made.slope[:, 0], second[:, 0], rtol=1e-8, atol=1e-8)
        share = jnp.max(jnp.abs(third), 1) / made.curve[:, 0]
        assert float(jnp.max(share)) <= 1 and bool(jnp.all(made.reach > 0))
        closest.append(float(jnp.max(share)))
    # A third of it would be no bound.
    assert max(closest) > 1 / 3


@pytest.mark.parametrize(("law", "wrong"), [("half-normal", 1.0), ("half-Cauchy", 1.0), ("half-normal", 0.8)])
def test_arrivals_have_the_integrated_rate(law, wrong):
    """Integrated up to the arrival it is exponential, cut at the horizon; a rate with a wrong factor shows."""
    potential, count, horizon = remainder(law), 4000, 1.5
    dynamics = Boomerang()
    a, v = (
        jnp.broadcast_to(x, (count, DIM))
        for x in (jnp.asarray([1.0, -0.5, 0.8, -1.2]), jnp.asarray([0.5, 1.0, 0.6, 0.9]))
    )
    plan = Plan(jnp.zeros(count, int), a, jnp.full((count, 1), horizon), v[:, None])
    arrival, walk = compiled(answer)(clock_for(potential, dynamics), chain_keys(jax.random.key(3), count), plan)
    assert not np.any(walk.fault)
    t = np.linspace(0, horizon, 2001)
    _, (_, rate, _, _) = along(potential, True, a[:1], v[:1], jnp.asarray(t[None]))
    hazard = np.concatenate(
        [[0], np.cumsum(np.diff(t) * 0.5 * (np.maximum(rate[0, 1:], 0) + np.maximum(rate[0, :-1], 0)))]
    )
    u = -np.expm1(-wrong * np.interp(np.asarray(arrival.time)[np.asarray(walk.rang)], t, hazard))
    assert len(u) > 250
    p = stats.kstest(u / -np.expm1(-wrong * hazard[-1]), "uniform").pvalue
    share = stats.binomtest(len(u), count, -np.expm1(-wrong * hazard[-1])).pvalue
    assert (min(p, share) > 1e-3) == (wrong == 1.0)


def test_bent_by_numpy_and_by_jax_alike():
    u = np.linspace(-3, 3, 7)[:, None]
    np.testing.assert_allclose(bent(u, NUMBERS[:, :1]), bent(jnp.asarray(u), jnp.asarray(NUMBERS[:, :1])), rtol=1e-12)
