"""The standard library of families against SciPy, record by record."""

import jax
import numpy as np
import pytest
from scipy import stats

import fedpdmc as fp
from fedpdmc._jax.precision import double_precision
from fedpdmc.errors import InputError

RNG = np.random.default_rng(5)
N, CUTS = 12, np.array([0.7, 1.5])
X = np.concatenate([np.ones((N, 1)), RNG.normal(size=(N, 2))], 1)
Z = X[:, 1:]
COUNT, POSITIVE, DIED = RNG.poisson(2.0, N), RNG.gamma(2.0, 0.6, N), RNG.integers(0, 2, N)
SHARE, LEVEL, BAD = RNG.beta(2, 3, N), RNG.integers(0, 4, N), RNG.poisson(1.5, N)


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def negative_binomial(x):
    mean, phi = np.exp(X @ x[:3]), np.exp(x[3])
    return stats.nbinom.logpmf(COUNT, phi, phi / (phi + mean))


def gamma(x):
    shape = np.exp(x[3])
    return stats.gamma.logpdf(POSITIVE, shape, scale=np.exp(X @ x[:3]) / shape)


def beta(x):
    mean, phi = sigmoid(X @ x[:3]), np.exp(x[3])
    return stats.beta.logpdf(SHARE, mean * phi, (1 - mean) * phi)


def survival(law):
    return DIED * law.logpdf(POSITIVE) + (1 - DIED) * law.logsf(POSITIVE)


def weibull(x):
    return survival(stats.weibull_min(np.exp(x[3]), scale=np.exp(X @ x[:3])))


def log_normal(x):
    return survival(stats.lognorm(np.exp(x[3]), scale=np.exp(X @ x[:3])))


def piecewise_exponential(x):
    hazard = np.exp(x[2:])[None] * np.exp(Z @ x[:2])[:, None]
    edges = np.array([0.0, *CUTS, np.inf])
    spent = np.array([[max(min(t, b) - a, 0.0) for a, b in zip(edges[:-1], edges[1:], strict=True)] for t in POSITIVE])
    here = np.searchsorted(CUTS, POSITIVE)
    return DIED * np.log(hazard[np.arange(N), here]) - (spent * hazard).sum(1)


def ordered(cdf):
    def log_probability(x):
        cuts = np.array([-np.inf, x[2], *(x[2] + np.cumsum(np.exp(x[3:]))), np.inf])
        eta = Z @ x[:2]
        return np.log(cdf(cuts[LEVEL + 1] - eta) - cdf(cuts[LEVEL] - eta))

    return log_probability


def multinomial_logit(x):
    eta = np.concatenate([np.zeros((N, 1)), X @ x.reshape(3, 3).T], 1)
    return eta[np.arange(N), LEVEL] - np.log(np.exp(eta).sum(1))


def zero_inflated_poisson(x):
    zero, mean = sigmoid(x[3]), np.exp(X @ x[:3])
    return np.log(np.where(COUNT == 0, zero, 0.0) + (1 - zero) * stats.poisson.pmf(COUNT, mean))


def beta_binomial(x):
    mean, phi = sigmoid(X @ x[:3]), np.exp(x[3])
    return stats.betabinom.logpmf(COUNT, COUNT + BAD, mean * phi, (1 - mean) * phi)


M = fp.models
CASES = {
    "negative_binomial": (M.negative_binomial, (X, COUNT), negative_binomial),
    "gamma": (M.gamma, (X, POSITIVE), gamma),
    "beta": (M.beta, (X, SHARE), beta),
    "weibull": (M.weibull, (X, POSITIVE, DIED), weibull),
    "log_normal": (M.log_normal, (X, POSITIVE, DIED), log_normal),
    "piecewise_exponential": (M.piecewise_exponential, (Z, POSITIVE, DIED, CUTS), piecewise_exponential),
    "ordered_logit": (M.ordered_logit, (Z, LEVEL, 4), ordered(stats.logistic.cdf)),
    "ordered_probit": (M.ordered_probit, (Z, LEVEL, 4), ordered(stats.norm.cdf)),
    "multinomial_logit": (M.multinomial_logit, (X, LEVEL, 4), multinomial_logit),
    "zero_inflated_poisson": (M.zero_inflated_poisson, (X, COUNT), zero_inflated_poisson),
    "beta_binomial": (M.beta_binomial, (X, COUNT, BAD), beta_binomial),
}


@pytest.mark.parametrize(("make", "data", "expected"), CASES.values(), ids=CASES)
@double_precision
def test_a_family_is_its_distribution(make, data, expected):
    """Record by record, up to what does not depend on the parameters."""
    model = make(*data)
    points = np.random.default_rng(1).normal(0, 0.5, (4, model.dim))
    terms = jax.jit(lambda x: model.function.terms(x, model.data))
    found = np.array([terms(x) for x in points])
    right = -np.array([expected(x) for x in points])
    np.testing.assert_allclose(found - found[0], right - right[0], rtol=1e-9, atol=1e-10)


def test_coordinates_and_variables_are_named():
    model = M.weibull(X, POSITIVE, DIED)
    assert model.names == ("beta[0]", "beta[1]", "beta[2]", "log_shape")
    found = model.constrain(np.array([0.1, 0.2, 0.3, 0.5]))
    assert list(found) == ["beta[0]", "beta[1]", "beta[2]", "shape"] and np.isclose(found["shape"], np.exp(0.5))
    cuts = M.ordered_logit(Z, LEVEL, 4).constrain(np.array([0.1, 0.2, -1.0, 0.0, np.log(2.0)]))["cut_points"]
    np.testing.assert_allclose(cuts, [-1.0, 0.0, 2.0])
    assert M.multinomial_logit(X[:, :2], LEVEL, 4).names[-1] == "beta[2,1]"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: M.weibull(X, -POSITIVE, DIED), "positive"),
        (lambda: M.weibull(X, POSITIVE, DIED + 0.5), "zeros and ones"),
        (lambda: M.weibull(X, POSITIVE[:3], DIED), "numbers of records"),
        (lambda: M.beta(X, SHARE + 1), "between 0 and 1"),
        (lambda: M.ordered_logit(Z, LEVEL, 3), "0 to 2"),
        (lambda: M.ordered_logit(Z, LEVEL, 1), "levels"),
        (lambda: M.piecewise_exponential(Z, POSITIVE, DIED, [2.0, 1.0]), "increasing"),
        (lambda: M.gamma("text", POSITIVE), "not numeric"),
        (lambda: M.gamma(X * np.nan, POSITIVE), "finite"),
    ],
)
def test_bad_arguments_are_named(call, words):
    with pytest.raises(InputError, match=words):
        call()
