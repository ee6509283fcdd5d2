"""A command under a pseudo-terminal: what it wrote and how it ended."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

# The new session's terminal is what Ctrl-C is sent through; no code of this process runs between fork and exec.
TAKE_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execvp(sys.argv[1], sys.argv[1:])"
)


@dataclass
class Terminal:
    """A process whose three standard streams are a terminal of a given size.

    Parameters
    ----------
    command : sequence of str
    columns, rows : int
    env : dict
        Added to this process's own environment; a value of None takes the variable away.
    folder : path, optional
        Where the process starts.
    """

    command: Sequence[str]
    columns: int = 80
    rows: int = 24
    env: dict[str, str | None] = field(default_factory=dict)
    folder: str | os.PathLike | None = None

    def __enter__(self) -> Terminal:
        self._master, slave = pty.openpty()
        self.resize(self.columns, self.rows, tell=False)
        env = {**os.environ, "TERM": "xterm-256color", **self.env}
        for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
            if name not in self.env:
                env.pop(name, None)
        env = {name: value for name, value in env.items() if value is not None}
        self.process = subprocess.Popen(
            [sys.executable, "-c", TAKE_TERMINAL, *self.command],
            stdin=slave, stdout=slave, stderr=slave, env=env, start_new_session=True, cwd=self.folder,
        )  # fmt: skip
        os.close(slave)
        self._seen = b""
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        os.close(self._master)

    @property
    def text(self) -> str:
        """All that was written so far, control sequences included."""
        return self._seen.decode(errors="replace")

    def resize(self, columns: int, rows: int = 24, tell: bool = True) -> None:
        """Change the window, as a user who pulls at its corner."""
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        if tell:
            os.killpg(self.process.pid, signal.SIGWINCH)

    def press(self, keys: bytes) -> None:
        """Type on the keyboard; ``b"\\x03"`` is Ctrl-C."""
        os.write(self._master, keys)

    def read_until(self, enough: Callable[[str], bool], limit: float = 300.0) -> bool:
        """Read until ``enough`` is true of the text, or the process has ended (False then)."""
        end = time.monotonic() + limit
        while not enough(self.text):
            if time.monotonic() > end:
                raise TimeoutError(f"nothing of the kind in {limit} s:\n{self.text}")
            if not self._read(0.1):
                return enough(self.text)
        return True

    def finish(self, limit: float = 300.0) -> int:
        """Read to the end; the exit status, negative for a signal."""
        self.read_until(lambda _: False, limit)
        return self.process.wait(limit)

    def _read(self, seconds: float) -> bool:
        ready, _, _ = select.select([self._master], [], [], seconds)
        if not ready:
            return True
        try:
            data = os.read(self._master, 65536)
        except OSError:  # Linux's way to say that the last process has closed the terminal.
            return False
        self._seen += data
        return bool(data)


def main(command: Sequence[str]) -> int:
    """Run a command under a pseudo-terminal of 80 columns and copy what it writes."""
    with Terminal(command) as terminal:
        status = terminal.finish(limit=3600.0)
    sys.stdout.write(terminal.text.replace("\r\n", "\n"))
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
