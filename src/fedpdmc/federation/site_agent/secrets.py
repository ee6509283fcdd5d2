"""What a site keeps in its store beside the log: its secret seed, and its secret key for sums."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from fedpdmc.errors import InputError
from fedpdmc.federation.masking import new_secret

SEED, SUM_KEY = "seed", "sum.key"


def site_seed(folder: str | Path, seed: int | None) -> int:
    """The seed that the site keeps in its store: as given the first time, else from the operating system."""
    path = refuse_links(folder) / SEED
    if path.exists():
        kept = int(path.read_text())
        if seed is not None and seed != kept:
            raise InputError("seed", "another one than this store was begun with", "Leave it out, or use a new store.")
        return kept
    chosen = secrets.randbits(63) if seed is None else seed
    _keep(path, str(chosen).encode())
    return chosen


def sum_secret(folder: str | Path) -> bytes:
    """The site's secret X25519 key in this run, from the operating system."""
    path = refuse_links(folder) / SUM_KEY
    if not path.exists():
        _keep(path, new_secret())
    return path.read_bytes()


def refuse_links(folder: str | Path) -> Path:
    """A store none of whose files is a link: what is secret, or never to be changed, lies where it is looked for."""
    for path in Path(folder).glob("*"):
        if path.is_symlink():
            raise InputError("store", f"{path}, a symbolic link", "Put the file itself there: links are not followed.")
    return Path(folder)


def _keep(path: Path, content: bytes) -> None:
    """Whole or not at all: a torn secret would be another secret."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = path.with_suffix(".new")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
