"""The kernel of a GPU has the sums of the processor's loops, and is one that a GPU's compiler takes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedpdmc.potentials import dense_rates
from fedpdmc.potentials.dense_rates import (
    TILE,
    TILE_OF_PRODUCTS,
    UNROLLED,
    InterpolatedCurves,
    LogisticCurves,
    _products,
    summed,
)

DIM, NODES, BLOCKS, RECORDS, CHAINS = 3, 4, 2, 5 * UNROLLED, TILE[1] + 7


def curves(kind):
    none, zero = jnp.zeros((1, 1, 1), jnp.float32), jnp.zeros(())
    if kind == "logistic":
        return LogisticCurves(none, none, zero, jnp.zeros((), int), NODES, True, (0.1, 0.01)), 9
    return InterpolatedCurves(none, none, zero, jnp.zeros((), int), NODES, True, 4, kind == "growing"), 11


def arrays(count):
    rng = np.random.default_rng(3)
    shapes = (
        (BLOCKS, RECORDS, DIM),
        (BLOCKS, RECORDS, count),
        (DIM, 2 * CHAINS),
        *[(NODES, CHAINS)] * 2,
        (CHAINS,),
    )
    rows, terms, both, *of_chains = (jnp.asarray(0.3 * rng.uniform(-1, 1, size=shape), jnp.float32) for shape in shapes)
    cos, sin, slip = of_chains
    return rows, terms, both, (cos, sin, 1e-4 * slip)


# The kernel multiplies; all products are made before, or those of one block at a time.
WAYS = {
    "multiplies": (TILE, None, 2**20),
    "given": (TILE_OF_PRODUCTS, _products, 2**20),
    "in turns": (TILE_OF_PRODUCTS, _products, 1),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["logistic", "interpolated", "growing"])
def test_the_kernel_has_the_sums_of_the_loops(kind, way, double, monkeypatch):
    own, count = curves(kind)
    rows, terms, both, of_chains = arrays(count)
    tile, products, most = WAYS[way]
    monkeypatch.setattr(dense_rates, "MOST_NUMBERS", most)
    found = summed(own._value, own._error, rows, terms, both, of_chains, tile, products, interpret=True)
    for block in range(BLOCKS):
        for one, other in zip(found, own._looped(both, *of_chains, rows[block], terms[block]), strict=True):
            np.testing.assert_allclose(one[block], other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["logistic", "interpolated", "growing"])
def test_the_kernel_can_be_lowered_for_a_gpu(kind, way, double):
    own, count = curves(kind)
    tile, products, _ = WAYS[way]

    def run(*args):
        return summed(own._value, own._error, *args, tile=tile, products=products)

    assert "triton" in jax.jit(run).trace(*arrays(count)).lower(lowering_platforms=("cuda",)).as_text()
