"""Progress of a run and estimates of what is left, on any kind of screen."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
from jax import monitoring
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedpdmc.console.interrupts import check
from fedpdmc.console.warnings import quiet_compiler

# Screens ---------------------------------------------------------------------------------------------------------------


FIRST_LINE = 10.0  # seconds before the first line, without a terminal; between lines the interval doubles
LONGEST_SILENCE = 120.0  # seconds between two lines, at most
LONGEST_BAR = 40


def clock(seconds: float) -> str:
    """Minutes and seconds, with hours if there are any."""
    whole = int(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


class View(NamedTuple):
    """What to show: the phase, its completed share, elapsed and remaining seconds (None: unknown), facts by importance."""

    phase: str
    share: float | None
    gone: float
    left: float | None
    facts: list[str]
    status: str

    def times(self) -> str:
        """Elapsed time, and remaining time if known."""
        return clock(self.gone) + ("" if self.left is None else f", about {clock(self.left)} left")

    def text(self, between: str) -> str:
        """Everything, with a separator between the phase and the facts."""
        share = "" if self.share is None else f" {100 * self.share:.0f} %"
        facts = "; ".join(fact for fact in (*self.facts, self.status) if fact)
        return f"{self.phase}{share}, {self.times()}" + (f"{between}{facts}" if facts else "")

    def fitting(self, width: int) -> str:
        """As many of the first facts as fit on a line."""
        line = ""
        for fact in self.facts:
            longer = f"{line}; {fact}" if line else fact
            if len(longer) > width:
                break
            line = longer
        return line


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
        share, when = "" if view.share is None else f"{100 * view.share:3.0f} %", view.times()
        room = width - len(view.phase) - len(share) - len(when) - 4
        head = Table.grid(padding=(0, 1), expand=False)
        cells: list[Any] = [Text(view.phase, style="bold", no_wrap=True, overflow="crop")]
        if room >= 4:
            bar = ProgressBar(1.0, view.share or 0.0, width=min(room, LONGEST_BAR), pulse=view.share is None)
            cells += [bar, Text(share)]
        head.add_row(*cells, Text(when, no_wrap=True, overflow="crop"))
        lines: list[Any] = [head]
        texts = filter(None, (view.fitting(width - 3), view.status))
        lines += [Text(f"  {text}"[: width - 1], no_wrap=True, overflow="crop") for text in texts]
        return Group(*lines)


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
            say(f"fedpdmc: {self._view().text('; ')}")
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
        self._show(self._view().text("\n"))

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


FORGETTING = 0.95  # weight of earlier ticks in the estimate of the speed, per tick


class Tick(NamedTuple):
    """The progress of a run at one moment."""

    began: float
    time: float
    until: float
    events: int
    rounds: int
    seconds: float


class Pace:
    """Process time and rounds per second, from the ticks so far except the first, which may include compilation."""

    def __init__(self):
        self._last: tuple[Tick, float] | None = None
        self._seconds, self._time, self._rounds = 0.0, 0.0, 0.0

    def add(self, tick: Tick) -> None:
        """Add a tick."""
        now = time.monotonic()
        if self._last is not None and tick.time >= self._last[0].time:
            before, at = self._last
            found = (now - at, tick.time - before.time, tick.rounds - before.rounds)
            seen = (self._seconds, self._time, self._rounds)
            self._seconds, self._time, self._rounds = (FORGETTING * s + f for s, f in zip(seen, found, strict=True))
        self._last = (tick, now)

    @property
    def seconds_per_round(self) -> float | None:
        """None while nothing is known."""
        return self._seconds / self._rounds if self._rounds > 0 else None

    def left(self, until: float) -> tuple[float, float] | None:
        """Estimated seconds and rounds until a process time; None while nothing is known."""
        if self._last is None or self._time <= 0:
            return None
        tick, at = self._last
        ahead = max(until - tick.time, 0.0) / self._time
        return max(ahead * self._seconds - (time.monotonic() - at), 0.0), ahead * self._rounds


class Display:
    """The progress of one call of ``sample`` or ``extend``, and estimates of what is left."""

    def __init__(self, wanted: bool, status: Callable[[], str] | None):
        self.status, self.pace, self._began = status, Pace(), time.monotonic()
        self.compilations, self._entered = Compilations(), self._began
        self._phase, self._number, self._of = "preparing", 0, 0
        self._share: float | None = None
        self._begin: float | None = None
        self._tick: Tick | None = None
        self._rate, self._until = 0.0, 0.0
        self._ess, self._target, self._rhat = None, None, None
        self._foreseen = ""
        # Whether a status page follows the run.
        self.watched = False
        self.screen = open_screen(wanted, self.view)

    def enter(self, phase: str, number: int = 0, of: int = 0, share: float | None = None) -> None:
        """Begin another phase, or another step of one, of which a share is done."""
        if phase != self._phase:
            self._entered = time.monotonic()
        self._phase, self._number, self._of = phase, number, of
        self._share = None if share is None else (number - 1 + share) / of
        self.screen.changed()

    def begin(self, phase: str) -> None:
        """Begin a phase with ticks."""
        self._begin, self._tick = None, None
        self.enter(phase)

    def aim(self, until: float, ess: float | None = None) -> None:
        """Set the end of the phase: a process time, or the estimate of when an effective sample size is reached."""
        if ess is not None or self._target is None:
            self._until, self._target = until, ess

    def foresee(self, text: str, seconds: float | None) -> None:
        """What the phase will cost; shown until its ticks tell."""
        self._foreseen = text
        self.screen.changed()
        self.screen.foresee(f"{self._phase}, {text}", seconds)

    def quality(self, ess: float, rhat: float | None = None) -> None:
        """The worst effective sample size and R-hat so far."""
        self._ess, self._rhat = ess, rhat if rhat is not None else self._rhat
        self.screen.changed()

    def tick(self, tick: Tick) -> None:
        """Add the progress of the slowest chain. Between two chunks a deferred Ctrl-C is raised."""
        check()
        if self._begin is None:
            self._begin = tick.began
        if self._tick is not None:
            self._rate = (tick.events - self._tick.events) / max(tick.seconds, 1e-9)
        self._tick = tick
        self.pace.add(tick)
        self.screen.changed()

    @property
    def visible(self) -> bool:
        """Whether someone watches, so that diagnostics should be computed between blocks."""
        return self.screen.lively or self.watched

    def view(self) -> View:
        """What to show now."""
        gone, tick = time.monotonic() - self._began, self._tick
        status = "" if self.status is None else self.status()
        step = f" (site {self._number} of {self._of})" if self._of else ""
        if tick is None or self._begin is None:
            waiting = "" if self._of or self._phase not in ("burn-in", "sampling") else " (compiling)"
            foreseen = [self._foreseen] if self._foreseen and self._phase == "sampling" else []
            facts = [*foreseen, f"{clock(time.monotonic() - self._entered)} in this phase", *self.compilations.facts()]
            return View(f"{self._phase}{step}{waiting}", self._share, gone, None, facts, status)
        until = max(self._until, tick.until)
        share = (tick.time - self._begin) / max(until - self._begin, 1e-300)
        there = tick.time >= until
        left = None if there else self.pace.left(until)
        facts = [f"{tick.rounds:,} rounds" + ("" if left is None else f", about {left[1]:,.0f} left")]
        if self._ess is not None or self._target is not None:
            wanted = "" if self._target is None else f" of {self._target:,.0f}"
            facts.append(f"ESS{wanted} wanted" if self._ess is None else f"worst ESS {self._ess:,.0f}{wanted}")
        if self._rhat is not None:
            facts.append(f"R-hat {self._rhat:.3f}")
        if self._rate > 0:
            facts.append(f"{self._rate:,.0f} events/s")
        facts.append(f"process time {tick.time - self._begin:.4g} of {until - self._begin:.4g}")
        # The first draws are made together with the burn-in, which ends at process time zero.
        phase = "sampling" if self._phase == "burn-in" and tick.time > 0 else self._phase
        phase = "measuring the ESS" if there and self._phase == "sampling" else phase
        return View(phase, min(share, 1.0), gone, None if left is None else left[0], facts, status)

    def facts(self) -> dict[str, Any]:
        """The same as numbers; None for unknown values."""
        view, tick = self.view(), self._tick
        begin = self._begin or 0.0
        moving = tick is not None and self._begin is not None
        return {
            "phase": view.phase,
            "share": view.share,
            "seconds_left": view.left,
            "rounds": tick.rounds if tick is not None else None,
            "process_time": tick.time - begin if tick is not None and moving else None,
            "until": max(self._until, tick.until) - begin if tick is not None and moving else None,
            "worst_ess": self._ess,
            "ess_wanted": self._target,
            "worst_rhat": self._rhat,
        }

    def final_line(self) -> str:
        """One line for the end of the run."""
        took = f"done in {clock(time.monotonic() - self._began)}"
        if self._tick is None:
            return took
        found = "" if self._ess is None else f", worst ESS {self._ess:,.0f}"
        return f"{took}: {self._tick.rounds:,} rounds{found}"


_showing: ContextVar[Display | None] = ContextVar("fedpdmc_showing", default=None)


@contextlib.contextmanager
def showing(wanted: bool, status: Callable[[], str] | None = None, phase: str | None = None) -> Iterator[Display]:
    """One screen for all phases of a call; a nested call uses the outer one.

    ``status``: a short text about the sites. ``phase``: a phase with ticks that begins.
    """
    outer = _showing.get()
    with contextlib.ExitStack() as stack:
        this = Display(wanted, status) if outer is None else outer
        if outer is None:
            stack.callback(_showing.reset, _showing.set(this))
            for part in (this.screen, this.compilations, quiet_compiler()):
                stack.enter_context(part)
        this.status = status or this.status
        if phase is not None:
            this.begin(phase)
        yield this
        if outer is None:
            this.screen.finish(this.final_line())


def show_prior(wanted: bool, lines: Sequence[str]) -> None:
    """Print the prior of every parameter before the screen opens, so that it stays."""
    if wanted and lines:
        say("\n  ".join(["fedpdmc: prior", *lines]))


def report(phase: str, number: int = 0, of: int = 0, share: float | None = None) -> None:
    """Show the next step, such as the compilation of one site of several, or its share. Raises a deferred Ctrl-C."""
    check()
    this = _showing.get()
    if this is not None:
        this.enter(phase, number, of, share)


# The compiler ----------------------------------------------------------------------------------------------------------


# JAX's event names: a program is ready to be compiled; it was in the cache; it has been compiled or read.
LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
READ = "/jax/compilation_cache/cache_hits"
COMPILED = "/jax/core/compile/backend_compile_duration"
REPORTED_AFTER = 2.0  # seconds after which a program is reported: it is then not in the cache


class Compilations:
    """A context manager that follows JAX's compiler."""

    def __init__(self):
        self.read = 0
        self._since: float | None = None

    def __enter__(self) -> Compilations:
        monitoring.register_event_listener(self._event)
        monitoring.register_event_duration_secs_listener(self._duration)
        return self

    def __exit__(self, *_: object) -> None:
        monitoring.unregister_event_listener(self._event)
        monitoring.unregister_event_duration_listener(self._duration)

    def _event(self, event: str, **_: Any) -> None:
        if event == READ:
            self.read += 1

    def _duration(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == LOWERED:
            self._since = time.monotonic()
        elif event == COMPILED:
            self._since = None

    def facts(self) -> list[str]:
        """Short texts, by importance."""
        since, facts = self._since, []
        seconds = -1.0 if since is None else time.monotonic() - since
        if seconds >= REPORTED_AFTER:
            cached = jax.config.values["jax_compilation_cache_dir"] is not None
            then = "kept for the next run" if cached else "the compilation cache is off"
            facts.append(f"one program: {seconds:.0f} s so far, {then}")
        elif self.read:
            facts.append(f"{self.read:,} compiled before, read from the cache")
        return facts
