"""``python -m benchmarks``: every contestant in a process of its own on one core, one after the other."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.cases import CASES, EXECUTIONS, QUICK_EVENTS, Case
from benchmarks.tables import label, markdown, rates_table, ratios, ratios_table
from rich.console import Console

from benchmarks import any_model, families, few_rounds, grid, random_effects

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


def contest(command: list[str], limit: float | None = None) -> dict:
    """Run one contestant to its end and read the JSON object it prints last."""
    load = os.getloadavg()
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE, timeout=limit)
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
    words = []
    for name, value in options.items():
        words += [f"--{name}", *(map(str, value) if isinstance(value, tuple) else (str(value),))]
    return words


def zigzag(quick: bool, console: Console) -> tuple[dict, list]:
    """The Zig-Zag process against that of pdmp-jax."""
    if not RIVAL_PYTHON.exists():
        raise SystemExit("The rival's environment is not there: run `make bench`, which makes it.")
    reports = []
    for case in (case.quick() if quick else case for case in CASES):
        for report in contestants(case, quick):
            reports.append(report)
            console.print(f"[dim]done: {report['problem']}, {case.chains} chains, {case.sites} sites, {label(report)}")
    found = {"ratios": ratios(reports), "contestants": reports}
    return found, [rates_table(reports), ratios_table(found["ratios"])]


def _by_name(script: str, options: dict) -> dict:
    return contest([sys.executable, script, *arguments(options)])


def _within(script: str, options: dict, limit: float) -> dict:
    """A contestant of the grid; one that takes too long is reported as such."""
    try:
        return contest([sys.executable, script, *arguments(options)], limit)
    except subprocess.TimeoutExpired:
        contestant = "fedpdmc" if script == grid.OURS else "blackjax"
        size = {name: options[name] for name in ("records", "dim", "device")}
        failed = f"not complete after {limit:g} s"
        return {"contestant": contestant, "sites": options.get("sites", 1), "rows": [], "failed": failed} | size


def _heard(reports: Iterator[dict], console: Console) -> list[dict]:
    kept = []
    for report in reports:
        kept.append(report)
        size = f"N={report['records']}, d={report['dim']}, M={report.get('sites', 1)}"
        console.print(f"[dim]done: {size}, {few_rounds.label(report)}")
    return kept


def rounds(quick: bool, console: Console) -> tuple[dict, list]:
    """Rounds per effective sample against Algorithm 2, federated HMC and federated NUTS."""
    reports = _heard(few_rounds.count_rounds(_by_name, quick), console)
    goals = few_rounds.rounds_goals(reports)
    return {"goals": goals, "contestants": reports}, [few_rounds.rounds_table(reports), few_rounds.goals_table(goals)]


def speed(quick: bool, console: Console) -> tuple[dict, list]:
    """Effective samples per second against NUTS on the pooled records."""
    reports = _heard(few_rounds.time_all(_by_name, quick), console)
    rows = few_rounds.speeds(reports)
    found = few_rounds.speed_ratios(rows)
    tables = [few_rounds.speed_table(rows), few_rounds.speed_ratios_table(found)]
    return {"ratios": found, "medians": rows, "contestants": reports}, tables


def over_grid(
    quick: bool, console: Console, device: str = "cpu", cores: Sequence[int] = (), limit: float = grid.LIMIT
) -> tuple[dict, list]:
    """Effective samples per second over records and parameters against NUTS, on one core or on a GPU."""
    reports = []
    for report in grid.time_all(_within, quick, device, cores, limit):
        reports.append(report)
        size = f"N={report['records']}, d={report['dim']}, M={report['sites']}"
        console.print(f"[dim]done: {size}, {report['contestant']} {report.get('failed', '')}")
    rows = grid.speeds(reports)
    found = grid.ratios(rows, device)
    return {"ratios": found, "medians": rows, "contestants": reports}, [grid.table(rows), grid.ratios_table(found)]


def models(quick: bool, console: Console) -> tuple[dict, list]:
    """Effective samples per second on users' own functions, against pdmp-jax."""
    if not RIVAL_PYTHON.exists():
        raise SystemExit("The rival's environment is not there: run `make bench`, which makes it.")
    reports = []
    for report in any_model.time_all(_by_name, _by_rival, quick):
        reports.append(report)
        console.print(f"[dim]done: {report['model']}, {any_model.label(report)}")
    found = any_model.rows(reports)
    return {"rows": found, "contestants": reports}, [any_model.table(found)]


def _by_rival(script: str, options: dict) -> dict:
    return contest([str(RIVAL_PYTHON), script, *arguments(options)])


def effects(quick: bool, console: Console) -> tuple[dict, list]:
    """Private effects of groups against NUTS on the pooled records."""
    names = [name for name in random_effects.CASES if not quick or name.startswith("cbpp")]
    found = random_effects.measure(names, 1, 1800.0, None, None)
    return {"contestants": found}, [random_effects.table(found)]


def defaults(of: str, quick: bool) -> tuple[dict, list]:
    """What `fedpdmc.sample` chooses by itself, cold and warm, against NUTS."""
    reports = families.compare(of, ["weibull"] if quick and of != "demo" else None)
    return {"contestants": reports}, [families.table(reports)]


PARTS = {
    "zigzag": zigzag, "rounds": rounds, "speed": speed, "models": models, "grid": over_grid, "random-effects": effects,
    "families": lambda quick, console: defaults("families", quick), "zoo": lambda quick, console: defaults("zoo", quick),
    "demo": lambda quick, console: defaults("demo", quick),
}  # fmt: skip


def main() -> None:
    """Run, print the tables, write the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few minutes, to see that it works; not to be quoted")
    parser.add_argument("--only", choices=tuple(PARTS), action="append", help="one part, or several; all if not given")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="of the grid: one core, or the GPU")
    parser.add_argument("--cores", type=grid.cores_of, default=[], help="of the grid: 0-3 or all; one case on each")
    parser.add_argument("--limit", type=float, default=grid.LIMIT, help="seconds of a contestant of the grid")
    parser.add_argument(
        "--out", type=Path, default=HERE / "results", help="folder of results.json, tables.md and plots"
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    console = Console(width=WIDTH)
    path = options.out / "results.json"
    results = json.loads(path.read_text()) if options.only and path.exists() else {}
    shown, drawn = [], []
    for name in options.only or PARTS:
        started = datetime.now(UTC).isoformat(timespec="seconds")
        gpu = name == "grid" and options.device == "gpu"
        if name == "grid":
            found, tables = over_grid(options.quick, console, options.device, options.cores, options.limit)
        else:
            found, tables = PARTS[name](options.quick, console)
        about = {"started": started, "commit": commit(), "quick": options.quick, "machine": machine()}
        drawn.append("grid_gpu" if gpu else name)
        results[drawn[-1]] = about | found
        path.write_text(json.dumps(results, indent=1) + "\n")
        shown += tables
    console.print(*shown)
    (options.out / "tables.md").write_text(markdown(*shown))
    from benchmarks.figures import draw

    draw({name: part for name, part in results.items() if name in drawn}, options.out)
    console.print(f"results in {options.out}")


if __name__ == "__main__":
    main()
