"""The harness of the grid; how fast anything is, is not a test."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.__main__ import arguments
from benchmarks.figures import draw
from benchmarks.tables import markdown

from benchmarks import grid

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def run(rate):
    return {"ess_per_second": rate / 2, "ess_per_cpu_second": rate}


def report(contestant, rates, sites=1, device="cpu", records=1000, dim=6):
    rows = [
        {"chains": 2**k, "ready_seconds": 3.0, "runs": [run(rate) for rate in some]} for k, some in enumerate(rates)
    ]
    size = {"records": records, "dim": dim, "sites": sites, "device": device}
    return {"contestant": contestant, "rows": rows} | size


def test_the_best_number_of_chains_counts_and_the_ratio_has_its_goal(tmp_path):
    reports = [
        report("fedpdmc", [[10.0], [600.0, 1200.0, 1300.0], []]),
        report("fedpdmc", [[900.0]], sites=10),
        report("blackjax", [[100.0], [50.0]]),
        report("fedpdmc", [[5.0]], dim=10),
    ]
    rows = grid.speeds(reports)
    one, ten, alone = grid.ratios(rows, "cpu")
    assert one["ratio"] == 12.0 and one["goal"] == 12.0 and ten["of_one_site"] == 0.75 and alone["ratio"] is None
    assert rows[0]["chains"] == 2 and rows[0]["cold_seconds"] == pytest.approx(3 + 10_000 / 600)
    assert "yes" in markdown(grid.ratios_table([one])) and "1,200" in markdown(grid.table(rows))
    assert len(draw({"grid": {"medians": rows}}, tmp_path)) == 1


def test_every_case_runs_on_both_sides():
    asked = []

    def note(script, options, limit):
        assert limit == grid.LIMIT
        asked.append((script, options["records"], options["dim"]))
        arguments(options)
        return {}

    for device in ("cpu", "gpu"):
        list(grid.time_all(note, False, device))
    for case in grid.CPU + grid.GPU:
        assert {script for script, *size in asked if size == [case.records, case.dim]} == {grid.OURS, grid.RIVAL}


@pytest.mark.long
@pytest.mark.parametrize("script", [grid.OURS, grid.RIVAL])
def test_a_contestant_reports_a_rate(script):
    command = [sys.executable, script, *"--records 60 --dim 3 --chains 32 --seconds 0.1 --repeats 1".split()]
    done = subprocess.run(command, capture_output=True, text=True, cwd=FOLDER, check=True)
    # The rival once for each of its step sizes.
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert rows
    assert all(row["runs"][0]["ess_per_cpu_second"] > 0 for row in rows)
