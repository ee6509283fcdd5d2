"""Records in blocks, as dense rates pass over them."""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Array, Float32, Int

from fedpdmc._jax.compilation import on_device
from fedpdmc.potentials.linear_predictor import LinearPredictor

# Records that one turn of the loop takes on a processor, and those summed in 32 bits.
UNROLLED, BLOCK = 8, 256
# Records that the kernel takes at a time and chains of a program, where it makes the predictors and where it does not.
TILE, TILE_OF_PRODUCTS = (4, 128), (4, 64)
# On a GPU: records of a block, at least and at most, and programs that keep it busy.
LEAST_WIDE, MOST_WIDE, PROGRAMS = 64, 4096, 2048


def count_records(potential: LinearPredictor) -> int:
    """Records that see a parameter: the others add nothing."""
    return int(np.count_nonzero(np.any(np.asarray(potential.design), axis=1)))


def blocking(count: int, wide: bool = False, chains: int = 1024) -> tuple[int, int]:
    """How many blocks of how many records."""
    most = BLOCK
    if wide:
        most = min(max(count * -(-chains // TILE[1]) // PROGRAMS, LEAST_WIDE), MOST_WIDE)
    step = max(UNROLLED, 2 ** (max(count, 1).bit_length() - 1) // 32)
    padded = -(-max(count, 1) // step) * step
    blocks = -(-padded // most)
    return blocks, -(-padded // (blocks * UNROLLED)) * UNROLLED


def packed(x: np.ndarray, shape: tuple[int, int]) -> Float32[Array, "B b m"]:
    """Rows in blocks, padded with zeros: a record of zeros adds nothing to rate and error."""
    padded = np.zeros((math.prod(shape), x.shape[1]), np.float32)
    padded[: x.shape[0]] = x
    return on_device(padded.reshape(*shape, -1))


def filled_blocks(x: np.ndarray, shape: tuple[int, int]) -> Int[Array, ""]:
    """How many blocks `packed` rows fill."""
    return on_device(np.asarray(-(-x.shape[0] // shape[1])))
