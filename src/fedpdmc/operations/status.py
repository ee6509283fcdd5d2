"""The status of a run at one party, as numbers and names, and the thread that watches it. Nothing in it is about records."""

from __future__ import annotations

import abc
import contextlib
import datetime
import json
import logging
import os
import shlex
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from fedpdmc.errors import InputError
from fedpdmc.federation.site_agent.agent import SOFTWARE, Agent

if TYPE_CHECKING:
    from fedpdmc.console.progress import Display
    from fedpdmc.federation.session import Connection
    from fedpdmc.study import Study

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


def finite(value: Any) -> Any:
    """The status with None for numbers that are not finite, which JSON lacks."""
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, list):
        return [finite(one) for one in value]
    if isinstance(value, float) and not abs(value) < float("inf"):
        return None
    return value


class Board(abc.ABC):
    """The status of one party, read from another thread."""

    plotted: tuple[str, ...]

    def __init__(self, party: str, name: str, study: Study):
        self.history, self._began = History(), time.monotonic()
        self._party = {"party": party, "name": name, "study": study.name, "contract": study.digest.hex()}

    @abc.abstractmethod
    def facts(self) -> dict[str, Any]:
        """The current status, as values for JSON."""

    @abc.abstractmethod
    def silent(self) -> dict[str, Silence]:
        """The parties that this party waits for."""

    def _common(self, run: bytes | None) -> dict[str, Any]:
        return self._party | {
            "run": None if run is None else run.hex(),
            "software": SOFTWARE,
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "uptime_seconds": time.monotonic() - self._began,
        }

    def point(self) -> dict[str, Any]:
        """The part of the status that is plotted over time."""
        facts = self.facts()
        point = {"seconds": facts["uptime_seconds"], **{key: facts.get(key) for key in self.plotted}}
        if "sites" in facts:
            trips = {site["name"]: site.get("round_trip_seconds") or None for site in facts["sites"]}
            point["round_trip_seconds"] = trips
        return point


class CoordinatorBoard(Board):
    """The status of a coordinator's run. The connection's runs report to this board from now on."""

    plotted = ("rounds", "process_time", "worst_ess", "worst_rhat")

    def __init__(self, connection: Connection):
        super().__init__("coordinator", "coordinator", connection.study)
        self.connection, self._display = connection, None
        connection.shown_to = self._follow

    def _follow(self, display: Display) -> None:
        display.watched, self._display = True, display

    def facts(self) -> dict[str, Any]:
        """Joined sites, progress, diagnostics, and sites that are waited for."""
        connection = self.connection
        states = {one.name: one._asdict() for one in connection.transport.states()}
        spent = {one.site: one.spent for one in connection.federation.accounts}
        names = connection.study.sites
        sites = [states.get(name, {"name": name}) | {"privacy_spent": spent.get(name)} for name in names]
        standing = {"phase": "preparing"} if self._display is None else self._display.facts()
        joined = sum(bool(site.get("connected")) for site in sites)
        return self._common(connection.run) | standing | {"joined": joined, "sites": sites}

    def silent(self) -> dict[str, Silence]:
        """Sites that the run waits for."""
        return {
            f"site {one.name}": Silence(one.waited_seconds, one.connected)
            for one in self.connection.transport.states()
            if one.waited_seconds is not None
        }


class SiteBoard(Board):
    """The status of a site in a run."""

    plotted = ("answers", "process_time", "answer_seconds", "privacy_spent")

    def __init__(self, agent: Agent, coordinator: str):
        super().__init__("site", agent.site.name, agent.study)
        self.agent, self.coordinator = agent, coordinator

    def facts(self) -> dict[str, Any]:
        """Answers and the contract's limits, and the connection to the coordinator."""
        agent, contact, now = self.agent, self.agent.contact, time.monotonic()
        phase = "over" if agent.finished else "not connected"
        if contact.connected and not agent.finished:
            phase = "answering" if contact.working else "waiting for the coordinator"
        return self._common(agent.run) | {
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
            "bits": agent.computation.information.for_each if agent.site.budget is None else None,
        }

    def silent(self) -> dict[str, Silence]:
        """The coordinator, while the site waits for it."""
        contact = self.agent.contact
        if self.agent.finished or contact.working:
            return {}
        return {f"coordinator {self.coordinator}": Silence(time.monotonic() - contact.heard, contact.connected)}


logger = logging.getLogger("fedpdmc.operations.status")
SECONDS = 1.0  # between two samples
LINE_SECONDS = 60.0  # between two status lines in the log
USUAL_PATIENCE = 300.0


class Watching(NamedTuple):
    """How to monitor a run."""

    status: str | None = None  # ``host:port`` of the status page; None: no page
    on_stall: str | None = None  # A command to run when a stall begins and when it ends
    stall_after: float = USUAL_PATIENCE  # seconds of silence of a party that is waited for
    stall_webhook: str | None = None  # an address to post to when a stall begins and when it ends


