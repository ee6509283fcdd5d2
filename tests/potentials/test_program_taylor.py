"""A program's polynomial and the bound of what it leaves, on balls, for users' models."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.potentials.test_zoo_bounds import whitened
from tests.zoo import CASES

from fedpdmc.enclosures.multi_index import monomials, powers, products
from fedpdmc.potentials import Program, polynomial_remainder, program_taylor
from fedpdmc.potentials.program_taylor import form_norm

pytestmark = pytest.mark.usefixtures("double")

NOISE = 1e-9


@functools.cache
def known(name):
    program = whitened(name, True)
    return program, polynomial_remainder(program, np.zeros(program.dim), NOISE)


def in_balls(rng, count, dim, radius):
    """A third of the points on the rim."""
    b = rng.normal(size=(count, dim))
    share = np.where(np.arange(count) % 3, rng.random(count) ** (1 / dim), 1.0)
    return jnp.asarray(b / np.linalg.norm(b, axis=1, keepdims=True) * radius * share[:, None])


def check(program, remainder, count):
    """Error and constants against the program's own gradient; returns the largest share of the bound that is used."""

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def found(b):
        """Error and bound; the rate and its constant, for velocities that share the energy with b."""
        gradient, size = program.gradients(b), jnp.linalg.norm(b, axis=1)
        error = jnp.linalg.norm(gradient - remainder.gradient(b), axis=1)
        speeds = jnp.asarray([0.3, 1.0, 2.0])[:, None] * size
        rates = speeds * jnp.linalg.norm(gradient, axis=1)
        return size, error, remainder.error(size), rates, remainder.hazard(jnp.hypot(size, speeds))

    rng, used = np.random.default_rng(3), 0.0
    last = float(remainder.spacing) * (len(remainder.errors) - 1)
    for radius in (0.05, 0.5, 1.5, 3.0, 0.999 * last):
        size, error, bound, rates, constants = map(np.asarray, found(in_balls(rng, count, program.dim, radius)))
        assert np.all(error <= bound + NOISE * (1 + size)), (radius, np.max(error / bound))
        assert np.all(rates <= constants + NOISE)
        used = max(used, np.max(error / (bound + NOISE)))
    assert not np.any(np.isfinite(found(in_balls(rng, count, program.dim, 1.5 * last))[2][::3]))
    return used


@pytest.mark.long
@pytest.mark.parametrize("name", [n for n in CASES if CASES[n].dim <= 3])
def test_what_the_polynomial_leaves_is_within_its_bound(name):
    # A bound of which hardly anything was needed would say little.
    assert check(*known(name), 3000) > 1e-4


def top_by_hand(z):
    return (top := z.max()) + jnp.log(jnp.sum(jnp.exp(z - top)))


FOLLOWED = {
    "log_softmax": lambda x, data: -jnp.sum(jax.nn.log_softmax(data * x, axis=-1)[:, 0]),
    "where of a scalar": lambda x, data: jnp.sum(jnp.where(x[0] > -100, data @ x, data @ x * 2) ** 2),
    "weighted log-sum-exp": lambda x, data: jnp.sum(
        jax.nn.logsumexp(data * x, b=jnp.asarray([1.0, 2.0, 0.5]), where=data > -1, axis=-1)
    ),
    "log-sum-exp by hand": lambda x, data: top_by_hand(data @ x) + jnp.sum(jax.vmap(top_by_hand)(data * x)),
    "normal with a scale": lambda x, data: (
        -jnp.sum(jax.scipy.stats.norm.logpdf(data[:, 0], x[0], 4 * jnp.exp(0.1 * x[1])))
    ),
    "custom derivative": lambda x, data: jnp.sum(jax.nn.relu(data @ x + 90.0) * 0.1 + jax.nn.silu(data @ x)),
}


def program_of(function):
    data = jnp.asarray(np.random.default_rng(0).normal(size=(20, 3)))
    return Program(function, data, 3, scale=jnp.full(3, 0.1), center=jnp.full(3, 0.1), records=20)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.long if n in ("log_softmax", "weighted log-sum-exp") else ()) for n in FOLLOWED],
)
def test_ordinary_ways_to_write_a_model_are_followed_on_balls(name):
    program = program_of(FOLLOWED[name])
    remainder = polynomial_remainder(program, np.zeros(3), NOISE)
    assert remainder is not None and remainder.errors[64] < 1
    used = check(program, remainder, 500)
    assert used > 1e-3 or name == "where of a scalar"


def test_a_program_that_balls_cannot_follow_is_left_to_the_cells():
    program = program_of(lambda x, data: jnp.sum(jax.lax.stop_gradient(data @ x) * (data @ x)))
    assert polynomial_remainder(program, np.zeros(3), NOISE) is None


def test_an_error_in_a_rule_is_not_taken_for_a_missing_enclosure(monkeypatch):
    def broken(function, balls):
        raise ValueError("a rule is wrong")

    monkeypatch.setattr(program_taylor, "enclose", broken)
    with pytest.raises(ValueError, match="a rule is wrong"):
        polynomial_remainder(program_of(FOLLOWED["normal with a scale"]), np.zeros(3), NOISE)


def test_a_bound_scaled_down_is_caught():
    program = program_of(FOLLOWED["normal with a scale"])
    remainder = polynomial_remainder(program, np.zeros(3), NOISE)
    assert check(program, remainder, 500) > 0.2
    with pytest.raises(AssertionError):
        check(program, dataclasses.replace(remainder, errors=0.2 * remainder.errors), 500)


@pytest.mark.parametrize("degree", [2, 4])
def test_monomials_come_in_the_order_of_the_table(degree):
    b = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)))
    expected = np.prod(np.asarray(b)[:, None] ** monomials(3, degree).exponents, -1).T
    np.testing.assert_allclose(powers(b.T, degree), expected, rtol=1e-12)
    np.testing.assert_allclose(products(b, degree), expected, rtol=1e-12)


@pytest.mark.parametrize("degree", [1, 2, 3, 4, 5])
def test_norms_of_forms_lie_above_what_a_search_finds(degree):
    table, rng = monomials(3, 5), np.random.default_rng(degree)
    coefficients = rng.normal(size=len(table.degree))
    u = rng.normal(size=(20000, 3))
    u /= np.linalg.norm(u, axis=1, keepdims=True)
    own = table.degree == degree
    largest = np.abs(np.prod(u[:, None] ** table.exponents[own], -1) @ coefficients[own]).max()
    bound = form_norm(table, coefficients, degree) / np.prod(np.arange(1, degree + 1))
    assert largest <= bound <= 3 * largest
