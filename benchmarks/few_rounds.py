"""Rounds per effective sample, and effective samples per second, of the few-rounds default and its rivals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import median

from rich.table import Table

Run = Callable[[str, dict], dict]
OURS, RIVAL = "contestant_few_rounds.py", "rival_nuts.py"
PAPER = (1000, 6)


@dataclass(frozen=True)
class Rounds:
    """A run whose rounds are counted: by effective samples with chains of the package's choice, or by process time."""

    records: int
    dim: int
    sites: int
    chains: int = 1
    ess: float = 0.0
    duration: float = 4000.0
    method: str = "default"

    def quick(self) -> Rounds:
        """The same, much shorter."""
        return replace(self, ess=self.ess / 20, duration=self.duration / 20)


ROUNDS = (
    Rounds(*PAPER, sites=10, chains=0, ess=10_000),
    *(Rounds(*PAPER, sites=sites) for sites in (1, 10, 50)),
    Rounds(10_000, 6, sites=10),
    Rounds(100_000, 6, sites=10, duration=8000.0),
    *(Rounds(1000, dim, sites=10) for dim in (2, 12, 20)),
    # Algorithm 2 of the paper: a unit of its time is worth less, and a round of it much less.
    Rounds(*PAPER, sites=1, duration=250.0, method="zigzag"),
    Rounds(*PAPER, sites=10, duration=500.0, method="zigzag"),
    Rounds(*PAPER, sites=50, duration=500.0, method="zigzag"),
)


@dataclass(frozen=True)
class Speed:
    """A timed problem: what the package runs, and what its rivals do on the pooled records.

    ``units`` is the process time of all chains together, ``draws`` the rivals' draws of all chains together.
    """

    records: int
    dim: int
    chains: tuple[int, ...]
    units: float
    rival_chains: dict[str, tuple[int, ...]]
    draws: int
    sites: tuple[int, ...] = (1, 10)
    repeats: int = 3
    goal: float = 3.0

    def quick(self) -> Speed:
        """The same, much shorter, with one number of chains each."""
        fewest = {library: chains[:1] for library, chains in self.rival_chains.items()}
        return replace(
            self, chains=self.chains[:1], units=self.units / 20, rival_chains=fewest, draws=self.draws // 20, repeats=1
        )


SPEED = (
    Speed(*PAPER, (32, 64, 128), 128_000.0, {"blackjax": (16, 64, 128), "numpyro": (1, 16, 64)}, 24_000),
    Speed(20_000, 20, (16, 64), 3200.0, {"blackjax": (1, 16, 64), "numpyro": (1, 16)}, 1600),
)


def count_rounds(run: Run, quick: bool) -> Iterator[dict]:
    """All runs whose rounds are counted, then federated HMC and NUTS on the paper's problem."""
    for case in (case.quick() if quick else case for case in ROUNDS):
        yield run(OURS, {"measure": "rounds"} | case.__dict__)
    for sampler in ("hmc", "nuts"):
        draws = 30 if quick else 300
        yield run(RIVAL, {"measure": "rounds", "sampler": sampler, "chains": 64, "draws": draws, "bits": 64})


def time_all(run: Run, quick: bool) -> Iterator[dict]:
    """The package and both rivals, each in 32 bits and BlackJAX in the package's 64 bits too, on each problem."""
    for case in (case.quick() if quick else case for case in SPEED):
        size = {"measure": "speed", "records": case.records, "dim": case.dim, "repeats": case.repeats}
        for sites in case.sites:
            for chains in case.chains:
                duration = max(case.units / chains, 20.0)
                yield run(OURS, size | {"sites": sites, "chains": chains, "duration": duration})
        for library, bits in (("blackjax", 32), ("blackjax", 64), ("numpyro", 32)):
            options = {"library": library, "bits": bits, "draws": case.draws, "chains": case.rival_chains[library]}
            yield run(RIVAL, size | options)


def label(report: dict) -> str:
    """The contestant and how it ran."""
    if report["contestant"] == "fedpdmc":
        kind = {"default": "default", "zigzag": "Algorithm 2 (Zig-Zag)"}[report["method"]]
        return f"fedpdmc, {kind}"
    name = {"blackjax": "BlackJAX", "numpyro": "NumPyro"}[report["contestant"]]
    sampler = report["sampler"].upper()
    return (
        f"federated {sampler} ({name})" if report["measure"] == "rounds" else f"{name} {sampler}, {report['bits']} bits"
    )


def rounds_goals(reports: list[dict]) -> list[dict]:
    """What was asked of the rounds, what was found, and whether that is enough."""

    def found(contestant="fedpdmc", **wanted):
        wanted = {"records": 1000, "dim": 6, "contestant": contestant} | wanted
        return next(r for r in reports if all(r.get(key) == value for key, value in wanted.items()))

    one = {"method": "default", "chains": 1}
    chosen = next(r for r in reports if r.get("method") == "default" and r["chains"] > 1)
    ours, many, large = found(sites=10, **one), found(sites=50, **one), found(sites=10, records=100_000, **one)
    per = ours["rounds_per_ess"]
    rows = [
        ("effective samples, chosen chains", chosen["ess_worst"], 10_000.0, True),
        ("rounds in all, chosen chains", chosen["rounds"], 16.0, False),
        ("chains chosen", chosen["chains"], 1024.0, False),
        ("rounds per effective sample, one chain", per, 0.09, False),
        ("times fewer than Algorithm 2", found(sites=10, method="zigzag")["rounds_per_ess"] / per, 100.0, True),
        ("times fewer than federated HMC", found("blackjax", sampler="hmc")["rounds_per_ess"] / per, 3.0, True),
        ("times fewer than federated NUTS", found("blackjax", sampler="nuts")["rounds_per_ess"] / per, 3.0, True),
        ("M = 50 against M = 10", many["rounds_per_ess"] / per, 1.5, False),
        ("N = 100,000 against N = 1000", large["rounds_per_ess"] / per, 1.0, False),
    ]
    return [
        {"what": what, "found": value, "goal": goal, "least": least, "met": value >= goal if least else value <= goal}
        for what, value, goal, least in rows
    ]


