"""Secure sums over sites: the coordinator learns the sum only. Pairwise masks in exact modular arithmetic.

Numbers are fixed-point, ``round(2⁶⁴ u)`` modulo 2¹²⁸. Sites i and j share a secret stream ``s_ij`` for every request; site i
sends ``u_i + Σ_{j>i} s_ij − Σ_{j<i} s_ji``. Each stream is added once and subtracted once, so the sum of all messages is
exactly that of the ``u_i``. If one message is missing, the sum of the others is uniformly distributed and reveals nothing.

The secrets come from X25519 keys, which the coordinator relays. Each is signed with its site's key of the study, so that the
coordinator cannot replace it. `cryptography` is imported where it is used: sampling in one process does not need it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np

from fedpdmc.errors import InputError, RequestRefused, WireError
from fedpdmc.federation import messages
from fedpdmc.potentials import ControlVariate, Quadratic
from fedpdmc.privacy.gaussian_mechanism import BITS, MODULUS, WIDTH, ShareTerms, numbers, total_integers, words

if TYPE_CHECKING:
    from fedpdmc.certificates import Credentials
    from fedpdmc.study.contract import Study

FRACTION = 64  # binary places of a fixed-point number
HALF = MODULUS // 2
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


# A site's part ------------------------------------------------------------------------------------------------------


def _not_proved(words: str) -> RequestRefused:
    return RequestRefused("KEY_NOT_PROVED", f"secure sums: {words}")


@dataclass(eq=False)
class SecureSumParty:
    """One site of a study that releases derivatives as sums only."""

    study: Study
    name: str
    secret: bytes  # its X25519 key in this run
    credentials: Credentials | None = None  # its keys of the study; None if a log is only read
    # Fingerprints of the only certificates that are accepted for the named sites.
    certificates: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self):
        self.certificates = dict(self.certificates)
        self._keys: dict[str, bytes] | None = None

    def offer(self, message: messages.Offer, asked: bytes) -> messages.Offered:
        """The site's own key, signed."""
        from fedpdmc.certificates import sign

        if (own := self.credentials) is None:
            raise InputError("keys", "none", "Secure sums need the site's keys. A plain connection has none.")
        public = public_of(self.secret)
        signed = statement(message.run, self.study.digest, self.name, public)
        return messages.Offered(message.run, message.sequence, asked, public, own.certificate, sign(own, signed))

    def check(self, message: messages.Agree) -> None:
        """Raise `RequestRefused` unless the offers are those of exactly the study's sites, each signed by its site."""
        from fedpdmc.certificates import signature_fault

        assert self.credentials is not None
        offers = _offers(message)
        if len(offers) != len(self.study.sites) or len({offer.public for offer in offers}) != len(offers):
            raise _not_proved("the number of different keys is not the number of sites")
        for name, offer in zip(self.study.sites, offers, strict=True):
            proof = statement(message.run, self.study.digest, name, offer.public)
            shown = offer.certificate, offer.signature, proof
            if fault := signature_fault(self.credentials, name, *shown, self.certificates):
                raise _not_proved(fault)
            if name == self.name and offer.public != public_of(self.secret):
                raise _not_proved("this site's own key was replaced")
        self._shared(message.run, offers)

    def agree(self, message: messages.Agree, asked: bytes) -> messages.Opened:
        """The answer to keys that are proved."""
        self.check(message)
        return messages.Opened(message.run, message.sequence, asked)

    def record(self, message: messages.Agree) -> None:
        """Store the keys of an agreement that was checked before."""
        self._keys = self._shared(message.run, _offers(message))

    def _shared(self, run: bytes, offers: list[messages.Offered]) -> dict[str, bytes]:
        publics = {name: offer.public for name, offer in zip(self.study.sites, offers, strict=True)}
        try:
            return pair_keys(self.secret, self.name, run, publics)
        except ValueError as error:
            raise _not_proved("a key of low order") from error

    def masked(self, message: messages.Derive, asked: bytes, gradient, hessian) -> messages.Masked:
        """Derivatives under the masks of this request."""
        assert self._keys is not None
        masked = mask(packed(gradient, hessian), self.name, self._keys, asked)
        return messages.Masked(message.run, message.sequence, asked, masked)

    def seal(self, numbers: Sequence[int], asked: bytes, terms: ShareTerms) -> bytes:
        """Integers with shared noise under the masks of this request and of the terms that the guarantee depends on."""
        assert self._keys is not None
        return mask_integers(numbers, self.name, self._keys, asked + terms.digest).tobytes()

    def control(self, message: messages.Open, gradient: np.ndarray, hessian: np.ndarray) -> ControlVariate:
        """The quadratic of the site's own derivatives at a point, or of their means, rounded as in the sum.

        It has the part of their curvature that the opening says, less this site's share of what makes the reference wider.

        The coordinator uses the sum of these: both sides use the same quadratics, each known to its site only.
        """
        sites, point = len(self.study.sites), message.point
        gradient = rounded(gradient, sites)
        symmetric = np.triu(hessian) + np.triu(hessian, 1).T
        hessian = message.kept * rounded(symmetric, sites) if message.order == 2 else np.zeros_like(hessian)
        less = message.wide @ message.wide.T / sites if message.wide.size else np.zeros_like(hessian)
        linear = gradient - hessian @ point + less @ message.center
        return ControlVariate(
            Quadratic(jnp.asarray(hessian - less), jnp.asarray(linear)), jnp.asarray(point), message.order
        )


def _offers(message: messages.Agree) -> list[messages.Offered]:
    try:
        return messages.decode_parts(message.offers, messages.Offered)
    except WireError as error:
        raise _not_proved(str(error)) from error
