"""The package and a Zig-Zag written only for the tests agree with each other, and with the grid."""

import numpy as np
from tests.reference_zigzag import zigzag
from tests.statistical.checks import t_test, welch_test
from tests.statistical.targets import target, truth
from tests.statistical.test_posteriors import sampled

NAMES = ["x1", "x2", "x1²", "x2²", "x1 x2", "x1³", "x2³"]


def monomials(draws):
    x, y = draws[..., 0], draws[..., 1]
    return np.stack([x, y, x**2, y**2, x * y, x**3, y**3], -1)


def grid_monomials(found):
    points = np.stack(np.meshgrid(*found.axes, indexing="ij"), -1)
    return np.tensordot(found.weights, monomials(points), 2)


def test_an_independent_zigzag_agrees():
    federation, found = target("logistic", 3), truth("logistic", 3)
    records = [(m.records.design, m.records.response) for m in federation.members]
    start = found.draws(128, seed=3)
    plain = zigzag(records, federation.prior_mean, federation.prior_precision, start, 60.0, seed=4)
    assert t_test(NAMES, plain, grid_monomials(found)).exact
    post = sampled("logistic", 3, "zigzag", duration=200.0)
    ours = monomials(post.draws(800)).mean(1)
    comparison = welch_test(NAMES, ours, plain)
    assert comparison.exact, str(comparison)
    assert np.all(comparison.ess[:2] * found.sd**2 > 1000)
