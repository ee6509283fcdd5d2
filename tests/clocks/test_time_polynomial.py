"""Events on intervals: bounds hold, arrivals have the law of the rates, and errors are noticed."""

import contextlib
import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from tests.clocks.laws import answered, heard
from tests.support import DYNAMICS

from fedpdmc._jax.random_streams import chain_keys
from fedpdmc.clocks import VIOLATED, CurveClock, thinning
from fedpdmc.clocks.thinning import CELLS, HIGH_ORDER, MOST_ADDED, ORDER, SHORT, TimePolynomial, time_polynomial
from fedpdmc.errors import NoEnclosure
from fedpdmc.plan import Plan
from fedpdmc.potentials import PriorShare, Program, Quadratic, Sum
from fedpdmc.potentials.chebyshev import interpolant

pytestmark = pytest.mark.usefixtures("double")

CHAINS = 4000
DAILY = {("funnel", "zigzag"), ("walled", "boomerang"), ("kinked", "zigzag"), ("epidemic", "boomerang")}


def funnel(x, data):
    """Effects on a scale that is a parameter, in (log scale, effects)."""
    theta = jnp.exp(x[0]) * x[1:]
    return 0.5 * jnp.sum((data - theta) ** 2) + 0.5 * jnp.sum(x * x) + jnp.log1p(jnp.exp(2 * x[0]))


def kinked(x, data):
    """Laplace errors."""
    return jnp.sum(jnp.abs(data - x[0] - 0.5 * x[1])) + 0.5 * jnp.sum(jnp.maximum(x, 0.0) ** 2)


def walled(x, data):
    """Defined on one side of a wall."""
    return 0.5 * jnp.sum(x * x) - jnp.sum(data * jnp.log(2 + x))


def epidemic(x, data):
    """Counts of an epidemic by Euler steps, in (log of infection, log of recovery)."""
    beta, gamma = 0.5 * jnp.exp(0.6 * x[0]), 0.2 * jnp.exp(0.6 * x[1])

    def step(state, seen):
        s, i = state
        new = beta * s * i
        return (s - new, i + new - gamma * i), 100 * new - seen * jnp.log(100 * new)

    return jnp.sum(jax.lax.scan(step, (0.99, 0.01), data)[1]) + 0.5 * jnp.sum(x * x)


MODELS = {
    "epidemic": (epidemic, np.array([1.0, 0, 1, 2, 1, 2, 3, 3, 5, 4, 7, 6, 9, 8, 7, 9, 6, 5, 3, 2]), 2),
    "funnel": (funnel, np.array([1.5, -0.8, 2.0]), 4),
    "kinked": (kinked, np.array([0.4, -0.9, 1.7, 0.2]), 2),
    "walled": (walled, np.array([2.0, 2.0]), 2),
}


@functools.cache
def clock(name, kind) -> CurveClock:
    function, data, dim = MODELS[name]
    dynamics = DYNAMICS[kind]
    program = Program(function, jnp.asarray(data), dim, records=len(data))
    return CurveClock(program, dynamics, *time_polynomial(program, dynamics)[:2])


def velocities(rng, kind, shape):
    v = rng.standard_normal(shape)
    return jnp.asarray(np.sign(v) if kind == "zigzag" else v)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=() if (name, kind) in DAILY else pytest.mark.long)
        for name in MODELS
        for kind in ("zigzag", "bouncy", "boomerang")
    ],
)
def test_rates_lie_within_their_error_and_below_their_bounds(name, kind):
    made, dim, rng = clock(name, kind), MODELS[name][2], np.random.default_rng(5)
    a, v = jnp.asarray(rng.standard_normal((3000, dim))), velocities(rng, kind, (3000, dim))
    dynamics, program = made.dynamics, made.potential

    @jax.jit
    def found(share):
        usual = made.length
        curve = made.curves.along(program, dynamics, a.T, v.T, jnp.broadcast_to(usual, a.shape[:1]))
        s = share * usual
        at, velocity = dynamics.flow.move(a, v, jnp.broadcast_to(s, a.shape[:1]))
        own = velocity * program.gradients(at) if dynamics.flips else program.speeds(at, velocity)
        middle = jax.vmap(lambda values: interpolant(values, jnp.full(a.shape[0], share)))(curve.values)
        doubt, top = curve.candidates_of_error, curve.ceilings(CELLS)[jnp.minimum(share * CELLS, CELLS - 1).astype(int)]
        off = jnp.max(jnp.abs(own.T - middle) - curve.error, 0)
        over = jnp.max(own.T - top, 0)
        return jnp.isfinite(doubt), off, over, jnp.mean(doubt <= MOST_ADDED)

    for share in (0.0, 0.03, 0.4, 0.9, 1.0):
        known, off, over, good = (np.asarray(x) for x in found(share))
        assert np.all(off[known] <= 0) and np.all(over[known] <= 0)
        assert known.mean() > 0.5 and good > 0.2


