"""Sites from tables and formulas: the same study as its contract, in the original units."""

import jax
import numpy as np
import pandas as pd
import polars as pl
import pytest

import fedpdmc as fp
from fedpdmc.errors import InputError
from fedpdmc.study import read_study
from fedpdmc.study.contract import parse_study
from fedpdmc.study.read_data import read_records
from fedpdmc.study.sites_from_table import sites


def table(n=120, seed=0):
    rng = np.random.default_rng(seed)
    grades = pd.Categorical(rng.choice(["mild", "bad", "grave"], n), ["mild", "bad", "grave"], ordered=True)
    frame = pd.DataFrame({
        "centre": rng.choice(["north", "south", "west"], n, p=[0.6, 0.3, 0.1]),
        "age": rng.normal(60, 12, n), "drug": rng.choice(["placebo", "verum"], n), "grade": grades,
        "smoker": rng.integers(0, 2, n), "days": rng.uniform(5, 30, n), "falls": rng.poisson(2, n),
        "died": rng.random(n) < 0.4,
    })  # fmt: skip
    return frame.assign(pressure=100 + 0.5 * frame.age + rng.normal(0, 8, n))


class ArrowOnly:
    """A table that speaks Arrow's C interface and nothing else."""

    def __init__(self, frame):
        self.frame = frame

    def __arrow_c_stream__(self, requested=None):
        return self.frame.__arrow_c_stream__(requested)


def value(site, x):
    with jax.enable_x64(True):
        return float(site.potential.value(jax.numpy.asarray(x)))


def variables(found, x):
    with jax.enable_x64(True):
        return {name: float(one) for name, one in found.study.naming.constrain(jax.numpy.asarray(x)).items()}


def test_the_likelihood_is_that_of_the_original_units():
    frame, rng = table(), np.random.default_rng(1)
    found = sites(frame, by="centre", formula="died ~ drug * age + grade + smoker", family="logistic")
    assert [site.name for site in found] == ["north", "south", "west"]
    assert found.names[:3] == ("Intercept", "drug[T.verum]", "age") and "grade[T.bad]" in found.names
    age, smoker = found.study.columns["age"], found.study.columns["smoker"]
    assert age.center != 0 and (smoker.center, smoker.scale) == (0, 1)
    b = rng.normal(size=len(found.names))
    beta = variables(found, b)
    for site in found:
        own = frame[frame.centre == site.name]
        verum = (own.drug == "verum").to_numpy(float)
        design = {
            "Intercept": 1.0, "drug[T.verum]": verum, "age": own.age, "drug[T.verum]:age": verum * own.age,
            "grade[T.bad]": own.grade == "bad", "grade[T.grave]": own.grade == "grave", "smoker": own.smoker,
        }  # fmt: skip
        eta = sum(np.asarray(design[name], float) * beta[name] for name in found.names)
        expected = np.sum(np.logaddexp(0, eta) - own.died.to_numpy(float) * eta)
        assert value(site, b) == pytest.approx(expected, rel=1e-9)


def test_response_and_sigma_of_a_linear_regression_in_original_units():
    frame, rng = table(), np.random.default_rng(2)
    found = sites(frame, by="centre", formula="pressure ~ age", family="linear")
    response = found.study.columns["pressure"]
    assert response.scale != 1
    b = rng.normal(size=3)
    named = variables(found, b)
    assert list(named) == ["Intercept", "age", "sigma"]
    for site in found:
        own = frame[frame.centre == site.name]
        z = (own.pressure - named["Intercept"] - named["age"] * own.age) / named["sigma"]
        # In units of the standardised response the density has a factor of its scale for every record.
        expected = np.sum(np.log(named["sigma"] / response.scale) + 0.5 * z**2)
        assert value(site, b) == pytest.approx(expected, rel=1e-9)


