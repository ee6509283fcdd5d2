"""Addresses and certificates: whom a coordinator admits, whom a site accepts as coordinator, and how long a stream lasts."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from fedpdmc import certificates as keys
from fedpdmc.certificates import Credentials, Revocations, certificate_name
from fedpdmc.errors import InputError, WireError
from fedpdmc.federation import messages
from fedpdmc.federation.messages import MOST_BYTES, VERSION, OtherVersion, refuse_version, version_of
from fedpdmc.study.contract import Study
from fedpdmc.validation import check_host


class StreamExpired(Exception):
    """A stream must be reopened: one of its certificates is no longer valid, or was not checked for too long."""


class StreamCertificates:
    """The certificates of a stream. It is valid until the first of them expires, or one is revoked.

    ``certificates``: in PEM, by party; none on a plain connection. ``revoked``: the party's list of revoked
    certificates, which may change.
    """

    def __init__(self, certificates: Mapping[str, bytes], revoked: Revocations | None = None):
        self.certificates, self.revoked, self._checked = dict(certificates), revoked, -math.inf
        ends = ((keys.expiry(certificate), party) for party, certificate in self.certificates.items())
        self.until, self._first = min(ends, default=(math.inf, ""))

    def fault(self) -> str | None:
        """Why the stream must be closed, or None. Costs about 0.1 % of a round."""
        if time.time() >= self.until:
            return expired(self._first, self.until)
        now = time.monotonic()
        if self.revoked is not None and now - self._checked > keys.SECONDS:
            self._checked = now
            for party, certificate in self.certificates.items():
                if certificate in self.revoked:
                    return f"the certificate of {party} has been revoked"
        return None


class Caller(NamedTuple):
    """Common names and certificates of the other side of a stream; empty on a plain connection."""

    names: tuple[bytes, ...]
    certificates: tuple[bytes, ...]


class Admission:
    """Which streams a coordinator admits: checks the certificate first, then the hello.

    ``credentials``: the coordinator's; None on plain connections.
    """

    def __init__(self, study: Study, credentials: Credentials | None):
        self.study, self.credentials = study, credentials
        self._stamp = () if credentials is None else keys.stamp(credentials)

    def certificate_fault(self, caller: Caller) -> str:
        """Why the certificate of a stream is refused, empty if it is not. Known before the stream sends anything."""
        if self.credentials is None:
            return ""
        revoked = self.credentials.revoked
        if revoked is not None and any(certificate in revoked for certificate in caller.certificates):
            return "REVOKED"
        return "" if any(name.decode() in self.study.sites for name in caller.names) else "UNKNOWN_SITE"

    def read_hello(self, caller: Caller, data: bytes) -> messages.Hello | str:
        """The hello of one of the study's sites, or the code of its refusal."""
        try:
            hello = messages.decode(data)
        except OtherVersion:
            return refuse_version()
        except WireError:
            return "MALFORMED"
        if not isinstance(hello, messages.Hello):
            return "MALFORMED"
        if version_of(data) != VERSION:
            # This side reads the site's messages, but the site does not read these.
            return refuse_version()
        if self.credentials is not None and (hello.site.encode(),) != caller.names:
            return "NAME_NOT_IN_CERTIFICATE"
        if hello.site not in self.study.sites:
            return "UNKNOWN_SITE"
        return hello if hello.study == self.study.digest else "OTHER_CONTRACT"

    def welcome(self, run: bytes, hello: messages.Hello) -> bytes:
        """The answer to an admitted site, signed for this hello only."""
        own = self.credentials
        if own is None:
            return messages.encode(messages.Welcome(run, self.study.digest))
        signature = keys.sign(own, messages.Welcome.proof(run, hello))
        return messages.encode(messages.Welcome(run, self.study.digest, own.certificate, signature))

    def certificates(self, caller: Caller) -> StreamCertificates:
        """The certificates of both sides of an admitted stream."""
        if self.credentials is None:
            return StreamCertificates({})
        shown = {f"site {caller.names[0].decode()}": certificate for certificate in caller.certificates}
        return StreamCertificates(shown | {"the coordinator": self.credentials.certificate}, self.credentials.revoked)

    def renew(self) -> bool:
        """Read renewed files from the coordinator's folder of keys; returns whether there were any."""
        if self.credentials is None or (now := keys.stamp(self.credentials)) == self._stamp:
            return False
        found = keys.renewed(self.credentials)
        if found == self.credentials:
            return False
        self.credentials, self._stamp = found, now
        return True


class DialSettings(NamedTuple):
    """When a site answers, and whom it accepts as the coordinator."""

    hours: tuple[int, int] | None = None  # the hours of the day between which it answers; None: always
    server_name: str = keys.COORDINATOR  # the name that the coordinator's certificate must have
    pinned: str | None = None  # the fingerprint of the only certificate accepted as the coordinator's

    def check(self, credentials: Credentials | None, hello: bytes, welcome: bytes) -> StreamCertificates:
        """The coordinator's certificate, if the welcome proves it and this site has not revoked it.

        Raises `StreamExpired` otherwise: another party is at this address, or the coordinator must renew its certificate.
        """
        try:
            welcomed = messages.decode(welcome)
        except WireError:
            welcomed = None
        if credentials is None or not isinstance(welcomed, messages.Welcome):
            # Without keys there is nothing to prove. A refusal, or bytes that are no message, commit this site to nothing.
            return StreamCertificates({})
        greeting, shown = messages.decode(hello), welcomed.certificate
        assert isinstance(greeting, messages.Hello)
        with contextlib.suppress(ValueError):
            if credentials.revoked is not None and shown in credentials.revoked:
                raise StreamExpired("this site has revoked the coordinator's certificate")
        proof = messages.Welcome.proof(welcomed.run, greeting)
        name = keys.signer(credentials, shown, welcomed.signature, proof)
        if name is None or self.server_name not in keys.names(shown):
            raise StreamExpired(f"the other side has not proved to be {self.server_name!r}")
        if self.pinned is not None and keys.fingerprint(shown) != self.pinned:
            raise StreamExpired("the coordinator's certificate is not the one in the policy")
        return StreamCertificates({"the coordinator": shown}, credentials.revoked)


