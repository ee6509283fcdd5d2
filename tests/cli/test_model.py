"""``fedpdmc model``: from a Python file to a model file, and what a reviewer is shown."""

import pytest
from typer.testing import CliRunner

import fedpdmc as fp
from fedpdmc.cli import app

SOURCE = """
import jax.numpy as jnp
import fedpdmc as fp


def minus_log_likelihood(x, row):
    return 0.5 * (row["y"] - x["eta"]) ** 2 * jnp.exp(-2 * x["log_sigma"]) + x["log_sigma"]


model = fp.Model(minus_log_likelihood, title="A line", predictors=["eta"], parameters=["log_sigma"], columns={"y": "real"})
"""


def call(*words, status=0):
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == status, result.output
    return result.output


def test_build_and_show(tmp_path):
    source, out = tmp_path / "line.py", tmp_path / "line.fpm"
    source.write_text(SOURCE)
    said = call("model", "build", source, "--out", out)
    model = fp.Model.load(out)
    assert model.digest in said.replace("\n", " ") and out.read_text() == model.text
    shown = call("model", "show", out)
    assert "A line" in shown and "y (): column, real" in shown and "cannot read a file" in shown
    assert call("model", "show", out, "--text").strip() == model.text.strip()


@pytest.mark.parametrize(
    ("words", "expected"),
    [(["weibull"], "Weibull"), (["ordered_logit", "--levels", "3"], "Ordered logistic")],
)
def test_a_family_as_a_file(tmp_path, words, expected):
    call("model", "family", *words, "--out", tmp_path / "m.fpm")
    assert expected in call("model", "show", tmp_path / "m.fpm")


@pytest.mark.parametrize(
    "words",
    [
        ["build", "{}/none.py", "--out", "{}/m.fpm"],
        ["build", "{}/line.py", "--out", "{}/m.txt"],
        ["build", "{}/empty.py", "--out", "{}/m.fpm"],
        ["family", "ordered_logit", "--out", "{}/m.fpm"],
        ["family", "weibull", "--levels", "3", "--out", "{}/m.fpm"],
        ["family", "cauchy", "--out", "{}/m.fpm"],
        ["show", "{}/line.py"],
        ["show", "{}/none.fpm"],
    ],
)
def test_bad_input_is_refused(tmp_path, words):
    (tmp_path / "line.py").write_text(SOURCE)
    (tmp_path / "empty.py").write_text("x = 1\n")
    call("model", *(word.format(tmp_path) for word in words), status=2)
