"""The comparison on users' functions: every model of the zoo, the rival at its best, medians of processor time."""

from benchmarks.any_model import MODELS, RIVAL, rows, table, time_all
from benchmarks.tables import markdown
from tests.zoo import CASES


def report(contestant, rates, **options):
    runs = [{"ess_per_second": rate / 2, "ess_per_cpu_second": rate, "violations": 3, "looks": 5.0} for rate in rates]
    common = {"model": "probit", "records": 90, "dim": 2, "mean": [0.0, 1.0], "error": [0.1, 0.1], "certified": True}
    return {"contestant": contestant, "runs": runs, **common, **options}


def test_the_ratio_is_to_the_better_sampler_of_the_rival():
    reports = [
        report("fedpdmc", (10.0, 30.0, 20.0), method="default", mean=[0.3, 1.0]),
        report("pdmp-jax", (40.0, 40.0, 1.0), kind="zigzag"),
        report("pdmp-jax", (5.0, 5.0, 5.0), kind="boomerang"),
    ]
    (row,) = rows(reports)
    assert row["rival"] == "zigzag" and row["cpu"] == row["wall"] == 0.5 and row["violations"] == 9
    assert abs(row["max_z"] - 0.3 / (0.1 * 2**0.5)) < 1e-12
    assert "| probit | 90      | 2 | default | zigzag |" in markdown(table([row]))


def test_every_model_of_the_zoo_runs_on_both_sides():
    assert set(MODELS) == set(CASES)
    asked = []

    def run(script, options):
        asked.append((script, options["model"]))
        return {}

    list(time_all(run, run, quick=False))
    assert len(asked) == 3 * len(MODELS) and sum(script == RIVAL for script, _ in asked) == 2 * len(MODELS)
