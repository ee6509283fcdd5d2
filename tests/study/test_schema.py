"""The keys of contracts and policies: what is written keeps its digest, and every error says where, what and what else."""

import hashlib
import json

import msgspec
import numpy as np
import pandas as pd
import pytest
from tests.study.contracts import CONTRACT, POLICY

import fedpdmc as fp
from fedpdmc.errors import InputError
from fedpdmc.study import parse_study, read_policy
from fedpdmc.study.policy import Policy
from fedpdmc.study.schema import ContractKeys, PrivacyKeys, read


def table():
    rng = np.random.default_rng(1)
    n = 90
    days = rng.integers(10, 400, n)
    return pd.DataFrame(
        {
            "site": np.repeat(["north", "south", "west"], n // 3),
            "ward": np.tile(["a", "b", "c"], n // 3),
            "age": rng.integers(20, 90, n),
            "dose": np.round(rng.gamma(2.0, 1.0, n), 2) + 0.1,
            "drug": np.tile(["placebo", "verum"], n // 2),
            "ill": np.tile([0, 1, 1], n // 3),
            "events": rng.integers(0, 9, n),
            "trials": 9,
            "days": days,
            "died": np.tile([1, 0], n // 2),
            "bmi": np.round(24 + rng.normal(size=n), 1),
            "pain": pd.Categorical(np.tile(["none", "some", "much"], n // 3), ["none", "some", "much"], ordered=True),
            "a name": rng.integers(0, 5, n),
        }
    )


WRITTEN = {
    "logistic": {"formula": "ill ~ drug * age", "family": "logistic"},
    "poisson": {"formula": "events ~ drug + bs(age, df=4)", "family": "poisson", "exposure": "days"},
    "trials": {"formula": "events ~ drug", "family": "logistic", "trials": "trials"},
    "student": {"formula": "bmi ~ age + `a name`", "family": "student_t", "df": 4.0, "scale": 1.5, "missing": "drop"},
    "effects": {"formula": "bmi ~ age + (1 + dose | ward)", "family": "linear", "spread": "exponential"},
    "known size": {"formula": "events ~ drug + (1 | site)", "family": "negative_binomial", "size": 2.0},
    "survival": {"formula": "Surv(days, died) ~ drug", "family": "weibull"},
    "pieces": {"formula": "Surv(days, died) ~ drug", "family": "piecewise_exponential", "cuts": [100.0, 200.0]},
    "ordered": {"formula": "pain ~ age", "family": "ordered_logit", "columns": {"age": {"center": 50, "scale": 10}}},
    "priors": {
        "formula": "bmi ~ age + dose",
        "family": "linear",
        "weights": "trials",
        "prior": {"age": "horseshoe(0.1, 2)", "dose": "student_t(3, 0, 1)"},
    },
    "flat": {"formula": "bmi ~ log(dose)", "family": "linear", "prior": "flat", "standardize": False},
}
# SHA-256 of the contracts that earlier versions have written: ledgers and logs of studies refer to them.
DIGESTS = {
    "logistic": "f81fa68227fde002edccb3f13ee8e9ec2ddea759d824cdbdbc7d04721871f8f9",
    "poisson": "ba937ce325759b4d307e547d0fd8b66895b4a63907a0c1baca637a1da24aa552",
    "trials": "90498182c86c32002f4b1c6efe6aa5f311b049775733cd405f130a26585014f1",
    "student": "c7170713718ca9af0d197476bfbf5486464a755595de27ce884e0f783812e965",
    "effects": "c93a4a0ed6906d17ad1e77678c1af94131b2f3ddf1e2dc06fae20916dc51b64a",
    "known size": "863afbf7dbec2ecb6e67980fa5689549e4429cd9f36c01ac4caa386dab21f83c",
    "survival": "f81805b025e77c931524ed23533e85198f7e68ead3fc377f799e5e1ff5669513",
    "pieces": "0a240998c26962261d619cf93183b38c817518824aa79b036c2a4e3751e79ccb",
    "ordered": "aaf71eebc2ec6c784b04c5720fcb0873d9184a95f5d956a44eaf3aa68d92023e",
    "priors": "1d28c1fd3880db03e77c4ab8398aa2c7258638917030a532c407c51eda75efb4",
    "flat": "94124b0b00ee87c07f167308378ae7010a6652931d9f3594247d0aaf59921e21",
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_contract_from_a_table_is_written_as_ever(name):
    study = fp.sites(table(), by="site", **WRITTEN[name]).study
    assert study.digest.hex() == hashlib.sha256(study.text).hexdigest() == DIGESTS[name]
    assert parse_study(study.text).names == study.names


def test_a_contract_with_bounds_from_records_has_no_budget_until_they_are_stated(tmp_path):
    budget = (
        '\n[privacy]\nepsilon = 1.0\ndelta = 1e-6\n[dynamics]\nkind = "ZigZag"\nreference = "none"\ncontrol = "none"\n'
    )
    stated = {"age": {"bounds": [18, 110], "center": 50, "scale": 10}, "ill": {"levels": ["0", "1"]}}
    for given, named in ((None, ["ill", "age"]), ({"age": {"bounds": [18, 110]}}, ["ill", "age"]), (stated, [])):
        sites = fp.sites(table(), by="site", formula="ill ~ age", family="logistic", columns=given)
        written = sites.write(tmp_path / "study.toml").read_text()
        assert sites.study.names == parse_study(written.encode()).names
        assert (f"from_table = {json.dumps(named)}" in written) == bool(named) == ("from_table" in written)
        private = written.replace('derivatives = "summed"', 'derivatives = "none"') + budget
        if named:
            with pytest.raises(InputError, match=r"from_table: found 'ill', 'age' with a table \[privacy\]"):
                parse_study(private.encode())
        else:
            assert parse_study(private.encode()).epsilon == 1.0
    with pytest.raises(InputError, match="from_table: found 'agee'. The columns are"):
        parse_study(written.replace("\n", '\nfrom_table = ["agee"]\n', 1).encode())


@pytest.mark.parametrize(
    ("old", "new", "path", "found", "remedy"),
    [
        ("rounds = 2000", "round = 2000", "limits: round", "an unknown key", "Did you mean 'rounds'? Known keys: deriv"),
        ("[prior]", "[priors]", "priors", "an unknown key", "Did you mean 'prior'? Known keys: columns, "),
        ("bounds = [18, 100]", "bound = [18, 100]", "columns: age: bound", "an unknown key", "Did you mean 'bounds'?"),
        ("rounds = 2000", "", "limits: rounds", "no value", "This key is required: give an integer from 1 to 46"),
        ("chains = 4", "chains = true", "dynamics: chains", "True", "Give an integer from 1 to 65536."),
        ("chains = 4", 'chains = "4"', "dynamics: chains", "'4'", "Give an integer from 1 to 65536."),
        ("passes = true", "passes = 1", "releases: passes", "1", "Give true or false."),
        ("duration = 6.0", "duration = 0", "run: duration", "0", "Give a positive number."),
        ("duration = 6.0", "duration = inf", "run: duration", "inf", "Give a finite number."),
        ('"number"', '"numbers"', "columns: age: type", "'numbers'", "Did you mean 'number'? Give one of 'number', 'co"),
        ('type = "number", ', "", "columns: age: type", "no value", "This key is required: give one of 'number', 'count'"),
        ("bounds = [18, 100]", "bounds = [18]", "columns: age: bounds", "[18]", "Give [least, most]."),
        ('"logistic"', '"logistc"', "model: family", "'logistc'", "Did you mean 'logistic'? Give one of "),
        ("chains = 4", "refresh = 'x'", "dynamics: refresh", "'x'", "Give 'quarter-turns' or a finite number of at le"),
        ("mean = 0.1", "student_t = { age = 0 }", "prior: student_t", "{'age': 0}", "Give a table, each value an integer"),
        ("mean = 0.1", "spread = 'exponential'", "prior: spread", "'exponential'", "It is of the spreads of effects"),
        ("[limits]", "[coordinates]\nnrth = ['age']\n[limits]", "coordinates: nrth", "an unknown site", "Did you mean"),
        ("rounds = 2000", "rounds = 0x" + 5000 * "f", "limits: rounds", "an integer of more than 300 digits", "Give a fi"),
    ],
)  # fmt: skip
def test_an_error_names_the_key_what_is_there_and_what_is_allowed(old, new, path, found, remedy):
    assert old in CONTRACT
    with pytest.raises(InputError) as error:
        parse_study(CONTRACT.replace(old, new, 1).encode())
    assert (error.value.argument, error.value.found) == (f"study.toml: {path}", found)
    assert error.value.remedy.startswith(remedy)


def test_a_misspelt_limit_of_a_policy_is_not_ignored(tmp_path):
    (tmp_path / "policy.toml").write_text(POLICY.replace("least_records", "least_recods"))
    with pytest.raises(InputError, match="least_recods: found an unknown key. Did you mean 'least_records'"):
        read_policy(tmp_path / "policy.toml")


@pytest.mark.parametrize("kind", [Policy, ContractKeys])
def test_every_key_has_a_description(kind):
    for name, schema in msgspec.json.schema(kind)["$defs"].items():
        for key, one in schema["properties"].items():
            told = "description" in one or "$ref" in one or {"anyOf", "enum"} & set(one)
            assert told, (name, key)


def test_reading_is_strict_and_a_loose_reader_would_be_noticed():
    """The control: msgspec in its lax mode accepts texts as numbers."""
    values = {"epsilon": "1.0", "delta": 1e-6}
    assert msgspec.convert(values, PrivacyKeys, strict=False).epsilon == 1.0
    with pytest.raises(InputError, match="privacy: epsilon: found '1.0'. Give a finite number of at least 1e-06."):
        read(PrivacyKeys, values, "privacy")
