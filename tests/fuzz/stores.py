"""Parsers of what a party has stored. An intruder may have changed a file and computed its hashes again."""

import contextlib
import hashlib
import io
import json
import shutil
import sqlite3
import zipfile
from pathlib import Path

from tests.federation.requests import RUN, joined, opening, plans
from tests.federation.studies import Folder
from tests.fuzz.engine import Target

import fedpdmc as fp
from fedpdmc.assessment.at_site import public_draws
from fedpdmc.errors import FedPDMCError
from fedpdmc.federation.audit_seals import Witness, read_seals
from fedpdmc.federation.coordinator_store import Checkpoint
from fedpdmc.federation.session import _identity, check_state
from fedpdmc.federation.site_agent import audit_log
from fedpdmc.federation.site_agent.audit_replay import compare, show
from fedpdmc.privacy import ledger
from fedpdmc.privacy.ledger import Ledger
from fedpdmc.results import manifest
from fedpdmc.results.path_store import SkeletonStore


def _site(folder: Path) -> tuple[Folder, Path]:
    """A study, and the store of a site that has joined and answered."""
    made, store = Folder(folder / "study"), folder / "store"
    agent = joined(made, store)
    for data in (opening(), plans(), plans(3, 1, 1), opening(9)):
        agent.answer(data)
    agent.log.close()
    return made, store


def sealed(data: bytes) -> bytes:
    """The entries of a log, whatever is in them, with right seals."""
    place, out, seal = len(audit_log.TITLE), [audit_log.TITLE], hashlib.sha256(audit_log.TITLE).digest()
    size = audit_log.HEAD.size
    while place + size <= len(data):
        head = data[place : place + size]
        payload = data[place + size : place + size + audit_log.HEAD.unpack(head)[0]]
        head = audit_log.HEAD.pack(len(payload), *audit_log.HEAD.unpack(head)[1:])
        seal = hashlib.sha256(seal + head + payload).digest()
        out.append(head + payload + seal)
        place += size + len(payload) + audit_log.SEAL
    return b"".join(out)


def logs(folder: Path) -> Target:
    """An audit log: as it is, or with its seals made again."""
    made, store = _site(folder)
    path, names = store / "audit.log", folder / "seals.jsonl"
    content = path.read_bytes()
    line = {"site": "north", "entries": 2, "seal": "00" * 32, "when": 1.0, "certificate": "x", "signature": "00"}
    names.write_text(json.dumps(line | {"run": RUN.hex(), "study": made.study.digest.hex()}) + "\n")
    authority = made.keys("coordinator") / "authority.pem"

    def read(data: bytes):
        path.write_bytes(data[1:] if data[:1] == b"R" else sealed(data[1:]))
        (store / "audit.index").unlink(missing_ok=True)
        first = None
        for use in (lambda: list(show(store)), lambda: compare(store, names, authority)):
            try:
                use()
            except FedPDMCError as error:
                first = error
        log = audit_log.AuditLog(store)
        try:
            for place in range(log.answers):
                log.read_answer(place)
            log.note("fuzz", n=1)
        finally:
            log.close()
        if first is not None:
            raise first
        agent = joined(made, store)
        agent.log.close()

    words = (
        b'{"event": "joined"',
        b'"event": "sealed"',
        b'"event": "witnessed"',
        b'"event": "software"',
        b'"entries": ',
        RUN,
    )
    return Target("audit log", [b"R" + content, b"S" + content], read, words)


def seal_files(folder: Path) -> Target:
    """The coordinator's file of seals."""
    made, store = _site(folder)
    path, authority = folder / "seals.jsonl", made.keys("coordinator") / "authority.pem"
    line = {"site": "north", "entries": 2, "seal": "00" * 32, "when": 1.0, "certificate": "x", "signature": "00"}
    text = json.dumps(line | {"run": RUN.hex(), "study": made.study.digest.hex()}) + "\n"

    def read(data: bytes):
        path.write_bytes(data)
        read_seals(path)
        compare(store, path, authority)
        Witness(made.study, RUN, None, folder)  # type: ignore[arg-type]

    return Target("seals", [text.encode(), text.encode() * 2], read, tuple(f'"{key}": '.encode() for key in line))


def site_secrets(folder: Path) -> Target:
    """The seed and the key of sums in a site's store."""
    store = folder / "secrets"
    audit_log.site_seed(store, 5), audit_log.sum_secret(store)
    files = [store / audit_log.SEED, store / audit_log.SUM_KEY]
    content = [path.read_bytes() for path in files]

    def read(data: bytes):
        from fedpdmc.federation import masking

        which = data[0] % 2 if data else 0
        files[which].write_bytes(data[1:])
        try:
            audit_log.site_seed(store, None)
            masking.public_of(audit_log.sum_secret(store))
        finally:
            files[which].write_bytes(content[which])

    return Target("secrets", [b"\0" + content[0], b"\1" + content[1]], read, (b"-1", b"1_0", "٣".encode()))


