"""The files of a site's audit log, and how they are read.

The newest entries are in ``audit.log``. When it has grown to `MOST_SEGMENT` bytes it becomes ``audit-000001.log``, which
never changes again, and a new ``audit.log`` is begun. Seals run through all files as if they were one: each entry's seal is
the hash of this entry and of all before it, in any file.
"""

from __future__ import annotations

import enum
import hashlib
import json
import math
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from fedpdmc.errors import InputError
from fedpdmc.validation import has_fields

TITLE = b"fedpdmc audit log 1\n"
HEAD = struct.Struct("<IBd")
SEAL = 32
# The largest entry: the longest message and a little more.
MOST_ENTRY = 65 * 2**20
# Bytes after which a new file is begun.
MOST_SEGMENT = 64 * 2**20
CURRENT, DRAFT = "audit.log", "audit.new"
CLOSED = re.compile(r"audit-([0-9]{6})\.log")
# The first note of every file except the first.
SEGMENT, MOST_NOTE = "segment", 4096
# The fields of notes from which a site's state is restored.
FIELDS = {
    "joined": {"run": bytes, "study": bytes, "site": str},
    "sealed": {"entries": int, "seal": bytes},
    "witnessed": {"entries": int, "seal": bytes, "certificate": str, "signature": bytes},
    "refused request": {"sha256": bytes},
    SEGMENT: {"number": int},
}
# The last second that can be shown, in the year 9999.
LAST_SECOND = 253402300799.0


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


class Placed(NamedTuple):
    """An entry, its seal, and where it begins and ends in the files taken one after the other."""

    begin: int
    end: int
    seal: bytes
    entry: Entry


def first_seal() -> bytes:
    """The value that precedes the first entry's seal in the chain of hashes."""
    return hashlib.sha256(TITLE).digest()


def closed_files(folder: Path) -> list[Path]:
    """The files that are complete, in order.

    Raises
    ------
    InputError
        One of them is missing.
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


def entries(folder: Path) -> Iterator[Placed]:
    """Every complete entry of all files. An incomplete last entry is skipped. Another process may write meanwhile."""
    path = folder / CURRENT
    try:
        last = open(path, "rb")
    except OSError as error:
        raise InputError("store", f"{error.strerror}: {path}", "Give the folder of a site's audit log.") from error
    with last:
        base, seal, before = 0, first_seal(), number(last) - 1
        closed_ones = closed_files(folder)
        if len(closed_ones) < before:
            raise missing(folder, len(closed_ones) + 1)
        # Later ones were completed after the last one was opened here.
        for closed in closed_ones[:before]:
            with open(closed, "rb") as file:
                for placed in _read(closed, file, base, seal, complete=True):
                    yield placed
                    seal = placed.seal
            base += closed.stat().st_size
        yield from _read(path, last, base, seal)


def _read(path: Path, file: BinaryIO, base: int, seal: bytes, complete: bool = False) -> Iterator[Placed]:
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
        yield Placed(base + begin, base + place, seal, Entry(Kind(kind), when, rest[:length]))
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
