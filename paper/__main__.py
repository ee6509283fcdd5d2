"""``python -m paper NAME``: reproduce the paper's figures and check its claims."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import paper
from fedpdmc.console.interrupts import remains, run_command
from fedpdmc.console.wrapping import say

# Exit status: a claim does not hold; a package is missing, or the arguments are unusable.
DOES_NOT_HOLD = 1
REFUSED = 2


def run(arguments: Sequence[str] | None = None) -> int:
    """Run experiments, print a verdict for each, and return the exit status.

    Parameters
    ----------
    arguments : sequence of str, optional
        Arguments of the command; those of this process if None.
    """
    parser = argparse.ArgumentParser(
        "python -m paper", description="Reproduce the paper's figures and check its claims."
    )
    parser.add_argument("name", choices=[*paper.NAMES, "all"], help="which experiment")
    parser.add_argument("--quick", action="store_true", help="run a small version of the experiment")
    parser.add_argument(
        "--out", type=Path, default=Path("fedpdmc-paper"), metavar="FOLDER",
        help="folder for figures (PNG, SVG) and numbers (CSV); default: %(default)s",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    if find_spec("blackjax") is None:
        print("blackjax not found. Install the extra: pip install -e '.[reference]'.", file=sys.stderr)
        return REFUSED
    remains(f"Interrupted. Finished figures are in {options.out}.")
    holds = True
    for verdict in paper.reproduce(options.name, options.out, options.quick):
        print(verdict, flush=True)
        holds &= verdict.holds
    say(f"Figures and numbers are in {options.out}.")
    return 0 if holds else DOES_NOT_HOLD


if __name__ == "__main__":
    run_command(lambda: sys.exit(run()))
