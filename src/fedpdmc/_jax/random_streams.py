"""Counter-based randomness: every draw is a pure function of (key, chain, plan number, draw).

The generator is Threefry-2x32 with 20 rounds, the one behind JAX's keys, evaluated at the counter (plan number, draw) under
the chain's key. Written out, its rounds fuse with what uses them: a fifth of the time and of the compilation of
``jax.random``, whose rounds are a loop of their own on the CPU.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Key, UInt32

from fedpdmc._jax.by_numpy import once
from fedpdmc._jax.compilation import apart

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = 0x1BD11BDA

# Bits of 64-bit numbers: 1, √½, the exponent of 2⁵², the mantissa.
ONE, ROOT_HALF = np.uint64(0x3FF0000000000000), np.uint64(0x3FE6A09E667F3BCD)
EXPONENT_OF_2_52, MANTISSA = np.uint64(0x4330000000000000), np.uint64(0x000FFFFFFFFFFFFF)
LN2_HIGH, LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
LOG_SERIES = (
    6.666666666666735130e-01, 3.999999999940941908e-01, 2.857142874366239149e-01, 2.222219843214978396e-01,
    1.818357216161805012e-01, 1.531383769920937332e-01, 1.479819860511658591e-01,
)  # fmt: skip

# Numerators and denominators of AS 241 (PPND16).
MIDDLE = (
    (3.3871328727963666080e0, 1.3314166789178437745e2, 1.9715909503065514427e3, 1.3731693765509461125e4,
     4.5921953931549871457e4, 6.7265770927008700853e4, 3.3430575583588128105e4, 2.5090809287301226727e3),
    (1.0, 4.2313330701600911252e1, 6.8718700749205790830e2, 5.3941960214247511077e3,
     2.1213794301586595867e4, 3.9307895800092710610e4, 2.8729085735721942674e4, 5.2264952788528545610e3),
)  # fmt: skip
TAIL = (
    (1.42343711074968357734e0, 4.63033784615654529590e0, 5.76949722146069140550e0, 3.64784832476320460504e0,
     1.27045825245236838258e0, 2.41780725177450611770e-1, 2.27238449892691845833e-2, 7.74545014278341407640e-4),
    (1.0, 2.05319162663775882187e0, 1.67638483018380384940e0, 6.89767334985100004550e-1,
     1.48103976427480074590e-1, 1.51986665636164571966e-2, 5.47593808499534494600e-4, 1.05075007164441684324e-9),
)  # fmt: skip
FAR_TAIL = (
    (6.65790464350110377720e0, 5.46378491116411436990e0, 1.78482653991729133580e0, 2.96560571828504891230e-1,
     2.65321895265761230930e-2, 1.24266094738807843860e-3, 2.71155556874348757815e-5, 2.01033439929228813265e-7),
    (1.0, 5.99832206555887937690e-1, 1.36929880922735805310e-1, 1.48753612908506148525e-2,
     7.86869131145613259100e-4, 1.84631831751005468180e-5, 1.42151175831644588870e-7, 2.04426310338993978564e-15),
)  # fmt: skip

# Two words for Threefry; eight for ChaCha20, which private sites use; or both, for sites whose bounces are draws.
ChainKeys = UInt32[Array, "C words"]
THREEFRY_WORDS, CHACHA_WORDS = 2, 8
CHACHA_CONSTANTS = (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574)


def chain_keys(key: Key[Array, ""], chains: int) -> ChainKeys:
    """One key for each chain, by ``fold_in``: Threefry at the counter (0, chain)."""
    return _folded(jax.random.key_data(key), jax.device_put(np.arange(chains, dtype=np.uint32)))


@once
def _folded(key: UInt32[Array, " 2"], chains: UInt32[Array, " C"]) -> ChainKeys:
    return jnp.stack(threefry((key[0], key[1]), (jnp.zeros_like(chains), chains)), -1)


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
        return unit_interval(*threefry((keys[None, :, 0], keys[None, :, 1]), (plan, index)))

    return apart(generate, keys, number, draw, number=number)


def unit_interval(high: UInt32[Array, "*shape"], low: UInt32[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Two words of random bits as a uniform in [0, 1), a multiple of 2⁻⁵²."""
    bits = (high.astype(jnp.uint64) << 32) | low.astype(jnp.uint64)
    return lax.bitcast_convert_type((bits >> 12) | ONE, jnp.float64) - 1.0


def chacha20(key: tuple[Array, ...], counter: Array, nonce: tuple[Array, Array, Array]) -> tuple[Array, ...]:
    """The sixteen words of a block of ChaCha20 (RFC 8439) for each counter."""
    shape = jnp.shape(counter)
    start = tuple(
        jnp.broadcast_to(jnp.asarray(w, jnp.uint32), shape) for w in (*CHACHA_CONSTANTS, *key, counter, *nonce)
    )

    def quarter(x, a, b, c, d):
        for i, j, k, turn in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            x[i] = x[i] + x[j]
            mixed = x[k] ^ x[i]
            x[k] = (mixed << turn) | (mixed >> (32 - turn))

    def double_round(_, words):
        x = list(words)
        for i in range(4):
            quarter(x, i, 4 + i, 8 + i, 12 + i)
        for i in range(4):
            quarter(x, i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4)
        return tuple(x)

    mixed = lax.fori_loop(0, 10, double_round, start)
    return tuple(x + y for x, y in zip(mixed, start, strict=True))


