"""The interface of an engine that carries messages between the coordinator and its sites, and what engines share."""

from __future__ import annotations

import abc
import contextlib
import functools
import queue
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from fedpdmc.console.interrupts import waiting
from fedpdmc.federation import messages
from fedpdmc.federation.messages import claimed_kind

if TYPE_CHECKING:
    from fedpdmc.certificates import Credentials


class Request:
    """An encoded message to a site, and its hash, which is computed when it is first needed."""

    def __init__(self, data: bytes):
        self.data = data

    @classmethod
    def of(cls, message: messages.Message, version: int | None = None) -> Request:
        """Encode a message, in the present wire version or in another."""
        return cls(messages.encode(message, version))

    @functools.cached_property
    def digest(self) -> bytes:
        """The hash, under which the site stores its answer."""
        return messages.digest(self.data)


class SiteState(NamedTuple):
    """The connection of a site: times in seconds, None if there is nothing yet."""

    name: str
    connected: bool
    since_seconds: float
    round_trip_seconds: float | None
    waited_seconds: float | None


class Transport(abc.ABC):
    """An engine that brings one message to each site and one answer back from each.

    A site that is lost is waited for, and the identical message is sent again. Neither side ever gives up on a round: how
    long a site takes depends on its answer, so doing something else instead would bias the run.
    """

    # The sites' names, in the order of messages and answers.
    names: tuple[str, ...]

    @abc.abstractmethod
    def ask(self, requests: Sequence[Request | None]) -> list[bytes | None]:
        """Send ``requests[m].data`` to site m and wait for all answers; a site whose request is None is not asked."""

    def ask_last(self, requests: Sequence[Request]) -> list[bytes | None]:
        """Send the last requests of a run. An engine may stop waiting for sites that are gone: their answer is None."""
        return self.ask(requests)

    @property
    def credentials(self) -> Credentials | None:
        """The coordinator's keys, if this engine has them."""
        return None

    def status(self) -> str:
        """A short text about the sites; may be empty."""
        return ""

    def states(self) -> list[SiteState]:
        """The connection of each site, if the engine knows."""
        return []

    def complete(self) -> bool:
        """Whether every site has joined."""
        return True

    @abc.abstractmethod
    def close(self) -> None:
        """Close the connections to the sites."""


class DirectTransport(Transport):
    """Agents in this process, asked one after the other with the same messages as on a network.

    ``temporary``: whether their logs are deleted at the end.
    """

    def __init__(self, agents: Sequence, temporary: bool = False):
        self.agents, self._temporary = list(agents), temporary
        self.names = tuple(agent.site.name for agent in self.agents)

    def ask(self, requests):
        """One round, site by site."""
        pairs = zip(self.agents, requests, strict=True)
        return [None if request is None else agent.answer(request.data) for agent, request in pairs]

    def close(self):
        """Close the logs."""
        for agent in self.agents:
            agent.log.close()
            if self._temporary:
                shutil.rmtree(agent.log.folder)
        self.agents = []


class RoundAnswers:
    """The answers of one round. Its thread is woken by the last of them, or by a refusal, which ends the run."""

    def __init__(self, sites: int):
        self.sites, self.answers, self.refused = sites, dict[str, bytes](), False
        self._complete: queue.SimpleQueue = queue.SimpleQueue()

    def add(self, name: str, answer: bytes) -> None:
        """Add the answer of one site."""
        self.answers[name] = answer
        self.refused |= claimed_kind(answer) == messages.Refusal.__name__
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
        self._cancel: Callable[[], object] = lambda: None
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
                self._inbox, self._cancel, self.since = None, lambda: None, time.monotonic()
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