def _arrays(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        return {name: file.read(name) for name in file.namelist()}


def checkpoints(folder: Path) -> Target:
    """A coordinator's store: any file changed, or one array within it, with or without a new manifest."""
    made, store = Folder(folder / "run"), folder / "coordinator"
    seeds = dict.fromkeys(made.study.sites, 5)
    with fp.connect(made.study, data=made.data, seed=3, site_seeds=seeds, store=store) as connection:
        fp.sample(connection, progress=False)
        flow = made.study.dynamics().flow
    shutil.rmtree(store / "sites")
    files = [manifest.NAME, *manifest.read(store, "store")]
    content = {name: (store / name).read_bytes() for name in files}
    parts = [(name, part) for name in files[1:] for part in _arrays(content[name])]
    samples = [b"F" + bytes([place]) + content[name] for place, name in enumerate(files)]
    samples += [b"A" + bytes([place]) + _arrays(content[name])[part] for place, (name, part) in enumerate(parts)]

    def read(data: bytes):
        whole, place = data[:1] == b"F", data[1] if len(data) > 1 else 0
        name, part = (files[place % len(files)], "") if whole else parts[place % len(parts)]
        out = data[2:]
        if not whole:
            new, packed = _arrays(content[name]) | {part: out}, io.BytesIO()
            with zipfile.ZipFile(packed, "w") as file:
                for key, value in new.items():
                    file.writestr(key, value)
            out = packed.getvalue()
        (store / name).write_bytes(out)
        if name != manifest.NAME:
            known = {one: manifest.digest(store / one) for one in files[1:]}
            manifest.write(store, known)
        try:
            found = Checkpoint(store)
            saved = found.read()
            if saved is not None:
                _identity(made.study, None, saved, None)
                check_state(made.study, saved)
            found.fill(SkeletonStore(flow))
        finally:
            for one in {name, manifest.NAME}:
                (store / one).write_bytes(content[one])

    return Target(
        "checkpoint",
        samples,
        read,
        (b"'descr': '<f8'", b"'shape': (", b"'fortran_order': ", b'"format": ', b"|O", b'"goal": '),
    )


def archives(folder: Path) -> Target:
    """A saved posterior: any file changed, with or without a new manifest."""
    made, path = Folder(folder / "archived"), folder / "posterior.zarr"
    post = made.in_process()
    post.save(path)
    files = [manifest.NAME, *manifest.listed(path)]
    content = {name: (path / name).read_bytes() for name in files}
    hashes = {name: manifest.digest(path / name) for name in files[1:]}
    samples = [bytes([place]) + content[name] for place, name in enumerate(files) if len(content[name]) < 1 << 16]

    def read(data: bytes):
        name = files[data[0] % len(files)] if data else files[0]
        (path / name).write_bytes(data[1:])
        if name != manifest.NAME:
            manifest.write(path, hashes | {name: manifest.digest(path / name)})
        try:
            found = fp.load(path)
            found.mean(), public_draws(found)
        finally:
            for one in {name, manifest.NAME}:
                (path / one).write_bytes(content[one])

    words = (
        b'"shape":[',
        b'"data_type":"float64"',
        b'"codecs":',
        b'"chunk_shape":',
        b'"format":4',
        b'"keep":"draws"',
        b'"span":',
        b'"names":',
    )
    return Target("archive", samples, read, words)


ACCOUNT = ledger.Account("patients", 1.0, 1e-6, "replace", 20.0, 1.0)


def ledgers(folder: Path) -> Target:
    """A ledger: its bytes, or entries of any content with their hashes computed again; and the note of its last entry."""
    path = ledger.create_ledger(folder / "ledger.db")
    own = Ledger.open(path)
    own.account(ACCOUNT)
    for number in range(3):
        request = ledger.LedgerRequest("patients", "s", "r", "round", number, b"plan")
        own.answer(request, 0.01, lambda key: ledger.Reply(key[:8], 1.0, 0.005))
    own.close()
    content = path.read_bytes()
    entries = ledger.read(path)
    head = ledger.head_path(path)
    noted = head.read_bytes() if head.exists() else b'["00", 1, "00"]'
    with sqlite3.connect(path) as base:
        secret = base.execute("SELECT secret FROM meta").fetchone()[0]
    base.close()

    def plain(value):
        return {"hex": value.hex()} if isinstance(value, bytes) else value

    listed = json.dumps([[plain(value) for value in entry[1:-1]] for entry in entries]).encode()

    def rebuilt(data: bytes) -> None:
        try:
            rows = [
                tuple(bytes.fromhex(one["hex"]) if isinstance(one, dict) else one for one in row)
                for row in json.loads(data)
            ]
            with contextlib.closing(sqlite3.connect(path)) as base, base:
                base.execute("DROP TRIGGER no_delete")
                base.execute("DELETE FROM entries")
                previous = b""
                for seq, row in enumerate(rows, 1):
                    previous = ledger.entry_hash(previous, seq, row)
                    marks = ", ".join("?" * (len(row) + 2))
                    base.execute(f"INSERT INTO entries VALUES ({marks})", (seq, *row, previous))
                base.execute(ledger.SCHEMA[-1])
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError, sqlite3.Error):
            # Not a list of rows: then the ledger is as it was.
            path.write_bytes(content)

    def read(data: bytes):
        path.write_bytes(data[1:] if data[:1] == b"F" else content)
        head.write_bytes(data[1:] if data[:1] == b"H" else noted)
        if data[:1] == b"E":
            rebuilt(data[1:])
        for entry in ledger.read(path):
            if entry.kind == "account":
                ledger.account_of(entry)
        ledger.check_head(path, secret, ledger.read(path))
        Ledger(path).close()

    return Target(
        "ledger",
        [b"F" + content, b"E" + listed, b"H" + noted],
        read,
        (b'{"hex": "00"}', b"null", b'"account"', b'"round reserved"', b'"epsilon": '),
    )


TARGETS = (logs, seal_files, site_secrets, checkpoints, archives, ledgers)
