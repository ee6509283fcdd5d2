"""Who may be dialled, who may come in, and for how long: addresses, and the certificates that a stream is open under."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from fedpdmc.certificates import keys
from fedpdmc.certificates.keys import Credentials, Revocations, certificate_name
from fedpdmc.errors import InputError, WireError
from fedpdmc.federation import messages
from fedpdmc.study.contract import Study


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


class Caller(NamedTuple):
    """What the other side of a stream has shown: the common names and the certificates; nothing on a plain connection."""

    names: tuple[bytes, ...]
    certificates: tuple[bytes, ...]


class Door:
    """Whom a coordinator lets in: certificates first, and then what is said.

    Parameters
    ----------
    study : Study
    credentials : Credentials or None
        The coordinator's; None on plain connections.
    """

    def __init__(self, study: Study, credentials: Credentials | None):
        self.study, self.credentials = study, credentials
        self._stamp = () if credentials is None else keys.stamp(credentials)

    def fault(self, caller: Caller) -> str:
        """Why the certificate of a stream is not taken, if so: known before the stream has said anything."""
        if self.credentials is None:
            return ""
        revoked = self.credentials.revoked
        if revoked is not None and any(certificate in revoked for certificate in caller.certificates):
            return "REVOKED"
        return "" if any(name.decode() in self.study.sites for name in caller.names) else "UNKNOWN_SITE"

    def hello(self, caller: Caller, data: bytes) -> messages.Hello | str:
        """The hello of one of the study's sites, or why it is refused."""
        try:
            hello = messages.decode(data)
        except WireError:
            return "MALFORMED"
        if not isinstance(hello, messages.Hello):
            return "MALFORMED"
        if self.credentials is not None and (hello.site.encode(),) != caller.names:
            return "NAME_NOT_IN_CERTIFICATE"
        if hello.site not in self.study.sites:
            return "UNKNOWN_SITE"
        return hello if hello.study == self.study.digest else "OTHER_CONTRACT"

    def welcome(self, run: bytes, hello: messages.Hello) -> bytes:
        """What a site that is let in is told, signed for it alone."""
        own = self.credentials
        if own is None:
            return messages.encode(messages.Welcome(run, self.study.digest))
        signature = keys.sign(own, messages.Welcome.proof(run, hello))
        return messages.encode(messages.Welcome(run, self.study.digest, own.certificate, signature))

    def admit(self, caller: Caller) -> Pass:
        """The certificates of both sides of a stream that is let in."""
        if self.credentials is None:
            return Pass({})
        shown = {f"site {caller.names[0].decode()}": certificate for certificate in caller.certificates}
        return Pass(shown | {"the coordinator": self.credentials.certificate}, self.credentials.revoked)

    def renew(self) -> bool:
        """Take over renewed files from the coordinator's folder of keys; returns whether there were any."""
        if self.credentials is None or (now := keys.stamp(self.credentials)) == self._stamp:
            return False
        found = keys.renewed(self.credentials)
        if found == self.credentials:
            return False
        self.credentials, self._stamp = found, now
        return True


