"""Pending requests: each waits in its site's mailbox until the site has answered it, on any stream."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from fedpdmc.console.interrupts import waiting
from fedpdmc.federation.message_format import REFUSAL, claimed_kind
from fedpdmc.federation.transport import Request, SiteState


def _nothing() -> None:
    pass


class RoundAnswers:
    """The answers of one round. Its thread is woken by the last of them, or by a refusal, which ends the run."""

    def __init__(self, sites: int):
        self.sites, self.answers, self.refused = sites, dict[str, bytes](), False
        self._complete: queue.SimpleQueue = queue.SimpleQueue()

    def add(self, name: str, answer: bytes) -> None:
        """Add the answer of one site."""
        self.answers[name] = answer
        self.refused |= claimed_kind(answer) == REFUSAL
        if len(self.answers) == self.sites or self.refused:
            self._complete.put(None)

    def wait(self, seconds: float | None = None) -> dict[str, bytes]:
        """All answers, or those that arrived in time or before a refusal."""
        if self.sites:
            with contextlib.suppress(queue.Empty), waiting():
                self._complete.get(timeout=seconds)
        return self.answers


class PendingRequest(NamedTuple):
    """A request, and the round that its answer belongs to."""

    request: Request
    round: RoundAnswers


class Mailbox:
    """One site's pending request, and the stream that the site has open, if any."""

    def __init__(self, name: str):
        self.name = name
        self._lock = threading.Lock()
        self._pending: PendingRequest | None = None
        self._inbox: queue.SimpleQueue | None = None
        self._cancel: Callable[[], object] = _nothing
        self.since, self.round_trip, self._put, self.joined = time.monotonic(), 0.0, 0.0, False

    @property
    def connected(self) -> bool:
        """Whether the site has a stream open."""
        return self._inbox is not None

    def state(self) -> SiteState:
        """The state of the site's connection."""
        now = time.monotonic()
        with self._lock:
            waited = None if self._pending is None else now - self._put
            return SiteState(self.name, self.connected, now - self.since, self.round_trip or None, waited)

    def put(self, pending: PendingRequest) -> None:
        """Replace the pending request."""
        with self._lock:
            self._pending, self._put = pending, time.monotonic()
            if self._inbox is not None:
                self._inbox.put(pending)

    def attach(self, cancel: Callable[[], object]) -> queue.SimpleQueue:
        """Replace the site's stream by a new one. Returns the queue of what it must send; None marks its end.

        ``cancel`` ends the stream when another one replaces it, so that a site never has more than one.
        """
        with self._lock:
            cancel_previous, self._cancel = self._cancel, cancel
            if self._inbox is not None:
                self._inbox.put(None)
            inbox = self._inbox = queue.SimpleQueue()
            self.since, self.joined = time.monotonic(), True
            if self._pending is not None:
                inbox.put(self._pending)
        cancel_previous()
        return inbox

    def detach(self, inbox: queue.SimpleQueue) -> bool:
        """A stream has ended. Returns whether it was the site's current one."""
        with self._lock:
            inbox.put(None)
            current = inbox is self._inbox
            if current:
                self._inbox, self._cancel, self.since = None, _nothing, time.monotonic()
            return current

    def close(self) -> None:
        """End the stream that is open, if any."""
        with self._lock:
            if self._inbox is not None:
                self._inbox.put(None)

    def deliver(self, pending: PendingRequest, answer: bytes, seconds: float) -> None:
        """Pass on the answer to a request, if the request is still pending."""
        with self._lock:
            if pending is not self._pending:
                return
            self._pending, self.round_trip = None, seconds
        pending.round.add(self.name, answer)
