"""A part of ``make calibrate``: default calls over seeds against the truth, and ranks of simulated parameters."""

import numpy as np
import pytest
from benchmarks.calibration import NARROW, judge, one
from benchmarks.simulated_calibration import judge as judge_ranks
from benchmarks.simulated_calibration import ranks

from fedpdmc.sampling.vb_reference import Tails

pytestmark = pytest.mark.long
CASES = ["logistic, 2 events of 60, prior 2.5", "Poisson, arm without events, prior 5", "one's own Weibull, N = 60"]


@pytest.mark.parametrize("name", CASES)
def test_default_calls_are_right_and_say_so(name):
    found = judge(one(name, range(500, 524), {}))
    # A run that is extended by a block takes half as many rounds again.
    assert found["converged"] >= 23 and found["rounds"] <= 35 and found["most"] <= 55
    assert abs(found["mean"]) < 0.03 and abs(found["sd"]) < 0.04 and abs(found["tail"]) < 0.12
    assert 0.8 < found["ratio"] < 1.3 and found["covered"] > 0.85


@pytest.mark.parametrize("name", CASES)
def test_the_verdict_has_power_against_narrow_references(monkeypatch, name):
    monkeypatch.setattr(Tails, "widens", False)
    assert judge(one(name, range(500, 520), NARROW))["converged"] <= 1


@pytest.mark.parametrize("model", ["logistic", "weibull"])
def test_ranks_of_simulated_parameters_are_uniform(model):
    found, converged = ranks(model, range(1000, 1120), float("inf"))
    p, distance = judge_ranks(found)
    assert p.min() > 1e-3 and distance.max() < 1.4 and converged >= 116


def test_ranks_of_a_posterior_that_is_too_narrow_are_not():
    """The test can fail: ranks among draws that are 30 % too narrow."""
    rng = np.random.default_rng(0)
    theta, draws = rng.normal(size=(500, 1)), 0.7 * rng.normal(size=(500, 99))
    p, _ = judge_ranks(np.sum(draws < theta, 1)[:, None])
    assert p[0] < 1e-3
