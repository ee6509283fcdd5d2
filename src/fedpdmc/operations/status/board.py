"""The status of a run at one party, as numbers and names. It contains nothing about records."""

from __future__ import annotations

import datetime
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from fedpdmc.federation.site_agent.agent import SOFTWARE, Agent

if TYPE_CHECKING:
    from fedpdmc.console.progress import Showing
    from fedpdmc.federation.session import Connection

# Largest number of points in a history. When it is exceeded, every second point is dropped and the interval doubles.
MOST_POINTS = 512


class History:
    """Numbers over time, at most `MOST_POINTS` of them for a run of any length."""

    def __init__(self):
        self._lock, self._stride, self._seen = threading.Lock(), 1, 0
        self._points: list[dict[str, Any]] = []

    def add(self, point: dict[str, Any]) -> None:
        """Add the current values."""
        with self._lock:
            if self._seen % self._stride == 0:
                self._points.append(point)
            self._seen += 1
            if len(self._points) > MOST_POINTS:
                self._points, self._stride = self._points[::2], 2 * self._stride

    def points(self) -> list[dict[str, Any]]:
        """All points, oldest first."""
        with self._lock:
            return list(self._points)


class Silence(NamedTuple):
    """How many seconds a party that is waited for has been silent, and whether it is connected."""

    seconds: float
    connected: bool


class Board(Protocol):
    """The status of one party."""

    history: History

    def facts(self) -> dict[str, Any]:
        """The current status, as values for JSON."""
        ...

    def point(self) -> dict[str, Any]:
        """The part of the status that is plotted over time."""
        ...

    def silent(self) -> dict[str, Silence]:
        """The parties that this party waits for."""
        ...


def finite(value: Any) -> Any:
    """The status with None for numbers that are not finite, which JSON lacks."""
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, list):
        return [finite(one) for one in value]
    if isinstance(value, float) and not abs(value) < float("inf"):
        return None
    return value


def _common(party: str, name: str, study: Any, run: bytes | None, began: float) -> dict[str, Any]:
    return {
        "party": party,
        "name": name,
        "study": study.name,
        "contract": study.digest.hex(),
        "run": None if run is None else run.hex(),
        "software": SOFTWARE,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "uptime_seconds": time.monotonic() - began,
    }


class CoordinatorBoard:
    """The status of a coordinator's run, read from another thread.

    Parameters
    ----------
    connection : Connection
        Its runs report to this board from now on.
    """

    def __init__(self, connection: Connection):
        self.connection, self.history, self._began = connection, History(), time.monotonic()
        self._showing: Showing | None = None
        connection.shown_to = self._follow

    def _follow(self, showing: Showing) -> None:
        showing.watched = True
        self._showing = showing

    def _sites(self) -> list[dict[str, Any]]:
        states = {one.name: one._asdict() for one in self.connection.transport.states()}
        spent = {one.site: one.spent for one in self.connection.federation.accounts}
        return [
            states.get(name, {"name": name}) | {"privacy_spent": spent.get(name)}
            for name in self.connection.study.sites
        ]

    def facts(self) -> dict[str, Any]:
        """Joined sites, progress, diagnostics, and sites that are waited for."""
        sites = self._sites()
        found = _common("coordinator", "coordinator", self.connection.study, self.connection.run, self._began)
        standing = {"phase": "preparing"} if self._showing is None else self._showing.facts()
        return found | standing | {"joined": sum(bool(site.get("connected")) for site in sites), "sites": sites}

    def point(self) -> dict[str, Any]:
        """Process time, rounds, diagnostics, and each site's round trip."""
        facts = self.facts()
        trips = {site["name"]: site.get("round_trip_seconds") or None for site in facts["sites"]}
        kept = ("rounds", "process_time", "worst_ess", "worst_rhat")
        return {
            "seconds": facts["uptime_seconds"],
            **{key: facts.get(key) for key in kept},
            "round_trip_seconds": trips,
        }

    def silent(self) -> dict[str, Silence]:
        """Sites that the run waits for."""
        return {
            f"site {one.name}": Silence(one.waited_seconds, one.connected)
            for one in self.connection.transport.states()
            if one.waited_seconds is not None
        }


class SiteBoard:
    """The status of a site in a run, read from another thread."""

    def __init__(self, agent: Agent, coordinator: str):
        self.agent, self.coordinator, self.history, self._began = agent, coordinator, History(), time.monotonic()

    def facts(self) -> dict[str, Any]:
        """Answers and the contract's limits, and the connection to the coordinator."""
        agent, contact, now = self.agent, self.agent.contact, time.monotonic()
        phase = "over" if agent.finished else "not connected"
        if contact.connected and not agent.finished:
            phase = "answering" if contact.working else "waiting for the coordinator"
        return _common("site", agent.site.name, agent.study, agent.run, self._began) | {
            "phase": phase,
            "coordinator": self.coordinator,
            "connected": contact.connected,
            "heard_seconds_ago": now - contact.heard,
            "answers": agent.log.answers,
            "most_answers": agent.study.rounds,
            "process_time": agent.observed_time,
            "most_process_time": agent.study.observed_time,
            "refusals": agent.refusals,
            "answer_seconds": contact.seconds,
            "privacy_spent": agent.privacy_spent,
        }

    def point(self) -> dict[str, Any]:
        """Answers, observed time, time for one answer, and the privacy account."""
        facts = self.facts()
        kept = ("answers", "process_time", "answer_seconds", "privacy_spent")
        return {"seconds": facts["uptime_seconds"], **{key: facts[key] for key in kept}}

    def silent(self) -> dict[str, Silence]:
        """The coordinator, while the site waits for it."""
        contact = self.agent.contact
        if self.agent.finished or contact.working:
            return {}
        return {f"coordinator {self.coordinator}": Silence(time.monotonic() - contact.heard, contact.connected)}
