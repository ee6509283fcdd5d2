"""Sentences broken into lines that fit on a terminal."""

from __future__ import annotations

import os
import sys
import textwrap
from typing import Any

# Columns where there is no terminal, and the fewest that a sentence is broken for.
USUAL_WIDTH, LEAST_WIDTH = 80, 40


def terminal_width(stream: Any) -> int:
    """Columns of the terminal that a stream goes to; `USUAL_WIDTH` if it goes to none."""
    try:
        found = os.get_terminal_size(stream.fileno()).columns if stream.isatty() else 0
    except (AttributeError, OSError, ValueError):
        found = 0
    return max(found, LEAST_WIDTH) if found else USUAL_WIDTH


def wrapped(text: str, width: int) -> str:
    """The text with every line that is too long broken at spaces; what follows is indented by two more.

    Lines that fit stay as they are. Words are never broken, so that a path or a hash can be copied in one piece.
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
    """Print sentences to standard output, in lines that fit.

    ``whole``: lines that programs read too; they are broken on a terminal only.
    """
    leave = whole and not sys.stdout.isatty()
    print(text if leave else wrapped(str(text), terminal_width(sys.stdout)), flush=True)