def test_pandas_polars_arrow_and_tables_by_site_are_the_same_study():
    frame = table()
    formula = {"formula": "falls ~ drug + age", "family": "poisson", "exposure": "days"}
    plain = pl.DataFrame({name: frame[name].to_list() for name in ("centre", "drug", "age", "falls", "days")})
    by_site = {name: frame[frame.centre == name] for name in ("north", "south", "west")}
    studies = [
        sites(frame, by="centre", **formula),
        sites(plain, by="centre", **formula),
        sites(ArrowOnly(plain), by="centre", **formula),
        sites(by_site, **formula),
    ]
    assert len({found.study.digest for found in studies}) == 1
    assert len({value(found[0], [0.1, 0.2, 0.3]) for found in studies}) == 1
    assert studies[0].study.columns["days"].log


def test_an_offset_is_on_the_scale_of_the_linear_predictor_and_an_exposure_is_logged(tmp_path):
    """In tables, contracts and `fp.models.poisson` alike."""
    frame, x = table().assign(log_days=lambda t: np.log(t.days)), np.asarray([0.1, 0.2])
    told = {"by": "centre", "formula": "falls ~ smoker", "family": "poisson"}
    by_exposure, by_offset = sites(frame, **told, exposure="days"), sites(frame, **told, offset="log_days")
    assert by_exposure.prior_lines == by_offset.prior_lines
    again = read_study(by_exposure.write(tmp_path / "study.toml"))
    for one, other, name in zip(by_exposure, by_offset, by_exposure.tables, strict=True):
        own = frame[frame.centre == name]
        eta = x[0] + x[1] * own.smoker + own.log_days
        assert value(one, x) == pytest.approx(np.sum(np.exp(eta) - own.falls * eta), rel=1e-9)
        assert value(other, x) == pytest.approx(value(one, x), rel=1e-9)
        design = np.c_[np.ones(len(own)), own.smoker]
        for plain in ({"offset": own.log_days}, {"exposure": own.days}):
            site = fp.Site(fp.models.poisson(design, own.falls, **plain), name="plain")
            assert value(site, x) == pytest.approx(value(one, x), rel=1e-9)
        own.to_csv(tmp_path / "own.csv")
        records = read_records(again, tmp_path / "own.csv")
        np.testing.assert_allclose(records["days"], own.log_days)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"offset": "days"}, "offset: found values of 'days' from .* give exposure='days'"),
        ({"exposure": "smoker"}, "column 'smoker': found values from 0 to 1. Give values above 0"),
        ({"exposure": "days", "offset": "smoker"}, "an offset or an exposure, not both"),
        ({"exposure": "days", "formula": "falls ~ days"}, "'days' is a term of the formula too"),
    ],
)
def test_offsets_and_exposures_that_are_mistaken(change, words):
    with pytest.raises(InputError, match=words):
        sites(table(), **{"by": "centre", "formula": "falls ~ drug", "family": "poisson"} | change)


def test_a_contract_of_the_former_meaning_is_refused(tmp_path):
    text = sites(table(), by="centre", formula="falls ~ drug", family="poisson", exposure="days").study.text.decode()
    old = text.replace('exposure = "days"', 'offset = "days"').replace("days = { type", "days = { log = true, type")
    with pytest.raises(InputError, match="For a time at risk write exposure = 'days' and remove log = true"):
        parse_study(old.encode())


def test_the_contract_that_is_written_is_the_study_that_was_tried(tmp_path):
    frame = table()
    found = sites(frame, by="centre", formula="died ~ drug + age", family="logistic", prior="normal(0, 1.5)")
    study = read_study(found.write(tmp_path / "study.toml"))
    # But for the columns that are named as taken from the table.
    told = [line for line in study.text.splitlines() if not line.startswith(b"from_table")]
    assert told == found.study.text.splitlines() and study.units == "original"
    frame[frame.centre == "west"].to_csv(tmp_path / "west.csv")
    records = read_records(study, tmp_path / "west.csv")
    assert len(records) == len(found.tables["west"])
    np.testing.assert_allclose(study.matrix(records), found.study.matrix(found.tables["west"]), rtol=1e-12)


def test_a_level_that_one_site_lacks(tmp_path):
    frame = table()
    frame = frame[~((frame.centre == "west") & (frame.grade == "grave"))]
    found = sites(frame, by="centre", formula="died ~ grade", family="logistic")
    assert found.names == ("Intercept", "grade[T.bad]", "grade[T.grave]")
    assert {site.dim for site in found} == {3}


