"""The coordinator's end of gRPC streams with mutual TLS: a server on one address, which the sites dial.

Messages are opaque bytes here (see `messages`). A stream carries one request at a time and its answer. A site may only use
the name in its certificate. When a stream breaks, the pending request stays in the site's mailbox and is sent again, the
same bytes, on the next stream. A stream ends when one of its certificates expires; both sides read renewed certificates
from their folder of keys when a connection is opened.

Connections without an admitted stream are limited in number, rate and duration, by address. gRPC accepts every connection
and reports nothing before the handshake is done. But the sockets belong to this process: whenever a handshake begins, and
every second, the limiter inspects the sockets that are connected to its port and shuts down those that exceed the limits.
A connection is admitted once its stream is accepted as a site's.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import logging
import os
import queue
import socket
import stat
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass
from typing import Any, NamedTuple

# gRPC logs every failed handshake. Anyone who reaches the port could fill the disk with these lines.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

import grpc  # noqa: E402

from fedpdmc.certificates import COORDINATOR, Credentials
from fedpdmc.errors import InputError
from fedpdmc.federation import messages
from fedpdmc.federation.grpc.tls import (
    CHECK,
    JOIN,
    SERVER,
    SERVICE,
    Admission,
    Caller,
    PendingStreams,
    StreamCertificates,
    check_loopback,
    check_party,
    split_address,
)
from fedpdmc.federation.messages import READABLE, RUN_BYTES, may_answer, version_of
from fedpdmc.federation.site_agent.agent import SOFTWARE
from fedpdmc.federation.transport import Mailbox, PendingRequest, Request, RoundAnswers, SiteState, Transport
from fedpdmc.study.contract import Study

logger = logging.getLogger("fedpdmc.coordinator")

MOST_STRAYS = 16  # answers in a row that match no pending request: each is dropped, and so many are not an accident
LAST_WAIT = 60.0  # seconds that the coordinator waits for answers to the last message of a run
HELLO = 20.0  # seconds in which a new stream must send its hello, or have read its refusal
STRANGERS = 4  # streams at a time from callers that are not sites of the study
REFUSALS = 20.0  # of one address at once
REFUSALS_A_SECOND = 1.0  # of it after these
STALLED = 60.0  # seconds without an answer after which a warning is logged; the interval doubles each time
# gRPC reads the certificate of its handshakes without a lock while it is replaced. After this many seconds all handshakes
# that use the old one have finished.
RENEWAL_PAUSE = 0.25


class StreamTransport(Transport):
    """The coordinator's end: a server that the sites of a study dial.

    ``run``: the run's id, sent to every site. ``listen``: ``host:port``, the address to listen on; port 0 takes a free
    one. ``credentials``: of the coordinator. None: plain connections, which only a loopback address may have.
    """

    def __init__(self, study: Study, run: bytes, listen: str, credentials: Credentials | None):
        host, _ = split_address(listen, "listen")
        self.study, self.run, self.names = study, run, study.sites
        self._admission, self._closed = Admission(study, credentials), False
        self._mailboxes = {name: Mailbox(name) for name in study.sites}
        sites = len(study.sites)
        self._pending, self._refusals = PendingStreams(STRANGERS), TokenBucket(REFUSALS, REFUSALS_A_SECOND)
        self._log = RateLimitedLog()
        # Per site one admitted stream and one that is not admitted yet, and some for strangers. Further streams queue.
        threads = futures.ThreadPoolExecutor(2 * sites + 2 * STRANGERS, "fedpdmc-stream")
        options = [*SERVER, ("grpc.max_allowed_incoming_connections", most_connections(sites))]
        self._server = grpc.server(threads, options=options)
        methods = {JOIN: self._stream, CHECK: self._check}
        handlers = {name: grpc.stream_stream_rpc_method_handler(method) for name, method in methods.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        try:
            if credentials is None:
                check_loopback(host, "listen")
                port = self._server.add_insecure_port(listen)
            else:
                check_party(credentials, COORDINATOR)
                secrets = grpc.dynamic_ssl_server_credentials(_configuration(credentials), self._renewed, True)
                port = self._server.add_secure_port(listen, secrets)
        except RuntimeError as error:
            remedy = "Give a free address of this host."
            raise InputError("listen", f"{listen}, which cannot be bound", remedy) from error
        self.address = f"{host}:{port}"
        self._limiter = ConnectionLimiter(port, ConnectionLimits.of(sites), self._log)
        self._server.start()
        logger.info("listening on %s for %s", self.address, ", ".join(study.sites))

    @property
    def credentials(self) -> Credentials | None:
        """The coordinator's keys."""
        return self._admission.credentials

    def ask(self, requests: Sequence[Request | None]) -> list[bytes | None]:
        """Send the sites their requests and wait, as long as it takes, for all answers."""
        return self._exchange(requests, None)

    def ask_last(self, requests: Sequence[Request]) -> list[bytes | None]:
        """Send the last requests of a run and wait at most `LAST_WAIT` seconds: a site may never return."""
        answers = self._exchange(requests, LAST_WAIT)
        for name in (name for name, answer in zip(self.names, answers, strict=True) if answer is None):
            logger.warning("site %s has not confirmed the end of the run", name)
        return answers

    def _exchange(self, requests: Sequence[Request | None], seconds: float | None) -> list[bytes | None]:
        asked = {name: own for name, own in zip(self.names, requests, strict=True) if own is not None}
        answers = RoundAnswers(len(asked))
        for name, request in asked.items():
            self._mailboxes[name].put(PendingRequest(request, answers))
        # The hashes are needed when answers arrive. Compute them while the sites work.
        for request in asked.values():
            _ = request.digest
        found = answers.wait(seconds) if seconds is not None else self._wait_for_all(answers, asked)
        return [found.get(name) for name in self.names]

    def _wait_for_all(self, answers: RoundAnswers, asked: Mapping[str, Request]) -> dict[str, bytes]:
        """All answers, however long they take, or a refusal. The log says from time to time which sites are missing."""
        pause, waited = STALLED, 0.0
        while len(found := answers.wait(pause)) < len(asked) and not answers.refused:
            waited, pause = waited + pause, 2 * pause
            for name in (name for name in asked if name not in found):
                state = "connected" if self._mailboxes[name].connected else "not connected"
                logger.warning("site %s has not answered for %.0f s; it is %s", name, waited, state)
        return found

    def states(self) -> list[SiteState]:
        """The connection of each site."""
        return [mailbox.state() for mailbox in self._mailboxes.values()]

    def complete(self) -> bool:
        """Whether every site has joined."""
        return all(mailbox.joined for mailbox in self._mailboxes.values())

    def status(self) -> str:
        """Each site with its last round trip, or for how long it is lost, or is being waited for if it never joined."""
        words = []
        for mailbox in self._mailboxes.values():
            gone = f"{'lost' if mailbox.joined else 'waiting'} for {time.monotonic() - mailbox.since:.0f} s"
            words.append(f"{mailbox.name} {f'{1e3 * mailbox.round_trip:.1f} ms' if mailbox.connected else gone}")
        return ", ".join(words)

    def close(self):
        """Stop listening and end all streams."""
        self._closed = True
        self._limiter.close()
        for mailbox in self._mailboxes.values():
            mailbox.close()
        self._server.stop(1.0).wait()

    def _stream(self, incoming: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """One stream of one site, from its hello to its end."""
        hello = yield from self._hello(incoming, context)
        if hello is None:
            return
        caller, peer = _caller(context), context.peer()
        mailbox, certificates = self._mailboxes[hello.site], self._admission.certificates(caller)
        inbox = mailbox.attach(context.cancel)
        lost = functools.partial(self._lost, mailbox, inbox, peer)
        self._limiter.set_admitted(peer, True)
        if not context.add_callback(lost):
            lost()
            return
        logger.info("site %s has joined", mailbox.name)
        if hello.software != SOFTWARE:
            logger.warning(
                "site %s runs %s, the coordinator %s: use one version", mailbox.name, hello.software, SOFTWARE
            )
        try:
            yield self._admission.welcome(self.run, hello)
            while (pending := inbox.get()) is not None:
                began = time.monotonic()
                if self._end_if_invalid(mailbox, certificates, context):
                    return
                yield pending.request.data
                answer = _matching_answer(incoming, pending.request.digest, mailbox.name)
                if self._end_if_invalid(mailbox, certificates, context):
                    return
                mailbox.deliver(pending, answer, time.monotonic() - began)
        except StopIteration:
            pass
        except grpc.RpcError as error:
            logger.debug("stream of %s: %r", mailbox.name, error)
        finally:
            lost()

    def _check(self, incoming: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Answer a site's ``--check`` with the clock and the version. The site does not join."""
        hello = yield from self._hello(incoming, context)
        if hello is not None:
            logger.info("site %s runs --check; it does not join", hello.site)
            yield messages.encode(messages.Checked(time.time(), SOFTWARE))

    def _hello(
        self, incoming: Iterator[bytes], context: grpc.ServicerContext
    ) -> Generator[bytes, None, messages.Hello | None]:
        """The first message of a stream; None, after sending a refusal, if the caller is not admitted."""
        caller, peer = _caller(context), context.peer()
        code = self._admission.certificate_fault(caller)
        with self._pending.place(caller.certificates or peer, not code, context.cancel):
            # A refused caller may never read its refusal.
            timeout = threading.Timer(HELLO, context.cancel)
            timeout.daemon = True
            timeout.start()
            try:
                data = b"" if code else _next(incoming)
                hello = None if code else self._admission.read_hello(caller, data)
                if isinstance(hello, messages.Hello):
                    return hello
                code = code or str(hello)
                self._log_refusal(peer, code)
                refusal = messages.Refusal(bytes(RUN_BYTES), 0, messages.NOTHING_ASKED, code, 0)
                # In the site's own version, if it is known here, so that the site can read it.
                version = version_of(data)
                yield messages.encode(refusal, version if version in READABLE else None)
                return None
            finally:
                timeout.cancel()

    def _lost(self, mailbox: Mailbox, inbox: queue.SimpleQueue, peer: str) -> None:
        self._limiter.set_admitted(peer, False)
        if mailbox.detach(inbox) and not self._closed:
            logger.warning("site %s is lost; the run waits for it", mailbox.name)

    def _log_refusal(self, peer: str, code: str) -> None:
        """Log a refused stream. A caller that is refused too often is disconnected."""
        address = split_peer(peer)[0]
        self._log.warn(address, "a connection from %s was refused: %s", peer, code)
        if not self._refusals.take(address):
            self._limiter.disconnect(peer)

    def _end_if_invalid(
        self, mailbox: Mailbox, certificates: StreamCertificates, context: grpc.ServicerContext
    ) -> bool:
        """End a site's stream, with the reason, if one of its certificates is no longer valid."""
        fault = certificates.fault()
        if fault is not None:
            logger.warning("%s; the stream of site %s is closed", fault, mailbox.name)
            context.set_code(grpc.StatusCode.UNAUTHENTICATED)
            context.set_details(fault)
        return fault is not None

    def _renewed(self) -> Any:
        """The certificate for this and later handshakes; None: unchanged.

        gRPC calls this for every connection that it has accepted, one after the other.
        """
        self._limiter.enforce()
        if not self._admission.renew():
            return None
        time.sleep(RENEWAL_PAUSE)
        logger.info("the coordinator uses its renewed certificate from now on")
        return _configuration(self._admission.credentials)


def _caller(context: grpc.ServicerContext) -> Caller:
    """Names and certificates of the other side of a stream; empty on a plain connection."""
    shown: Any = context.auth_context()
    return Caller(tuple(shown.get("x509_common_name", ())), tuple(shown.get("x509_pem_cert", ())))


def _next(incoming: Iterator[bytes]) -> bytes:
    """The next message; empty if the stream ends before it."""
    try:
        return next(incoming)
    except (StopIteration, grpc.RpcError):
        return b""


def _matching_answer(incoming: Iterator[bytes], asked: bytes, name: str) -> bytes:
    """The next answer to the request with this hash. Answers to other requests are left from an earlier round."""
    for _ in range(MOST_STRAYS):
        answer = next(incoming)
        if may_answer(answer, asked):
            return answer
        logger.warning("site %s sent an answer to another request; it was dropped", name)
    return answer


def _configuration(credentials: Credentials | None) -> grpc.ServerCertificateConfiguration:
    assert credentials is not None
    pair = [(credentials.key, credentials.certificate)]
    return grpc.ssl_server_certificate_configuration(pair, credentials.authority)


# Limits of connections -----------------------------------------------------------------------------------------------


DESCRIPTORS = "/dev/fd"  # the folder in which an operating system lists the descriptors of this process
RESERVED = 256  # descriptors that are not used for connections, but for the store, libraries and gRPC's threads
TIMEOUT = 30.0  # seconds after which a connection without an admitted stream is shut down
LINES = 5  # log lines about one address at once
SECONDS_A_LINE = 60.0  # between further ones
MOST_ADDRESSES = 4096  # that are remembered


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
