"""Who may be dialled, who may come in, and for how long: addresses, and the certificates that a stream is open under."""

from __future__ import annotations

import datetime
import ipaddress
import math
import time
from collections.abc import Mapping

from fedpdmc import keys
from fedpdmc.errors import InputError
from fedpdmc.keys import Credentials, Revocations, certificate_name


class Outlived(Exception):
    """A stream whose certificates are no longer good, or were not looked at for long: it is opened anew."""


class Pass:
    """The certificates that a stream is open under: good until the first of them expires, or one is revoked.

    Parameters
    ----------
    certificates : mapping
        In PEM, by the party that they name; none on a plain connection.
    revoked : Revocations, optional
        Those that are not taken, which may change.
    """

    def __init__(self, certificates: Mapping[str, bytes], revoked: Revocations | None = None):
        self.certificates, self.revoked, self._looked = dict(certificates), revoked, -math.inf
        ends = ((keys.expiry(certificate), party) for party, certificate in self.certificates.items())
        self.until, self._first = min(ends, default=(math.inf, ""))

    def fault(self) -> str | None:
        """Why the stream is to be closed, if it is; of the usual costs of a round this is the thousandth part."""
        if time.time() >= self.until:
            return expired(self._first, self.until)
        now = time.monotonic()
        if self.revoked is not None and now - self._looked > keys.SECONDS:
            self._looked = now
            for party, certificate in self.certificates.items():
                if certificate in self.revoked:
                    return f"the certificate of {party} has been revoked"
        return None


def expired(party: str, end: float) -> str:
    """What is said of a certificate whose time is over."""
    when = datetime.datetime.fromtimestamp(end, datetime.UTC).isoformat(sep=" ", timespec="seconds")
    return f"the certificate of {party} expired at {when}: put a renewed one into its folder of keys"


def split_address(address: str, argument: str) -> tuple[str, int]:
    """Host and port, neither of them left out."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 <= int(port) < 2**16:
        raise InputError(argument, repr(address), "Give host:port, such as 192.0.2.7:4433.")
    return host, int(port)


def check_loopback(host: str, argument: str) -> None:
    """Refuse plain connections that leave this machine."""
    try:
        loopback = ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        loopback = host == "localhost"
    if not loopback:
        raise InputError(argument, repr(host), "Plain connections stay on 127.0.0.1 or ::1: give keys for any other.")


def check_party(credentials: Credentials, name: str) -> None:
    """Refuse the keys of another party than this one."""
    found = certificate_name(credentials.certificate)
    if found != name:
        raise InputError("keys", f"the certificate of {found!r}", f"Give the keys of {name!r}.")
