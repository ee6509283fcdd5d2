"""What is kept of a record: its knots, and not the room that was made for more."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedpdmc.sampling.coordinator import RoundKnots
from fedpdmc.sampling.engines.compiled_loop import Record

pytestmark = pytest.mark.usefixtures("double")

CHAINS, ROWS, SEGMENTS, DIM = 3, 40, 2, 4


def record(share, seed=0):
    rng, shape = np.random.default_rng(seed), (CHAINS, ROWS, SEGMENTS)
    numbers, v = rng.normal(size=(*shape, 1 + DIM)), rng.normal(size=(*shape, DIM))
    return Record(jnp.asarray(numbers), jnp.asarray(v), jnp.asarray(rng.random(shape) < share))


@pytest.mark.parametrize(("rows", "share"), [(ROWS, 1.0), (ROWS, 0.2), (7, 1.0), (7, 0.3), (0, 1.0)])
def test_the_knots_are_kept_in_their_order(rows, share):
    found = record(share)
    chunk = found.chunk(rows)
    for c in range(CHAINS):
        valid = np.asarray(found.valid)[c, :rows].ravel()
        for kept, made in ((chunk.numbers, found.numbers), (chunk.velocities, found.velocities)):
            expected = np.asarray(made)[c, :rows].reshape(-1, made.shape[-1])[valid]
            np.testing.assert_array_equal(kept[c][chunk.valid[c]], expected)


@pytest.mark.parametrize(("rows", "share"), [(ROWS, 0.2), (2, 1.0)])
def test_few_knots_do_not_keep_the_whole_record(rows, share):
    chunk = record(share).chunk(rows)
    for kept in (chunk.numbers, chunk.velocities):
        owner = kept if kept.base is None else kept.base
        assert owner.size <= 0.5 * CHAINS * ROWS * SEGMENTS * kept.shape[-1]


@pytest.mark.parametrize("dim", [1, 8, 11])
@pytest.mark.parametrize("signs", [True, False])
def test_rounds_are_written_row_by_row(dim, signs):
    rng = np.random.default_rng(1)
    v = np.where(rng.random((3, CHAINS, SEGMENTS, dim)) < 0.5, -1.0, 1.0) * (1.0 if signs else 2.5)
    t, a = rng.normal(size=(3, CHAINS, SEGMENTS)), rng.normal(size=(3, CHAINS, SEGMENTS, dim))
    found = Record.empty(ROWS, CHAINS, dim, SEGMENTS, signs)
    for row in range(3):
        valid = jnp.ones((CHAINS, SEGMENTS), bool)
        found = found.written(RoundKnots(*(jnp.asarray(x[row]) for x in (t, a, v)), valid), jnp.asarray(row))
    chunk = found.chunk(3)
    assert chunk.packed is signs and chunk.valid.all()
    for kept, made in ((chunk.t, t), (chunk.a, a), (chunk.v, v)):
        np.testing.assert_array_equal(kept, np.swapaxes(made, 0, 1).reshape(kept.shape))


@pytest.mark.parametrize("rows", [0, 3, 16, 17, ROWS])
def test_knots_that_stay_on_the_device_are_the_same(rows):
    whole = record(1.0)
    kept = whole.on_device(rows)
    assert rows * SEGMENTS <= kept.valid.shape[1] <= max(2 * rows + 1, 1) * SEGMENTS
    assert isinstance(kept.numbers, jax.Array) and isinstance(kept.on_host().numbers, np.ndarray)
    count = rows * SEGMENTS
    np.testing.assert_array_equal(kept.on_host().numbers[:, :count], whole.chunk(rows).numbers)
