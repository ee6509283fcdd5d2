"""``python -m benchmarks.figures``: plots of the last benchmark for the documentation."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

HERE = Path(__file__).resolve().parent
SIZE, DPI = (9.0, 3.2), 90
BASE = {"records": 1000, "dim": 6, "sites": 10}
AXES = {"sites": "sites M", "records": "records N", "dim": "parameters d"}


def rounds_against(axes: Axes, reports: list[dict], what: str) -> None:
    """Rounds per effective sample of one chain against one of M, N and d, the others as in the paper."""
    fixed = {name: value for name, value in BASE.items() if name != what}
    ours = [r for r in reports if r["contestant"] == "fedpdmc" and r["chains"] == 1]
    for method, style in (("default", "o-"), ("zigzag", "s--")):
        rows = [r for r in ours if r["method"] == method and all(r[name] == value for name, value in fixed.items())]
        rows = sorted(rows, key=lambda r: r[what])
        label = "few rounds (default)" if method == "default" else "Algorithm 2 (Zig-Zag)"
        if len(rows) > 1 or method == "default":
            axes.plot([r[what] for r in rows], [r["rounds_per_ess"] for r in rows], style, label=label)
    for rival in (r for r in reports if r["contestant"] == "blackjax"):
        axes.axhline(
            rival["rounds_per_ess"],
            color="grey",
            linestyle=":" if rival["sampler"] == "hmc" else "-.",
            label=f"federated {rival['sampler'].upper()} (paper's problem)",
        )
    axes.set(xlabel=AXES[what], yscale="log", xscale="linear" if what == "dim" else "log")


def rounds_figure(results: dict, path: Path) -> None:
    """Three panels: against M, N and d."""
    figure, panels = plt.subplots(1, 3, figsize=SIZE, sharey=True, layout="constrained")
    for axes, what in zip(panels, AXES, strict=True):
        rounds_against(axes, results["contestants"], what)
    panels[0].set_ylabel("rounds per effective sample")
    panels[1].legend(*panels[0].get_legend_handles_labels(), fontsize=7, loc="upper right")
    figure.savefig(path, dpi=DPI)
    plt.close(figure)


def speed_figure(results: dict, path: Path) -> None:
    """Effective samples per processor second against the number of chains, a panel for each problem."""
    rows = results["medians"]
    problems = sorted({(row["records"], row["dim"]) for row in rows})
    # One colour for a contestant in all panels.
    colours = {kind: f"C{k}" for k, kind in enumerate(sorted({(row["contestant"], row["sites"]) for row in rows}))}
    figure, panels = plt.subplots(1, len(problems), figsize=SIZE, layout="constrained", squeeze=False)
    for axes, (records, dim) in zip(panels[0], problems, strict=True):
        here = [row for row in rows if (row["records"], row["dim"]) == (records, dim)]
        for name, sites in sorted({(row["contestant"], row["sites"]) for row in here}):
            own = sorted(
                (row for row in here if (row["contestant"], row["sites"]) == (name, sites)),
                key=lambda row: row["chains"],
            )
            label = f"{name}, M = {sites}" if name == "fedpdmc" else name
            style = "o-" if name == "fedpdmc" else "s--"
            chains, rates = [row["chains"] for row in own], [row["ess_per_cpu_second"] for row in own]
            axes.plot(chains, rates, style, color=colours[name, sites], label=label)
        axes.set(title=f"N = {records:,}, d = {dim}", xlabel="chains", xscale="log", yscale="log")
    panels[0][0].set_ylabel("effective samples per processor second")
    panels[0][0].legend(fontsize=7)
    figure.savefig(path, dpi=DPI)
    plt.close(figure)


def grid_figure(results: dict, path: Path) -> None:
    """Effective samples per second against records at ten parameters, and against parameters at a thousand records."""
    rows = [row for row in results["medians"] if row["sites"] == 1 and row["rate"] is not None]
    figure, panels = plt.subplots(1, 2, figsize=SIZE, layout="constrained", sharey=True)
    for axes, what, fixed, value in zip(panels, ("records", "dim"), ("dim", "records"), (10, 1000), strict=True):
        for contestant, label in (("fedpdmc", "fedpdmc"), ("blackjax", "NUTS")):
            here = sorted(
                (row for row in rows if row[fixed] == value and row["contestant"] == contestant), key=lambda r: r[what]
            )
            axes.plot([row[what] for row in here], [row["rate"] for row in here], "o-", label=label)
        axes.set(xlabel=f"{AXES[what]}, at {AXES[fixed].split()[1]} = {value:,}", xscale="log", yscale="log")
    panels[0].set_ylabel("effective samples per second")
    panels[0].legend(fontsize=8)
    figure.savefig(path, dpi=DPI)
    plt.close(figure)


FIGURES = {"rounds": rounds_figure, "speed": speed_figure, "grid": grid_figure, "grid_gpu": grid_figure}


def draw(results: dict, folder: Path) -> list[Path]:
    """A figure for every part of the results that has one."""
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for name in (name for name in FIGURES if name in results):
        path = folder / f"few-rounds-{name}.png"
        FIGURES[name](results[name], path)
        made.append(path)
    return made


def main() -> None:
    """Read the results and draw."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.figures", description=__doc__)
    parser.add_argument("--results", type=Path, default=HERE / "results" / "results.json")
    parser.add_argument("--out", type=Path, default=HERE.parent / "docs" / "figures")
    options = parser.parse_args()
    for path in draw(json.loads(options.results.read_text()), options.out):
        print(path)


if __name__ == "__main__":
    main()
