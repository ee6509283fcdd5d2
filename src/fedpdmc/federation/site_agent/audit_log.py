"""A site's store: its audit log and its secrets.

The audit log has every request and answer, append-only, each entry with a hash (seal) of all entries before it. The same
request always gets the answer that is stored in it, even after a crash. An entry is written before its answer is sent. Data
that the process has written survives the process, and an incomplete last entry is removed when the log is opened again.
"""

from __future__ import annotations

import bisect
import contextlib
import enum
import errno
import hashlib
import json
import logging
import math
import os
import platform
import re
import secrets
import struct
import time
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import BinaryIO, NamedTuple

from fedpdmc.errors import InputError, WireError
from fedpdmc.federation import messages
from fedpdmc.federation.masking import new_secret
from fedpdmc.members.site import SEED_BITS
from fedpdmc.results import manifest
from fedpdmc.validation import has_fields, require_posix

# The files of a site's audit log, and how they are read.
#
# The newest entries are in ``audit.log``. When it has grown to `MOST_SEGMENT` bytes it becomes ``audit-000001.log``, which
# never changes again, and a new ``audit.log`` is begun. Seals run through all files as if they were one: each entry's seal
# is the hash of this entry and of all before it, in any file.

TITLE = b"fedpdmc audit log 1\n"
HEAD = struct.Struct("<IBd")
SEAL = 32
FIRST_SEAL = hashlib.sha256(TITLE).digest()  # the value that precedes the first entry's seal in the chain of hashes
MOST_ENTRY = 65 * 2**20  # the largest entry: the longest message and a little more
MOST_SEGMENT = 64 * 2**20  # bytes after which a new file is begun
CURRENT = "audit.log"
DRAFT = "audit.new"
CLOSED = re.compile(r"audit-([0-9]{6})\.log")
SEGMENT = "segment"  # the first note of every file except the first
MOST_NOTE = 4096  # bytes of it
# The fields of notes from which a site's state is restored.
FIELDS = {
    "joined": {"run": bytes, "study": bytes, "site": str},
    "sealed": {"entries": int, "seal": bytes},
    "witnessed": {"entries": int, "seal": bytes, "certificate": str, "signature": bytes},
    "refused request": {"sha256": bytes},
    SEGMENT: {"number": int},
}
LAST_SECOND = 253402300799.0  # the last second that can be shown, in the year 9999


class Kind(enum.IntEnum):
    """The kind of an entry."""

    NOTE = 1
    REQUEST = 2
    ANSWER = 3
    REFUSAL = 4


class LogEntry(NamedTuple):
    """One entry of the log, its seal, and where it begins and ends in the files taken one after the other."""

    kind: Kind
    when: float
    payload: bytes
    seal: bytes
    begin: int
    end: int

    @property
    def note(self) -> dict:
        """The payload of a note."""
        return json.loads(self.payload)


def closed_files(folder: Path) -> list[Path]:
    """The files that are complete, in order.

    Raises `InputError`: one of them is missing.
    """
    found = sorted(path for path in folder.glob("audit-*.log") if CLOSED.fullmatch(path.name))
    for number, path in enumerate(found, 1):
        if path.name != closed_name(number):
            raise missing(folder, number)
    return found


def missing(folder: Path, number: int) -> InputError:
    """The error for a complete file that is not there."""
    return InputError("store", f"{folder / closed_name(number)} missing", "Restore it from a copy.")


def number(file: BinaryIO) -> int:
    """Which file of the log this is, counted from one; it is left at its beginning."""
    head = file.read(len(TITLE) + HEAD.size)[len(TITLE) :]
    length = HEAD.unpack(head)[0] if len(head) == HEAD.size else 0
    try:
        note = json.loads(file.read(min(length, MOST_NOTE)))
    except (ValueError, RecursionError):
        note = {}
    file.seek(0)
    follows = has_fields(note, {"event": str, "number": int}) and note["event"] == SEGMENT and note["number"] > 1
    return note["number"] if follows else 1


def closed_name(number: int) -> str:
    """The name of the n-th file once it is complete, counted from one."""
    return f"audit-{number:06d}.log"


