"""Looks at a run every second: keeps its history, and says so when nothing comes from someone for long."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shlex
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from fedpdmc.errors import InputError
from fedpdmc.operations.status.board import Board, Silence, finite

logger = logging.getLogger("fedpdmc.operations.status")
# Between two looks, between two lines of facts in the log, and how long an operator's command may take.
SECONDS, LINE_SECONDS, MOST_COMMAND = 1.0, 60.0, 60.0
USUAL_PATIENCE = 300.0


class Watching(NamedTuple):
    """How a run is to be watched.

    Attributes
    ----------
    status : str or None
        ``host:port`` of the status page; None: no page.
    on_stall : str or None
        A command that is run when a stall begins and when it is over.
    stall_after : float
        Seconds without anything from someone who is waited for.
    """

    status: str | None = None
    on_stall: str | None = None
    stall_after: float = USUAL_PATIENCE

    @property
    def command(self) -> list[str] | None:
        """The words of the command; it is started without a shell."""
        if self.on_stall is None:
            return None
        try:
            words = shlex.split(self.on_stall)
        except ValueError as error:
            raise InputError(
                "on-stall", f"{self.on_stall!r}: {error}", "Give a command as a shell takes it."
            ) from error
        if not words:
            raise InputError("on-stall", "no command", "Give a program and its arguments.")
        return words


class Watch:
    """A thread that looks at a board.

    Parameters
    ----------
    board : Board
    watching : Watching
    """

    def __init__(self, board: Board, watching: Watching):
        self.board, self.patience, self._command = board, watching.stall_after, watching.command
        self._over, self._stalled = threading.Event(), dict[str, Silence]()
        self._thread = threading.Thread(target=self._watch, name="fedpdmc-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no longer."""
        self._over.set()
        self._thread.join(5.0)

    def facts(self) -> dict[str, Any]:
        """All facts, with the stalls and the history."""
        waited = [{"for": who, **one._asdict()} for who, one in self.board.silent().items()]
        stalls = [{"for": who, **one._asdict()} for who, one in dict(self._stalled).items()]
        return self.board.facts() | {"waiting": waited, "stalls": stalls, "history": self.board.history.points()}

    def _watch(self) -> None:
        spoke = time.monotonic()
        while not self._over.wait(SECONDS):
            try:
                self.board.history.add(self.board.point())
                self._look(self.board.silent())
                if time.monotonic() - spoke >= LINE_SECONDS:
                    spoke = time.monotonic()
                    facts = self.facts()
                    del facts["history"]
                    logger.info("facts %s", json.dumps(finite(facts), allow_nan=False))
            except Exception:  # noqa: BLE001
                # Whoever looks on must not end the run.
                logger.exception("the status could not be taken")

    def _look(self, silent: dict[str, Silence]) -> None:
        late = {who: one for who, one in silent.items() if one.seconds >= self.patience}
        before, self._stalled = self._stalled, late
        for who, one in late.items():
            if who not in before:
                away = "" if one.connected else "; it is not connected"
                words = f"nothing from {who} for {one.seconds:.0f} s{away}"
                logger.warning("stall: %s", words)
                self._tell("stalled", who, one.seconds, words)
        for who, one in before.items():
            if who not in late:
                logger.warning("no longer stalled: %s", who)
                self._tell("over", who, one.seconds, f"no longer stalled: {who}")

    def _tell(self, state: str, who: str, seconds: float, words: str) -> None:
        if self._command is None:
            return
        facts = self.board.facts()
        told = {
            "FEDPDMC_STATE": state,
            "FEDPDMC_STALL": words,
            "FEDPDMC_WAITING_FOR": who,
            "FEDPDMC_SECONDS": f"{seconds:.0f}",
            "FEDPDMC_PARTY": str(facts["name"]),
            "FEDPDMC_STUDY": str(facts["study"]),
        }
        threading.Thread(target=_run, args=(self._command, told), name="fedpdmc-on-stall", daemon=True).start()


def _run(command: list[str], told: dict[str, str]) -> None:
    try:
        done = subprocess.run(
            command, env=os.environ | told, stdin=subprocess.DEVNULL, timeout=MOST_COMMAND, check=False
        )
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        logger.error("the command of --on-stall has failed: %s", error)
        return
    if done.returncode:
        logger.error("the command of --on-stall ended with status %d", done.returncode)


@contextlib.contextmanager
def watched(board: Board, watching: Watching) -> Iterator[str | None]:
    """Watch a run, and show it where the operator wants; yields the address of the page, if there is one."""
    from fedpdmc.operations.status.server import StatusServer

    with contextlib.ExitStack() as stack:
        watch = Watch(board, watching)
        stack.callback(watch.close)
        address = None
        if watching.status is not None:
            server = StatusServer(watching.status, watch.facts)
            stack.callback(server.close)
            address = server.address
        yield address