class Dialling(NamedTuple):
    """How a site dials, and whom it takes for the coordinator.

    Attributes
    ----------
    hours : (int, int) or None
        It answers from the first hour of the day to the second only.
    server_name : str
        The name that the coordinator's certificate must have.
    pinned : str or None
        The fingerprint of the only certificate that is taken for the coordinator's.
    """

    hours: tuple[int, int] | None = None
    server_name: str = keys.COORDINATOR
    pinned: str | None = None

    def check(self, credentials: Credentials | None, hello: bytes, welcome: bytes) -> Pass:
        """The coordinator's certificate, if it is proved with the welcome and not revoked at this site.

        Raises `Outlived` if it is not: someone else is at that address, or the coordinator will have to renew it.
        """
        try:
            told = messages.decode(welcome)
        except WireError:
            told = None
        if credentials is None or not isinstance(told, messages.Welcome):
            # Without keys there is nothing to prove; a refusal, or no message, binds this site to nothing.
            return Pass({})
        said, shown = messages.decode(hello), told.certificate
        assert isinstance(said, messages.Hello)
        with contextlib.suppress(ValueError):
            if credentials.revoked is not None and shown in credentials.revoked:
                raise Outlived("the certificate of the coordinator has been revoked here")
        proof = messages.Welcome.proof(told.run, said)
        name = keys.signer(credentials, shown, told.signature, proof)
        if name is None or self.server_name not in keys.names(shown):
            raise Outlived(f"whoever answers there has not proved to be {self.server_name!r}")
        if self.pinned is not None and keys.fingerprint(shown) != self.pinned:
            raise Outlived("the certificate of the coordinator is not the one that the policy names")
        return Pass({"the coordinator": shown}, credentials.revoked)


USUAL = Dialling()


class Waiting:
    """Streams that are not admitted yet: one for each certificate, and a few for all that no site of the study has.

    Parameters
    ----------
    strangers : int
        How many of the latter at a time; the oldest gives way.
    """

    def __init__(self, strangers: int):
        self.strangers, self._lock = strangers, threading.Lock()
        self._sites: dict[object, Callable[[], object]] = {}
        self._strangers: dict[object, Callable[[], object]] = {}

    @contextlib.contextmanager
    def place(self, who: object, known: bool, hang_up: Callable[[], object]) -> Iterator[None]:
        """A place for a stream of ``who``, which ends, with ``hang_up``, the one that it had before."""
        places, over = (self._sites if known else self._strangers), []
        with self._lock:
            if who in places:
                over.append(places.pop(who))
            places[who] = hang_up
            if not known and len(places) > self.strangers:
                over.append(places.pop(next(iter(places))))
        for end in over:
            end()
        try:
            yield
        finally:
            with self._lock:
                if places.get(who) is hang_up:
                    del places[who]


def expired(party: str, end: float) -> str:
    """What is said of a certificate whose time is over."""
    when = datetime.datetime.fromtimestamp(end, datetime.UTC).isoformat(sep=" ", timespec="seconds")
    return f"the certificate of {party} expired at {when}: put a renewed one into its folder of keys"


def next_hour(hour: int, now: datetime.datetime) -> float:
    """When it is next so many o'clock, by the clock of this machine, in seconds since 1970."""
    day = now.replace(hour=0, minute=0, second=0, microsecond=0)
    times = (day + datetime.timedelta(days=days, hours=hour) for days in range(3))
    return next(time for time in times if time > now).timestamp()


def opens(hours: tuple[int, int], now: datetime.datetime) -> float:
    """When a site that answers in these hours next does, in seconds since 1970; 0 if it does now."""
    return 0.0 if next_hour(hours[1], now) <= next_hour(hours[0], now) else next_hour(hours[0], now)


def stream_end(credentials: Credentials | None, hours: tuple[int, int] | None, most_age: float) -> tuple[float, str]:
    """When a stream that a site opens now is to end, in seconds since 1970, and why."""
    ends = [(math.inf, "")]
    if credentials is not None:
        own = keys.expiry(credentials.certificate)
        ends.append((time.time() + most_age, "certificates are looked at anew after an hour"))
        ends.append((own, expired("this site", own)))
    if hours is not None:
        now = datetime.datetime.now()
        closed, why = opens(hours, now) > 0, f"this site answers from {hours[0]} to {hours[1]} o'clock"
        ends.append((0.0 if closed else next_hour(hours[1], now), why))
    return min(ends)


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
    # A coordinator may have the name of its host: its sites then dial with --server-name.
    hosted = name == keys.COORDINATOR and len(keys.names(credentials.certificate)) > 1
    if found != name and not hosted:
        raise InputError("keys", f"the certificate of {found!r}", f"Give the keys of {name!r}.")
