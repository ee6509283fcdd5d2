"""Counter-based randomness: every draw is a pure function of (key, chain, plan number, draw).

The generator is Threefry-2x32 with 20 rounds, the one behind JAX's keys, evaluated at the counter (plan number, draw) under
the chain's key. Written out, its rounds fuse with what uses them: a fifth of the time and of the compilation of
``jax.random``, whose rounds are a loop of their own on the CPU.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Key, UInt32

from fedpdmc.compilation import apart

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = 0x1BD11BDA

ChainKeys = UInt32[Array, "C 2"]


def chain_keys(key: Key[Array, ""], chains: int) -> ChainKeys:
    """One key for each chain, by ``fold_in``."""
    return jax.random.key_data(jax.vmap(lambda c: jax.random.fold_in(key, c))(jnp.arange(chains)))


def threefry(key: tuple[Array, Array], counter: tuple[Array, Array]) -> tuple[Array, Array]:
    """Two words of 32 random bits for each counter."""
    schedule = (key[0], key[1], key[0] ^ key[1] ^ jnp.uint32(PARITY))
    x, y = counter[0] + schedule[0], counter[1] + schedule[1]
    for block in range(5):
        for rotation in ROTATIONS[block % 2]:
            x = x + y
            y = x ^ ((y << rotation) | (y >> (32 - rotation)))
        x = x + schedule[(block + 1) % 3]
        y = y + schedule[(block + 2) % 3] + jnp.uint32(block + 1)
    return x, y


def uniforms(keys: ChainKeys, number: Int[Array, " C"], draw: Int[Array, " C"], count: int) -> Float[Array, "n C"]:
    """Uniforms in [0, 1) with 52 random bits, for each chain's draw; one ``count`` for each set of keys.

    Chains are the last axis, along which the compiler vectorises.
    """

    def generate(keys, number, draw):
        index = (draw.astype(jnp.uint32) * jnp.uint32(count))[None] + jnp.arange(count, dtype=jnp.uint32)[:, None]
        plan = jnp.broadcast_to(number.astype(jnp.uint32)[None], index.shape)
        high, low = threefry((keys[None, :, 0], keys[None, :, 1]), (plan, index))
        bits = (high.astype(jnp.uint64) << 32) | low.astype(jnp.uint64)
        mantissa = (bits >> 12) | jnp.uint64(0x3FF0000000000000)
        return lax.bitcast_convert_type(mantissa, jnp.float64) - 1.0

    return apart(generate, keys, number, draw, number=number)


def exponentials(u: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Standard exponentials ``−log(1 − u)``."""
    return -jnp.log1p(-u)


def normals(u: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Standard normals ``√2 erf⁻¹(2u − 1)``, with u moved off zero by half its spacing."""
    return jnp.sqrt(2.0) * lax.erf_inv(2 * u - 1 + 2.0**-52)
