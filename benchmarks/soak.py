"""A long run over gRPC with mutual TLS, and the resident size of every party as it goes.

``python -m benchmarks.soak FOLDER [--rounds N]`` starts a coordinator and two sites as processes of their own, samples their
memory, and leaves ``resident.csv`` and ``resident.svg`` in FOLDER. It fails if a party
grows from the first to the last quarter.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

CONTRACT = """
format = 1
name = "soak"
sites = ["north", "south"]
[model]
family = "logistic"
formula = "y ~ x"
[columns]
y = { type = "level", levels = ["0", "1"] }
x = { type = "number", bounds = [-9, 9] }
[prior]
scale = 1.0
[dynamics]
kind = "ZigZag"
chains = 4
[run]
duration = 1e9
burn_in = 10.0
[releases]
[limits]
rounds = 1000000000
observed_time = 1e12
"""
POLICY = """
families = ["logistic"]
least_records = 1
least_without_budget = 0
most_parameters_per_record = 1.0
most_rounds = 1000000000
most_observed_time = 1e12
"""
COMMAND = [sys.executable, "-m", "fedpdmc"]
# Growth in megabytes from the first to the last quarter that is still called none.
GROWTH = 8.0


def start(folder: Path, port: int, duration: float) -> dict[str, subprocess.Popen]:
    """All parties."""
    from fedpdmc.certificates import make_keys

    make_keys(folder / "keys", ["north", "south"])
    (folder / "study.toml").write_text(CONTRACT)
    (folder / "policy.toml").write_text(POLICY)
    rng = np.random.default_rng(1)
    words = {
        "coordinator": ["coordinator", "study.toml", "--listen", f"127.0.0.1:{port}", "--keep", "draws",
                        "--duration", str(duration), "--keys", "keys/coordinator", "--store", "run", "--seed", "1"],
    }  # fmt: skip
    for name in ("north", "south"):
        rows = "".join(f"{k % 2},{x:.3f}\n" for k, x in enumerate(rng.normal(size=40)))
        (folder / f"{name}.csv").write_text("y,x\n" + rows)
        words[name] = ["site", "study.toml", "--name", name, "--data", f"{name}.csv", "--policy", "policy.toml",
                       "--coordinator", f"127.0.0.1:{port}", "--keys", f"keys/sites/{name}", "--store", name]  # fmt: skip
    parties = {}
    for name, arguments in words.items():
        with open(folder / f"{name}.log", "wb") as log:
            parties[name] = subprocess.Popen(COMMAND + arguments, cwd=folder, stdout=log, stderr=log)
    return parties


def resident(pid: int) -> float:
    """Resident size of a process in megabytes."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def rounds_of(folder: Path) -> int:
    """Rounds that the first site has answered."""
    index = folder / "north" / "audit.index"
    return index.stat().st_size // 8 if index.exists() else 0


def main() -> int:
    """Run, watch, plot and judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=50_000)
    parser.add_argument("--duration", type=float, default=1e5)
    parser.add_argument("--port", type=int, default=47311)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    parties, table = start(options.folder, options.port, options.duration), []
    try:
        while (done := rounds_of(options.folder)) < options.rounds:
            if any(process.poll() is not None for process in parties.values()):
                raise SystemExit(f"a party ended: look at the logs in {options.folder}")
            if done:
                table.append([done, *(resident(process.pid) for process in parties.values())])
            time.sleep(1.0)
    finally:
        for process in parties.values():
            process.kill()
            process.wait()
    with open(options.folder / "resident.csv", "w", newline="") as file:
        csv.writer(file).writerows([["rounds", *parties], *table])
    numbers = np.asarray(table)
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.add_subplot()
    for k, name in enumerate(parties):
        axes.plot(numbers[:, 0], numbers[:, 1 + k], label=name)
    axes.set(xlabel="rounds", ylabel="resident size, MB", ylim=(0, None))
    axes.legend(frameon=False)
    figure.savefig(options.folder / "resident.svg")
    # Compilation fills the first rounds; after it every party should stand still.
    settled = numbers[numbers[:, 0] > 0.1 * options.rounds]
    quarter = max(len(settled) // 4, 1)
    growth = settled[-quarter:, 1:].mean(0) - settled[:quarter, 1:].mean(0)
    for name, size, more in zip(parties, settled[-1, 1:], growth, strict=True):
        print(
            f"{name}: {size:.0f} MB after {options.rounds:,} rounds, {more:+.1f} MB from the first to the last quarter"
        )
    return int(np.any(growth > GROWTH))


if __name__ == "__main__":
    sys.exit(main())