def secret_uniforms(
    keys: ChainKeys, number: Int[Array, " C"], draw: UInt32[Array, ""], count: int
) -> Float[Array, "n C"]:
    """Uniforms as those of `uniforms`, from ChaCha20: for numbers that are revealed, and must not reveal the key."""
    blocks, chains = -(-count // 8), number.shape[0]
    counter = jnp.broadcast_to(
        (jnp.arange(blocks, dtype=jnp.uint32) + draw * jnp.uint32(blocks))[:, None], (blocks, chains)
    )
    plan = number.astype(jnp.uint64)
    nonce = (plan.astype(jnp.uint32), (plan >> 32).astype(jnp.uint32), jnp.zeros(chains, jnp.uint32))
    words = chacha20(tuple(keys[:, THREEFRY_WORDS:].T), counter, nonce)
    pairs = jnp.stack([unit_interval(*words[i : i + 2]) for i in range(0, 16, 2)], 1)
    return pairs.reshape(8 * blocks, chains)[:count]


def exponentials(u: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Standard exponentials ``−log(1 − u)``; ``1 − u`` is exact, since u is a multiple of 2⁻⁵²."""
    return -logarithm(1.0 - u)


def _rounded(x, zero: Array | None):
    """``x``, rounded before it is used if ``zero`` is given: a zero that the compiler cannot know to be zero.

    A fused multiplication and addition rounds once instead of twice, and compilers use it where the processor has it. They
    also add up constants that are added one after the other.
    """
    if zero is None:
        return x
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.uint64) ^ zero, jnp.float64)


def _product(x, y, zero: Array | None):
    """``x y``, rounded."""
    return _rounded(x * y, zero)


def logarithm(x: Float[Array, "*shape"], zero: Array | None = None) -> Float[Array, "*shape"]:
    """``log x`` of positive normal numbers, to one unit in the last place, as straight-line arithmetic.

    The CPU compiler vectorises this, but calls a library function for each 64-bit logarithm. With ``x = 2ᵏ m``, m in
    ``[√½, √2)``, ``f = m − 1`` and ``s = f/(2 + f)``: ``log m = f − f²/2 + s (f²/2 + R(s²))``, R a minimax polynomial
    (FreeBSD's ``e_log.c``).
    """
    bits = lax.bitcast_convert_type(x, jnp.uint64)
    raised = bits + (ONE - ROOT_HALF)
    k = lax.bitcast_convert_type((raised >> 52) | EXPONENT_OF_2_52, jnp.float64) - (2.0**52 + 1023)
    f = lax.bitcast_convert_type((raised & MANTISSA) + ROOT_HALF, jnp.float64) - 1.0
    s = f / (2.0 + f)
    rest = jnp.full_like(s, LOG_SERIES[-1])
    for coefficient in LOG_SERIES[-2::-1]:
        rest = _product(rest, s * s, zero) + coefficient
    half = _product(0.5 * f, f, zero)
    series = _product(s, half + _product(rest, s * s, zero), zero)
    return _product(k, LN2_HIGH, zero) - ((half - (series + _product(k, LN2_LOW, zero))) - f)


def portable_normals(u: Float[Array, "*shape C"], number: Int[Array, " C"]) -> Float[Array, "*shape C"]:
    """`normals` with the same bits on every machine and in every program.

    IEEE 754 fixes every bit of sums, products, quotients and square roots, as long as each is rounded. The
    zero that enforces this is a shifted number of plans or turns, which is below 2⁶²; the compiler does not know that.
    """
    return normals(u, number.astype(jnp.uint64) >> 62)


def normals(u: Float[Array, "*shape"], zero: Array | None = None) -> Float[Array, "*shape"]:
    """Standard normals ``Φ⁻¹(u)``, with u moved off zero by half its spacing.

    Wichura's AS 241 to the last places, as straight-line arithmetic for the same reason as `logarithm`.
    """
    q = _rounded(_rounded(u, zero) - 0.5, zero) + 2.0**-53
    middle = _product(q, _ratio(0.180625 - _product(q, q, zero), MIDDLE, zero), zero)
    r = jnp.sqrt(-logarithm(0.5 - jnp.abs(q), zero))
    tail = jnp.sign(q) * jnp.where(r <= 5.0, _ratio(r - 1.6, TAIL, zero), _ratio(r - 5.0, FAR_TAIL, zero))
    return jnp.where(jnp.abs(q) <= 0.425, middle, tail)


def _ratio(r: Float[Array, "*shape"], coefficients, zero: Array | None) -> Float[Array, "*shape"]:
    """A ratio of polynomials, their coefficients in rising order."""
    above, below = (jnp.full_like(r, part[-1]) for part in coefficients)
    for p, q in zip(coefficients[0][-2::-1], coefficients[1][-2::-1], strict=True):
        above, below = _product(above, r, zero) + p, _product(below, r, zero) + q
    return above / below
