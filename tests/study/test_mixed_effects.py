"""Formulas with effects, and sites made of a table."""

import numpy as np
import pandas as pd
import pytest

from fedpdmc.errors import InputError
from fedpdmc.potentials import RandomEffects
from fedpdmc.study.mixed_effects import mixed_sites, parse_mixed


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


@pytest.mark.parametrize(
    ("formula", "fixed", "slope", "groups"),
    [
        ("ill ~ drug + dose + (1 | ward)", "ill ~ drug + dose", None, "ward"),
        ("ill ~ (1+dose|ward) + drug * dose", "ill ~ drug * dose", "dose", "ward"),
        ("ill ~ (1 | hospital)", "ill ~ 1", None, "hospital"),
    ],
)
def test_formulas_are_taken_apart(formula, fixed, slope, groups):
    assert parse_mixed(formula) == (fixed, slope, groups)


@pytest.mark.parametrize(
    "formula",
    [
        "ill ~ drug",
        "ill ~ (1 | ward) + (1 | hospital)",
        "ill ~ (dose | ward)",
        "ill ~ (1 + a + b | ward)",
        "(1 | ward)",
    ],
)
def test_formulas_that_are_none_are_refused(formula):
    with pytest.raises(InputError, match=r"\(1 \| ward\)"):
        parse_mixed(formula)


def test_sites_have_their_own_wards():
    sites, prior = mixed_sites(table(), formula="ill ~ drug + (1 + dose | ward)", by="hospital")
    assert [site.name for site in sites] == ["n", "s", "w"]
    model = sites[1].potential
    assert isinstance(model, RandomEffects)
    assert model.labels == ("ward 2", "ward 3")
    assert model.names == ("Intercept", "drug[T.b]", "log_sd[0]", "log_sd[1]", "atanh_correlation")
    assert model.dim == prior.normal.dim == 5
    np.testing.assert_array_equal(np.asarray(model.effects)[:8, 1], table()["dose"].to_numpy()[8:16])


def test_an_effect_of_the_site_is_one_latent():
    sites, _ = mixed_sites(table(), formula="ill ~ dose + (1 | hospital)", by="hospital")
    assert [site.latents for site in sites] == [1, 1, 1]


@pytest.mark.parametrize(
    ("change", "told"),
    [({"by": "clinic"}, "clinic"), ({"formula": "ill ~ age + (1 | ward)"}, "age"), ({"family": "probit"}, "logistic")],
)
def test_bad_tables_are_told(change, told):
    with pytest.raises(InputError, match=told):
        mixed_sites(table(), **{"formula": "ill ~ dose + (1 | ward)", "by": "hospital"} | change)
