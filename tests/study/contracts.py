"""A small contract and records for it, which many tests share."""

import hashlib

import numpy as np

CONTRACT = """
format = 1
name = "two hospitals"
sites = ["north", "south"]

[model]
family = "logistic"
formula = "ill ~ drug + age"

[columns]
ill = { type = "level", levels = ["no", "yes"] }
drug = { type = "level", levels = ["placebo", "verum"] }
age = { type = "number", bounds = [18, 100], center = 50, scale = 10 }

[prior]
mean = 0.1
scale = 1.5

[dynamics]
chains = 4

[run]
duration = 6.0
burn_in = 1.0

[releases]
derivatives = "own"
passes = true

[limits]
rounds = 2000
observed_time = 1000.0
"""

# A model that is no family: illness by a complementary log-log link.
MODEL_FILE = """fedpdmc model 1
title Binary regression with a complementary log-log link
predictor eta f64[]
column y f64[] binary
minus_log_likelihood
%1 = sub 1.0 y : f64[]
%2 = exp eta : f64[]
%3 = mul %1 %2 : f64[]
%4 = neg %2 : f64[]
%5 = expm1 %4 : f64[]
%6 = neg %5 : f64[]
%7 = log %6 : f64[]
%8 = mul y %7 : f64[]
%9 = sub %3 %8 : f64[]
return %9
end
"""
DIGEST = hashlib.sha256(MODEL_FILE.encode()).hexdigest()


def with_model_file(contract):
    """The same study with the model file in place of its family."""
    return contract.replace('family = "logistic"', f'file = "cloglog.fpm"\nsha256 = "{DIGEST}"')


def model_file(name):
    """The model file, as a contract's reader asks for it."""
    assert name == "cloglog.fpm"
    return MODEL_FILE.encode()


POLICY = """
least_records = 2
least_without_budget = 0
most_parameters_per_record = 0.5
largest_share = 1.0
least_cell = 1
families = ["logistic"]
most_operations = 20
derivatives = "own"
passes = true
most_rounds = 1000000
most_observed_time = 1e6
most_bits = 1e9
most_bits_in_all = 1e9
"""


def rows(name, n=12, seed=0):
    """Records of one hospital: (ill, drug, age)."""
    rng = np.random.default_rng([seed, *name.encode()])
    drug, age = rng.integers(0, 2, n), rng.integers(20, 90, n)
    chance = 1 / (1 + np.exp(-(-0.5 - 0.8 * drug + 0.05 * (age - 50))))
    ill = rng.random(n) < chance
    return [(("no", "yes")[int(i)], ("placebo", "verum")[d], int(a)) for i, d, a in zip(ill, drug, age, strict=True)]


def write_csv(path, records):
    """Records as a CSV file, with a column that the contract does not know."""
    lines = ["ill,drug,age,ward"] + [f"{ill},{drug},{age},A" for ill, drug, age in records]
    path.write_text("\n".join(lines) + "\n")
    return path


# Effects of wards, which stay at their hospitals.
EFFECTS = (
    CONTRACT.replace("drug + age", "drug + age + (1 | ward)")
    .replace("[prior]", 'ward = { type = "key" }\n\n[prior]\nspread = "half-normal"\nspread_scale = 1.5')
    .replace("[dynamics]", '[dynamics]\nreference = "laplace"')
)
