"""Contrasts, ratios and sensitivities against what is known of them."""

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from tests.assessment.test_assessment import PRIOR_SD, SD, assessed, draws_of, exact, gaussian_study

import fedpdmc as fp
from fedpdmc.assessment.predict import contrasts, ratios
from fedpdmc.errors import InputError


@pytest.fixture(scope="module")
def fitted():
    rng = np.random.default_rng(1)
    frame = pd.DataFrame({"centre": np.repeat(["a", "b"], 150), "age": rng.normal(60, 10, 300).round()})
    frame["died"] = (rng.random(300) < 1 / (1 + np.exp(-0.05 * (frame.age - 60)))).astype(int)
    sites = fp.sites(frame, by="centre", formula="died ~ age", family="logistic")
    return sites, fp.sample(sites, seed=1, ess=400, progress=False)


def test_contrasts_are_those_of_the_summary_and_of_the_paths(fitted):
    _, post = fitted
    table = contrasts(post, {"ten": {"age": 10}, "risk": lambda p: 1 / (1 + jnp.exp(-p["Intercept"] - 70 * p["age"]))})
    row = post.summary().loc["age"]
    assert table.loc["ten", "mean"] == pytest.approx(10 * row["mean"], rel=1e-6)
    assert table.loc["ten", "sd"] == pytest.approx(10 * row["sd"], rel=1e-3)
    drawn = post.variables(200)
    risk = 1 / (1 + np.exp(-drawn["Intercept"] - 70 * drawn["age"]))
    assert table.loc["risk", "mean"] == pytest.approx(risk.mean(), abs=4 * risk.std() / np.sqrt(400))
    whole = post.expectation(lambda p: p["age"], named=True)
    assert float(whole) == pytest.approx(row["mean"], rel=1e-6)


def test_a_posterior_from_disk_has_contrasts_too(fitted, tmp_path):
    _, post = fitted
    post.save(tmp_path / "post.zarr")
    loaded = fp.load(tmp_path / "post.zarr")
    row = post.summary().loc["age"]
    found = contrasts(loaded, {"ten": {"age": 10}}).loc["ten"]
    assert found["mean"] == pytest.approx(10 * row["mean"], abs=5 * row["sd"] / np.sqrt(40))
    # The sites of a table bring their prior.
    longer = loaded.extend(duration=2.0, sites=fitted[0], progress=False)
    assert longer.duration > loaded.duration
    with pytest.raises(InputError, match="read from disk"):
        loaded.expectation(lambda p: p["age"], named=True)


def test_ratios_have_the_name_of_the_family_and_the_steps_that_were_asked_for(fitted):
    sites, post = fitted
    table = ratios(post, sites, by={"age": 10})
    assert table.index.name == "odds ratio" and list(table.index) == ["age (+ 10)"]
    assert table["median"].iloc[0] == pytest.approx(np.exp(10 * post.summary().loc["age", "median"]), rel=0.05)
    for told, words in (({"by": {"sex": 1}}, "'sex'"), ({"level": 2}, "level")):
        with pytest.raises(InputError, match=words):
            ratios(post, sites, **told)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ({"x": {"sex": 1}}, "the parameter 'sex'"),
        ({"x": lambda p: jnp.stack([p["age"], p["age"]])}, "Return one number"),
    ],
)
def test_contrasts_that_are_none_are_refused(fitted, what, words):
    with pytest.raises(InputError, match=words):
        contrasts(fitted[1], what)


def test_sensitivity_is_the_derivative_by_the_power():
    """In a Gaussian model the posterior under a power α of the likelihood, or of the prior, is known."""
    found, frame = gaussian_study()
    table = assessed(found, draws_of(found, frame, 60_000)).sensitivity
    X, y = np.column_stack([np.ones(len(frame)), frame.dose]), frame.y.to_numpy()

    def mean(prior, likelihood):
        precision = likelihood * X.T @ X / SD**2 + prior * np.eye(2) / PRIOR_SD**2
        return np.linalg.solve(precision, likelihood * X.T @ y / SD**2)

    sd, step = np.sqrt(np.diag(exact(frame)[1])), 1e-4
    prior = (mean(1 + step, 1) - mean(1 - step, 1)) / (2 * step) / sd
    likelihood = (mean(1, 1 + step) - mean(1, 1 - step)) / (2 * step) / sd
    np.testing.assert_allclose(table["prior"], prior, atol=0.02)
    np.testing.assert_allclose(table["likelihood"], likelihood, atol=0.02)
    assert set(table["diagnosis"]) == {"-"}


def test_a_prior_that_disagrees_with_the_records_is_named():
    found, frame = gaussian_study()
    draws = draws_of(found, frame, 4000)
    told = assessed(found, draws)
    told.prior_pull = dict.fromkeys(told.prior_pull, -0.5)
    for one in told.sites:
        one.pull.update(dict.fromkeys(one.pull, 0.2))
    assert set(told.sensitivity["diagnosis"]) == {"prior and records disagree"}
    assert "see .sensitivity" in " ".join(told.warnings())
    np.testing.assert_allclose(told.shares.sum(), 1.0)
    assert told.shares.loc["prior"].iloc[0] == pytest.approx(0.5 / 1.1)


def test_studies_are_shown_in_notebooks(fitted):
    text = fitted[0].study._repr_html_()
    assert "died ~ age" in text and fitted[0].study.digest.hex() in text and "a, b" in text