def plan(offset, kind, length=0.6):
    """All chains from one state, and on in another direction."""
    offset = jnp.asarray(offset, float)
    v = jnp.asarray([1.0, -1.0, 1.0, 1.0][: offset.shape[0]]) * (1.0 if kind == "zigzag" else 0.8)
    start, v = (jnp.broadcast_to(x, (CHAINS, offset.shape[0])) for x in (offset, v))
    return Plan(jnp.zeros(CHAINS, int), start, jnp.full((CHAINS, 2), length), jnp.stack([v, -v], 1))


def law(made, route, one):
    """The least p value: of the times and marks against the rates themselves, integrated along the route."""
    dynamics, program, half = made.dynamics, made.potential, float(route.duration[0, 0])
    times = np.linspace(0.0, half, 20001)

    @jax.jit
    def rates(a, v):
        at, velocity = dynamics.flow.move(*(jnp.broadcast_to(x, (len(times), *x.shape)) for x in (a, v)), times)
        return jnp.maximum(velocity * program.gradients(at) if dynamics.flips else program.speeds(at, velocity), 0.0)

    start, (v, other) = route.start[0], route.velocity[0]
    turned = dynamics.flow.move(start[None], v[None], jnp.asarray([half]))[0]
    parts = np.concatenate([rates(start, v), rates(turned[0], other)[1:]])
    grid = np.concatenate([times, half + times[1:]])
    steps = 0.5 * np.diff(grid)[:, None] * (parts[1:] + parts[:-1])
    load = np.concatenate([[0.0], np.cumsum(steps.sum(1))])
    rang, total = one[0] < 2 * half, -np.expm1(-load[-1])
    level = -np.expm1(-np.interp(one[0][rang], grid, load)) / total
    chances = (steps * np.exp(-0.5 * (load[1:] + load[:-1]))[:, None]).sum(0)
    counts = np.bincount(one[1][rang], minlength=len(chances)) if dynamics.flips else np.array([rang.sum()])
    count = len(rang)
    counts, chances = np.append(counts, count - rang.sum()), np.append(chances, np.exp(-load[-1]))
    table = stats.chisquare(counts[chances > 0], count * chances[chances > 0] / chances.sum())
    assert not counts[chances == 0].any()
    return min(stats.kstest(level, "uniform").pvalue, table.pvalue)


CASES = [
    ("funnel", [0.9, 0.8, -0.3, 1.2], "zigzag"),
    ("kinked", [0.1, -0.35], "zigzag"),
    ("walled", [-0.95, 1.6], "boomerang"),
    *(
        pytest.param(*case, marks=pytest.mark.long)
        for case in (
            ("funnel", [2.4, 0.8, -1.3, 1.2], "zigzag"),
            ("funnel", [0.9, 0.8, -0.3, 1.2], "bouncy"),
            ("funnel", [0.9, 0.8, -0.3, 1.2], "boomerang"),
            ("walled", [-0.95, 1.6], "zigzag"),
            ("epidemic", [0.6, -0.4], "zigzag"),
            ("epidemic", [0.6, -0.4], "boomerang"),
        )
    ),
]