class PendingStreams:
    """Streams that are not admitted yet: one for each certificate of a site, and a few for all other callers.

    ``strangers``: streams of other callers at a time; beyond that the oldest is ended.
    """

    def __init__(self, strangers: int):
        self.strangers, self._lock = strangers, threading.Lock()
        self._sites: dict[object, Callable[[], object]] = {}
        self._strangers: dict[object, Callable[[], object]] = {}

    @contextlib.contextmanager
    def place(self, who: object, known: bool, cancel: Callable[[], object]) -> Iterator[None]:
        """Hold a place for a stream of ``who``. Its previous stream is ended by the ``cancel`` that it gave."""
        places, replaced = (self._sites if known else self._strangers), []
        with self._lock:
            if who in places:
                replaced.append(places.pop(who))
            places[who] = cancel
            if not known and len(places) > self.strangers:
                replaced.append(places.pop(next(iter(places))))
        for cancel_replaced in replaced:
            cancel_replaced()
        try:
            yield
        finally:
            with self._lock:
                if places.get(who) is cancel:
                    del places[who]


def expired(party: str, end: float) -> str:
    """The message about an expired certificate."""
    when = datetime.datetime.fromtimestamp(end, datetime.UTC).isoformat(sep=" ", timespec="seconds")
    return f"the certificate of {party} expired at {when}: put a renewed one into its folder of keys"


def next_hour(hour: int, now: datetime.datetime) -> float:
    """The next time at which it is this hour of the day on this machine, in seconds since 1970."""
    day = now.replace(hour=0, minute=0, second=0, microsecond=0)
    times = (day + datetime.timedelta(days=days, hours=hour) for days in range(3))
    return next(time for time in times if time > now).timestamp()


def next_opening(hours: tuple[int, int], now: datetime.datetime) -> float:
    """When a site with these hours answers next, in seconds since 1970; 0 if it answers now."""
    return 0.0 if next_hour(hours[1], now) <= next_hour(hours[0], now) else next_hour(hours[0], now)


def stream_end(credentials: Credentials | None, hours: tuple[int, int] | None, most_age: float) -> tuple[float, str]:
    """When a stream that a site opens now must end, in seconds since 1970, and why."""
    ends = [(math.inf, "")]
    if credentials is not None:
        own = keys.expiry(credentials.certificate)
        ends.append((time.time() + most_age, "certificates are checked again after an hour"))
        ends.append((own, expired("this site", own)))
    if hours is not None:
        now = datetime.datetime.now()
        closed, why = next_opening(hours, now) > 0, f"this site answers from {hours[0]} to {hours[1]} o'clock"
        ends.append((0.0 if closed else next_hour(hours[1], now), why))
    return min(ends)


def split_address(address: str, argument: str) -> tuple[str, int]:
    """Host and port of an address; both are required."""
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and len(port) <= 5) or int(port) >= 2**16:
        raise InputError(argument, repr(address), "Give host:port, such as 192.0.2.7:4433.")
    return check_host(host, argument), int(port)


def is_loopback(host: str) -> bool:
    """Whether a host is this machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def check_loopback(host: str, argument: str) -> None:
    """Refuse plain connections that leave this machine."""
    if not is_loopback(host):
        raise InputError(argument, repr(host), "Plain connections need 127.0.0.1 or ::1. Give keys.")


def check_party(credentials: Credentials, name: str) -> None:
    """Refuse the keys of another party."""
    found = certificate_name(credentials.certificate)
    # A coordinator's certificate may have the name of its host. Its sites then use --server-name.
    hosted = name == keys.COORDINATOR and len(keys.names(credentials.certificate)) > 1
    if found != name and not hosted:
        raise InputError("keys", f"the certificate of {found!r}", f"Give the keys of {name!r}.")


SERVICE, JOIN, CHECK = "fedpdmc.Federation", "Join", "Check"
# Seconds allowed for a TLS handshake.
HANDSHAKE = 10.0
CHANNEL = [
    ("grpc.max_receive_message_length", MOST_BYTES),
    ("grpc.max_send_message_length", MOST_BYTES),
    # A compressed message is unpacked before its size is checked, so compression is not accepted.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    # Every connection makes its own handshake.
    ("grpc.use_local_subchannel_pool", 1),
    # Pings detect a peer that has vanished.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
]
SERVER = [
    *CHANNEL,
    ("grpc.so_reuseport", 0),
    # A site that waits for a slow round only sends pings. This is not abuse.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.max_metadata_size", 8192),
    ("grpc.server_handshake_timeout_ms", int(1000 * HANDSHAKE)),
    # A site has one stream, and a second one while it reconnects.
    ("grpc.max_concurrent_streams", 4),
]
