"""Models in plain JAX have the rates of the built-in ones, and bounds that hold and are no looser."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.support import DYNAMICS, predictor, states

import fedpdmc as fp
from fedpdmc._jax.random_streams import chain_keys
from fedpdmc.clocks import NOT_FINITE, answer
from fedpdmc.clocks.envelopes import cell_length, evaluate, exact_rates, signed_rates
from fedpdmc.clocks.thinning import MOST_ADDED, TimePolynomial
from fedpdmc.enclosures import Curve, TimeInterval
from fedpdmc.enclosures.special_functions import FUNCTIONS
from fedpdmc.members.run_coordinates import Opening, open_site
from fedpdmc.plan import Plan
from fedpdmc.potentials import PriorShare, Program, Sum, local_quadratic
from fedpdmc.whitening import Reference

pytestmark = pytest.mark.usefixtures("double")

CHAINS, DIM, LONGEST = 60, 3, 3.0
POINT = np.array([0.2, -0.4, 0.1])
FRACTIONS = np.concatenate([[0.0], 10.0 ** np.arange(-16, -2, 2), np.linspace(0.02, 1.0, 20)])
PARTS = 24
FAST = {"xla_backend_optimization_level": 0}


def logistic(x, data):
    z = data["X"] @ x + data["offset"]
    return jnp.sum(jax.nn.softplus(z) - data["y"] * z)


def poisson(x, data):
    z = data["X"] @ x + data["offset"]
    return jnp.sum(jnp.exp(z) - data["y"] * z)


def student_t(x, data):
    r = (data["X"] @ x + data["offset"] - data["y"]) / 0.6
    return jnp.sum(0.5 * 4.5 * jnp.log(1 + r**2 / 3.5))


def ar1(x, data):
    past, present = data["series"][:, :-1], data["series"][:, 1:]
    r = (present - x[1] - x[0] * past) / 0.5
    return jnp.sum(2.5 * jnp.log1p(r * r / 4))


def pair(name):
    """The program and the built-in potential."""
    if name == "ar1":
        series = np.cumsum(np.random.default_rng(0).normal(size=(2, 9)), 1) / 2
        built = fp.models.ar1_student_t(series, df=4.0, scale=0.5)
        return Program(ar1, {"series": jnp.asarray(series)}, 2), built
    built = dataclasses.replace(predictor(name), weight=None)
    data = {"X": built.design, "offset": built.offset, "y": built.response}
    return Program({"logistic": logistic, "poisson": poisson, "student_t": student_t}[name], data, DIM), built


def line_above(potential, dynamics, a, v, h):
    """A line above the rates on cells of these lengths, from polynomials of degree one: its values at both ends."""
    curve = potential.curves(dynamics.flow.rotating, dynamics.flips, a.T, v.T, h, 1)
    curve = TimeInterval(1).full(curve, Curve((), jnp.zeros_like(h)))
    middle, lean, error = (x.T for x in (*curve.parts, curve.error))
    return middle - lean + error, middle + lean + error


@functools.partial(eqx.filter_jit, compiler_options=FAST)
def _bounds(program, built, dynamics, a, v):
    """Bounds of the program and its rates on the cells of the built-in model; then both integrated bounds there."""
    n, other = len(FRACTIONS), evaluate(dynamics, built, a, v, v)
    length = jnp.minimum(LONGEST, jnp.minimum(other.bound.reach, cell_length(other.bound)))
    tops = jnp.moveaxis(TimePolynomial().along(program, dynamics, a.T, v.T, length).ceilings(PARTS), 2, 1)
    there, speed = dynamics.flow.move(jnp.repeat(a, n, 0), jnp.repeat(v, n, 0), (length[:, None] * FRACTIONS).ravel())
    gradient = program.gradients(there)
    rates = speed * gradient if dynamics.flips else program.speeds(there, speed)
    top = jnp.moveaxis(tops[np.minimum(FRACTIONS * PARTS, PARTS - 1).astype(int)], 0, 1)
    bound, h = other.bound, length[:, None]
    evenly = (jnp.arange(PARTS) + 0.5) / PARTS * (bound.slope * h + 0.5 * bound.curve * h * h)[..., None]
    loads = [jnp.mean(tops), jnp.mean(jnp.maximum(bound.value[..., None] + evenly, 0.0))]
    return top, rates.reshape(top.shape), program.gradients(a), other.gradient, loads


PAIRS = [("logistic", "zigzag"), ("student_t", "bouncy")]
ALL = [
    pytest.param(name, kind, marks=() if (name, kind) in PAIRS else pytest.mark.long)
    for name in ("logistic", "poisson", "student_t", "ar1")
    for kind in DYNAMICS
]


@pytest.mark.parametrize(("name", "kind"), ALL)
def test_rates_are_those_of_the_built_in_model_and_the_bound_holds_and_is_as_tight(name, kind):
    (program, built), dynamics = pair(name), DYNAMICS[kind]
    for seed, spread in enumerate((1e-6, 0.5, 2.0)):
        a, v = states(seed, CHAINS, program.dim, dynamics, spread=spread)
        top, rates, own, other, loads = _bounds(program, built, dynamics, a, v)
        assert np.all(rates <= top)
        np.testing.assert_allclose(own, other, rtol=1e-9, atol=1e-9)
        # Within a fifth of the bound that was derived by hand, and usually below it.
        assert loads[0] <= 1.2 * loads[1], float(loads[0] / loads[1])


@pytest.mark.long
@pytest.mark.parametrize("kind", DYNAMICS)
def test_the_remainder_of_a_control_variate_in_dense_coordinates(kind):
    (program, built), dynamics = pair("logistic"), DYNAMICS[kind]
    control = local_quadratic(built, jnp.asarray(POINT), 2)
    scale = jnp.asarray(np.tril(np.random.default_rng(1).normal(size=(DIM, DIM))) + np.eye(DIM))
    reference = Reference(jnp.asarray(POINT), scale)
    rest, expanded = (
        x.whiten(reference, None) for x in (program.less(control), built.expanded_at(jnp.asarray(POINT), 2))
    )
    for seed, spread in enumerate((1e-9, 1e-3, 1.0)):
        a, v = states(seed, CHAINS, DIM, dynamics, spread=spread)
        top, rates, own, other, loads = _bounds(rest, expanded, dynamics, a, v)
        assert np.all(rates <= top)
        np.testing.assert_allclose(own, other, rtol=1e-9, atol=1e-9)
        assert loads[0] <= 1.2 * loads[1], float(loads[0] / loads[1])


def test_a_bound_from_a_rule_that_is_too_narrow_is_broken(monkeypatch):
    right = FUNCTIONS["exp"]
    wrong = right._replace(local=lambda x, far, order: right.local(x, far, order)._replace(beyond=0.0 * x))
    monkeypatch.setitem(FUNCTIONS, "exp", wrong)
    (program, _), dynamics = pair("poisson"), DYNAMICS["zigzag"]
    a, v = states(0, CHAINS, DIM, dynamics)
    h = jnp.full(CHAINS, 0.3)
    _, end = jax.jit(lambda a, v: line_above(program, dynamics, a, v, h), compiler_options=FAST)(a, v)
    assert np.any(v * program.gradients(a + v * h[:, None]) > end)


@pytest.mark.parametrize("kind", ["zigzag", pytest.param("boomerang", marks=pytest.mark.long)])
def test_a_share_of_the_prior_adds_its_curve(kind):
    (program, built), dynamics = pair("logistic"), DYNAMICS[kind]
    prior, (a, v) = local_quadratic(built, jnp.asarray(POINT), 2), states(0, CHAINS, DIM, dynamics)
    share, h = jnp.linspace(0.0, 1.0, CHAINS), jnp.full(CHAINS, 0.2)
    part = Sum((program, PriorShare(prior))).with_share(share)

    @functools.partial(jax.jit, compiler_options=FAST)
    def found(a, v):
        ends = line_above(part, dynamics, a, v, h)
        places = [(a, v), dynamics.flow.move(a, v, h)]
        return (
            ends,
            [exact_rates(dynamics, part, *place)[1] for place in places],
            exact_rates(dynamics, program, a, v)[1],
        )

    ends, rates, alone = found(a, v)
    extra = signed_rates(dynamics, share[:, None] * prior.gradients(a), v)
    np.testing.assert_allclose(rates[0], alone + extra, rtol=1e-9, atol=1e-9)
    for end, rate in zip(ends, rates, strict=True):
        # With the polynomial of degree one it is close, and not without the share.
        assert np.all(end >= rate) and np.mean(end - rate) < 0.2 * np.mean(np.abs(extra))


def test_a_rate_that_is_not_finite_is_a_fault():
    dynamics = DYNAMICS["zigzag"]
    site = fp.Site(Program(lambda x, data: jnp.sum(jnp.sqrt(x)) * data, jnp.asarray(1.0), 2), name="root")
    clock = open_site(site, Opening(Reference(jnp.zeros(2), jnp.ones(2)), dynamics))
    plan = Plan(jnp.zeros(1, int), jnp.full((1, 2), -0.5), jnp.full((1, 1), 1.0), -jnp.ones((1, 1, 2)))
    _, walk = eqx.filter_jit(answer)(clock, chain_keys(jax.random.key(0), 1), plan)
    assert walk.fault[0] == NOT_FINITE and not walk.rang[0]


@pytest.mark.long
def test_a_cell_is_cut_where_a_longer_one_has_no_finite_bound():
    """Where the scale underflows beside the noise the rate is flat, and far ahead ``exp`` overflows."""

    def schools(x, data):
        scale = jnp.sqrt(data["s"] ** 2 + jnp.exp(x[1]) ** 2)
        return jnp.sum(0.5 * ((data["y"] - x[0]) / scale) ** 2 + jnp.log(scale))

    program = Program(schools, {"y": jnp.asarray([28.0, 8.0]), "s": jnp.asarray([15.0, 10.0])}, 2)
    a = jnp.stack([jnp.full(6, 5.0), jnp.asarray([-40.0, -20.0, -8.0, -2.0, 0.0, 4.0])], 1)
    for sign in (1.0, -1.0):
        lengths = [1.0, 0.1, 1e-2, 1e-3]
        finite = [
            np.all(
                np.isfinite(line_above(program, DYNAMICS["zigzag"], a, sign * jnp.ones_like(a), jnp.full(6, h))[1]), 1
            )
            for h in lengths
        ]
        assert np.all(finite[-1])


@pytest.mark.long
def test_whole_powers_written_as_floats_have_finite_bounds_at_negative_values():
    """``x**2.0`` is differentiated to ``x**(2.0 - 1.0)``, an exponent that is known only if constants are folded."""
    program = Program(lambda x, data: jnp.sum(jnp.log1p((data - x[0]) ** 2.0 / 4.0)), jnp.asarray([-3.0, 0.5]), 1)
    a = jnp.asarray([[1.0], [-1.0]])
    assert np.all(np.isfinite(line_above(program, DYNAMICS["zigzag"], a, a, jnp.full(2, 0.1))))


def test_a_comparison_that_is_not_decided_makes_an_interval_short():
    """Its cases have no curvature there, but a range that counts."""

    def limited(x, data):
        return (x[0] < 1.0) * 50.0 * jnp.sum((x - 0.3) ** 2)

    a, v = jnp.zeros((3, 2)), jnp.asarray([[-1.0, 0.5], [1.0, 0.5], [1e-3, 1.0]])
    program, dynamics = Program(limited, jnp.zeros(1), 2), DYNAMICS["bouncy"]

    @jax.jit
    def added(h):
        return TimePolynomial().along(program, dynamics, a.T, v.T, jnp.full(3, h)).candidates_of_error

    # Before the comparison changes, and not beyond.
    np.testing.assert_array_equal(added(0.9) <= MOST_ADDED, [True, True, True])
    np.testing.assert_array_equal(added(1.2) <= MOST_ADDED, [True, False, True])
