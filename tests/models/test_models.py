"""The models' minus log likelihoods, against the densities of SciPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import fedpdmc as fp
from fedpdmc import models

pytestmark = pytest.mark.usefixtures("double")

rng = np.random.default_rng(0)
X, COUNTS, LABELS = rng.normal(size=(5, 2)), rng.poisson(2.0, 5), rng.integers(0, 2, 5)
Y, SERIES, OFFSET = rng.normal(size=5), rng.normal(size=(3, 4)), rng.normal(size=5)
POINTS = rng.normal(size=(4, 2))

CASES = {
    "logistic": (
        lambda: models.logistic(X, LABELS),
        lambda x: stats.bernoulli.logpmf(LABELS, 1 / (1 + np.exp(-X @ x))),
    ),
    "poisson": (lambda: models.poisson(X, COUNTS), lambda x: stats.poisson.logpmf(COUNTS, np.exp(X @ x))),
    "poisson with offset": (
        lambda: models.poisson(X, COUNTS, OFFSET),
        lambda x: stats.poisson.logpmf(COUNTS, np.exp(X @ x + OFFSET)),
    ),
    "student_t": (lambda: models.student_t(X, Y, 3.5, 0.7), lambda x: stats.t.logpdf(Y - X @ x, 3.5, scale=0.7)),
    "ar1_student_t": (
        lambda: models.ar1_student_t(SERIES, 4.0, 0.8),
        lambda x: stats.t.logpdf(SERIES[:, 1:] - x[0] * SERIES[:, :-1] - x[1], 4.0, scale=0.8),
    ),
    "linear": (lambda: models.linear(X, Y, 0.6), lambda x: stats.norm.logpdf(Y, X @ x, 0.6)),
    "linear with an unknown scale": (
        lambda: models.linear(X[:, :1], Y),
        lambda x: stats.norm.logpdf(Y, X[:, 0] * x[0], np.exp(x[1])),
    ),
    "gaussian_mean": (
        lambda: models.gaussian_mean(X, [0.5, 2.0]),
        lambda x: stats.norm.logpdf(X, x, [0.5, 2.0]),
    ),
    "log_gaussian_cox": (lambda: models.log_gaussian_cox([3, 0]), lambda x: stats.poisson.logpmf([3, 0], np.exp(x))),
    "normal_prior": (
        lambda: models.normal_prior(2, [1.0, -2.0], [0.5, 3.0]),
        lambda x: stats.norm.logpdf(x, [1.0, -2.0], [0.5, 3.0]),
    ),
    "normal_prior with cov": (
        lambda: models.normal_prior(2, [1.0, -2.0], cov=[[2.0, 0.5], [0.5, 1.0]]),
        lambda x: stats.multivariate_normal.logpdf(x, [1.0, -2.0], [[2.0, 0.5], [0.5, 1.0]]),
    ),
    "normal_prior with precision": (
        lambda: models.normal_prior(2, 0.3, precision=[[2.0, 0.5], [0.5, 1.0]]),
        lambda x: stats.multivariate_normal.logpdf(x, [0.3, 0.3], np.linalg.inv([[2.0, 0.5], [0.5, 1.0]])),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_model_is_its_minus_log_likelihood_up_to_a_constant(name):
    make, log_density = CASES[name]
    found = np.asarray(jax.jit(jax.vmap(make().value))(jnp.asarray(POINTS)))
    expected = np.array([-np.sum(log_density(x)) for x in POINTS])
    np.testing.assert_allclose(found - found[0], expected - expected[0], rtol=1e-9, atol=1e-9)


def test_a_grid_prior_couples_neighbours():
    precision = np.asarray(models.grid_prior((2, 3), alpha=0.2, beta=4.0).precision)
    cell = lambda row, column: 3 * row + column  # noqa: E731
    assert precision[cell(0, 0), cell(0, 0)] == 4.0
    assert precision[cell(0, 0), cell(0, 1)] == precision[cell(0, 0), cell(1, 0)] == -0.8
    assert precision[cell(0, 0), cell(1, 1)] == precision[cell(0, 2), cell(1, 0)] == 0.0
    np.testing.assert_array_equal(precision, precision.T)


def test_counts_of_a_grid_are_read_row_by_row():
    cells = models.log_gaussian_cox([[1, 2], [3, 4]])
    assert cells.dim == 4
    np.testing.assert_array_equal(cells.response, [1, 2, 3, 4])


def test_models_know_how_many_records_they_sum():
    assert [fp.Site(model, name="a").records for model in (
        models.logistic(X, LABELS), models.gaussian_mean(X), models.linear(X, Y), models.ar1_student_t(SERIES, 3)
    )] == [5, 5, 5, 9]  # fmt: skip
    assert "records=5" in repr(fp.Site(models.logistic(X, LABELS), name="a"))


def test_a_fixed_scale_of_one_that_the_records_speak_against_is_said(recwarn):
    rng = np.random.default_rng(5)
    design, noise = rng.normal(size=(40, 2)), rng.standard_t(4, 40)
    models.student_t(design, noise, 4.0)
    models.student_t(design, 100 * noise, 4.0, scale=100.0)
    assert not recwarn
    with pytest.warns(UserWarning, match=r"student_t\(scale\): it is fixed at 1.*Give scale="):
        models.student_t(design, 100 * noise, 4.0)
