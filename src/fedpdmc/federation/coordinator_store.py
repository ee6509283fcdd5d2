"""A run on disk: one file for each block of paths, and the current state, which is replaced atomically."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from fedpdmc.errors import InputError
from fedpdmc.federation import messages
from fedpdmc.federation.transport import Request
from fedpdmc.results import manifest
from fedpdmc.results.manifest import RESTORE
from fedpdmc.results.path_store import RunState, Store
from fedpdmc.results.skeleton import Block, Skeleton

logger = logging.getLogger("fedpdmc.coordinator")
FORMAT = 4
BLOCKS = "blocks"
STATE = re.compile(r"state-[0-9]{8,18}\.npz")
RETRY_SECONDS = 120.0  # for which writing is retried without free file descriptors
PAUSE = 0.5  # seconds between two tries
Result = TypeVar("Result")


class Checkpoint:
    """The folder of one run at its coordinator.

    Every block is a file in ``blocks`` that is written once; ``state-N.npz`` is the current state. ``manifest.json`` has the
    SHA-256 of all valid files. It is replaced by renaming a complete file, after the others are on disk: a crash leaves the
    previous state with its blocks, and at most one file of each kind that is not in the manifest.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.blocks, self._states = 0, 0
        # The hashes of the valid files, and of a block that becomes valid with the next state.
        self._files: dict[str, str] = {}

    def read(self) -> RunState | None:
        """The stored state, or None for a new run. Raises `InputError` for missing, changed or extra files."""
        present = self._present()
        if not (self.folder / manifest.NAME).exists():
            if set(present) - {_state(0)}:
                raise InputError("store", f"{self.folder / manifest.NAME} missing", manifest.RESTORE)
            return None
        known = manifest.read(self.folder, "store")
        states = [name for name in known if not name.startswith(BLOCKS)]
        blocks = {_block(number) for number in range(len(known) - len(states))}
        if len(states) != 1 or not STATE.fullmatch(states[0]) or blocks != set(known) - set(states):
            raise InputError("store", f"{self.folder / manifest.NAME} of something else", manifest.RESTORE)
        self.blocks, self._states = len(known) - len(states), _number(states[0]) + 1
        # Files that crashes may have left: the next block and state, and replaced states that were not deleted.
        older = {_state(number) for number in range(self._states - 1)}
        spare = ({_block(self.blocks), _state(self._states)} | older) & (set(present) - set(known))
        self._files = manifest.check(self.folder, "store", set(present) - spare)
        for name in spare:
            (self.folder / name).unlink()
        facts, arrays = self._load(states[0])
        return RunState(facts, arrays)

    def _present(self) -> list[str]:
        """The files of the run that exist."""
        found = [path for path in self.folder.glob("state*") if path.suffix != manifest.DRAFT]
        found += [path for path in (self.folder / BLOCKS).glob("*") if path.suffix != manifest.DRAFT]
        for path in (*found, self.folder / BLOCKS):
            if path.is_symlink():
                raise InputError("store", f"{path}, a symbolic link", "Put the file itself there.")
        return [path.relative_to(self.folder).as_posix() for path in found]

    def _load(self, name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        with _unreadable(self.folder / name):
            with np.load(self.folder / name, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            facts = json.loads(_ascii(arrays.pop("facts")))
            version = facts["format"]
        if version != FORMAT:
            raise InputError("store", f"format {version}", f"This version of fedpdmc reads format {FORMAT}.")
        return facts, arrays

    def write(self, facts: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        """Replace the state atomically."""
        _retrying(lambda: self._write({"format": FORMAT, **facts}, arrays))

    def _write(self, facts: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        name, before = _state(self._states), _state(self._states - 1)
        files = self._files | {name: self._put(name, facts=np.asarray(json.dumps(facts)), **arrays)}
        files.pop(before, None)
        manifest.write(self.folder, files)
        self._files, self._states = files, self._states + 1
        (self.folder / before).unlink(missing_ok=True)

    def append(self, block: Block | Skeleton) -> None:
        """Store a block. It becomes valid with the next `write`."""
        path = block if isinstance(block, Skeleton) else block.skeleton()
        name, span = _block(self.blocks), np.asarray([path.begin, path.end])
        (self.folder / BLOCKS).mkdir(exist_ok=True, mode=0o700)
        self._files[name] = _retrying(
            lambda: self._put(name, offsets=path.offsets, knots=path.numbers, velocities=path.velocities, span=span)
        )
        self.blocks += 1

    def _put(self, name: str, **arrays: np.ndarray) -> str:
        """Write arrays to a file, which gets its name when it is on the disk; returns its hash."""
        path = self.folder / name
        draft = path.with_name(path.name + manifest.DRAFT)
        with open(draft, "wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
        found = manifest.digest(draft)
        os.replace(draft, path)
        manifest.sync(path.parent)
        return found

    def fill(self, store: Store) -> None:
        """Append the blocks that belong to the state to a path store."""
        for number in range(self.blocks):
            path = self.folder / _block(number)
            with _unreadable(path), np.load(path, allow_pickle=False) as file:
                begin, end = (float(x) for x in file["span"])
                store.append(Skeleton.read(file["offsets"], file["knots"], file["velocities"], begin, end))


def _ascii(text: np.ndarray) -> bytes:
    """An ASCII text from an array; anything else, which NumPy would convert as well, is an error."""
    if text.dtype.kind != "U" or not text.dtype.isnative or text.size != 1:
        raise ValueError("not a text")
    codes = np.frombuffer(text.tobytes(), np.uint32)
    if codes.max(initial=0) > 127:
        raise ValueError("not ASCII")
    return codes.astype(np.uint8).tobytes().rstrip(b"\0")


@contextlib.contextmanager
def _unreadable(path: Path) -> Iterator[None]:
    """One error for all that the readers of arrays, archives and JSON raise for files that are not theirs."""
    try:
        yield
    except Exception as error:
        raise InputError("store", f"{path}, which cannot be read", manifest.RESTORE) from error


def _block(number: int) -> str:
    return f"{BLOCKS}/{number:08d}.npz"


def _state(number: int) -> str:
    return f"state-{number:08d}.npz"


def _number(state: str) -> int:
    return int(state.removeprefix("state-").removesuffix(".npz"))


def _retrying(work: Callable[[], Result]) -> Result:
    """Retry for a while if there is no free file descriptor: connections come and go."""
    end, warned = time.monotonic() + RETRY_SECONDS, False
    while True:
        try:
            return work()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or time.monotonic() > end:
                raise
            if not warned:
                logger.warning(
                    "the store waits for a file descriptor: %s. Raise the limit (LimitNOFILE in a unit)", error
                )
            warned = True
            time.sleep(PAUSE)


# The rounds of an opening on disk: a coordinator that was killed goes on where it was.
#
# A round is stored before it is sent, and again with its answers. A restarted coordinator takes stored answers instead of
# asking, and sends a round that has none again, the same bytes: no site answers, counts or charges anything twice.


class OpeningJournal:
    """The rounds so far; ``write(facts, arrays)`` stores them, None keeps them in memory."""

    def __init__(self, write: Callable[[dict[str, Any], dict[str, np.ndarray]], None] | None = None):
        self._write, self._at = write, 0
        # Requests to all sites and their answers; no answers before all are there.
        self.rounds: list[tuple[list[bytes], list[bytes]]] = []

    def read(self, saved: RunState) -> None:
        """Take over the rounds of a stored state, which may be anything."""
        try:
            for place, (asked, answered) in enumerate(saved.facts.get("opening", [])):
                parts = [saved.arrays[f"opening.{place}.{k}"].tobytes() for k in range(asked + answered)]
                _ = [messages.decode(part) for part in parts]
                self.rounds.append((parts[:asked], parts[asked:]))
        except Exception as error:
            raise InputError("store", f"an opening that cannot be read ({type(error).__name__})", RESTORE) from error

    def rewind(self) -> None:
        """Begin again with the first round."""
        self._at = 0

    def ask(self, requests: Sequence[Request], ask: Callable[..., list], check: Callable[..., list]) -> list:
        """The result of ``check(answers, requests)`` for the next round, as it was stored or from the sites."""
        if self._at == len(self.rounds):
            self.rounds.append(([request.data for request in requests], []))
            self._save()
        sent, answers = self.rounds[self._at]
        # Compared in the present wire version: the last process may have had another.
        stored, made = ([messages.encode(messages.decode(x)) for x in a] for a in (sent, [r.data for r in requests]))
        if stored != made:
            found = f"an opening whose request {self._at + 1} this software computes otherwise"
            raise InputError("store", found, "Continue with the version and the kind of machine that began the run.")
        requests = [Request(data) for data in sent]
        given = answers or ask(requests)
        checked = check(given, requests)
        if not answers:
            answers.extend(given)  # type: ignore[arg-type]
            self._save()
        self._at += 1
        return checked

    def _save(self) -> None:
        if self._write is not None:
            parts = ((i, k, part) for i, one in enumerate(self.rounds) for k, part in enumerate(one[0] + one[1]))
            arrays = {f"opening.{i}.{k}": np.frombuffer(part, np.uint8) for i, k, part in parts}
            self._write({"opening": [list(map(len, one)) for one in self.rounds]}, arrays)
