"""A site's audit log: every request and answer, append-only, each entry with a hash (seal) of all entries before it.

The log also stores the site's answers: the same request always gets the same answer, also after a crash. An entry is
written before its answer is sent. Data that the process has written survives the process, and an incomplete last entry is
removed when the log is opened again.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import fcntl
import hashlib
import json
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fedpdmc.errors import InputError

TITLE = b"fedpdmc audit log 1\n"
HEAD = struct.Struct("<IBd")
SEAL = 32
OFFSET = struct.Struct("<Q")
# The largest entry: the longest message and a little.
MOST_ENTRY = 65 * 2**20
# Bytes that the log leaves free on its disk, and bytes written between two checks.
LEAST_FREE, STRIDE = 256 * 2**20, 16 * 2**20


class Kind(enum.IntEnum):
    """The kind of an entry."""

    NOTE = 1
    REQUEST = 2
    ANSWER = 3
    REFUSAL = 4


class Entry(NamedTuple):
    """One entry of the log."""

    kind: Kind
    when: float
    payload: bytes

    @property
    def note(self) -> dict:
        """The payload of a note."""
        return json.loads(self.payload)


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
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.path = self.folder / "audit.log"
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._file)
            raise InputError("store", f"{self.folder}, which is in use", "Stop the other process first.") from error
        # The offset of the n-th answer, on disk, so that long runs need no memory for it.
        self._index = os.open(self.folder / "audit.index", os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        self._unchecked, self._torn = STRIDE, False
        self._seal, self._end, self.answers, self._count = hashlib.sha256(TITLE).digest(), len(TITLE), 0, 0
        try:
            self._recover()
        except BaseException:
            self.close()
            raise

    def _recover(self) -> None:
        size = os.fstat(self._file).st_size
        if size < len(TITLE):
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, TITLE, 0)
            return
        for end, seal, entry in _entries(self.path):
            if entry.kind is Kind.ANSWER:
                self._index_answer(self._end)
            self._end, self._seal, self._count = end, seal, self._count + 1
        if self._end < size:
            os.ftruncate(self._file, self._end)
            self.note("torn", bytes=size - self._end)

    def _index_answer(self, offset: int) -> None:
        os.pwrite(self._index, OFFSET.pack(offset), OFFSET.size * self.answers)
        self.answers += 1

    def append(self, kind: Kind, payload: bytes) -> None:
        """Append one entry, completely or not at all."""
        head = HEAD.pack(len(payload), kind, time.time())
        seal = hashlib.sha256(self._seal + head + payload).digest()
        begin = self._end
        data = head + payload + seal
        self._check_free_space(len(data))
        if self._torn:
            # A shorter entry would leave the rest of the torn one behind it.
            os.ftruncate(self._file, begin)
            self._torn = False
        try:
            written = os.pwrite(self._file, data, begin)
            while written < len(data):
                written += os.pwrite(self._file, data[written:], begin + written)
            if kind is Kind.ANSWER:
                self._index_answer(begin)
        except OSError:
            self._torn = True
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, begin)
                self._torn = False
            raise
        self._seal, self._end, self._count = seal, begin + len(data), self._count + 1

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
        self.append(Kind.NOTE, json.dumps({"event": event, **details}).encode())

    def read_answer(self, position: int) -> bytes:
        """The answer at a position, counted from zero, read from disk."""
        if not 0 <= position < self.answers:
            raise IndexError(position)
        (offset,) = OFFSET.unpack(os.pread(self._index, OFFSET.size, OFFSET.size * position))
        length, _, _ = HEAD.unpack(os.pread(self._file, HEAD.size, offset))
        return os.pread(self._file, length, offset + HEAD.size)

    def entries(self) -> Iterator[Entry]:
        """All entries in order, after checking their seals."""
        return (entry for _, _, entry in _entries(self.path))

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
    return ((entry, seal) for _, seal, entry in _entries(Path(folder) / "audit.log"))


def _entries(path: Path) -> Iterator[tuple[int, bytes, Entry]]:
    """Every complete entry with its end offset and its seal. An incomplete last entry is skipped."""
    try:
        file = open(path, "rb")
    except OSError as error:
        raise InputError("store", f"{error.strerror}: {path}", "Give the folder of a site's audit log.") from error
    with file:
        if file.read(len(TITLE)) != TITLE:
            raise InputError("store", f"{path}, which is not an audit log", "Give the folder of a site's audit log.")
        end, seal = len(TITLE), hashlib.sha256(TITLE).digest()
        while len(head := file.read(HEAD.size)) == HEAD.size:
            length, kind, when = HEAD.unpack(head)
            if length > MOST_ENTRY:
                raise _altered(path, end)
            rest = file.read(length + SEAL)
            if len(rest) < length + SEAL:
                return
            seal = hashlib.sha256(seal + head + rest[:length]).digest()
            if seal != rest[length:]:
                raise _altered(path, end)
            end += HEAD.size + length + SEAL
            yield end, seal, Entry(Kind(kind), when, rest[:length])


def _altered(path: Path, offset: int) -> InputError:
    return InputError(
        "store",
        f"{path}, altered at byte {offset}",
        "Restore the log from a copy. Answers after this byte cannot be trusted.",
    )
