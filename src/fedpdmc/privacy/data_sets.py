"""A site's register of the record sets that its studies have used. Its hashes are keyed and never leave the site.

Exact answers on two sets that differ in few records give these records away by subtraction, however well each study is
protected. So a set is compared with all that were used before, over the columns that both use, and one that differs in
few records is refused before anything is released. One SQLite file holds the sets of all studies of a site. A durable
transaction compares and registers, so two studies that are started at the same time cannot pass each other unseen.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import json
import math
import os
import secrets
import sqlite3
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedpdmc.errors import InputError, Refused
from fedpdmc.privacy.ledger import connect, explained

NAME = "data-sets.db"
PATIENCE = 60.0  # seconds to wait for another study of the same site
PERSON = ""  # the pseudo-column of what identifies a person
PART = "\0"  # and of how much of a record a study takes, if it is not the usual part
MOST_COMBINATIONS = 20_000  # of a new set with one, two, ... earlier ones: more are not tried
REMEDY = (
    "The records differ in few from those of an earlier study, which would be known by subtraction. Take part with the "
    "records of that study, unchanged; or when more records differ; or agree on a contract with [privacy]. If these are "
    "records of other people, say so in the site's policy.toml: record_id names the columns that identify a person, "
    "dataset a data set. `fedpdmc ledger data-sets` shows the earlier studies. least_difference is the policy's limit."
)


@dataclass(frozen=True)
class Use:
    """The use of a record set by a study.

    ``contract`` is the SHA-256 of the study's contract, ``site`` the site's name in it, ``dataset`` the name in its policy,
    ``exact`` whether some answers have no noise, ``digest`` the keyed hash of the records, ``time`` that of the first
    release, ``bits`` the information that the answers carried, and ``count`` the number of records, or of persons.
    """

    study: str
    contract: str
    site: str
    dataset: str
    exact: bool
    digest: str = ""
    time: float = 0.0
    bits: float = 0.0
    count: int = 0
    columns: tuple[str, ...] = ()


USES = [field.name for field in fields(Use)][:-2]
SCHEMA = (
    "CREATE TABLE IF NOT EXISTS meta (secret NOT NULL)",
    "CREATE TABLE IF NOT EXISTS sets (digest PRIMARY KEY, count NOT NULL, columns NOT NULL, hashes NOT NULL)",
    f"CREATE TABLE IF NOT EXISTS uses ({', '.join(f'{name} NOT NULL' for name in USES)}, UNIQUE ({', '.join(USES[:6])}))",
    # Of each use the bits of the last request, which is named by its place in the site's log.
    "CREATE TABLE IF NOT EXISTS last (contract, site, dataset, digest, request NOT NULL, bits NOT NULL, "
    "UNIQUE (contract, site, dataset, digest))",
)


class RecordSet(NamedTuple):
    """Keyed hashes of the values of records, of shape (columns, records); of persons, sums over all records of each."""

    columns: tuple[str, ...]
    hashes: np.ndarray

    @property
    def digest(self) -> str:
        """The same for the same records in another order."""
        ordered = self.hashes[:, np.lexsort(self.hashes)]
        return hashlib.sha256(json.dumps(self.columns).encode() + ordered.tobytes()).hexdigest()

    def keys(self, columns: Sequence[str]) -> np.ndarray:
        """One key of the values in these columns for each record or person; without `PART` all have the usual part."""
        rows = [self.columns.index(name) for name in columns if name != PART or PART in self.columns]
        return self.hashes[rows].sum(0, dtype=np.uint64)


def marked_records(*changes: np.ndarray | None) -> list[str]:
    """Texts that differ for records whose weight, trials or offset are not the usual: another part of the sums is theirs."""
    marks: list[list[str]] = []
    for values in (x for x in changes if x is not None and len(x)):
        found, count = np.unique(values, return_counts=True)
        marks.append(["" if x == found[np.argmax(count)] else f"\0{x:.12g}" for x in values])
    return ["".join(each) for each in zip(*marks, strict=True)]


def leaves_few(terms: Sequence[tuple[int, RecordSet]], least: int) -> bool:
    """Whether a signed sum of sets has at least one record, but fewer than ``least``.

    Sets are compared as multisets of the values in the columns that all have: order does not matter, and an edited record
    is one that was removed and one that was added. Of these two numbers the larger counts. Records are compared by their
    values, and once more with the parts of them that studies take: where all parts differ, the records may still be the
    same. Persons are compared by their presence alone too.
    """
    common = [name for name in terms[0][1].columns if name != PART and all(name in each.columns for _, each in terms)]
    signs = [np.full(each.hashes.shape[1], float(sign)) for sign, each in terms]
    # The larger number is at least the difference of both.
    if not common or abs(sum(own.sum() for own in signs)) >= least:
        return False
    parts = [[*common, PART]] if any(PART in each.columns for _, each in terms) else []
    for view in [common, *parts, *([[PERSON]] if PERSON in common else [])]:
        _, which = np.unique(np.concatenate([each.keys(view) for _, each in terms]), return_inverse=True)
        sums = np.bincount(which, np.concatenate(signs))
        if 0 < max(sums.clip(0).sum(), -sums.clip(None, 0).sum()) < least:
            return True
    return False


def is_similar(new: RecordSet, known: Sequence[RecordSet], least: int) -> bool:
    """Whether a sum or difference of the new set and earlier ones leaves few records, but some."""
    for others in range(1, len(known) + 1):
        if math.comb(len(known), others) * 2**others > MOST_COMBINATIONS:
            break
        for chosen, signs in itertools.product(
            itertools.combinations(known, others), itertools.product((-1, 1), repeat=others)
        ):
            if leaves_few([(1, new), *zip(signs, chosen, strict=True)], least):
                return True
    return False


class DataSets:
    """The register of a site in the folder of its ledger, one for all its studies; made at the first use."""

    def __init__(self, folder: str | os.PathLike[str]):
        self.path = Path(folder).resolve() / NAME

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """A durable transaction, all or nothing, one process at a time."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600))
            with closing(connect(self.path, PATIENCE)) as db:
                db.execute("BEGIN IMMEDIATE")
                for statement in SCHEMA:
                    db.execute(statement)
                yield db
                db.execute("COMMIT")
        except PermissionError as error:
            remedy = "Give --ledger, or the variable FEDPDMC_LEDGER, a file in a folder that this user can write to."
            raise InputError("ledger", f"{self.path.parent}, which is not writable", remedy) from error
        except (sqlite3.Error, OSError, zlib.error) as error:
            raise explained(self.path, "use", error) from error

    def hash_records(self, columns: Mapping[str, Iterable[str]]) -> RecordSet:
        """The keyed hashes of records, whose values are texts by column; also `PERSON`, and `PART`, where "" is usual."""
        with self._transaction() as db:
            if (kept := db.execute("SELECT secret FROM meta").fetchone()) is None:
                kept = (secrets.token_bytes(32),)
                db.execute("INSERT INTO meta VALUES (?)", kept)
        hashes = []
        for name, values in columns.items():
            found, which = np.unique(np.asarray(list(values), dtype=object), return_inverse=True)
            macs = (hmac.digest(kept[0], json.dumps([name, text]).encode(), "sha256")[:8] for text in found)
            usual = (found == "") & (name == PART)
            hashes.append(np.where(usual, np.uint64(0), np.frombuffer(b"".join(macs), np.uint64))[which])
        if PERSON in columns:
            people, whose = np.unique(hashes[list(columns).index(PERSON)], return_inverse=True)
            total = np.zeros((len(people), len(hashes)), np.uint64)
            np.add.at(total, whose, np.array(hashes).T)
            hashes = total.T
        return RecordSet(tuple(columns), np.array(hashes))

    def use(self, records: RecordSet, use: Use, least: int, *, register: bool = True) -> None:
        """Register the use of a record set, or only look; raise `Refused` with the code SIMILAR_RECORDS.

        Refused are answers without noise on a set that differs from a combination of earlier ones in fewer than ``least``
        records.
        """
        digest = records.digest
        with self._transaction() as db:
            query = "SELECT DISTINCT sets.* FROM sets JOIN uses USING (digest) WHERE dataset = ? AND exact"
            known = {key: rest for key, *rest in db.execute(query, (use.dataset,))}
            if use.exact and digest not in known:
                sets = [
                    RecordSet(tuple(json.loads(names)), np.frombuffer(zlib.decompress(data), "u8").reshape(-1, count))
                    for count, names, data in known.values()
                ]
                if is_similar(records, sets, least):
                    raise Refused(use.site, "SIMILAR_RECORDS", REMEDY)
            if register:
                data = json.dumps(records.columns), zlib.compress(records.hashes.tobytes())
                db.execute("INSERT OR IGNORE INTO sets VALUES (?, ?, ?, ?)", (digest, records.hashes.shape[1], *data))
                row = astuple(replace(use, digest=digest, time=time.time()))[:-2]
                db.execute(f"INSERT OR IGNORE INTO uses VALUES ({', '.join('?' * len(row))})", row)

    def bits(self, use: Use) -> tuple[float, float]:
        """Bits of the answers to this study's contract so far, and of those to others about the same data set."""
        every = [each for each in self.uses() if each.dataset == use.dataset and each.exact]
        own = sum(each.bits for each in every if (each.contract, each.site) == (use.contract, use.site))
        return own, sum(each.bits for each in every) - own

    def charge(self, use: Use, digest: str, bits: float, request: str = "") -> tuple[float, float]:
        """Add the bits of an answer to a registered use; returns what `bits` does: other studies may go on meanwhile."""
        key = (use.contract, use.site, use.dataset, digest)
        with self._transaction() as db:
            query = "UPDATE uses SET bits = bits + ? WHERE (contract, site, dataset, digest) = (?, ?, ?, ?)"
            if not db.execute(query, (bits, *key)).rowcount:
                raise sqlite3.DatabaseError("this study is not in it")
            query = (
                "INSERT INTO last VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET request = excluded.request, "
                "bits = excluded.bits + CASE WHEN request = excluded.request THEN bits ELSE 0 END"
            )
            db.execute(query, (*key, request, bits))
        return self.bits(use)

    def refund(self, use: Use, digest: str, request: str) -> tuple[float, float]:
        """Take back what a request was charged whose answer never left: the site was killed. Returns what `bits` does."""
        row = (use.contract, use.site, use.dataset, digest, request)
        with self._transaction() as db:
            query = "SELECT bits FROM last WHERE (contract, site, dataset, digest, request) = (?, ?, ?, ?, ?)"
            if (charged := db.execute(query, row).fetchone()) is not None:
                query = "UPDATE uses SET bits = bits - ? WHERE (contract, site, dataset, digest) = (?, ?, ?, ?)"
                db.execute(query, (*charged, *row[:4]))
                db.execute("UPDATE last SET bits = 0 WHERE (contract, site, dataset, digest) = (?, ?, ?, ?)", row[:4])
        return self.bits(use)

    def uses(self) -> list[Use]:
        """All uses, in the order of time."""
        with self._transaction() as db:
            query = f"SELECT {', '.join(USES)}, count, columns FROM uses JOIN sets USING (digest) ORDER BY time"
            return [Use(*rest, columns=tuple(json.loads(columns))) for *rest, columns in db.execute(query)]