def test_a_run_reports_original_units():
    frame = table(400, 3)
    found = sites(frame, by="centre", formula="pressure ~ age", family="linear")
    post = fp.sample(found, ess=300, seed=1, progress=False)
    fit = np.polynomial.polynomial.polyfit(frame.age, frame.pressure, 1)
    summary = post.summary()
    assert list(summary.index) == ["Intercept", "age", "sigma"]
    for name, expected in zip(("Intercept", "age"), fit, strict=True):
        assert abs(summary.loc[name, "mean"] - expected) < 0.3 * summary.loc[name, "sd"]


@pytest.mark.parametrize(
    ("family", "formula", "options", "last"),
    [
        ("weibull", "days ~ age", {"died": "died"}, "log_shape"),
        ("negative_binomial", "falls ~ drug + age", {}, "log_concentration"),
        ("piecewise_exponential", "days ~ age", {"cuts": [10.0, 20.0]}, "log_hazard[2]"),
        ("ordered_logit", "grade ~ age", {}, None),
        ("multinomial_logit", "grade ~ age", {}, None),
        ("gamma", "days ~ drug", {}, "log_shape"),
    ],
)
def test_families_of_the_standard_library(family, formula, options, last, tmp_path):
    found = sites(table(), by="centre", formula=formula, family=family, **options)
    assert last is None or found.names[-1] == last
    assert read_study(found.write(tmp_path / "study.toml")).names == found.names
    assert np.isfinite(value(found[0].sized(len(found.names)), np.full(len(found.names), 0.01)))
    scale = dict(zip(found.names, found.study.prior_scale, strict=True))
    assert all(np.isfinite(x) for x in scale.values())


@pytest.mark.parametrize("family", ["ordered_logit", "ordered_probit"])
def test_an_ordered_response_has_a_declared_order(family):
    frame, order = table(), ["mild", "bad", "grave"]
    text = frame.assign(grade=frame.grade.astype(str))
    told = {"by": "centre", "formula": "grade ~ age", "family": family}
    unordered = frame.assign(grade=pd.Categorical(text.grade))
    plain = pl.DataFrame({name: text[name].to_list() for name in ("centre", "age", "grade")})
    for refused in (text, plain, unordered):
        with pytest.raises(InputError, match=r"column 'grade': found text without an order \('bad', 'grave', 'mild'\)"):
            sites(refused, **told)
    whole = plain.with_columns(pl.col("grade").cast(pl.Enum(order)))
    numbers = text.assign(grade=text.grade.map({name: i + 9 for i, name in enumerate(order)}))
    declared = sites(text, **told, columns={"grade": {"levels": order}})
    for found in (sites(frame, **told), declared, sites(whole, **told)):
        assert found.study.columns["grade"].levels == tuple(order)
        assert "the levels of grade in their order: mild < bad < grave" in repr(found)
    assert "9 < 10 < 11" in repr(sites(numbers, **told))


@pytest.mark.parametrize("formula", ["died ~ 0 + age", "died ~ drug:age"])
def test_centring_that_cannot_be_undone_is_not_done(formula):
    found = sites(table(), by="centre", formula=formula, family="logistic")
    assert found.study.columns["age"].center == 0


