"""Ctrl-C, at moments when it does no harm.

Python raises ``KeyboardInterrupt`` between any two instructions. In the midst of JAX's work that is unsafe: in a callback
of the garbage collector it is swallowed, and right after XLA has compiled it leaves an executable behind that crashes the
interpreter when it ends. So while `deferred` is in force a Ctrl-C is noted, and raised by the next `check`, or at once
inside `waiting`. XLA itself cannot be stopped, nor does Python react before XLA returns: a thread of its own sees the
signal too, says that the end is near, and ends the process on the second Ctrl-C. In a notebook or at a prompt, where the
interpreter is to live on, the compiler is waited for: left behind in a thread, it could crash the interpreter at its end.
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
import warnings
from collections.abc import Callable, Iterator

from fedpdmc.console.wrapping import terminal_width, wrapped

INTERRUPTED = 130
# Seconds after a Ctrl-C until something is said; until a command is ended; and those that it gets for its last work.
SILENCE, PATIENCE, LAST_WORK = 0.5, 1.5, 20.0


class Interrupted(KeyboardInterrupt):
    """A Ctrl-C while a run was under way; the message says what is kept and how to go on."""

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows: where the sampler stood says nothing to whoever stopped it."""
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
        """Raise the Ctrl-C that was noted."""
        self.noted, self.raised = False, True
        raise KeyboardInterrupt

    def _watch(self) -> None:
        """Runs beside XLA: counts what the main thread cannot see yet."""
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
        """What to do when there was no end in time; returns when to look again."""
        if self.command and self.raised and self.finishes and since != self._last:
            self._last = time.monotonic() + LAST_WORK
            return self._last
        if self.command:
            self.end()
        if self.noted:
            last = "No need to press again." if _interactive() else "Ctrl-C again ends the process at once."
            waits = "the compiler cannot be stopped. This ends when it is done, mostly within seconds."
            said = wrapped(f"Interrupt received: {waits} {last}", terminal_width(sys.stderr))
            print(said, file=sys.stderr, flush=True)
        return None

    def end(self) -> None:
        """End the process without another step of the interpreter; what is on disk is whole at every moment."""
        with contextlib.suppress(OSError):
            if os.isatty(2):
                # The cursor may be hidden by a progress display, and the line half written.
                os.write(2, b"\n" if os.environ.get("TERM") == "dumb" else b"\x1b[?25h\r\x1b[K\n")
            os.write(2, f"{wrapped(self.remains, terminal_width(sys.__stderr__))}\n".encode())
        os._exit(INTERRUPTED)


_active: _Deferral | None = None


def _interactive() -> bool:
    """Whether someone works in this interpreter and would not want it to end."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive) or "ipykernel" in sys.modules


def _main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextlib.contextmanager
def deferred(kept: str) -> Iterator[None]:
    """Hold a Ctrl-C back until the next `check`, and raise it as `Interrupted`; also a decorator.

    It changes nothing in another thread than the main one, or where the program handles SIGINT itself.

    Parameters
    ----------
    kept : str
        What is left of the work if it is interrupted, and how to go on.
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
        warnings.warn("Interrupted when all was done: nothing is missing.", stacklevel=3)


def check() -> None:
    """Raise a Ctrl-C that was held back: called between two pieces of work, never while JAX traces."""
    if _active is not None and _active.noted and _main_thread():
        _active.release()


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """A wait for others, which a Ctrl-C ends at once."""
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
    """Whether a command has been interrupted: what it has got then is not the whole."""
    return _active is not None and (_active.noted or _active.raised)


def remains(text: str, finishes: bool = False) -> None:
    """Say what is kept of a command and how to go on, should it be interrupted from now on.

    ``finishes``: it looks at `happened` and does some last work, for which it gets more time.
    """
    if _active is not None:
        _active.remains, _active.finishes = text, finishes


def run_command(work: Callable[[], object]) -> None:
    """Run a command; one that is interrupted ends with `remains` on standard error and status 130."""
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
