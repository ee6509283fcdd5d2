"""Effective samples per second of the automatic certified route on twelve models, against pdmp-jax."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import numpy as np
from rich.table import Table

Run = Callable[[str, dict], dict]
OURS, RIVAL = "contestant_models.py", "rival_models.py"
MODELS = (
    "probit", "negative_binomial", "weibull", "piecewise_exponential", "eight_schools", "hierarchical_logistic", "softmax",
    "gaussian_process", "mixture", "michaelis_menten", "banana", "zero_inflated_poisson",
)  # fmt: skip
METHOD = "zigzag"
KINDS = ("zigzag", "boomerang")
DURATION, EVENTS, QUICK = 200.0, 2000, 10
# The package is faster with many chains; the rival walks its chains one after the other, so that it makes no difference.
CHAINS = {"ours": 256, "rival": 64}


def time_all(ours: Run, rival: Run, quick: bool) -> Iterator[dict]:
    """Each model: the package, then each sampler of the rival in the package's coordinates."""
    sizes = {"repeats": 1 if quick else 2}
    for model in MODELS[:2] if quick else MODELS:
        with tempfile.TemporaryDirectory() as folder:
            common = {"model": model, "reference": str(Path(folder) / "reference.npz"), **sizes}
            duration, events = (DURATION / QUICK, EVENTS // QUICK) if quick else (DURATION, EVENTS)
            yield ours(OURS, {**common, "chains": CHAINS["ours"], "method": METHOD, "duration": duration})
            for kind in KINDS:
                yield rival(RIVAL, {**common, "chains": CHAINS["rival"], "kind": kind, "events": events})


def label(report: dict) -> str:
    """The contestant, and how it ran."""
    return f"{report['contestant']} {report.get('method') or report['kind']}"


def rows(reports: list[dict]) -> list[dict]:
    """For each model: medians of effective samples per second, the ratio to the rival's best, and whether they agree."""
    found = []
    for ours in (report for report in reports if report["contestant"] == "fedpdmc"):
        rivals = [r for r in reports if r["contestant"] != "fedpdmc" and r["model"] == ours["model"]]
        best = max(rivals, key=lambda report: _rate(report, "ess_per_cpu_second"))
        error = np.hypot(ours["error"], best["error"])
        found.append(
            {
                "model": ours["model"],
                "records": ours["records"],
                "dim": ours["dim"],
                "method": ours["method"],
                "certified": ours["certified"],
                "rival": best["kind"],
                "violations": sum(run["violations"] for run in best["runs"]),
                "wall": _rate(ours, "ess_per_second") / _rate(best, "ess_per_second"),
                "cpu": _rate(ours, "ess_per_cpu_second") / _rate(best, "ess_per_cpu_second"),
                "ours": _rate(ours, "ess_per_cpu_second"),
                "theirs": _rate(best, "ess_per_cpu_second"),
                "looks": median(run["looks"] for run in ours["runs"]),
                "max_z": float(np.max(np.abs(np.subtract(ours["mean"], best["mean"])) / error)),
            }
        )
    return found


def _rate(report: dict, name: str) -> float:
    return median(run[name] for run in report["runs"])


def table(found: list[dict]) -> Table:
    """One line for each model."""
    shown = Table(title="Any model: certified, against the better sampler of pdmp-jax (not certified); ESS per second")
    for name in ("model", "records", "d", "ours", "rival"):
        shown.add_column(name)
    names = (
        "ours/cpu s",
        "rival/cpu s",
        "ratio wall",
        "ratio cpu",
        "looks per unit of time",
        "its violations",
        "max z",
    )
    for name in names:
        shown.add_column(name, justify="right")
    for row in found:
        shown.add_row(
            row["model"], str(row["records"]), str(row["dim"]), row["method"], row["rival"], f"{row['ours']:,.0f}",
            f"{row['theirs']:,.0f}", f"{row['wall']:.2f}", f"{row['cpu']:.2f}", f"{row['looks']:.2g}",
            f"{row['violations']:,}", f"{row['max_z']:.1f}",
        )  # fmt: skip
    return shown
