"""Seals of a site's log, exchanged while a run goes on, so that neither side can rewrite it alone.

A seal is the hash of all entries of the log so far. The site signs it with the key of its certificate, and the
coordinator keeps that in ``seals.jsonl``: a log that was written anew has other seals. The coordinator signs that it has
received it, and the site keeps that in its log: a coordinator cannot disown what it has asked until then.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import NamedTuple

from fedpdmc.certificates import keys
from fedpdmc.certificates.keys import Credentials
from fedpdmc.errors import BadAnswer, InputError
from fedpdmc.federation import messages
from fedpdmc.federation.site_agent.audit_log import Journal, Kind, sealed_log
from fedpdmc.study.contract import Study

FILE = "seals.jsonl"
SEALED, WITNESSED = "sealed", "witnessed"


class Seal(NamedTuple):
    """How many entries a log has, and the hash of all of them."""

    entries: int
    digest: bytes

    def statement(self, word: str, run: bytes, study: bytes, site: str) -> bytes:
        """What is signed: by the site with the word "sealed", by the coordinator with "witnessed"."""
        told = f"fedpdmc {word} {run.hex()} {study.hex()} {self.entries} {self.digest.hex()} {site}"
        return told.encode()


class Sealing:
    """A site's part: signs what its log has come to, and logs what the coordinator has signed of it.

    Parameters
    ----------
    journal : Journal
    study : Study
    name : str
        The site's.
    credentials : Credentials or None
        None on a plain connection: nothing is signed then.
    """

    def __init__(self, journal: Journal, study: Study, name: str, credentials: Credentials | None):
        self.journal, self.study, self.name, self.credentials = journal, study, name, credentials
        self._last: Seal | None = None
        # Answers that were given by then, and whether the coordinator has signed for it: who asks for ever fills no disk.
        self._answers, self._witnessed = -1, True

    def recall(self, note: dict) -> None:
        """Come back to where the log ends, note by note."""
        if note["event"] in (SEALED, WITNESSED):
            self._last = Seal(note["entries"], bytes.fromhex(note["seal"]))
            self._witnessed = note["event"] == WITNESSED

    def answer(self, message: messages.Attest, asked: bytes) -> bytes:
        """The site's seal, the same one as long as nothing new has been answered."""
        self._receive(message)
        if self._last is None or self.journal.answers != self._answers:
            self._last = Seal(*self.journal.head)
            self._answers, self._witnessed = self.journal.answers, False
            self.journal.note(SEALED, entries=self._last.entries, seal=self._last.digest.hex())
        own, certificate, signature = self.credentials, b"", b""
        if own is not None:
            said = self._last.statement(SEALED, message.run, self.study.digest, self.name)
            certificate, signature = own.certificate, keys.sign(own, said)
        answer = messages.Attested(
            message.run, message.sequence, asked, self._last.entries, self._last.digest, certificate, signature
        )
        return messages.encode(answer)

    def _receive(self, message: messages.Attest) -> None:
        """Log that the coordinator has signed for the last seal, if it has."""
        told = Seal(message.entries, message.seal)
        if self._witnessed or told != self._last or self.credentials is None:
            return
        said = told.statement(WITNESSED, message.run, self.study.digest, self.name)
        signed = keys.signer(self.credentials, message.certificate, message.signature, said)
        if signed is None or signed in self.study.sites:
            return
        self._witnessed = True
        self.journal.note(
            WITNESSED, entries=told.entries, seal=told.digest.hex(), certificate=_text(message.certificate),
            signature=message.signature.hex(),
        )  # fmt: skip


