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
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedpdmc.errors import InputError, Refused
from fedpdmc.privacy.ledger import connect, explained

NAME = "data-sets.db"
PATIENCE = 60.0  # seconds to wait for another study of the same site
PERSON = ""  # the pseudo-column of what identifies a person
# Of how much of a record a study takes, as differences from what is usual in it; left out of a set where there is none.
PARTS = ("\0log weight", "\0log trials", "\0offset")
LEAST_CHANGE = 1e-9  # of a part: less is rounding
DIGITS = 6  # after the point to which parts are equal
SPREAD = np.uint64(0x9E3779B97F4A7C15)  # an odd number, which spreads small numbers over all hashes
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
    release, ``bits`` the information that the answers carried, and ``count`` the number of records.
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


@dataclass(frozen=True, eq=False)
class RecordSet:
    """Keyed hashes of the values of records, of shape (columns, records); in rows of `PARTS` the bits of numbers."""

    columns: tuple[str, ...]
    hashes: np.ndarray

    @property
    def digest(self) -> str:
        """The same for the same records in another order."""
        ordered = self.hashes[:, np.lexsort(self.hashes)]
        return hashlib.sha256(json.dumps(self.columns).encode() + ordered.tobytes()).hexdigest()

    @cached_property
    def parts(self) -> np.ndarray:
        """How much of each record a study takes, of shape (parts, records)."""
        none = np.zeros(self.hashes.shape[1])
        rows = {name: row.view(float) for name, row in zip(self.columns, self.hashes, strict=True) if name in PARTS}
        return np.array([rows.get(name, none) for name in PARTS])

    def keys(self, columns: Sequence[str]) -> np.ndarray:
        """One key of the values in these columns for each record."""
        return self.hashes[[self.columns.index(name) for name in columns]].sum(0, dtype=np.uint64)

    @cached_property
    def persons(self) -> RecordSet:
        """With a column for each person: sums of the hashes of all records of each, and means of the parts."""
        people, whose = np.unique(self.hashes[self.columns.index(PERSON)], return_inverse=True)
        count = np.bincount(whose)
        if len(people) == len(whose):
            return self
        total = np.zeros((len(self.columns), len(people)), np.uint64)
        for name, row, to in zip(self.columns, self.hashes, total, strict=True):
            if name in PARTS:
                to[:] = (np.bincount(whose, row.view(float)) / count).view(np.uint64)
            else:
                np.add.at(to, whose, row)
        return RecordSet(self.columns, total)


def record_parts(weights: np.ndarray, trials: np.ndarray | None, offset: np.ndarray | None) -> dict[str, np.ndarray]:
    """The parts of records whose weights and trials are above zero: `PARTS` that are not the same for all."""
    given = (np.log(weights), None if trials is None else np.log(trials), offset)
    found = {}
    for name, values in zip(PARTS, given, strict=True):
        if values is not None and len(values) and np.ptp(values) > 0:
            different, count = np.unique(values, return_counts=True)
            found[name] = values - different[np.argmax(count)]
    return found


class _Side(NamedTuple):
    """One side of a difference of sets: keys of records, and their parts."""

    keys: np.ndarray
    parts: np.ndarray

    def ordered(self) -> _Side:
        """In order of keys and parts."""
        order = np.lexsort((*self.parts, self.keys))
        return _Side(self.keys[order], self.parts[:, order])

    def numbered(self) -> np.ndarray:
        """The keys of an ordered side; one that occurs again has the number of the time."""
        again = np.arange(len(self.keys)) - np.searchsorted(self.keys, self.keys)
        return self.keys + again.astype(np.uint64) * SPREAD


def _excess(one: np.ndarray, other: np.ndarray) -> int:
    """In how many entries two multisets differ; an entry that is replaced counts once."""
    _, which = np.unique(np.concatenate([one, other]), return_inverse=True)
    sums = np.bincount(which, np.repeat([1.0, -1.0], [len(one), len(other)]))
    return round(max(sums.clip(0).sum(), -sums.clip(None, 0).sum()))


