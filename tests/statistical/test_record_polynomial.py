"""Posteriors of many records, whose flips a polynomial decides, against a grid."""

import dataclasses
from functools import cache

import numpy as np
import pytest
from tests.statistical.checks import CHAINS, assert_exact, compare
from tests.statistical.targets import Member, Target, on_grid, records, student_t

import fedpdmc as fp
from fedpdmc.clocks.envelopes import record_polynomial


def rare(rng, sizes):
    """Logistic records of which one in ten has the outcome, so that the posterior is skewed."""

    def member(n):
        X = np.stack([np.ones(n), rng.normal(size=n)], 1)
        y = (rng.random(n) < 1 / (1 + np.exp(2.4 - 0.7 * X[:, 1]))).astype(float)
        return Member(records("logistic", X, y), fp.models.logistic(X, y))

    return [member(n) for n in sizes]


MODELS = {"logistic": rare, "student_t": student_t}


@cache
def posterior(model):
    """Two sites of some hundred records each, and the truth."""
    found = Target(tuple(MODELS[model](np.random.default_rng(8), (300, 280))))
    return found, on_grid(found)


def sampled(model, **settings):
    target, truth = posterior(model)
    start = truth.draws(CHAINS, seed=17)
    options = {"chains": CHAINS, "burn_in": 0.0, "init": start, "seed": 29, "progress": False, "duration": 40.0}
    options["reference"] = "identity"
    return fp.sample(target.sites(), target.prior(), dynamics=fp.ZigZag(excess=0.5), **options | settings)


@pytest.mark.parametrize("model", [pytest.param(m, marks=() if m == "logistic" else pytest.mark.long) for m in MODELS])
@pytest.mark.parametrize("prior_at", ["coordinator", pytest.param("sites", marks=pytest.mark.long)])
def test_posterior_is_exact(model, prior_at):
    post = sampled(model, prior_at=prior_at)
    assert post.gradient_evaluations.sum() < post.events.sum()
    assert_exact(post, posterior(model)[1], least_ess=500)


def test_the_target_is_not_trivial():
    found = posterior("logistic")[1]
    assert np.all(np.abs(found.mean) > 0.3) and np.all(np.abs(found.sd - 1) > 0.1) and np.max(np.abs(found.skew)) > 0.1


def test_a_polynomial_of_lower_order_without_its_error_is_not(monkeypatch):
    expand = record_polynomial.expansion

    def careless(potential):
        known = expand(potential)
        assert known is not None
        terms = known.terms.at[:, 3:].set(0.0)
        return dataclasses.replace(known, terms=terms, rest=0 * known.rest, spread=0 * known.spread)

    monkeypatch.setattr(record_polynomial, "expansion", careless)
    assert not compare(sampled("logistic"), posterior("logistic")[1]).exact
