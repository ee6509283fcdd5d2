"""Seals of a site's log, exchanged during a run, so that neither side can rewrite the log alone.

A seal is the hash of all entries of the log so far. The site signs it with the key of its certificate, and the coordinator
stores it in ``seals.jsonl``: a rewritten log has other seals. The coordinator signs that it has received the seal, and the
site stores this signature in its log: the coordinator cannot deny its requests up to then.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import NamedTuple

from fedpdmc import certificates as keys
from fedpdmc.certificates import Credentials
from fedpdmc.errors import BadAnswer, InputError
from fedpdmc.federation import messages
from fedpdmc.federation.site_agent.audit_log import AuditLog, Kind, read_log
from fedpdmc.study.contract import Study
from fedpdmc.validation import has_fields

FILE = "seals.jsonl"
SEALED, WITNESSED = "sealed", "witnessed"
LINE = {"site": str, "entries": int, "seal": bytes, "when": (int, float), "certificate": str, "signature": bytes}


class Seal(NamedTuple):
    """The number of entries of a log, and the hash of all of them."""

    entries: int
    digest: bytes

    def statement(self, word: str, run: bytes, study: bytes, site: str) -> bytes:
        """The signed bytes: by the site with the word "sealed", by the coordinator with "witnessed"."""
        return f"fedpdmc {word} {run.hex()} {study.hex()} {self.entries} {self.digest.hex()} {site}".encode()

    @classmethod
    def read(cls, line: dict) -> Seal:
        """The seal in a note of a log, or in a line of a coordinator's file."""
        return cls(line["entries"], bytes.fromhex(line["seal"]))


class Sealing:
    """A site's part: signs the hash of its log, and logs the coordinator's signatures.

    ``name``: the site's. ``credentials``: none on a plain connection: nothing is signed then.
    """

    def __init__(self, log: AuditLog, study: Study, name: str, credentials: Credentials | None):
        self.log, self.study, self.name, self.credentials = log, study, name, credentials
        self._last: Seal | None = None
        # The number of answers at the last seal, and whether the coordinator has signed it: repeated requests log nothing.
        self._answers, self._witnessed = -1, True

    def restore(self, note: dict) -> None:
        """Restore the state from the notes of the log, one by one."""
        if note["event"] in (SEALED, WITNESSED):
            self._last = Seal.read(note)
            self._witnessed = note["event"] == WITNESSED

    def seal(self, message: messages.Attest, asked: bytes) -> bytes:
        """The site's seal, encoded; the same one as long as there are no new answers."""
        self._receive(message)
        if self._last is None or self.log.answers != self._answers:
            self._last = Seal(*self.log.head)
            self._answers, self._witnessed = self.log.answers, False
            self.log.note(SEALED, entries=self._last.entries, seal=self._last.digest.hex())
        own, proof = self.credentials, (b"", b"")
        if own is not None:
            statement = self._last.statement(SEALED, message.run, self.study.digest, self.name)
            proof = own.certificate, keys.sign(own, statement)
        return messages.encode(messages.Attested(message.run, message.sequence, asked, *self._last, *proof))

    def _receive(self, message: messages.Attest) -> None:
        """Log the coordinator's signature of the last seal, if it is valid."""
        seal = Seal(message.entries, message.seal)
        if self._witnessed or seal != self._last or self.credentials is None:
            return
        statement = seal.statement(WITNESSED, message.run, self.study.digest, self.name)
        signer = keys.signer(self.credentials, message.certificate, message.signature, statement)
        if signer is not None and signer not in self.study.sites:
            self._witnessed = True
            self.log.note(WITNESSED, entries=seal.entries, seal=seal.digest.hex(), **_proof(message))


