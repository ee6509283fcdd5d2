"""The site's ledger: append-only, durable, and charged before a reply leaves. It needs neither JAX nor NumPy.

One SQLite file holds the accounts of any number of data sets. Every entry carries the hash of the one before it. A reply is
returned only after the entry that charges for it, and that stores it, is on disk: a crash at any point loses a reply or
nothing, never a charge for a reply that left.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from fedpdmc.errors import BudgetSpent, InputError, LedgerError, PlanRefused

FORMAT = 1
# A clock may be corrected by this many seconds without being taken for one that was set back.
CLOCK_TOLERANCE = 60.0
COLUMNS = (
    "dataset", "study", "run", "kind", "round", "request", "reply", "exposure", "cost", "spent", "time", "detail",
)  # fmt: skip
SCHEMA = (
    "CREATE TABLE meta (format INTEGER NOT NULL, secret BLOB NOT NULL)",
    f"CREATE TABLE entries (seq INTEGER PRIMARY KEY, {', '.join(f'{name} NOT NULL' for name in COLUMNS)}, "
    "hash BLOB NOT NULL, UNIQUE (dataset, study, run, kind, round))",
    "CREATE TRIGGER no_update BEFORE UPDATE ON entries BEGIN SELECT RAISE(ABORT, 'entries are never changed'); END",
    "CREATE TRIGGER no_delete BEFORE DELETE ON entries BEGIN SELECT RAISE(ABORT, 'entries are never deleted'); END",
)


class Request(NamedTuple):
    """What is asked of a site: under which account, in which run and round, and the hash of what was sent."""

    dataset: str
    study: str
    run: str
    kind: str
    round: int
    hash: bytes


class Reply(NamedTuple):
    """What a site is about to say: the bytes, the observed time in them, and their Rényi cost at the account's order."""

    content: bytes
    exposure: float
    cost: float


class Account(NamedTuple):
    """The terms on which a data set is kept: fixed when it is first used."""

    dataset: str
    epsilon: float
    delta: float
    neighbours: str
    alpha: float
    limit: float


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


