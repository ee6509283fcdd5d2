"""ConnectionLimits for connections without an admitted stream: how many, how often and for how long, by address.

gRPC accepts every connection and reports nothing before the handshake is done. But the sockets belong to this process:
whenever a handshake begins, and every second, the limiter inspects the sockets that are connected to its port and shuts
down those that exceed the limits. A connection is admitted once its stream is accepted as a site's.
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
# The folder in which an operating system lists the descriptors of this process.
DESCRIPTORS = "/dev/fd"
# Number of descriptors that are not used for connections, but for the store, libraries and gRPC's threads.
RESERVED = 256
# Seconds after which a connection without an admitted stream is shut down.
TIMEOUT = 30.0
# Log lines about one address: this many at once, then one in this many seconds.
LINES, SECONDS_A_LINE = 5, 60.0
# Number of addresses that are remembered.
MOST_ADDRESSES = 4096


class ConnectionLimits(NamedTuple):
    """ConnectionLimits for connections that are not admitted."""

    # Handshakes of one address: this many at once, then this many per second.
    burst: float
    rate: float
    # Connections at a time, from one address and in total. Beyond that the oldest are shut down.
    each: int
    all: int

    @classmethod
    def of(cls, sites: int) -> ConnectionLimits:
        """For a study with this many sites, which may all be behind one address."""
        return cls(20.0 + 2 * sites, 10.0 + sites, 16 + 2 * sites, 128 + 2 * sites)


def most_connections(sites: int) -> int:
    """How many connections gRPC may accept without using up the descriptors; raises their limit as far as allowed."""
    wanted = 2 * ConnectionLimits.of(sites).all
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
            "this process may have %d descriptors, too few for %d sites: raise its limit (LimitNOFILE in a unit)",
            soft,
            sites,
        )
    return max(min(wanted, room), 2 * sites + 8)


class TokenBucket:
    """A rate limit for each address: ``burst`` at once, then ``rate`` per second."""

    def __init__(self, burst: float, rate: float):
        self.burst, self.rate = burst, rate
        self._left: dict[str, tuple[float, float]] = {}

    def take(self, address: str) -> bool:
        """Whether one more is within the limit."""
        now = time.monotonic()
        left, when = self._left.pop(address, (self.burst, now))
        left = min(left + (now - when) * self.rate, self.burst)
        self._left[address] = (max(left - 1.0, 0.0), now) if left >= 1.0 else (left, now)
        if len(self._left) > MOST_ADDRESSES:
            # Forget the address that has been inactive for longest.
            del self._left[next(iter(self._left))]
        return left >= 1.0


class RateLimitedLog:
    """Log lines about callers, at a limited rate, so that nobody can fill the disk with them."""

    def __init__(self):
        self._lock, self._bucket, self._suppressed = (
            threading.Lock(),
            TokenBucket(LINES, 1 / SECONDS_A_LINE),
            Counter[str](),
        )

    def warn(self, address: str, message: str, *words: object) -> None:
        """Log a line about an address, or only count it if there were too many."""
        with self._lock:
            if not self._bucket.take(address):
                if len(self._suppressed) < MOST_ADDRESSES:
                    self._suppressed[address] += 1
                return
            more = self._suppressed.pop(address, 0)
        logger.warning(message + (f" (and {more} more lines that were not logged)" if more else ""), *words)


@dataclass
class ClientConnection:
    """A connection: its origin, since when it has had no admitted stream, and whether it has one."""

    address: str
    port: int
    since: float
    admitted: bool = False


class ConnectionLimiter:
    """Enforces limits on the connections to one port of this process."""

    def __init__(self, port: int, limits: ConnectionLimits, log: RateLimitedLog):
        self.port, self.limits, self.log = port, limits, log
        self._bucket = TokenBucket(limits.burst, limits.rate)
        self._lock, self._closed = threading.Lock(), threading.Event()
        # By descriptor and inode: a descriptor that is used again is another socket. None: a socket not on this port.
        self._connections: dict[tuple[int, int], ClientConnection | None] = {}
        self._admitted: set[tuple[str, int]] = set()
        if os.path.isdir(DESCRIPTORS):
            threading.Thread(target=self._watch, name="fedpdmc-connection-limiter", daemon=True).start()
        else:
            logger.warning("connections cannot be limited on this operating system: use a firewall")

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()

    def set_admitted(self, peer: str, admitted: bool) -> None:
        """The connection of this peer, as gRPC names it, has the stream of a site, or no longer."""
        with self._lock:
            (self._admitted.add if admitted else self._admitted.discard)(split_peer(peer))
            for _, connection in self._of(peer):
                connection.admitted, connection.since = admitted, time.monotonic()

    def disconnect(self, peer: str) -> None:
        """Shut down the connection of this peer, with all its streams."""
        with self._lock:
            for key, connection in self._of(peer):
                self._shut(key, connection, "it was refused too often")

    def _of(self, peer: str) -> list[tuple[tuple[int, int], ClientConnection]]:
        place = split_peer(peer)
        known = ((key, one) for key, one in self._connections.items() if one is not None)
        return [(key, one) for key, one in known if (one.address, one.port) == place]

    def _watch(self) -> None:
        while not self._closed.wait(1.0):
            self.enforce()

    def enforce(self) -> None:
        """Find the current connections, and shut down those that exceed the limits."""
        with self._lock:
            with contextlib.suppress(OSError):
                self._find()
            strangers = sorted(
                ((one.since, key, one) for key, one in self._connections.items() if one and not one.admitted),
                reverse=True,
            )
            now, counts = time.monotonic(), Counter[str]()
            for place, (since, key, one) in enumerate(strangers):
                source = source_network(one.address)
                counts[source] += 1
                if counts[source] > self.limits.each:
                    self._shut(key, one, f"more than {self.limits.each} at a time")
                elif place >= self.limits.all:
                    self._shut(key, one, f"more than {self.limits.all} at a time in total")
                elif now - since > TIMEOUT:
                    self._shut(key, one, f"no site of the study after {TIMEOUT:g} seconds")

    def _find(self) -> None:
        known, self._connections = self._connections, {}
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
                self._connections[key] = known[key]
                continue
            peer = self._peer(key)
            self._connections[key] = None
            if peer is not None:
                one = ClientConnection(*peer, time.monotonic(), peer in self._admitted)
                self._connections[key] = one
                if not self._bucket.take(source_network(one.address)):
                    self._shut(key, one, f"more than {self.limits.rate:g} per second")

    def _peer(self, key: tuple[int, int]) -> tuple[str, int] | None:
        """The origin of a connection to the port; None for any other socket."""
        try:
            with _duplicate(key) as own:
                if own.family not in (socket.AF_INET, socket.AF_INET6) or own.getsockname()[1] != self.port:
                    return None
                address, port = own.getpeername()[:2]
                return plain_address(address), port
        except OSError:
            return None

    def _shut(self, key: tuple[int, int], connection: ClientConnection, why: str) -> None:
        """Shut down a connection. gRPC then reads its end and releases it."""
        self._connections.pop(key, None)
        address = connection.address
        with contextlib.suppress(OSError), _duplicate(key) as own:
            with contextlib.suppress(BlockingIOError):
                # Discard what has arrived.
                own.recv(2**16, socket.MSG_DONTWAIT)
            own.shutdown(socket.SHUT_RDWR)
        self.log.warn(address, "a connection from %s was shut down: %s", address, why)


@contextlib.contextmanager
def _duplicate(key: tuple[int, int]):
    """A socket of this process under a duplicate descriptor, if it is still the same socket."""
    with socket.socket(fileno=os.dup(key[0])) as own:
        if os.fstat(own.fileno()).st_ino != key[1]:
            raise OSError("another socket")
        yield own


def plain_address(address: str) -> str:
    """An address without its zone; an IPv4-mapped IPv6 address as IPv4."""
    found = ipaddress.ip_address(address.split("%")[0])
    return str(getattr(found, "ipv4_mapped", None) or found)


def source_network(address: str) -> str:
    """The addresses that one caller controls: one IPv4 address, or an IPv6 network of 64 bits."""
    found = ipaddress.ip_address(address)
    return address if found.version == 4 else str(ipaddress.ip_network((int(found) >> 64 << 64, 64)))


def split_peer(peer: str) -> tuple[str, int]:
    """Address and port of a peer in gRPC's notation, such as ``ipv6:%5B::1%5D:4433``."""
    host, _, port = urllib.parse.unquote(peer).partition(":")[2].rpartition(":")
    try:
        return plain_address(host.strip("[]")), int(port)
    except ValueError:
        return peer, 0
