"""The entries of a ledger (requests, replies and accounts), chained by hashes, and their checks on reading.

It needs neither JAX nor NumPy.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sqlite3
from pathlib import Path
from typing import Any, NamedTuple

from fedpdmc.errors import InputError, LedgerError

FORMAT = 2
# Bounds on privacy loss that an account can use.
BOUNDS = ("renyi", "gaussian", "tail")
# Suffix of the kind of an entry that reserves the cost of a reply.
RESERVED = " reserved"
DAMAGED = "it does not have the terms of an account. Restore an intact copy."
# The reply if the computation failed at the site.
FAULT = b"fault"
COLUMNS = (
    "dataset", "study", "run", "kind", "round", "request", "reply", "exposure", "cost", "spent", "time", "detail",
)  # fmt: skip


class Request(NamedTuple):
    """A request to a site: its account, run and round, and the hash of its content."""

    dataset: str
    study: str
    run: str
    kind: str
    round: int
    hash: bytes


class Reply(NamedTuple):
    """A site's reply: the bytes, their observed time, and their Rényi cost at the account's order."""

    content: bytes
    exposure: float
    cost: float


class Account(NamedTuple):
    """The terms of a data set's account, fixed when it is first used.

    ``bound`` is one of `BOUNDS`; `fedpdmc.privacy.account_bounds` computes the limit from it.
    """

    dataset: str
    epsilon: float
    delta: float
    neighbours: str
    alpha: float
    limit: float
    bound: str = "renyi"


class Entry(NamedTuple):
    """One line of the ledger."""

    seq: int
    dataset: str
    study: str
    run: str
    kind: str
    round: int
    request: bytes
    reply: bytes
    exposure: float
    cost: float
    spent: float
    time: float
    detail: str
    hash: bytes


def added(spent: float, cost: float) -> float:
    """The total after a charge, rounded up, so that a small charge is never lost in a large total."""
    return math.nextafter(spent + cost, math.inf) if cost > 0 else spent


def settled(spent: float, reserved: float, cost: float) -> float:
    """The total after a reservation in it is replaced by the reply's actual cost, rounded up."""
    if cost == reserved:
        return spent
    return added(max(math.nextafter(spent - reserved, math.inf), 0.0) if reserved else spent, cost)


def explained(path: Path, doing: str, error: Exception) -> LedgerError:
    """The error for a failed operation on a ledger's file, with a remedy."""
    text = str(error)
    if "locked" in text or "busy" in text:
        return LedgerError(f"{path} is in use by another process: one at a time may write to a ledger.")
    if "full" in text or "disk I/O" in text or isinstance(error, OSError):
        return LedgerError(f"{path}: cannot {doing} ({text}). Nothing was answered. Free disk space, then restart.")
    return LedgerError(f"{path} is damaged ({text}): restore a copy that includes its last reply.")


def entry_hash(previous: bytes, seq: int, row: tuple[Any, ...]) -> bytes:
    """The hash that chains an entry to all before it."""
    plain = [value.hex() if isinstance(value, bytes) else repr(value) for value in row]
    return hashlib.sha256(previous + json.dumps([seq, *plain]).encode()).digest()


def account_of(entry: Entry) -> Account:
    """The terms of the account that an entry opened."""
    try:
        found = Account(**json.loads(entry.detail))
        good = isinstance(found.dataset, str) and isinstance(found.neighbours, str)
        good = good and all(isinstance(x, (int, float)) and math.isfinite(x) for x in (*found[1:3], *found[4:6]))
        good = good and found.bound in BOUNDS
    except (ValueError, TypeError, RecursionError) as error:
        raise LedgerError(f"entry {entry.seq} is damaged: {DAMAGED}") from error
    if not good:
        raise LedgerError(f"entry {entry.seq} is damaged: {DAMAGED}")
    return found


def read(path: str | os.PathLike[str], db: sqlite3.Connection | None = None) -> list[Entry]:
    """All entries of a ledger, checked: the file, the chain of hashes, and the running totals.

    Raises
    ------
    LedgerError
        The file is damaged or inconsistent.
    """
    where = Path(path)
    own = None
    try:
        if db is None:
            if not where.is_file():
                raise InputError("ledger", str(path), "Give the file of a ledger.")
            # Not read-only: SQLite rolls back an unfinished transaction of a killed process on opening.
            own = db = sqlite3.connect(f"{where.resolve().as_uri()}?mode=rw", uri=True, timeout=5.0)
        if (state := db.execute("PRAGMA integrity_check").fetchone()[0]) != "ok":
            raise sqlite3.DatabaseError(state)
        version = db.execute("SELECT format FROM meta").fetchone()
        if version != (FORMAT,):
            raise sqlite3.DatabaseError(f"format {version}")
        rows = db.execute(f"SELECT seq, {', '.join(COLUMNS)}, hash FROM entries ORDER BY seq").fetchall()
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise explained(where, "read", error) from error
    finally:
        if own is not None:
            own.close()
    _verify(where, rows)
    return [Entry(*row) for row in rows]


def _verify(path: Path, rows: list[tuple[Any, ...]]) -> None:
    previous, spent, reserved = b"", {}, {}
    for place, (seq, *middle, digest) in enumerate(rows, 1):
        dataset, cost, total = middle[0], middle[8], middle[9]
        # SQLite stores any kind of value in any column.
        if not isinstance(cost, (int, float)) or not isinstance(total, (int, float)):
            raise _does_not_fit(path, place)
        expected = settled(spent.get(dataset, 0.0), reserved.pop(tuple(middle[:5]), 0.0), cost)
        spent[dataset] = total
        if str(middle[3]).endswith(RESERVED):
            reserved[*middle[:3], middle[3].removesuffix(RESERVED), middle[4]] = cost
        if seq != place or entry_hash(previous, seq, tuple(middle)) != digest or not cost >= 0 or total != expected:
            raise _does_not_fit(path, place)
        previous = digest


def _does_not_fit(path: Path, place: int) -> LedgerError:
    return LedgerError(
        f"{path} is damaged: entry {place} does not follow from those before it. Restore an intact copy."
    )
