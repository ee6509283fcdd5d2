"""The posterior of weighted records, of binomial ones too, against a grid; and that of other weights, which is another."""

import numpy as np
import pytest
from tests.statistical.checks import CHAINS, assert_exact, compare
from tests.statistical.targets import on_grid, weighted
from tests.statistical.test_posteriors import DURATION, DYNAMICS

import fedpdmc as fp

TARGET = weighted()
TRUTH = on_grid(TARGET)


def sampled(**options):
    """Chains that start in stationarity."""
    start = TRUTH.draws(CHAINS, seed=17)
    settings = {"chains": CHAINS, "burn_in": 0.0, "init": start, "seed": 29, "progress": False}
    return fp.sample(TARGET.sites(), TARGET.prior(), **settings | options)


def others():
    """The truth of records whose weights are one."""
    members = [
        member._replace(records=member.records._replace(weight=np.where(member.records.weight > 0, 1.0, 0.0)))
        for member in TARGET.members
    ]
    return on_grid(TARGET._replace(members=tuple(members)))


@pytest.mark.parametrize(
    "dynamics", [name if name == "zigzag" else pytest.param(name, marks=pytest.mark.long) for name in DYNAMICS]
)
def test_weighted_records_have_their_posterior(dynamics):
    post = sampled(dynamics=DYNAMICS[dynamics], duration=DURATION[dynamics] / 3, reference="identity")
    assert_exact(post, TRUTH, least_ess=150)
    assert not compare(post, others()).exact


@pytest.mark.parametrize("reference", ["laplace", pytest.param("vb", marks=pytest.mark.long)])
def test_and_with_control_variates(reference):
    post = sampled(reference=reference, duration=20.0)
    assert_exact(post, TRUTH, least_ess=150)
    assert not compare(post, others()).exact
