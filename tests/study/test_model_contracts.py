"""Contracts that name a model file or a family of the standard library, and the policies that allow them."""

import hashlib

import msgspec
import numpy as np
import pandas as pd
import pytest
from tests.study.contracts import CONTRACT, DIGEST, MODEL_FILE, POLICY, model_file, with_model_file

from fedpdmc._jax.precision import double_precision
from fedpdmc.errors import InputError, Refused
from fedpdmc.study import parse_study, read_policy, read_records, read_study

FILE = with_model_file(CONTRACT)
SURVIVAL = CONTRACT.replace(
    'family = "logistic"\nformula = "ill ~ drug + age"', 'family = "weibull"\nformula = "time ~ drug + age"'
).replace("[columns]\nill =", '[columns]\ntime = { type = "number", bounds = [0.5, 3000], scale = 365 }\ndied =')
TREND = """fedpdmc model 1
title A straight line for each group
group 3 there
parameter slope f64[]
column y f64[3] real
column at f64[3] real
minus_log_likelihood
%1 = mul slope at : f64[3]
%2 = sub y %1 : f64[3]
%3 = square %2 : f64[3]
%4 = mul there %3 : f64[3]
%5 = reduce_sum %4 axes=[0] : f64[]
return %5
end
"""


@double_precision
def test_a_model_file_is_named_by_its_hash():
    study = parse_study(FILE.encode(), model_file)
    assert study.names == ("Intercept", "drug[T.verum]", "age")
    assert (study.model_file, study.model_digest) == ("cloglog.fpm", DIGEST)
    frame = pd.DataFrame(
        {
            "ill": pd.Categorical(["no", "yes"], categories=["no", "yes"]),
            "drug": pd.Categorical(["verum", "placebo"], categories=["placebo", "verum"]),
            "age": [0.5, -1.0],
        }
    )
    model = study.potential(frame, "north")
    x = np.array([0.2, -0.4, 0.3])
    rate = np.exp([0.2 - 0.4 + 0.15, 0.2 - 0.3])
    np.testing.assert_allclose(model.function(x, model.data), rate[0] - np.log1p(-np.exp(-rate[1])), rtol=1e-6)


def test_a_family_takes_its_columns_by_name_or_as_the_contract_says():
    study = parse_study(SURVIVAL.encode())
    assert study.names == ("Intercept", "drug[T.verum]", "age", "log_shape")
    assert study.used == {"time", "died", "drug", "age"}
    assert list(study.model.variables(np.zeros(4))) == ["Intercept", "drug[T.verum]", "age", "shape"]
    renamed = SURVIVAL.replace("\ndied =", "\nstatus =")
    with pytest.raises(InputError, match="columns: died: found no such column"):
        parse_study(renamed.encode())
    bound = parse_study(renamed.replace("[prior]", '[model.columns]\ndied = "status"\n[prior]').encode())
    assert bound.used == {"time", "status", "drug", "age"}


SIZED = {
    "ordered_logit": ('ill = { type = "level", levels = ["no", "some", "much"] }', "", 4),
    "multinomial_logit": ('ill = { type = "level", levels = ["no", "some", "much"] }', "", 6),
    "piecewise_exponential": (
        'ill = { type = "number", bounds = [0.5, 30] }\ndied = { type = "count", bounds = [0, 1] }',
        "[model.constants]\ncuts = [5.0, 10.0]\n", 5,
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", SIZED)
def test_the_contract_gives_a_family_its_size(family):
    column, constants, dim = SIZED[family]
    text = CONTRACT.replace('"logistic"', f'"{family}"').replace("[prior]", f"{constants}[prior]")
    study = parse_study(text.replace('ill = { type = "level", levels = ["no", "yes"] }', column).encode())
    assert len(study.names) == dim and ("Intercept[some]" in study.names) == (family == "multinomial_logit"), (
        study.names
    )
    assert "Intercept" not in study.names


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (DIGEST, "0" * 64, "where cloglog.fpm has"),
        ("cloglog.fpm", "../cloglog.fpm", "next to the contract"),
        ("cloglog.fpm", "cloglog.py", "next to the contract"),
        ("cloglog.fpm", "--cloglog.fpm", "next to the contract"),
        ('formula = "ill ~ drug + age"', "", "formula"),
        ("ill ~ drug + age", "age ~ drug", "'y' is a level of two"),
        ("[prior]", '[model.columns]\ny = "ill"\n[prior]', "left of '~'"),
        ("[prior]", '[model.columns]\nz = "ill"\n[prior]', "unknown key"),
        ("[prior]", "[model.constants]\nz = 1.0\n[prior]", "unknown key"),
        ("[limits]", "[privacy]\nepsilon = 1.0\ndelta = 1e-6\n[limits]", "with a budget and family 'file'"),
        ("[limits]", '[coordinates]\nnorth = ["age"]\n[limits]', "Leave the table out"),
    ],
)
def test_what_does_not_fit_is_named(old, new, words):
    assert old in FILE
    text = FILE.replace(old, new, 1).replace(
        'derivatives = "own"', 'derivatives = "none"' if "privacy" in new else 'derivatives = "own"'
    )
    if "privacy" in new:
        text = text.replace("[dynamics]", '[dynamics]\nkind = "ZigZag"').replace("passes = true", "passes = false")
    with pytest.raises(InputError, match=words):
        parse_study(text.encode(), lambda name: MODEL_FILE.encode())


