"""Effective samples per second over a grid of records and parameters, against NUTS: on one core, or on a GPU."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from statistics import median

from rich.table import Table

Run = Callable[[str, dict, float], dict]
OURS, RIVAL = "contestant_grid.py", "rival_grid_nuts.py"
# Seconds after which a contestant is given up, and the table says so.
LIMIT = 600.0


@dataclass(frozen=True)
class Case:
    """A size of the problem.

    Attributes
    ----------
    records, dim : int
    chains, rival_chains : tuple of int
        Vectorised chains that are tried on either side: the best counts.
    goal : float, optional
        The ratio to NUTS that the project asks for.
    sites : tuple of int
        Numbers of sites over which the package's side spreads the records.
    """

    records: int
    dim: int
    chains: tuple[int, ...]
    rival_chains: tuple[int, ...]
    goal: float | None = None
    sites: tuple[int, ...] = (1,)


CPU = (
    Case(100, 5, (256,), (64, 256), 2.0),
    Case(1000, 6, (256,), (64, 256), 12.0, (1, 10)),
    Case(1000, 10, (256,), (64, 256), 12.0),
    Case(1000, 40, (256,), (64,), 2.0),
    Case(1000, 100, (256,), (64,), 1.0),
    Case(10_000, 10, (512,), (16,)),
    Case(20_000, 20, (256,), (16,), 12.0, (1, 10)),
    Case(100_000, 10, (512,), (8,), 200.0),
    Case(1_000_000, 10, (128,), (4,)),
)
GPU = (
    Case(1000, 6, (65_536, 131_072), (131_072, 262_144), 5.0, (1, 10)),
    Case(1000, 40, (16_384, 32_768), (131_072, 262_144), 2.0),
    Case(20_000, 20, (4096, 16_384), (8192, 32_768), 4.0),
    Case(1_000_000, 20, (1024,), (256, 1024), 4.0),
)
CASES = {"cpu": CPU, "gpu": GPU}


def time_all(
    run: Run, quick: bool, device: str = "cpu", cores: Sequence[int] = (), limit: float = LIMIT
) -> Iterator[dict]:
    """Both sides of every case, one after the other on one core; with several ``cores`` as many cases beside each other.

    A case keeps its core for both sides.
    """
    length: dict = {"seconds": 0.3, "repeats": 1} if quick else {"seconds": 2.0, "repeats": 3}
    free: queue.Queue[int | None] = queue.Queue()
    for core in cores or (None,):
        free.put(core)

    def both(case: Case) -> list[dict]:
        core = free.get()
        size = {"records": case.records, "dim": case.dim, "device": device} | length
        size |= {} if core is None else {"core": core}
        try:
            found = [run(OURS, size | {"sites": sites, "chains": case.chains}, limit) for sites in case.sites]
            sizes = {"sizes": (0.8,)} if quick else {}
            return [*found, run(RIVAL, size | {"chains": case.rival_chains} | sizes, limit)]
        finally:
            free.put(core)

    cases = CASES[device][:2] if quick else CASES[device]
    # The longest cases first where they run beside each other.
    order = cases if len(cores) < 2 else sorted(cases, key=lambda case: -case.records * case.dim)
    with ThreadPoolExecutor(max(1, len(cores))) as pool:
        for done in as_completed([pool.submit(both, case) for case in order]):
            yield from done.result()


def cores_of(text: str) -> list[int]:
    """Numbers of cores as ``taskset`` has them (``0-3,8``), or "all" of this process."""
    if text == "all":
        return sorted(os.sched_getaffinity(0))
    found = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def speeds(reports: list[dict]) -> list[dict]:
    """The best number of chains of every report: medians by the clock of the processor, or by the wall's on a GPU."""
    rows = []
    for report in sorted(reports, key=lambda report: (report["records"], report["dim"])):
        clock = "ess_per_cpu_second" if report["device"] == "cpu" else "ess_per_second"
        tried = [row for row in report["rows"] if row["runs"]]
        if not tried:
            names = ("contestant", "records", "dim", "sites", "device")
            rows.append({name: report[name] for name in names} | {"failed": _why(report), "rate": None})
            continue
        best = max(tried, key=lambda row: median(run[clock] for run in row["runs"]))
        rows.append({
            **{name: report[name] for name in ("contestant", "records", "dim", "sites", "device")},
            "chains": best["chains"],
            "clock": best.get("clock", {}).get("clock", "NUTS"),
            "rate": median(run[clock] for run in best["runs"]),
            "wall_rate": median(run["ess_per_second"] for run in best["runs"]),
            "ready_seconds": best["ready_seconds"],
            "cold_seconds": _cold(best, 10_000),
        })  # fmt: skip
    return rows


