"""The site's ledger: append-only, durable, and charged before a reply is sent. It needs neither JAX nor NumPy.

One SQLite file holds the accounts of any number of data sets. Every entry carries the hash of the one before it. Before the
records are touched, the maximum cost of the reply is reserved. Then the reply is computed and stored, its actual cost
replaces the reservation, and only then is it sent. A crash in between leaves the reservation charged until the same request
is repeated.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import os
import secrets
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from fedpdmc.errors import BudgetSpent, InputError, LedgerError, PlanRefused

FORMAT = 2
# Bounds on privacy loss that an account can use.
BOUNDS = ("renyi", "gaussian", "tail")
# Suffix of the kind of an entry that reserves the cost of a reply.
RESERVED = " reserved"
DAMAGED = "it does not have the terms of an account. Restore an intact copy."
# The reply if the computation failed at the site.
FAULT = b"fault"


class LedgerRequest(NamedTuple):
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

    ``bound`` is one of `BOUNDS`; `fedpdmc.privacy.accountant` computes the limit from it.
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


COLUMNS = Entry._fields[1:-1]


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


def read(path: str | os.PathLike[str]) -> list[Entry]:
    """All entries of a ledger, checked: the file, the chain of hashes, and the running totals.

    Raises
    ------
    LedgerError
        The file is damaged or inconsistent.
    """
    where = Path(path)
    if not where.is_file():
        raise InputError("ledger", str(path), "Give the file of a ledger.")
    # Not read-only: SQLite rolls back an unfinished transaction of a killed process on opening.
    with closing(sqlite3.connect(f"{where.resolve().as_uri()}?mode=rw", uri=True, timeout=5.0)) as db:
        return _replay(where, db)[0]


Totals = dict[tuple[str, ...], float]


def _replay(path: Path, db: sqlite3.Connection) -> tuple[list[Entry], Totals]:
    """All entries, each of which follows from those before it, and the totals after the last one."""
    try:
        if (state := db.execute("PRAGMA integrity_check").fetchone()[0]) != "ok":
            raise sqlite3.DatabaseError(state)
        if (version := db.execute("SELECT format FROM meta").fetchone()) != (FORMAT,):
            raise sqlite3.DatabaseError(f"format {version}")
        rows = db.execute(f"SELECT seq, {', '.join(COLUMNS)}, hash FROM entries ORDER BY seq").fetchall()
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise explained(path, "read", error) from error
    entries, totals, reserved = [Entry(*row) for row in rows], Totals(), {}
    previous = b""
    for place, (e, (_, *row, _)) in enumerate(zip(entries, rows, strict=True), 1):
        # SQLite stores any kind of value in any column.
        good = all(isinstance(x, (int, float)) for x in (e.exposure, e.cost, e.spent)) and isinstance(e.kind, str)
        good = good and e.seq == place and entry_hash(previous, e.seq, tuple(row)) == e.hash and e.cost >= 0
        if good:
            request = LedgerRequest(*e[1:6], e.request)
            before = reserved.pop(request[:5], 0.0)
            totals |= _after(totals, request, Reply(e.reply, e.exposure, e.cost), before)
            if e.kind.endswith(RESERVED):
                reserved[request._replace(kind=e.kind.removesuffix(RESERVED))[:5]] = e.cost
        if not good or totals["spent", e.dataset] != e.spent:
            raise LedgerError(
                f"{path} is damaged: entry {place} does not follow from those before it. Restore an intact copy."
            )
        previous = e.hash
    return entries, totals


def _after(totals: Totals, request: LedgerRequest, reply: Reply, reserved: float) -> Totals:
    """The totals that a reply changes, and the reservation for it."""
    dataset, study, run, kind = request[:4]
    keys = (("spent", dataset), ("spent", dataset, study))
    new = {key: settled(totals.get(key, 0.0), reserved, float(reply.cost)) for key in keys}
    more: Totals = {}
    if kind == "round":
        more = {("observed", dataset, study, run): reply.exposure, ("answers", dataset, study, run): 1.0}
    elif kind == "release":
        more = {("releases", dataset): 1.0}
    return new | {key: totals.get(key, 0.0) + value for key, value in more.items()}


# Seconds by which the system clock may go backwards, as after a correction, before it counts as set back.
CLOCK_TOLERANCE = 60.0
WHERE = "dataset = ? AND study = ? AND run = ? AND kind = ? AND round = ?"


class Ledger:
    """A site's ledger. Use `Ledger.open`: one process at a time may write to a ledger.

    Parameters
    ----------
    path : Path
        The SQLite file, made by `create_ledger`.
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
            if not path.is_file():
                raise InputError(
                    "ledger",
                    f"{path}, which does not exist",
                    "If there was one, restore it: a new ledger is a second budget for the same records. Otherwise create "
                    f"it once: `fedpdmc ledger create {path}`, or fedpdmc.create_ledger({str(path)!r}).",
                )
            self._lock = take_lock(path)
            self._db = connect(path)
        weakref.finalize(self, close, self._db, self._lock)
        self._secret, self._stale = b"", False
        self._accounts: dict[str, Account] = {}
        self._totals: Totals = {}
        self._pending: list[tuple[tuple[int, bytes, float], Totals]] = []
        self._load()

    def _load(self) -> None:
        entries, self._totals = _replay(self.path, self._db)
        self._secret, file = self._db.execute("SELECT secret, file FROM meta").fetchone()
        check_file(self.path, file)
        check_head(self.path, self._secret, entries)
        self._accounts = {e.dataset: account_of(e) for e in entries if e.kind == "account"}
        self._head = (entries[-1].seq, entries[-1].hash, entries[-1].time) if entries else (0, b"", 0.0)
        self._stale = False

    def close(self) -> None:
        """Close the file and release its lock."""
        with self._mutex:
            self._broken = "it was closed."
            close(self._db, self._lock)
            Ledger._open.pop(f"{self._pid}:{self.path}", None)

    def account(self, wanted: Account) -> Account:
        """Open the account of a data set, or check that it has the same terms; its order and limit never change."""
        with self._mutex:
            kept = self._accounts.get(wanted.dataset)
            if kept is None:
                request = LedgerRequest(wanted.dataset, "", "", "account", 0, b"")
                with self._transaction():
                    self._append(request, Reply(b"", 0.0, 0.0), json.dumps(wanted._asdict()))
                self._accounts[wanted.dataset] = kept = wanted
        if kept[:4] != wanted[:4]:
            raise InputError(
                "Budget",
                f"epsilon={wanted.epsilon:g}, delta={wanted.delta:g}, neighbours={wanted.neighbours!r}",
                f"The account of data set {wanted.dataset!r} in {self.path} was opened with epsilon={kept.epsilon:g}, "
                f"delta={kept.delta:g}, neighbours={kept.neighbours!r}. These terms cannot be changed.",
            )
        return kept

    @property
    def datasets(self) -> list[str]:
        """The data sets that have an account."""
        return list(self._accounts)

    def spent(self, dataset: str, study: str | None = None) -> float:
        """Rényi divergence spent so far on a data set, by all studies or by one, at the account's order."""
        return self._totals.get(("spent", dataset) if study is None else ("spent", dataset, study), 0.0)

    def remaining(self, dataset: str) -> float:
        """What is left."""
        return max(0.0, self._accounts[dataset].limit - self.spent(dataset))

    def observed(self, dataset: str, study: str, run: str) -> float:
        """Observed time of one run, over all messages and chains."""
        return self._totals.get(("observed", dataset, study, run), 0.0)

    def answers(self, dataset: str, study: str, run: str) -> int:
        """Number of rounds of a run that were answered."""
        return int(self._totals.get(("answers", dataset, study, run), 0))

    def releases(self, dataset: str) -> int:
        """Number of releases of a data set, over all studies."""
        return int(self._totals.get(("releases", dataset), 0))

    def released(self, dataset: str, study: str, asked: bytes = b"") -> float:
        """The cost of one study's releases, rounded up; ``asked``: a request to leave out.

        Reservations of interrupted releases count. The noise of the next release depends on this number, so it must have
        the same bits whatever the records are. Costs are therefore added exactly: their order here is that of the requests'
        hashes, which depend on the records.
        """
        where = "dataset = ? AND study = ? AND kind LIKE 'release%' AND request <> ?"
        each = self._rows(f"SELECT min(cost) FROM entries WHERE {where} GROUP BY request", dataset, study, asked)
        return math.fsum(cost for (cost,) in each) * (1 + 1e-12)

    def rounds(self, dataset: str, study: str) -> int:
        """Number of rounds of arrivals in one study, answered or interrupted."""
        where = "dataset = ? AND study = ? AND kind LIKE 'round%'"
        return int(self._scalar(f"SELECT count(*) FROM entries WHERE {where}", dataset, study))

    def answered(self, request: LedgerRequest) -> bool:
        """Whether exactly this request was answered."""
        found = self._scalar(f"SELECT request FROM entries WHERE {WHERE}", *request[:5])
        return found is not None and bytes(found) == request.hash

    def has_replied(self, dataset: str, study: str, run: str, reply: bytes) -> bool:
        """Whether a run ever received this reply."""
        where = "dataset = ? AND study = ? AND run = ? AND kind = 'round' AND reply = ?"
        return bool(self._scalar(f"SELECT count(*) FROM entries WHERE {where}", dataset, study, run, reply))

    def _scalar(self, query: str, *values: str | bytes | int) -> Any:
        found = self._rows(query, *values)
        return found[0][0] if found else None

    def _rows(self, query: str, *values: str | bytes | int) -> list[Any]:
        with self._mutex:
            self._check_usable()
            with self._trouble("read"):
                return self._db.execute(query, values).fetchall()

    def begin(self, dataset: str, study: str, run: str, records: bytes, detail: str) -> None:
        """Record that a run begins on records with this hash; the same records may have one name only."""
        with self._mutex:
            query = "SELECT dataset FROM entries WHERE kind = 'open' AND request = ? AND dataset <> ?"
            other = self._scalar(query, records, dataset)
            if other is not None:
                raise LedgerError(
                    f"The records of data set {dataset!r} are in {self.path} as {other!r} already: one data set has one "
                    f"budget. Declare Budget(dataset={other!r})."
                )
            request = LedgerRequest(dataset, study, run, "open", 0, records)
            self.answer(request, 0.0, lambda key: Reply(b"", 0.0, 0.0), detail)

    def answer(
        self,
        request: LedgerRequest,
        most: float,
        work: Callable[[bytes], Reply],
        detail: str = "{}",
        granted: float = math.inf,
    ) -> bytes:
        """The reply to a request: the stored one if there is one, else charged, computed by ``work``, stored and returned.

        The maximum cost, ``most``, is reserved before ``work`` computes the reply from 32 secret bytes, which are a function
        of the request. ``work`` runs without holding the ledger's lock. If it raises, the reservation stays charged until
        the same request is repeated. ``granted`` is the part of the account that the request's study may spend.

        Raises
        ------
        BudgetSpent
            ``most`` exceeds what is left of the account or of the study's part. Nothing was computed.
        PlanRefused
            The round was answered for another request, or its reservation is less than it would cost now.
        LedgerError
            The ledger cannot be written or trusted.
        """
        with self._mutex, self._transaction():
            if (stored := self._entry(request, "reply")) is not None:
                return stored
            reserved = self._reserved(request)
            if reserved is not None and most > reserved:
                raise PlanRefused(
                    f"The reservation for the interrupted round {request.round} of run {request.run!r} ({reserved:.4g}) "
                    f"does not cover what it would cost now ({most:.4g}): repeat the identical request (code "
                    "OTHER_PLAN)."
                )
            if reserved is None and most > 0:
                self._check_covered(request, most, granted)
                self._append(request._replace(kind=request.kind + RESERVED), Reply(b"", 0.0, most), detail)
        reply = work(self.key(request))
        if not 0 <= reply.cost <= most:
            raise LedgerError(f"A reply costs {reply.cost!r}, more than its reservation of {most!r}.")
        with self._mutex, self._transaction():
            if (stored := self._entry(request, "reply")) is not None:
                return stored
            self._append(request, reply, detail)
        return reply.content

    def _check_covered(self, request: LedgerRequest, most: float, granted: float) -> None:
        account, spent = self._accounts[request.dataset], self.spent(request.dataset)
        limit = account.limit
        if not added(spent, most) <= limit:
            raise BudgetSpent(
                f"The privacy budget of data set {request.dataset!r} does not cover this request: epsilon="
                f"{account.epsilon:g} at delta={account.delta:g} for all studies together, "
                f"{100 * spent / limit:.4g} % spent (code BUDGET_SPENT)."
            )
        if not added(self.spent(request.dataset, request.study), most) <= granted:
            raise BudgetSpent(
                f"The part of data set {request.dataset!r} granted to study {request.study!r} does not cover this request "
                "(code BUDGET_SPENT)."
            )

    def key(self, request: LedgerRequest) -> bytes:
        """Secret bytes for a request: a reply that is computed again after a crash is the same."""
        text = json.dumps([*request[:5], request.hash.hex()]).encode()
        return hmac.new(self._secret, text, hashlib.sha256).digest()

    def _entry(self, request: LedgerRequest, column: str) -> Any:
        """What the entry of a request has in a column; None without one."""
        found = self._db.execute(f"SELECT request, {column} FROM entries WHERE {WHERE}", request[:5]).fetchone()
        if found is None:
            return None
        known, value = found
        if bytes(known) != request.hash:
            raise PlanRefused(
                f"Round {request.round} of run {request.run!r} was answered for another plan: repeat the plan that was "
                "answered (code OTHER_PLAN)."
            )
        return bytes(value) if isinstance(value, bytes) else value

    def _reserved(self, request: LedgerRequest) -> float | None:
        return self._entry(request._replace(kind=request.kind + RESERVED), "cost")

    def _append(self, request: LedgerRequest, reply: Reply, detail: str) -> None:
        seq, previous, last = self._head
        now = time.time()
        if now < last - CLOCK_TOLERANCE:
            raise LedgerError(
                f"The clock is {last - now:.0f} s before the last entry of {self.path}: it was set back. Correct the clock."
            )
        totals = _after(self._totals, request, reply, self._reserved(request) or 0.0)
        row = (
            *request[:5], request.hash, reply.content, float(reply.exposure), float(reply.cost),
            totals["spent", request.dataset], now, detail,
        )  # fmt: skip
        digest = entry_hash(previous, seq + 1, row)
        marks = ", ".join("?" * (len(row) + 2))
        self._db.execute(
            f"INSERT INTO entries (seq, {', '.join(COLUMNS)}, hash) VALUES ({marks})", (seq + 1, *row, digest)
        )
        self._pending.append(((seq + 1, digest, now), totals))

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """A durable transaction, all or nothing; after an error of the file the ledger is not used again."""
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
                        f"{self.path} was changed by another program while in use, so it cannot be trusted."
                    )
                yield
                self._db.execute("COMMIT" if self._pending else "ROLLBACK")
        except BaseException as error:
            self._give_up(error)
            raise
        for head, totals in self._pending:
            self._head = head
            self._totals |= totals
        if self._pending:
            with self._trouble("write"):
                write_head(self.path, self._secret, *self._head[:2])

    def _give_up(self, error: BaseException) -> None:
        """Roll back, and read the file again before the next entry; after an error of the file, refuse further use."""
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
                f"{self.path} was opened by another process: open it in this one after the other has ended."
            )
        if self._broken is not None:
            raise LedgerError(f"{self.path} is closed: {self._broken} Open it again.")

    @contextmanager
    def _trouble(self, doing: str) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise explained(self.path, doing, error) from error


