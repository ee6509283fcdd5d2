"""A site's secrets in its store: its seed, and its key for secure sums."""

from __future__ import annotations

import secrets
from pathlib import Path

from fedpdmc.errors import InputError
from fedpdmc.federation.masking import new_secret
from fedpdmc.members.site import SEED_BITS
from fedpdmc.results import manifest

SEED, SUM_KEY = "seed", "sum.key"
# Bytes of an X25519 key.
KEY_BYTES = 32
MOST_DIGITS = len(str(2**SEED_BITS))


def site_seed(folder: str | Path, seed: int | None) -> int:
    """The seed in the site's store. A new one is the given one, or else from the operating system."""
    path = refuse_links(folder) / SEED
    if path.exists():
        text = path.read_bytes()
        if not text.isdigit() or len(text) > MOST_DIGITS:
            raise InputError("store", f"{path}, which is not a seed", "Restore it from a copy.")
        stored = int(text)
        if seed is not None and seed != stored:
            raise InputError("seed", "a different one than the seed in this store", "Leave it out, or use a new store.")
        return stored
    chosen = secrets.randbits(SEED_BITS) if seed is None else seed
    _write(path, str(chosen).encode())
    return chosen


def sum_secret(folder: str | Path) -> bytes:
    """The site's secret X25519 key in this run, from the operating system."""
    path = refuse_links(folder) / SUM_KEY
    if not path.exists():
        _write(path, new_secret())
    found = path.read_bytes()
    if len(found) != KEY_BYTES:
        raise InputError("store", f"{path}, which is not a key", "Restore it from a copy.")
    return found


def refuse_links(folder: str | Path) -> Path:
    """The store, if none of its files is a symbolic link: secrets and logs must be where they seem to be."""
    for path in Path(folder).glob("*"):
        if path.is_symlink():
            raise InputError("store", f"{path}, a symbolic link", "Put the file itself there: links are not followed.")
    return Path(folder)


def _write(path: Path, content: bytes) -> None:
    """Write a file completely or not at all: an incomplete secret would be a different secret."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    manifest.replace(path, content, 0o600)
