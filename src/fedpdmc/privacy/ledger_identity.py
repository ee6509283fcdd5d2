"""The file of a ledger: created once, locked by one process, distinguished from copies and older versions."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import sqlite3
from collections.abc import Sequence
from pathlib import Path

from fedpdmc.errors import InputError, LedgerError
from fedpdmc.privacy.ledger_entries import COLUMNS, FORMAT, Entry, read

SCHEMA = (
    "CREATE TABLE meta (format INTEGER NOT NULL, secret BLOB NOT NULL, file INTEGER NOT NULL)",
    f"CREATE TABLE entries (seq INTEGER PRIMARY KEY, {', '.join(f'{name} NOT NULL' for name in COLUMNS)}, "
    "hash BLOB NOT NULL, UNIQUE (dataset, study, run, kind, round))",
    "CREATE TRIGGER no_update BEFORE UPDATE ON entries BEGIN SELECT RAISE(ABORT, 'entries are never changed'); END",
    "CREATE TRIGGER no_delete BEFORE DELETE ON entries BEGIN SELECT RAISE(ABORT, 'entries are never deleted'); END",
)


def take_lock(path: Path) -> sqlite3.Connection:
    """An exclusive lock on a file next to the ledger, which the system releases when the process ends."""
    lock = sqlite3.connect(f"{path}.lock", isolation_level=None, timeout=0.0, check_same_thread=False)
    try:
        lock.execute("BEGIN EXCLUSIVE")
    except sqlite3.Error:
        lock.close()
        raise
    return lock


def close(*connections: sqlite3.Connection) -> None:
    """Close them all."""
    for connection in connections:
        connection.close()


def connect(path: Path, timeout: float = 0.0) -> sqlite3.Connection:
    """A connection whose commits are durable when they return, including the directory entry of the journal."""
    db = sqlite3.connect(path, isolation_level=None, timeout=timeout, check_same_thread=False)
    for pragma in ("journal_mode=DELETE", "synchronous=EXTRA", "fullfsync=ON"):
        db.execute(f"PRAGMA {pragma}")
    return db


def create_ledger(path: str | os.PathLike[str]) -> Path:
    """Create an empty ledger. Do this once for each data set.

    Parameters
    ----------
    path : path
        The new file; it must not exist.

    Returns
    -------
    Path
        For ``Budget(ledger=...)``.

    Raises
    ------
    InputError
        The file exists.
    """
    where = Path(path).resolve()
    where.parent.mkdir(parents=True, exist_ok=True)
    if not where.exists() and (known := _read_head(where)) is not None:
        raise InputError(
            "ledger",
            f"{where}, where a ledger of {known[1]} entries was",
            "Restore that ledger: a new one is a second budget for the same records. Only if it is for other records: "
            f"remove {head_path(where)}.",
        )
    try:
        os.close(os.open(where, os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError as error:
        raise InputError(
            "ledger", f"{where}, which exists", "A ledger is created once: use it as it is, or give another path."
        ) from error
    db = connect(where)
    db.execute("BEGIN EXCLUSIVE")
    for statement in SCHEMA:
        db.execute(statement)
    db.execute("INSERT INTO meta VALUES (?, ?, ?)", (FORMAT, secrets.token_bytes(32), os.stat(where).st_ino))
    db.execute("COMMIT")
    db.close()
    return where


def adopt_ledger(path: str | os.PathLike[str]) -> None:
    """Accept a ledger at its present place after it was moved to another disk. Never adopt a copy of one in use."""
    where = Path(path).resolve()
    read(where)
    lock = take_lock(where)
    db = connect(where)
    try:
        db.execute("UPDATE meta SET file = ?", (os.stat(where).st_ino,))
        head_path(where).unlink(missing_ok=True)
    finally:
        close(db, lock)


def check_file(path: Path, file: int) -> None:
    """Refuse copies and hard links: a charge to one copy would be missing in the other."""
    found = os.stat(path)
    if found.st_nlink != 1:
        raise LedgerError(
            f"{path} has {found.st_nlink} names (hard links). Leave one: the lock protects one name only."
        )
    if found.st_ino != file:
        raise LedgerError(
            f"{path} is a copy of a ledger: charges to it would be missing in the original. Use the original. Only if it "
            f"is lost, and nothing was charged to it after this copy was made: `fedpdmc ledger adopt {path}`."
        )


def head_path(path: Path) -> Path:
    """The file next to the ledger with the number and hash of the last entry."""
    return path.with_name(path.name + ".head")


def write_head(path: Path, secret: bytes, seq: int, digest: bytes) -> None:
    """Record the last entry. The ledger is durable before this, so a crash leaves an older record, never a newer one."""
    new = path.with_name(path.name + ".head.new")
    new.write_text(json.dumps([hashlib.sha256(secret).hexdigest(), seq, digest.hex()]))
    os.replace(new, head_path(path))


def check_head(path: Path, secret: bytes, entries: Sequence[Entry]) -> None:
    """Refuse a ledger without the entry that was recorded as its last: it was replaced by an older version."""
    known = _read_head(path)
    if known is None:
        return
    identity, seq, digest = known
    same = identity == hashlib.sha256(secret).hexdigest()
    if not same or len(entries) < seq or (seq > 0 and entries[seq - 1].hash.hex() != digest):
        found = f"{len(entries)} entries where it had {seq}" if same else "another ledger"
        raise LedgerError(
            f"{path} is not the ledger that was used here last ({found}): it was replaced by an older copy or another "
            "file, and the charges since then are missing. Restore the newer file. Only if it is lost, and nothing was "
            f"charged to it after this copy was made: `fedpdmc ledger adopt {path}`."
        )


def _read_head(path: Path) -> tuple[str, int, str] | None:
    """Identity, number and hash of the recorded last entry; None if there is no readable record."""
    try:
        identity, seq, digest = json.loads(head_path(path).read_text())
        return str(identity), int(seq), str(digest)
    except (OSError, ValueError, TypeError):
        return None
