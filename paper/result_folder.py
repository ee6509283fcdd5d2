"""Where an experiment leaves its figures, its numbers and its verdict."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from matplotlib.figure import Figure
from rich.progress import Progress

T = TypeVar("T")

COLOURS = ("#1f6f8b", "#d1495b", "#edae49", "#3a7d44", "#6a4c93", "#22313f")
DARK, GREY = "#22313f", "#9aa5b1"
DPI = 110


class Verdict(NamedTuple):
    """What was compared and how it came out, in one line."""

    name: str
    holds: bool
    line: str

    def __str__(self) -> str:
        return f"{self.name}: {'holds' if self.holds else 'DOES NOT HOLD'}: {self.line}"


class Study:
    """The surroundings of one experiment.

    Parameters
    ----------
    out : Path
        Folder for figures and tables.
    quick : bool
        A toy size, to show that it works.
    progress : Progress
    """

    def __init__(self, out: Path, quick: bool, progress: Progress):
        self.out, self.quick, self._progress = out, quick, progress
        out.mkdir(parents=True, exist_ok=True)

    def track(self, items: Iterable[T], title: str) -> Iterator[T]:
        """The items, with a progress bar that says which one is at work."""
        items = list(items)
        task = self._progress.add_task(title, total=len(items))
        for item in items:
            self._progress.update(task, description=f"{title} {item}")
            yield item
            self._progress.advance(task)
        self._progress.update(task, description=title)

    def table(self, name: str, rows: list[dict[str, Any]]) -> None:
        """Write the numbers as CSV."""
        with open(self.out / f"{name}.csv", "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            for row in rows:
                writer.writerow({key: f"{x:.8g}" if isinstance(x, float) else x for key, x in row.items()})

    def figure(self, name: str, figure: Figure) -> None:
        """Write a figure as PNG and SVG."""
        figure.savefig(self.out / f"{name}.png", dpi=DPI)
        # The layout has been found: it need not be sought again.
        figure.set_layout_engine("none")
        # Without the date the file is the same for the same numbers.
        figure.savefig(self.out / f"{name}.svg", metadata={"Date": None})


def record(out: Path, verdict: Verdict, processor: float, wall: float) -> None:
    """Write a verdict, and the seconds that it took, to ``verdicts.csv`` in the place of an earlier one of its name."""
    path, rows = out / "verdicts.csv", {}
    if path.exists():
        with open(path, newline="", encoding="utf-8") as file:
            rows = {row["name"]: row for row in csv.DictReader(file)}
    rows[verdict.name] = {
        "name": verdict.name, "holds": verdict.holds, "processor_seconds": f"{processor:.1f}", "seconds": f"{wall:.1f}",
        "line": verdict.line,
    }  # fmt: skip
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[verdict.name]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows.values())


def axes_of(figure: Figure, *place: int, title: str, x: str, y: str):
    """Axes in the house style."""
    axes = figure.add_subplot(*place)
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=DARK)
    axes.set_xlabel(x, color=DARK)
    axes.set_ylabel(y, color=DARK)
    axes.grid(color="#e4e8ec", linewidth=0.8, zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=DARK)
    return axes


def log_sites(axes, sites: Iterable[int]) -> None:
    """A logarithmic axis of the numbers of sites."""
    axes.set_xscale("log")
    axes.set_xticks(list(sites), [str(m) for m in sites])
    axes.set_xticks([], minor=True)


def log_values(axes) -> None:
    """A logarithmic axis of values, its ticks written as plain numbers."""
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(lambda x, _: f"{x:g}" if f"{x:e}"[0] in "25" else "")


def line_of(values: Iterable[Any]) -> str:
    """Values one after the other."""
    return ", ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values)
