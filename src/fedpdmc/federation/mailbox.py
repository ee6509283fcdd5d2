"""Where requests lie until their sites have answered them, whichever stream takes them there."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from fedpdmc.console.interrupts import waiting
from fedpdmc.federation.remote import Request, SiteState


def _nothing() -> None:
    pass


class Round:
    """What a number of sites answer; the one that waits for it is woken once, by the last of them."""

    def __init__(self, sites: int):
        self.sites, self.answers = sites, dict[str, bytes]()
        self._all: queue.SimpleQueue = queue.SimpleQueue()

    def take(self, name: str, answer: bytes) -> None:
        """The answer of one site."""
        self.answers[name] = answer
        if len(self.answers) == self.sites:
            self._all.put(None)

    def wait(self, seconds: float | None = None) -> dict[str, bytes]:
        """All answers; those that have come, if not all come in time."""
        if self.sites:
            with contextlib.suppress(queue.Empty), waiting():
                self._all.get(timeout=seconds)
        return self.answers


class Asked(NamedTuple):
    """A request of a round."""

    request: Request
    round: Round


class Desk:
    """Where the coordinator leaves a site's request, and whichever stream the site has open takes it."""

    def __init__(self, name: str):
        self.name = name
        self._lock = threading.Lock()
        self._asked: Asked | None = None
        self._inbox: queue.SimpleQueue | None = None
        self._hang_up: Callable[[], object] = _nothing
        self.since, self.round_trip, self._put = time.monotonic(), 0.0, 0.0

    @property
    def connected(self) -> bool:
        """Whether the site has a stream open."""
        return self._inbox is not None

    def state(self) -> SiteState:
        """How the site stands."""
        now = time.monotonic()
        with self._lock:
            waited = None if self._asked is None else now - self._put
            return SiteState(self.name, self.connected, now - self.since, self.round_trip or None, waited)

    def put(self, asked: Asked) -> None:
        """Leave a request, in place of any before it."""
        with self._lock:
            self._asked, self._put = asked, time.monotonic()
            if self._inbox is not None:
                self._inbox.put(asked)

    def arrive(self, hang_up: Callable[[], object]) -> queue.SimpleQueue:
        """A new stream, which replaces any older one: what it is to send, None at its end.

        ``hang_up`` ends it when another replaces it, so that a site never holds more than one.
        """
        with self._lock:
            before, self._hang_up = self._hang_up, hang_up
            if self._inbox is not None:
                self._inbox.put(None)
            inbox = self._inbox = queue.SimpleQueue()
            self.since = time.monotonic()
            if self._asked is not None:
                inbox.put(self._asked)
        before()
        return inbox

    def close(self) -> None:
        """Let a stream that is open come to its end."""
        with self._lock:
            if self._inbox is not None:
                self._inbox.put(None)

    def leave(self, inbox: queue.SimpleQueue) -> bool:
        """A stream has ended; returns whether it was the site's present one."""
        with self._lock:
            inbox.put(None)
            present = inbox is self._inbox
            if present:
                self._inbox, self._hang_up, self.since = None, _nothing, time.monotonic()
            return present

    def give(self, asked: Asked, answer: bytes, seconds: float) -> None:
        """The answer to a request, if it is still the one that is asked."""
        with self._lock:
            if asked is not self._asked:
                return
            self._asked, self.round_trip = None, seconds
        asked.round.take(self.name, answer)
