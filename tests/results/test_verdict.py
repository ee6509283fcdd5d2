"""A run that has not converged says so first; a good one says that it has."""

import functools
import warnings

import numpy as np
import pytest
from tests.support import default_run

import fedpdmc as fp
from fedpdmc.results.diagnostics import (
    diagnose,
    effective_sizes,
    monte_carlo_error,
    nested_rhat,
    quantile_errors,
    tail_ess,
    wide_chains,
)
from fedpdmc.results.verdict import ConvergenceWarning, judge

NAMES = ["a", "b", "energy"]
SETTINGS = {"burn_in": 5.0, "duration": 20.0, "reference": "laplace"}


def autoregression(rng, chains, n, start, phi=0.9, center=0.0):
    """Stationary chains of mean zero and variance one, once they have forgotten where they started."""
    x = np.empty((chains, n, len(NAMES)))
    x[:, 0] = start
    for t in range(1, n):
        x[:, t] = phi * x[:, t - 1] + np.sqrt(1 - phi**2) * rng.normal(size=x[:, 0].shape)
    return x + center


def verdict(values, starts):
    return judge(diagnose(values, NAMES, starts), len(values), SETTINGS, 0.0)


@pytest.mark.parametrize(("chains", "n"), [(64, 200), (9, 800), (2, 3000)])
def test_stationary_chains_have_converged(chains, n):
    """However short each is: 1.01 is not what a stationary run of few effective draws has."""
    rng, statistics = np.random.default_rng(chains), []
    for _ in range(20):
        starts = rng.normal(size=(chains, 3))
        x = autoregression(rng, chains, 100 + n, starts)[:, 100:]
        found = diagnose(x, NAMES, starts)
        assert verdict(x, starts), verdict(x, starts)
        statistics.append((found.rhat**2 - 1) / (found.floor**2 - 1))
    # The floor is the mean of what a stationary run shows: of the larger of two statistics, somewhat less.
    assert 0.7 < np.mean(statistics) < 2.0


def test_modes_that_were_not_searched_for_are_said_in_the_verdict():
    rng = np.random.default_rng(3)
    starts = rng.normal(size=(64, 3))
    found = diagnose(autoregression(rng, 64, 300, starts)[:, 100:], NAMES, starts)
    over_a_network = judge(found, 64, SETTINGS | {"modes_searched": False, "study": "one"}, 0.0)
    assert over_a_network and str(over_a_network).endswith("that answer there.")
    assert "Other modes" not in str(judge(found, 64, SETTINGS, 0.0))


def test_short_chains_have_a_nested_rhat_near_one_where_the_classical_one_is_not():
    import arviz as az

    rng = np.random.default_rng(0)
    starts = rng.normal(size=(64, 3))
    x = autoregression(rng, 64, 250, starts)[:, 50:]
    assert az.rhat(x[..., 0]) > 1.03
    assert diagnose(x, NAMES, starts).rhat.max() < 1.015


def test_chains_that_remember_their_starts_are_found_however_many_there_are():
    """Groups by chance would average it away."""
    rng = np.random.default_rng(1)
    starts = 3 * rng.normal(size=(256, 3))
    x = autoregression(rng, 256, 100, np.zeros((256, 3)), phi=0.5) + 0.1 * starts[:, None]
    found = verdict(x, starts)
    assert not found and "R-hat" in found.reasons[0]
    by_chance = nested_rhat(x[..., 0], rng.normal(size=256))
    assert nested_rhat(x[..., 0], starts[:, 0]) > 1.03 > by_chance


def test_chains_stuck_in_two_modes_are_found():
    rng = np.random.default_rng(2)
    modes = rng.choice([-3.0, 3.0], size=(64, 1, 1))
    found = verdict(autoregression(rng, 64, 200, 0.0, phi=0.5) + modes, np.zeros((64, 3)))
    assert not found and any("for each chain" in reason for reason in found.reasons)


