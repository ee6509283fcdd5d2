"""Flips of programs on polynomials: bounds hold, arrivals are those of thinning in cells, and errors are noticed."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.clocks.laws import agree, answered, heard
from tests.support import DYNAMICS

from fedpdmc._jax.random_streams import chain_keys
from fedpdmc.clocks import VIOLATED
from fedpdmc.clocks.cell_thinning import ThinnedClock
from fedpdmc.clocks.envelopes.flip_polynomial import flip_polynomial
from fedpdmc.plan import Plan
from fedpdmc.potentials import PolynomialCover, PolynomialRemainder, Program, polynomial_on_lines

pytestmark = pytest.mark.usefixtures("double")

CHAINS, ZIGZAG = 4000, DYNAMICS["zigzag"]


def skewed(x, data):
    """Weibull times with a shape to be found."""
    u = jnp.exp(0.4 * x[1]) * (data - 0.3 * x[0])
    return jnp.sum(jnp.exp(u) - 0.4 * x[1] - u) + 0.1 * jnp.sum(x * x)


def counts(x, data):
    z = data @ x
    return jnp.sum(jnp.exp(z) - z) + 0.5 * jnp.sum(x * x)


def bent(x, data):
    """A polynomial of degree four."""
    return 0.5 * jnp.sum((data - x[0] - x[1] ** 2) ** 2) + 0.5 * jnp.sum(x * x)


def walled(x, data):
    """Defined on one side of a wall, beyond which lie some points of the lattice."""
    return 0.5 * jnp.sum(x * x) - jnp.sum(data * jnp.log(2 + x))


MODELS = {
    "walled": (walled, np.array([2.0, 2.0]), 2),
    "skewed": (skewed, np.linspace(-1.5, 0.8, 12), 2),
    "counts": (counts, np.random.default_rng(3).normal(0.1, 0.15, (30, 4)), 4),
    "bent": (bent, np.array([0.4, 1.3, 0.8]), 2),
}


@functools.cache
def clock(name) -> ThinnedClock:
    function, data, dim = MODELS[name]
    program = Program(function, jnp.asarray(data), dim, records=len(data))
    known = polynomial_on_lines(program, np.zeros(dim), 1e-10)
    assert known is not None
    return ThinnedClock(program, ZIGZAG, flip_polynomial(program, known, ZIGZAG))


def test_few_parameters_are_covered_and_many_are_not():
    kinds = {name: type(clock(name).envelope.remainder) for name in MODELS}
    assert [name for name, kind in kinds.items() if kind is PolynomialCover] == ["walled", "skewed"]
    assert {kinds["counts"], kinds["bent"]} == {PolynomialRemainder}
    errors = np.asarray(clock("walled").envelope.remainder.errors)
    assert np.any(np.isinf(errors[0])) and np.all(np.isfinite(errors[:100].min(1)))


@pytest.mark.parametrize("name", [name for name in MODELS if name != "walled"])
@pytest.mark.parametrize("spread", [1.0, 2.5], ids=["near", "far"])
def test_bounds_and_errors_hold(name, spread):
    made, (_, _, dim) = clock(name), MODELS[name]
    rng = np.random.default_rng(5)
    a = jnp.asarray(spread * rng.standard_normal((3000, dim)))
    v = jnp.asarray(np.sign(rng.standard_normal(a.shape)))

    @jax.jit
    def found(a, v, share):
        known = made.envelope.known(a)
        bound, useful = made.envelope.bounded(ZIGZAG, known, v)
        s = share * bound.reach
        rates = v * made.potential.gradients(a + s[:, None] * v)
        off = jnp.abs(made.potential.gradients(a) - known.gradient)
        return rates - bound.value - bound.slope * s[:, None], off - known.error, useful

    uses = []
    for share in (0.0, 0.03, 0.3, 0.6, 1.0):
        excess, beyond, useful = (np.asarray(x) for x in found(a, v, share))
        assert np.all(excess[useful] <= 0) and np.all(beyond[useful] <= 0)
        uses.append(useful.mean())
    assert min(uses) > (0.8 if spread == 1.0 else 0.5)


def plan(offset, dim, length=0.7):
    """All chains from one state, and back."""
    start = jnp.broadcast_to(jnp.asarray(offset, float), (CHAINS, dim))
    v = jnp.broadcast_to(jnp.asarray([1.0, -1.0, 1.0, 1.0][:dim]), (CHAINS, dim))
    return Plan(jnp.zeros(CHAINS, int), start, jnp.full((CHAINS, 2), length), jnp.stack([v, -v], 1))


@pytest.mark.parametrize(
    ("name", "offset"),
    [
        pytest.param("skewed", [1.2, 0.4], marks=pytest.mark.long),
        pytest.param("skewed", [-4.5, -7.5], marks=pytest.mark.long),
        ("counts", [0.4, -0.8, 0.3, 0.9]),
        pytest.param("bent", [-1.5, 1.9], marks=pytest.mark.long),
        ("walled", [-0.95, 1.6]),
    ],
    ids=["covered", "beyond", "many", "polynomial", "walled"],
)
def test_arrivals_have_the_law_of_thinning_in_cells(name, offset):
    made = clock(name)
    route = plan(offset, MODELS[name][2])
    one, other = heard(made, route, 1), heard(ThinnedClock(made.potential, ZIGZAG), route, 2)
    assert min(agree(one, other)) > 1e-3
    assert 0.2 < np.mean(one[0] < 1.4) and np.ptp(one[0]) > 0.3
    if name == "bent":
        assert not np.any(one[2])


def shifted(made: ThinnedClock, by: float, error: float) -> ThinnedClock:
    """The gradient's constant moved and its error scaled."""
    known = made.envelope.remainder
    coefficients = known.coefficients.at[..., 0, :].add(by)
    wrong = dataclasses.replace(known, coefficients=coefficients, errors=error * known.errors)
    return eqx.tree_at(lambda c: c.envelope.remainder, made, wrong)


@pytest.mark.parametrize("name", ["skewed", "counts"])
def test_a_wrong_polynomial_gives_other_arrivals(name):
    made = clock(name)
    route = plan([0.4, -0.8, 0.3, 0.9][: MODELS[name][2]], MODELS[name][2])
    one = heard(shifted(made, 0.3, 0.0), route, 1)
    assert min(agree(one, heard(ThinnedClock(made.potential, ZIGZAG), route, 2))) < 1e-3


def test_a_polynomial_beyond_its_error_is_caught_by_the_program():
    made = clock("counts")
    wrong, route = shifted(made, 3.0, 1.0), plan([0.4, -0.8, 0.3, 0.9], 4)
    _, walk = answered(wrong, chain_keys(jax.random.key(1), CHAINS), route)
    assert np.any(np.asarray(walk.fault) == VIOLATED)


def test_a_centre_of_which_nothing_is_known_is_of_no_use():
    made = clock("skewed")
    errors = made.envelope.remainder.errors
    wrong = eqx.tree_at(lambda c: c.envelope.remainder.errors, made, jnp.full_like(errors, jnp.inf)).envelope
    bound, useful = wrong.bounded(ZIGZAG, wrong.known(jnp.zeros((3, 2))), jnp.ones((3, 2)))
    assert not np.any(useful) and not np.any(np.isfinite(bound.value))
