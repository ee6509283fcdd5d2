"""A site's audit log: every request and answer, append-only, each entry with a hash (seal) of all entries before it.

The log also stores the site's answers: the same request always gets the same answer, even after a crash. An entry is
written before its answer is sent. Data that the process has written survives the process, and an incomplete last entry is
removed when the log is opened again.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import hashlib
import json
import logging
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path

from fedpdmc.errors import InputError
from fedpdmc.federation.site_agent import audit_files
from fedpdmc.federation.site_agent.audit_files import CURRENT, DRAFT, HEAD, SEGMENT, TITLE, Entry, Kind, closed_name
from fedpdmc.validation import require_posix

with contextlib.suppress(ImportError):
    # Not on Windows, where `require_posix` raises an error.
    import fcntl

logger = logging.getLogger("fedpdmc.site")
OFFSET = struct.Struct("<Q")
# Bytes that the log leaves free on its disk, and bytes written between two checks.
LEAST_FREE, STRIDE = 256 * 2**20, 16 * 2**20


class AuditLog:
    """The log of one site in one run, in its own folder.

    Parameters
    ----------
    folder : path
        Created if it does not exist. Only one process at a time can open it.

    Raises
    ------
    InputError
        The log was altered, or another process has it open.
    """

    def __init__(self, folder: str | Path):
        require_posix("A site's log")
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.path = self.folder / CURRENT
        self._file = self._open()
        # The offset of the n-th answer, on disk, so that long runs need no memory for it.
        self._index = os.open(self.folder / "audit.index", os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        self._unchecked, self._torn = STRIDE, False
        # Where each file begins, the files taken one after the other; the last one is written.
        self._bases = [0]
        self._seal, self._end, self.answers, self._count = audit_files.first_seal(), len(TITLE), 0, 0
        # After a failure to begin a new file, the size at which it is tried again.
        self._most = audit_files.MOST_SEGMENT
        try:
            self._recover()
        except BaseException:
            self.close()
            raise

    def _open(self) -> int:
        """The current file, locked."""
        if not self.path.exists() and audit_files.closed_files(self.folder):
            raise InputError("store", f"{self.path} missing", "Restore it from a copy.")
        file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(file), os.stat(self.path)):
                raise BlockingIOError(errno.EAGAIN, "another process has begun a new file")
        except OSError as error:
            os.close(file)
            raise InputError("store", f"{self.folder}, which is in use", "Stop the other process first.") from error
        return file

    def _recover(self) -> None:
        closed = audit_files.closed_files(self.folder)
        with open(self.path, "rb") as file:
            before = audit_files.number(file) - 1
        if len(closed) > before and os.path.samestat(os.stat(closed[-1]), os.fstat(self._file)):
            # Killed while a new file was begun: it was never used.
            os.unlink(closed.pop())
        if len(closed) > before:
            found = f"{closed[before]} and {self.path}, two copies of the same file"
            raise InputError("store", found, "Keep the longer one, as audit.log.")
        (self.folder / DRAFT).unlink(missing_ok=True)
        for path in closed:
            self._bases.append(self._bases[-1] + path.stat().st_size)
        self._end += self._bases[-1]
        size = os.fstat(self._file).st_size
        if size < len(TITLE) and not closed:
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, TITLE, 0)
            return
        for begin, end, seal, entry in audit_files.entries(self.folder):
            if entry.kind is Kind.ANSWER:
                self._index_answer(begin)
            self._end, self._seal, self._count = end, seal, self._count + 1
        if (rest := self._bases[-1] + size - self._end) > 0:
            os.ftruncate(self._file, self._end - self._bases[-1])
            self.note("torn", bytes=rest)

    def _index_answer(self, offset: int) -> None:
        os.pwrite(self._index, OFFSET.pack(offset), OFFSET.size * self.answers)
        self.answers += 1

    def append(self, kind: Kind, payload: bytes) -> None:
        """Append one entry, completely or not at all."""
        data, seal = _sealed(self._seal, kind, payload)
        self._check_free_space(len(data))
        if self._end - self._bases[-1] >= self._most and not self._torn:
            self._begin_file()
            data, seal = _sealed(self._seal, kind, payload)
        begin = self._end
        place = begin - self._bases[-1]
        if self._torn:
            # A shorter entry would leave the rest of the torn one behind it.
            os.ftruncate(self._file, place)
            self._torn = False
        try:
            _write(self._file, data, place)
            if kind is Kind.ANSWER:
                self._index_answer(begin)
        except OSError:
            self._torn = True
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, place)
                self._torn = False
            raise
        self._seal, self._end, self._count = seal, begin + len(data), self._count + 1

    def _begin_file(self) -> None:
        """Complete the current file and begin a new one, or continue with the current one if that fails.

        The new file gets the name of the current one in one step, after that one has a second name: whenever the process is
        killed, ``audit.log`` is there, and either it has two names or the new file is in use.
        """
        number, draft = len(self._bases), self.folder / DRAFT
        file, closed = -1, self.folder / closed_name(number)
        try:
            os.fsync(self._file)
            data, seal = _sealed(self._seal, Kind.NOTE, _note(SEGMENT, number=number + 1))
            file = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
            _write(file, TITLE + data, 0)
            os.fsync(file)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.link(self.path, closed)
            os.replace(draft, self.path)
        except OSError as error:
            logger.warning("a new file of the audit log cannot be begun (%s): the current one is continued", error)
            with contextlib.suppress(OSError):
                if closed.exists() and os.path.samestat(os.stat(closed), os.fstat(self._file)):
                    os.unlink(closed)
            if file >= 0:
                os.close(file)
            self._most += audit_files.MOST_SEGMENT
            return
        with contextlib.suppress(OSError):
            os.chmod(closed, 0o400)
        os.close(self._file)
        self._file, self._most = file, audit_files.MOST_SEGMENT
        self._bases.append(self._end)
        self._seal, self._end, self._count = seal, self._end + len(TITLE) + len(data), self._count + 1

    @property
    def head(self) -> tuple[int, bytes]:
        """The number of entries, and the seal of the last one."""
        return self._count, self._seal

    def _check_free_space(self, size: int) -> None:
        """Raise `OSError` if the disk would become full."""
        self._unchecked += size
        if self._unchecked > STRIDE:
            disk = os.fstatvfs(self._file)
            if disk.f_bavail * disk.f_frsize < LEAST_FREE + size:
                raise OSError(errno.ENOSPC, f"less than {LEAST_FREE >> 20} MiB would be left", str(self.path))
            self._unchecked = 0

    def note(self, event: str, **details) -> None:
        """Append an entry that is neither request nor answer."""
        self.append(Kind.NOTE, _note(event, **details))

    def read_answer(self, position: int) -> bytes:
        """The answer at a position, counted from zero, read from disk."""
        if not 0 <= position < self.answers:
            raise IndexError(position)
        (offset,) = OFFSET.unpack(os.pread(self._index, OFFSET.size, OFFSET.size * position))
        number = bisect.bisect_right(self._bases, offset)
        if number == len(self._bases):
            return _payload(self._file, offset - self._bases[-1])
        file = os.open(self.folder / closed_name(number), os.O_RDONLY)
        try:
            return _payload(file, offset - self._bases[number - 1])
        finally:
            os.close(file)

    def entries(self) -> Iterator[Entry]:
        """All entries in order, after checking their seals."""
        return read_log(self.folder)

    def close(self) -> None:
        """Close the log."""
        os.fsync(self._file)
        os.close(self._index)
        os.close(self._file)


def read_log(folder: str | Path) -> Iterator[Entry]:
    """All entries of a log, which may be open in another process, after checking their seals."""
    return (entry for entry, _ in sealed_log(folder))


def sealed_log(folder: str | Path) -> Iterator[tuple[Entry, bytes]]:
    """All entries, each with its seal: the hash of this entry and all before it."""
    return ((placed.entry, placed.seal) for placed in audit_files.entries(Path(folder)))


def _note(event: str, **details) -> bytes:
    return json.dumps({"event": event, **details}).encode()


def _sealed(before: bytes, kind: Kind, payload: bytes) -> tuple[bytes, bytes]:
    """An entry as it is written, and its seal."""
    head = HEAD.pack(len(payload), kind, time.time())
    seal = hashlib.sha256(before + head + payload).digest()
    return head + payload + seal, seal


def _write(file: int, data: bytes, place: int) -> None:
    written = os.pwrite(file, data, place)
    while written < len(data):
        written += os.pwrite(file, data[written:], place + written)


def _payload(file: int, place: int) -> bytes:
    length, _, _ = HEAD.unpack(os.pread(file, HEAD.size, place))
    return os.pread(file, length, place + HEAD.size)
