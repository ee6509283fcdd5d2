"""A small contract and records for it, which many tests share."""

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

POLICY = """
least_records = 2
most_parameters_per_record = 0.5
largest_share = 1.0
least_cell = 1
families = ["logistic"]
derivatives = "own"
passes = true
most_rounds = 1000000
most_observed_time = 1e6
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
