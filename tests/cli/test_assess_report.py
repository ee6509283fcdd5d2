"""``fedpdmc assess`` at the sites and ``fedpdmc report`` at the coordinator, from a contract that a table has written."""

import json

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import fedpdmc as fp
from fedpdmc.cli import app

SITES = ("north", "south", "west")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("study")
    rng = np.random.default_rng(1)
    frame = pd.DataFrame({"site": np.repeat(SITES, 60), "age": rng.normal(60, 10, 180).round()})
    frame["falls"] = rng.poisson(np.exp(0.03 * (frame.age - 60) + 0.5))
    sites = fp.sites(frame, by="site", formula="falls ~ age", family="poisson", prior={"age": "student_t(4, 0, 1)"})
    text = sites.write(path / "study.toml").read_text()
    text = text.replace("[releases]", '[releases]\nassessment = ["loo", "checks", "influence"]')
    (path / "study.toml").write_text(text + "\n[run]\nduration = 6.0\n")
    for name, part in frame.groupby("site"):
        part.drop(columns="site").to_csv(path / f"{name}.csv", index=False)
    data = {name: path / f"{name}.csv" for name in SITES}
    with fp.connect(path / "study.toml", data=data, seed=1) as connection:
        fp.sample(connection, progress=False).save(path / "store" / "posterior.zarr")
    return path


def called(*words, good=True):
    result = CliRunner().invoke(app, list(map(str, words)))
    assert (result.exit_code == 0) == good, result.output
    return result


def test_sites_write_what_they_would_release_and_the_report_has_it(folder):
    for name in SITES:
        called("assess", folder / "study.toml", "--name", name, "--data", folder / f"{name}.csv", "--posterior",
               folder / "store" / "posterior.zarr", "--out", folder / f"{name}.json", "--only-p-values")  # fmt: skip
        told = json.loads((folder / f"{name}.json").read_text())
        assert set(told["checks"]["mean"]) == {"p"} and told["records"] == 60
    line = {"site": "north", "entries": 9, "seal": "ab" * 32, "when": 1.0, "certificate": "", "signature": ""}
    (folder / "store" / "seals.jsonl").write_text(json.dumps(line) + "\n")
    files = [word for name in SITES for word in ("--assessment", folder / f"{name}.json")]
    called("report", folder / "store", "--study", folder / "study.toml", "--out", folder / "report.html", *files,
           "--title", "Falls", "--question", "Do older patients fall?")  # fmt: skip
    text = (folder / "report.html").read_text()
    digest = fp.load(folder / "store" / "posterior.zarr").settings["contract"]
    for words in ("Do older patients fall?", "falls ~ age", "~ student_t(", "predictive accuracy", "log of north", "ab" * 32,
                  digest, "derivatives summed over the sites", "of the fit of their records"):  # fmt: skip
        assert words in text, words


def test_an_assessment_under_other_draws_is_not_taken(folder, tmp_path, caplog):
    told = json.loads((folder / "north.json").read_text()) | {"draws": "0" * 64}
    (tmp_path / "north.json").write_text(json.dumps(told))
    out = tmp_path / "report.html"
    called("report", folder / "store", "--assessment", tmp_path / "north.json", "--out", out, good=False)
    assert "under other draws" in caplog.text and not out.exists()
