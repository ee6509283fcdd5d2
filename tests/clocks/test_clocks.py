"""Walking a plan: the same answer whoever asks, and nothing beyond the plan's end."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.support import DYNAMICS, predictor, states

from fedpdmc._jax.random_streams import chain_keys, exponentials, uniforms
from fedpdmc.clocks import FINE, Path, answer, clock_for, follow
from fedpdmc.clocks.base import advance
from fedpdmc.clocks.closed_form import AffineClock, ExponentialClock, affine_clock
from fedpdmc.clocks.envelopes import taylor
from fedpdmc.clocks.thinning import ThinnedClock
from fedpdmc.plan import Plan
from fedpdmc.potentials import Quadratic, Sum

pytestmark = pytest.mark.usefixtures("double")

CHAINS, DIM, SEGMENTS = 6, 3, 3
answer = jax.jit(answer)


def quadratic():
    half = np.random.default_rng(0).normal(size=(DIM, DIM))
    return Quadratic(jnp.asarray(half @ half.T), jnp.asarray([1.0, -2.0, 0.5]))


def potential_of(kind):
    return {
        "affine": quadratic,
        "exponential": lambda: predictor("poisson", diagonal=True),
        "thinned": lambda: predictor("logistic"),
    }[kind]()


CLOCKS = {
    "affine flips": ("affine", "zigzag"),
    "affine reflections": ("affine", "bouncy"),
    "exponential": ("exponential", "zigzag"),
    "thinned flips": ("thinned", "zigzag"),
    "thinned reflections": ("thinned", "bouncy"),
    "thinned rotation": ("thinned", "boomerang"),
    "thinned rotating flips": ("thinned", "factorised"),
}


def clock(name):
    kind, dynamics = CLOCKS[name]
    return clock_for(potential_of(kind), DYNAMICS[dynamics])


def keys():
    return chain_keys(jax.random.key(7), CHAINS)


def plan(dynamics, durations, number=4, seed=0):
    """A plan with a fresh velocity on every segment."""
    a, _ = states(seed, CHAINS, DIM)
    v = jnp.stack([states(seed + 1 + k, CHAINS, DIM, dynamics)[1] for k in range(SEGMENTS)], 1)
    durations = jnp.broadcast_to(jnp.asarray(durations), (CHAINS, SEGMENTS))
    return Plan(jnp.full(CHAINS, number), a, durations, v)


@functools.lru_cache
def answered(name, durations=(0.7, 0.4, 0.9), number=4, seed=0):
    walker = clock(name)
    with jax.enable_x64(True):
        arrival, walk = answer(walker, keys(), plan(walker.dynamics, durations, number, seed))
    return jax.tree.map(np.asarray, (arrival, walk))


def test_the_cheapest_exact_clock_is_chosen():
    pairs = {"affine": AffineClock, "exponential": ExponentialClock, "thinned": ThinnedClock}
    for kind, dynamics in CLOCKS.values():
        assert isinstance(clock_for(potential_of(kind), DYNAMICS[dynamics]), pairs[kind])
    assert isinstance(clock_for(quadratic(), DYNAMICS["boomerang"]), ThinnedClock)
    cells = predictor("poisson", diagonal=True)
    assert isinstance(clock_for(cells.expanded_at(jnp.zeros(DIM), 2), DYNAMICS["zigzag"]), ThinnedClock)
    assert isinstance(clock_for(Sum((cells, quadratic())), DYNAMICS["zigzag"]), ThinnedClock)


@pytest.mark.parametrize("name", CLOCKS)
def test_the_same_plan_gets_the_same_bits(name):
    walker = clock(name)
    first, _ = answered(name)
    again, _ = answer(walker, keys(), plan(walker.dynamics, (0.7, 0.4, 0.9)))
    for one, other in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(one, other)
    renumbered, _ = answered(name, number=5)
    assert np.all((renumbered.time != first.time) | ~first.rang)


@pytest.mark.parametrize("name", ["affine reflections", "thinned flips"])
def test_a_chain_does_not_depend_on_its_neighbours(name):
    walker, some = clock(name), jnp.asarray([1, 4])
    whole, _ = answered(name)
    part, _ = answer(walker, keys()[some], jax.tree.map(lambda x: x[some], plan(walker.dynamics, (0.7, 0.4, 0.9))))
    np.testing.assert_array_equal(part.rang, whole.rang[some])
    np.testing.assert_allclose(part.time, whole.time[some], atol=1e-12)
    np.testing.assert_allclose(part.mark[part.rang], whole.mark[some][part.rang], atol=1e-12)


@pytest.mark.parametrize("name", CLOCKS)
def test_an_arrival_is_within_the_plan_or_at_its_end(name):
    rang = 0
    for seed in range(4):
        arrival, walk = answered(name, seed=10 * seed)
        horizon = 0.7 + 0.4 + 0.9
        assert np.all(walk.fault == FINE)
        assert np.all(np.where(arrival.rang, (arrival.time > 0) & (arrival.time < horizon), True))
        np.testing.assert_allclose(arrival.time[~arrival.rang], horizon, rtol=1e-15)
        rang += arrival.rang.sum()
    assert rang


@pytest.mark.parametrize("name", CLOCKS)
def test_a_plan_of_no_length_is_answered_without_a_pass(name):
    arrival, walk = answered(name, (0.0, 0.0, 0.0))
    assert not arrival.rang.any() and not arrival.time.any() and not walk.passes.any()


@pytest.mark.parametrize("name", CLOCKS)
def test_unused_segments_at_the_end_change_nothing(name):
    walker = clock(name)
    used = plan(walker.dynamics, (0.7, 0.4, 0.0))
    garbage = Plan(used.number, used.start, used.duration, used.velocity.at[:, 2].set(1e9))
    expected, _ = answered(name, (0.7, 0.4, 0.0))
    found, _ = answer(walker, keys(), garbage)
    np.testing.assert_array_equal(found.time, expected.time)
    np.testing.assert_array_equal(found.rang, expected.rang)


@pytest.mark.parametrize("name", ["affine flips", "thinned flips", "exponential"])
def test_a_segment_of_no_length_in_the_middle_is_passed_over(name):
    walker = clock(name)
    with_gap = plan(walker.dynamics, (1.0, 0.0, 1.0))
    moved = Plan(with_gap.number, with_gap.start, with_gap.duration, with_gap.velocity.at[:, 1].set(1e3))
    one, two = answered(name, (1.0, 0.0, 1.0))[0], answer(walker, keys(), moved)[0]
    early = one.rang & (one.time < 1.0)
    assert early.any()
    np.testing.assert_array_equal(one.time[early], np.asarray(two.time)[early])
    assert np.all(np.isfinite(two.time)) and np.all(two.time <= 2.0)


def test_affine_arrival_solves_for_the_level_it_drew():
    walker = clock("affine flips")
    journey = plan(walker.dynamics, (1e9, 0.0, 0.0))
    arrival, _ = answer(walker, keys(), journey)
    a, v = journey.start, journey.velocity[:, 0]
    bound = taylor(walker.dynamics, walker.potential.field(False, True, a, v), a, v)
    level = exponentials(uniforms(keys(), journey.number, jnp.zeros(CHAINS, int), DIM)).T
    times = affine_clock(bound.value, bound.slope, level)
    np.testing.assert_allclose(arrival.time, times.min(1), rtol=1e-12)
    np.testing.assert_array_equal(arrival.mark, times.argmin(1))


@pytest.mark.parametrize("name", [name for name in CLOCKS if "flips" not in name and name != "exponential"])
def test_a_reflection_tells_the_direction_of_the_gradient_where_it_rang(name):
    walker = clock(name)
    arrival, _ = answered(name)
    path = follow(walker.dynamics, plan(walker.dynamics, (0.7, 0.4, 0.9)))
    segment = jnp.sum(path.begin <= arrival.time[:, None], 1) - 1
    offset = arrival.time - np.take_along_axis(np.asarray(path.begin), np.asarray(segment)[:, None], 1)[:, 0]
    a, v = path.state(walker.dynamics, segment, jnp.asarray(offset))
    gradient = walker.potential.field(walker.dynamics.flow.rotating, False, a, v).gradient
    unit = gradient / jnp.linalg.norm(gradient, axis=1, keepdims=True)
    assert arrival.rang.any()
    np.testing.assert_allclose(arrival.mark[arrival.rang], unit[arrival.rang], atol=1e-9)
    np.testing.assert_allclose(np.linalg.norm(arrival.mark[arrival.rang], axis=1), 1.0, rtol=1e-12)


def test_follow_lays_the_segments_end_to_end():
    for dynamics in DYNAMICS.values():
        journey = plan(dynamics, (0.7, 0.0, 0.9))
        path = follow(dynamics, journey)
        a = journey.start
        for k, duration in enumerate((0.7, 0.0, 0.9)):
            np.testing.assert_allclose(path.start[:, k], a, atol=1e-14)
            a, _ = dynamics.flow.move(a, journey.velocity[:, k], jnp.full(CHAINS, duration))
        np.testing.assert_allclose(path.begin[0], [0.0, 0.7, 0.7])
        np.testing.assert_allclose(path.horizon, journey.horizon)


@pytest.mark.parametrize(
    "durations, segment, offset, step, ends, expected",
    [
        pytest.param((1.0, 2.0, 0.0), 0, 0.25, 0.5, False, (0, 0.75, False), id="within a segment"),
        pytest.param((1.0, 2.0, 0.0), 0, 0.25, 0.75, True, (1, 0.0, False), id="to the next segment"),
        pytest.param((1.0, 2.0, 0.0), 1, 1.0, 1.0, True, (2, 0.0, True), id="to an end with segments unused"),
        pytest.param((1.0, 2.0, 3.0), 2, 1.0, 2.0, True, (3, 0.0, True), id="to the end of the last segment"),
        pytest.param((1.0, 0.0, 3.0), 0, 0.0, 1.0, True, (1, 0.0, False), id="to a segment of no length"),
    ],
)
def test_advance(durations, segment, offset, step, ends, expected):
    duration = jnp.asarray([durations])
    begin = jnp.asarray([[0.0, durations[0], durations[0] + durations[1]]])
    empty = jnp.zeros((1, 3, 1))
    path = Path(jnp.zeros(1, int), empty, empty, begin, duration)
    found = advance(path, *(jnp.asarray([x]) for x in (segment, offset, step, ends)))
    assert tuple(np.asarray(x)[0].item() for x in found) == expected
