"""Bad input is refused before anything runs, with the argument, the value found and the remedy."""

import numpy as np
import pandas as pd
import pytest
from tests.support import SHORT, hospitals, logistic_site, prior

import fedpdmc as fp
from fedpdmc import models
from fedpdmc.errors import InputError
from fedpdmc.sampling.engines.compiled_loop import CompiledEngine

NAN = float("nan")
X, LABELS = np.arange(8.0).reshape(4, 2), [0, 1, 1, 0]
MISSING = np.where(X == 3, NAN, X)

MODELS = [
    # call, argument, found
    (lambda: models.logistic(MISSING, LABELS), r"logistic\(X\)", r"nan at index \(1, 1\)"),
    (lambda: models.logistic(np.where(X == 0, -np.inf, X), LABELS), r"logistic\(X\)", r"-inf at index \(0, 0\)"),
    (lambda: models.logistic(X.ravel(), LABELS), r"logistic\(X\)", r"shape \(8,\)"),
    (lambda: models.logistic([[1, 2], [1]], [0, 1]), r"logistic\(X\)", "not numeric"),
    (lambda: models.logistic(X[:, :0], LABELS), r"logistic\(X\)", r"shape \(4, 0\)"),
    (lambda: models.logistic(X, [0, 1, 2, 0]), r"logistic\(y\)", "2.0 at index 2"),
    (lambda: models.logistic(X, [0, 1, 0.5, 0]), r"logistic\(y\)", "0.5 at index 2"),
    (lambda: models.logistic(X, [0, 1, NAN, 0]), r"logistic\(y\)", "nan at index"),
    (lambda: models.logistic(X, ["yes", "no", "no", "no"]), r"logistic\(y\)", "not numeric"),
    (lambda: models.logistic(X, LABELS[:3]), r"logistic\(y\)", "3 responses for 4 rows"),
    (lambda: models.logistic(X, np.reshape(LABELS, (4, 1))), r"logistic\(y\)", r"shape \(4, 1\)"),
    (lambda: models.poisson(X, [1, -1, 0, 0]), r"poisson\(y\)", "-1.0 at index"),
    (lambda: models.poisson(X, [1, 1.5, 0, 0]), r"poisson\(y\)", "1.5 at index"),
    (lambda: models.poisson(X, LABELS, offset=[1.0, 2.0]), r"poisson\(offset\)", r"shape \(2,\)"),
    (lambda: models.poisson(X, LABELS, offset=[1, 2, NAN, 4]), r"poisson\(offset\)", "nan at index"),
    (lambda: models.student_t(X, LABELS, df=0), r"student_t\(df\)", "0"),
    (lambda: models.student_t(X, LABELS, df=3, scale=-1), r"student_t\(scale\)", "-1"),
    (lambda: models.linear(X, LABELS, scale=NAN), r"linear\(scale\)", "nan"),
    (lambda: models.linear(X, LABELS, scale="wide"), r"linear\(scale\)", "'wide'"),
    (lambda: models.gaussian_mean([1.0, 2.0]), r"gaussian_mean\(y\)", r"shape \(2,\)"),
    (lambda: models.gaussian_mean(X, scale=[1.0, 0.0]), r"gaussian_mean\(scale\)", r"\[1.0, 0.0\]"),
    (lambda: models.gaussian_mean(X, scale=[1.0] * 3), r"gaussian_mean\(scale\)", r"shape \(3,\)"),
    (lambda: models.ar1_student_t([1.0, 2.0], 3), r"ar1_student_t\(series\)", r"shape \(2,\)"),
    (lambda: models.ar1_student_t([[1.0], [2.0]], 3), r"ar1_student_t\(series\)", r"shape \(2, 1\)"),
    (lambda: models.log_gaussian_cox([1, -2]), r"log_gaussian_cox\(counts\)", "-2.0 at index"),
    (lambda: models.log_gaussian_cox([0.5]), r"log_gaussian_cox\(counts\)", "0.5 at index"),
    (lambda: models.log_gaussian_cox([]), r"log_gaussian_cox\(counts\)", "no cells"),
    (lambda: models.normal_prior(0), r"normal_prior\(dim\)", "0"),
    (lambda: models.normal_prior(2.0), r"normal_prior\(dim\)", "2.0"),
    (lambda: models.normal_prior(2, mean=[1, 2, 3]), r"normal_prior\(mean\)", r"shape \(3,\)"),
    (lambda: models.normal_prior(2, scale=0), r"normal_prior\(scale\)", "0"),
    (lambda: models.normal_prior(2, scale=[1, 2, 3]), r"normal_prior\(scale\)", r"shape \(3,\)"),
    (lambda: models.normal_prior(2, cov=np.ones((2, 2))), r"normal_prior\(cov\)", "eigenvalue"),
    (lambda: models.normal_prior(2, precision=[[1, 2], [0, 1]]), r"normal_prior\(precision\)", "not symmetric"),
    (lambda: models.normal_prior(2, cov=np.eye(3)), r"normal_prior\(cov\)", r"shape \(3, 3\)"),
    (lambda: models.normal_prior(2, cov=np.eye(2), precision=np.eye(2)), r"normal_prior\(cov, precision\)", "both"),
    (lambda: fp.Redistributed(prior(), rate=0), r"Redistributed\(rate\)", "0"),
    (lambda: fp.Redistributed(prior(), rate="often"), r"Redistributed\(rate\)", "'often'"),
    (lambda: fp.Redistributed(models.logistic(X, LABELS)), r"Redistributed\(prior\)", "LinearPredictor"),
    (lambda: models.grid_prior(4, 0.1, 1.0), r"grid_prior\(shape\)", "4"),
    (lambda: models.grid_prior((0, 2), 0.1, 1.0), r"grid_prior\(shape\)", r"\(0, 2\)"),
    (lambda: models.grid_prior((4, 4), 0.9, 1.0), r"grid_prior\(alpha\)", "0.9"),
    (lambda: models.grid_prior((2, 2), 0.1, -1.0), r"grid_prior\(beta\)", "-1"),
    (lambda: fp.Site(models.logistic(X, LABELS), name=""), r"Site\(name\)", "''"),
    (lambda: fp.Site(models.logistic(X, LABELS), name=3), r"Site\(name\)", "3"),
    (lambda: fp.Site(X, name="a"), r"Site\(potential\)", "ndarray"),
    (lambda: fp.Site(models.logistic(X, LABELS), name="a", data=X), r"Site\(data\)", "ndarray"),
    (lambda: fp.Site(models.logistic(X, LABELS), name="a", budget=1.0), r"Site\(budget\)", "1.0"),
    (lambda: fp.Site(models.logistic(X, LABELS), name="a", coordinates=[0]), r"Site\(coordinates\)", r"\[0\]"),
    (lambda: fp.Site(models.logistic(X, LABELS), name="a", coordinates=[1, 1]), r"Site\(coordinates\)", r"\[1, 1\]"),
    (lambda: fp.Site(models.logistic(X, LABELS), name="a", coordinates=[0, -1]), r"Site\(coordinates\)", "-1"),
    (lambda: fp.Site(models.logistic(X, LABELS), name="a", coordinates=[0, 1.5]), r"Site\(coordinates\)", "1.5"),
]