class StatusWatch:
    """A thread that monitors a board."""

    def __init__(self, board: Board, watching: Watching):
        self.board, self.patience = board, watching.stall_after
        self._alerts = alerts(watching.on_stall, watching.stall_webhook)
        self._over, self._stalled = threading.Event(), dict[str, Silence]()
        self._thread = threading.Thread(target=self._watch, name="fedpdmc-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop monitoring."""
        self._over.set()
        self._thread.join(5.0)

    def facts(self) -> dict[str, Any]:
        """The status, with stalls and history."""
        waited = [{"for": who, **one._asdict()} for who, one in self.board.silent().items()]
        stalls = [{"for": who, **one._asdict()} for who, one in dict(self._stalled).items()]
        return self.board.facts() | {"waiting": waited, "stalls": stalls, "history": self.board.history.points()}

    def _watch(self) -> None:
        spoke = time.monotonic()
        while not self._over.wait(SECONDS):
            try:
                self.board.history.add(self.board.point())
                self._note(self.board.silent())
                if time.monotonic() - spoke >= LINE_SECONDS:
                    spoke = time.monotonic()
                    facts = self.facts()
                    del facts["history"]
                    logger.info("facts %s", json.dumps(finite(facts), allow_nan=False))
            except Exception:  # noqa: BLE001
                # An error here must not end the run.
                logger.exception("the status could not be read")

    def _note(self, silent: dict[str, Silence]) -> None:
        late = {who: one for who, one in silent.items() if one.seconds >= self.patience}
        before, self._stalled = self._stalled, late
        for who, one in late.items():
            if who not in before:
                away = "" if one.connected else "; it is not connected"
                words = f"nothing from {who} for {one.seconds:.0f} s{away}"
                logger.warning("stall: %s", words)
                self._alert("stalled", who, one.seconds, words)
        for who, one in before.items():
            if who not in late:
                logger.warning("no longer stalled: %s", who)
                self._alert("over", who, one.seconds, f"no longer stalled: {who}")

    def _alert(self, state: str, who: str, seconds: float, words: str) -> None:
        if self._alerts:
            facts = self.board.facts()
            news = StallNews(state, words, who, round(seconds), str(facts["name"]), str(facts["study"]))
            for alert in self._alerts:
                alert(news)


@contextlib.contextmanager
def watched(board: Board, watching: Watching) -> Iterator[str | None]:
    """Monitor a run and serve its status page, if wanted; yields the address of the page or None."""
    from fedpdmc.operations.status_page import StatusServer

    with contextlib.ExitStack() as stack:
        watch = StatusWatch(board, watching)
        stack.callback(watch.close)
        address = None
        if watching.status is not None:
            server = StatusServer(watching.status, watch.facts)
            stack.callback(server.close)
            address = server.address
        yield address


MOST_COMMAND = 60.0  # seconds that a command may take
MOST_STEP = 10.0  # seconds that each step of a post may take
MOST_POSTS = 4  # at a time


class StallNews(NamedTuple):
    """A stall that begins or ends ("stalled" or "over"), also as a sentence. There is nothing about records in it."""

    state: str
    stall: str
    waiting_for: str
    seconds: int
    party: str
    study: str


def webhook_host(url: str) -> str:
    """The host of a webhook; all that is ever shown of the address, which may contain a secret."""
    try:
        parts = urllib.parse.urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        host = f"{parts.hostname}{'' if parts.port is None else f':{parts.port}'}"
    except ValueError:
        good, host = False, ""
    if not good or not url.isascii() or not url.isprintable() or " " in url or "@" in url.split("/")[2]:
        remedy = "Give https://host/path, or http:// on your own network."
        raise InputError("stall-webhook", "an address that cannot be used", remedy)
    return host


class CommandAlert:
    """Runs a command, without a shell, with the news in its environment."""

    def __init__(self, command: str):
        try:
            self._words = shlex.split(command)
        except ValueError as error:
            raise InputError("on-stall", f"{command!r}: {error}", "Give a command in shell syntax.") from error
        if not self._words:
            raise InputError("on-stall", "no command", "Give a program and its arguments.")

    def __call__(self, news: StallNews) -> None:
        """Start the command and return."""
        variables = {f"FEDPDMC_{key.upper()}": str(value) for key, value in news._asdict().items()}
        threading.Thread(target=self._run, args=(variables,), name="fedpdmc-on-stall", daemon=True).start()

    def _run(self, variables: dict[str, str]) -> None:
        options: Any = {"env": os.environ | variables, "stdin": subprocess.DEVNULL, "timeout": MOST_COMMAND}
        try:
            done = subprocess.run(self._words, check=False, **options)
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            logger.error("the command of --on-stall failed: %s", error)
            return
        if done.returncode:
            logger.error("the command of --on-stall ended with status %d", done.returncode)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses to take the news elsewhere."""

    def redirect_request(self, req, fp, code, msg, headers, newurl):
        """No other address."""
        return None


class WebhookAlert:
    """Posts the news as JSON. ``text`` in it is the sentence, as chat services show it."""

    def __init__(self, url: str):
        self._url, self._host = url, webhook_host(url)
        self._open = urllib.request.build_opener(_NoRedirects()).open
        self._places = threading.BoundedSemaphore(MOST_POSTS)

    def __call__(self, news: StallNews) -> None:
        """Begin to post and return."""
        if not self._places.acquire(blocking=False):
            logger.error("the webhook at %s is still busy with %d posts: this one is left out", self._host, MOST_POSTS)
            return
        threading.Thread(target=self._post, args=(news,), name="fedpdmc-webhook", daemon=True).start()

    def _post(self, news: StallNews) -> None:
        text = f"{news.study}, {news.party}: {news.stall}"
        body = json.dumps({"text": text, **news._asdict()}).encode()
        headers = {"Content-Type": "application/json", "User-Agent": "fedpdmc"}
        try:
            self._open(urllib.request.Request(self._url, body, headers, method="POST"), timeout=MOST_STEP).close()
        except urllib.error.HTTPError as error:
            logger.error("the webhook at %s answered with status %d", self._host, error.code)
            error.close()
        except Exception as error:  # noqa: BLE001
            # Only the kind of error: its text may repeat the address.
            logger.error("the webhook at %s could not be reached (%s)", self._host, type(error).__name__)
        finally:
            self._places.release()


def alerts(command: str | None, webhook: str | None) -> list[Callable[[StallNews], None]]:
    """The alerts that an operator has chosen."""
    chosen = (CommandAlert, command), (WebhookAlert, webhook)
    return [kind(where) for kind, where in chosen if where is not None]