# A snapshot ------------------------------------------------------------------------------------------------------------


def rewound(ledger: str | Path, copy: str | Path, run: str, study: str) -> str:
    """Copy a ledger, checked, without the first entry of a run and all that follow; returns the run's data set.

    The new file must not exist. A run with releases alone has no entry of its own and is found by its study.
    """
    entries = read(ledger)
    of_run = [entry for entry in entries if entry.run == run]
    first = next(iter(of_run or [entry for entry in entries if entry.study == study]), None)
    if first is None:
        raise InputError("ledger", f"{ledger} without the run {run}", "Give the ledger that the site ran with.")
    source, target = sqlite3.connect(f"{Path(ledger).resolve().as_uri()}?mode=ro", uri=True), sqlite3.connect(copy)
    try:
        source.backup(target)
        (trigger,) = target.execute("SELECT sql FROM sqlite_master WHERE name = 'no_delete'").fetchone()
        target.execute("DROP TRIGGER no_delete")
        target.execute("DELETE FROM entries WHERE seq >= ?", (first.seq,))
        target.execute(trigger)
        target.execute("UPDATE meta SET file = ?", (os.stat(copy).st_ino,))
        target.commit()
    finally:
        source.close()
        target.close()
    return first.dataset


# Copies and older ledgers ----------------------------------------------------------------------------------------------


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