# What sample() is given, the argument it must name, and what it must say it found.
ARGUMENTS = [
    ({"sites": []}, "sites", "no sites"),
    ({"sites": None}, "sites", "NoneType"),
    ({"sites": [1]}, "sites", "a int"),
    ({"sites": [logistic_site("a"), logistic_site("a")]}, "sites", "several sites named 'a'"),
    (
        {"sites": [logistic_site("a"), fp.Site(models.log_gaussian_cox([1, 2, 3]), name="b")]},
        "sites .*'b'",
        "3 parameters",
    ),
    ({"sites": [logistic_site("a", coordinates=[0, 5])]}, "sites .*'a'", "5"),
    ({"sites": [logistic_site("a", coordinates=[0, 2])], "prior": None}, "prior", "coordinate 1"),
    ({"prior": models.normal_prior(3)}, "sites .*'north'", "2 parameters where the federation has 3"),
    ({"prior": "flat"}, "prior", "'flat'"),
    ({"prior": models.logistic(X, LABELS)}, "prior", "LinearPredictor"),
    ({"prior_at": "nowhere"}, "prior_at", "'nowhere'"),
    ({"prior_at": "extra", "prior": fp.Redistributed(prior())}, "prior_at", "'extra' with a Redistributed"),
    ({"prior": fp.Redistributed(prior()), "sites": [logistic_site("a", coordinates=[0, 1])]}, "prior", "some coord"),
    ({"prior_at": "sites", "sites": [logistic_site("a", coordinates=[0, 1])]}, "prior_at", "'sites'"),
    ({"dynamics": "zigzag"}, "dynamics", "'zigzag'"),
    ({"dynamics": fp.ZigZag}, "dynamics", "ZigZag"),
    ({"reference": "nuts"}, "reference", "'nuts'"),
    ({"reference": np.eye(2)}, "reference", "ndarray"),
    ({"reference": fp.Reference(np.zeros(2), np.ones((2, 2)))}, "reference", "singular"),
    ({"reference": fp.Reference(np.zeros(2), np.array([1.0, 0.0]))}, "reference", "singular"),
    ({"reference": fp.Reference(np.zeros(3), np.eye(3))}, "reference", r"shape \(3,\)"),
    ({"reference": fp.Reference(np.array([0.0, NAN]), np.eye(2))}, "reference", "not finite"),
    ({"reference": fp.Reference("here", np.eye(2))}, "reference", r"center of shape \(\)"),
    ({"control": "cubic"}, "control", "'cubic'"),
    ({"bounds": "grid"}, "bounds", "'grid'"),
    ({"keep": "nothing"}, "keep", "'nothing'"),
    ({"chains": 0}, "chains", "0"),
    ({"chains": -2}, "chains", "-2"),
    ({"chains": 2.5}, "chains", "2.5"),
    ({"chains": True}, "chains", "True"),
    ({"duration": 0}, "duration", "0"),
    ({"duration": -1.0}, "duration", "-1.0"),
    ({"duration": NAN}, "duration", "nan"),
    ({"duration": np.inf}, "duration", "inf"),
    ({"duration": None, "ess": -5}, "ess", "-5"),
    ({"duration": 1.0, "ess": 100}, "duration, ess", "both"),
    ({"init": [1.0]}, "init", r"shape \(1,\)"),
    ({"init": np.zeros((3, 2))}, "init", r"shape \(3, 2\)"),
    ({"init": [0.0, NAN]}, "init", "not finite"),
    ({"seed": -1}, "seed", "-1"),
    ({"seed": 1.5}, "seed", "1.5"),
    ({"seed": "today"}, "seed", "'today'"),
    ({"names": ["a"]}, "names", "1 names"),
    ({"names": ["a", "a"]}, "names", r"\['a', 'a'\]"),
    ({"names": ["a", "energy"]}, "names", "energy"),
]

