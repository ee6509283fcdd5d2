"""gRPC streams with mutual TLS: the site dials out, the coordinator listens on the one address it is given.

Messages are opaque bytes here (see `fedpdmc.federation.wire`). A stream carries one request at a time and its answer. The
name in a site's certificate is the name it may speak as. When a stream breaks, the request that was under way stays on
the site's desk and goes out again, the same bytes, on the next stream. A stream ends when a certificate that it was opened
with expires; both sides read a renewed one from their folder of keys when they dial and when they are dialled.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Any

import grpc

from fedpdmc.errors import InputError, WireError
from fedpdmc.federation import wire
from fedpdmc.federation.agent import SOFTWARE, Agent
from fedpdmc.federation.answers import Answers
from fedpdmc.federation.desks import Asked, Desk, Round
from fedpdmc.federation.doors import Outlived, Pass, check_loopback, check_party, expired, split_address
from fedpdmc.federation.remote import Request, Transport
from fedpdmc.keys import COORDINATOR, Credentials, expiry, renewed
from fedpdmc.study.contract import Study

logger = logging.getLogger("fedpdmc.coordinator")
site_logger = logging.getLogger("fedpdmc.site")

SERVICE, METHOD = "fedpdmc.Federation", "Join"
FIRST_WAIT, LONGEST_WAIT = 0.25, 30.0
# Answers that belong to no request under way are dropped; so many of them in a row are not an accident.
MOST_STRAYS = 16
# Seconds that the coordinator waits for answers to its farewell, and a site for the coordinator to hang up after it.
PARTING, HANGING_UP = 60.0, 5.0
# How often a site whose stream broke during the farewell dials again.
LAST_DIALS = 3
# Seconds in which a stream must say who it is.
HELLO = 20.0
# Seconds after which a site dials anew: it cannot see when the other side's certificate ends, but a handshake checks it.
MOST_AGE = 3600.0
CHANNEL = [
    ("grpc.max_receive_message_length", wire.MOST_BYTES),
    ("grpc.max_send_message_length", wire.MOST_BYTES),
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
        self.study, self.run, self._credentials, self._closed = study, run, credentials, False
        self._desks = {name: Desk(name) for name in study.sites}
        streams = 2 * len(study.sites) + 8
        self._server = grpc.server(
            futures.ThreadPoolExecutor(streams, "fedpdmc-stream"), options=SERVER, maximum_concurrent_rpcs=streams
        )
        handler = grpc.stream_stream_rpc_method_handler(self._stream)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
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
        self._server.start()
        logger.info("listening on %s for %s", self.address, ", ".join(study.sites))

    @property
    def names(self):
        """The sites' names."""
        return self.study.sites

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
        answers = this.wait(seconds)
        return [answers.get(name) for name in self.names]

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
        for desk in self._desks.values():
            desk.close()
        self._server.stop(1.0).wait()

    def _stream(self, incoming: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """One stream of one site, from its hello to its end."""
        late = threading.Timer(HELLO, context.cancel)
        late.daemon = True
        late.start()
        try:
            hello = wire.decode(next(incoming))
        except (WireError, StopIteration, grpc.RpcError) as error:
            logger.warning("a connection from %s said no hello: %s", context.peer(), str(error) or "nothing came")
            yield self._no("MALFORMED")
            return
        finally:
            late.cancel()
        code, desk = self._admit(hello, context)
        if desk is None:
            logger.warning("a connection from %s was refused: %s", context.peer(), code)
            yield self._no(code)
            return
        admission = self._pass(desk.name, context)
        inbox = desk.arrive(context.cancel)
        lost = functools.partial(self._lost, desk, inbox)
        if not context.add_callback(lost):
            lost()
            return
        logger.info("site %s has joined", desk.name)
        if isinstance(hello, wire.Hello) and hello.software != SOFTWARE:
            logger.warning("site %s runs %s, and this is %s: use one version", desk.name, hello.software, SOFTWARE)
        try:
            yield wire.encode(wire.Welcome(self.run, self.study.digest))
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

    def _lost(self, desk: Desk, inbox: queue.SimpleQueue) -> None:
        if desk.leave(inbox) and not self._closed:
            logger.warning("site %s is lost; the run waits for it", desk.name)

    def _admit(self, hello: wire.Message, context: grpc.ServicerContext) -> tuple[str, Desk | None]:
        if not isinstance(hello, wire.Hello):
            return "MALFORMED", None
        if self._credentials is not None:
            names = context.auth_context().get("x509_common_name", [])
            if [hello.site.encode()] != list(names):
                return "NAME_NOT_IN_CERTIFICATE", None
            revoked = self._credentials.revoked
            if revoked is not None and any(certificate in revoked for certificate in _certificates(context)):
                return "REVOKED", None
        if hello.site not in self._desks:
            return "UNKNOWN_SITE", None
        if hello.study != self.study.digest:
            return "OTHER_CONTRACT", None
        return "", self._desks[hello.site]

    def _pass(self, name: str, context: grpc.ServicerContext) -> Pass:
        """The certificates of both sides of a stream."""
        if self._credentials is None:
            return Pass({})
        shown = {f"site {name}": certificate for certificate in _certificates(context)}
        return Pass(shown | {"the coordinator": self._credentials.certificate}, self._credentials.revoked)

    def _shut(self, desk: Desk, admission: Pass, context: grpc.ServicerContext) -> bool:
        """End the stream of a site, with the reason, if a certificate is no longer good."""
        fault = admission.fault()
        if fault is not None:
            logger.warning("%s; the stream of site %s is closed", fault, desk.name)
            context.set_code(grpc.StatusCode.UNAUTHENTICATED)
            context.set_details(fault)
        return fault is not None

    def _renewed(self) -> grpc.ServerCertificateConfiguration:
        """What is shown in a handshake from now on."""
        assert self._credentials is not None
        self._credentials = renewed(self._credentials)
        return _shown(self._credentials)

    def _no(self, code: str) -> bytes:
        return wire.encode(wire.Refusal(bytes(wire.RUN_BYTES), 0, wire.NOTHING_ASKED, code, 0))


def _certificates(context: grpc.ServicerContext) -> list[bytes]:
    """The certificate that the other side of a stream has shown; none on a plain connection."""
    found: Any = context.auth_context().get("x509_pem_cert", [])
    return list(found)


def _matching(incoming: Iterator[bytes], asked: bytes, name: str) -> bytes:
    """The next answer to this request; what answers something else is an echo of an earlier round."""
    for _ in range(MOST_STRAYS):
        answer = next(incoming)
        if wire.answered(answer, asked):
            return answer
        logger.warning("site %s sent an answer to another request; it was dropped", name)
    return answer


def _shown(credentials: Credentials) -> grpc.ServerCertificateConfiguration:
    pair = [(credentials.key, credentials.certificate)]
    return grpc.ssl_server_certificate_configuration(pair, credentials.authority)


def serve(
    agent: Agent,
    coordinator: str,
    credentials: Credentials | None,
    wait: Callable[[float], bool] | None = None,
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
            credentials = None if credentials is None else renewed(credentials)
            _session(agent, coordinator, credentials)
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
            time.sleep(pause)
        elif wait(pause):
            return


def _session(agent: Agent, coordinator: str, credentials: Credentials | None) -> None:
    """One stream: hello, welcome, then requests and answers until it ends."""
    until, over = _end(credentials)
    if time.time() >= until:
        raise Outlived(over)
    with _channel(coordinator, credentials) as channel:
        answers = Answers(agent, coordinator, until, over)
        call = channel.stream_stream(f"/{SERVICE}/{METHOD}")(answers.messages())
        answers.calls.put(call)
        try:
            if call.add_callback(lambda: answers.ended.put(None)):
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


def _end(credentials: Credentials | None) -> tuple[float, str]:
    """When a stream that a site opens now is to end, and why."""
    if credentials is None:
        return math.inf, ""
    own, old = expiry(credentials.certificate), time.time() + MOST_AGE
    return (own, expired("this site", own)) if own < old else (old, "certificates are looked at anew after an hour")


def _channel(coordinator: str, credentials: Credentials | None) -> grpc.Channel:
    if credentials is None:
        return grpc.insecure_channel(coordinator, options=CHANNEL)
    secrets = grpc.ssl_channel_credentials(credentials.authority, credentials.key, credentials.certificate)
    # Whatever address it is dialled at, the other side must hold the certificate of the name "coordinator".
    options = [*CHANNEL, ("grpc.ssl_target_name_override", COORDINATOR)]
    return grpc.secure_channel(coordinator, secrets, options=options)
