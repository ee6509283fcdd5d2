"""Weights of records in every family: integers are numbers of equal records; trials are weights of a Bernoulli record."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedpdmc as fp
from fedpdmc.errors import InputError
from fedpdmc.models.user_function import derivatives_of
from fedpdmc.potentials import RandomEffects

N, M = 30, fp.models
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, 3))
TIMES = RNG.integers(0, 4, N)
ONES, COUNT, REAL = RNG.integers(0, 2, N), RNG.poisson(2.0, N), RNG.normal(size=N)
POSITIVE, SHARE, LEVEL = RNG.gamma(2.0, 1.0, N), RNG.beta(2, 2, N), RNG.integers(0, 3, N)
WARD = np.arange(N) % 4
# Each builds the model of some columns.
FAMILIES = {
    "gaussian_mean": ((X,), lambda X, **w: M.gaussian_mean(X, [1.0, 2.0, 0.5], **w)),
    "linear": ((X, REAL), M.linear),
    "linear of known scale": ((X, REAL), lambda X, y, **w: M.linear(X, y, 1.3, **w)),
    "logistic": ((X, ONES), M.logistic),
    "poisson": ((X, COUNT, POSITIVE), lambda X, y, at_risk, **w: M.poisson(X, y, exposure=at_risk, **w)),
    "student_t": ((X, REAL), lambda X, y, **w: M.student_t(X, y, 3.5, 1.1, **w)),
    "ar1_student_t": ((X,), lambda X, **w: M.ar1_student_t(X, 3.5, **w)),
    "negative_binomial": ((X, COUNT), M.negative_binomial),
    "gamma": ((X, POSITIVE), M.gamma),
    "beta": ((X, SHARE), M.beta),
    "weibull": ((X, POSITIVE, ONES), M.weibull),
    "log_normal": ((X, POSITIVE, ONES), M.log_normal),
    "piecewise_exponential": ((X, POSITIVE, ONES), lambda *c, **w: M.piecewise_exponential(*c, [1.0, 2.0], **w)),
    "ordered_logit": ((X, LEVEL), lambda *c, **w: M.ordered_logit(*c, 3, **w)),
    "ordered_probit": ((X, LEVEL), lambda *c, **w: M.ordered_probit(*c, 3, **w)),
    "multinomial_logit": ((X, LEVEL), lambda *c, **w: M.multinomial_logit(*c, 3, **w)),
    "zero_inflated_poisson": ((X, COUNT), M.zero_inflated_poisson),
    "beta_binomial": ((X, COUNT, LEVEL), M.beta_binomial),
    "weibull with effects": ((X, POSITIVE, ONES, WARD), lambda *c, **w: M.with_effects(M.weibull(*c[:3], **w), c[3])),
}
OPTIONS = {"negative_binomial": {"size": 2.5}, "student_t": {"df": 3.5, "scale": 0.6}}
for name, y in (
    ("logistic", ONES),
    ("poisson", COUNT),
    ("linear", REAL),
    ("negative_binomial", COUNT),
    ("student_t", REAL),
):
    own = {"family": name, **OPTIONS.get(name, {})}
    FAMILIES[f"{name} with effects"] = (X, y, WARD), lambda *c, own=own, **w: M.random_effects(*c, **own, **w)


def of(model):
    """Value, gradient and Hessian at a point, and their means about it."""
    potential = fp.Site(model, name="site").potential
    x = jnp.linspace(-0.3, 0.5, potential.dim)
    # Where effects are integrated out, a mean is one over points.
    spreads = (None,) if isinstance(potential, RandomEffects) else (None, 0.1 * jnp.eye(potential.dim))
    return [np.asarray(part) for spread in spreads for part in derivatives_of(potential, x, spread)]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if "with effects" in name[9:] else name for name in FAMILIES]
)
def test_integer_weights_are_repeated_records(name):
    columns, build = FAMILIES[name]
    with jax.enable_x64(True):
        weighted = of(build(*columns, weights=TIMES.astype(float)))
        repeated = of(build(*(np.repeat(column, TIMES, 0) for column in columns)))
        # A test that cannot fail is none: other weights have other derivatives.
        other = of(build(*columns, weights=TIMES + 1.0))
    for one, two, three in zip(weighted, repeated, other, strict=True):
        np.testing.assert_allclose(one, two, rtol=0, atol=1e-12 * (1 + np.abs(two).max()))
        assert np.abs(one - three).max() > 1e-3 * np.abs(one).max()


@pytest.mark.parametrize("groups", [None, WARD])
def test_trials_are_as_many_records_of_zeros_and_ones(groups):
    trials = TIMES + 1
    events = np.minimum(COUNT, trials)
    rows = np.repeat(np.arange(N), trials)
    ones = np.concatenate([np.arange(n) < y for n, y in zip(trials, events, strict=True)]).astype(float)
    with jax.enable_x64(True):
        if groups is None:
            one, other = M.logistic(X, events, trials=trials), M.logistic(X[rows], ones)
        else:
            one = M.random_effects(X, events, groups, trials=trials)
            other = M.random_effects(X[rows], ones, groups[rows])
        for found, expected in zip(of(one), of(other), strict=True):
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12 * (1 + np.abs(expected).max()))


@pytest.mark.parametrize(
    ("weights", "words"),
    [(np.ones(N - 1), "one weight for each"), (np.where(WARD == 1, -1.0, 1.0), "-1 at index 1"),
     (np.where(WARD == 2, np.inf, 1.0), "finite"), (np.where(WARD == 2, np.nan, 1.0), "finite")],
)  # fmt: skip
@pytest.mark.parametrize("name", ["linear", "logistic", "weibull", "poisson with effects"])
def test_weights_that_are_none_are_refused(name, weights, words):
    columns, build = FAMILIES[name]
    with pytest.raises(InputError, match=words):
        build(*columns, weights=weights)


@pytest.mark.parametrize(
    ("y", "trials", "words"),
    [(COUNT, np.ones(N), "at most as many events"), (ONES, ONES + 0.5, "whole numbers"), (SHARE, ONES + 1, "whole"),
     (ONES, -ONES, "at least zero")],
)  # fmt: skip
def test_trials_that_are_none_are_refused(y, trials, words):
    for build in (M.logistic, M.random_effects):
        with pytest.raises(InputError, match=words):
            build(X, y, trials=trials)
    with pytest.raises(InputError, match=r"trials.*family='poisson'"):
        M.random_effects(X, COUNT, family="poisson", trials=TIMES)


def test_records_without_weight_or_trials_add_nothing():
    some = np.where(WARD == 0, 0.0, 1.5)
    with jax.enable_x64(True):
        whole, part = (of(M.logistic(X[k], ONES[k], weights=some[k])) for k in (slice(None), WARD > 0))
        trials = of(
            M.logistic(X, np.where(WARD == 0, 0, ONES), trials=(WARD > 0).astype(float), weights=np.full(N, 1.5))
        )
    for one, two, three in zip(whole, part, trials, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(one, three, rtol=1e-12, atol=1e-12)
