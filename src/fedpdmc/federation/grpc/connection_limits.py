"""Connections that have not yet proved who they are: how many, how often and for how long, by address.

gRPC accepts every connection, and says nothing of it before its handshake is done. But the sockets are those of this
process: whenever a handshake begins, and every second, the gate looks at those that are connected to its port and shuts
down the ones that are beyond the limits. A connection counts as proved from when its stream is admitted as a site's.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import socket
import stat
import threading
import time
import urllib.parse
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

logger = logging.getLogger("fedpdmc.coordinator")
# Where an operating system shows the descriptors of this process.
DESCRIPTORS = "/dev/fd"
# Of these some are kept from connections: for the store, for libraries, for the threads of gRPC.
RESERVED = 256
# Seconds after which a connection without an admitted stream is shut down.
PATIENCE = 30.0
# Lines in the log about one address: so many at once, then one in so many seconds.
LINES, SECONDS_A_LINE = 5, 60.0
# Addresses that are remembered.
MOST_ADDRESSES = 4096


class Limits(NamedTuple):
    """How much is taken from those who have not proved who they are.

    Attributes
    ----------
    burst, rate : float
        Handshakes of one address: so many at once, then so many a second.
    each, all : int
        Connections at a time, from one address and in all. Beyond that the oldest are shut down.
    """

    burst: float
    rate: float
    each: int
    all: int

    @classmethod
    def of(cls, sites: int) -> Limits:
        """For a study of so many sites, which may all be behind one address."""
        return cls(20.0 + 2 * sites, 10.0 + sites, 16 + 2 * sites, 128 + 2 * sites)


def most_connections(sites: int) -> int:
    """How many connections gRPC may accept, so that the store always has descriptors; asks for as many as are allowed."""
    wanted = 2 * Limits.of(sites).all
    try:
        import resource
    except ImportError:
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    room = wanted if soft == resource.RLIM_INFINITY else soft - RESERVED
    if room < 2 * sites + 8:
        logger.warning(
            "this process may have %d descriptors, which is few for %d sites: raise its limit (LimitNOFILE in a unit)",
            soft,
            sites,
        )
    return max(min(wanted, room), 2 * sites + 8)


class Bucket:
    """So many at once, and then so many a second, for each address."""

    def __init__(self, burst: float, rate: float):
        self.burst, self.rate = burst, rate
        self._left: dict[str, tuple[float, float]] = {}

    def take(self, address: str) -> bool:
        """Whether one more is within the limits."""
        now = time.monotonic()
        left, when = self._left.pop(address, (self.burst, now))
        left = min(left + (now - when) * self.rate, self.burst)
        self._left[address] = (max(left - 1.0, 0.0), now) if left >= 1.0 else (left, now)
        if len(self._left) > MOST_ADDRESSES:
            # Of all addresses the one that has been silent for longest.
            del self._left[next(iter(self._left))]
        return left >= 1.0


class Lines:
    """The log's lines about callers: nobody can fill the disk with them."""

    def __init__(self):
        self._lock, self._bucket, self._unsaid = threading.Lock(), Bucket(LINES, 1 / SECONDS_A_LINE), Counter[str]()

    def warn(self, address: str, message: str, *words: object) -> None:
        """A line about an address, or one more of those that are only counted."""
        with self._lock:
            if not self._bucket.take(address):
                if len(self._unsaid) < MOST_ADDRESSES:
                    self._unsaid[address] += 1
                return
            more = self._unsaid.pop(address, 0)
        logger.warning(message + (f" (and {more} lines more that were left out)" if more else ""), *words)


@dataclass
class Caller:
    """A connection: where it is from, since when it is there or has no stream, and whether it has one."""

    address: str
    port: int
    since: float
    proved: bool = False


