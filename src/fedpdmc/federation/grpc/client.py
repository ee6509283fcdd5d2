"""The site's end of gRPC streams: it dials the coordinator and answers its requests. See `server` for the protocol."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import queue
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

import grpc  # noqa: E402

from fedpdmc.certificates import Credentials, renewed
from fedpdmc.console.interrupts import waiting
from fedpdmc.console.warnings import quiet_compiler
from fedpdmc.errors import InputError, Refused, WireError
from fedpdmc.federation import messages
from fedpdmc.federation.grpc import tls
from fedpdmc.federation.messages import DIGEST_BYTES, RUN_BYTES, version_remedy
from fedpdmc.federation.site_agent.agent import Agent

logger = logging.getLogger("fedpdmc.site")
FIRST_WAIT = 0.25  # seconds before a site dials again; it doubles each time
LONGEST_WAIT = 30.0  # seconds between two attempts, at most
CLOSING = 5.0  # seconds that a site waits for the coordinator to close the stream after the run has ended
LAST_DIALS = 3  # how often a site whose stream broke at the end of the run dials again
# Seconds after which a site opens a new stream. Only a handshake checks whether the other side's certificate has expired.
MOST_AGE = 3600.0
PROGRESS = 30.0  # seconds between two log lines about the site's progress


@dataclass(eq=False)
class AnswerStream:
    """What a site sends on one stream: its hello, then the answer to each request as it arrives.

    Answers are computed in the gRPC thread that sends them: handing them from thread to thread costs more than computing
    most of them. The thread that opened the stream waits on ``ended``, and calls `close` before it uses the agent again.
    Nothing is answered after the time ``until`` (``why`` is the reason), nor before ``check(hello, welcome)`` has verified
    the coordinator, nor after its certificate was revoked.
    """

    agent: Agent
    coordinator: str
    until: float
    why: str
    check: Callable[[bytes, bytes], tls.StreamCertificates]

    def __post_init__(self):
        self._hello = self.agent.hello(secrets.token_bytes(DIGEST_BYTES))
        self._certificates = tls.StreamCertificates({})
        self.calls: queue.SimpleQueue = queue.SimpleQueue()
        self.ended: queue.SimpleQueue = queue.SimpleQueue()
        self.error: BaseException | None = None
        # Held while waiting for a request and computing its answer.
        self._busy, self._closed = threading.Lock(), False

    def messages(self) -> Iterator[bytes]:
        """The messages, in the order in which they are sent."""
        yield self._hello
        call = self.calls.get()
        if not self._next(call, self._join):
            yield from self._last_words()
            return
        reported = time.monotonic()
        while (answer := self._next(call, self.agent.answer)) is not None:
            yield answer
            if self.agent.finished:
                self.ended.put(None)
                return
            if time.monotonic() - reported > PROGRESS:
                reported = time.monotonic()
                logger.info("%s", self.agent.progress())
        yield from self._last_words()

    def _last_words(self) -> Iterator[bytes]:
        """The reason for which this site leaves, if it refuses to go on: the coordinator must not wait for it."""
        if isinstance(self.error, Refused):
            yield messages.encode(messages.Refusal(bytes(RUN_BYTES), 0, messages.NOTHING_ASKED, self.error.code, 0))

    def close(self) -> None:
        """Answer nothing more. Waits until the current answer is done."""
        with self._busy:
            self._closed = True
            self.agent.contact.connected = False

    def _next(self, call: Iterator[bytes], work: Callable[[bytes], Any]) -> Any:
        """The result of ``work`` on the next message; None at the end of the stream."""
        with self._busy:
            if self._closed:
                return None
            contact = self.agent.contact
            try:
                message = next(call)
                contact.begin()
                if time.time() >= self.until:
                    raise tls.StreamExpired(self.why)
                if (fault := self._certificates.fault()) is not None:
                    raise tls.StreamExpired(fault)
                with quiet_compiler():
                    return work(message)
            except StopIteration:
                # The thread that waits for the end of the stream sees it too.
                return None
            except BaseException as error:
                self.error = error
                self.ended.put(None)
                return None
            finally:
                contact.end()

    def _join(self, welcome: bytes) -> bool:
        self._certificates = self.check(self._hello, welcome)
        self.agent.join(welcome)
        self.agent.contact.connected = True
        logger.info("joined the run at %s", self.coordinator)
        return True


def serve(
    agent: Agent,
    coordinator: str,
    credentials: Credentials | None,
    wait: Callable[[float], bool] | None = None,
    settings: tls.DialSettings | None = None,
) -> None:
    """Dial the coordinator and answer its requests until the run has ended.

    A connection that fails or breaks is dialled again, after a wait that doubles up to half a minute.

    Parameters
    ----------
    coordinator : str
        ``host:port``.
    credentials : Credentials or None
        Of the site. None: a plain connection, to a loopback address only.
    wait : callable, optional
        ``wait(seconds)`` returns true to stop; `time.sleep` by default.
    settings : tls.DialSettings, optional
        When to answer, and whom to accept as the coordinator.

    Raises
    ------
    Refused
        Either side refused the other; dialling again would not help.
    """
    settings = settings or tls.DialSettings()
    host, _ = tls.split_address(coordinator, "coordinator")
    if credentials is None:
        tls.check_loopback(host, "coordinator")
    else:
        tls.check_party(credentials, agent.site.name)
    delay, last = FIRST_WAIT, 0
    while True:
        began = time.monotonic()
        try:
            credentials = agent.sealing.credentials = None if credentials is None else renewed(credentials)
            _session(agent, coordinator, credentials, settings)
            if agent.finished:
                return
            reason = "the coordinator ended the stream"
        except tls.StreamExpired as error:
            reason = str(error)
        except grpc.RpcError as error:
            reason = f"{error.code().name}: {error.details()}"  # type: ignore[attr-defined]
        last += agent.finished
        if last == LAST_DIALS:
            return
        delay = FIRST_WAIT if time.monotonic() - began > LONGEST_WAIT else min(2 * delay, LONGEST_WAIT)
        # Random, so that sites that were lost together do not all return at once.
        pause = delay * (0.5 + random.random() / 2)
        logger.warning("no connection to %s (%s); dialling again in %.1f s", coordinator, reason, pause)
        if wait is None:
            with waiting():
                time.sleep(pause)
        elif wait(pause):
            return


def _session(agent: Agent, coordinator: str, credentials: Credentials | None, settings: tls.DialSettings) -> None:
    """One stream: hello, welcome, then requests and answers until it ends."""
    until, why = tls.stream_end(credentials, settings.hours, MOST_AGE)
    if time.time() >= until:
        raise tls.StreamExpired(why)
    with _channel(coordinator, credentials, settings.server_name) as channel:
        answers = AnswerStream(agent, coordinator, until, why, functools.partial(settings.check, credentials))
        call = channel.stream_stream(f"/{tls.SERVICE}/{tls.JOIN}")(answers.messages())
        answers.calls.put(call)
        try:
            if call.add_callback(lambda: answers.ended.put(None)):
                with waiting():
                    answers.ended.get()
            if (agent.finished or isinstance(answers.error, Refused)) and call.is_active():
                # The last answer may not have arrived until the coordinator closes the stream.
                with contextlib.suppress(queue.Empty):
                    answers.ended.get(timeout=CLOSING)
            broken = not call.is_active() and call.code() is not grpc.StatusCode.OK
        finally:
            call.cancel()
            answers.close()
        if answers.error is not None:
            raise answers.error
        if broken:
            # Raises the error that broke the stream.
            next(call)


def inquire(
    coordinator: str, credentials: Credentials | None, hello: bytes, server_name: str, seconds: float
) -> messages.Message:
    """The coordinator's answer to a site's ``--check``: `messages.Checked` or a refusal.

    Raises `InputError`: it does not answer.
    """
    try:
        with _channel(coordinator, credentials, server_name) as channel:
            call = channel.stream_stream(f"/{tls.SERVICE}/{tls.CHECK}")(iter([hello]), timeout=seconds)
            data = next(call)
            answer = messages.decode(data)
            if isinstance(answer, messages.Refusal) and (remedy := version_remedy(data, answer.code)) is not None:
                raise InputError("coordinator", f"{coordinator}: a refusal, code VERSION", remedy)
            return answer
    except (grpc.RpcError, StopIteration, WireError) as error:
        reason = (
            f"{error.code().name}: {error.details()}" if isinstance(error, grpc.Call) else str(error) or "no answer"
        )
        remedy = "See the coordinator's log. Both sides need the same version of fedpdmc."
        raise InputError("coordinator", f"{coordinator}: {reason}", remedy) from error


def _channel(coordinator: str, credentials: Credentials | None, server_name: str) -> grpc.Channel:
    if credentials is None:
        return grpc.insecure_channel(coordinator, options=tls.CHANNEL)
    secret = grpc.ssl_channel_credentials(credentials.authority, credentials.key, credentials.certificate)
    # Whatever address is dialled, the other side must have a certificate with this name.
    options = [*tls.CHANNEL, ("grpc.ssl_target_name_override", server_name)]
    return grpc.secure_channel(coordinator, secret, options=options)
