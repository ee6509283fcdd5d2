"""Checks of single values that a user gives. Each returns the value in its plain type or raises `InputError`."""

from __future__ import annotations

import difflib
import math
import re
import sys
import unicodedata
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from fedpdmc.errors import InputError

MOST_SEED = 2**63 - 1
LEVEL = 0.95  # probability of every interval that is shown, unless the user says another
COORDINATOR = "coordinator"  # its name in certificates
MOST_NAME = 64  # characters of a site's name
# In no site's name: a name is a part of paths, of a certificate's subject and of command lines.
NOT_IN_NAMES = frozenset("/\\=,`$\"';&|<>*?!(){}[]#~%^")
# Letters, marks and a symbol without ink, which Python takes for printable: "age" and "age" with one of them look alike.
INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
# A host's name, an IPv4 or an IPv6 address. It cannot begin with a hyphen: it would be an option of a command.
HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}|\[[0-9A-Fa-f:.]{2,45}\]|[0-9A-Fa-f:.]{2,45}")


def as_float(value: Any) -> float:
    """A real number, NumPy and JAX scalars included; nan for anything else. Booleans and text are not numbers."""
    if isinstance(value, (bool, np.bool_, str, bytes)):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def positive(argument: str, value: Any, remedy: str = "Give a positive finite number.") -> float:
    """A finite number above zero."""
    if not 0 < (number := as_float(value)) < math.inf:
        raise InputError(argument, repr(value), remedy)
    return number


def non_negative(argument: str, value: Any, remedy: str = "Give a finite number that is zero or positive.") -> float:
    """A finite number that is zero or above."""
    if not 0 <= (number := as_float(value)) < math.inf:
        raise InputError(argument, repr(value), remedy)
    return number


def record_weights(argument: str, value: Any, count: int) -> np.ndarray:
    """Weights of so many records: finite numbers of at least zero."""
    found = finite_array(argument, value, 1, "(n,)")
    if found.shape != (count,):
        raise InputError(argument, f"shape {found.shape}", f"Give one weight for each of {count} records.")
    if (found < 0).any():
        where = int(np.argmax(found < 0))
        raise InputError(argument, f"{found[where]:g} at index {where}", "Weights are numbers of at least zero.")
    return found


def probability(argument: str, value: Any, remedy: str = "Give a number between 0 and 1.") -> float:
    """A number strictly between 0 and 1."""
    if not 0 < (number := as_float(value)) < 1:
        raise InputError(argument, repr(value), remedy)
    return number


def interval_ends(argument: str, level: Any) -> dict[str, float]:
    """The probabilities below the two ends of an interval with equal tails, by their names, such as ``2.5%``."""
    level = probability(argument, level, "Give a probability between 0 and 1, such as 0.95.")
    return {f"{100 * p:.4g}%": p for p in ((1 - level) / 2, (1 + level) / 2)}