class Ledger:
    """A site's account book. Use `Ledger.open`: one process at a time may write to a ledger.

    Parameters
    ----------
    path : Path
        The SQLite file; it is made if it is not there.
    """

    _open: weakref.WeakValueDictionary[str, Ledger] = weakref.WeakValueDictionary()
    _opening = threading.Lock()

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Ledger:
        """The ledger at ``path``, the same object for everyone in this process."""
        where = Path(path).resolve()
        with cls._opening:
            key = f"{os.getpid()}:{where}"
            ledger = cls._open.get(key)
            if ledger is None:
                ledger = cls._open[key] = cls(where)
            return ledger

    def __init__(self, path: Path):
        self.path, self._pid = path, os.getpid()
        self._mutex = threading.RLock()
        self._broken: str | None = None
        with self._trouble("open"):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = _take(path)
            if not path.exists():
                _create(path)
            self._db = _connect(path)
        weakref.finalize(self, _close, self._db, self._lock)
        self._secret, self._stale = b"", False
        self._accounts: dict[str, Account] = {}
        self._spent: dict[str, float] = {}
        self._pending: list[tuple[tuple[int, bytes, float], str, float]] = []
        self._load()

    def _load(self) -> None:
        """What is on disk, checked."""
        entries = read(self.path, self._db)
        self._secret = self._db.execute("SELECT secret FROM meta").fetchone()[0]
        self._accounts = {e.dataset: account_of(e) for e in entries if e.kind == "account"}
        self._spent = {name: 0.0 for name in self._accounts} | {e.dataset: e.spent for e in entries}
        self._head = (entries[-1].seq, entries[-1].hash, entries[-1].time) if entries else (0, b"", 0.0)
        self._stale = False

    def close(self) -> None:
        """Let another process have it."""
        with self._mutex:
            self._broken = "it was closed."
            _close(self._db, self._lock)
            Ledger._open.pop(f"{self._pid}:{self.path}", None)

    def account(self, wanted: Account) -> Account:
        """Open the account of a data set, or check that it is kept on the same terms; its order and limit stay."""
        with self._mutex:
            kept = self._accounts.get(wanted.dataset)
            if kept is None:
                request = Request(wanted.dataset, "", "", "account", 0, b"")
                with self._transaction():
                    self._append(request, Reply(b"", 0.0, 0.0), json.dumps(wanted._asdict()))
                self._accounts[wanted.dataset] = kept = wanted
        if kept[:4] != wanted[:4]:
            raise InputError(
                "Budget",
                f"epsilon={wanted.epsilon:g}, delta={wanted.delta:g}, neighbours={wanted.neighbours!r}",
                f"The account of data set {wanted.dataset!r} in {self.path} was opened with epsilon={kept.epsilon:g}, "
                f"delta={kept.delta:g}, neighbours={kept.neighbours!r} and keeps these terms.",
            )
        return kept

    def spent(self, dataset: str) -> float:
        """Rényi divergence spent so far by all studies on a data set, at the account's order."""
        return self._spent.get(dataset, 0.0)

    def remaining(self, dataset: str) -> float:
        """What is left."""
        return max(0.0, self._accounts[dataset].limit - self.spent(dataset))

    def exposure(self, dataset: str, study: str, run: str) -> float:
        """Observed time of one run, over all its messages and chains."""
        where = "dataset = ? AND study = ? AND run = ? AND kind = 'round'"
        return float(self._look(f"SELECT total(exposure) FROM entries WHERE {where}", dataset, study, run))

    def releases(self, dataset: str) -> int:
        """How many summaries of a data set were released, by all studies."""
        return int(self._look("SELECT count(*) FROM entries WHERE dataset = ? AND kind = 'release'", dataset))

    def _look(self, query: str, *values: str | bytes) -> Any:
        with self._mutex:
            self._check_usable()
            with self._trouble("read"):
                found = self._db.execute(query, values).fetchone()
        return None if found is None else found[0]

    def begin(self, dataset: str, study: str, run: str, records: bytes, detail: str) -> None:
        """Note that a run begins on records with this hash; the same records are kept under one name only."""
        with self._mutex:
            other = self._look(
                "SELECT dataset FROM entries WHERE kind = 'open' AND request = ? AND dataset <> ?", records, dataset
            )
            if other is not None:
                raise LedgerError(
                    f"The records of data set {dataset!r} are kept as {other!r} in {self.path}: one data set has one "
                    f"budget. Use Budget(dataset={other!r})."
                )
            self.answer(Request(dataset, study, run, "open", 0, records), 0.0, lambda key: Reply(b"", 0.0, 0.0), detail)

    def answer(self, request: Request, most: float, work: Callable[[bytes], Reply], detail: str = "{}") -> bytes:
        """The reply to a request: stored if it was answered before, else made by ``work``, charged, and then returned.

        Parameters
        ----------
        request : Request
        most : float
            The most that the reply can cost.
        work : callable
            Takes 32 secret bytes, which are the same for the same request and new for any other, and makes the reply.
        detail : str
            Noted in the entry.

        Raises
        ------
        BudgetSpent
            ``most`` is more than what is left. Nothing was made.
        PlanRefused
            The round was answered for another request.
        LedgerError
            The ledger cannot be written or trusted.
        """
        with self._mutex:
            with self._transaction():
                known = self._db.execute(
                    "SELECT request, reply FROM entries "
                    "WHERE dataset = ? AND study = ? AND run = ? AND kind = ? AND round = ?",
                    request[:5],
                ).fetchone()
                if known is not None:
                    return self._stored(request, *known)
                account = self._accounts[request.dataset]
                if not self.spent(request.dataset) + most <= account.limit:
                    raise BudgetSpent(
                        f"The privacy budget of data set {request.dataset!r} does not cover this request: epsilon="
                        f"{account.epsilon:g} at delta={account.delta:g} for all studies together, "
                        f"{100 * self.spent(request.dataset) / account.limit:.4g} % spent (code BUDGET_SPENT)."
                    )
                reply = work(self.key(request))
                if not 0 <= reply.cost <= most * (1 + 1e-9):
                    raise LedgerError(f"A reply costs {reply.cost!r}, more than the {most!r} it was to cost at most.")
                self._append(request, reply, detail)
            return reply.content

    def key(self, request: Request) -> bytes:
        """Secret bytes for a request, so that one that is made again after a crash is the same."""
        text = json.dumps([*request[:5], request.hash.hex()]).encode()
        return hmac.new(self._secret, text, hashlib.sha256).digest()

    def _stored(self, request: Request, known: bytes, reply: bytes) -> bytes:
        if bytes(known) != request.hash:
            raise PlanRefused(
                f"Round {request.round} of run {request.run!r} was answered for another plan: the same round gets the same "
                "plan or none (code OTHER_PLAN)."
            )
        return bytes(reply)

    def _append(self, request: Request, reply: Reply, detail: str) -> None:
        seq, previous, last = self._head
        now = time.time()
        if now < last - CLOCK_TOLERANCE:
            raise LedgerError(
                f"The clock shows {last - now:.0f} s before the last entry of {self.path}: it was set back. Set it right."
            )
        spent = self.spent(request.dataset) + float(reply.cost)
        row = (
            *request[:5], request.hash, reply.content, float(reply.exposure), float(reply.cost), spent, now, detail,
        )  # fmt: skip
        digest = entry_hash(previous, seq + 1, row)
        marks = ", ".join("?" * (len(row) + 2))
        self._db.execute(
            f"INSERT INTO entries (seq, {', '.join(COLUMNS)}, hash) VALUES ({marks})", (seq + 1, *row, digest)
        )
        self._pending.append(((seq + 1, digest, now), request.dataset, spent))

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """All of it on disk at the end, or nothing; after trouble with the file the ledger is not used again."""
        self._check_usable()
        self._pending.clear()
        if self._stale:
            self._load()
        with self._trouble("write"):
            self._db.execute("BEGIN IMMEDIATE")
        try:
            with self._trouble("write"):
                found = self._db.execute("SELECT seq, hash FROM entries ORDER BY seq DESC LIMIT 1").fetchone()
                if (found or (0, b"")) != self._head[:2]:
                    raise LedgerError(
                        f"{self.path} was changed by someone else while it was in use: it is not trusted."
                    )
                yield
                self._db.execute("COMMIT" if self._pending else "ROLLBACK")
        except BaseException as error:
            self._give_up(error)
            raise
        for head, dataset, spent in self._pending:
            self._head, self._spent[dataset] = head, spent

    def _give_up(self, error: BaseException) -> None:
        """Undo. What reached the disk is read again before the next entry; after trouble with the file, never."""
        self._stale = True
        if isinstance(error, LedgerError):
            self._broken = str(error)
        try:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
        except sqlite3.Error:
            self._broken = str(error)

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise LedgerError(
                f"{self.path} was opened by another process: open it in this one, after that one has ended."
            )
        if self._broken is not None:
            raise LedgerError(f"{self.path} is not used any more since: {self._broken} Open it again.")

    @contextmanager
    def _trouble(self, doing: str) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise _explained(self.path, doing, error) from error