@pytest.mark.parametrize("chains", [4, 32])
def test_drift_from_the_start_is_found_though_all_chains_go_together(chains):
    rng = np.random.default_rng(3)
    x = autoregression(rng, chains, 6400 // chains, 0.0, phi=0.5)
    x += 2.0 * np.exp(-np.linspace(0, 8, x.shape[1]))[:, None]
    found = verdict(x, np.full((chains, 3), 5.0))
    assert not found and "drift" in " ".join(found.reasons) and "burn_in = 25" in found.remedies[0]


def test_what_is_kept_from_the_beginning_is_looked_at():
    rng = np.random.default_rng(4)
    x = autoregression(rng, 64, 300, 3.0, phi=0.5)
    found = verdict(x, np.full((64, 3), 3.0))
    assert not found and any("begin" in reason for reason in found.reasons)


@pytest.mark.parametrize(("burn_in", "forgotten"), [(1.0, False), (10.0, True)])
def test_a_burn_in_shorter_than_the_memory_of_chains_is_no_convergence(burn_in, forgotten):
    """Chains whose draws show nothing: they would not, if they began in a part of the posterior and stayed in it."""
    rng = np.random.default_rng(11)
    starts = rng.normal(size=(256, 3))
    found = diagnose(autoregression(rng, 256, 200, starts, phi=0.95), NAMES, starts)
    verdict = judge(found, 256, SETTINGS | {"burn_in": burn_in}, 0.0)
    assert verdict.converged == forgotten
    assert forgotten or ("units of time to forget" in str(verdict) and "burn_in = 21 or more" in verdict.remedies[0])


def test_too_few_draws_are_no_convergence():
    rng = np.random.default_rng(5)
    found = verdict(autoregression(rng, 2, 200, rng.normal(size=(2, 3))), np.zeros((2, 3)))
    assert not found and "too few" in found.reasons[-1] and "extend" in found.remedies[0]


@functools.cache
def counts():
    """A Poisson regression whose intercept is forty standard deviations from where chains start."""
    rng = np.random.default_rng(0)
    X = np.c_[np.ones(40), rng.normal(size=40)]
    return fp.Site(fp.models.poisson(X, rng.poisson(np.exp(X @ [4.0, 0.3]))), name="counts")


@pytest.mark.parametrize("dynamics", [fp.FactorisedBoomerang(), fp.ZigZag(), fp.BouncyParticle()])
def test_explicit_dynamics_in_the_parameters_own_coordinates(dynamics):
    prior = fp.models.normal_prior(2, scale=5.0)
    run = {"dynamics": dynamics, "chains": 8, "duration": 4.0, "seed": 1, "progress": False}
    with pytest.warns(ConvergenceWarning, match="^NOT converged: .*To do: .*reference='laplace'") as caught:
        post = fp.sample([counts()], prior, reference="identity", **run)
    assert {one.filename for one in caught} == {__file__}  # The user's own line.
    assert not post.verdict.converged and not post.verdict and post.verdict.reasons
    assert str(post.summary()).startswith("NOT converged: ")


def test_explicit_dynamics_are_whitened_by_default():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        post = fp.sample(
            [counts()], fp.models.normal_prior(2, scale=5.0), dynamics=fp.ZigZag(), chains=8, ess=400.0,
            seed=1, progress=False,
        )  # fmt: skip
    assert post.verdict.converged and str(post.summary()).startswith("converged: ")
    assert post.settings["reference"] == "laplace" and post.settings["control"] == "linear"
    assert abs(post.mean()[0] - 4.0) < 0.2


def test_a_good_default_run_has_converged_and_its_ess_is_not_a_count_of_draws():
    short = default_run()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        post = short.extend(ess=600.0, progress=False)
    assert post.verdict.converged and max(post.rhat().values()) < 1.03
    found = post.ess()
    assert max(found.values()) <= post.chains * post.diagnostic_draws() and found["energy"] < 0.9 * max(found.values())


def test_nothing_is_advised_that_a_spent_budget_cannot_buy():
    values = np.random.default_rng(0).standard_normal((8, 4, 1))
    found = diagnose(values, ["x"], values[:, 0])
    for spent, advised in ((0.2, "extend"), (0.99, "larger privacy budget")):
        verdict = judge(found, 8, SETTINGS | {"spent": spent}, 0.0)
        assert not verdict and len(verdict.remedies) == 1 and advised in verdict.remedies[0]


def test_draws_in_one_shot_do_not_say_that_they_converged():
    values = np.random.default_rng(0).standard_normal((64, 100, 1))
    found = diagnose(values, ["x"], values[:, 0])
    verdict = judge(found, 64, SETTINGS | {"exact": False}, 0.0)
    assert str(verdict).startswith("NOT exact, in one shot") and "converged" not in str(verdict)


def test_tail_sizes_are_those_of_arviz():
    import arviz as az

    x = autoregression(np.random.default_rng(5), 4, 1000, 0.0, phi=0.7)[..., 0]
    assert tail_ess(x) == pytest.approx(float(az.ess(x, method="tail", prob=0.9)), rel=0.05)


def test_the_error_of_a_mean_is_the_scatter_of_chains_and_that_of_a_quantile_follows():
    """Over 200 runs of 64 chains the actual errors are as said."""
    rng, found = np.random.default_rng(6), []
    for _ in range(200):
        x = autoregression(rng, 64, 40, 0.0, phi=0.8)[..., :1]
        error = monte_carlo_error(x, effective_sizes(x))[0] * x.std()
        found.append((x.mean(), error, np.quantile(x, 0.975), quantile_errors(x, 0.975)[0]))
    mean, error, quantile, quantile_error = np.array(found).T
    assert mean.std() == pytest.approx(error.mean(), rel=0.15)
    assert quantile.std() == pytest.approx(quantile_error.mean(), rel=0.2)


def test_chains_with_far_starts_that_still_show_are_found():
    """Chains whose scale is that of their start for long: neither their means nor the drift of all shows it."""
    rng, far = np.random.default_rng(7), wide_chains(256)
    x = autoregression(rng, 256, 40, 0.0, phi=0.3)
    settings = SETTINGS | {"wide_starts": True}
    still = x * (1 + 0.5 * far[:, None, None] * np.exp(-np.linspace(0, 2, 40))[:, None])
    names = ["a", "b", "energy"]
    good, bad = (diagnose(values, names, np.zeros((256, 3)), True) for values in (x, still))
    assert judge(good, 256, settings, 0.0)
    assert "started far out" in str(judge(bad, 256, settings, 0.0))


def test_false_alarms_are_rare_with_few_chains_too():
    rng, alarms = np.random.default_rng(8), 0
    for _ in range(200):
        x = autoregression(rng, 16, 60, 0.0, phi=0.3)
        alarms += not judge(diagnose(x, ["a", "b", "energy"], x[:, 0], True), 16, SETTINGS, 0.0)
    assert alarms <= 4
