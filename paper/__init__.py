"""The paper, reproduced: one module for each figure or claim, on the public interface only."""

from __future__ import annotations

import importlib
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from paper.result_folder import Verdict

# In the order of the paper.
NAMES = ("gaussian", "logistic", "time-series", "redistribution", "cox", "non-identical", "dynamics")


def reproduce(name: str, out: Path, quick: bool = False, console: Console | None = None) -> Iterator[Verdict]:
    """Run one experiment, or all of them, leave figures and tables in ``out``, and yield each verdict as it is reached.

    Parameters
    ----------
    name : str
        One of `NAMES`, or "all".
    out : Path
    quick : bool
        A toy size.
    console : Console, optional
        Where the progress bars go; standard error if None.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from fedpdmc.results.verdict import ConvergenceWarning
    from paper.result_folder import Study, record

    console = Console(stderr=True) if console is None else console
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        for one in NAMES if name == "all" else (name,):
            module = importlib.import_module(f"paper.{one.replace('-', '_')}")
            processor, wall = time.process_time(), time.perf_counter()
            with warnings.catch_warnings():
                # The paper's runs start in stationarity and have lengths of their own: what is checked is their error.
                warnings.simplefilter("ignore", ConvergenceWarning)
                verdict = module.run(Study(out, quick, progress))
            record(out, verdict, time.process_time() - processor, time.perf_counter() - wall)
            yield verdict
