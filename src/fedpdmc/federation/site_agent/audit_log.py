"""A site's audit log: every request and answer, append-only, each entry sealed with the hash of all before it.

It is also the site's memory. The answer to a request is looked up here, so that the same request always gets the same
answer, after a crash too. An entry is written before its answer leaves the site; what the process has written outlives
it, and a torn last entry is cut off when the log is opened again.
"""

from __future__ import annotations

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
# No entry is longer than the longest message and a little.
MOST_ENTRY = 65 * 2**20
# The log never takes the last of its disk; bytes after which the free ones are looked at again.
LEAST_FREE, STRIDE = 256 * 2**20, 16 * 2**20


class Kind(enum.IntEnum):
    """What an entry is."""

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


class Journal:
    """The log of one site in one run, in a folder of its own.

    Parameters
    ----------
    folder : path
        Made if it is not there. Only one process at a time can have it open.

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
        # Where the n-th answer is, on disk: a run of any length needs no memory for it.
        self._index = os.open(self.folder / "audit.index", os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        self._unlooked = STRIDE
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
                self._point(self._end)
            self._end, self._seal, self._count = end, seal, self._count + 1
        if self._end < size:
            os.ftruncate(self._file, self._end)
            self.note("torn", bytes=size - self._end)

    def _point(self, offset: int) -> None:
        os.pwrite(self._index, OFFSET.pack(offset), OFFSET.size * self.answers)
        self.answers += 1

    def append(self, kind: Kind, payload: bytes) -> None:
        """Write one entry, whole or not at all."""
        head = HEAD.pack(len(payload), kind, time.time())
        seal = hashlib.sha256(self._seal + head + payload).digest()
        begin = self._end
        data = head + payload + seal
        self._leave_room(len(data))
        try:
            written = os.pwrite(self._file, data, begin)
            while written < len(data):
                written += os.pwrite(self._file, data[written:], begin + written)
            if kind is Kind.ANSWER:
                self._point(begin)
        except OSError:
            os.ftruncate(self._file, begin)
            raise
        self._seal, self._end, self._count = seal, begin + len(data), self._count + 1

    @property
    def head(self) -> tuple[int, bytes]:
        """How many entries there are, and the seal of the last one."""
        return self._count, self._seal

    def _leave_room(self, size: int) -> None:
        """Raise `OSError` for what would take the last of the disk."""
        self._unlooked += size
        if self._unlooked > STRIDE:
            disk = os.fstatvfs(self._file)
            if disk.f_bavail * disk.f_frsize < LEAST_FREE + size:
                raise OSError(errno.ENOSPC, f"less than {LEAST_FREE >> 20} MiB would be left", str(self.path))
            self._unlooked = 0

    def note(self, event: str, **details) -> None:
        """Write down something that is neither request nor answer."""
        self.append(Kind.NOTE, json.dumps({"event": event, **details}).encode())

    def answer(self, position: int) -> bytes:
        """The answer at a position, counted from zero."""
        if not 0 <= position < self.answers:
            raise IndexError(position)
        (offset,) = OFFSET.unpack(os.pread(self._index, OFFSET.size, OFFSET.size * position))
        length, _, _ = HEAD.unpack(os.pread(self._file, HEAD.size, offset))
        return os.pread(self._file, length, offset + HEAD.size)

    def entries(self) -> Iterator[Entry]:
        """All entries, in order, their seals checked."""
        return (entry for _, _, entry in _entries(self.path))

    def close(self) -> None:
        """Let go of the folder."""
        os.fsync(self._file)
        os.close(self._index)
        os.close(self._file)


def read_log(folder: str | Path) -> Iterator[Entry]:
    """All entries of a log that nobody need have open, their seals checked."""
    return (entry for entry, _ in sealed_log(folder))


def sealed_log(folder: str | Path) -> Iterator[tuple[Entry, bytes]]:
    """All entries, each with its seal: the hash of itself and all before it."""
    return ((entry, seal) for _, seal, entry in _entries(Path(folder) / "audit.log"))


def _entries(path: Path) -> Iterator[tuple[int, bytes, Entry]]:
    """Every whole entry with where it ends and its seal; a torn last one is left out."""
    try:
        file = open(path, "rb")
    except OSError as error:
        raise InputError("store", f"{error.strerror}: {path}", "Give the folder of a site's audit log.") from error
    with file:
        if file.read(len(TITLE)) != TITLE:
            raise InputError("store", f"{path}, which is no audit log", "Give the folder of a site's audit log.")
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
        "Restore the log from a copy; answers after that byte are not safe.",
    )
