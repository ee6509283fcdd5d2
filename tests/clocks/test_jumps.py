"""Jumps at hyperplanes: when they are met, how often they are crossed, and what is refused."""

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
from fedpdmc.clocks.jumps import with_jumps
from fedpdmc.errors import InputError
from fedpdmc.plan import Plan
from fedpdmc.potentials import Program

pytestmark = pytest.mark.usefixtures("double")

CHAINS, RISE = 4096, 0.7
START, VELOCITY = np.array([-0.4, 0.3]), np.array([0.9, -0.5])
answered = compiled(answer)


def stepped(x, data):
    """Up by RISE beyond a level, and flat on both sides."""
    return jnp.where(x @ data["normal"] > data["level"], data["rise"], 0.0)


def clock_of(dynamics, normal, level, rise=RISE):
    data = {"normal": jnp.asarray(normal), "level": jnp.asarray(level), "rise": jnp.asarray(rise)}
    program = Program(stepped, data, 2)
    found = program.jump_surfaces()
    assert found is not None
    clock = choose(program, dynamics, jumps=True).clock
    return with_jumps(clock, found.normal, found.level, "a")


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


def test_from_the_surface_itself_nothing_is_met_again():
    """As after a reflection: the path leaves the surface that it stands on."""
    normal, level = np.array([1.0, 0.0]), 0.35
    for dynamics in (fp.BouncyParticle(), fp.Boomerang()):
        clock = clock_of(dynamics, normal, level, np.inf)
        for slip in (0.0, 1e-16, -1e-16):
            assert not heard(clock, np.array([level + slip, 0.3]), np.array([-0.9, 0.2]), 0.3)[1].any()


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
