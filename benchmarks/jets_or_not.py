"""What enclosures on balls (jets) are worth on the twelve models of `tests.zoo`: opening and steady cost, with and without.

``python -m benchmarks.jets_or_not --models probit weibull --methods zigzag default``

Each run is a process of its own, pinned to one core, without a compilation cache. Without jets the clocks of programs use
Taylor models of time, or cells. A model with more parameters than jets are tried for is left out: both runs would be the
same. All times are processor time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import geometric_mean

from benchmarks.any_model import MODELS
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
METHODS = ("zigzag", "default")


def measure(model: str, method: str, jets: bool, options: argparse.Namespace) -> dict:
    """One run of `contestant_models` in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "contestant_models.py", "--model", model, "--method", method, "--repeats", "1"]
        words += ["--chains", str(options.chains), "--duration", str(options.duration)]
        words += ["--reference", str(Path(folder) / "reference.npz"), *([] if jets else ["--without-jets"])]
        environment = os.environ | {"FEDPDMC_COMPILATION_CACHE": "off"}
        done = subprocess.run(words, capture_output=True, text=True, cwd=HERE, env=environment)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(words[1:])} failed:\n{done.stderr[-2000:]}")
    report = json.loads(done.stdout.strip().splitlines()[-1])
    run = report["runs"][0]
    return {
        "model": model, "method": method, "jets": jets, "dim": report["dim"], "records": report["records"],
        "certified": report["certified"], "clock": report["clock"], "opening": run["compile_cpu_seconds"],
        "steady": 1e3 / run["ess_per_cpu_second"], "gradients": run["looks"],
    }  # fmt: skip


def is_tried(model: str, method: str) -> bool:
    """Whether jets are tried for so many parameters."""
    from tests.zoo import CASES

    from fedpdmc.potentials.program_taylor import known_orders

    return bool(known_orders(CASES[model].dim, method == "default"))


def table(pairs: list[tuple[dict, dict]]) -> Table:
    """One line for each model and method; ratios are without jets over with jets."""
    shown = Table(title="Jets or not: processor seconds to open, and per 1,000 effective samples")
    for name in ("model", "d", "method", "clock with", "clock without"):
        shown.add_column(name)
    for name in ("opening with", "without", "steady with", "without", "steady ratio"):
        shown.add_column(name, justify="right")
    for one, other in pairs:
        shown.add_row(
            one["model"], str(one["dim"]), one["method"], one["clock"], other["clock"], f"{one['opening']:.1f}",
            f"{other['opening']:.1f}", f"{one['steady']:.3g}", f"{other['steady']:.3g}",
            f"{other['steady'] / one['steady']:.2f}",
        )  # fmt: skip
    return shown


def main() -> None:
    """Measure, print the table, and write all figures to a file if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--chains", type=int, default=64)
    parser.add_argument("--duration", type=float, default=100.0)
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    options = parser.parse_args()
    pairs, console = [], Console(width=160)
    for model in options.models:
        for method in options.methods:
            if not is_tried(model, method):
                continue
            one, other = (measure(model, method, jets, options) for jets in (True, False))
            pairs.append((one, other))
            console.print(one, other)
            if options.out:
                options.out.write_text(json.dumps([report for pair in pairs for report in pair], indent=1))
    console.print(table(pairs))
    for name in ("opening", "steady"):
        ratios = [other[name] / one[name] for one, other in pairs]
        console.print(f"{name}: without jets / with jets, geometric mean {geometric_mean(ratios):.2f}")


if __name__ == "__main__":
    main()