@pytest.mark.parametrize(("name", "offset", "kind"), CASES)
def test_arrivals_have_the_law_of_the_rates(name, offset, kind):
    made, route = clock(name, kind), plan(offset, kind)
    one = heard(made, route, 1)
    assert law(made, route, one) > 1e-3
    assert 0.2 < np.mean(one[0] < 1.2) and np.ptp(one[0]) > 0.01
    if name == "funnel" and kind == "zigzag":
        assert one[2].mean() < 0.2


def test_intervals_that_are_cut_give_the_same_law(monkeypatch):
    """Hardly any error is small enough, so that intervals are cut many times."""
    made, route = clock("funnel", "zigzag"), plan([0.9, 0.8, -0.3, 1.2], "zigzag")
    monkeypatch.setattr(thinning, "MOST_ADDED", 1e-4)
    # Of another order, so that it is compiled again.
    again = dataclasses.replace(made, curves=TimePolynomial(order=4), length=2.0 * made.length)
    one = heard(again, route, 3)
    assert law(made, route, one) > 1e-3


@pytest.mark.parametrize("name", ["epidemic", "funnel"])
def test_recursions_have_a_high_order(name):
    """Whose intervals are so short with the usual one that several are needed until the rates have changed."""
    made = clock(name, "boomerang")
    assert made.curves.order == (HIGH_ORDER if name == "epidemic" else ORDER)
    assert float(made.length) > SHORT


class Wrong(TimePolynomial):
    """With the constant of the rates moved, and their error scaled."""

    by: float = eqx.field(static=True, default=0.0)
    share: float = eqx.field(static=True, default=1.0)

    def along(self, potential, dynamics, a, v, h):
        curve = super().along(potential, dynamics, a, v, h)
        return curve._replace(values=curve.values + self.by, error=self.share * curve.error)


def wrong(made, by, share):
    return dataclasses.replace(made, curves=Wrong(by=by, share=share))


def test_wrong_polynomials_give_other_arrivals():
    made, route = clock("funnel", "zigzag"), plan([0.9, 0.8, -0.3, 1.2], "zigzag")
    assert law(made, route, heard(wrong(made, 0.3, 0.0), route, 1)) < 1e-3


def test_polynomials_beyond_their_error_are_caught_by_the_program():
    made, route = clock("kinked", "zigzag"), plan([0.1, -0.35], "zigzag")
    _, walk = answered(wrong(made, 1.0, 1.0), chain_keys(jax.random.key(1), CHAINS), route)
    assert np.any(np.asarray(walk.fault) == VIOLATED)


@pytest.mark.parametrize(("inner", "refused"), [(jnp.cosh, None), (jnp.sort, "sort")])
def test_a_loop_is_followed_unless_a_primitive_has_no_rule(inner, refused):
    def looped(x, data):
        return jax.lax.fori_loop(0, 3, lambda i, c: c + data[i] * jnp.sum(inner(x) ** 2), 0.0)

    program = Program(looped, jnp.ones(3), 2, records=3)
    with contextlib.nullcontext() if refused is None else pytest.raises(NoEnclosure, match=refused):
        time_polynomial(program, DYNAMICS["zigzag"])


@pytest.mark.parametrize("kind", ["zigzag", pytest.param("boomerang", marks=pytest.mark.long)])
def test_arrivals_with_a_share_of_the_prior_have_the_law_of_both(kind):
    made, route = clock("funnel", kind), plan([0.9, 0.8, -0.3, 1.2], kind)
    both = Sum((made.potential, PriorShare(Quadratic(2.0 * jnp.eye(4), jnp.ones(4)))))

    def walking(shares):
        return dataclasses.replace(made, potential=both.with_share(shares))

    # Every other chain has a larger share.
    one = heard(walking(jnp.where(jnp.arange(CHAINS) % 2, 0.9, 0.2)), route, 4)
    for place, share in enumerate((0.2, 0.9)):
        own = [part[place::2] for part in one]
        assert law(walking(jnp.full(20001, share)), route, own) > 1e-3
        assert law(walking(jnp.full(20001, 1.1 - share)), route, own) < 1e-3