def speeds(reports: list[dict]) -> list[dict]:
    """One row for every contestant, problem and number of chains: medians over the repeats."""
    rows = []
    for report in reports:
        for row in report.get("rows", [report]):
            rows.append(
                {
                    "records": report["records"],
                    "dim": report["dim"],
                    "contestant": label(report) if report["contestant"] != "fedpdmc" else "fedpdmc",
                    "sites": report.get("sites", 1),
                    "chains": row["chains"],
                    "before_seconds": row.get("compile_seconds", row.get("before_seconds")),
                    "ess_per_second": median(r["ess_per_second"] for r in row["runs"]),
                    "ess_per_cpu_second": median(r["ess_per_cpu_second"] for r in row["runs"]),
                }
            )
    return rows


def speed_ratios(rows: list[dict]) -> list[dict]:
    """The package's best number of chains against each rival's best, by wall clock and by processor time."""
    found = []
    for records, dim in sorted({(row["records"], row["dim"]) for row in rows}):
        here = [row for row in rows if (row["records"], row["dim"]) == (records, dim)]
        kinds = sorted({row["contestant"] for row in here} - {"fedpdmc"})
        for sites in sorted({row["sites"] for row in here if row["contestant"] == "fedpdmc"}):
            ours = _best(here, "fedpdmc", sites)
            for kind in kinds:
                theirs = _best(here, kind, 1)
                found.append(
                    {
                        "records": records,
                        "dim": dim,
                        "sites": sites,
                        "rival": kind,
                        "chains": ours["chains"],
                        "rival_chains": theirs["chains"],
                        "wall": ours["ess_per_second"] / theirs["ess_per_second"],
                        "cpu": ours["ess_per_cpu_second"] / theirs["ess_per_cpu_second"],
                        "goal": next(case.goal for case in SPEED if (case.records, case.dim) == (records, dim)),
                    }
                )
    return found


def _best(rows: list[dict], contestant: str, sites: int) -> dict:
    own = [row for row in rows if row["contestant"] == contestant and row["sites"] == sites]
    return max(own, key=lambda row: row["ess_per_cpu_second"])


def rounds_table(reports: list[dict]) -> Table:
    """Rounds per effective sample of every run."""
    table = Table(title="Rounds per effective sample (worst of coordinates and energy)")
    for name in ("method", "N", "d", "M", "chains"):
        table.add_column(name)
    for name in ("rounds", "ESS", "rounds/ESS", "events/time", "plans ended by an arrival", "MB in all"):
        table.add_column(name, justify="right")
    for report in reports:
        ours = report["contestant"] == "fedpdmc"
        share = report.get("ended_by_arrival")
        table.add_row(
            label(report),
            f"{report['records']:,}",
            str(report["dim"]),
            str(report.get("sites", "any")),
            str(report["chains"]) if ours else "1",
            f"{report['rounds']:,}" if ours else "",
            f"{report['ess_worst']:,.0f}" if ours else "",
            f"{report['rounds_per_ess']:.4g}",
            f"{report['events_per_time']:.3g}" if ours else "",
            "" if share is None else f"{100 * share:.0f} %",
            f"{report['bytes'] / 1e6:,.1f}" if ours else "",
        )
    return table


def goals_table(rows: list[dict]) -> Table:
    """Goals and what was found."""
    table = Table(title="Goals of the few-rounds method")
    for name in ("what", "found", "goal", "met"):
        table.add_column(name)
    for row in rows:
        sign = "≥" if row["least"] else "≤"
        table.add_row(row["what"], f"{row['found']:,.4g}", f"{sign} {row['goal']:,g}", "yes" if row["met"] else "no")
    return table


def speed_table(rows: list[dict]) -> Table:
    """Effective samples per second of every contestant."""
    table = Table(title="Effective samples per second on one core: medians; compilation and adaptation apart")
    for name in ("N", "d", "contestant", "M", "chains"):
        table.add_column(name)
    for name in ("before s", "ESS/s", "ESS/cpu s"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            f"{row['records']:,}",
            str(row["dim"]),
            row["contestant"],
            str(row["sites"]),
            str(row["chains"]),
            f"{row['before_seconds']:.1f}",
            f"{row['ess_per_second']:,.0f}",
            f"{row['ess_per_cpu_second']:,.0f}",
        )
    return table


def speed_ratios_table(rows: list[dict]) -> Table:
    """How many times as many effective samples per second as each rival."""
    table = Table(title="fedpdmc / rival, each with its best number of chains: wall clock (processor time)")
    for name in ("N", "d", "M", "rival", "chains", "its chains"):
        table.add_column(name)
    for name in ("ratio", "goal"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            f"{row['records']:,}",
            str(row["dim"]),
            str(row["sites"]),
            row["rival"],
            str(row["chains"]),
            str(row["rival_chains"]),
            f"{row['wall']:.2f} ({row['cpu']:.2f})",
            f"{row['goal']:g}",
        )
    return table