def read_log(folder: str | Path) -> Iterator[LogEntry]:
    """Every complete entry of all files, after checking its seal. Another process may write meanwhile."""
    path = (folder := Path(folder)) / CURRENT
    try:
        last = open(path, "rb")
    except OSError as error:
        raise InputError("store", f"{error.strerror}: {path}", "Give the folder of a site's audit log.") from error
    with last:
        base, seal, before = 0, FIRST_SEAL, number(last) - 1
        closed_ones = closed_files(folder)
        if len(closed_ones) < before:
            raise missing(folder, len(closed_ones) + 1)
        # Later ones were completed after the last one was opened here.
        for closed in closed_ones[:before]:
            with open(closed, "rb") as file:
                for entry in _read(closed, file, base, seal, complete=True):
                    yield entry
                    seal = entry.seal
            base += closed.stat().st_size
        yield from _read(path, last, base, seal)


def _read(path: Path, file: BinaryIO, base: int, seal: bytes, complete: bool = False) -> Iterator[LogEntry]:
    """The entries of one file. ``base`` is the size of the files before it, and ``seal`` their last seal."""
    if file.read(len(TITLE)) != TITLE:
        raise InputError("store", f"{path}, which is not an audit log", "Give the folder of a site's audit log.")
    place, size = len(TITLE), os.fstat(file.fileno()).st_size
    while len(head := file.read(HEAD.size)) == HEAD.size:
        length, kind, when = HEAD.unpack(head)
        if length > MOST_ENTRY:
            raise altered(path, place)
        rest = file.read(length + SEAL)
        if len(rest) < length + SEAL:
            break
        seal = hashlib.sha256(seal + head + rest[:length]).digest()
        if seal != rest[length:] or not _valid(kind, when, rest[:length]):
            raise altered(path, place)
        begin, place = place, place + HEAD.size + length + SEAL
        yield LogEntry(Kind(kind), when, rest[:length], seal, base + begin, base + place)
    if complete and place < size:
        raise altered(path, place)


def _valid(kind: int, when: float, payload: bytes) -> bool:
    """Whether an entry can be used: correct seals are not enough."""
    if kind not in set(Kind) or not (math.isfinite(when) and 0 <= when <= LAST_SECOND):
        return False
    if kind != Kind.NOTE:
        return True
    try:
        note = json.loads(payload)
    except (ValueError, RecursionError):
        return False
    return has_fields(note, {"event": str}) and has_fields(note, FIELDS.get(note["event"], {}))


def altered(path: Path, offset: int) -> InputError:
    """The error for a file that is not as it was written."""
    return InputError(
        "store",
        f"{path}, altered at byte {offset}",
        "Restore the log from a copy. Answers after this byte cannot be trusted.",
    )


with contextlib.suppress(ImportError):
    # Not on Windows, where `require_posix` raises an error.
    import fcntl

logger = logging.getLogger("fedpdmc.site")
OFFSET = struct.Struct("<Q")
LEAST_FREE = 256 * 2**20  # bytes that the log leaves free on its disk
STRIDE = 16 * 2**20  # bytes written between two checks of that


