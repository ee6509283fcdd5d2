"""Contracts with effects of groups: what they mean, and what does not go together with them."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
import scipy.special
import scipy.stats
from tests.study.contracts import EFFECTS, model_file, with_model_file

import fedpdmc as fp
from fedpdmc._jax.precision import double_precision
from fedpdmc.errors import InputError
from fedpdmc.potentials import RandomEffects
from fedpdmc.study import parse_study
from fedpdmc.study.contract import read_study
from fedpdmc.study.description import effect_scale, modelled
from fedpdmc.study.formula import SITE, MixedFormula, parse_mixed

RECORDS = pd.DataFrame({
    "ill": pd.Categorical(["no", "yes", "no", "yes"]), "drug": pd.Categorical(["placebo", "verum"] * 2),
    "age": [0.1, -0.4, 0.3, 1.0], "ward": ["a", "b", "a", "a"],
})  # fmt: skip


def changed(*pairs) -> Any:
    text = EFFECTS
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    return parse_study(text.encode())


def test_a_contract_has_parameters_prior_and_model_of_effects():
    study = changed()
    assert study.names == ("Intercept", "drug[T.verum]", "age", "log_sd")
    assert study.used == {"ill", "drug", "age", "ward"}
    prior = study.prior()
    np.testing.assert_allclose(np.diag(prior.normal.precision), [*[1.5**-2.0] * 3, 0])
    np.testing.assert_allclose(-np.asarray(prior.normal.linear) * 1.5**2, [0.1] * 3 + [0])
    model = study.potential(RECORDS, "north")
    assert isinstance(model, RandomEffects)
    assert model.labels == ("a", "b")
    assert model.names == study.names
    assert "sd ~ half-normal(1.5)" in " ".join(modelled(study))


def test_increments_of_a_scaled_column_are_per_declared_unit_unless_results_are_in_original_units():
    declared, original = changed(), changed(("[model]\n", '[model]\nunits = "original"\n'))
    assert declared.columns["age"].scale == 10
    for study, scale in ((declared, 10), (original, 1)):
        found = effect_scale(study)
        assert found is not None and found["columns"]["age"]["scale"] == scale


@double_precision
def test_an_effect_of_the_site_and_a_varying_coefficient():
    study = changed(("(1 | ward)", f"(1 + age | {SITE})"), ('ward = { type = "key" }\n', ""))
    assert study.names[3:] == ("log_sd[0]", "log_sd[1]", "atanh_correlation")
    model = study.potential(RECORDS.drop(columns="ward"), "north")
    assert model.labels == ("",)
    np.testing.assert_array_equal(np.asarray(model.effects)[:4, 1], RECORDS["age"])
    assert len(study.prior_place[0]) == len(study.guess) == len(study.reach) == 6


@pytest.mark.parametrize("spread", ["exponential", "half-Cauchy"])
@double_precision
def test_priors_of_the_spread(spread):
    prior = changed(('spread = "half-normal"', f'spread = "{spread}"')).prior()
    rho = np.log([0.3, 2.0])
    value = [float(prior.spreads.value(jnp.array([0, 0, 0, r]))) for r in rho]
    density = {"exponential": lambda t: t / 1.5, "half-Cauchy": lambda t: np.log(1 + (t / 1.5) ** 2)}[spread]
    exact = [density(np.exp(r)) - r for r in rho]
    np.testing.assert_allclose(np.diff(value), np.diff(exact), rtol=1e-9)


OTHER_FAMILIES = {
    "linear": ('bmi = { type = "number", bounds = [10, 50] }', "", ("log_sigma", "log_sd")),
    "student_t": ('bmi = { type = "number", bounds = [10, 50] }', "df = 4\nscale = 2.0\n", ("log_sd",)),
    "poisson": ('bmi = { type = "count", bounds = [0, 50] }', "", ("log_sd",)),
    "negative_binomial": ('bmi = { type = "count", bounds = [0, 50] }', "size = 2.5\n", ("log_sd",)),
}


@pytest.mark.parametrize("family", OTHER_FAMILIES)
@double_precision
def test_families(family):
    column, options, names = OTHER_FAMILIES[family]
    study = changed(
        ('family = "logistic"\n', f'family = "{family}"\n{options}'), ("ill ~", "bmi ~"),
        ('ill = { type = "level", levels = ["no", "yes"] }', column),
    )  # fmt: skip
    assert study.names[3:] == names
    model = study.potential(RECORDS.assign(bmi=[20.0, 24.0, 30.0, 21.0]), "north")
    assert model.names == study.names
    assert model.dim == len(study.guess) == len(study.prior_place[1])


@double_precision
def test_families_of_the_standard_library_and_model_files():
    """The effect is added to the predictor; a negative binomial has its own size unless it is told."""
    study = changed(
        ('family = "logistic"\n', 'family = "negative_binomial"\n'), ("ill ~", "visits ~"),
        ('ill = { type = "level", levels = ["no", "yes"] }', 'visits = { type = "count", bounds = [0, 50] }'),
    )  # fmt: skip
    assert study.names == ("Intercept", "drug[T.verum]", "age", "log_concentration", "log_sd")
    assert study.used == {"visits", "drug", "age", "ward"}
    records = RECORDS.assign(visits=[2.0, 0.0, 5.0, 1.0])
    model = study.potential(records, "north")
    assert isinstance(model, RandomEffects)
    assert model.labels == ("a", "b")
    assert model.names == study.names
    assert len(study.guess) == len(study.reach) == len(study.prior_place[0]) == model.dim == 5
    np.testing.assert_allclose(np.diag(study.prior().normal.precision), [*[1.5**-2.0] * 4, 0])
    assert list(study.naming.constrain(np.zeros(5)))[3:] == ["concentration", "sd"]
    x, z = jnp.array([0.3, -0.2, 0.1, 0.4, -0.5]), jnp.array([[[0.7]], [[-0.3]]])
    eta = study.design.matrix(records) @ np.asarray(x[:3]) + np.array([0.7, -0.3, 0.7, 0.7])
    size = float(np.exp(x[3]))
    law = -scipy.stats.nbinom.logpmf(records["visits"], size, size / (size + np.exp(eta)))
    constant = scipy.special.gammaln(records["visits"] + 1)
    own = np.array([(law - constant)[[0, 2, 3]].sum(), (law - constant)[1]])
    effects = 0.5 * np.array([0.7, -0.3]) ** 2 * np.exp(1.0) - 0.5
    np.testing.assert_allclose(np.asarray(model.energies(x, z))[:2, 0], own + effects, rtol=1e-9)
    file = parse_study(with_model_file(EFFECTS).encode(), model_file)
    assert file.names == ("Intercept", "drug[T.verum]", "age", "log_sd")
    assert file.potential(RECORDS, "north").dim == 4


@pytest.mark.parametrize(
    ("pairs", "told"),
    [
        ([("[limits]", "[privacy]\nepsilon = 1.0\ndelta = 1e-5\n\n[limits]")], "private history"),
        ([("[dynamics]", '[dynamics]\nkind = "ZigZag"')], "Boomerang"),
        ([('reference = "laplace"', 'reference = "none"\ncontrol = "none"')], "vb"),
        ([("mean = 0.1\nscale = 1.5", "flat = true")], "scale of the coefficients"),
        ([("[releases]", '[releases]\nassessment = ["loo"]')], "not known with effects"),
        ([("(1 | ward)", "(1 | ward) + (1 | drug)")], r"\(1 . ward\)"),
        ([("(1 | ward)", "(1 | drug)")], "type 'key'"),
        ([("(1 | ward)", "(1 | region)")], "type 'key'"),
        ([("(1 | ward)", "(1 + drug | ward)")], "column of numbers"),
        ([('spread = "half-normal"', 'spread = "flat"')], "half-normal"),
        ([('family = "logistic"', 'family = "weibull"')], "bounds are positive"),
        ([('family = "logistic"', 'family = "multinomial_logit"')], "one linear predictor that is a number"),
        ([('family = "logistic"', 'family = "cauchy"')], "'weibull'"),
        ([("scale = 1.5\n\n[dynamics]", "scale = [1.5, 1.5]\n\n[dynamics]")], "one for each of Intercept"),
        (
            [("(1 | ward)", "(1 + age | ward)"), ('family = "logistic"', 'family = "logistic"\nunits = "original"')],
            "age",
        ),
    ],
)
def test_what_does_not_go_together_is_told(pairs, told):
    with pytest.raises(InputError, match=told):
        changed(*pairs)


@pytest.mark.parametrize(
    ("formula", "fixed", "slope", "groups"),
    [
        ("ill ~ drug + dose + (1 | ward)", "ill ~ drug + dose", None, "ward"),
        ("ill ~ (1+dose|ward) + drug * dose", "ill ~ drug * dose", "dose", "ward"),
        ("ill ~ (1 | hospital)", "ill ~ 1", None, "hospital"),
    ],
)
def test_formulas_are_taken_apart(formula, fixed, slope, groups):
    assert parse_mixed(formula) == MixedFormula(fixed, slope, groups)


def table():
    """Three hospitals with two wards each."""
    rng = np.random.default_rng(0)
    return pd.DataFrame({
        "hospital": np.repeat(["n", "s", "w"], 8),
        "ward": np.repeat([f"ward {i}" for i in range(6)], 4),
        "dose": rng.normal(size=24),
        "drug": np.tile(["a", "b"], 12),
        "ill": np.tile([0, 1, 1], 8),
    })  # fmt: skip


def test_sites_of_a_table_have_their_own_wards():
    found = fp.sites(
        table(), formula="ill ~ drug + (1 + dose | ward)", family="logistic", by="hospital", spread="half-Cauchy"
    )
    assert [site.name for site in found] == ["n", "s", "w"]
    model: Any = found["s"].potential
    assert model.labels == ("ward 2", "ward 3")
    assert model.names == found.names == ("Intercept", "drug[T.b]", "log_sd[0]", "log_sd[1]", "atanh_correlation")
    assert found.prior.normal.dim == 5
    np.testing.assert_array_equal(np.asarray(model.effects)[:8, 1], table()["dose"].to_numpy()[8:16])
    assert 'spread = "half-Cauchy"' in found.study.text.decode()


def test_a_model_of_one_record_has_sites_of_a_table_and_a_file_beside_its_contract(tmp_path):
    def hurdle(x, row):
        return jnp.logaddexp(0.0, x["eta"]) - row["ill"] * x["eta"]

    model = fp.Model(hurdle, predictors=["eta"], columns={"ill": "binary"})
    for formula in ("ill ~ dose + (1 | ward)", "ill ~ dose"):
        found = fp.sites(table(), formula=formula, family=model, by="hospital", prior="normal(0, 2)")
        assert found.names[:2] == ("Intercept", "dose")
        again = read_study(found.write(tmp_path / "study.toml"))
        assert again.names == found.names
        assert again.model_digest == model.digest
    with pytest.raises(InputError, match="groups of rows"):
        grouped = fp.Model(
            lambda x, row: jnp.sum(row["used"] * (row["ill"] - x["m"]) ** 2),
            parameters=["m"], columns={"ill": "real"}, group=(3, "used"),
        )  # fmt: skip
        fp.sites(table(), formula="ill ~ dose", family=grouped, by="hospital")


def test_an_effect_of_each_site_is_one_latent(tmp_path):
    found = fp.sites(table(), formula="ill ~ dose + (1 | hospital)", family="logistic", by="hospital")
    assert [site.latents for site in found] == [1, 1, 1]
    assert parse_study(found.write(tmp_path / "study.toml").read_bytes()).effects.formula.groups == SITE
    assert list(found["n"].naming.constrain(np.zeros(3))) == ["Intercept", "dose", "sd"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"by": "clinic"}, "clinic"),
        ({"formula": "ill ~ age + (1 | ward)"}, "age"),
        ({"formula": "ill ~ dose + (1 | floor)"}, "floor"),
        ({"family": "weibull"}, "died"),
        ({"family": "cauchy"}, "logistic"),
        ({"prior": "student_t(3, 0, 1)"}, "normal"),
        ({"prior": "flat"}, "normal|scale"),
        ({"formula": "ill ~ dose", "spread": "exponential"}, "without effects"),
        ({"spread": "uniform"}, "half-normal"),
    ],
)
def test_bad_tables_are_told(change, told):
    with pytest.raises(InputError, match=told):
        fp.sites(table(), **{"formula": "ill ~ dose + (1 | ward)", "by": "hospital", "family": "logistic"} | change)
