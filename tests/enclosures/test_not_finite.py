"""NaN in a branch that is not taken, zero distances, 0/0 and 0 log 0: never under a finite bound, and named."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.special import xlogy
from tests.support import predictor

import fedpdmc as fp
from fedpdmc._jax.by_numpy import by_numpy
from fedpdmc._jax.random_streams import chain_keys
from fedpdmc.clocks import FINE, NOT_FINITE, answer
from fedpdmc.clocks.thinning import CurveClock, ThinnedClock, TimePolynomial
from fedpdmc.enclosures import TimeInterval, enclose, not_finite_along, not_finite_at
from fedpdmc.errors import Discontinuous, InputError, NotFinite
from fedpdmc.plan import Plan
from fedpdmc.potentials import LinearPredictor, Program
from fedpdmc.potentials.jax_function import curved_path

COUNT = np.array([1.0, 0.0, 2.0])
START = np.array([0.0, 0.4])


def distances(x):
    places = jnp.stack([x, 0.5 * x + 1.0])
    return jnp.sum(jnp.exp(-jnp.linalg.norm(places[:, None] - places, axis=-1)))


def guarded_distances(x):
    square = jnp.sum((jnp.stack([x, 0.5 * x + 1.0])[:, None] - jnp.stack([x, 0.5 * x + 1.0])) ** 2, -1)
    apart = ~np.eye(2, dtype=bool)
    return jnp.sum(jnp.where(apart, jnp.exp(-jnp.sqrt(jnp.where(apart, square, 1.0))), 1.0))


# With the primitive that is named at x = (0, 0.4), where the first parameter is zero; often that of a derivative.
BROKEN = {
    "root in one where": (lambda x: jnp.where(x[0] > 0, jnp.sqrt(x[0]), 0.0), "div"),
    "root of a square": (lambda x: jnp.sqrt(x[0] ** 2), "div"),
    "norm of zero": (lambda x: jnp.linalg.norm(x[:1]), "div"),
    "zero distances": (distances, "div"),
    "0/0 of data": (lambda x: jnp.sum(jnp.where(COUNT > 0, x[1] / jnp.asarray(COUNT), 0.0)), "div"),
    "0/0 of parameters": (lambda x: jnp.where(x[0] == 0, 1.0, jnp.sin(x[0]) / x[0]), "integer_pow"),
    "0 log 0 of data": (lambda x: jnp.sum(COUNT * jnp.log(COUNT * jnp.exp(x[1]))), "log"),
    "0 log 0 of parameters": (lambda x: jnp.sum(xlogy(jnp.abs(x[:1]), jnp.abs(x[:1]))), "div"),
    "a power with an infinite slope": (lambda x: jnp.abs(x[0]) ** 0.5, "pow"),
}  # fmt: skip
HARMLESS = {
    "root in two wheres": lambda x: jnp.where(x[0] > 1, jnp.sqrt(jnp.where(x[0] > 1, x[0] - 0.5, 1.0)), 1.0),
    "guarded distances": guarded_distances,
    "0/0 of data, guarded": lambda x: jnp.sum(jnp.where(COUNT > 0, x[1] / np.where(COUNT > 0, COUNT, 1.0), 0.0)),
    "0 log 0 of data, guarded": lambda x: jnp.sum(xlogy(COUNT, np.maximum(COUNT, 1.0) * jnp.exp(x[1]))),
}


def whole(function):
    """A proper potential with this term."""
    return Program(lambda x, data: function(x) + 0.5 * jnp.sum((x - 0.3) ** 2), jnp.zeros(1), 2)


def bounds(program, flips):
    """The largest numbers of the bounds on a short interval through the start, as lines and as polynomials."""
    a, v = START - np.array([0.005, 0.0]), np.ones(2)
    for order in (1, 2):
        curve = by_numpy(
            lambda a, v, h, order=order: program.curves(False, flips, a, v, h, order),
            a[:, None], v[:, None], np.array([0.01]),
        )  # fmt: skip
        yield curve.parts[0] + curve.error


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("flips", [True, False])
@pytest.mark.parametrize("name", [name for name in BROKEN if name != "0/0 of data"])
def test_no_bound_is_finite_where_the_gradient_is_not(name, flips):
    for found in bounds(whole(BROKEN[name][0]), flips):
        assert not np.all(np.isfinite(found))


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", BROKEN)
def test_the_operation_and_its_line_are_named(name):
    function, primitive = BROKEN[name]
    named = not_finite_at(function, START)
    assert named is not None and named.startswith(f"{primitive!r} at ") and "test_not_finite.py:" in named


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", HARMLESS)
def test_guards_are_harmless(name):
    program = whole(HARMLESS[name])
    assert not_finite_at(program.value, START) is None
    for flips in (True, False):
        for found in bounds(program, flips):
            assert np.all(np.isfinite(found))
        along = not_finite_along(program.value, program._program(flips), START, np.ones(2))
        assert along is None


@pytest.mark.usefixtures("double")
def test_what_is_finite_but_not_smooth_is_named_along_a_path():
    """The gradient is finite on both sides of the place."""
    program = whole(lambda x: jnp.sqrt(x[0] ** 2))
    named = not_finite_along(program.value, program._program(True), np.array([1e-9, 0.4]), np.array([-1.0, 1.0]))
    assert named is not None and named.startswith("'sqrt' at ") and "test_not_finite.py:" in named


def test_a_start_where_the_gradient_is_not_finite_is_refused_with_the_line():
    with pytest.raises(InputError, match=r"gradient is not finite at the start.*'div' at .*test_not_finite.py:\d+"):
        fp.sample(fp.Site(lambda x: jnp.linalg.norm(x), name="a"), fp.models.normal_prior(2), duration=1.0)


def test_a_run_that_meets_such_a_place_stops_with_the_line():
    site = fp.Site(lambda x: jnp.where(x[0] > 0, jnp.sqrt(x[0]), 0.0), name="a")
    settings = {
        "reference": fp.Reference(jnp.array([0.5]), jnp.array([0.5])),
        "init": [0.5],
        "chains": 4,
        "duration": 20.0,
        "seed": 1,
    }
    with pytest.raises(NotFinite, match=r"'sqrt' at .*test_not_finite.py:\d+.*jnp.where inside") as found:
        fp.sample(site, fp.models.normal_prior(1), dynamics=fp.ZigZag(), progress=False, **settings)
    assert found.value.where is not None


@pytest.mark.usefixtures("double")
def test_a_bound_that_is_not_a_number_stops_a_walk_in_cells():
    """It has no candidates: without a fault the walk would pass over the cell."""

    class NoBound(LinearPredictor):
        def field(self, rotating, flips, a, v):
            found = super().field(rotating, flips, a, v)
            return found._replace(curve=jnp.nan * found.curve)

    right = predictor("logistic", d=2)
    wrong = NoBound(**{part.name: getattr(right, part.name) for part in dataclasses.fields(right)})
    plan = Plan(jnp.zeros(1, int), jnp.asarray(START)[None], jnp.ones((1, 1)), jnp.ones((1, 1, 2)))
    faults = {}
    for potential in (right, wrong):
        _, walk = jax.jit(answer)(ThinnedClock(potential, fp.ZigZag()), chain_keys(jax.random.key(0), 1), plan)
        faults[type(potential)] = int(walk.fault[0])
    assert faults == {LinearPredictor: FINE, NoBound: NOT_FINITE}


@pytest.mark.usefixtures("double")
def test_a_bound_that_is_not_a_number_stops_a_walk_on_intervals():
    program = whole(lambda x: jnp.sum(COUNT ** jnp.exp(x[0])))
    clock = CurveClock(program, fp.ZigZag(), TimePolynomial(), jnp.ones(()))
    plan = Plan(jnp.zeros(1, int), jnp.asarray(START)[None], jnp.ones((1, 1)), jnp.ones((1, 1, 2)))
    assert np.all(np.isfinite(program.gradient(jnp.asarray(START))))
    _, walk = jax.jit(answer)(clock, chain_keys(jax.random.key(0), 1), plan)
    assert int(walk.fault[0]) == NOT_FINITE


# Continuous where they are numbers. Beyond the edge at zero the derivative is a number, though the value is none, or jumps.
EDGES = {
    "choice": lambda x: jnp.where(jnp.log(x[0]) < 0.3, x[1], x[1] + jnp.log(x[0]) - 0.3),
    "other choice": lambda x: jnp.where(jnp.log(x[0]) > -1.0, jnp.log(x[0]), -1.0),
    "largest": lambda x: jnp.maximum(jnp.log(x[0]), -3.0),
    "clipped": lambda x: jnp.clip(jnp.log1p(x[0] - 1.0), -1.0, 1.0),
    "clipped root": lambda x: jnp.clip(jnp.sqrt(x[0]), 0.2, 1.0),
    "clipped pole": lambda x: jnp.clip(1 / x[0], -1.0, 1.0),
    "clipped gamma": lambda x: jnp.clip(jax.lax.lgamma(x[0]), -1.0, 1.0),
    "step": lambda x: jnp.arctan(1 / x[0]),
    "sign": lambda x: x[0] / jnp.abs(x[0]),
    "larger number": lambda x: jnp.fmax(jnp.sqrt(x[0]) + 1.0, 0.3),
    "guard": lambda x: jnp.nan_to_num(jnp.sqrt(x[0]), nan=3.0),
    "masked": lambda x: jnp.sum(np.array([0.0, 1.0]) * jnp.sqrt(x)),
}  # fmt: skip


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("flips", [False, True])
@pytest.mark.parametrize("name", EDGES)
def test_no_bound_is_made_across_an_edge(name, flips):
    """So a path cannot get from where the potential is a number to where it is none, or past a jump at a pole."""
    program = Program(lambda x, data: EDGES[name](x) + 0.5 * jnp.sum(x * x), jnp.zeros(1), 2)
    program.check_continuity()
    rate, h = program._program(flips), np.full(4, 0.1)
    a, v = (
        np.array([[0.05, 0.3], [-0.05, 0.3], [0.05, 0.3], [0.5, 0.3]]),
        np.array([[-1.0, 1], [1, 1], [-1, -1], [1, 1]]),
    )
    with np.errstate(all="ignore"):
        for order in (1, 2):
            found = by_numpy(
                lambda *cell, order=order: enclose(rate, TimeInterval(order))(*curved_path(False, *cell, order)),
                a.T,
                v.T,
                h,
            )
            high = np.sum(found.error, 0)
            assert not np.any(np.isfinite(high[:3])) and np.isfinite(high[3])


def within_scan(step):
    """A sum over records within `scan`; the parameter is moved, so that nothing special is at the start."""

    def function(x, data):
        return jax.lax.scan(lambda total, y: (total + step(y, x[0] - 0.37), None), 0.0, data)[0]

    return function


@pytest.mark.parametrize(
    "step",
    [
        lambda y, x: jnp.clip(x / jnp.abs(y), -1.0, 1.0),
        lambda y, x: jnp.tanh(x / jnp.abs(y)),
        lambda y, x: jnp.minimum(jnp.exp(1 / jnp.abs(y)) * x, 1.0),
        lambda y, x: jnp.where(x / jnp.abs(y) > 3, 1.0, 0.0),
    ],
    ids=["clipped", "saturated", "overflown", "compared"],
)
def test_infinite_coefficients_from_data_within_a_scan_are_refused(step):
    """The parameter is multiplied by one over a record that is zero: a jump, whatever limits the product."""
    site = fp.Site(within_scan(step), data=np.array([0.5, 0.0, -1.0, 2.0]), name="a")
    with pytest.raises((InputError, Discontinuous)):
        fp.sample(site, fp.models.normal_prior(1), duration=1.0, progress=False)


@pytest.mark.long
def test_a_run_stops_at_a_quotient_that_jumps_within_a_scan():
    """``x / (|x| + |y|)`` is the sign of x where y is zero, and its gradient is finite on both sides."""
    site = fp.Site(within_scan(lambda y, x: x / (jnp.abs(x) + jnp.abs(y))), data=np.array([0.5, 0.0]), name="a")
    settings = {"reference": fp.Reference([0.3], [1.0]), "chains": 16, "duration": 10.0, "seed": 1, "progress": False}
    with pytest.raises(NotFinite):
        fp.sample(site, fp.models.normal_prior(1), dynamics=fp.ZigZag(), **settings)


def test_a_second_derivative_that_is_not_finite_is_named():
    """A power of zero has a value and a gradient, but no second derivative with respect to its exponent."""
    dose, y = jnp.asarray([0.0, 1.0, 3.0, 10.0, 30.0]), jnp.asarray([2.0, 2.2, 3.1, 4.9, 6.2])

    def power(d, hill):
        return d**hill

    def guarded(d, hill):
        return jnp.where(d > 0, jnp.where(d > 0, d, 1.0) ** hill, 0.0)

    def of(rise):
        def minus_log_likelihood(x, data):
            d, response = data
            share = rise(d / jnp.exp(x[1]), jnp.exp(x[2]))
            return 5.0 * jnp.sum((response - 2 - x[0] * share / (1 + share)) ** 2)

        return fp.Site(minus_log_likelihood, name="north", data=(dose, y))

    prior = fp.models.normal_prior(3, mean=[4.0, 2.0, 0.0])
    words = r"the second derivative at site 'north' \('pow' at .*test_not_finite.py.*power\)\).*jnp.where inside"
    with pytest.raises(NotFinite, match=words):
        fp.laplace([of(power)], prior)
    assert np.isfinite(np.asarray(fp.laplace([of(guarded)], prior).center)).all()
