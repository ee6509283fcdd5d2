"""The site's ledger: append-only, durable, and charged before a reply leaves. It needs neither JAX nor NumPy.

One SQLite file holds the accounts of any number of data sets. Every entry carries the hash of the one before it. Before the
records are touched for a reply, the most that it can cost is reserved; when it is made, it is stored, and its cost takes the
place of what was reserved; only then does it leave. A crash in between leaves the larger charge, until the same is asked
again.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedpdmc.errors import BudgetSpent, InputError, LedgerError, PlanRefused
from fedpdmc.privacy.ledger_entries import (
    COLUMNS,
    RESERVED,
    Account,
    Reply,
    Request,
    account_of,
    added,
    entry_hash,
    explained,
    read,
    settled,
)
from fedpdmc.privacy.ledger_identity import check_file, check_head, close, connect, take_lock, write_head

# A clock may be corrected by this many seconds without being taken for one that was set back.
CLOCK_TOLERANCE = 60.0
WHERE = "dataset = ? AND study = ? AND run = ? AND kind = ? AND round = ?"


class Ledger:
    """A site's account book. Use `Ledger.open`: one process at a time may write to a ledger.

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
                    f"{path}, which is not there",
                    "If there was one, put that one back: a new ledger is a second budget for the same records. Else create "
                    f"it, once: `fedpdmc ledger create {path}`, or fedpdmc.create_ledger({str(path)!r}).",
                )
            self._lock = take_lock(path)
            self._db = connect(path)
        weakref.finalize(self, close, self._db, self._lock)
        self._secret, self._stale = b"", False
        self._accounts: dict[str, Account] = {}
        # Of the keys that `_after` makes.
        self._totals: dict[tuple[str, ...], float] = {}
        self._pending: list[tuple[tuple[int, bytes, float], dict[tuple[str, ...], float]]] = []
        self._load()

    def _load(self) -> None:
        """What is on disk, checked."""
        entries = read(self.path, self._db)
        self._secret, file = self._db.execute("SELECT secret, file FROM meta").fetchone()
        check_file(self.path, file)
        check_head(self.path, self._secret, entries)
        self._accounts = {e.dataset: account_of(e) for e in entries if e.kind == "account"}
        self._totals, reserved = {}, {}
        for e in entries:
            key = (e.dataset, e.study, e.run, e.kind, e.round)
            before = reserved.pop(key, 0.0)
            self._totals |= self._after(Request(*key, e.request), Reply(e.reply, e.exposure, e.cost), before)
            if e.kind.endswith(RESERVED):
                reserved[*key[:3], e.kind.removesuffix(RESERVED), e.round] = e.cost
        self._head = (entries[-1].seq, entries[-1].hash, entries[-1].time) if entries else (0, b"", 0.0)
        self._stale = False

    def close(self) -> None:
        """Let another process have it."""
        with self._mutex:
            self._broken = "it was closed."
            close(self._db, self._lock)
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
        """Observed time of one run, over all its messages and chains."""
        return self._totals.get(("observed", dataset, study, run), 0.0)

    def answers(self, dataset: str, study: str, run: str) -> int:
        """How many rounds of a run were answered."""
        return int(self._totals.get(("answers", dataset, study, run), 0))

    def releases(self, dataset: str) -> int:
        """How many summaries of a data set were released, by all studies."""
        return int(self._totals.get(("releases", dataset), 0))

    def _after(self, request: Request, reply: Reply, reserved: float) -> dict[tuple[str, ...], float]:
        """The totals that a reply changes, with what was reserved for it."""
        dataset, study, run, kind = request[:4]
        keys = (("spent", dataset), ("spent", dataset, study))
        new: dict[tuple[str, ...], float] = {
            key: settled(self._totals.get(key, 0.0), reserved, float(reply.cost)) for key in keys
        }
        added_up: list[tuple[tuple[str, ...], float]] = []
        if kind == "round":
            added_up = [(("observed", dataset, study, run), reply.exposure), (("answers", dataset, study, run), 1.0)]
        elif kind == "release":
            added_up = [(("releases", dataset), 1.0)]
        return new | {key: self._totals.get(key, 0.0) + more for key, more in added_up}

    def released(self, dataset: str, study: str, asked: bytes = b"") -> float:
        """What the summaries that one study had released have cost, rounded up; ``asked``: without this request.

        What is reserved for one that was cut short counts. The noise of the next release depends on this number, which must
        be the same, to the last bit, for all records: costs are added without rounding, since their order here is that of
        the requests' hashes, which are made of the records.
        """
        where = "dataset = ? AND study = ? AND kind LIKE 'release%' AND request <> ?"
        each = self._look_at(f"SELECT min(cost) FROM entries WHERE {where} GROUP BY request", dataset, study, asked)
        return math.fsum(cost for (cost,) in each) * (1 + 1e-12)

    def rounds(self, dataset: str, study: str) -> int:
        """How many rounds of arrivals one study was answered, or cut short in."""
        where = "dataset = ? AND study = ? AND kind LIKE 'round%'"
        return int(self._look(f"SELECT count(*) FROM entries WHERE {where}", dataset, study))

    def answered(self, request: Request) -> bool:
        """Whether this very request was answered."""
        found = self._look(f"SELECT request FROM entries WHERE {WHERE}", *request[:5])
        return found is not None and bytes(found) == request.hash

    def told(self, dataset: str, study: str, run: str, reply: bytes) -> bool:
        """Whether a run was ever given this reply."""
        where = "dataset = ? AND study = ? AND run = ? AND kind = 'round' AND reply = ?"
        return bool(self._look(f"SELECT count(*) FROM entries WHERE {where}", dataset, study, run, reply))

    def _look(self, query: str, *values: str | bytes | int) -> Any:
        found = self._look_at(query, *values)
        return found[0][0] if found else None

    def _look_at(self, query: str, *values: str | bytes | int) -> list[Any]:
        with self._mutex:
            self._check_usable()
            with self._trouble("read"):
                return self._db.execute(query, values).fetchall()

    def begin(self, dataset: str, study: str, run: str, records: bytes, detail: str) -> None:
        """Note that a run begins on records with this hash; the same records are kept under one name only."""
        with self._mutex:
            other = self._look(
                "SELECT dataset FROM entries WHERE kind = 'open' AND request = ? AND dataset <> ?", records, dataset
            )
            if other is not None:
                raise LedgerError(
                    f"The records of data set {dataset!r} are kept as {other!r} in {self.path}: one data set has one "
                    f"budget. Declare Budget(dataset={other!r})."
                )
            self.answer(Request(dataset, study, run, "open", 0, records), 0.0, lambda key: Reply(b"", 0.0, 0.0), detail)

    def answer(
        self,
        request: Request,
        most: float,
        work: Callable[[bytes], Reply],
        detail: str = "{}",
        granted: float = math.inf,
    ) -> bytes:
        """The reply to a request: stored if it was answered before, else charged, made by ``work``, stored and returned.

        The most that it can cost is charged before ``work`` begins, which is done without the lock of the ledger. If
        ``work`` raises, what was reserved stays charged until the same is asked again.

        Parameters
        ----------
        request : Request
        most : float
            The most that the reply can cost.
        work : callable
            Takes 32 secret bytes, which are the same for the same request and new for any other, and makes the reply.
        detail : str
            Noted in the entry.
        granted : float
            What the request's study may spend of the account.

        Raises
        ------
        BudgetSpent
            ``most`` is more than what is left, of the account or of the study's part. Nothing was made.
        PlanRefused
            The round was answered for another request, or less was reserved for it than it would cost now.
        LedgerError
            The ledger cannot be written or trusted.
        """
        with self._mutex, self._transaction():
            if (stored := self._stored(request)) is not None:
                return stored
            reserved = self._reserved(request)
            if reserved is not None and most > reserved:
                raise PlanRefused(
                    f"What was reserved for round {request.round} of run {request.run!r} when it was cut short "
                    f"({reserved:.4g}) does not cover what it would cost now ({most:.4g}): ask it as it was asked (code "
                    "OTHER_PLAN)."
                )
            if reserved is None and most > 0:
                self._check_covered(request, most, granted)
                self._append(request._replace(kind=request.kind + RESERVED), Reply(b"", 0.0, most), detail)
        reply = work(self.key(request))
        if not 0 <= reply.cost <= most:
            raise LedgerError(f"A reply costs {reply.cost!r}, more than the {most!r} it was to cost at most.")
        with self._mutex, self._transaction():
            if (stored := self._stored(request)) is not None:
                return stored
            self._append(request, reply, detail)
        return reply.content

    def _check_covered(self, request: Request, most: float, granted: float) -> None:
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
                f"What data set {request.dataset!r} grants to study {request.study!r} does not cover this request "
                "(code BUDGET_SPENT)."
            )

    def key(self, request: Request) -> bytes:
        """Secret bytes for a request, so that one that is made again after a crash is the same."""
        text = json.dumps([*request[:5], request.hash.hex()]).encode()
        return hmac.new(self._secret, text, hashlib.sha256).digest()

    def _stored(self, request: Request) -> bytes | None:
        """The reply that the request was given."""
        found = self._db.execute(f"SELECT request, reply FROM entries WHERE {WHERE}", request[:5]).fetchone()
        return None if found is None else self._same(request, *found)

    def _reserved(self, request: Request) -> float | None:
        """What is reserved for a request."""
        kept = request._replace(kind=request.kind + RESERVED)
        found = self._db.execute(f"SELECT request, cost FROM entries WHERE {WHERE}", kept[:5]).fetchone()
        return None if found is None else self._same(request, *found)

    def _same(self, request: Request, known: bytes, value: Any) -> Any:
        if bytes(known) != request.hash:
            raise PlanRefused(
                f"Round {request.round} of run {request.run!r} was answered for another plan: the same round gets the same "
                "plan or none (code OTHER_PLAN)."
            )
        return bytes(value) if isinstance(value, bytes) else value

    def _append(self, request: Request, reply: Reply, detail: str) -> None:
        seq, previous, last = self._head
        now = time.time()
        if now < last - CLOCK_TOLERANCE:
            raise LedgerError(
                f"The clock shows {last - now:.0f} s before the last entry of {self.path}: it was set back. Set it right."
            )
        totals = self._after(request, reply, self._reserved(request) or 0.0)
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
        for head, totals in self._pending:
            self._head = head
            self._totals |= totals
        if self._pending:
            with self._trouble("write"):
                write_head(self.path, self._secret, *self._head[:2])

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
            raise explained(self.path, doing, error) from error