def test_default_prior_explains_half_whatever_the_number_of_terms():
    """Var(η) of the standardised columns under the prior is about π²/3."""
    few = sites(table(), by="centre", formula="died ~ age", family="logistic")
    many = sites(table(), by="centre", formula="died ~ age + days + pressure + falls", family="logistic")
    for found in (few, many):
        scale = np.asarray(found.study.prior_scale)[1:]
        assert np.sum(scale**2) == pytest.approx(np.pi**2 / 3, rel=0.01)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"formula": "died ~ weight"}, "no column 'weight'"),
        ({"formula": "died ~ exp(age)"}, "nothing else is evaluated"),
        ({"formula": "age ~ drug"}, "column 'age': found numbers that are not whole"),
        ({"family": "Weibul"}, "family: found 'weibul'. Did you mean 'weibull'?"),
        ({"family": "binomal"}, "family: found 'binomal'. Did you mean 'binomial'? Give one of 'linear'"),
        ({"priors": {"age": "normal(0, 1)"}}, "priors: found an unknown argument. Did you mean 'prior'?"),
        ({"df": 3.0}, "df: found an unknown argument. The family 'logistic' takes trials."),
        ({"formula": "days ~ age", "family": "weibull", "dead": "died"}, "dead: .* Did you mean 'died'?"),
        ({"formula": "days ~ age", "family": "piecewise_exponential"}, "cuts: found no value. The family"),
        ({"formula": "age ~ drug", "family": "student_t", "df": 3.0}, "scale: found no value. The family 'student_t'"),
        (
            {"formula": "falls ~ age", "family": "negative_binomial", "exposure": "days"},
            "exposure: .* It is for 'poisson'",
        ),
        ({"prior": "cauchy(0, 1)"}, "prior of 'Intercept'"),
        ({"prior": {"weight": "normal(0, 1)"}}, "a prior of 'weight'"),
        ({"formula": "falls ~ age", "family": "binomial"}, "a level of two, or a count of events if trials are given"),
        ({"by": None}, "by: found None"),
        ({"by": "hospital"}, "no column 'hospital'"),
        ({"columns": {"age": {"unit": "years"}}}, "the key 'unit'"),
        ({"columns": {"height": {}}}, "columns: found 'height'"),
        ({"columns": {"age": {"bounds": [40, 60]}}}, "a value out of bounds"),
    ],
)
def test_errors_name_what_is_wrong(change, words):
    told = {"by": "centre", "formula": "died ~ drug + age", "family": "logistic"} | change
    with pytest.raises(InputError, match=words.replace("(", r"\(").replace("?", "[?]")):
        sites(table(), **told)


def test_times_need_to_say_which_are_of_events():
    words = table().assign(died=lambda t: t.died.astype(str).map(lambda x: {"1": "ill", "True": "ill"}.get(x, "well")))
    made = sites(words, by="centre", formula="Surv(days, died) ~ age", family="weibull")
    assert "times with died = 'well' are of events" in repr(made)
    told = sites(
        words,
        by="centre",
        formula="Surv(days, died) ~ age",
        family="weibull",
        columns={"died": {"levels": ["well", "ill"]}},
    )
    assert "times with died = 'ill' are of events" in repr(told)
    with pytest.raises(InputError, match="died: found no value. .* or True if every time is that of an event"):
        sites(table().drop(columns="died"), by="centre", formula="days ~ age", family="weibull")


@pytest.mark.parametrize(
    ("alias", "family", "response"),
    [
        ("binomial", "logistic", "died"),
        ("Bernoulli", "logistic", "died"),
        ("gaussian", "linear", "pressure"),
        ("Normal", "linear", "pressure"),
        ("Poisson", "poisson", "falls"),
        ("negativebinomial", "negative_binomial", "falls"),
    ],
)
def test_families_have_their_other_names(alias, family, response):
    assert sites(table(), by="centre", formula=f"{response} ~ age", family=alias).study.family == family


@pytest.mark.parametrize("family", ["logistic", "ordered_logit"])
def test_constant_and_collinear_columns_are_named(family):
    frame = table().assign(one=1.0, twice=lambda t: 2 * t.age + 3)
    told = {"by": "centre", "family": family}
    response = "died" if family == "logistic" else "grade"
    with pytest.warns(UserWarning, match="formula: one, twice is constant, or a combination of the terms before it"):
        sites(frame, **told, formula=f"{response} ~ age + one + smoker + twice")
    # Unlike scales are no dependence.
    sites(frame.assign(days=1e6 * frame.days), **told, formula=f"{response} ~ age * drug + days", standardize=False)


