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
        # Keys returned by `_after`.
        self._totals: dict[tuple[str, ...], float] = {}
        self._pending: list[tuple[tuple[int, bytes, float], dict[tuple[str, ...], float]]] = []
        self._load()

    def _load(self) -> None:
        """Read and check the file."""
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
                request = Request(wanted.dataset, "", "", "account", 0, b"")
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

    def _after(self, request: Request, reply: Reply, reserved: float) -> dict[tuple[str, ...], float]:
        """The totals that a reply changes, and the reservation for it."""
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

    def answered(self, request: Request) -> bool:
        """Whether exactly this request was answered."""
        found = self._scalar(f"SELECT request FROM entries WHERE {WHERE}", *request[:5])
        return found is not None and bytes(found) == request.hash

    def told(self, dataset: str, study: str, run: str, reply: bytes) -> bool:
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
            other = self._scalar(
                "SELECT dataset FROM entries WHERE kind = 'open' AND request = ? AND dataset <> ?", records, dataset
            )
            if other is not None:
                raise LedgerError(
                    f"The records of data set {dataset!r} are in {self.path} as {other!r} already: one data set has one "
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
        """The reply to a request: the stored one if there is one, else charged, computed by ``work``, stored and returned.

        The maximum cost is reserved before ``work`` begins. ``work`` runs without holding the ledger's lock. If it raises,
        the reservation stays charged until the same request is repeated.

        Parameters
        ----------
        request : Request
        most : float
            The maximum cost of the reply.
        work : callable
            Computes the reply from 32 secret bytes, which are a function of the request.
        detail : str
            Recorded in the entry.
        granted : float
            The part of the account that the request's study may spend.

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
            if (stored := self._stored(request)) is not None:
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
                f"The part of data set {request.dataset!r} granted to study {request.study!r} does not cover this request "
                "(code BUDGET_SPENT)."
            )

    def key(self, request: Request) -> bytes:
        """Secret bytes for a request: a reply that is computed again after a crash is the same."""
        text = json.dumps([*request[:5], request.hash.hex()]).encode()
        return hmac.new(self._secret, text, hashlib.sha256).digest()

    def _stored(self, request: Request) -> bytes | None:
        """The stored reply to a request."""
        found = self._db.execute(f"SELECT request, reply FROM entries WHERE {WHERE}", request[:5]).fetchone()
        return None if found is None else self._same(request, *found)

    def _reserved(self, request: Request) -> float | None:
        """The reservation for a request."""
        kept = request._replace(kind=request.kind + RESERVED)
        found = self._db.execute(f"SELECT request, cost FROM entries WHERE {WHERE}", kept[:5]).fetchone()
        return None if found is None else self._same(request, *found)

    def _same(self, request: Request, known: bytes, value: Any) -> Any:
        if bytes(known) != request.hash:
            raise PlanRefused(
                f"Round {request.round} of run {request.run!r} was answered for another plan: repeat the plan that was "
                "answered (code OTHER_PLAN)."
            )
        return bytes(value) if isinstance(value, bytes) else value

    def _append(self, request: Request, reply: Reply, detail: str) -> None:
        seq, previous, last = self._head
        now = time.time()
        if now < last - CLOCK_TOLERANCE:
            raise LedgerError(
                f"The clock is {last - now:.0f} s before the last entry of {self.path}: it was set back. Correct the clock."
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
