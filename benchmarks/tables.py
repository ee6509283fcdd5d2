"""From the contestants' reports to medians, ratios and tables."""

from __future__ import annotations

import io
from statistics import median

from rich import box
from rich.console import Console
from rich.table import Table

CLOCKS = ("extend", "skeleton")
RATES = ("events_per_second", "ess_per_second", "events_per_cpu_second", "ess_per_cpu_second")
LABELS = {"plain": "fedpdmc", "whitened": "fedpdmc, Laplace coordinates and control variates (another method)"}


def label(report: dict) -> str:
    """The contestant, and how it ran."""
    if report["contestant"] == "fedpdmc":
        return LABELS[report["method"]]
    return f"{report['contestant']}, {report['execution']}"


def summarise(report: dict) -> dict:
    """Median and best of every rate over the repeats, by every clock the contestant has."""
    runs = {"extend": report["runs"]}
    if "skeleton" in report:
        runs["skeleton"] = [run["skeleton"] for run in report["runs"]]
    return {
        clock: {
            rate: {"median": median(run[rate] for run in each), "best": max(run[rate] for run in each)}
            for rate in RATES
        }
        for clock, each in runs.items()
    }


def ratios(reports: list[dict]) -> list[dict]:
    """Medians of the package over medians of the rival, for every case that both ran."""
    rows = []
    for ours in (report for report in reports if report["contestant"] == "fedpdmc" and report["sites"] == 1):
        rivals = {
            report["execution"]: summarise(report)["extend"]
            for report in reports
            if report["contestant"] != "fedpdmc" and _case(report) == _case(ours)
        }
        if rivals:
            best = max(rivals, key=lambda name: rivals[name]["ess_per_cpu_second"]["median"])
            # Events of two processes cannot be compared, their effective samples can.
            quantities = ("events", "ess") if ours["method"] == "plain" else ("ess",)
            rows += [_ratio(ours, rivals, best, quantity, clock) for quantity in quantities for clock in CLOCKS]
    return rows


def _case(report: dict) -> tuple[str, int]:
    return report["problem"], report["chains"]


def _ratio(ours: dict, rivals: dict, best: str, quantity: str, clock: str) -> dict:
    mine = summarise(ours)[clock]
    by_clock = {"wall": f"{quantity}_per_second", "cpu": f"{quantity}_per_cpu_second"}
    goal = ours.get("goal")
    return {
        "problem": ours["problem"],
        "chains": ours["chains"],
        "method": ours["method"],
        "quantity": quantity,
        "clock": clock,
        "rival_best": best,
        "goal": goal[1] if goal and goal[0] == quantity else None,
        "against": {
            name: {kind: mine[rate]["median"] / theirs[rate]["median"] for kind, rate in by_clock.items()}
            for name, theirs in rivals.items()
        },
    }


def rates_table(reports: list[dict]) -> Table:
    """All contestants: median (best) rates, compile time apart."""
    table = Table(title="Rates on one core: median (best) of the repeats")
    for name in ("problem", "chains", "sites", "contestant", "clock"):
        table.add_column(name)
    for name in ("compile s", "events/s", "ESS/s", "events/cpu s", "ESS/cpu s", "max z", "sd ratios"):
        table.add_column(name, justify="right")
    for report in reports:
        for clock, rates in summarise(report).items():
            table.add_row(
                report["problem"],
                str(report["chains"]),
                str(report.get("sites", 1)),
                label(report),
                clock if report["contestant"] == "fedpdmc" else "its own",
                f"{report['compile_seconds']:.1f}",
                *(
                    f"{rates[rate]['median']:,.0f} ({rates[rate]['best']:,.0f})"
                    for rate in ("events_per_second", "ess_per_second")
                ),
                *(f"{rates[rate]['median']:,.0f}" for rate in ("events_per_cpu_second", "ess_per_cpu_second")),
                f"{report['mean_max_abs_z']:.1f}",
                f"{report['sd_ratio_min']:.3f}–{report['sd_ratio_max']:.3f}",
            )
    return table


def ratios_table(rows: list[dict]) -> Table:
    """The headline: how many times as fast as the rival, by wall clock and by processor time."""
    table = Table(title="fedpdmc / pdmp-jax: ratio of medians, wall clock (processor time)")
    for name in ("problem", "chains", "method", "per second", "clock"):
        table.add_column(name)
    for name in ("against sequential", "against vmap", "goal"):
        table.add_column(name, justify="right")
    table.add_column("its best")
    for row in rows:
        shown = {name: f"{pair['wall']:.2f} ({pair['cpu']:.2f})" for name, pair in row["against"].items()}
        table.add_row(
            row["problem"],
            str(row["chains"]),
            row["method"],
            {"events": "events", "ess": "effective samples"}[row["quantity"]],
            row["clock"],
            shown.get("sequential", "–"),
            shown.get("vmap", "–"),
            f"{row['goal']:g}" if row["goal"] else "",
            row["rival_best"],
        )
    return table


def markdown(*tables: Table) -> str:
    """The same tables for a document."""
    screen = Console(width=400, file=io.StringIO(), color_system=None)
    for table in tables:
        table.box, title, table.title = box.MARKDOWN, table.title, None
        screen.print(title, table, sep="\n\n")
    return "\n".join(line.strip() for line in screen.file.getvalue().splitlines()).strip() + "\n"