def test_names_with_dots_spaces_signs_and_accents(tmp_path):
    frame = table(300).rename(columns={"age": "âge", "smoker": "ph.ecog", "grade": "grade (WHO)", "drug": "drug given"})
    formula = "died ~ `drug given` * âge + ph.ecog + `grade (WHO)`"
    found = sites(frame, by="centre", formula=formula, family="logistic", prior={"ph.ecog": "student_t(3, 0, 1)"})
    assert found.names[:4] == ("Intercept", "drug given[T.verum]", "âge", "ph.ecog")
    assert "drug given[T.verum]:âge" in found.names
    plain = sites(table(300), by="centre", formula="died ~ drug * age + smoker + grade", family="logistic")
    x = np.random.default_rng(0).normal(size=len(found.names))
    assert value(found[0], x) == value(plain[0], x)
    study = read_study(found.write(tmp_path / "study.toml"))
    frame[frame.centre == "west"].to_csv(tmp_path / "west.csv")
    np.testing.assert_array_equal(study.matrix(read_records(study, tmp_path / "west.csv")),
                                  found.study.matrix(found.tables["west"]))  # fmt: skip
    mixed = sites(frame.rename(columns={"days": "ward no"}).assign(**{"ward no": frame.centre}), by="centre",
                  formula="died ~ ph.ecog + (1 + âge | `ward no`)", family="logistic")  # fmt: skip
    assert mixed.study.effects.formula.groups == "ward no" and mixed.study.effects.formula.slope == "âge"
    post = fp.sample(found, ess=50, seed=1, progress=False)
    assert len(fp.assessment.predict(post, found, frame.head(3))) == 3
    for name in ("a:b", "a`b", "1st", "x" * 65, "a[b]", " a"):
        with pytest.raises(InputError, match="letters of one script"):
            parse_study(found.study.text.replace(b"ph.ecog", name.encode()))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"formula": "died ~ drug +"}, "^formula: found 'died ~ drug [+]'. Give a formula such as"),
        ({"formula": "died ~ sqrt(age)"}, "^formula: found .sqrt.age... Write I.* nothing else is evaluated"),
        (
            {"formula": "falls ~ age"},
            "^column 'falls': found [0-9]+ levels. The response of logistic is a level of two",
        ),
        ({"columns": {"age": {"bounds": [90, 10]}}}, r"^columns\['age'\]: bounds: found \[90, 10\]"),
        ({"columns": {"drug": {"levels": ["placebo", "other"]}}}, "The declared levels are 'placebo', 'other'"),
    ],
)
def test_errors_are_in_words_of_the_table(change, words):
    with pytest.raises(InputError, match=words) as error:
        sites(table(), **{"by": "centre", "formula": "died ~ drug + age", "family": "logistic"} | change)
    assert "study.toml" not in str(error.value) and "contract" not in str(error.value)


def test_missing_values_are_refused_by_record_or_dropped():
    frame = table()
    frame.loc[[3, 5], "age"] = np.nan
    told = {"by": "centre", "formula": "died ~ drug + age", "family": "logistic"}
    with pytest.raises(InputError, match="a missing value. Remove or impute the record, or leave .* missing='drop'"):
        sites(frame, **told)
    assert sum(map(len, sites(frame, **told, missing="drop").tables.values())) == len(frame) - 2


def test_priors_with_scales_are_the_contracts_own(tmp_path):
    said = {"age": "student_t(3, 0.5, 1)", "drug[T.verum]": "horseshoe(0.1, 2)", "falls": "horseshoe(0.1, 2)"}
    found = sites(table(), by="centre", formula="died ~ age + drug + falls", family="logistic", prior=said)
    study = read_study(found.write(tmp_path / "study.toml"))
    assert study.prior_df == {"age": 3} and set(study.prior_horseshoe) == {"drug[T.verum]", "falls"}
    assert study.prior_global_scale == 0.1
    x = np.random.default_rng(0).normal(size=(5, 4))
    np.testing.assert_array_equal(found.prior.minus_log_density(x), study.prior().minus_log_density(x))
    index = study.names.index("age")
    other = x.copy()
    other[:, index] = 0.5
    gap = found.prior.minus_log_density(x) - found.prior.minus_log_density(other)
    np.testing.assert_allclose(gap, 2 * np.log1p((x[:, index] - 0.5) ** 2 / 3))


def test_a_horseshoe_of_all_leaves_the_intercept(tmp_path):
    found = sites(table(), by="centre", formula="died ~ age + drug", family="logistic", prior="horseshoe(0.1)")
    assert set(found.study.prior_horseshoe) == {"age", "drug[T.verum]"}
    with pytest.raises(InputError, match="different global scales"):
        said = {"age": "horseshoe(0.1)", "drug[T.verum]": "horseshoe(0.2)"}
        sites(table(), by="centre", formula="died ~ age + drug", family="logistic", prior=said)


