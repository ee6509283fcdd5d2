"""Every experiment at its toy size: the numbers that it writes, not only that it runs."""

import csv
from collections import defaultdict
from itertools import groupby

import numpy as np
import pytest
from benchmarks.paper_page import PAGE, filled
from rich.console import Console

from paper import NAMES, logistic, reproduce
from paper.distances import Ratio, bias, ratio
from paper.dynamics import DYNAMICS
from paper.gaussian import QUICK as GAUSSIAN
from paper.non_identical import SITES, splits
from paper.problems import Regression
from paper.redistribution import IGNORED, MEAN_OFF, READ, WITHOUT


def number(text):
    try:
        return float(text)
    except ValueError:
        return text


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("paper")


def run(name, out):
    """The verdict, which must hold, with the files that the experiment left."""
    (verdict,) = reproduce(name, out, quick=True, console=Console(quiet=True))
    assert verdict.holds, str(verdict)
    assert verdict.name == name and str(verdict).startswith(f"{name}: holds: ")
    (row,) = [row for row in table(out, "verdicts") if row["name"] == name]
    assert row["line"] == verdict.line and row["holds"] == "True" and row["processor_seconds"] > 0
    return verdict


def table(out, name):
    with open(out / f"{name}.csv", newline="", encoding="utf-8") as file:
        return [{key: number(value) for key, value in row.items()} for row in csv.DictReader(file)]


def figures(out, *names):
    for name in names:
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (out / f"{name}.svg").read_text(encoding="utf-8")[:1000]


def distances(rows, *keys):
    """Mean distance over mean floor by group, each near one within the error of its runs; and no bias of pooled means."""
    groups = defaultdict(list)
    for row in rows:
        groups[tuple(row[key] for key in keys)].append(row)
    for key, group in groups.items():
        by_run = defaultdict(list)
        for row in group:
            by_run[row["run"]].append(row["distance"])
        means, floor = np.array([np.mean(own) for own in by_run.values()]), np.mean([row["floor"] for row in group])
        found = Ratio(means.mean() / floor, means.std(ddof=1) / np.sqrt(len(means)) / floor)
        assert found.on_the_floor and found.error < 0.2, (key, found)
        assert all(row["ess"] > 10 for row in group)
    off = bias(rows, *keys)
    assert off.none_seen and off.limit < 6, off
    return groups


def test_gaussian(out):
    run("gaussian", out)
    figures(out, "gaussian-rate", "gaussian-ess")
    rows = table(out, "gaussian")
    assert [row["sites"] for row in rows] == list(GAUSSIAN.sites)
    for row in rows:
        theory = GAUSSIAN.dim * np.sqrt(GAUSSIAN.records * row["sites"] / (2 * np.pi))
        assert row["theory"] == pytest.approx(theory)
        assert abs(row["rate"] - theory) < 4 * row["rate_error"]
        # The paper's order is that: an order, too high by √(2π).
        assert row["paper_order"] - row["rate"] > 8 * row["rate_error"]
    assert rows[1]["ess_per_full_gradient"] < 0.5 * rows[0]["ess_per_full_gradient"]
    assert rows[1]["ess_per_full_gradient_parallel"] > rows[0]["ess_per_full_gradient_parallel"]
    for row in table(out, "gaussian-runs"):
        assert row["mean_error"] < 5 / np.sqrt(row["ess"])


def test_logistic(out):
    run("logistic", out)
    figures(out, "logistic")
    rows = table(out, "logistic")
    groups = distances(rows, "sites")
    assert set(groups) == {(m,) for m in logistic.QUICK.sites}
    # More sites switch more often, and mix more slowly: the distance that the floor follows grows.
    one, five = (groups[(m,)] for m in logistic.QUICK.sites)
    assert five[0]["events"] > 1.3 * one[0]["events"]
    assert np.mean([row["ess"] for row in five]) < np.mean([row["ess"] for row in one])


@pytest.mark.long
def test_non_identical(out):
    run("non-identical", out)
    figures(out, "non-identical")
    rows = table(out, "non-identical")
    groups = distances(rows, "scenario")
    rate = {key[0]: group[0]["rate"] for key, group in groups.items()}
    assert set(rate) == {"identical", "covariate shift", "one class each", "one tiny site", "unequal priors"}
    assert rate["one class each"] > rate["identical"]


@pytest.mark.parametrize("ones", [1, 7, 41, 58, 96])
def test_one_class_sites_have_one_class_and_every_record_is_somewhere(ones):
    y = np.random.default_rng(ones).permutation(np.arange(97) < ones).astype(float)
    for name, parts in splits(Regression(np.random.default_rng(1).normal(size=(97, 2)), y)).items():
        assert len(parts) == SITES and all(len(rows) for rows in parts)
        np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(97))
        if name == "one class each":
            assert all(len(set(y[rows])) == 1 for rows in parts)