def _explained(path: Path, doing: str, error: Exception) -> LedgerError:
    text = str(error)
    if "locked" in text or "busy" in text:
        return LedgerError(f"{path} is in use by another process: one at a time may write to a ledger.")
    if "full" in text or "disk I/O" in text or isinstance(error, OSError):
        return LedgerError(
            f"{path}: cannot {doing} ({text}). Nothing was answered. Make room on the disk, then start again."
        )
    return LedgerError(f"{path} is damaged ({text}): restore it from a copy that is not older than its last reply.")


def _take(path: Path) -> sqlite3.Connection:
    """The right to write, as a lock on a file beside the ledger that the system takes back when the process ends."""
    lock = sqlite3.connect(f"{path}.lock", isolation_level=None, timeout=0.0, check_same_thread=False)
    try:
        lock.execute("BEGIN EXCLUSIVE")
    except sqlite3.Error:
        lock.close()
        raise
    return lock


def _close(*connections: sqlite3.Connection) -> None:
    for connection in connections:
        connection.close()


def _connect(path: Path) -> sqlite3.Connection:
    """A connection whose commits are on disk when they return, the folder's entry for the journal included."""
    db = sqlite3.connect(path, isolation_level=None, timeout=0.0, check_same_thread=False)
    for pragma in ("journal_mode=DELETE", "synchronous=EXTRA", "fullfsync=ON"):
        db.execute(f"PRAGMA {pragma}")
    return db