class Witness:
    """The coordinator's part: requests, checks, stores and signs the sites' seals.

    ``folder``: where to store them, in ``seals.jsonl``.
    """

    def __init__(self, study: Study, run: bytes, credentials: Credentials, folder: Path | None = None):
        self.study, self.run, self.credentials, self.folder = study, run, credentials, folder
        self._last: dict[str, Seal] = {}
        for line in () if folder is None else read_seals(folder / FILE):
            self._last[line["site"]] = Seal.read(line)

    def request(self, name: str, sequence: int) -> messages.Attest:
        """The request for a site's seal, with the coordinator's signature of the previous one."""
        last = self._last.get(name)
        if last is None:
            return messages.Attest(self.run, sequence, 0, messages.NOTHING_ASKED, b"", b"")
        own = self.credentials
        signature = keys.sign(own, last.statement(WITNESSED, self.run, self.study.digest, name))
        return messages.Attest(self.run, sequence, *last, own.certificate, signature)

    def add(self, name: str, message: messages.Attested) -> None:
        """Check and store a site's seal."""
        seal = Seal(message.entries, message.seal)
        statement = seal.statement(SEALED, self.run, self.study.digest, name)
        if keys.signer(self.credentials, message.certificate, message.signature, statement) != name:
            raise BadAnswer(name, "a seal without the site's signature")
        before = self._last.get(name)
        if before is not None and (seal.entries < before.entries or seal.entries == before.entries and seal != before):
            raise BadAnswer(name, "a seal that contradicts an earlier seal of its log")
        if seal == before:
            return
        self._last[name] = seal
        if self.folder is not None:
            line = {"site": name, "entries": seal.entries, "seal": seal.digest.hex(), "when": time.time()}
            line |= _proof(message) | {"run": self.run.hex(), "study": self.study.digest.hex()}
            with open(self.folder / FILE, "a") as file:
                file.write(json.dumps(line) + "\n")
                file.flush()
                os.fsync(file.fileno())


def _proof(message: messages.Attest | messages.Attested) -> dict[str, str]:
    """Certificate and signature as text. Arbitrary bytes may precede the certificate."""
    return {"certificate": message.certificate.decode("ascii", "replace"), "signature": message.signature.hex()}


def read_seals(path: Path) -> list[dict]:
    """The seals that a coordinator has stored. An incomplete last line is skipped."""
    if not path.exists():
        return []
    found = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            found.append(json.loads(line))
        except (ValueError, RecursionError):
            found.append(None)
        if not has_fields(found[-1], LINE):
            raise InputError("seals", f"{path}, line {number}, which is not a seal", "Restore it from a copy.")
    return found


def compare(store: Path, seals: Path, credentials: Credentials) -> list[str]:
    """Compare a site's log with the seals that its coordinator has stored; returns the differences as sentences."""
    known = {count: entry.seal for count, entry in enumerate(read_log(store), 1)}
    joined, faults = {}, []

    def signer(line: dict, seal: Seal, word: str, when: float) -> str | None:
        identity = (b"", b"", "")
        if joined:
            identity = bytes.fromhex(joined["run"]), bytes.fromhex(joined["study"]), joined["site"]
        proof = line["certificate"].encode(), bytes.fromhex(line["signature"])
        return keys.signer(credentials, *proof, seal.statement(word, *identity), when)

    for entry in read_log(store):
        if entry.kind is Kind.NOTE and entry.note["event"] == "joined":
            joined = entry.note
        elif entry.kind is Kind.NOTE and entry.note["event"] == WITNESSED:
            seal = Seal.read(entry.note)
            name = signer(entry.note, seal, WITNESSED, entry.when)
            if name is None or name == joined.get("site") or known.get(seal.entries) != seal.digest:
                faults.append(
                    f"the log contains a signature of the coordinator for {seal.entries} entries, but it is not valid"
                )
    if not joined:
        return ["the site has not joined a run"]
    lines = [line for line in read_seals(seals) if line["site"] == joined["site"]]
    if not lines:
        faults.append(f"{seals} has no seal of site {joined['site']!r}")
    for line in lines:
        seal = Seal.read(line)
        if signer(line, seal, SEALED, line["when"]) != joined["site"]:
            faults.append(f"the coordinator's seal of {seal.entries} entries is not signed by site {joined['site']!r}")
        elif known.get(seal.entries) != seal.digest:
            faults.append(f"the first {seal.entries} entries are not the ones that the site has sealed")
    return faults
