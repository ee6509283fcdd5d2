"""Jumps at hyperplanes: when they are met, how often they are crossed, and what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import fedpdmc as fp
from fedpdmc._jax.compilation import compiled
from fedpdmc._jax.random_streams import chain_keys
from fedpdmc.clocks import answer
from fedpdmc.clocks.choose import choose
from fedpdmc.clocks.discontinuous_potentials import with_jumps
from fedpdmc.errors import InputError
from fedpdmc.plan import Plan
from fedpdmc.potentials import Program

pytestmark = pytest.mark.usefixtures("double")

CHAINS, RISE = 4096, 0.7
START, VELOCITY = np.array([-0.4, 0.3]), np.array([0.9, -0.5])
answered = compiled(answer)
rarely = functools.partial(pytest.param, marks=pytest.mark.long)


def stepped(x, data):
    """Up by RISE beyond a level, and flat on both sides."""
    return jnp.where(x @ data["normal"] > data["level"], data["rise"], 0.0)


def jumping(program, dynamics, center=None, scale=None):
    """The clock of a program of ``x = c + S a``."""
    center, scale = (
        np.zeros(program.dim) if center is None else center,
        np.ones(program.dim) if scale is None else scale,
    )
    found = program.jump_surfaces()
    assert found is not None
    whitened = program.whiten(fp.Reference(jnp.asarray(center), jnp.asarray(scale)), None)
    return with_jumps(choose(whitened, dynamics, jumps=True).clock, found, center, scale, "a")


def clock_of(dynamics, normal, level, rise=RISE):
    data = {"normal": jnp.asarray(normal), "level": jnp.asarray(level), "rise": jnp.asarray(rise)}
    return jumping(Program(stepped, data, 2), dynamics)


def heard(clock, start, velocity, horizon, seed=0):
    rows = np.ones((CHAINS, 1))
    plan = Plan(
        jnp.zeros(CHAINS, int), jnp.asarray(rows * start), jnp.asarray(rows * horizon),
        jnp.asarray(rows * velocity)[:, None],
    )  # fmt: skip
    arrival, walk = answered(clock, chain_keys(jax.random.key(seed), CHAINS), plan)
    assert not np.any(walk.fault)
    return np.asarray(arrival.time), np.asarray(arrival.rang), np.asarray(arrival.mark)


def crossing(dynamics, normal, level, start=START, velocity=VELOCITY):
    """The first time at which the path meets the surface, by a fine grid and bisection."""

    def gap(s):
        turn = (np.cos(s), np.sin(s)) if dynamics.flow.rotating else (np.ones_like(s), s)
        return np.outer(turn[0], start) @ normal + np.outer(turn[1], velocity) @ normal - level

    times = np.linspace(0, 6.1, 2001)
    (where,) = np.nonzero(np.diff(np.sign(gap(times))))
    low, high = times[where[0]], times[where[0] + 1]
    for _ in range(60):
        middle = 0.5 * (low + high)
        same = gap(np.array([middle]))[0] * gap(np.array([low]))[0] > 0
        low, high = (middle, high) if same else (low, middle)
    return low


CASES = (
    (fp.BouncyParticle(), np.array([2.0, 1.0]) / np.sqrt(5), 0.2),
    (fp.Boomerang(), np.array([2.0, 1.0]) / np.sqrt(5), 0.2),
    (fp.ZigZag(), np.array([1.0, 0.0]), 0.35),
    (fp.FactorisedBoomerang(), np.array([1.0, 0.0]), 0.35),
)


@pytest.mark.parametrize("dynamics, normal, level", CASES, ids=lambda x: type(x).__name__)
def test_a_rise_is_crossed_with_its_probability_at_its_time(dynamics, normal, level):
    velocity = np.array([1.0, -1.0]) if dynamics.flips and not dynamics.flow.rotating else VELOCITY
    when = crossing(dynamics, normal, level, velocity=velocity)
    clock = clock_of(dynamics, normal, level)
    time, rang, mark = heard(clock, START, velocity, when + 0.2)
    np.testing.assert_allclose(time[rang], when, rtol=1e-9)
    expected = 1 - np.exp(-RISE)
    assert stats.binomtest(int(rang.sum()), CHAINS, expected).pvalue > 1e-6
    assert not np.any(rang & (time > when + 1e-6))
    if dynamics.flips:
        assert np.all(mark[rang] == 0)
    else:
        np.testing.assert_allclose(np.abs(mark[rang] @ normal), 1.0)


@pytest.mark.parametrize("dynamics, normal, level", CASES[:2], ids=lambda x: type(x).__name__)
def test_downwards_it_is_always_crossed_and_a_wall_never(dynamics, normal, level):
    when = crossing(dynamics, normal, level)
    assert not heard(clock_of(dynamics, normal, level, -RISE), START, VELOCITY, when + 0.2)[1].any()
    time, rang, _ = heard(clock_of(dynamics, normal, level, np.inf), START, VELOCITY, when + 0.2)
    assert rang.all()
    np.testing.assert_allclose(time, when, rtol=1e-9)


def test_what_is_reflected_does_not_meet_the_surface_again():
    """It stays on the side that it came from, to the last bit."""
    normal, level = np.array([2.0, 1.0]) / np.sqrt(5), 0.35
    for dynamics in (fp.BouncyParticle(), fp.Boomerang()):
        clock = clock_of(dynamics, normal, level, np.inf)
        time, rang, mark = heard(clock, START, VELOCITY, 1.5)
        a, v = dynamics.flow.move(jnp.asarray(START)[None], jnp.asarray(VELOCITY)[None], time[:1])
        v = dynamics.jump(v, jnp.asarray(mark[:1]))
        assert rang.all() and not heard(clock, np.asarray(a)[0], np.asarray(v)[0], 0.3)[1].any()


def test_a_rotation_that_comes_back_is_asked_again():
    """Up, and down again within half a turn: what was crossed upwards is crossed downwards, later, without a question."""
    clock = clock_of(fp.Boomerang(), np.array([1.0, 0.0]), 0.5)
    time, rang, _ = heard(clock, np.array([0.0, 0.0]), np.array([1.0, 0.0]), 2 * np.pi)
    np.testing.assert_allclose(time[rang], np.pi / 6, rtol=1e-9)
    down = clock_of(fp.Boomerang(), np.array([1.0, 0.0]), 0.5, -RISE)
    time, rang, _ = heard(down, np.array([0.0, 0.0]), np.array([1.0, 0.0]), 2 * np.pi)
    np.testing.assert_allclose(time[rang], 5 * np.pi / 6, rtol=1e-9)
    assert stats.binomtest(int(rang.sum()), CHAINS, 1 - np.exp(-RISE)).pvalue > 1e-6


def test_flips_need_surfaces_at_values_of_a_coordinate():
    with pytest.raises(InputError, match="combination of parameters.*BouncyParticle"):
        clock_of(fp.ZigZag(), np.array([2.0, 1.0]) / np.sqrt(5), 0.2)


def test_surfaces_far_from_the_origin_are_told_apart_and_in_their_places():
    """Days since 1900, a tenth apart, and seconds since 1970: none is lost, and the slope has all its digits."""
    days = 45_000.0 + 0.1 * np.arange(4)
    counted = Program(lambda x, t: jnp.sum(jnp.where(t < x[0] + 0.5 * x[1], 1.0, 0.0)), jnp.asarray(days), 2)
    clock = jumping(counted, fp.BouncyParticle(), np.array([45_000.0, 0.0]), np.array([0.1, 0.2]))
    np.testing.assert_allclose(np.sort(np.abs(clock.level)), np.arange(4) / np.sqrt(2), rtol=1e-9, atol=1e-9)
    late = Program(lambda x, t: jnp.where(x[0] > t, 1.0, 0.0), jnp.asarray(1.7e9 + 0.3), 1).jump_surfaces()
    assert late is not None and late.normal.tolist() == [[1.0]] and late.level.tolist() == [1.7e9 + 0.3]


def test_equal_surfaces_are_asked_once():
    """Three tenths, and a tenth added up three times, are not the same number but the same surface."""

    def twice(x, data):
        return jnp.where(x[0] > 0.3, 0.35, 0.0) + jnp.where(-2 * x[0] < -2 * (0.1 + 0.1 + 0.1), 0.35, 0.0)

    clock = jumping(Program(twice, {}, 2), fp.Boomerang())
    assert clock.level.shape == (1,)
    rang = heard(clock, START, VELOCITY, 1.2)[1]
    assert stats.binomtest(int(rang.sum()), CHAINS, 1 - np.exp(-RISE)).pvalue > 1e-6


@pytest.mark.parametrize("center, scale, start", [(1e6, 1.0, -0.4), rarely(-3e7, 40.0, -0.4), rarely(0.0, 1.0, -2e4)])
def test_rounding_neither_hides_a_surface_nor_asks_twice(center, scale, start):
    """Of a parameter far from zero on its scale, and on a path that comes from far."""

    def beyond(x, level):
        return jnp.where(x[0] > level, RISE, 0.0)

    program = Program(beyond, jnp.asarray(center + 0.3 * scale), 1)
    clock = jumping(program, fp.ZigZag(), np.array([center]), np.array([scale]))
    time, rang, _ = heard(clock, np.array([start]), np.array([1.0]), 0.3 - start + 0.5)
    np.testing.assert_allclose(time[rang], 0.3 - start, rtol=1e-6)
    assert stats.binomtest(int(rang.sum()), CHAINS, 1 - np.exp(-RISE)).pvalue > 1e-6


def test_a_surface_that_rounding_hides_is_refused():
    program = Program(lambda x, t: jnp.where(x[0] + 1e12 > t, 1.0, 0.0), jnp.asarray(1e12), 1)
    with pytest.raises(InputError, match="rounding hides.*test_discontinuous_potentials.py"):
        jumping(program, fp.ZigZag())


def test_values_that_are_lost_in_rounding_are_refused():
    """The rise across a surface is made of values, which rounding may hide where the gradient is clean."""

    def offset(x, t):
        return (x[0] + t) ** 2 - t**2 - 2 * t * x[0] + jnp.where(x[0] > 0.3, 1.0, 0.0)

    with pytest.raises(
        InputError, match=r"a model that jumps, whose values are lost in rounding: their error may be \d"
    ):
        jumping(Program(offset, jnp.asarray(1e8), 1), fp.ZigZag())
    jumping(Program(offset, jnp.asarray(1e3), 1), fp.ZigZag())


def test_nothing_is_looked_at_beyond_a_wall():
    """The gradient is infinite at one place beyond it; steep before it, so that candidates are drawn beyond."""

    def steep(x, data):
        return jnp.where(x[0] < 0.3, 20.0 * x[0], jnp.inf) + jnp.sqrt(jnp.abs(x[0] - 0.5))

    clock = jumping(Program(steep, {}, 1), fp.ZigZag())
    time, rang, _ = heard(clock, np.array([0.2]), np.array([1.0]), 4.0)
    assert rang.all() and np.all(time <= 0.1 + 1e-9)
    silent = np.exp(-(2.0 + np.sqrt(0.2) - np.sqrt(0.3)))
    assert stats.binomtest(int(np.sum(time > 0.1 - 1e-9)), CHAINS, silent).pvalue > 1e-6


@pytest.mark.parametrize(
    "dynamics", [fp.ZigZag(), rarely(fp.BouncyParticle()), rarely(fp.Boomerang()), fp.FactorisedBoomerang()]
)
def test_a_corner_is_a_wall_on_both_sides(dynamics):
    """Two walls that are met at once: one is asked, and then, with the new velocity, the other."""

    def boxed(x, data):
        return jnp.where(jnp.all(x < 0.3), 0.0, jnp.inf)

    clock = jumping(Program(boxed, {}, 2), dynamics)
    a, v = np.array([0.1, 0.1]), np.array([1.0, 1.0])
    for _ in range(2):
        time, rang, mark = heard(clock, a, v, 1.0)
        assert rang.all() and np.ptp(time) == 0
        a, v = (np.asarray(x)[0] for x in dynamics.flow.move(jnp.asarray(a)[None], jnp.asarray(v)[None], time[:1]))
        v = np.asarray(dynamics.jump(jnp.asarray(v)[None], jnp.asarray(mark[:1])))[0]
    assert np.all(v < 0) and np.all(a < 0.3)
    assert not heard(clock, a, v, 0.1)[1].any()


def test_comparisons_that_do_not_depend_on_the_parameters_are_no_surfaces():

    def tied(x, t):
        z = x[0] + 0.0 * t
        return jnp.sum(jnp.where(jnp.all(z[:-1] < z[1:]), z, 0.3))

    found = Program(tied, jnp.arange(3.0), 1).jump_surfaces()
    assert found is not None and not found.level.size
