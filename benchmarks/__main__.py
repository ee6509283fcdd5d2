"""``python -m benchmarks``: every contestant in a process of its own on one core, one after the other."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.cases import CASES, EXECUTIONS, QUICK_EVENTS, Case
from benchmarks.tables import label, markdown, rates_table, ratios, ratios_table
from rich.console import Console

HERE = Path(__file__).resolve().parent
RIVAL_PYTHON = HERE.parent / ".bench-venv" / "bin" / "python"
WIDTH = 180


def machine() -> dict:
    """What the figures depend on and a reader cannot know."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def commit() -> str | None:
    """Which source was measured, with "-dirty" if it was changed since; None outside a checkout."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, cwd=HERE, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def contest(command: list[str]) -> dict:
    """Run one contestant to its end and read the JSON object it prints last."""
    load = os.getloadavg()
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command[1:])} failed:\n{done.stderr[-2000:]}")
    report = json.loads(done.stdout.strip().splitlines()[-1])
    return report | {"load_average_before": load, "load_average_after": os.getloadavg()}


def ours(case: Case) -> dict:
    """The package's side of a case."""
    options = {name: getattr(case, name) for name in ("problem", "chains", "sites", "steps", "method", "repeats")}
    report = contest([sys.executable, "contestant_fedpdmc.py", "--check", *arguments(options)])
    return report | {"goal": case.goal}


def contestants(case: Case, quick: bool) -> Iterator[dict]:
    """The package, then the rival on the same problem with as many chains, in both of its executions."""
    yield ours(case)
    if not case.against_rival:
        return
    options: dict[str, object] = {"problem": case.problem, "chains": case.chains, "repeats": case.repeats}
    if quick:
        options["events"] = QUICK_EVENTS
    command = [str(RIVAL_PYTHON), "rival_pdmp_jax.py", "--check", *arguments(options)]
    for execution in EXECUTIONS:
        yield contest([*command, "--execution", execution])


def arguments(options: dict) -> list[str]:
    """As a command line takes them."""
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def run(quick: bool, console: Console) -> list[dict]:
    """All cases in order."""
    reports = []
    for case in (case.quick() if quick else case for case in CASES):
        for report in contestants(case, quick):
            reports.append(report)
            console.print(f"[dim]done: {report['problem']}, {case.chains} chains, {case.sites} sites, {label(report)}")
    return reports


def main() -> None:
    """Run, print the tables, write the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few minutes, to see that it works; not to be quoted")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of results.json and tables.md")
    options = parser.parse_args()
    if not RIVAL_PYTHON.exists():
        raise SystemExit("The rival's environment is not there: run `make bench`, which makes it.")
    options.out.mkdir(parents=True, exist_ok=True)
    console = Console(width=WIDTH)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    reports = run(options.quick, console)
    found = {
        "started": started,
        "commit": commit(),
        "quick": options.quick,
        "machine": machine(),
        "ratios": ratios(reports),
        "contestants": reports,
    }
    (options.out / "results.json").write_text(json.dumps(found, indent=1) + "\n")
    tables = rates_table(reports), ratios_table(found["ratios"])
    console.print(*tables)
    (options.out / "tables.md").write_text(markdown(*tables))
    console.print(f"results in {options.out}")


if __name__ == "__main__":
    main()
