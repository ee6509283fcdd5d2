"""References with larger variances: the records keep a part of their own curvature, and the posterior is the same."""

import jax.numpy as jnp
import pytest
from tests.statistical.checks import assert_exact, compare
from tests.statistical.targets import truth
from tests.statistical.test_posteriors import DURATION, sampled

from fedpdmc.members import run_coordinates
from fedpdmc.sampling import vb_reference
from fedpdmc.sampling.vb_reference import Tails

SITES = 3


@pytest.fixture(autouse=True)
def wider(monkeypatch):
    """By 80 %."""
    for name, value in {"WIDER": 1e6, "WIDER_SQUARED": 1e6, "MOST_WIDER": 0.8}.items():
        monkeypatch.setattr(vb_reference, name, value)
    monkeypatch.setattr(Tails, "widens", False)


def run(model, dynamics="boomerang"):
    return sampled(model, SITES, dynamics, DURATION[dynamics], reference="vb", control="quadratic")


@pytest.mark.parametrize(
    "model", ["logistic", *(pytest.param(model, marks=pytest.mark.long) for model in ("poisson", "student_t"))]
)
def test_the_posterior_is_that_on_a_grid(model):
    post = run(model)
    assert "80 % larger" in post.settings["reference_why"]
    assert_exact(post, truth(model, SITES))


@pytest.mark.parametrize("model", ["poisson", pytest.param("student_t", marks=pytest.mark.long)])
def test_the_posterior_is_the_same_with_a_reference_as_wide_as_the_tails(monkeypatch, model):
    monkeypatch.setattr(Tails, "widens", True)
    post = run(model)
    assert post.reference.wide is not None
    assert_exact(post, truth(model, SITES))


def test_records_that_keep_all_of_their_curvature_are_caught(monkeypatch):
    expanded = run_coordinates._expand

    def wrong(potential, control):
        found = expanded(potential, control)
        own = potential.expanded_at(control.point, control.order, control.spread)
        return own, *found[1:2], jnp.array(True)

    monkeypatch.setattr(run_coordinates, "_expand", wrong)
    assert not compare(run("logistic"), truth("logistic", SITES)).exact
