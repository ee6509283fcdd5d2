"""A coordinator that sends a posterior of its own making, and a site that sends a file of its own making."""

import json
import subprocess
import sys

import msgspec
import numpy as np
import pandas as pd
import pytest
from scipy.optimize import minimize
from typer.testing import CliRunner

import fedpdmc as fp
from fedpdmc.assessment.all_sites import Assessment
from fedpdmc.assessment.at_site import PublicDraws, SiteAssessment, assess_site
from fedpdmc.cli import app
from fedpdmc.errors import InputError
from fedpdmc.study.sites_from_table import sites
from fedpdmc.study.study_response import Outcome

CONTROLLED = {"controlled": True, "least_records": 10}


@pytest.fixture(scope="module")
def falls():
    """Counts at two sites, 150 records each, with columns that tell patients apart."""
    rng, n = np.random.default_rng(0), 300
    frame = pd.DataFrame({"centre": np.repeat(["a", "b"], n // 2), "drug": rng.integers(0, 2, n)})
    frame["age"], frame["bmi"] = np.round(rng.normal(0, 12, n)), np.round(rng.normal(0, 4, n), 1)
    frame["falls"] = rng.poisson(np.exp(0.3 - 0.3 * frame.drug + 0.02 * frame.age))
    return sites(frame, by="centre", formula="falls ~ drug + age + bmi", family="poisson", standardize=False,
                 prior="normal(0, 2.5)")  # fmt: skip


@pytest.fixture(scope="module")
def honest(falls):
    """Draws of the normal approximation at the mode of all records."""

    def minus_log_posterior(x):
        outcome = Outcome(falls.study, x[None])
        return 0.5 * x @ x / 2.5**2 - sum(outcome.log_density(table).sum() for table in falls.tables.values())

    found = minimize(minus_log_posterior, np.zeros(4))
    values = np.random.default_rng(1).multivariate_normal(found.x, found.hess_inv, 1000)
    return PublicDraws(values, falls.names, 1.0)


def made_up(falls, rng):
    """Draws that differ by nothing about a point far out, and the gradient there as the influence on them tells it."""
    point = 4 * rng.normal(size=4) / [1, 1, 12, 4]
    values = point + 1e-5 * rng.choice([-1, 1], size=(400, 4))

    def gradient(told):
        covariance = np.asarray([told.pull[name] for name in falls.names]) * values.std(0)
        return np.linalg.solve(np.cov(values.T, bias=True), covariance)

    return PublicDraws(values, falls.names, 1.0), gradient


def test_a_made_up_posterior_reads_no_row(falls):
    records, rng, rows_read, refused = falls.tables["a"], np.random.default_rng(0), 0, 0
    design = falls.study.design.matrix(records)
    for _ in range(40):
        draws, gradient = made_up(falls, rng)
        told = gradient(assess_site(falls.study, "a", records, draws, what=["influence"]))
        if np.min(np.max(np.abs(design - told / told[0]), axis=1)) < 0.05:
            # Without control the influence of the site is the row of one patient.
            rows_read += 1
            for what in ("influence", "loo"):
                with pytest.raises(InputError, match="effective records|share"):
                    assess_site(falls.study, "a", records, draws, what=[what], **CONTROLLED)
                refused += 1
    assert rows_read >= 2 and refused == 2 * rows_read


def archived(falls, path, mean, deviation):
    """A posterior with the study's parameters and a normal law of somebody's choice, saved as a coordinator saves one."""
    site = fp.Site(fp.models.linear(np.eye(4) / deviation[:, None], mean / deviation, 1.0), name="a")
    post = fp.sample([site], seed=1, chains=4, duration=60.0, names=falls.names, progress=False)
    post.save(path)
    return path


def test_the_command_refuses_a_made_up_posterior_and_takes_an_honest_one(falls, honest, tmp_path):
    study = falls.write(tmp_path / "study.toml")
    study.write_text(study.read_text().replace("[releases]", '[releases]\nassessment = ["loo", "checks", "influence"]'))
    falls.tables["a"].to_csv(tmp_path / "a.csv", index=False)
    words = ["assess", study, "--name", "a", "--data", tmp_path / "a.csv", "--out", tmp_path / "a.json", "--posterior"]
    far = archived(falls, tmp_path / "far.zarr", np.array([0.0, 0.0, 0.5, 0.0]), np.full(4, 1e-4))
    command = [sys.executable, "-W", "ignore", "-m", "fedpdmc", *map(str, words), str(far)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "effective records" in done.stdout + done.stderr, done
    assert not (tmp_path / "a.json").exists()
    near = archived(falls, tmp_path / "near.zarr", honest.values.mean(0), honest.values.std(0))
    assert CliRunner().invoke(app, [*map(str, words), str(near)]).exit_code == 0
    assert SiteAssessment.read(tmp_path / "a.json").records == 150


def test_one_draw_among_many_is_looked_at(falls, honest):
    """At it one record's likelihood changes and no other's: weights 1/L tell how much."""
    records = falls.tables["a"]
    values = honest.values.copy()
    values[7] = values.mean(0) + [0.0, 0.0, 0.5, 0.0]
    with pytest.raises(InputError, match="from draw to draw"):
        assess_site(falls.study, "a", records, honest._replace(values=values), **CONTROLLED)
    values[7, 2] = np.nan
    with pytest.raises(InputError, match="Nothing is released"):
        assess_site(falls.study, "a", records, honest._replace(values=values), what=["influence"], **CONTROLLED)


def test_an_honest_posterior_is_assessed_as_without_control(falls, honest):
    for site, records in falls.tables.items():
        assert assess_site(falls.study, site, records, honest, **CONTROLLED) == assess_site(
            falls.study, site, records, honest
        )


def test_a_file_has_no_more_digits_than_are_needed(falls, honest, tmp_path):
    told = assess_site(falls.study, "a", falls.tables["a"], honest)
    read = SiteAssessment.read(told.write(tmp_path / "a.json"))
    assert read.loo is not None and told.loo is not None
    assert read.loo["elpd"] == pytest.approx(told.loo["elpd"], abs=1e-4) and read.loo["elpd"] != told.loo["elpd"]
    assert read.loo["worst_k"] == round(told.loo["worst_k"], 1)


@pytest.mark.parametrize(
    "change",
    [
        {"site": 3}, {"site": "a\x1b[2J"}, {"records": "150"}, {"format": 2}, {"loo": []}, {"loo": {"elpd": 1.0}},
        {"checks": {"mean": 1.0}}, {"checks": {"mean": {"observed": 1.0}}}, {"pull": {"age": "x"}}, {"without": {}},
        {"without": {"mean": {}, "sd": {}, "k": None}}, {"more": 1}, {"pull": {"\n": 1.0}},
    ],
)  # fmt: skip
def test_a_file_that_a_site_made_up_is_refused_by_name(falls, honest, tmp_path, change):
    path = assess_site(falls.study, "a", falls.tables["a"], honest).write(tmp_path / "a.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(InputError, match="assessment"):
        SiteAssessment.read(path)


def test_names_of_a_file_do_not_become_html(falls, honest, tmp_path):
    path = assess_site(falls.study, "a", falls.tables["a"], honest).write(tmp_path / "a.json")
    told = json.loads(path.read_text())
    told |= {"site": "<script>1</script>", "checks": {"<script>2</script>": {"p": 0.001}}}
    path.write_text(json.dumps(told))
    page = Assessment([SiteAssessment.read(path)])._repr_html_()
    assert "<script>" not in page and "&lt;script&gt;" in page


def test_small_numbers_and_unknown_ones_are_shown_as_such(falls, honest):
    told = assess_site(falls.study, "a", falls.tables["a"], honest)
    assert told.without is not None
    small = {"mean": {"age": 4.1234e-5, "drug": -0.31}, "sd": {"age": 1e-5, "drug": 0.1}, "k": 0.4}
    far = {"mean": {"age": np.nan, "drug": np.nan}, "sd": {"age": np.nan, "drug": np.nan}, "k": 1.3}
    scores = pd.DataFrame({"a": {"score": 20.0, "df": 2.0, "p": 4e-5}, "b": {"score": 1.0, "df": 2.0, "p": 0.61}}).T
    near = msgspec.structs.replace(told, without=small)
    whole = Assessment([near, msgspec.structs.replace(told, site="b", without=far)], scores=scores)
    page = whole._repr_html_()
    assert ">4.123e-05</td>" in page and ">&lt;0.001</td>" in page and ">0.610</td>" in page
    assert page.count(">–</td>") == 2 and "nan" not in page.lower()
    assert "too far from the posterior of all sites: fit without it" in page
    assert "<0.001" in repr(whole) and "0.000" not in repr(whole)
    assert "too far" not in Assessment([near], scores=scores)._repr_html_()