@pytest.mark.long
def test_redistribution(out):
    run("redistribution", out)
    figures(out, "redistribution", "redistribution-listener")
    distances(table(out, "redistribution"), "sites")
    heard = defaultdict(list)
    for row in table(out, "redistribution-listener"):
        heard[row["listener"]].append(row)
    assert set(heard) == {WITHOUT, IGNORED, MEAN_OFF, READ}
    last = {name: rows[-1] for name, rows in heard.items()}
    # Who hears a site in a federation finds its gradient, up to Monte Carlo error and closer with more plans.
    for name in (WITHOUT, MEAN_OFF, READ):
        assert last[name]["error"] < 0.06 and last[name]["misfit"] < 2
        assert last[name]["error"] < 0.5 * heard[name][0]["error"]
    profile = table(out, "redistribution-profile")
    for name, row in last.items():
        own = [line for line in profile if line["listener"] == name]
        z = np.array([(line["slope"] - line["truth"]) / line["error"] for line in own])
        assert np.sqrt(np.mean(z**2)) == pytest.approx(row["misfit"], rel=1e-4)
    # Redistribution misleads a listener who does not think of the prior, and only that one.
    assert last[IGNORED]["misfit"] > 2.3
    assert last[IGNORED]["error"] > 1.5 * max(last[name]["error"] for name in (WITHOUT, MEAN_OFF, READ))


@pytest.mark.long
def test_dynamics(out):
    run("dynamics", out)
    figures(out, "dynamics")
    rows = table(out, "dynamics")
    assert [row["dynamics"] for row in rows] == list(DYNAMICS)
    distances(table(out, "dynamics-distances"), "dynamics", "control")
    (plain,) = [row for row in rows if row["control"] == "none"]
    for row in rows:
        assert row["ess_per_round"] == pytest.approx(row["ess"] / row["rounds"], rel=1e-6)
        assert 0.6 < row["distance_over_floor"] < 1.5
        # Control variates and plans of many segments: far fewer rounds than effective samples, and fewer passes.
        if row["control"] == "quadratic":
            assert row["ess_per_round"] > max(2, 3 * plain["ess_per_round"])
            assert row["ess_per_full_gradient"] > 5 * plain["ess_per_full_gradient"]
    assert "| Boomerang | quadratic | round |" in (out / "dynamics.md").read_text(encoding="utf-8")


@pytest.mark.long
def test_time_series(out):
    run("time-series", out)
    figures(out, "time-series")
    groups = distances(table(out, "time-series"), "df", "sites")
    assert set(groups) == {(df, m) for df in (1.0, 2.0, 4.0) for m in (4.0,)}


@pytest.mark.long
def test_cox(out):
    run("cox", out)
    figures(out, "cox-graph", "cox-marginals", "cox-large")
    for side in (4, 6):
        rows = table(out, f"cox-{side}")
        assert len(rows) == side**2
        z = np.array([row["z"] for row in rows])
        assert np.max(np.abs(z)) < 5 and np.sqrt(np.mean(z**2)) < 1.5
        for row in rows:
            assert row["sd"] == pytest.approx(row["hmc_sd"], rel=5 / np.sqrt(row["ess"]))
        # A whole path would be sent in 8 (2 + 2 side²) bytes a round and run, and its answer in 13; a site is sent its
        # own quarter, and only if it must be asked.
        whole = 8 * (2 + 2 * side**2) + 13
        for row in table(out, "cox"):
            if row["side"] == side:
                assert row["cells"] == side**2 / 4
                assert 0 < row["bytes_per_round_and_run"] < 0.5 * whole
                assert row["bytes"] < 0.8 * row["bytes_if_asked_every_round"]
                assert row["messages"] <= 2 * row["rounds"]
    for k, own in groupby(table(out, "cox-marginals"), key=lambda row: row["cell"]):
        own = list(own)
        width = np.array([row["to"] - row["from"] for row in own])
        both = [np.array([row[key] for row in own]) for key in ("density", "hmc_density")]
        assert [width @ density for density in both] == pytest.approx([1, 1], rel=1e-5), k
        # Half the area between them is the probability that would have to be moved.
        assert width @ np.abs(both[0] - both[1]) / 2 < 0.15
    rows = table(out, "cox-distances")
    distances([row for row in rows if row["side"] == 4], "side")
    found = ratio([row for row in rows if row["side"] == 6])
    assert found.on_the_floor and found.error < 0.2, found


def test_the_page_on_the_paper_takes_these_numbers(out):
    """The last test of the file: by now the folder has what every experiment left."""
    page = PAGE.read_text(encoding="utf-8")
    new, missing = filled(page, out)
    if (out / "verdicts.csv").exists() and len(table(out, "verdicts")) == len(NAMES):
        assert missing == []
        assert new.count("- `cox`: ") == 1 and "| unequal priors |" in new and new != page
    assert filled(new, out) == (new, missing)


def test_every_experiment_has_a_test():
    assert {f"test_{name.replace('-', '_')}" for name in NAMES} <= set(globals())
