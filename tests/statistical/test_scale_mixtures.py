"""Priors with scales of their own, Student-t and horseshoe: posteriors against quadrature, and the law of the scales."""

import functools

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import integrate, stats
from tests.statistical.checks import ALPHA, CHAINS, assert_exact, compare, t_test
from tests.statistical.targets import Truth
from tests.statistical.test_posteriors import DYNAMICS

import fedpdmc as fp
from fedpdmc._jax.precision import double_precision
from fedpdmc.models.mixture_prior import mixture_prior
from fedpdmc.potentials import ScaleLaw, ScaleMixture
from fedpdmc.potentials.bent_spread_prior import FLOOR
from fedpdmc.sampling.coordinator import Coordinator

DF, T_MEAN, T_SCALE, SLAB, GLOBAL = 3, -0.5, 0.4, 2.0, 0.3


def records():
    rng = np.random.default_rng(5)
    X = np.column_stack([np.ones(30), rng.normal(size=30)])
    return X, (rng.random(30) < 1 / (1 + np.exp(-X @ [0.8, 0.5]))).astype(float)


def prior():
    return mixture_prior([T_MEAN, 0.0], [T_SCALE, SLAB], {0: DF}, [1], GLOBAL)


@functools.cache
def truth():
    """The posterior on a grid, both priors with their scales integrated out."""
    X, y = records()
    axes = np.linspace(-3.5, 4.0, 500), np.linspace(-3.0, 4.0, 800)
    z = axes[0][:, None, None] * X[:, 0] + axes[1][None, :, None] * X[:, 1]
    value = np.sum(np.logaddexp(0, z) - y * z, -1)
    # The horseshoe is peaked at zero: its mean over each cell of the grid.
    half = (axes[1][1] - axes[1][0]) * np.linspace(-0.5, 0.5, 15)
    fine = (axes[1][:, None] + half).ravel()
    shrunk = prior().minus_log_density(np.column_stack([np.zeros(len(fine)), fine]))
    shrunk = -np.log(np.exp(-shrunk).reshape(len(axes[1]), -1).mean(1))
    value += -stats.t.logpdf(axes[0], DF, T_MEAN, T_SCALE)[:, None] + shrunk
    weights = np.exp(value.min() - value)
    return Truth(axes, weights / weights.sum())


def sampled(dynamics, duration, **told):
    X, y = records()
    sites = [fp.Site(fp.models.logistic(X[i::3], y[i::3]), name=f"site {i}") for i in range(3)]
    told = {"chains": CHAINS, "burn_in": 25.0, "init": truth().draws(CHAINS, 71), "seed": 72, "progress": False} | told
    return fp.sample(sites, prior(), dynamics=dynamics, duration=duration, **told)


@pytest.mark.parametrize(
    "dynamics", [pytest.param(d, marks=() if d == "zigzag" else pytest.mark.long) for d in DYNAMICS]
)
def test_posterior_is_exact(dynamics):
    assert_exact(sampled(DYNAMICS[dynamics], 150.0, reference="laplace"), truth(), least_ess=500)


@pytest.mark.long
def test_posterior_is_exact_with_turns_and_plans_of_many_segments():
    post = sampled(None, 300.0)
    assert post.settings["segments"] > 1 and post.certified
    assert_exact(post, truth(), least_ess=500)


def test_a_run_goes_on_to_the_same_bits_and_knows_its_prior(tmp_path):
    X, y = records()
    whole = sampled(fp.ZigZag(), 20.0, reference="laplace").extend(duration=20.0, progress=False)
    sampled(fp.ZigZag(), 20.0, reference="laplace").save(tmp_path / "post.zarr")
    sites = [fp.Site(fp.models.logistic(X[i::3], y[i::3]), name=f"site {i}") for i in range(3)]
    loaded = fp.load(tmp_path / "post.zarr")
    with pytest.raises(fp.errors.InputError, match="another prior"):
        loaded.extend(duration=20.0, sites=sites, prior=mixture_prior([0, 0], [1, 1], {0: 4}, [1], GLOBAL))
    again = loaded.extend(duration=20.0, sites=sites, prior=prior(), progress=False)
    np.testing.assert_array_equal(again.skeleton.a, whole.skeleton.a)


