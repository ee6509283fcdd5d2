"""Screens for progress: a live display on a terminal, one output in a notebook, occasional lines elsewhere."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

# Without a terminal: seconds before the first line, and the longest interval between lines; it doubles each time.
FIRST_LINE, LONGEST_SILENCE = 10.0, 120.0
LONGEST_BAR = 40


class View(NamedTuple):
    """What to show: the phase, its completed share, elapsed and remaining seconds (None: unknown), facts by importance."""

    phase: str
    share: float | None
    gone: float
    left: float | None
    facts: list[str]
    status: str


def clock(seconds: float) -> str:
    """Minutes and seconds, with hours if there are any."""
    whole = int(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def fitting(facts: list[str], width: int) -> str:
    """As many of the first facts as fit on a line."""
    line = ""
    for fact in facts:
        longer = f"{line}; {fact}" if line else fact
        if len(longer) > width:
            break
        line = longer
    return line


def times(view: View) -> str:
    """Elapsed time, and remaining time if known."""
    return clock(view.gone) + ("" if view.left is None else f", about {clock(view.left)} left")


class Screen:
    """A screen that shows nothing."""

    lively = False

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def changed(self) -> None:
        """Update after a change."""

    def foresee(self, text: str, seconds: float | None) -> None:
        """Show the expected cost of the phase, and its duration in seconds if known."""

    def finish(self, text: str) -> None:
        """Show the final line of a successful run."""


class LiveScreen(Screen):
    """A bar and two lines on a terminal, drawn four times a second at the current width of the window."""

    lively = True

    def __init__(self, view: Callable[[], View], console: Console):
        self._view, self._console = view, console
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> LiveScreen:
        self._live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._live.__exit__(*error)

    def finish(self, text: str) -> None:
        """Print the final line in place of the bar."""
        self._console.print(Text(text), soft_wrap=True)

    def _render(self) -> Group:
        view, width = self._view(), self._console.width
        share, when = "" if view.share is None else f"{100 * view.share:3.0f} %", times(view)
        room = width - len(view.phase) - len(share) - len(when) - 4
        head = Table.grid(padding=(0, 1), expand=False)
        cells: list[Any] = [Text(view.phase, style="bold", no_wrap=True, overflow="crop")]
        if room >= 4:
            bar = ProgressBar(1.0, view.share or 0.0, width=min(room, LONGEST_BAR), pulse=view.share is None)
            cells += [bar, Text(share)]
        head.add_row(*cells, Text(when, no_wrap=True, overflow="crop"))
        lines: list[Any] = [head]
        lines += [Text(f"  {text}"[: width - 1], no_wrap=True, overflow="crop") for text in self._texts(view, width)]
        return Group(*lines)

    def _texts(self, view: View, width: int) -> list[str]:
        return [text for text in (fitting(view.facts, width - 3), view.status) if text]


class PlainScreen(Screen):
    """Occasional lines on standard error during long runs, for files, pipes and simple terminals."""

    def __init__(self, view: Callable[[], View]):
        self._view, self._over, self._spoke = view, threading.Event(), False
        self._thread = threading.Thread(target=self._speak, name="fedpdmc-progress", daemon=True)

    def __enter__(self) -> PlainScreen:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        self._thread.join()

    def foresee(self, text: str, seconds: float | None) -> None:
        """Print the expected cost of a long phase."""
        if self._spoke or (seconds or 0.0) > FIRST_LINE:
            self._spoke = True
            say(f"fedpdmc: {text}")

    def finish(self, text: str) -> None:
        """Print the final line, if there were lines before."""
        self._over.set()
        self._thread.join()
        if self._spoke:
            say(f"fedpdmc: {text}")

    def _speak(self) -> None:
        silence = FIRST_LINE
        while not self._over.wait(silence):
            view = self._view()
            share = "" if view.share is None else f" {100 * view.share:.0f} %"
            facts = "; ".join([*view.facts, *([view.status] if view.status else [])])
            say(f"fedpdmc: {view.phase}{share}, {times(view)}" + (f"; {facts}" if facts else ""))
            self._spoke, silence = True, min(2 * silence, LONGEST_SILENCE)


def say(line: str) -> None:
    """Print on standard error. A full disk below the log is no reason to end a run."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


class NotebookScreen(Screen):
    """One output of a notebook's cell, which is updated."""

    lively = True

    def __init__(self, view: Callable[[], View], display: Callable[..., Any]):
        self._view, self._display, self._handle = view, display, None

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is not None:
            self._show(f"stopped: {self._view().phase}")

    def changed(self) -> None:
        """Update from the sampling thread: notebooks put the output of other threads under the wrong cell."""
        view = self._view()
        share = "" if view.share is None else f" {100 * view.share:.0f} %"
        facts = "; ".join([*view.facts, *([view.status] if view.status else [])])
        self._show(f"{view.phase}{share}, {times(view)}" + (f"\n{facts}" if facts else ""))

    def finish(self, text: str) -> None:
        """Replace the output by the final line."""
        self._show(text)

    def _show(self, text: str) -> None:
        data = {"text/plain": text}
        if self._handle is None:
            self._handle = self._display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)


def open_screen(wanted: bool, view: Callable[[], View]) -> Screen:
    """The screen for the environment of the program; a blank `Screen` if none is wanted."""
    if not wanted:
        return Screen()
    if "ipykernel" in sys.modules:
        from IPython.core.getipython import get_ipython  # type: ignore[import-not-found]
        from IPython.display import display  # type: ignore[import-not-found]

        if hasattr(get_ipython(), "kernel"):
            return NotebookScreen(view, display)
    # Rich would treat FORCE_COLOR as a terminal, but a pipe is not one.
    if sys.stderr is None or not sys.stderr.isatty() or os.environ.get("TERM", "") in ("dumb", "unknown"):
        return PlainScreen(view)
    return LiveScreen(view, Console(stderr=True, highlight=False))