# Refused, but only after the sites were asked for derivatives.
LATE = [
    ({"prior_at": "extra", "sites": [logistic_site("prior")]}, "sites", "a site named 'prior'"),
    ({"burn_in": -1.0}, "burn_in", "-1.0"),
    ({"burn_in": NAN}, "burn_in", "nan"),
]

# Refused, but with an error that does not say which argument was wrong.
NOT_SAID = [
    ({"duration": "long"}, "duration"),
    ({"duration": [1.0]}, "duration"),
    ({"duration": None, "ess": "many"}, "ess"),
    ({"burn_in": "short"}, "burn_in"),
    ({"init": "origin"}, "init"),
    ({"names": 5}, "names"),
    ({"seed": 2**64}, "seed"),
    ({"keep": np.array([1, 2])}, "keep"),
    ({"prior": models.linear(np.ones((3, 2)), [1.0, 2.0, 3.0])}, "prior"),
]
NOT_SAID_MODELS = [
    (lambda: models.gaussian_mean(np.zeros((3, 0))), r"gaussian_mean\(y\)"),
    (lambda: models.grid_prior((2.5, 2), 0.1, 1.0), r"grid_prior\(shape\)"),
    (lambda: models.grid_prior((2, 2), NAN, 1.0), r"grid_prior\(alpha\)"),
    (lambda: models.grid_prior((2, 2), "small", 1.0), r"grid_prior\(alpha\)"),
    (lambda: fp.Site(models.logistic(X, LABELS), name="a", seed="today"), r"Site\(seed\)"),
    (lambda: fp.laplace([]), "sites"),
    (lambda: fp.laplace([logistic_site("a"), logistic_site("a")]), "sites"),
    (lambda: fp.laplace([logistic_site("a"), fp.Site(models.log_gaussian_cox([1]), name="b")]), "sites"),
    (lambda: fp.laplace(hospitals(), "flat"), "prior"),
]


def assert_refused(call, argument, found):
    with pytest.raises(InputError, match=f"^{argument}.*: found .*({found})") as caught:
        call()
    assert len(caught.value.remedy) > 10 and caught.value.remedy.endswith(".")


@pytest.fixture
def nothing_runs(monkeypatch):
    def refuse(*_):
        raise AssertionError("something ran")

    monkeypatch.setattr(CompiledEngine, "advance", refuse)
    monkeypatch.setattr(fp.Site, "derivatives", refuse)


def sample(given):
    options = {"sites": hospitals(), "prior": prior(), "duration": 1.0, **SHORT} | given
    return fp.sample(options.pop("sites"), options.pop("prior"), **options)


@pytest.mark.parametrize("call, argument, found", MODELS)
def test_models_and_sites(call, argument, found):
    assert_refused(call, argument, found)


@pytest.mark.parametrize("given, argument, found", ARGUMENTS, ids=lambda x: str(x)[:40] if isinstance(x, dict) else "")
def test_arguments_of_sample(given, argument, found, nothing_runs):
    assert_refused(lambda: sample(given), argument, found)


@pytest.mark.parametrize("given, argument, found", LATE, ids=lambda x: str(x)[:40] if isinstance(x, dict) else "")
def test_arguments_of_sample_that_are_looked_at_late(given, argument, found, nothing_runs):
    assert_refused(lambda: sample(given), argument, found)


@pytest.mark.parametrize("given, argument", NOT_SAID, ids=lambda x: str(x)[:40] if isinstance(x, dict) else "")
def test_arguments_of_the_wrong_type(given, argument, nothing_runs):
    assert_refused(lambda: sample(given), argument, "")


@pytest.mark.parametrize("call, argument", NOT_SAID_MODELS)
def test_models_and_references_of_the_wrong_type(call, argument):
    assert_refused(call, argument, "")


def test_a_table_and_words_in_place_of_sites_and_prior():
    with pytest.raises(InputError, match="^sites: found DataFrame. Make sites of a table: fedpdmc.sites"):
        fp.sample(pd.DataFrame({"x": [1.0]}))
    site = fp.Site(fp.models.gaussian_mean(np.ones((3, 1))), name="a")
    with pytest.raises(
        InputError, match="^prior: found 'normal.0, 1.'. .* A prior in words is an argument of fedpdmc.sites"
    ):
        fp.sample(site, "normal(0, 1)")