def test_scales_drawn_for_other_coefficients_are_caught(monkeypatch):
    right = ScaleMixture.renewed
    monkeypatch.setattr(ScaleMixture, "renewed", lambda self, scales, a, u: right(self, scales, 0.7 * a, u))
    # The compiled loop is known by its arguments: other dynamics make another one.
    wrong = sampled(fp.ZigZag(excess=0.01), 200.0, reference="laplace")
    assert compare(wrong, truth()).p.min() < ALPHA


TAILS = np.array([0.3, 0.05, 0.01, 0.002])


@functools.cache
def arm():
    """An arm without events: sites, starts in the posterior, and quantiles of its effect far out in a cubic tail."""
    rows = np.array([(1, 0, 1)] * 6 + [(1, 0, 0)] * 14 + [(1, 1, 0)] * 15, float)[
        np.random.default_rng(1).permutation(35)
    ]
    sites = [fp.Site(fp.models.logistic(rows[i::2, :2], rows[i::2, 2]), name=f"site {i}") for i in range(2)]
    level, t = np.linspace(-3.5, 2.0, 200), np.linspace(-np.arcsinh(1e5), np.arcsinh(30.0), 4000)
    effect = np.sinh(t)
    value = 20 * np.logaddexp(0, level) - 6 * level - stats.t.logpdf(level, DF, 0, 2.5)
    value = value[:, None] + 15 * np.logaddexp(0, level[:, None] + effect) - stats.t.logpdf(effect, DF, 0, 2.5)
    weights = np.exp(value.min() - value) * np.cosh(t)
    below = np.cumsum(weights.sum(0)) / weights.sum()
    chosen = np.random.default_rng(2).choice(weights.size, 8 * CHAINS, p=(weights / weights.sum()).ravel())
    return sites, np.stack([level[chosen // len(t)], effect[chosen % len(t)]], 1), np.interp(TAILS, below, effect)


def far_out(seed, **options):
    """Masses of tails of the effect, against the truth."""
    sites, starts, quantiles = arm()
    prior, options = fp.models.student_t_prior(2, DF, scale=2.5), {"burn_in": 0.0, "duration": 15.0} | options
    post = fp.sample(sites, prior, chains=len(starts), init=starts, seed=seed, progress=False, **options)
    draws = post.draws(30)[..., 1]
    # A broken run may not reach them at all.
    with np.errstate(divide="ignore", invalid="ignore"):
        return t_test([f"tail of {p:g}" for p in TAILS], (draws[..., None] < quantiles).mean(1), TAILS)


@pytest.mark.parametrize("bounce", ["reflect", pytest.param("draw", marks=pytest.mark.long)])
def test_chains_follow_a_tail_of_cubic_decay(bounce):
    found = far_out(4, bounce=bounce)
    assert found.exact, str(found)
    assert found.ess[-1] > 20 and found.ess[1] > 500, found.ess


def test_a_pace_that_velocities_do_not_have_is_caught(monkeypatch):
    monkeypatch.setattr(Coordinator, "_speeds", lambda self, scales: jnp.ones(()))
    # Other dynamics, so that it is another compiled loop.
    assert far_out(5, dynamics=fp.Boomerang(refresh=1.0), reference="vb", control="quadratic").p.min() < ALPHA


@double_precision
def renewals(law, scales, z, times, seed):
    rng = np.random.default_rng(seed)
    step = eqx.filter_jit(law.renewed)
    for _ in range(times):
        scales = step(scales, z, jnp.asarray(rng.random((law.draws, len(z)))))
    return np.asarray(scales)


@pytest.mark.parametrize("members", [0, 1, 2, 5])
@double_precision
def test_renewals_leave_the_law_of_scales_as_it_is(members):
    """From scales of the prior and coefficients given them, the scales keep their law, and move."""
    n, rng = 20_000, np.random.default_rng(members)
    law = ScaleLaw((2, 5), jnp.asarray([0.5, 2.0]), members, jnp.asarray(0.1))

    def half_cauchy(*shape):
        least = stats.halfcauchy.cdf(FLOOR)
        return stats.halfcauchy.ppf(least + (1 - least) * rng.random(shape))

    t = rng.gamma([1.0, 2.5], 1 / np.array([1.0, 2.5]), (n, 2)) / np.array([0.5, 2.0]) ** 2
    local, tau = half_cauchy(n, members) ** 2, (0.1 * half_cauchy(n, 1)) ** 2
    inner, outer = (1 + 1 / local) / rng.exponential(size=(n, members)), (100 + 1 / tau) / rng.exponential(size=(n, 1))
    scales = jnp.asarray(np.concatenate([t, local, inner, tau, outer], 1) if members else t)
    z = jnp.asarray(rng.normal(size=(n, 2 + members)) / np.sqrt(np.asarray(law.weights(scales))))
    after = renewals(law, scales, z, 3, members)
    for column in range(after.shape[1]):
        assert stats.ks_2samp(after[:, column], np.asarray(scales)[:, column]).pvalue > ALPHA, column
        assert np.mean(after[:, column] != np.asarray(scales)[:, column]) > 0.9
    # Jointly too: coefficients are standard normal in the new scales.
    standard = np.asarray(z) * np.sqrt(np.asarray(law.weights(jnp.asarray(after))))
    assert all(stats.kstest(column, "norm").pvalue > ALPHA for column in standard.T)
    # Coefficients that are not those of the scales give them away.
    other = renewals(law, scales, 2 * z, 3, members)
    assert stats.ks_2samp(other[:, 0], np.asarray(scales)[:, 0]).pvalue < ALPHA


def test_the_density_is_the_mixture_integrated():
    found = mixture_prior([0.3, 0.0, 0.0], [0.7, 1.5, 2.5], {0: 4}, [1, 2], 0.2)
    points = np.array([[0.1, 0.2, -0.4], [1.0, 0.0, 0.05], [-2.0, 1.5, 0.3]])

    log_local, log_tau = np.linspace(np.log(FLOOR), 16, 4001), np.log(0.2) + np.linspace(np.log(FLOOR), 16, 2001)

    def given_tau(z):
        local = np.exp(log_local)
        density = stats.norm.pdf(z, 0, np.exp(log_tau)[:, None] * local)
        return integrate.simpson(density * stats.halfcauchy.pdf(local) * local, x=log_local, axis=1)

    def exact(x):
        density = given_tau(x[1]) * given_tau(x[2]) * stats.halfcauchy.pdf(np.exp(log_tau), 0, 0.2) * np.exp(log_tau)
        shrunk = np.log(integrate.simpson(density, x=log_tau))
        slabs = stats.norm.logpdf(x[1], 0, 1.5) + stats.norm.logpdf(x[2], 0, 2.5)
        return -(stats.t.logpdf(x[0], 4, 0.3, 0.7) + shrunk + slabs)

    expected = np.array([exact(x) for x in points])
    value = found.minus_log_density(points)
    np.testing.assert_allclose(value - value[0], expected - expected[0], atol=2e-3)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: fp.models.student_t_prior(2, 2.5), "df"),
        (lambda: fp.models.student_t_prior(2, 3, scale=[1.0, -1.0]), "scale"),
        (lambda: fp.models.horseshoe_prior(3, 0.1, on=[1, 1]), "on"),
        (lambda: fp.models.horseshoe_prior(3, 0.0), "scale"),
        (lambda: fp.models.horseshoe_prior(3, 0.1, slab=[1.0]), "slab"),
    ],
)
def test_arguments_that_are_no_prior_are_named(call, words):
    with pytest.raises(fp.errors.InputError, match=words):
        call()
