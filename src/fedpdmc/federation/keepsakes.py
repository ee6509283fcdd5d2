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
    path = Path(folder) / SEED
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
    path = Path(folder) / SUM_KEY
    if not path.exists():
        _keep(path, new_secret())
    return path.read_bytes()


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
