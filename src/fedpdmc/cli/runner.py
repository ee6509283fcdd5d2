"""What all commands share: how they run and report errors, and the options that several of them take."""

import errno
import functools
import logging
import logging.handlers
import os
import sqlite3
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedpdmc.console.wrapping import say, terminal_width, wrapped
from fedpdmc.errors import FedPDMCError, InputError

if TYPE_CHECKING:
    from fedpdmc.operations.preflight import Finding

# Exit status: a check failed; the command was refused or given unusable input; the machine failed (no file descriptor
# left, a disk that is full or fails), so that a restart may succeed (EX_TEMPFAIL).
CHECK_FAILED, REFUSED, TRY_LATER = 1, 2, 75
SQLITE_DISK = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
FULL_LINE = "%(asctime)s %(levelname)s %(name)s: %(message)s"
OF_THE_MACHINE = (errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, errno.EIO)

Contract = Annotated[Path, typer.Argument(help="The study's contract, study.toml.")]
SiteName = Annotated[str, typer.Option(help="The site's name in the contract.")]
DATA_HELP = "The site's records: a .csv or .parquet file, sqlite:PATH or postgresql://..."
STORE_HELP = "Folder for this party's run data; a restart resumes from it."
SERVER_NAME_HELP = "The name that the coordinator's certificate must have."
Data = Annotated[str, typer.Option(help=DATA_HELP)]
Query = Annotated[str | None, typer.Option(help="SQL query that returns the records (databases only).")]
Store = Annotated[Path, typer.Option(help=STORE_HELP)]
Ledger = Annotated[Path | None, typer.Option(help="The site's privacy ledger. Default: the user's own.")]
LogFile = Annotated[
    Path | None, typer.Option(help="Also write log lines to this file. If it is moved away, a new one is begun.")
]
ServerName = Annotated[str, typer.Option(help=SERVER_NAME_HELP)]


def command(app: typer.Typer, name: str) -> Callable[[Callable[..., int | None]], Callable[..., None]]:
    """Register a function as a command. Its result is the exit status; None means success."""

    def register(work: Callable[..., int | None]) -> Callable[..., None]:
        @functools.wraps(work)
        def run(*args: object, **options: object) -> None:
            raise typer.Exit(exit_status(functools.partial(work, *args, **options)))

        return app.command(name)(run)

    return register


def exit_status(work: Callable[[], int | None]) -> int:
    """Run a command and return its exit status. Expected errors are logged as one message, without a traceback."""
    if not logging.getLogger().handlers:
        logging.getLogger().addHandler(_log_handler())
    logger = logging.getLogger("fedpdmc")
    logger.setLevel(logging.INFO)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _log_warning
            return work() or 0
    except FedPDMCError as error:
        logger.error("%s", error)
        return TRY_LATER if of_the_machine(error) else REFUSED
    except OSError as error:
        logger.error(
            "%s. The data in the store is intact. Fix the error (for example, free disk space) and restart.", error
        )
        return TRY_LATER if of_the_machine(error) else REFUSED


def of_the_machine(error: BaseException | None) -> bool:
    """Whether an error comes from the machine (resources, disk, network), not from the command."""
    while error is not None:
        full = isinstance(error, sqlite3.OperationalError) and error.sqlite_errorcode & 0xFF in SQLITE_DISK
        if full or (isinstance(error, OSError) and error.errno in OF_THE_MACHINE):
            return True
        error = error.__cause__
    return False


def print_findings(findings: Iterable["Finding"]) -> list[str]:
    """Print the results of a check, one line each, and return the names of those that failed."""
    failed = []
    for finding in findings:
        say(finding, whole=True)
        failed += [finding.what] if finding.good is False else []
    return failed


class _StandardErrorHandler(logging.StreamHandler):
    """Writes to the current standard error, so that log lines appear above a live progress display."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line."""
        self.stream = sys.stderr
        super().emit(record)


class _WrappingFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """The record's text."""
        return wrapped(super().format(record), terminal_width(sys.stderr))


def log_to(path: Path | None) -> None:
    """Also write log lines to a file, which only this user can read.

    Before each line the file is opened again if it was moved or deleted: a rotating tool needs no signal, and no line is
    lost.
    """
    if path is None:
        return
    try:
        handler = _LogFileHandler(path, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise InputError("log-file", f"{error.strerror}: {path}", "Give a file that can be written.") from error
    handler.setFormatter(logging.Formatter(FULL_LINE))
    logging.getLogger("fedpdmc").addHandler(handler)


class _LogFileHandler(logging.handlers.WatchedFileHandler):
    """A file that is opened again when it was moved away."""

    def _open(self):
        """The file, created for this user only."""
        private = functools.partial(os.open, mode=0o600)
        return open(self.baseFilename, self.mode, encoding=self.encoding, errors=self.errors, opener=private)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line."""
        try:
            super().emit(record)
        except OSError:
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Say on standard error that a line could not be written; the next one is tried again."""
        print(f"a line could not be written to {self.baseFilename}: {sys.exc_info()[1]}", file=sys.stderr)


def _log_handler() -> logging.Handler:
    """Short lines on a terminal; full lines with date, level and logger in a service's log."""
    handler = _StandardErrorHandler()
    if sys.stderr.isatty():
        handler.setFormatter(_WrappingFormatter("%(asctime)s %(message)s", "%H:%M:%S"))
    else:
        handler.setFormatter(logging.Formatter(FULL_LINE))
    return handler


def _log_warning(message, category, *place) -> None:
    """Log a warning without its source line, which means nothing to an operator."""
    logging.getLogger("fedpdmc").warning("%s", message)