class Witness:
    """The coordinator's part: asks the sites for seals, checks and keeps them, and signs for them.

    Parameters
    ----------
    study : Study
    run : bytes
    credentials : Credentials
    folder : path, optional
        Where they are kept, in ``seals.jsonl``.
    """

    def __init__(self, study: Study, run: bytes, credentials: Credentials, folder: Path | None = None):
        self.study, self.run, self.credentials, self.folder = study, run, credentials, folder
        self._last: dict[str, Seal] = {}
        for line in () if folder is None else read_seals(folder / FILE):
            self._last[line["site"]] = Seal(line["entries"], bytes.fromhex(line["seal"]))

    def request(self, name: str, sequence: int) -> messages.Attest:
        """What a site is asked: its seal, with the coordinator's signature for its last one."""
        last = self._last.get(name)
        if last is None:
            return messages.Attest(self.run, sequence, 0, messages.NOTHING_ASKED, b"", b"")
        own = self.credentials
        signature = keys.sign(own, last.statement(WITNESSED, self.run, self.study.digest, name))
        return messages.Attest(self.run, sequence, *last, own.certificate, signature)

    def take(self, name: str, message: messages.Attested) -> None:
        """Check and keep a site's seal."""
        seal = Seal(message.entries, message.seal)
        said = seal.statement(SEALED, self.run, self.study.digest, name)
        if keys.signer(self.credentials, message.certificate, message.signature, said) != name:
            raise BadAnswer(name, "a seal of its log that it has not signed")
        before = self._last.get(name)
        if before is not None and (seal.entries < before.entries or seal.entries == before.entries and seal != before):
            raise BadAnswer(name, "a seal of another log than the one that it had sealed before")
        if seal == before:
            return
        self._last[name] = seal
        if self.folder is not None:
            line = {"site": name, "entries": seal.entries, "seal": seal.digest.hex(), "when": time.time()}
            line |= {"certificate": _text(message.certificate), "signature": message.signature.hex()}
            with open(self.folder / FILE, "a") as file:
                file.write(json.dumps(line | {"run": self.run.hex(), "study": self.study.digest.hex()}) + "\n")
                file.flush()
                os.fsync(file.fileno())


def _text(certificate: bytes) -> str:
    """A certificate as text; before it there may be anything."""
    return certificate.decode("ascii", "replace")


def read_seals(path: Path) -> list[dict]:
    """The seals that a coordinator has kept, those of a torn last line left out."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text().split("\n")[:-1]:
        try:
            found.append(json.loads(line))
        except ValueError as error:
            raise InputError("seals", f"{path}, which cannot be read", "Restore it from a copy.") from error
    return found


def compare(store: Path, seals: Path, credentials: Credentials) -> list[str]:
    """Compare a site's log with the seals that its coordinator has kept; returns what does not agree, in sentences."""
    known = {count: seal for count, (_, seal) in enumerate(sealed_log(store), 1)}
    joined, faults = {}, []
    for entry, _ in sealed_log(store):
        if entry.kind is Kind.NOTE and entry.note["event"] == "joined":
            joined = entry.note
        elif entry.kind is Kind.NOTE and entry.note["event"] == WITNESSED:
            note, seal = entry.note, Seal(entry.note["entries"], bytes.fromhex(entry.note["seal"]))
            said = seal.statement(WITNESSED, *_identity(joined))
            signed = _signed(credentials, note, said, entry.when)
            if signed is None or signed == joined.get("site") or known.get(seal.entries) != seal.digest:
                faults.append(
                    f"the log says that the coordinator has signed for {seal.entries} entries, and it has not"
                )
    if not joined:
        return ["the site has joined no run"]
    own = [line for line in read_seals(seals) if line["site"] == joined["site"]]
    if not own:
        faults.append(f"{seals} has no seal of site {joined['site']!r}")
    for line in own:
        seal = Seal(line["entries"], bytes.fromhex(line["seal"]))
        said = seal.statement(SEALED, *_identity(joined))
        signed = _signed(credentials, line, said, line["when"])
        if signed != joined["site"]:
            faults.append(f"the coordinator's seal of {seal.entries} entries is not signed by site {joined['site']!r}")
        elif known.get(seal.entries) != seal.digest:
            faults.append(f"the first {seal.entries} entries are not those that the site has sealed")
    return faults


def _signed(credentials: Credentials, line: dict, said: bytes, when: float) -> str | None:
    return keys.signer(credentials, line["certificate"].encode(), bytes.fromhex(line["signature"]), said, when)


def _identity(joined: dict) -> tuple[bytes, bytes, str]:
    if not joined:
        return b"", b"", ""
    return bytes.fromhex(joined["run"]), bytes.fromhex(joined["study"]), joined["site"]
