"""A run's paths on disk, block by block."""

import numpy as np
import pytest
from tests.paths import block, skeleton, zigzag

from fedpdmc.checkpoint import FORMAT, Checkpoint
from fedpdmc.dynamics import Line
from fedpdmc.errors import InputError
from fedpdmc.skeleton import join
from fedpdmc.store import SkeletonStore


def filled(checkpoint):
    store = SkeletonStore(Line())
    checkpoint.fill(store)
    return store.skeleton


@pytest.mark.parametrize("begun", [1, FORMAT])
@pytest.mark.parametrize("make", [skeleton, zigzag])
def test_blocks_come_back_and_go_on_in_the_format_in_which_they_began(make, begun, tmp_path):
    parts = [make(0), make(1, begin=10.0, end=12.0)]
    first = Checkpoint(tmp_path)
    first.format = begun
    first.append(block(parts[0]))
    first.write({}, {})
    again = Checkpoint(tmp_path)
    assert again.read() is not None and (again.format, again.blocks) == (begun, 1)
    again.append(block(parts[1]))
    found = filled(again)
    assert found.packed is (make is zigzag)
    for one, other in zip(found, join(parts), strict=True):
        np.testing.assert_array_equal(one, other)


def test_blocks_that_do_not_count_are_cut_off(tmp_path):
    first = Checkpoint(tmp_path)
    first.append(block(zigzag(0)))
    first.write({}, {})
    first.append(block(zigzag(1, begin=10.0, end=11.0)))
    again, last = Checkpoint(tmp_path), zigzag(2, begin=10.0, end=12.0)
    again.read()
    again.append(block(last))
    for one, other in zip(filled(again), join([zigzag(0), last]), strict=True):
        np.testing.assert_array_equal(one, other)


def test_an_unknown_format_is_refused(tmp_path):
    Checkpoint(tmp_path).write({"format": 9}, {})
    with pytest.raises(InputError, match="format 9"):
        Checkpoint(tmp_path).read()
