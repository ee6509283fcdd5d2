"""Thinning programs on polynomials: each stage dominates the next, and the arrivals have the law of the rate."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import integrate, stats

import fedpdmc as fp
from fedpdmc._jax.random_streams import chain_keys
from fedpdmc.clocks import VIOLATED, SegmentClock, answer, follow
from fedpdmc.clocks.envelopes.ball_polynomial import BallPolynomial
from fedpdmc.plan import Plan
from fedpdmc.potentials import Program, local_quadratic, polynomial_remainder

pytestmark = pytest.mark.usefixtures("double")

BOOMERANG = fp.Boomerang()
CHAINS = 600


RECORDS = np.array([[0.5, -0.3], [0.2, 0.6], [-0.4, 0.3], [0.6, 0.5]])


def growth(x, data):
    return jnp.sum(jnp.exp(data @ x) - data @ x)


@functools.cache
def clock():
    """Counts of one at a few places, less a quadratic."""
    program = Program(growth, jnp.asarray(RECORDS), 2)
    program = program.less(local_quadratic(program, jnp.zeros(2), 2))
    envelope = BallPolynomial(polynomial_remainder(program, np.zeros(2), 1e-9))
    return SegmentClock(program, BOOMERANG, envelope, jnp.asarray(np.float64(60.0)))


@functools.cache
def ask():
    """Compiled once for all tests."""
    return eqx.filter_jit(answer, compiler_options={"xla_backend_optimization_level": 0})


def test_constants_dominate_the_polynomial_which_dominates_the_rate():
    made = clock()

    @jax.jit
    def stages(a, v, t):
        there, velocity = BOOMERANG.flow.move(a, v, t)
        rate = jnp.sum(velocity * made.potential.gradients(there), -1)
        constant, _ = made.envelope.constants(BOOMERANG, a, v, t)
        return constant[:, 0], made.envelope.bound(BOOMERANG, there, velocity)[:, 0], rate

    a, v = (jnp.asarray(x) for x in 1.5 * np.random.default_rng(1).normal(size=(2, 500, 2)))
    for t in np.linspace(0.0, 3.0, 7):
        constant, bound, rate = stages(a, v, jnp.full(500, t))
        assert np.all(bound <= constant) and np.all(rate <= bound)


def plans(count=CHAINS):
    """One plan of four segments for all chains, of different energies."""
    a = np.array([1.3, -0.9])
    v = np.array([[1.8, 1.4], [0.3, -0.4], [-1.0, 2.4], [0.4, 0.7]])
    duration = np.array([0.9, 0.8, 0.9, 0.8])
    wide = [jnp.asarray(np.broadcast_to(x, (count, *x.shape))) for x in (a, duration, v)]
    return Plan(jnp.zeros(count, int), *wide)


def survival(times):
    """``exp(−∫ rate)`` along the plan, by Simpson's rule on its segments."""
    path, grids, rates = follow(BOOMERANG, plans(1)), [], []
    for begin, length, a, v in zip(*(np.asarray(x)[0] for x in (path.begin, path.duration, path.start, path.velocity)),
                                   strict=True):  # fmt: skip
        t = np.linspace(0.0, length, 401)
        here, speed = BOOMERANG.flow.move(np.tile(a, (401, 1)), np.tile(v, (401, 1)), t)
        z = np.asarray(here) @ RECORDS.T
        remainder = (np.expm1(z) - z) @ RECORDS
        grids.append(begin + t)
        rates.append(np.maximum(np.sum(np.asarray(speed) * remainder, -1), 0.0))
    grid, rate = np.concatenate(grids), np.concatenate(rates)
    return np.exp(-np.interp(times, grid, integrate.cumulative_trapezoid(rate, grid, initial=0.0)))


def test_arrivals_have_the_law_of_their_rate():
    """With every segment near, and with some of them far; a rate that is two fifths off is told."""
    path = follow(BOOMERANG, plans(1))
    constants = np.sort(
        np.asarray(clock().envelope.constants(BOOMERANG, path.start, path.velocity, path.duration)[0])[0, :, 0]
    )
    for most in (1.01 * constants[-1], 0.5 * (constants[1] + constants[2])):
        mixed = dataclasses.replace(clock(), limit=jnp.asarray(np.float64(most)))
        found, walk = ask()(mixed, chain_keys(jax.random.key(1), CHAINS), plans())
        rang = np.asarray(found.rang)
        assert not np.any(walk.fault) and 0.3 < rang.mean() < 0.95
        # At the horizon what is left of the law is spread evenly.
        left = survival(np.asarray(found.time))
        left = np.where(rang, left, left * np.random.default_rng(1).random(CHAINS))
        assert stats.kstest(left, "uniform").pvalue > 1e-3
        assert stats.kstest(left**1.4, "uniform").pvalue < 1e-3


@pytest.mark.parametrize("share", [0.5, 1.3])
def test_a_polynomial_that_is_wrong_is_caught(share):
    """Below the rate, so that candidates are missed; and above it, so that what is computed would be taken for noise."""
    known = clock().envelope.remainder
    wrong = dataclasses.replace(
        known, coefficients=share * known.coefficients, errors=0.1 * known.errors, hazards=2.0 * known.hazards
    )
    other = dataclasses.replace(clock(), envelope=BallPolynomial(wrong), limit=jnp.asarray(np.float64(600.0)))
    _, walk = ask()(other, chain_keys(jax.random.key(1), CHAINS), plans())
    assert np.any(np.asarray(walk.fault) == VIOLATED)
