"""Put the figures and numbers of a full run of ``python -m paper all`` into docs/paper.md.

``python -m benchmarks.paper_page FOLDER``: the tables stand between ``<!-- NAME -->`` and ``<!-- end -->``. What the folder
does not have is left as it is.
"""

import csv
import re
import shutil
import sys
from pathlib import Path

import numpy as np

from paper.distances import bias, by, ratio

ROOT = Path(__file__).parents[1]
PAGE, FIGURES = ROOT / "docs" / "paper.md", ROOT / "docs" / "figures" / "paper"
POOLED = "largest difference of a pooled mean, in standard errors"


def number(text):
    try:
        return float(text)
    except ValueError:
        return text


def read(folder, name):
    with open(folder / f"{name}.csv", newline="", encoding="utf-8") as file:
        return [{key: number(value) for key, value in row.items()} for row in csv.DictReader(file)]


def lines(*head):
    return ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]


def row(*cells):
    return "| " + " | ".join(cells) + " |"


def mean(rows, key):
    return float(np.mean([one[key] for one in rows]))


def gaussian(folder):
    out = lines("M", "rate", "`d√(NM/(2π))`", "difference / standard error", "`σ_0√(NM)`",
                "ESS per full gradient, in sequence", "in parallel")  # fmt: skip
    for one in read(folder, "gaussian"):
        out.append(row(
            f"{one['sites']:.0f}", f"{one['rate']:.1f} ± {one['rate_error']:.1f}", f"{one['theory']:.1f}",
            f"{one['z']:+.1f}", f"{one['paper_order']:.0f}", f"{one['ess_per_full_gradient']:.4f}",
            f"{one['ess_per_full_gradient_parallel']:.3f}",
        ))  # fmt: skip
    return out


def distances(folder, name, key, label, duration=100.0):
    out = lines(label, "switches per unit of time", "effective size of a run", "distance", "floor", "ratio", POOLED)
    for value, part in by(read(folder, name), key).items():
        found, rate = ratio(part), part[0]["rate"] if "rate" in part[0] else part[0]["events"] / duration
        out.append(row(
            value if isinstance(value, str) else f"{value:.0f}", f"{rate:.0f}", f"{mean(part, 'ess'):.0f}",
            f"{mean(part, 'distance'):.3f}", f"{mean(part, 'floor'):.3f}", f"{found.value:.2f} ± {found.error:.2f}",
            f"{bias(part).z:.1f}",
        ))  # fmt: skip
    return out


def time_series(folder):
    rows = read(folder, "time-series")
    out = lines("ν", *(f"M = {m:.0f}" for m in by(rows, "sites")), POOLED)
    for df, own in by(rows, "df").items():
        found = [ratio(part) for part in by(own, "sites").values()]
        out.append(row(
            f"{df:.0f}", *(f"{one.value:.2f} ± {one.error:.2f}" for one in found), f"{bias(own, 'sites').z:.1f}"
        ))  # fmt: skip
    return out


def listener(folder):
    out = lines("listener", "plans overheard", "relative error", "error / standard error, root mean square")
    for name, own in by(read(folder, "redistribution-listener"), "listener").items():
        last = own[-1]
        out.append(row(name, f"{last['plans']:,.0f}", f"{100 * last['error']:.1f} %", f"{last['misfit']:.1f}"))
    return out


def cox(folder):
    out = lines("grid", "cells of a site", "runs", "rounds", "bytes of a site", "if asked every round",
                "switches per unit of time", "least ESS", "distance over floor",
                "largest difference of a cell's mean, in standard errors", "root mean square")  # fmt: skip
    for side, own in by(read(folder, "cox"), "side").items():
        first, size = own[0], np.array([one["bytes"] for one in own]) / 1e6
        z = np.array([cell["z"] for cell in read(folder, f"cox-{side:.0f}")])
        out.append(row(
            f"{side:.0f}×{side:.0f}", f"{first['cells']:.0f}", f"{first['runs']:.0f}", f"{first['rounds']:,.0f}",
            f"{size.min():.3g} to {size.max():.3g} MB", f"{first['bytes_if_asked_every_round'] / 1e6:.3g} MB",
            f"{first['events_per_time']:.0f}", f"{first['least_ess']:.0f}",
            f"{first['distance_over_floor']:.2f} ± {first['distance_over_floor_error']:.2f}", f"{np.abs(z).max():.1f}",
            f"{np.sqrt(np.mean(z**2)):.2f}",
        ))  # fmt: skip
    return out


def dynamics(folder):
    return (folder / "dynamics.md").read_text(encoding="utf-8").strip().split("\n")


def verdicts(folder):
    return [f"- `{one['name']}`: {one['line']}" for one in read(folder, "verdicts")]


def cost(folder):
    rows = read(folder, "verdicts")
    out = lines("experiment", "processor time")
    out += [row(f"`{one['name']}`", f"{one['processor_seconds']:.0f} s") for one in rows]
    return [*out, row("all", f"{sum(one['processor_seconds'] for one in rows) / 60:.0f} min")]


TABLES = {
    "gaussian": gaussian,
    "logistic": lambda folder: distances(folder, "logistic", "sites", "M"),
    "time-series": time_series,
    "redistribution": lambda folder: distances(folder, "redistribution", "sites", "M"),
    "listener": listener,
    "cox": cox,
    "non-identical": lambda folder: distances(folder, "non-identical", "scenario", "sites"),
    "dynamics": dynamics,
    "verdicts": verdicts,
    "cost": cost,
}


def filled(page, folder):
    """The page with the tables of a folder, and the names of those that the folder has not."""
    missing = []
    for name, make in TABLES.items():
        try:
            table = "\n".join(make(folder))
        except FileNotFoundError:
            missing.append(name)
            continue
        place = re.compile(rf"<!-- {name} -->\n.*?<!-- end -->", re.DOTALL)
        page, count = place.subn(lambda _, name=name, table=table: f"<!-- {name} -->\n{table}\n<!-- end -->", page)
        assert count == 1, name
    return page, missing


def main(folder):
    page, missing = filled(PAGE.read_text(encoding="utf-8"), folder)
    PAGE.write_text(page, encoding="utf-8")
    for figure in FIGURES.glob("*.png"):
        if (folder / figure.name).exists():
            shutil.copyfile(folder / figure.name, figure)
        else:
            missing.append(figure.name)
    print(f"{PAGE}: filled" + (f", without {', '.join(missing)}" if missing else ""))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "fedpdmc-paper"))
