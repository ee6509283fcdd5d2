"""Text wrapped to the width of the terminal."""

from __future__ import annotations

import os
import sys
import textwrap
from typing import Any

USUAL_WIDTH = 80  # without a terminal
LEAST_WIDTH = 40  # to wrap to


def terminal_width(stream: Any) -> int:
    """Width of the terminal of a stream; `USUAL_WIDTH` if it has none."""
    try:
        found = os.get_terminal_size(stream.fileno()).columns if stream.isatty() else 0
    except (AttributeError, OSError, ValueError):
        found = 0
    return max(found, LEAST_WIDTH) if found else USUAL_WIDTH


def wrapped(text: str, width: int) -> str:
    """Wrap lines that are too long at spaces, and indent the continuation by two more spaces.

    Lines that fit are unchanged. Words are never broken, so that paths and hashes can be copied.
    """
    lines = []
    for line in text.split("\n"):
        if len(line) < width:
            lines.append(line)
            continue
        indent = line[: len(line) - len(line.lstrip())]
        lines += textwrap.wrap(
            line.strip(), width - 1, initial_indent=indent, subsequent_indent=f"{indent}  ", break_long_words=False,
            break_on_hyphens=False,
        )  # fmt: skip
    return "\n".join(lines)


def say(text: object, whole: bool = False) -> None:
    """Print text to standard output, wrapped.

    ``whole``: lines that programs may read too; they are wrapped on a terminal only.
    """
    leave = whole and not sys.stdout.isatty()
    print(text if leave else wrapped(str(text), terminal_width(sys.stdout)), flush=True)
