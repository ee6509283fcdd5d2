"""The coordinator's end of gRPC streams with mutual TLS: a server on one address, which the sites dial.

Messages are opaque bytes here (see `messages`). A stream carries one request at a time and its answer. A site may only use
the name in its certificate. When a stream breaks, the pending request stays in the site's mailbox and is sent again, the
same bytes, on the next stream. A stream ends when one of its certificates expires; both sides read renewed certificates
from their folder of keys when a connection is opened.
"""

from __future__ import annotations

import functools
import logging
import os
import queue
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent import futures
from typing import Any

# gRPC logs every failed handshake. Anyone who reaches the port could fill the disk with these lines.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

import grpc  # noqa: E402

from fedpdmc.certificates import COORDINATOR, Credentials
from fedpdmc.errors import InputError
from fedpdmc.federation import messages
from fedpdmc.federation.grpc.connection_limits import (
    ConnectionLimiter,
    ConnectionLimits,
    RateLimitedLog,
    TokenBucket,
    most_connections,
    split_peer,
)
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

# Answers that match no pending request are dropped. This many in a row are not an accident.
MOST_STRAYS = 16
# Seconds that the coordinator waits for answers to the last message of a run.
LAST_WAIT = 60.0
# Seconds in which a new stream must send its hello, or have read its refusal.
HELLO = 20.0
# Streams at a time from callers that are not sites of the study; refusals of one address, at once and per second.
STRANGERS, REFUSALS, REFUSALS_A_SECOND = 4, 20.0, 1.0
# Seconds without an answer after which a warning is logged; the interval doubles each time.
STALLED = 60.0
# gRPC reads the certificate of its handshakes without a lock while it is replaced. After this many seconds all handshakes
# that use the old one have finished.
RENEWAL_PAUSE = 0.25


class StreamTransport(Transport):
    """The coordinator's end: a server that the sites of a study dial.

    Parameters
    ----------
    run : bytes
        The run's id, sent to every site.
    listen : str
        ``host:port``, the address to listen on; port 0 takes a free one.
    credentials : Credentials or None
        Of the coordinator. None: plain connections, which only a loopback address may have.
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
