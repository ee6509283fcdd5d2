"""The harness works and measures a sampler that is right; how fast it is, is not a test."""

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.cases import CASES
from benchmarks.tables import RATES, markdown, rates_table, ratios, ratios_table, summarise

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
COMMAND = "contestant_fedpdmc.py --problem paper_gaussian --chains 16 --sites 2 --steps 100 --repeats 2 --check"


@pytest.fixture(scope="module")
def report():
    done = subprocess.run([sys.executable, *COMMAND.split()], capture_output=True, text=True, cwd=FOLDER, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_the_package_side_reports_right_moments_and_all_rates(report):
    assert report["certified"] and report["sites"] == 2 and len(report["runs"]) == 2
    assert report["mean_max_abs_z"] < 4.5
    assert 0.9 < report["sd_ratio_min"] <= report["sd_ratio_max"] < 1.1
    for run in report["runs"]:
        assert run["draws"] == 16 * 100 and 0 < run["ess_worst"] <= run["draws"]
        assert run["ess_worst"] == min(run["ess_coordinate"], run["ess_energy"])
        # Two sites of 25 records flip about √2 times as often as pooled data: d √(NM / 2π) = 40 a unit of time.
        assert run["events"] == pytest.approx(16 * 40 * run["process_time"], rel=0.2)
        assert run["skeleton"]["run_seconds"] >= run["run_seconds"] > 0
    assert {clock: set(rates) for clock, rates in summarise(report).items()} == {
        "extend": set(RATES),
        "skeleton": set(RATES),
    }


def test_ratios_are_medians_of_the_package_over_medians_of_each_execution(report):
    ours = report | {"sites": 1, "goal": ["events", 5.0]}
    reports = [ours]
    for execution, factor in (("sequential", 0.5), ("vmap", 0.1)):
        rival = copy.deepcopy(ours) | {"contestant": "pdmp-jax", "execution": execution}
        del rival["skeleton"], rival["sites"]
        for run in rival["runs"]:
            run.update({rate: factor * run[rate] for rate in RATES})
        reports.append(rival)
    found = ratios(reports)
    assert {(row["quantity"], row["clock"]) for row in found} == {
        (quantity, clock) for quantity in ("events", "ess") for clock in ("extend", "skeleton")
    }
    for row in found:
        assert row["rival_best"] == "sequential"
        assert row["goal"] == (5.0 if row["quantity"] == "events" else None)
        if row["clock"] == "extend":
            assert row["against"]["sequential"] == pytest.approx({"wall": 2.0, "cpu": 2.0})
            assert row["against"]["vmap"] == pytest.approx({"wall": 10.0, "cpu": 10.0})
    shown = markdown(rates_table(reports), ratios_table(found))
    assert shown.count("pdmp-jax, vmap") == 1 and "| 2.00 (2.00) | 10.00 (10.00) |" in " ".join(shown.split())


def test_every_case_has_a_quick_size():
    for case in CASES:
        assert 30 <= case.quick().steps < max(case.steps, 31)