def test_a_prior_that_is_flat_in_part_is_not_written(tmp_path):
    found = sites(table(), by="centre", formula="died ~ age", family="logistic", prior={"age": "flat"})
    with jax.enable_x64(True):
        assert np.asarray(found.prior.precision)[1, 1] == 0 < np.asarray(found.prior.precision)[0, 0]
    with pytest.raises(InputError, match="flat for some parameters only"):
        found.write(tmp_path / "study.toml")


def weighed(n=120):
    frame = table(n)
    rng = np.random.default_rng(2)
    frame["times"], frame["trials"] = rng.integers(0, 4, n), rng.integers(1, 9, n)
    frame["healed"] = rng.binomial(frame.trials, 0.4)
    return frame


WEIGHED = {
    "logistic": {"formula": "died ~ age + drug"},
    "binomial": {"formula": "healed ~ age + drug", "trials": "trials"},
    "poisson": {"formula": "falls ~ age + drug", "exposure": "days"},
    "linear": {"formula": "pressure ~ age + drug"},
    "weibull": {"formula": "days ~ age + drug", "died": "died"},
    "ordered_logit": {"formula": "grade ~ age + drug"},
}


@pytest.mark.parametrize(
    ("family", "effects"),
    [(name, "") for name in WEIGHED]
    + [("binomial", " + (1 | centre)")]
    + [pytest.param(name, " + (1 | centre)", marks=pytest.mark.long) for name in WEIGHED if name != "binomial"],
)
def test_weights_are_numbers_of_equal_records(family, effects):
    told = {"by": "centre", "family": family, "prior": "normal(0, 2)", "weights": "times"} | WEIGHED[family]
    told |= {"formula": told["formula"] + effects}
    frame, bounds = weighed(), {"age": {"center": 60, "scale": 10, "bounds": [10, 120]}}
    repeated = frame.loc[frame.index.repeat(frame.times)].assign(times=1)
    if family == "linear":
        bounds["pressure"] = {"center": 130, "scale": 10, "bounds": [50, 250]}
    one, other = (sites(data, columns=bounds, **told) for data in (frame, repeated))
    assert "each record counts with its weight times" in repr(one)
    assert one.study.used >= {"times"} and one.study.largest_weight >= 3 * (8 if family == "binomial" else 1)
    with jax.enable_x64(True):
        x = np.linspace(-0.3, 0.4, len(one.names))
        for site in one.tables:
            found, expected = value(one[site], x), value(other[site], x)
            # Losses of events among trials and of 0 and 1 are the same: only constants could differ.
            np.testing.assert_allclose(found, expected, rtol=1e-12)
    written = parse_study(one.study.text)
    assert (written.weights, written.model.trials) == ("times", "trials" if family == "binomial" else None)


@pytest.mark.parametrize(
    ("change", "at", "words"),
    [
        ({}, ("times", -1.0), "column 'times': found the value -1. Weights are at least zero"),
        ({}, ("times", np.inf), "column 'times': found a value that is not finite"),
        ({}, ("times", np.nan), "record [0-9]+, column 'times': found a missing value"),
        ({}, ("trials", 1.5), "column 'trials': found a number that is not whole"),
        ({}, ("healed", 30), "column 'healed': found 30 events in [0-9] trials. At most 'trials' happen"),
        ({"weights": "kg"}, None, "no column 'kg'"),
        ({"family": "poisson"}, None, "trials: found an unknown argument. The family 'poisson'"),
        ({"trials": "trails"}, None, "no column 'trails'"),
    ],
)
def test_weights_and_trials_that_are_none_are_refused(change, at, words):
    frame = weighed().astype({"times": float, "trials": float, "healed": float})
    if at is not None:
        frame.loc[7, at[0]] = at[1]
    told = {"by": "centre", "family": "logistic", "formula": "healed ~ age", "weights": "times", "trials": "trials"}
    with pytest.raises(InputError, match=words):
        sites(frame, **told | change)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('weights = "times"', 'weights = "age"', "weights: found 'age'. Name a declared column: a number or a count"),
        ('trials = "trials"', 'trials = "times"', "trials: found 'times'. Name a declared column: a count"),
        ("bounds = [0.0, 3.8]", "bounds = [-1.0, 3.8]", "weights: found 'times'. Name a declared column"),
        ('"logistic"', '"poisson"', "trials: found 'trials'. Numbers of trials belong to the family 'logistic'"),
        ('trials = "trials"', "", "columns: healed: found count. The response of logistic is a level of two"),
    ],
)
def test_contracts_with_other_weights_and_trials_are_refused(old, new, words):
    frame = weighed()
    told = {"family": "logistic", "formula": "healed ~ age", "weights": "times", "trials": "trials", "by": "centre"}
    text = sites(frame, **told).study.text.decode()
    assert old in text
    with pytest.raises(InputError, match=words):
        parse_study(text.replace(old, new).encode())


