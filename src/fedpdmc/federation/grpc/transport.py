"""gRPC streams with mutual TLS: the site dials out, the coordinator listens on the one address it is given.

Messages are opaque bytes here (see `messages`). A stream carries one request at a time and its answer. The
name in a site's certificate is the name it may speak as. When a stream breaks, the request that was under way stays on
the site's desk and goes out again, the same bytes, on the next stream. A stream ends when a certificate that it was opened
with expires; both sides read a renewed one from their folder of keys when they dial and when they are dialled.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import queue
import random
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent import futures
from typing import Any

# gRPC has a line for every handshake that fails: whoever reaches the port could fill the disk with them.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

import grpc  # noqa: E402

from fedpdmc.certificates.keys import COORDINATOR, Credentials, renewed
from fedpdmc.console.interrupts import waiting
from fedpdmc.errors import InputError, WireError
from fedpdmc.federation import messages
from fedpdmc.federation.grpc.answers import Answers
from fedpdmc.federation.grpc.connection_limits import Bucket, Gate, Limits, Lines, most_connections, split_peer
from fedpdmc.federation.grpc.tls import (
    USUAL,
    Caller,
    Dialling,
    Door,
    Outlived,
    Pass,
    Waiting,
    check_loopback,
    check_party,
    split_address,
    stream_end,
)
from fedpdmc.federation.mailbox import Asked, Desk, Round
from fedpdmc.federation.remote import Request, SiteState, Transport
from fedpdmc.federation.site_agent.agent import SOFTWARE, Agent
from fedpdmc.study.contract import Study

logger = logging.getLogger("fedpdmc.coordinator")
site_logger = logging.getLogger("fedpdmc.site")

SERVICE, METHOD, CHECK = "fedpdmc.Federation", "Join", "Check"
FIRST_WAIT, LONGEST_WAIT = 0.25, 30.0
# Answers that belong to no request under way are dropped; so many of them in a row are not an accident.
MOST_STRAYS = 16
# Seconds that the coordinator waits for answers to its farewell, and a site for the coordinator to hang up after it.
PARTING, HANGING_UP = 60.0, 5.0
# How often a site whose stream broke during the farewell dials again.
LAST_DIALS = 3
# Seconds in which a handshake must be done, and a stream must say who it is or have read that it is refused.
HANDSHAKE, HELLO = 10.0, 20.0
# Streams at a time of those that no site of the study has; streams that are refused, at once and a second, of one address.
STRANGERS, REFUSALS, REFUSALS_A_SECOND = 4, 20.0, 1.0
# Seconds without an answer after which a line says so; the next one after twice as long.
STALLED = 60.0
# gRPC uses what it shows in handshakes without a lock while it is replaced. For so long none begins before that: those
# that had begun are done with it.
SETTLING = 0.25
# Seconds after which a site dials anew: it cannot see when the other side's certificate ends, but a handshake checks it.
MOST_AGE = 3600.0
CHANNEL = [
    ("grpc.max_receive_message_length", messages.MOST_BYTES),
    ("grpc.max_send_message_length", messages.MOST_BYTES),
    # A compressed message is unpacked before its size is looked at: none is taken.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    # Every dialling is a handshake of its own.
    ("grpc.use_local_subchannel_pool", 1),
    # Pings find a peer that is gone without a word.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
]
SERVER = [
    *CHANNEL,
    ("grpc.so_reuseport", 0),
    # A site that waits for a slow round pings in silence: that is no abuse.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.max_metadata_size", 8192),
    ("grpc.server_handshake_timeout_ms", int(1000 * HANDSHAKE)),
    # A site has one, and another while it dials anew.
    ("grpc.max_concurrent_streams", 4),
]


class StreamTransport(Transport):
    """The coordinator's end: a server that the sites of a study dial.

    Parameters
    ----------
    study : Study
    run : bytes
        The run's id, told to every site.
    listen : str
        ``host:port``, the one address to listen on; port 0 takes a free one.
    credentials : Credentials or None
        Of the coordinator. None: plain connections, which only a loopback address may have.
    """

    def __init__(self, study: Study, run: bytes, listen: str, credentials: Credentials | None):
        host, _ = split_address(listen, "listen")
        self.study, self.run, self._door, self._closed = study, run, Door(study, credentials), False
        self._desks = {name: Desk(name) for name in study.sites}
        sites = len(study.sites)
        self._waiting, self._refusals = Waiting(STRANGERS), Bucket(REFUSALS, REFUSALS_A_SECOND)
        self._lines, self._gate = Lines(), None
        # For each site a stream and one that is not admitted yet, and for strangers; who is beyond that waits in line.
        threads = futures.ThreadPoolExecutor(2 * sites + 2 * STRANGERS, "fedpdmc-stream")
        options = [*SERVER, ("grpc.max_allowed_incoming_connections", most_connections(sites))]
        self._server = grpc.server(threads, options=options)
        methods = {METHOD: self._stream, CHECK: self._check}
        handlers = {name: grpc.stream_stream_rpc_method_handler(method) for name, method in methods.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        try:
            if credentials is None:
                check_loopback(host, "listen")
                port = self._server.add_insecure_port(listen)
            else:
                check_party(credentials, COORDINATOR)
                secrets = grpc.dynamic_ssl_server_credentials(_shown(credentials), self._renewed, True)
                port = self._server.add_secure_port(listen, secrets)
        except RuntimeError as error:
            raise InputError(
                "listen", f"{listen}, which cannot be bound", "Give a free address of this host."
            ) from error
        self.address = f"{host}:{port}"
        self._gate = Gate(port, Limits.of(sites), self._lines)
        self._server.start()
        logger.info("listening on %s for %s", self.address, ", ".join(study.sites))

    @property
    def names(self):
        """The sites' names."""
        return self.study.sites

    @property
    def credentials(self) -> Credentials | None:
        """The coordinator's keys."""
        return self._door.credentials

    def ask(self, requests: Sequence[Request | None]) -> list[bytes | None]:
        """Send the sites their requests and wait, for as long as it takes, until all that were asked have answered."""
        return self._exchange(requests, None)

    def part(self, requests: Sequence[Request]) -> list[bytes | None]:
        """A site whose answer to the farewell is lost may be gone for good: it is not waited for longer than `PARTING`."""
        answers = self._exchange(requests, PARTING)
        for name in (name for name, answer in zip(self.names, answers, strict=True) if answer is None):
            logger.warning("site %s has not said that it knows that the run is over", name)
        return answers

    def _exchange(self, requests: Sequence[Request | None], seconds: float | None) -> list[bytes | None]:
        asked = {name: own for name, own in zip(self.names, requests, strict=True) if own is not None}
        this = Round(len(asked))
        for name, request in asked.items():
            self._desks[name].put(Asked(request, this))
        # While the sites are at work: it is not needed before they answer.
        for request in asked.values():
            _ = request.digest
        answers = this.wait(seconds) if seconds is not None else self._patiently(this, asked)
        return [answers.get(name) for name in self.names]

    def _patiently(self, this: Round, asked: Mapping[str, Request]) -> dict[str, bytes]:
        """All answers, however long they take; a line now and then says who is waited for."""
        pause, waited = STALLED, 0.0
        while len(answers := this.wait(pause)) < len(asked):
            waited, pause = waited + pause, 2 * pause
            for name in (name for name in asked if name not in answers):
                state = "connected" if self._desks[name].connected else "not connected"
                logger.warning("site %s has not answered for %.0f s; it is %s", name, waited, state)
        return answers

    def states(self) -> list[SiteState]:
        """How each site stands."""
        return [desk.state() for desk in self._desks.values()]

    def status(self) -> str:
        """Each site with its last round trip, or for how long it has been away."""
        words = []
        for desk in self._desks.values():
            gone = f"lost for {time.monotonic() - desk.since:.0f} s"
            words.append(f"{desk.name} {f'{1e3 * desk.round_trip:.1f} ms' if desk.connected else gone}")
        return ", ".join(words)

    def close(self):
        """Stop listening; streams that are open end."""
        self._closed = True
        if self._gate is not None:
            self._gate.close()
        for desk in self._desks.values():
            desk.close()
        self._server.stop(1.0).wait()

    def _stream(self, incoming: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """One stream of one site, from its hello to its end."""
        hello = yield from self._greeting(incoming, context)
        if hello is None:
            return
        caller, peer = _caller(context), context.peer()
        desk, admission = self._desks[hello.site], self._door.admit(caller)
        inbox = desk.arrive(context.cancel)
        lost = functools.partial(self._lost, desk, inbox, peer)
        self._knows(peer, True)
        if not context.add_callback(lost):
            lost()
            return
        logger.info("site %s has joined", desk.name)
        if hello.software != SOFTWARE:
            logger.warning("site %s runs %s, and this is %s: use one version", desk.name, hello.software, SOFTWARE)
        try:
            yield self._door.welcome(self.run, hello)
            while (asked := inbox.get()) is not None:
                began = time.monotonic()
                if self._shut(desk, admission, context):
                    return
                yield asked.request.data
                answer = _matching(incoming, asked.request.digest, desk.name)
                if self._shut(desk, admission, context):
                    return
                desk.give(asked, answer, time.monotonic() - began)
        except StopIteration:
            pass
        except grpc.RpcError as error:
            logger.debug("stream of %s: %r", desk.name, error)
        finally:
            lost()

    def _check(self, incoming: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Tell a site that would be let in what it has to compare; it does not join."""
        hello = yield from self._greeting(incoming, context)
        if hello is not None:
            logger.info("site %s checks its side; it does not join yet", hello.site)
            yield messages.encode(messages.Checked(time.time(), SOFTWARE))

    def _greeting(
        self, incoming: Iterator[bytes], context: grpc.ServicerContext
    ) -> Generator[bytes, None, messages.Hello | None]:
        """The hello that a stream begins with; None, and a refusal is sent, for one that is not let in."""
        caller, peer = _caller(context), context.peer()
        code = self._door.fault(caller)
        with self._waiting.place(caller.certificates or peer, not code, context.cancel):
            # Who is refused may choose not to read it.
            late = threading.Timer(HELLO, context.cancel)
            late.daemon = True
            late.start()
            try:
                hello = None if code else self._door.hello(caller, _next(incoming))
                if isinstance(hello, messages.Hello):
                    return hello
                code = code or str(hello)
                self._refuse(peer, code)
                yield self._no(code)
                return None
            finally:
                late.cancel()

    def _lost(self, desk: Desk, inbox: queue.SimpleQueue, peer: str) -> None:
        self._knows(peer, False)
        if desk.leave(inbox) and not self._closed:
            logger.warning("site %s is lost; the run waits for it", desk.name)

    def _knows(self, peer: str, admitted: bool) -> None:
        if self._gate is not None:
            (self._gate.admit if admitted else self._gate.leave)(peer)

    def _refuse(self, peer: str, code: str) -> None:
        """Say that a stream is refused; a caller that is refused again and again is cut off."""
        address = split_peer(peer)[0]
        self._lines.warn(address, "a connection from %s was refused: %s", peer, code)
        if not self._refusals.take(address) and self._gate is not None:
            self._gate.expel(peer)

    def _shut(self, desk: Desk, admission: Pass, context: grpc.ServicerContext) -> bool:
        """End the stream of a site, with the reason, if a certificate is no longer good."""
        fault = admission.fault()
        if fault is not None:
            logger.warning("%s; the stream of site %s is closed", fault, desk.name)
            context.set_code(grpc.StatusCode.UNAUTHENTICATED)
            context.set_details(fault)
        return fault is not None

    def _renewed(self) -> Any:
        """What is shown in the handshake that begins and in all after it; None: the same as before.

        gRPC calls it for every connection that it has accepted, one after the other.
        """
        if self._gate is not None:
            self._gate.look()
        if not self._door.renew():
            return None
        time.sleep(SETTLING)
        logger.info("the coordinator's renewed certificate is shown from now on")
        return _shown(self._door.credentials)

    def _no(self, code: str) -> bytes:
        return messages.encode(messages.Refusal(bytes(messages.RUN_BYTES), 0, messages.NOTHING_ASKED, code, 0))


def _caller(context: grpc.ServicerContext) -> Caller:
    """What the other side of a stream has shown; nothing on a plain connection."""
    shown: Any = context.auth_context()
    return Caller(tuple(shown.get("x509_common_name", ())), tuple(shown.get("x509_pem_cert", ())))


def _next(incoming: Iterator[bytes]) -> bytes:
    """The next message; nothing if the stream ends before it."""
    try:
        return next(incoming)
    except (StopIteration, grpc.RpcError):
        return b""


def _matching(incoming: Iterator[bytes], asked: bytes, name: str) -> bytes:
    """The next answer to this request; what answers something else is an echo of an earlier round."""
    for _ in range(MOST_STRAYS):
        answer = next(incoming)
        if messages.answered(answer, asked):
            return answer
        logger.warning("site %s sent an answer to another request; it was dropped", name)
    return answer


def _shown(credentials: Credentials | None) -> grpc.ServerCertificateConfiguration:
    assert credentials is not None
    pair = [(credentials.key, credentials.certificate)]
    return grpc.ssl_server_certificate_configuration(pair, credentials.authority)


def serve(
    agent: Agent,
    coordinator: str,
    credentials: Credentials | None,
    wait: Callable[[float], bool] | None = None,
    dialling: Dialling = USUAL,
) -> None:
    """The site's end: dial the coordinator and answer until it says that the run is over.

    A connection that fails or breaks is dialled again, after a wait that doubles up to half a minute.

    Parameters
    ----------
    agent : Agent
    coordinator : str
        ``host:port``.
    credentials : Credentials or None
        Of the site. None: a plain connection, to a loopback address only.
    wait : callable, optional
        ``wait(seconds)`` returns true to stop; `time.sleep` by default.
    dialling : Dialling
        In which hours, and whom it takes for the coordinator.

    Raises
    ------
    Refused
        Either side refused the other; dialling again would not help.
    """
    host, _ = split_address(coordinator, "coordinator")
    if credentials is None:
        check_loopback(host, "coordinator")
    else:
        check_party(credentials, agent.site.name)
    delay, last = FIRST_WAIT, 0
    while True:
        began = time.monotonic()
        try:
            credentials = agent.sealing.credentials = None if credentials is None else renewed(credentials)
            _session(agent, coordinator, credentials, dialling)
            if agent.finished:
                return
            reason = "the coordinator ended the stream"
        except Outlived as error:
            reason = str(error)
        except grpc.RpcError as error:
            reason = f"{error.code().name}: {error.details()}"  # type: ignore[attr-defined]
        last += agent.finished
        if last == LAST_DIALS:
            return
        delay = FIRST_WAIT if time.monotonic() - began > LONGEST_WAIT else min(2 * delay, LONGEST_WAIT)
        # Sites that were lost together do not all come back at once.
        pause = delay * (0.5 + random.random() / 2)
        site_logger.warning("no connection to %s (%s); dialling again in %.1f s", coordinator, reason, pause)
        if wait is None:
            with waiting():
                time.sleep(pause)
        elif wait(pause):
            return


def _session(agent: Agent, coordinator: str, credentials: Credentials | None, dialling: Dialling) -> None:
    """One stream: hello, welcome, then requests and answers until it ends."""
    until, over = stream_end(credentials, dialling.hours, MOST_AGE)
    if time.time() >= until:
        raise Outlived(over)
    with _channel(coordinator, credentials, dialling.server_name) as channel:
        answers = Answers(agent, coordinator, until, over, functools.partial(dialling.check, credentials))
        call = channel.stream_stream(f"/{SERVICE}/{METHOD}")(answers.messages())
        answers.calls.put(call)
        try:
            if call.add_callback(lambda: answers.ended.put(None)):
                with waiting():
                    answers.ended.get()
            if agent.finished and call.is_active():
                # The answer to the farewell is on its way: until the coordinator hangs up it may not have come.
                with contextlib.suppress(queue.Empty):
                    answers.ended.get(timeout=HANGING_UP)
            broken = not call.is_active() and call.code() is not grpc.StatusCode.OK
        finally:
            call.cancel()
            answers.close()
        if answers.error is not None:
            raise answers.error
        if broken:
            # Raises what broke it.
            next(call)


def inquire(
    coordinator: str, credentials: Credentials | None, hello: bytes, server_name: str, seconds: float
) -> messages.Message:
    """What a coordinator answers to a site that only checks: `wire.Checked` or a refusal.

    Raises
    ------
    InputError
        It does not answer.
    """
    try:
        with _channel(coordinator, credentials, server_name) as channel:
            call = channel.stream_stream(f"/{SERVICE}/{CHECK}")(iter([hello]), timeout=seconds)
            return messages.decode(next(call))
    except (grpc.RpcError, StopIteration, WireError) as error:
        reason = f"{error.code().name}: {error.details()}" if isinstance(error, grpc.Call) else str(error) or "silence"
        remedy = "Look at the coordinator's log; both sides need the same version of fedpdmc."
        raise InputError("coordinator", f"{coordinator}: {reason}", remedy) from error


def _channel(coordinator: str, credentials: Credentials | None, server_name: str) -> grpc.Channel:
    if credentials is None:
        return grpc.insecure_channel(coordinator, options=CHANNEL)
    secrets = grpc.ssl_channel_credentials(credentials.authority, credentials.key, credentials.certificate)
    # Whatever address it is dialled at, the other side must hold a certificate of this name.
    options = [*CHANNEL, ("grpc.ssl_target_name_override", server_name)]
    return grpc.secure_channel(coordinator, secrets, options=options)
