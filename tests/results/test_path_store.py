"""What is kept of the paths: everything, or moments and a bounded number of draws."""

import copy
import dataclasses
import tracemalloc

import numpy as np
import pytest
from tests.paths import block, position, skeleton

from fedpdmc.dynamics import Line, Rotation
from fedpdmc.errors import InputError
from fedpdmc.results.path_store import MOST_DRAWS, DrawStore, SkeletonStore

FLOWS = [pytest.param(Line(), id="line"), pytest.param(Rotation(), id="rotation")]


def blocks(lengths):
    begin = 0.0
    for seed, length in enumerate(lengths):
        yield block(skeleton(seed, begin=begin, end=begin + length))
        begin += length


def filled(store, lengths):
    for piece in blocks(lengths):
        store.append(piece)
    return store


def grid_of(store):
    """Process times of the draws that a store of a path ``a = t`` keeps."""
    return store.draws(store.most_draws)[0, :, 0]


def clock_block(begin, end):
    """A path whose position is the time."""
    made = skeleton(0, chains=1, dim=1, begin=begin, end=end, knots=(1,))
    return block(dataclasses.replace(made, numbers=np.array([[made.begin, begin]]), velocities=np.ones((1, 1))))


@pytest.mark.parametrize("flow", FLOWS)
def test_both_stores_have_the_same_moments(flow):
    lengths = [1.0, 0.5, 4.0, 4.0]
    one, other = filled(SkeletonStore(flow), lengths), filled(DrawStore(flow), lengths)
    assert one.span == other.span == (0.0, 9.5)
    for left, right in zip(one.moments(), other.moments(), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-12)


@pytest.mark.parametrize(
    "lengths",
    [
        [1.0],
        [7.0, 0.01],
        [7.0, 0.001],
        [0.3, 0.7, 2.9, 11.0, 44.0],
        [1.0] * 5,
        [1.0] * 50,
    ],
)
def test_kept_draws_stay_equally_spaced_however_the_run_grows(lengths):
    store, begin = DrawStore(Line()), 0.0
    for length in lengths:
        store.append(clock_block(begin, begin + length))
        begin += length
    times = grid_of(store)
    spacing = np.diff(times)
    assert 1000 < len(times) <= MOST_DRAWS
    np.testing.assert_allclose(spacing, spacing[0], rtol=1e-9)
    assert times[0] == pytest.approx(spacing[0] / 2)
    assert begin - 2 * spacing[0] < times[-1] < begin


@pytest.mark.parametrize("n", [1, 7, 100, 1000])
def test_fewer_draws_are_equally_spaced_and_centred(n):
    store = DrawStore(Line())
    store.append(clock_block(0.0, 10.0))
    times = store.draws(n)[0, :, 0]
    assert times.shape == (n,)
    if n > 1:
        np.testing.assert_allclose(np.diff(times), np.diff(times)[0], rtol=1e-9)
    assert abs((times[0] + times[-1]) / 2 - 5.0) <= 10.0 / store.most_draws


@pytest.mark.parametrize("n", [10, 1000, 1500])
def test_fewer_draws_cover_the_whole_span(n):
    store = DrawStore(Line())
    store.append(clock_block(0.0, 10.0))
    times = store.draws(n)[0, :, 0]
    assert times[-1] - times[0] > 0.9 * 10.0 * (1 - 1 / n)


@pytest.mark.parametrize("flow", FLOWS)
def test_draws_are_positions_on_the_path(flow):
    path = skeleton()
    whole, thinned = SkeletonStore(flow, path), filled(DrawStore(flow), [10.0])
    times = (np.arange(5) + 0.5) * 2.0
    expected = [[position(path, flow.rotating, chain, time) for time in times] for chain in range(3)]
    np.testing.assert_allclose(whole.draws(5), expected, atol=1e-12)
    n = thinned.most_draws
    np.testing.assert_allclose(thinned.draws(n), whole.draws(n), atol=1e-9)


@pytest.mark.parametrize("make", [SkeletonStore, DrawStore])
def test_a_copy_grows_without_changing_the_first(make):
    first = filled(make(Line()), [1.0, 2.0])
    before, drawn = first.moments(), first.draws(50)
    second = copy.copy(first)
    second.append(block(skeleton(9, begin=3.0, end=6.0)))
    assert (first.span, second.span) == ((0.0, 3.0), (0.0, 6.0))
    for one, other in zip(before, first.moments(), strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(first.draws(50), drawn)


@pytest.mark.parametrize("make", [SkeletonStore, DrawStore])
def test_an_empty_store_says_so(make):
    with pytest.raises(InputError, match="no completed block"):
        make(Line()).moments()


def test_more_draws_than_were_kept_are_refused():
    store = filled(DrawStore(Line()), [1.0])
    with pytest.raises(InputError, match="at most that"):
        store.draws(store.most_draws + 1)


def test_memory_of_kept_draws_does_not_grow_with_the_run():
    store, sizes = DrawStore(Line()), []
    for piece in blocks([1.0] * 60):
        store.append(piece)
        sizes.append(sum(x.nbytes for x in vars(store).values() if isinstance(x, np.ndarray)))
    assert max(sizes) <= 3 * MOST_DRAWS * 2 * 8


def test_memory_does_not_grow_with_the_length_of_the_next_block():
    store = filled(DrawStore(Line()), [0.1])
    following = block(skeleton(1, begin=0.1, end=20.0))
    tracemalloc.start()
    store.append(following)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert store.most_draws <= MOST_DRAWS
    assert peak < 10 * 3 * MOST_DRAWS * 2 * 8