def test_a_column_that_is_constant_at_one_site_only_is_no_matter(recwarn):
    frame = table()
    frame["smoker"] = np.where(frame.centre == "north", 1, frame.smoker)
    frame["twice"] = np.where(frame.centre == "north", frame.age, frame.age + frame.falls)
    sites(frame, by="centre", formula="died ~ smoker + age + twice", family="logistic")
    assert not [warning for warning in recwarn if "combination" in str(warning.message)]


DAYS = pd.Timestamp("2024-02-01") + pd.to_timedelta(np.arange(120) % 5, unit="D")


@pytest.mark.parametrize(
    ("columns", "change", "words"),
    [
        ({"age": DAYS}, {}, r"^column 'age': found a date or a time \(2024-02-0.*Give a number, such as days since"),
        ({"age": DAYS.date}, {}, "^column 'age': found a date or a time"),
        ({"age": DAYS - DAYS[0]}, {}, "^column 'age': found a date or a time"),
        ({"age": DAYS.to_period("D")}, {}, "^column 'age': found a date or a time"),
        ({"age": np.r_[np.inf, 1:120]}, {}, "^column 'age': found a value that is not finite .inf; 1 of 120"),
        ({"died": "no"}, {}, "^column 'died': found only the level 'no'. .* declare all levels: columns="),
        ({"drug": "verum"}, {}, "^column 'drug': found only the level 'verum'. Leave it out of the formula, or"),
        ({"age": 3.5}, {"family": "linear", "formula": "age ~ drug"}, "^column 'age': found only the value 3.5"),
        ({"w": 0.0}, {"weights": "w"}, "^column 'w': found only weights of zero"),
        ({"s": 2}, {"formula": "Surv(days, s) ~ age", "family": "weibull"}, "^column 's': .* Give died=True if every"),
        (
            {"s": np.arange(120) % 3},
            {"formula": "Surv(days, s) ~ age", "family": "weibull"},
            "^column 's': found 3 levels",
        ),
        ({}, {"formula": "Surv(days, died) ~ age"}, "^died: .* survival times, which are for 'weibull', 'log_normal'"),
        ({}, {"formula": "Surv(age, days, died) ~ drug", "family": "weibull"}, "^formula: found 'Surv.age, days, died"),
        ({}, {"formula": "falls | trials(days) ~ age"}, "^formula: found 'falls .* are arguments: trials='n'"),
        ({}, {"formula": "cbind(falls, days) ~ age"}, "^formula: .* Write the column of events, and trials='n'"),
        ({}, {"formula": "died ~ age + strata(drug)"}, "^formula: .* Write the column itself"),
        ({}, {"formula": "died ~ age**2"}, r"^formula: found 'age\*\*2'. As a term it would be the column itself"),
        ({}, {"formula": "died ~ drug + age^2"}, r"^formula: found 'age\^2'. .* write I.x \*\* 2."),
        ({}, {"formula": "died ~ age * age"}, r"^formula: found 'age \* age'"),
        ({}, {"formula": ["died", "age"]}, "^formula: found list. Give a text"),
        ({}, {"weights": np.ones(120)}, "^weights: found ndarray. Give the name of a column"),
        ({}, {"by": ["centre", "drug"]}, "^by: found list. Give the name of a column"),
        ({}, {"trials": np.ones(120), "formula": "falls ~ age"}, "^trials: found ndarray. Give the name of a column"),
        ({}, {"prior": 2.5}, "^prior: found 2.5. Give 'normal.mean, sd.'.* Or a dict of them"),
    ],
)
def test_what_a_first_day_brings_is_refused_in_its_own_words(columns, change, words):
    told = {"by": "centre", "formula": "died ~ drug + age", "family": "logistic"} | change
    with pytest.raises(InputError, match=words):
        sites(table().assign(**columns), **told)


