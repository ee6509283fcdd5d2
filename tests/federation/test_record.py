"""What is kept of a record: its knots, and not the room that was made for more."""

import jax.numpy as jnp
import numpy as np
import pytest

from fedpdmc.federation.record import Record

pytestmark = pytest.mark.usefixtures("double")

CHAINS, ROWS, SEGMENTS, WIDTH = 3, 40, 2, 5


def record(share, seed=0):
    rng = np.random.default_rng(seed)
    numbers = rng.normal(size=(CHAINS, ROWS, SEGMENTS, WIDTH))
    return Record(jnp.asarray(numbers), jnp.asarray(rng.random((CHAINS, ROWS, SEGMENTS)) < share))


@pytest.mark.parametrize(("rows", "share"), [(ROWS, 1.0), (ROWS, 0.2), (7, 1.0), (7, 0.3), (0, 1.0)])
def test_the_knots_are_kept_in_their_order(rows, share):
    found = record(share)
    chunk = found.chunk(rows)
    for c in range(CHAINS):
        valid = np.asarray(found.valid)[c, :rows].ravel()
        expected = np.asarray(found.numbers)[c, :rows].reshape(-1, WIDTH)[valid]
        np.testing.assert_array_equal(chunk.numbers[c][chunk.valid[c]], expected)


@pytest.mark.parametrize(("rows", "share"), [(ROWS, 0.2), (2, 1.0)])
def test_few_knots_do_not_keep_the_whole_record(rows, share):
    chunk = record(share).chunk(rows)
    owner = chunk.numbers if chunk.numbers.base is None else chunk.numbers.base
    assert owner.size <= 0.5 * CHAINS * ROWS * SEGMENTS * WIDTH
