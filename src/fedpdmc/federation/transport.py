"""The interface of an engine that carries messages between the coordinator and its sites."""

from __future__ import annotations

import abc
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from fedpdmc.federation import messages

if TYPE_CHECKING:
    from fedpdmc.certificates.keys import Credentials


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

    @property
    @abc.abstractmethod
    def names(self) -> tuple[str, ...]:
        """The sites' names, in the order of messages and answers."""

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

    @abc.abstractmethod
    def close(self) -> None:
        """Close the connections to the sites."""