def integer(argument: str, value: Any, least: int = 0, most: int = 2**31, remedy: str | None = None) -> int:
    """An integer in a range, both ends included."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not least <= value <= most:
        raise InputError(argument, repr(value), remedy or f"Give an integer from {least} to {most}.")
    return int(value)


def optional_seed(argument: str, value: Any, bits: int = 63) -> int | None:
    """A seed, or None."""
    if value is None:
        return None
    return integer(argument, value, 0, 2**bits - 1, f"Give an integer from 0 to 2**{bits} − 1, or None.")


def require_posix(what: str) -> None:
    """Refuse what needs the file locks, descriptors and signals of POSIX."""
    if sys.platform == "win32":
        remedy = f"{what} needs Linux or macOS: use WSL 2 or a container on this machine."
        raise InputError("platform", "Windows", remedy)


def has_fields(record: Any, fields: Mapping[str, type | tuple[type, ...]]) -> bool:
    """Whether a decoded JSON value is an object with these fields, each of its type; bytes are hexadecimal digits."""
    if not isinstance(record, dict):
        return False
    for name, kind in fields.items():
        value = record.get(name)
        if kind is bytes:
            good = isinstance(value, str) and len(value) % 2 == 0 and set(value) <= set("0123456789abcdef")
        else:
            good = isinstance(value, kind) and not isinstance(value, bool)
        if not good:
            return False
    return True


def one_of(argument: str, value: Any, allowed: Collection[str], known: Collection[str] = ()) -> str:
    """One of several words; the nearest is looked for among those known, if given."""
    if not isinstance(value, str) or value not in allowed:
        remedy = f"{suggest(value, known or allowed)}Give one of {', '.join(map(repr, allowed))}."
        raise InputError(argument, repr(value), remedy)
    return value


def suggest(value: Any, allowed: Collection[str]) -> str:
    """The nearest of the allowed words, as a question; empty if none is near."""
    near = difflib.get_close_matches(str(value), allowed, 1)
    return f"Did you mean {near[0]!r}? " if near else ""


def is_plain(text: str) -> bool:
    """Whether a line of text has no character that is invisible, moves a cursor or changes the order of the others."""
    return text.isprintable() and INVISIBLE.search(text) is None


def check_plain(text: str, where: str) -> None:
    """Refuse a text of several lines that a person cannot read as a program does: see `is_plain`.

    Raises
    ------
    InputError
        Names the line and the character.
    """
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), 1):
        for letter in line:
            if letter != "\t" and unicodedata.category(letter) != "Zs" and not is_plain(letter):
                found = f"the character U+{ord(letter):04X} ({unicodedata.name(letter, 'control')}) in line {number}"
                remedy = "It is invisible, or changes what is shown. Remove it, and ask the author why it was there."
                raise InputError(where, found, remedy)


def one_script(name: str) -> bool:
    """Whether a name's letters are of one script and in normal form, so that no two names look alike."""
    scripts = {unicodedata.name(letter, "?").split()[0] for letter in name if letter.isalpha()}
    return len(scripts) <= 1 and unicodedata.normalize("NFKC", name) == name


def check_host(name: Any, argument: str) -> str:
    """The name or the address of a host."""
    if not isinstance(name, str) or not HOST.fullmatch(name):
        raise InputError(argument, repr(name), "Give the name of a host, such as trial.example.org, or an IP address.")
    return name


def check_name(name: str) -> str:
    """A site's name, if a certificate and a command line may have it; not the coordinator's."""
    good = isinstance(name, str) and 0 < len(name) <= MOST_NAME and is_plain(name) and name == name.strip()
    if not good or NOT_IN_NAMES & set(name) or name in (".", "..") or name[0] == "-" or not one_script(name):
        raise InputError(
            "site name",
            repr(name),
            "Give 1 to 64 letters of one script, digits, spaces inside, and . - _ + : @, not beginning with a hyphen.",
        )
    if name == COORDINATOR:
        remedy = "This name is reserved for the coordinator. Give the site another one."
        raise InputError("site name", repr(name), remedy)
    return name


def finite_array(name: str, value: Any, ndim: int | tuple[int, ...], shape: str) -> np.ndarray:
    """A finite float64 array of the right rank, or an error that says where it goes wrong."""
    try:
        array = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError) as error:
        remedy = f"Give an array of shape {shape}."
        raise InputError(name, f"{type(value).__name__} that is not numeric", remedy) from error
    ranks = (ndim,) if isinstance(ndim, int) else ndim
    if array.ndim not in ranks:
        raise InputError(name, f"shape {array.shape}", f"Give an array of shape {shape}.")
    bad = np.argwhere(~np.isfinite(array))
    if len(bad):
        where = tuple(int(i) for i in bad[0])
        remedy = "Remove or impute values that are missing or infinite."
        raise InputError(name, f"{array[where]} at index {where}", remedy)
    return array


def check_fingerprint(text: str) -> str:
    """Normalise a fingerprint, which may have colons, to 64 lower-case digits."""
    plain = text.replace(":", "").lower()
    if len(plain) != 64 or not set(plain) <= set("0123456789abcdef"):
        raise InputError("fingerprint", repr(text), "Give the 64 hexadecimal digits of a certificate's SHA-256.")
    return plain
