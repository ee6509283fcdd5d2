"""The contents of a folder on disk: the SHA-256 of every file, so that damage is found before anything is read.

A manifest shows damage, by accident or by someone who does not know about it. Whoever can write the folder can write
the manifest too: seals by other parties are in a site's audit log.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

from fedpdmc.errors import InputError

NAME = "manifest.json"
DRAFT = ".new"
RESTORE = "Restore the folder from a copy, whole."


def digest(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def replace(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Write a file whole or not at all; it is on the disk when this returns."""
    draft = path.with_name(path.name + DRAFT)
    with open(draft, "wb", opener=partial(os.open, mode=mode)) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
    sync(path.parent)


def sync(folder: Path) -> None:
    """Flush the names in a folder to the disk, if the file system supports it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def listed(folder: Path) -> list[str]:
    """All files below a folder except its manifest, by their relative paths; links are refused."""
    found = []
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(place, name)
            if path.is_symlink():
                raise InputError(
                    "path", f"{path}, a symbolic link", "Put the file itself there: links are not followed."
                )
            if name in files:
                found.append(path.relative_to(folder).as_posix())
    return sorted(name for name in found if name != NAME)


def write(folder: Path, files: Mapping[str, str] | None = None) -> None:
    """Seal a folder: all its files as they are now, or those that are given with their hashes."""
    known = {name: digest(folder / name) for name in listed(folder)} if files is None else dict(files)
    replace(folder / NAME, json.dumps({"files": known, "sha256": _own(known)}, indent=0).encode())


def read(folder: Path, argument: str) -> dict[str, str]:
    """The hashes in a folder's manifest, by path."""
    path = folder / NAME
    try:
        content = json.loads(path.read_bytes())
        known, own = content["files"], content["sha256"]
        good = all(isinstance(x, str) for pair in known.items() for x in pair) and own == _own(known)
    except FileNotFoundError as error:
        raise InputError(argument, f"{path} missing", RESTORE) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(argument, f"{path}, which cannot be read", RESTORE) from error
    if not good or any(Path(name).is_absolute() or ".." in Path(name).parts for name in known):
        raise InputError(argument, f"{path} changed", RESTORE)
    return known


def check(folder: Path, argument: str, present: Iterable[str] | None = None) -> dict[str, str]:
    """The hashes in a folder's manifest, after every file has been checked against it.

    Parameters
    ----------
    folder : path
    argument : str
        The argument that named the folder, for errors.
    present : iterable of str, optional
        The files that are there; all below the folder by default.

    Raises
    ------
    InputError
        Names the first file that is missing, changed, or not in the manifest.
    """
    known, found = read(folder, argument), set(listed(folder) if present is None else present)
    for name in sorted(set(known) | found):
        path = folder / name
        if name not in found:
            raise InputError(argument, f"{path} missing", RESTORE)
        if name not in known:
            raise InputError(argument, f"{path}, which its manifest does not have", "Remove it, or restore a copy.")
        if digest(path) != known[name]:
            raise InputError(argument, f"{path} changed since it was written", RESTORE)
    return known


def _own(known: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()
