import numpy as np
import pytest
from tests.paths import block, integrals, position, skeleton, zigzag

from fedpdmc.dynamics import Line, Rotation
from fedpdmc.results.skeleton import Block, Chunk, join, side_by_side

FLOWS = [pytest.param(Line(), id="line"), pytest.param(Rotation(), id="rotation")]


def halves(at=4.0):
    """Two runs of the same chains, one after the other."""
    return skeleton(0, end=at), skeleton(1, begin=at, end=10.0, knots=(3, 5, 1))


@pytest.mark.parametrize("flow", FLOWS)
def test_moments_are_the_integrals_along_the_path(flow):
    path = skeleton()
    moments = path.moments(flow)
    first, second = integrals(path, flow.rotating)
    assert moments.time == pytest.approx(3 * 10.0)
    np.testing.assert_allclose(moments.first, first, rtol=1e-11)
    np.testing.assert_allclose(moments.second, second, rtol=1e-11)


@pytest.mark.parametrize("flow", FLOWS)
def test_positions_are_those_of_the_flow_from_the_last_knot(flow):
    path, times = skeleton(), np.linspace(0.0, 10.0, 41)
    found = path.at(flow, times)
    assert found.shape == (3, 41, 2) and found.dtype == np.float64
    expected = [[position(path, flow.rotating, chain, time) for time in times] for chain in range(3)]
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_no_times_give_no_positions():
    assert skeleton().at(Line(), np.empty(0)).shape == (3, 0, 2)


def test_durations_add_up_to_the_span_for_every_chain():
    path = skeleton()
    by_chain = np.add.reduceat(path.durations, path.offsets[:-1])
    np.testing.assert_allclose(by_chain, 10.0)
    np.testing.assert_array_equal(path.owners(), [0] * 7 + [1] + [2] * 12)


@pytest.mark.parametrize("flow", FLOWS)
def test_two_runs_join_to_one(flow):
    first, second = halves()
    whole = join([first, second])
    assert (whole.begin, whole.end, whole.chains) == (0.0, 10.0, 3)
    joined, apart = whole.moments(flow), first.moments(flow).plus(second.moments(flow))
    for one, other in zip(joined, apart, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)
    for part in (first, second):
        times = np.linspace(part.begin, part.end, 13)[:-1]
        np.testing.assert_allclose(whole.at(flow, times), part.at(flow, times), atol=1e-12)


def test_a_block_puts_its_knots_together_chain_after_chain():
    path = skeleton()
    made = block(path).skeleton()
    for one, other in zip(made, path, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_block_leaves_void_knots_out():
    start = np.array([[1.0], [2.0]]), np.array([[1.0], [-1.0]])
    t = np.array([[0.5, 2.0, 0.0], [0.9, 0.0, 2.0]])
    valid = np.array([[True, False, False], [True, False, False]])
    numbers, v = side_by_side(t, t[..., None]), -t[..., None]
    chunks = [Chunk(numbers[:, part], v[:, part], valid[:, part]) for part in (slice(0, 2), slice(2, 3))]
    path = Block(start, chunks, 0.0, 2.0).skeleton()
    np.testing.assert_array_equal(path.offsets, [0, 2, 4])
    np.testing.assert_array_equal(path.t, [0.0, 0.5, 0.0, 0.9])
    np.testing.assert_array_equal(path.a[:, 0], [1.0, 0.5, 2.0, 0.9])
    np.testing.assert_array_equal(path.v[:, 0], [1.0, -0.5, -1.0, -0.9])


def test_long_runs_of_knots_are_put_in_their_places():
    path = skeleton(seed=3, knots=(400, 1, 290))
    for one, true in zip(block(path).skeleton(), path, strict=True):
        np.testing.assert_array_equal(one, true)


@pytest.mark.parametrize("dim", [1, 8, 9, 12, 13])
def test_signs_of_velocities_are_as_good_as_velocities(dim):
    packed, full = zigzag(dim=dim), zigzag(dim=dim, packed=False)
    assert packed.packed and not full.packed and packed.velocities.nbytes <= full.velocities.nbytes / 8 + len(full.t)
    times = np.linspace(0.0, 10.0, 17)
    np.testing.assert_array_equal(packed.velocity(np.array([3, 0])), full.v[[3, 0]])
    np.testing.assert_array_equal(packed.at(Line(), times), full.at(Line(), times))
    for one, other in zip((*packed, *packed.moments(Line())), (*full, *full.moments(Line())), strict=True):
        np.testing.assert_array_equal(one, other)


def test_intervals_join_with_the_signs_of_their_velocities():
    later = {"begin": 10.0, "end": 12.0, "seed": 1}
    whole = join([block(zigzag()), zigzag(**later)])
    expected = join([zigzag(packed=False), zigzag(**later, packed=False)])
    assert whole.packed and not expected.packed
    for one, other in zip(whole, expected, strict=True):
        np.testing.assert_array_equal(one, other)
