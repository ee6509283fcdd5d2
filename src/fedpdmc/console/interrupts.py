"""Ctrl-C at safe moments only.

Python raises ``KeyboardInterrupt`` between any two instructions. Inside JAX this is unsafe: in a callback of the garbage
collector it is lost, and right after a compilation it leaves an executable that crashes the interpreter at its exit. So
while `deferred` is active a Ctrl-C is noted, and raised by the next `check`, or at once inside `waiting`. XLA cannot be
stopped, and Python does not react before XLA returns: a separate thread also receives the signal, prints a message, and
ends the process on the second Ctrl-C. In a notebook or at a prompt, where the interpreter must survive, the compiler is
waited for: left running in a thread, it could crash the interpreter at its exit.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator

from fedpdmc.console.wrapping import terminal_width, wrapped

INTERRUPTED = 130
SILENCE = 0.5  # seconds after a Ctrl-C until a message is printed
PATIENCE = 1.5  # seconds after a Ctrl-C until a command is ended
LAST_WORK = 20.0  # seconds that a command gets for its last work


class Interrupted(KeyboardInterrupt):
    """A Ctrl-C during a run. The message says what was saved and how to resume."""

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows: one line, without a traceback."""
        return [f"Interrupted {self}"]


class _Deferral:
    """The handling of SIGINT by the outermost `deferred` or `run_command`."""

    def __init__(self, command: bool):
        self.command = command
        self.noted, self.raised, self.waiting = False, False, False
        self.remains, self.finishes, self._last = "Interrupted.", False, 0.0

    def __enter__(self) -> _Deferral:
        self._heard, self._told = socket.socketpair()
        self._told.setblocking(False)
        self._before = signal.signal(signal.SIGINT, self._handle)
        self._wakeup = signal.set_wakeup_fd(self._told.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="fedpdmc-interrupts", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wakeup)
        signal.signal(signal.SIGINT, self._before)
        self._told.close()
        self._thread.join()
        self._heard.close()

    def _handle(self, number: int, frame: object) -> None:
        self.noted = True
        if self.waiting:
            self.release()

    def release(self) -> None:
        """Raise the deferred Ctrl-C."""
        self.noted, self.raised = False, True
        raise KeyboardInterrupt

    def _watch(self) -> None:
        """Runs in parallel to XLA and counts signals that the main thread cannot handle yet."""
        presses, deadline = 0, None
        while True:
            left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            if not select.select([self._heard], [], [], left)[0]:
                deadline = self._late(deadline)
                continue
            numbers = self._heard.recv(64)
            if not numbers:
                return
            if self._wakeup >= 0:
                with contextlib.suppress(OSError):
                    os.write(self._wakeup, numbers)
            if signal.SIGINT in numbers:
                presses += numbers.count(signal.SIGINT)
                deadline = time.monotonic() + (PATIENCE if self.command else SILENCE)
                if presses > 1 and (self.command or not _interactive()):
                    self.end()

    def _late(self, since: float | None) -> float | None:
        """React if the work did not end in time; returns the next deadline."""
        if self.command and self.raised and self.finishes and since != self._last:
            self._last = time.monotonic() + LAST_WORK
            return self._last
        if self.command:
            self.end()
        if self.noted:
            last = "No need to press again." if _interactive() else "Press Ctrl-C again to end the process at once."
            waits = "the compiler cannot be interrupted. This stops when it has finished, usually within seconds."
            line = wrapped(f"Interrupt received: {waits} {last}", terminal_width(sys.stderr))
            print(line, file=sys.stderr, flush=True)
        return None

    def end(self) -> None:
        """End the process without another step of the interpreter. Files on disk are consistent at every moment."""
        with contextlib.suppress(OSError):
            if os.isatty(2):
                # A progress display may have hidden the cursor and written part of a line.
                os.write(2, b"\n" if os.environ.get("TERM") == "dumb" else b"\x1b[?25h\r\x1b[K\n")
            os.write(2, f"{wrapped(self.remains, terminal_width(sys.__stderr__))}\n".encode())
        os._exit(INTERRUPTED)


_active: _Deferral | None = None


def _interactive() -> bool:
    """Whether this is an interactive interpreter, which must not end."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive) or "ipykernel" in sys.modules


def _main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextlib.contextmanager
def deferred(kept: str) -> Iterator[None]:
    """Defer a Ctrl-C until the next `check`, and raise it as `Interrupted`; also a decorator.

    Has no effect outside the main thread, or if the program handles SIGINT itself.

    ``kept``: what is saved if the work is interrupted, and how to resume.
    """
    global _active
    if _active is not None or not _main_thread() or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    with _Deferral(command=False) as _active:
        mine = _active
        try:
            yield
        except Interrupted:
            raise
        except KeyboardInterrupt:
            raise Interrupted(kept) from None
        finally:
            _active = None
    if mine.noted:
        # It imports JAX, which the command line does without.
        from fedpdmc.console.warnings import warn

        warn("Interrupted after the work had finished: the result is complete.")


def check() -> None:
    """Raise a deferred Ctrl-C. Called between two pieces of work, never while JAX traces."""
    if _active is not None and _active.noted and _main_thread():
        _active.release()


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """While waiting for others, a Ctrl-C is raised at once."""
    mine = _active if _main_thread() else None
    if mine is None:
        yield
        return
    mine.waiting = True
    try:
        check()
        yield
    finally:
        mine.waiting = False


def happened() -> bool:
    """Whether a command was interrupted, so that its result is incomplete."""
    return _active is not None and (_active.noted or _active.raised)


def remains(text: str, finishes: bool = False) -> None:
    """Set the message for an interrupt of this command from now on: what is saved, and how to resume.

    ``finishes``: the command checks `happened` and does some last work, for which it gets more time.
    """
    if _active is not None:
        _active.remains, _active.finishes = text, finishes


def run_command(work: Callable[[], object]) -> None:
    """Run a command. If it is interrupted, the text of `remains` is printed and the exit status is 130."""
    global _active
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        work()
        return
    with _Deferral(command=True) as _active:
        mine, error = _active, None
        try:
            work()
        except (KeyboardInterrupt, SystemExit) as caught:
            error = caught
        finally:
            _active = None
        if mine.noted or mine.raised or isinstance(error, KeyboardInterrupt):
            sys.stdout.flush()
            sys.stderr.flush()
            mine.end()
    if error is not None:
        raise error