def _create(path: Path) -> None:
    """An empty ledger, made beside its place and moved there whole: a file that is empty is never taken for new."""
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}.new")
    os.close(os.open(draft, os.O_CREAT | os.O_EXCL, 0o600))
    db = _connect(draft)
    db.execute("BEGIN EXCLUSIVE")
    for statement in SCHEMA:
        db.execute(statement)
    db.execute("INSERT INTO meta VALUES (?, ?)", (FORMAT, secrets.token_bytes(32)))
    db.execute("COMMIT")
    db.close()
    os.replace(draft, path)


def entry_hash(previous: bytes, seq: int, row: tuple[Any, ...]) -> bytes:
    """The hash that ties an entry to all before it."""
    plain = [value.hex() if isinstance(value, bytes) else repr(value) for value in row]
    return hashlib.sha256(previous + json.dumps([seq, *plain]).encode()).digest()


def account_of(entry: Entry) -> Account:
    """The terms that an entry opened an account with."""
    return Account(**json.loads(entry.detail))


def read(path: str | os.PathLike[str], db: sqlite3.Connection | None = None) -> list[Entry]:
    """All entries of a ledger, checked: the file, the chain of hashes, and the running totals.

    Raises
    ------
    LedgerError
        Something does not add up.
    """
    where = Path(path)
    own = None
    try:
        if db is None:
            if not where.is_file():
                raise InputError("ledger", str(path), "Give the file of a ledger.")
            # Not read-only: what a killed process left unfinished is undone by whoever opens the file next.
            own = db = sqlite3.connect(f"{where.resolve().as_uri()}?mode=rw", uri=True, timeout=5.0)
        if (state := db.execute("PRAGMA integrity_check").fetchone()[0]) != "ok":
            raise sqlite3.DatabaseError(state)
        version = db.execute("SELECT format FROM meta").fetchone()
        if version != (FORMAT,):
            raise sqlite3.DatabaseError(f"format {version}")
        rows = db.execute(f"SELECT seq, {', '.join(COLUMNS)}, hash FROM entries ORDER BY seq").fetchall()
    except sqlite3.Error as error:
        raise _explained(where, "read", error) from error
    finally:
        if own is not None:
            own.close()
    _verify(where, rows)
    return [Entry(*row) for row in rows]


def _verify(path: Path, rows: list[tuple[Any, ...]]) -> None:
    previous, spent = b"", {}
    for place, (seq, *middle, digest) in enumerate(rows, 1):
        dataset, cost, total = middle[0], middle[8], middle[9]
        spent[dataset] = spent.get(dataset, 0.0) + cost
        if (
            seq != place
            or entry_hash(previous, seq, tuple(middle)) != digest
            or total != spent[dataset]
            or not cost >= 0
        ):
            raise LedgerError(
                f"{path} is damaged: entry {place} does not fit those before it. Restore a copy that is whole."
            )
        previous = digest
