"""A site's part in secure sums: it sends a signed key, checks the keys of the others, and masks its derivatives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from fedpdmc.certificates import Credentials, fingerprint, sign, signer
from fedpdmc.errors import InputError, RequestRefused, WireError
from fedpdmc.federation import masking, messages
from fedpdmc.potentials import ControlVariate, Quadratic
from fedpdmc.privacy.gaussian_mechanism import ShareTerms
from fedpdmc.study.contract import Study


def _not_proved(words: str) -> RequestRefused:
    return RequestRefused("KEY_NOT_PROVED", f"secure sums: {words}")


class SecureSumParty:
    """One site of a study that releases derivatives as sums only.

    Parameters
    ----------
    name : str
        The site's.
    secret : bytes
        Its secret X25519 key in this run.
    credentials : Credentials, optional
        Its keys of the study; None if a log is only read.
    certificates : mapping, optional
        Fingerprints of the only certificates that are accepted for the named sites.
    """

    def __init__(
        self,
        study: Study,
        name: str,
        secret: bytes,
        credentials: Credentials | None = None,
        certificates: Mapping[str, str] | None = None,
    ):
        self.study, self.name, self._secret, self._credentials = study, name, secret, credentials
        self._certificates = dict(certificates or {})
        self._keys: dict[str, bytes] | None = None

    def offer(self, message: messages.Offer, asked: bytes) -> messages.Offered:
        """The site's own key, signed."""
        own = self._credentials
        if own is None:
            raise InputError("keys", "none", "Secure sums need the site's keys. A plain connection has none.")
        public = masking.public_of(self._secret)
        said = masking.statement(message.run, self.study.digest, self.name, public)
        return messages.Offered(message.run, message.sequence, asked, public, own.certificate, sign(own, said))

    def check(self, message: messages.Agree) -> None:
        """Raise `RequestRefused` unless the offers are those of exactly the study's sites, each signed by its site."""
        offers = _offers(message)
        if len(offers) != len(self.study.sites) or len({offer.public for offer in offers}) != len(offers):
            raise _not_proved("the number of different keys is not the number of sites")
        for name, offer in zip(self.study.sites, offers, strict=True):
            said = masking.statement(message.run, self.study.digest, name, offer.public)
            assert self._credentials is not None
            if signer(self._credentials, offer.certificate, offer.signature, said) != name:
                raise _not_proved(f"the key of {name} is not signed by that site")
            pinned = self._certificates.get(name)
            if pinned is not None and fingerprint(offer.certificate) != pinned:
                raise _not_proved(f"the certificate of {name} is not the one in the policy")
            if name == self.name and offer.public != masking.public_of(self._secret):
                raise _not_proved("this site's own key was replaced")
        self._shared(message.run, offers)

    def record(self, message: messages.Agree) -> None:
        """Store the keys of an agreement that was checked before."""
        self._keys = self._shared(message.run, _offers(message))

    def _shared(self, run: bytes, offers: list[messages.Offered]) -> dict[str, bytes]:
        publics = {name: offer.public for name, offer in zip(self.study.sites, offers, strict=True)}
        try:
            return masking.pair_keys(self._secret, self.name, run, publics)
        except ValueError as error:
            raise _not_proved("a key of low order") from error

    def masked(self, message: messages.Derive, asked: bytes, gradient, hessian) -> messages.Masked:
        """Derivatives under the masks of this request."""
        assert self._keys is not None
        words = masking.mask(masking.packed(gradient, hessian), self.name, self._keys, asked)
        return messages.Masked(message.run, message.sequence, asked, words)

    def seal(self, numbers: Sequence[int], asked: bytes, terms: ShareTerms) -> bytes:
        """Integers with shared noise under the masks of this request and of the terms that the guarantee depends on."""
        assert self._keys is not None
        return masking.mask_integers(numbers, self.name, self._keys, asked + terms.digest).tobytes()

    def control(self, message: messages.Open, gradient: np.ndarray, hessian: np.ndarray) -> ControlVariate:
        """The quadratic of the site's own derivatives at a point, or of their means, rounded as in the sum.

        It has the part of their curvature that the opening says, less this site's share of what makes the reference wider.

        The coordinator uses the sum of these: both sides use the same quadratics, each known to its site only.
        """
        sites, point = len(self.study.sites), message.point
        gradient = masking.rounded(gradient, sites)
        symmetric = np.triu(hessian) + np.triu(hessian, 1).T
        hessian = message.kept * masking.rounded(symmetric, sites) if message.order == 2 else np.zeros_like(hessian)
        less = message.wide @ message.wide.T / sites if message.wide.size else np.zeros_like(hessian)
        linear = gradient - hessian @ point + less @ message.center
        return ControlVariate(
            Quadratic(jnp.asarray(hessian - less), jnp.asarray(linear)), jnp.asarray(point), message.order
        )


def _offers(message: messages.Agree) -> list[messages.Offered]:
    try:
        offers = [messages.decode(data) for data in message.offers]
    except WireError as error:
        raise _not_proved(str(error)) from error
    found = [offer for offer in offers if isinstance(offer, messages.Offered)]
    if len(found) != len(offers):
        raise _not_proved("a message that is not an offer")
    return found