class Gate:
    """Watches the connections to one port of this process.

    Parameters
    ----------
    port : int
    limits : Limits
    lines : Lines
    """

    def __init__(self, port: int, limits: Limits, lines: Lines):
        self.port, self.limits, self.lines = port, limits, lines
        self._bucket = Bucket(limits.burst, limits.rate)
        self._lock, self._closed = threading.Lock(), threading.Event()
        # By descriptor and inode: a number that is used again is another socket. None is a socket of something else.
        self._callers: dict[tuple[int, int], Caller | None] = {}
        self._proved: set[tuple[str, int]] = set()
        if os.path.isdir(DESCRIPTORS):
            threading.Thread(target=self._watch, name="fedpdmc-gate", daemon=True).start()
        else:
            logger.warning("connections cannot be limited on this operating system: let a firewall do it")

    def close(self) -> None:
        """Watch no longer."""
        self._closed.set()

    def admit(self, peer: str) -> None:
        """The connection of this peer, as gRPC names it, has the stream of a site."""
        self._set(peer, True)

    def leave(self, peer: str) -> None:
        """The stream has ended."""
        self._set(peer, False)

    def expel(self, peer: str) -> None:
        """The connection of this peer is shut down, with whatever streams it has."""
        with self._lock:
            for key, caller in self._of(peer):
                self._shut(key, caller, "it was refused again and again")

    def _set(self, peer: str, proved: bool) -> None:
        with self._lock:
            (self._proved.add if proved else self._proved.discard)(split_peer(peer))
            for _, caller in self._of(peer):
                caller.proved, caller.since = proved, time.monotonic()

    def _of(self, peer: str) -> list[tuple[tuple[int, int], Caller]]:
        place = split_peer(peer)
        known = ((key, caller) for key, caller in self._callers.items() if caller is not None)
        return [(key, caller) for key, caller in known if (caller.address, caller.port) == place]

    def _watch(self) -> None:
        while not self._closed.wait(1.0):
            self.look()

    def look(self) -> None:
        """Find the connections that are there now, and shut down those that are beyond the limits."""
        with self._lock:
            with contextlib.suppress(OSError):
                self._find()
            strangers = sorted(
                ((caller.since, key, caller) for key, caller in self._callers.items() if caller and not caller.proved),
                reverse=True,
            )
            now, counts = time.monotonic(), Counter[str]()
            for place, (since, key, caller) in enumerate(strangers):
                source = network(caller.address)
                counts[source] += 1
                if counts[source] > self.limits.each:
                    self._shut(key, caller, f"more than {self.limits.each} at a time")
                elif place >= self.limits.all:
                    self._shut(key, caller, f"more than {self.limits.all} at a time in all")
                elif now - since > PATIENCE:
                    self._shut(key, caller, f"none of the study's sites after {PATIENCE:g} seconds")

    def _find(self) -> None:
        known, self._callers = self._callers, {}
        for name in os.listdir(DESCRIPTORS):
            try:
                descriptor = int(name)
                found = os.fstat(descriptor)
            except (OSError, ValueError):
                continue
            if not stat.S_ISSOCK(found.st_mode):
                continue
            key = descriptor, found.st_ino
            if key in known:
                self._callers[key] = known[key]
                continue
            peer = self._peer(key)
            self._callers[key] = None
            if peer is not None:
                caller = Caller(*peer, time.monotonic(), peer in self._proved)
                self._callers[key] = caller
                if not self._bucket.take(network(caller.address)):
                    self._shut(key, caller, f"more than {self.limits.rate:g} a second")

    def _peer(self, key: tuple[int, int]) -> tuple[str, int] | None:
        """Where a connection to the port is from; None for any other socket."""
        try:
            with _copied(key) as own:
                if own.family not in (socket.AF_INET, socket.AF_INET6) or own.getsockname()[1] != self.port:
                    return None
                address, port = own.getpeername()[:2]
                return plain(address), port
        except OSError:
            return None

    def _shut(self, key: tuple[int, int], caller: Caller, why: str) -> None:
        """End a connection; gRPC then reads its end and lets go of it."""
        self._callers.pop(key, None)
        with contextlib.suppress(OSError), _copied(key) as own:
            with contextlib.suppress(BlockingIOError):
                # What has come is not worked on any more.
                own.recv(2**16, socket.MSG_DONTWAIT)
            own.shutdown(socket.SHUT_RDWR)
        self.lines.warn(caller.address, "a connection from %s was shut down: %s", caller.address, why)


@contextlib.contextmanager
def _copied(key: tuple[int, int]):
    """A socket of this process under a descriptor of our own, if it is still the same one."""
    with socket.socket(fileno=os.dup(key[0])) as own:
        if os.fstat(own.fileno()).st_ino != key[1]:
            raise OSError("another socket")
        yield own


def plain(address: str) -> str:
    """An address without its zone; an IPv4 address as such even where a socket takes both kinds."""
    found = ipaddress.ip_address(address.split("%")[0])
    return str(getattr(found, "ipv4_mapped", None) or found)


def network(address: str) -> str:
    """What one caller can have: an IPv4 address, or the half of an IPv6 address that it is given."""
    found = ipaddress.ip_address(address)
    return address if found.version == 4 else str(ipaddress.ip_network((int(found) >> 64 << 64, 64)))


def split_peer(peer: str) -> tuple[str, int]:
    """Address and port of a peer as gRPC writes it, such as ``ipv6:%5B::1%5D:4433``."""
    host, _, port = urllib.parse.unquote(peer).partition(":")[2].rpartition(":")
    try:
        return plain(host.strip("[]")), int(port)
    except ValueError:
        return peer, 0