def test_the_file_lies_beside_the_contract(tmp_path):
    (tmp_path / "study.toml").write_text(FILE)
    with pytest.raises(InputError, match="cloglog.fpm. Put the model file"):
        read_study(tmp_path / "study.toml")
    (tmp_path / "cloglog.fpm").write_text(MODEL_FILE)
    assert read_study(tmp_path / "study.toml").model_digest == DIGEST
    (tmp_path / "cloglog.fpm").write_text(MODEL_FILE.replace("sub 1.0 y", "sub 2.0 y"))
    with pytest.raises(InputError, match="sha256"):
        read_study(tmp_path / "study.toml")


def trend_contract():
    """A study of `TREND`, whose records are all rows of a patient."""
    text = CONTRACT.replace(
        'family = "logistic"\nformula = "ill ~ drug + age"',
        f'file = "trend.fpm"\nsha256 = "{hashlib.sha256(TREND.encode()).hexdigest()}"\ngroup = "patient"',
    )
    head, tail = text.split("[columns]")[0], text.split("[prior]")[1]
    columns = "\n".join(
        ["[columns]", 'patient = { type = "key" }', 'y = { type = "number", bounds = [-9, 9] }',
         'at = { type = "number", bounds = [0, 9] }', "[prior]"]
    )  # fmt: skip
    return head + columns + tail


@double_precision
def test_rows_with_the_same_key_are_one_record(tmp_path):
    study = parse_study(trend_contract().encode(), lambda name: TREND.encode())
    path = tmp_path / "north.csv"
    path.write_text("patient,y,at\nb,1,1\na,2,1\nb,3,2\na,5,2\na,6,3\n")
    records = read_records(study, path)
    assert study.count(records) == 2
    model = study.potential(records, "north")
    np.testing.assert_allclose(model.function(np.array([1.0]), model.data), (0 + 1) + (1 + 9 + 9))
    path.write_text("patient,y,at\n" + "b,1,1\n" * 4)
    with pytest.raises(InputError, match="a group of 4 rows"):
        study.potential(read_records(study, path), "north")


def test_a_policy_allows_families_files_by_hash_or_small_ones(tmp_path):
    study, family = parse_study(FILE.encode(), model_file), parse_study(CONTRACT.encode())
    path = tmp_path / "policy.toml"
    path.write_text(POLICY.replace("most_operations = 20\n", ""))
    strict = read_policy(path)
    strict.check("north", family, 100)
    with pytest.raises(Refused, match="POLICY_FAMILY"):
        strict.check("north", study, 100)
    msgspec.structs.replace(strict, models=(DIGEST,)).check("north", study, 100)
    msgspec.structs.replace(strict, most_operations=9).check("north", study, 100)
    with pytest.raises(Refused, match="POLICY_FAMILY"):
        msgspec.structs.replace(strict, most_operations=8).check("north", study, 100)
    path.write_text(POLICY.replace('families = ["logistic"]\nmost_operations = 20', f'models = ["{DIGEST}"]'))
    assert read_policy(path).models == (DIGEST,)
    with pytest.raises(Refused, match="POLICY_FAMILY"):
        read_policy(path).check("north", family, 100)
    path.write_text(POLICY.replace("most_operations = 20", 'models = ["weibull"]'))
    with pytest.raises(InputError, match="SHA-256"):
        read_policy(path)
