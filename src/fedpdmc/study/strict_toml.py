"""Strict reading of TOML: every key must be known, and have the right type and range."""

from __future__ import annotations

import contextlib
import math
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fedpdmc.errors import InputError
from fedpdmc.validation import as_float, integer

REQUIRED: Any = object()


def read_bytes(path: str | Path, argument: str, remedy: str = "Give the path of a TOML file.") -> bytes:
    """The bytes of a file."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InputError(argument, f"{error.strerror}: {path}", remedy) from error


@contextlib.contextmanager
def naming_file(usual: str, path: str | Path) -> Iterator[None]:
    """Replace the usual name of a file in errors by its path."""
    try:
        yield
    except InputError as error:
        if not error.argument.startswith(usual):
            raise
        raise InputError(f"{path}{error.argument.removeprefix(usual)}", error.found, error.remedy) from error


class Table:
    """A TOML table whose keys are read one by one; `done` refuses keys that were not read.

    Parameters
    ----------
    values : dict
    where : str
        The table's name, for messages.
    """

    def __init__(self, values: dict[str, Any], where: str):
        self.values, self.where, self._taken = values, where, set()

    @classmethod
    def parse(cls, data: bytes, where: str) -> Table:
        """The top-level table of a TOML file."""
        try:
            return cls(tomllib.loads(data.decode()), where)
        except RecursionError as error:
            raise InputError(where, "tables or lists that are nested too deeply", "Give a TOML file.") from error
        except ValueError as error:
            # Not text, not TOML, or a number with too many digits.
            raise InputError(where, str(error)[:200], "Give a TOML file.") from error

    def _take(self, key: str, default: Any) -> Any:
        self._taken.add(key)
        if key in self.values:
            return self.values[key]
        if default is REQUIRED:
            raise InputError(f"{self.where}: {key}", "no value", "This key is required.")
        return default

    def invalid(self, key: str, remedy: str) -> InputError:
        """The error for the value of a key."""
        return InputError(f"{self.where}: {key}", repr(self.values.get(key))[:200], remedy)

    def table(self, key: str, default: Any = REQUIRED) -> Table:
        """A table within this one; an empty one if ``default`` is None and it is missing."""
        value = self._take(key, default)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.invalid(key, "Give a table.")
        return Table(value, f"{self.where}: {key}")

    def text(self, key: str, default: Any = REQUIRED, among: Sequence[str] | None = None) -> str:
        """A text, from a given set if there is one."""
        value = self._take(key, default)
        if value is default and default is not REQUIRED:
            return value
        if not _is_text(value) or (among is not None and value not in among):
            raise self.invalid(
                key, "Give a printable text." if among is None else f"Give one of {', '.join(map(repr, among))}."
            )
        return value

    def texts(self, key: str, default: Any = REQUIRED, least: int = 1, among: Any = None) -> tuple[str, ...]:
        """A list of different texts, all of them ``among`` known ones if there are such."""
        value = self._take(key, default)
        if value is default and default is not REQUIRED:
            return value
        good = isinstance(value, list) and len(value) >= least and all(map(_is_text, value))
        if not good or len(set(value)) != len(value):
            raise self.invalid(key, f"Give a list of at least {least} different printable texts.")
        if among is not None and not set(value) <= set(among):
            raise self.invalid(key, f"Give some of {', '.join(among)}.")
        return tuple(value)

    def number(self, key: str, default: Any = REQUIRED, least: float = -math.inf, most: float = math.inf) -> float:
        """A finite number in a range."""
        value = self._take(key, default)
        if value is default and default is not REQUIRED:
            return value
        number = as_float(value)
        if not math.isfinite(number) or not least <= number <= most:
            raise self.invalid(key, f"Give a finite number from {least:g} to {most:g}.")
        return number

    def whole(self, key: str, default: Any = REQUIRED, least: int = 0, most: int = 2**31) -> int:
        """An integer in a range."""
        value = self._take(key, default)
        if value is default and default is not REQUIRED:
            return value
        try:
            return integer(key, value, least, most)
        except InputError as error:
            raise self.invalid(key, error.remedy) from None

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._take(key, default)
        if not isinstance(value, bool):
            raise self.invalid(key, "Give true or false.")
        return value

    def numbers(self, key: str, default: Any = REQUIRED) -> float | tuple[float, ...]:
        """A number, or a list of them."""
        value = self._take(key, default)
        numbers = tuple(as_float(x) for x in (value if isinstance(value, list) else [value]))
        if not numbers or not all(map(math.isfinite, numbers)):
            raise self.invalid(key, "Give a number or a list of numbers.")
        return numbers if isinstance(value, list) else numbers[0]

    def keys(self) -> list[str]:
        """All keys, which count as read."""
        self._taken.update(self.values)
        return list(self.values)

    def done(self) -> None:
        """Refuse unknown keys: a misspelt limit must not be ignored."""
        unknown = sorted(set(self.values) - self._taken)
        if unknown:
            known = ", ".join(sorted(self._taken))
            raise InputError(f"{self.where}: {unknown[0]}", "an unknown key", f"Known keys: {known}.")


def _is_text(value: Any) -> bool:
    """Whether a value is printable text: control characters could hide a part of a contract on a terminal."""
    return isinstance(value, str) and bool(value) and value.replace("\n", " ").isprintable()
