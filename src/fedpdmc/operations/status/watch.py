"""Monitors a run: records its history every second, and reports stalls."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from fedpdmc.operations.status.board import Board, Silence, finite
from fedpdmc.operations.status.stall_alerts import StallNews, alerts

logger = logging.getLogger("fedpdmc.operations.status")
# Seconds between two samples, and between two status lines in the log.
SECONDS, LINE_SECONDS = 1.0, 60.0
USUAL_PATIENCE = 300.0


class Watching(NamedTuple):
    """How to monitor a run.

    Attributes
    ----------
    status : str or None
        ``host:port`` of the status page; None: no page.
    on_stall : str or None
        A command to run when a stall begins and when it ends.
    stall_after : float
        Seconds of silence of a party that is waited for.
    stall_webhook : str or None
        An address to post to when a stall begins and when it ends.
    """

    status: str | None = None
    on_stall: str | None = None
    stall_after: float = USUAL_PATIENCE
    stall_webhook: str | None = None


class Watch:
    """A thread that monitors a board.

    Parameters
    ----------
    board : Board
    watching : Watching
    """

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
    from fedpdmc.operations.status.http_server import StatusServer

    with contextlib.ExitStack() as stack:
        watch = Watch(board, watching)
        stack.callback(watch.close)
        address = None
        if watching.status is not None:
            server = StatusServer(watching.status, watch.facts)
            stack.callback(server.close)
            address = server.address
        yield address