class AuditLog:
    """The log of one site in one run, in its own folder.

    ``folder``: created if it does not exist. Only one process at a time can open it. Raises `InputError`: the log was
    altered, or another process has it open.
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
        self._seal, self._end, self.answers, self._count = FIRST_SEAL, len(TITLE), 0, 0
        # After a failure to begin a new file, the size at which it is tried again.
        self._most = MOST_SEGMENT
        try:
            self._recover()
        except BaseException:
            self.close()
            raise

    def _open(self) -> int:
        """The current file, locked."""
        if not self.path.exists() and closed_files(self.folder):
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
        closed = closed_files(self.folder)
        with open(self.path, "rb") as file:
            before = number(file) - 1
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
        for entry in read_log(self.folder):
            if entry.kind is Kind.ANSWER:
                self._index_answer(entry.begin)
            self._end, self._seal, self._count = entry.end, entry.seal, self._count + 1
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
            self._most += MOST_SEGMENT
            return
        with contextlib.suppress(OSError):
            os.chmod(closed, 0o400)
        os.close(self._file)
        self._file, self._most = file, MOST_SEGMENT
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

    def entries(self) -> Iterator[LogEntry]:
        """All entries in order, after checking their seals."""
        return read_log(self.folder)

    def close(self) -> None:
        """Close the log."""
        os.fsync(self._file)
        os.close(self._index)
        os.close(self._file)


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


# The software and machine that computed a site's answers, as its log records them: others may differ in the last bits.

SOFTWARE_EVENT = "software"
PACKAGES = ("fedpdmc", "jax", "jaxlib", "numpy")
UNKNOWN = "an unknown version"


def software_here() -> dict[str, str]:
    """The versions that are installed here, and the machine."""
    versions = {name: metadata.version(name) for name in PACKAGES}
    machine = {"machine": platform.machine(), "cores": str(os.cpu_count())}
    return versions | {"python": platform.python_version()} | machine


def software_of(entry: LogEntry) -> dict[str, str] | None:
    """The software that an entry of a log records, if it is such an entry."""
    if entry.kind is not Kind.NOTE or entry.note["event"] != SOFTWARE_EVENT:
        return None
    return {key: str(value) for key, value in entry.note.items() if key != "event"}


def software_differences(entries: Iterable[LogEntry]) -> list[str]:
    """Differences between the software that wrote a log and the current one."""
    here, found = software_here(), [one for entry in entries if (one := software_of(entry)) is not None]
    words = [
        f"{name} {one.get(name, UNKNOWN)} (here {value})"
        for one in found
        for name, value in here.items()
        if one.get(name, UNKNOWN) != value
    ]
    return list(dict.fromkeys(words))


def read_logged(data: bytes, by: dict[str, str] | None) -> messages.Message:
    """A message from a log, which the software ``by`` has written."""
    try:
        if (wire := messages.version_of(data)) < messages.MEANING:
            raise messages.OtherVersion(wire)
        return messages.decode(data)
    except WireError as error:
        version = (by or {}).get("fedpdmc", UNKNOWN)
        remedy = "Continue with that version."
        raise InputError("store", f"a log of fedpdmc {version}: {error.found}", remedy) from error


# A site's secrets: its seed, its key for secure sums, and what its seed in a run's joint randomness depends on besides.

SEED, SUM_KEY, OPENING = "seed", "sum.key", "opening.key"
SECRET_BYTES = 32
MOST_DIGITS = len(str(2**SEED_BITS))


def site_seed(folder: str | Path, seed: int | None) -> int:
    """The seed in the site's store. A new one is the given one, or else from the operating system."""
    path = refuse_links(folder) / SEED
    if path.exists():
        text = path.read_bytes()
        if not text.isdigit() or len(text) > MOST_DIGITS:
            raise InputError("store", f"{path}, which is not a seed", "Restore it from a copy.")
        stored = int(text)
        if seed is not None and seed != stored:
            raise InputError("seed", "a different one than the seed in this store", "Leave it out, or use a new store.")
        return stored
    chosen = secrets.randbits(SEED_BITS) if seed is None else seed
    _write_secret(path, str(chosen).encode())
    return chosen


def sum_secret(folder: str | Path) -> bytes:
    """The site's secret X25519 key in this run, from the operating system."""
    path = refuse_links(folder) / SUM_KEY
    if not path.exists():
        _write_secret(path, new_secret())
    found = path.read_bytes()
    if len(found) != messages.KEY_BYTES:
        raise InputError("store", f"{path}, which is not a key", "Restore it from a copy.")
    return found


def opening_secret(folder: str | Path, new: bool, asked: bytes) -> bytes:
    """Random bytes that belong to the opening with this hash, which the same opening gets again after the site was killed.

    For another opening new ones are made if ``new``, else there are none.
    """
    path = refuse_links(folder) / OPENING
    kept = path.read_bytes() if path.exists() else b""
    if kept[:-SECRET_BYTES] == asked:
        return kept[-SECRET_BYTES:]
    if not new:
        return b""
    made = secrets.token_bytes(SECRET_BYTES)
    _write_secret(path, asked + made)
    return made


def refuse_links(folder: str | Path) -> Path:
    """The store, if none of its files is a symbolic link: secrets and logs must be where they seem to be."""
    for path in Path(folder).glob("*"):
        if path.is_symlink():
            raise InputError("store", f"{path}, a symbolic link", "Put the file itself there: links are not followed.")
    return Path(folder)


def _write_secret(path: Path, content: bytes) -> None:
    """Write a file completely or not at all: an incomplete secret would be a different secret."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    manifest.replace(path, content, 0o600)