def _why(report: dict) -> str:
    """Why there is no figure of a contestant."""
    return report.get("failed") or "; ".join(row.get("failed", "") for row in report["rows"])


def _cold(row: dict, ess: float) -> float:
    """Seconds to so many effective samples in a process that starts with nothing."""
    return row["ready_seconds"] + ess / median(run["ess_per_second"] for run in row["runs"])


def ratios(rows: list[dict], device: str) -> list[dict]:
    """To NUTS for each size and number of sites, and of many sites to one."""
    found = []
    for case in CASES[device]:
        size = (case.records, case.dim)
        here = [row for row in rows if (row["records"], row["dim"]) == size and row["rate"] is not None]
        nuts = next((row for row in here if row["contestant"] == "blackjax"), None)
        ours = {row["sites"]: row for row in here if row["contestant"] == "fedpdmc"}
        for sites, row in ours.items():
            ratio = None if nuts is None else row["rate"] / nuts["rate"]
            cold = None if nuts is None else nuts["cold_seconds"] / row["cold_seconds"]
            share = row["rate"] / ours[1]["rate"] if 1 in ours else None
            goal = case.goal if sites == 1 else None
            size = {"records": case.records, "dim": case.dim, "sites": sites}
            found.append(size | {"ratio": ratio, "goal": goal, "cold": cold, "of_one_site": share})
    return found


def table(rows: list[dict]) -> Table:
    """One line for each side of a case."""
    per = "effective samples per second of one core" if rows and rows[0]["device"] == "cpu" else "per second, GPU"
    found = Table(title=f"Logistic regression: {per}")
    for name in ("records", "d", "sites", "sampler", "clock", "chains", "ESS/s", "ready s", "10,000 cold, s"):
        found.add_column(name, justify="left" if name in ("sampler", "clock") else "right")
    for row in rows:
        if row["rate"] is None:
            size = f"{row['records']:,}", str(row["dim"]), str(row["sites"]), row["contestant"]
            found.add_row(*size, row["failed"][:60], "", "", "", "")
            continue
        found.add_row(
            f"{row['records']:,}", str(row["dim"]), str(row["sites"]), row["contestant"], row["clock"],
            f"{row['chains']:,}", f"{row['rate']:,.0f}", f"{row['ready_seconds']:.1f}", f"{row['cold_seconds']:.1f}",
        )  # fmt: skip
    return found


def ratios_table(rows: list[dict]) -> Table:
    """Ratios with their goals."""
    found = Table(title="fedpdmc : NUTS")
    for name in ("records", "d", "sites", "ratio", "goal", "met", "cold ratio", "of one site"):
        found.add_column(name, justify="right")
    for row in rows:
        met = "" if row["goal"] is None or row["ratio"] is None else "yes" if row["ratio"] >= row["goal"] else "NO"
        numbers = (_shown(row[name]) for name in ("ratio", "goal"))
        rest = (_shown(row[name]) for name in ("cold", "of_one_site"))
        found.add_row(f"{row['records']:,}", str(row["dim"]), str(row["sites"]), *numbers, met, *rest)
    return found


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
