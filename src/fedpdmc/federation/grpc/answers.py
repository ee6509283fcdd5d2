"""What a site says on one stream, made as it is sent."""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from fedpdmc.console.warnings import quiet_compiler
from fedpdmc.federation.codecs import DIGEST_BYTES
from fedpdmc.federation.grpc.tls import Outlived, Pass
from fedpdmc.federation.site_agent.agent import Agent

logger = logging.getLogger("fedpdmc.site")
# Seconds between two lines on how far a site has come.
PROGRESS = 30.0


class Answers:
    """What a site sends on one stream: its hello, then the answer to each request as it comes.

    Answers are made in the thread of gRPC that sends them: handing them from thread to thread costs more than most of
    them take to make. Whoever opened the stream waits on ``ended``, and `close` before the agent is used elsewhere.
    After ``until``, by the clock, nothing is answered, for the reason ``over``; nor before the coordinator has proved who it
    is, as ``check(hello, welcome)`` finds, nor once its certificate is revoked.
    """

    def __init__(self, agent: Agent, coordinator: str, until: float, over: str, check: Callable[[bytes, bytes], Pass]):
        self.agent, self.coordinator, self.until, self.over, self._check = agent, coordinator, until, over, check
        self._hello, self._pass = agent.hello(secrets.token_bytes(DIGEST_BYTES)), Pass({})
        self.calls: queue.SimpleQueue = queue.SimpleQueue()
        self.ended: queue.SimpleQueue = queue.SimpleQueue()
        self.error: BaseException | None = None
        # Held from waiting for a request to having its answer.
        self._busy, self._closed = threading.Lock(), False

    def messages(self) -> Iterator[bytes]:
        """The messages, in the order in which they are sent."""
        yield self._hello
        call = self.calls.get()
        if not self._next(call, self._join):
            return
        told = time.monotonic()
        while (answer := self._next(call, self.agent.answer)) is not None:
            yield answer
            if self.agent.finished:
                self.ended.put(None)
                return
            if time.monotonic() - told > PROGRESS:
                told = time.monotonic()
                logger.info("%s", self.agent.progress())

    def close(self) -> None:
        """Answer nothing more; waits for the answer that is being made."""
        with self._busy:
            self._closed = True
            self.agent.contact.connected = False

    def _next(self, call: Iterator[bytes], work: Callable[[bytes], Any]) -> Any:
        """What is made of the next message; None at the end of the stream."""
        with self._busy:
            if self._closed:
                return None
            began = None
            try:
                message, contact = next(call), self.agent.contact
                contact.heard = began = time.monotonic()
                if time.time() >= self.until:
                    raise Outlived(self.over)
                if (fault := self._pass.fault()) is not None:
                    raise Outlived(fault)
                contact.working = True
                with quiet_compiler():
                    return work(message)
            except StopIteration:
                # Whoever waits sees the same end of the same stream.
                return None
            except BaseException as error:
                self.error = error
                self.ended.put(None)
                return None
            finally:
                self._rest(began)

    def _rest(self, began: float | None) -> None:
        """The message that came then, if one did, is dealt with."""
        contact = self.agent.contact
        contact.working = False
        if began is not None:
            contact.heard = time.monotonic()
            contact.seconds = contact.heard - began

    def _join(self, welcome: bytes) -> bool:
        self._pass = self._check(self._hello, welcome)
        self.agent.join(welcome)
        self.agent.contact.connected = True
        logger.info("joined the run at %s", self.coordinator)
        return True
