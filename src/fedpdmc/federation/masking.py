"""Secure sums over sites: the coordinator learns the sum only. Pairwise masks in exact modular arithmetic.

Numbers are fixed-point, ``round(2⁶⁴ u)`` modulo 2¹²⁸. Sites i and j share a secret stream ``s_ij`` for every request; site i
sends ``u_i + Σ_{j>i} s_ij − Σ_{j<i} s_ji``. Each stream is added once and subtracted once, so the sum of all messages is
exactly that of the ``u_i``. If one message is missing, the sum of the others is uniformly distributed and reveals nothing.

The secrets come from X25519 keys, which the coordinator relays. Each is signed with its site's key of the study, so that the
coordinator cannot replace it. `cryptography` is imported where it is used: sampling in one process does not need it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fedpdmc.errors import RequestRefused

FRACTION, BITS = 64, 128
WIDTH = BITS // 8
MODULUS, HALF = 1 << BITS, 1 << (BITS - 1)
KEY_BYTES = 32
PURPOSE = b"fedpdmc secure sum 1"


def fixed(value: float, parties: int) -> int:
    """``round(2⁶⁴ value)``, if the sum over all parties then stays below 2¹²⁷."""
    if not abs(value) < 2.0 ** (BITS - 1 - FRACTION) / parties:
        limit = f"a number is not below {2.0 ** (BITS - 1 - FRACTION) / parties:.3g} in size"
        raise RequestRefused("OUT_OF_RANGE", f"secure sum: {limit}. Declare the columns with a center and a scale.")
    return round(math.ldexp(value, FRACTION))


def real(number: int) -> float:
    """The float nearest to a fixed-point number of either sign, given modulo 2¹²⁸."""
    return ((number + HALF) % MODULUS - HALF) / 2**FRACTION


def rounded(values: np.ndarray, parties: int) -> np.ndarray:
    """The values as they enter the sum."""
    return np.asarray([real(fixed(float(x), parties)) for x in values.ravel()]).reshape(values.shape)


def packed(gradient: np.ndarray, hessian: np.ndarray) -> np.ndarray:
    """The gradient and the upper triangle of the Hessian, one after the other."""
    return np.concatenate([gradient, hessian[np.triu_indices(len(gradient))]])


def unpacked(values: Sequence[float], dim: int) -> tuple[np.ndarray, np.ndarray]:
    """The inverse of `packed`."""
    hessian = np.zeros((dim, dim))
    hessian[np.triu_indices(dim)] = values[dim:]
    return np.asarray(values[:dim]), np.triu(hessian) + np.triu(hessian, 1).T


def size(dim: int) -> int:
    """How many numbers `packed` has."""
    return dim + dim * (dim + 1) // 2


def words(numbers: Sequence[int]) -> np.ndarray:
    """Numbers modulo 2¹²⁸ as 64-bit words, low word first."""
    return np.frombuffer(b"".join((n % MODULUS).to_bytes(WIDTH, "little") for n in numbers), "<u8")


def numbers(raw: bytes) -> list[int]:
    """The inverse of `words`, from bytes."""
    return [int.from_bytes(raw[at : at + WIDTH], "little") for at in range(0, len(raw), WIDTH)]


def total_integers(messages: Sequence[np.ndarray]) -> list[int]:
    """The sum of all sites' masked integers modulo 2¹²⁸, in which the masks cancel."""
    columns = zip(*(numbers(np.asarray(message, "<u8").tobytes()) for message in messages), strict=True)
    return [sum(column) % MODULUS for column in columns]


def total(messages: Sequence[np.ndarray]) -> list[float]:
    """The sum of all sites' masked numbers."""
    return [real(number) for number in total_integers(messages)]


def statement(run: bytes, study: bytes, site: str, public: bytes) -> bytes:
    """The bytes that a site signs: this key is its own, in this run of this study."""
    return b"".join((PURPOSE, run, study, public, site.encode()))


def new_secret() -> bytes:
    """A secret X25519 key."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.generate().private_bytes(
        serialization.Encoding.Raw, serialization.PrivateFormat.Raw, serialization.NoEncryption()
    )


def public_of(secret: bytes) -> bytes:
    """The public key of a secret one."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def pair_keys(secret: bytes, own: str, run: bytes, publics: dict[str, bytes]) -> dict[str, bytes]:
    """The key that this site shares with each other one, by the other's name.

    Raises ValueError for a public key of low order, with which the secret would be public.
    """
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

    private, keys = X25519PrivateKey.from_private_bytes(secret), {}
    for other in sorted(publics):
        if other != own:
            shared = private.exchange(X25519PublicKey.from_public_bytes(publics[other]))
            pair = b"".join(publics[name] for name in sorted((own, other)))
            keys[other] = _derived(shared, PURPOSE + run + pair)
    return keys


def mask(values: np.ndarray, own: str, keys: dict[str, bytes], request: bytes) -> np.ndarray:
    """The values in fixed point, masked for this request."""
    return mask_integers([fixed(float(x), len(keys) + 1) for x in values], own, keys, request)


def mask_integers(values: Sequence[int], own: str, keys: dict[str, bytes], request: bytes) -> np.ndarray:
    """Integers modulo 2¹²⁸, masked by the streams of all pairs for this request. No request hash is used twice."""
    masked = list(values)
    for other, key in keys.items():
        sign = 1 if own < other else -1
        for k, number in enumerate(numbers(_stream(_derived(key, request), WIDTH * len(masked)))):
            masked[k] += sign * number
    return words(masked)


def _derived(secret: bytes, info: bytes) -> bytes:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(hashes.SHA256(), KEY_BYTES, salt=None, info=info).derive(secret)


def _stream(key: bytes, length: int) -> bytes:
    """ChaCha20's key stream; every key is used for one stream only, so that the nonce may be zero."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    return Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(length))