def test_a_product_of_two_columns_is_no_power():
    frame = (
        table()
        .rename(columns={"age": "age (years)", "days": "days of stay"})
        .assign(x=1.0 * np.arange(120), x2=np.arange(120) % 7)
    )
    told = {"by": "centre", "family": "logistic", "standardize": False}
    found = sites(frame, formula="died ~ 0 + `age (years)` : `days of stay` + x:x2 + (x + smoker)**2", **told)
    assert {"age (years):days of stay", "x:x2", "x:smoker"} <= set(found.names)
    with pytest.raises(InputError, match="^formula: found 'died ~ `age .years.`.*2'. As a term it would be the column"):
        sites(frame, formula="died ~ `age (years)`**2", **told)


def test_tables_that_are_no_tables_of_records():
    told, frame = {"formula": "died ~ drug + age", "family": "logistic"}, table()
    for one, words in (
        (frame[:0], "^table: found no records"),
        (pd.concat([frame, frame[["age"]]], axis=1), "^table: found two columns 'age'. Give every column its own name"),
    ):
        with pytest.raises(InputError, match=words):
            sites(one, by="centre", **told)
    with pytest.raises(
        InputError, match="^column 'age': found numbers at site 'a', text at site 'b'. Give it the same"
    ):
        sites({"a": frame, "b": frame.assign(age="old")}, **told)
    with pytest.raises(InputError, match="no column '5'. Names are texts: give the columns such names"):
        sites(frame.rename(columns={"age": 5}), by="centre", formula="died ~ `5`", family="logistic")


def test_nullable_columns_and_categories_of_booleans():
    told, frame = {"by": "centre", "formula": "died ~ drug + falls", "family": "logistic"}, table()
    nullable = frame.assign(falls=frame.falls.astype("Int64"), died=frame.died.astype("boolean"))
    nullable.loc[4, "falls"] = pd.NA
    with pytest.raises(InputError, match="column 'falls': found a missing value"):
        sites(nullable, **told)
    found, plain = sites(nullable, missing="drop", **told), sites(frame.drop(index=4), **told)
    assert sum(len(one) for one in found.tables.values()) == 119
    assert value(found["north"], np.ones(3)) == value(plain["north"], np.ones(3))
    categories = sites(frame.assign(died=pd.Categorical(frame.died)), **told)
    assert "the probability of died = 'true' is modelled" in categories.lines()


@pytest.mark.filterwarnings("error:Constructing a Categorical")
def test_texts_that_are_nearly_alike_are_named():
    told, frame = {"by": "centre", "formula": "died ~ drug", "family": "logistic"}, table()
    with pytest.warns(
        UserWarning, match="column 'drug': the levels 'Verum', 'verum', 'verum ' differ only in capitals"
    ):
        sites(frame.assign(drug=frame.drug.replace("verum", "Verum").where(frame.index > 9, "verum "))[1:].assign(
            drug=lambda t: t.drug.where(t.index < 110, "verum")), **told)  # fmt: skip
    with pytest.warns(UserWarning, match="the sites 'North', 'north' differ only in capitals or spaces"):
        sites(frame.assign(centre=frame.centre.where(frame.index > 60, "North")), **told)
    with pytest.raises(InputError, match="an unknown level .'verum'.. The declared levels are 'placebo', 'other'"):
        sites(frame, columns={"drug": {"levels": ["placebo", "other"]}}, **told)


def test_the_sum_of_the_weights_is_shown():
    told = {"by": "centre", "formula": "died ~ age", "family": "logistic", "weights": "w"}
    assert "; their weights add up to 600,000" in sites(table().assign(w=5000.0), **told).lines()[1]