def _differing(one: _Side, other: _Side) -> list[float]:
    """In how many records two sides differ, by two measures; a change of the parts that is common to all does not count.

    The first counts the records that have no equal. The second is the effective number of changes: 1 for a record that is on
    one side only, and the change of its part for one that is on both. If those of most records are tiny, a few count.
    """
    one, other = one.ordered(), other.ordered()
    _, left, right = np.intersect1d(one.numbered(), other.numbered(), assume_unique=True, return_indices=True)
    change = one.parts[:, left] - other.parts[:, right]
    common = np.median(change, axis=1) if len(left) else np.zeros(len(PARTS))
    unequal = [one.keys, other.keys]
    for row, shift in enumerate(common):
        for side, parts in enumerate((one.parts[row] - shift, other.parts[row])):
            whole = np.round(parts * 10.0**DIGITS).astype(np.int64).view(np.uint64)
            unequal[side] = unequal[side] + whole * (SPREAD + np.uint64(2 * row + 2))
    size = np.abs(change - common[:, None]).max(0, initial=0.0).clip(None, 1.0)
    sizes = np.append(
        np.where(size < LEAST_CHANGE, 0.0, size), np.ones(max(len(one.keys), len(other.keys)) - len(left))
    )
    return [_excess(*unequal), float(sizes.sum() ** 2 / max(np.sum(sizes**2), 1e-300))]


def leaves_few(terms: Sequence[tuple[int, RecordSet]], least: int) -> bool:
    """Whether a signed sum of sets has at least one record, but fewer than ``least``.

    Sets are compared as multisets of the values in the columns that all have: order does not matter, and an edited record
    is one that was removed and one that was added. Of these two numbers the larger counts. A record of which another part is
    taken than of the others has changed too. Persons are compared if all sets have them, by their presence alone too; else
    records are.
    """
    common = [
        name for name in terms[0][1].columns if name not in PARTS and all(name in each.columns for _, each in terms)
    ]
    if PERSON in common:
        terms = [(sign, each.persons) for sign, each in terms]
    if not common:
        return False
    for view in [common, *([[PERSON]] if PERSON in common else [])]:
        sides = []
        for sign in (1, -1):
            own = [each for s, each in terms if s == sign] or [
                RecordSet(terms[0][1].columns, terms[0][1].hashes[:, :0])
            ]
            keys, parts = [each.keys(view) for each in own], [each.parts for each in own]
            sides.append(_Side(np.concatenate(keys), np.concatenate(parts, axis=1)))
        # Either measure is at least the number of records without an equal in their values.
        if _excess(sides[0].keys, sides[1].keys) < least and any(0 < x < least for x in _differing(*sides)):
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

    def secret(self) -> bytes:
        """The key of the hashes."""
        with self._transaction() as db:
            if (kept := db.execute("SELECT secret FROM meta").fetchone()) is None:
                kept = (secrets.token_bytes(32),)
                db.execute("INSERT INTO meta VALUES (?)", kept)
        return kept[0]

    def hash_records(
        self, columns: Mapping[str, Iterable[str]], parts: Mapping[str, np.ndarray] | None = None
    ) -> RecordSet:
        """The keyed hashes of records, whose values are texts by column, with `PERSON` if known; and their `PARTS`."""
        secret, hashes = self.secret(), []
        for name, values in columns.items():
            found, which = np.unique(np.asarray(list(values), dtype=object), return_inverse=True)
            macs = b"".join(hmac.digest(secret, json.dumps([name, text]).encode(), "sha256")[:8] for text in found)
            hashes.append(np.frombuffer(macs, np.uint64)[which])
        parts = {} if parts is None else parts
        hashes += [np.asarray(values, float).view(np.uint64) for values in parts.values()]
        return RecordSet((*columns, *parts), np.array(hashes))

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
