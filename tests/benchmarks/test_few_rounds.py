"""The harness of the few-rounds benchmarks; how fast anything is, is not a test."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.__main__ import arguments
from benchmarks.figures import draw
from benchmarks.tables import markdown

from benchmarks import few_rounds

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def contest(command):
    done = subprocess.run([sys.executable, *command.split()], capture_output=True, text=True, cwd=FOLDER, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.long
def test_the_package_counts_its_rounds():
    report = contest("contestant_few_rounds.py --records 200 --dim 3 --sites 2 --chains 1 --duration 200")
    assert report["rounds"] > report["reference_rounds"] > 1
    assert report["ess_worst"] == min(report["ess_coordinate"], report["ess_energy"])
    assert report["rounds_per_ess"] == pytest.approx(report["rounds"] / report["ess_worst"])
    # With one chain every round but those of the reference is a plan, and most end in an arrival.
    plans = report["rounds"] - report["reference_rounds"]
    assert report["ended_by_arrival"] == pytest.approx(report["events_per_time"] * 200 / plans)


@pytest.mark.long
def test_rivals_run_in_every_way():
    small = "--records 200 --dim 3 --chains 4 --draws 200 --repeats 1"
    for sampler in ("hmc", "nuts"):
        report = contest(f"rival_nuts.py --measure rounds --sampler {sampler} {small}")
        assert report["rounds_per_ess"] == min(row["rounds_per_ess"] for row in report["grid"]) > 1
    for library in ("blackjax", "numpyro"):
        (row,) = contest(f"rival_nuts.py --measure speed --library {library} {small}")["rows"]
        assert row["runs"][0]["draws"] == 200 and row["runs"][0]["ess_per_cpu_second"] > 0
    report = contest("contestant_few_rounds.py --measure speed --records 200 --dim 3 --chains 16 --repeats 2")
    assert len(report["runs"]) == 2 and all(run["ess_per_second"] > 0 for run in report["runs"])


def counted(script, options):
    """A report in the form of the contestants', with figures that can be checked by hand."""
    if script == few_rounds.RIVAL:
        per = {"hmc": 3.0, "nuts": 6.0}[options["sampler"]]
        return {"contestant": "blackjax", "records": 1000, "dim": 6, "rounds_per_ess": per} | options
    many = options["ess"] > 0
    per = {"default": 0.2, "zigzag": 40.0}[options["method"]] * (1.5 if options["sites"] == 50 else 1.0)
    found = (
        {"rounds": 20, "ess_worst": 12_000.0} if many else {"rounds": 200, "ess_worst": 1000.0, "ended_by_arrival": 0.9}
    )
    return options | found | {
        "contestant": "fedpdmc", "chains": 1024 if many else 1, "rounds_per_ess": per, "events_per_time": 0.06,
        "bytes": 1_000_000,
    }  # fmt: skip


def timed(script, options):
    if script == few_rounds.OURS:
        runs = [{"ess_per_second": 60.0 / options["sites"], "ess_per_cpu_second": 90.0 / options["sites"]}]
        return {"contestant": "fedpdmc", "method": "default", "compile_seconds": 1.0, "runs": runs} | options
    rows = [
        {"chains": c, "before_seconds": 2.0, "runs": [{"ess_per_second": 10.0 + c, "ess_per_cpu_second": 10.0 + c}]}
        for c in options["chains"]
    ]
    return {"contestant": options["library"], "sampler": "nuts"} | options | {"rows": rows}


def test_goals_and_ratios_are_worked_out(tmp_path):
    reports = list(few_rounds.count_rounds(counted, quick=False))
    goals = {row["what"]: row for row in few_rounds.rounds_goals(reports)}
    assert goals["times fewer than Algorithm 2"]["found"] == pytest.approx(200.0)
    assert goals["times fewer than federated HMC"]["found"] == pytest.approx(15.0)
    assert goals["rounds in all, chosen chains"] == {
        "what": "rounds in all, chosen chains", "found": 20, "goal": 16.0, "least": False, "met": False
    }  # fmt: skip
    assert not goals["N = 100,000 against N = 1000"]["found"] > 1
    timings = list(few_rounds.time_all(timed, quick=False))
    rows = few_rounds.speeds(timings)
    ratios = few_rounds.speed_ratios(rows)
    best = max(few_rounds.SPEED[0].rival_chains["blackjax"])
    row = next(r for r in ratios if r["sites"] == 1 and r["records"] == 1000 and "BlackJAX" in r["rival"])
    assert row["rival_chains"] == best and row["cpu"] == pytest.approx(90.0 / (10 + best))
    shown = markdown(
        few_rounds.rounds_table(reports), few_rounds.goals_table(list(goals.values())), few_rounds.speed_table(rows),
        few_rounds.speed_ratios_table(ratios),
    )  # fmt: skip
    assert "NumPyro NUTS, 32 bits" in shown and "federated HMC (BlackJAX)" in shown
    made = draw({"rounds": {"contestants": reports}, "speed": {"medians": rows}}, tmp_path)
    assert [path.name for path in made] == ["few-rounds-rounds.png", "few-rounds-speed.png"]
    assert all(path.stat().st_size > 1000 for path in made)


def test_every_case_has_a_quick_size():
    for case in few_rounds.ROUNDS:
        assert case.quick().duration < case.duration
    for case in few_rounds.SPEED:
        assert case.quick().units < case.units and len(case.quick().chains) == 1


def test_lists_become_words_of_a_command():
    assert arguments({"chains": (1, 16), "bits": 32}) == ["--chains", "1", "16", "--bits", "32"]
