"""Slips of the paper that code must not copy (DESIGN.md, section 7): derivatives against automatic differentiation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.statistical.targets import MODELS, target

import fedpdmc as fp
from fedpdmc._jax.precision import double_precision
from fedpdmc.potentials import Logistic, StudentT


@pytest.mark.parametrize("model", MODELS)
def test_gradients_and_hessians_are_those_of_the_likelihood(model):
    """Against central differences of the plain-NumPy likelihood, which shares nothing with the package."""
    member, x, step = target(model, 3).members[0], np.array([0.7, -0.4]), 1e-4
    _, gradient, hessian = derivatives(member, x)
    shifts = step * np.eye(2)
    numeric = [(member.records.potential(x + e) - member.records.potential(x - e)) / (2 * step) for e in shifts]
    np.testing.assert_allclose(gradient, numeric, rtol=1e-6, atol=1e-6)
    numeric = [(member.records.gradient(x + e) - member.records.gradient(x - e)) / (2 * step) for e in shifts]
    np.testing.assert_allclose(hessian, numeric, rtol=1e-6, atol=1e-6)


@double_precision
def derivatives(member, x):
    return fp.Site(member.potential, name="site").derivatives(x)


@double_precision
def by_autodiff(loss, z, y):
    """First, second and third derivative of a loss's value."""
    value = jax.grad(lambda z: loss.value(z, y))
    return [np.asarray(jax.vmap(f)(z)) for f in (value, jax.grad(value), jax.grad(jax.grad(value)))]


@double_precision
def by_hand(loss, z, y):
    return [np.asarray(f(z, jnp.full_like(z, y))) for f in (loss.first, loss.second, loss.third)]


def test_logistic_hessian_has_half_the_predictor_in_its_cosh():
    with jax.enable_x64(True):
        z = jnp.linspace(-6, 6, 401)
    (first, second, third), (ours, curvature, bound) = by_autodiff(Logistic(), z, 1.0), by_hand(Logistic(), z, 1.0)
    np.testing.assert_allclose(ours, first, atol=1e-14)
    np.testing.assert_allclose(curvature, second, atol=1e-14)
    np.testing.assert_allclose(curvature, 1 / (4 * np.cosh(np.asarray(z) / 2) ** 2), atol=1e-14)
    assert np.all(np.abs(third) <= bound)


def test_student_t_slope_is_bounded_by_the_corrected_constant():
    """``(ν+1)/(2√ν)``; the paper's ``(ν+1)√ν/(2ν²)`` agrees at ν = 1 only."""
    with jax.enable_x64(True):
        df, z = 4.0, jnp.linspace(-20, 20, 40_001)
        loss = StudentT(jnp.asarray(df), jnp.asarray(1.0))
    (first, second, third), (ours, curvature, bound) = by_autodiff(loss, z, 0.0), by_hand(loss, z, 0.0)
    np.testing.assert_allclose(ours, first, atol=1e-13)
    np.testing.assert_allclose(curvature, second, atol=1e-13)
    assert np.all(np.abs(third) <= bound)
    assert np.max(np.abs(third)) > 0.999 * np.min(bound)
    assert np.max(np.abs(first)) == pytest.approx((df + 1) / (2 * np.sqrt(df)), rel=1e-6)
    assert np.max(np.abs(first)) > (df + 1) * np.sqrt(df) / (2 * df**2)


def test_ar1_curvature_at_minus_one_is_not_zero():
    """The paper bounds the Hessian by ``(1 + y)²``, which is 0 at y = −1 where the truth has norm ``1 + y² = 2``."""
    potential = fp.models.ar1_student_t(np.array([[-1.0, 0.3]]), df=3.0)
    residual_free = np.array([0.0, 0.3])
    _, _, hessian = double_precision(fp.Site(potential, name="ar1").derivatives)(residual_free)
    curvature = (3.0 + 1) / 3.0
    np.testing.assert_allclose(np.linalg.eigvalsh(hessian), [0.0, 2.0 * curvature], atol=1e-12)


def test_the_printed_ar1_bound_lets_a_rate_rise_above_it():
    """Along ``(x, c) + t v`` the paper bounds the rate by ``λ(0) + L |v|² t`` with ``L = (ν+1)/ν Σ (1 + y)²``.

    With every y at −1 that L is zero and the bound does not move, whereas the rate grows; with ``Σ (1 + y²)`` it holds.
    """
    df, v = 4.0, np.array([-1.0, 1.0])
    series = np.array([[-1.0, -1.0, -1.0, 0.3]])
    site, before = fp.Site(fp.models.ar1_student_t(series, df=df), name="ar1"), series[:, :-1]
    start = np.array([0.0, -0.5])

    def rate(t):
        _, gradient, _ = double_precision(site.derivatives)(start + t * v)
        return np.maximum(0.0, v * gradient)

    times = np.linspace(0.0, 1.0, 101)
    rates = np.array([rate(t) for t in times])
    printed = rates[0] + (df + 1) / df * np.sum((1 + before) ** 2) * (v @ v) * times[:, None]
    corrected = rates[0] + (df + 1) / df * np.sum(1 + before**2) * (v @ v) * times[:, None]
    assert np.all(rates <= corrected)
    assert np.all(np.max(rates - printed, 0) > 0.3)


def test_the_variance_of_the_slope_has_the_second_derivative():
    """Bernoulli records with log odds x under a flat prior: ``c = −log(1 + e^x)``, and ``e^x/(1 + e^x)`` is Beta(S, N − S).

    Then ``U' = N p − S`` has variance ``S (N − S)/(N + 1)``. The paper's ``N c'²/I`` is far off; ``N c''²/I`` is right.
    """
    n, s = 10_000, 8_000
    p = s / n
    exact = s * (n - s) / (n + 1)
    first, second, information = -p, -p * (1 - p), p * (1 - p)
    assert n * second**2 / information == pytest.approx(exact, rel=1e-3)
    assert n * first**2 / information > 20 * exact


def test_the_paper_s_order_of_the_switching_rate_needs_its_own_variance():
    """Appendix B: ``E λ_fed ≤ E λ_can + σ_0 √(NM)`` with σ_0 the standard deviation of ``t(y)``, here ``y/α²``: ``1/α``.

    Section 6.1 puts ``σ_0 = αd``, which is ``d/α`` at α = 1 only; at α = ¼ its order is far below the rate.
    """
    alpha, n, sites, dim = 0.25, 48, 12, 3
    rng = np.random.default_rng(11)
    y = rng.normal(0.5, alpha, (5_000, sites, n // sites, dim))
    x = y.mean((1, 2)) + rng.normal(size=(len(y), dim)) * alpha / np.sqrt(n)
    slopes = (x[:, None] * (n // sites) - y.sum(2)) / alpha**2
    federated = np.maximum(slopes, 0).sum((1, 2))
    pooled = np.maximum(slopes.sum(1), 0).sum(1)
    error = federated.std() / np.sqrt(len(y))
    assert abs(federated.mean() - dim * np.sqrt(n * sites / (2 * np.pi)) / alpha) < 4 * error
    assert federated.mean() < pooled.mean() + dim / alpha * np.sqrt(n * sites)
    assert federated.mean() > 1.5 * (pooled.mean() + alpha * dim * np.sqrt(n * sites))
    # Z_m = (n_m/N) Σ t − Σ_m t has variance σ_0² n_m (N − n_m)/N.
    z = (y.sum((1, 2))[:, None] / sites - y.sum(2)) / alpha**2
    m = n // sites
    assert z.var() == pytest.approx(m * (n - m) / n / alpha**2, rel=4 * np.sqrt(2 / z.size))
