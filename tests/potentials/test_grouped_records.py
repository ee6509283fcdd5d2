"""Sums over records in groups, in blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedpdmc._jax.precision import double_precision
from fedpdmc.potentials.random_effects_rates import block_size, by_group, in_blocks, of_records


@pytest.mark.parametrize("records", [1, 7, 8, 31, 32, 40, 64, 96, 127, 128, 2000, 2048])
@double_precision
def test_blocks_cover_the_records_once(records):
    size = block_size(records)
    assert records % size == 0
    count = jnp.asarray(float(records))
    places = in_blocks(lambda cut, total: total + jnp.sum(cut(jnp.arange(records))), records, count, jnp.zeros(()))
    assert int(places) == records * (records - 1) // 2


@pytest.mark.parametrize("own", [1, 31, 32, 33, 100, 128])
@double_precision
def test_blocks_of_padding_alone_are_not_touched(own):
    """Padding within the last block that is used counts with its weight of zero; what follows may be anything."""
    size, total = block_size(128), 128
    weight = (np.arange(total) < own).astype(float)
    values = np.where(np.arange(total) < -(-own // size) * size, 1.0 + np.arange(total), np.nan)

    def block(cut, sums):
        return sums + jnp.sum(cut(jnp.asarray(weight)) * cut(jnp.asarray(values)))

    assert float(in_blocks(block, total, jnp.asarray(float(own)), jnp.zeros(()))) == own * (own + 1) / 2


@pytest.mark.parametrize("groups", [1, 5])
@double_precision
def test_effects_go_to_their_records_and_sums_to_their_groups(groups):
    rng = np.random.default_rng(groups)
    index, effects = np.sort(rng.integers(0, groups, 24)), rng.normal(size=(24, 2))
    z, values = rng.normal(size=(groups, 2, 3, 4)), rng.normal(size=(24, 4))
    expected = np.stack([np.einsum("r,rpc->pc", effects[i], z[index[i]]) for i in range(24)])
    np.testing.assert_allclose(of_records(*map(jnp.asarray, (z, effects, index))), expected, atol=1e-13)
    summed = np.stack([values[index == g].sum(0) for g in range(groups)])
    np.testing.assert_allclose(by_group(jnp.asarray(values), jnp.asarray(index), groups), summed, atol=1e-13)


@double_precision
def test_sums_in_blocks_by_group_are_those_of_all_records():
    rng = np.random.default_rng(3)
    index, values, weight = (
        np.sort(rng.integers(0, 9, 96)),
        rng.normal(size=(96, 2)),
        (np.arange(96) < 70).astype(float),
    )

    def block(cut, sums):
        return sums + by_group(cut(jnp.asarray(weight))[:, None] * cut(jnp.asarray(values)), cut(jnp.asarray(index)), 9)

    found = jax.jit(lambda start: in_blocks(block, 96, jnp.asarray(70.0), start))(jnp.zeros((9, 2)))
    expected = np.stack([(weight[:, None] * values)[index == g].sum(0) for g in range(9)])
    np.testing.assert_allclose(found, expected, atol=1e-13)
