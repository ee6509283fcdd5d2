"""What rotations will meet is known before anything is drawn, heavy tails included, and decides what is drawn."""

import jax.numpy as jnp
import numpy as np
import pytest
from tests.support import hospitals, prior

import fedpdmc as fp
from fedpdmc._jax.precision import double_precision
from fedpdmc.sampling.arguments import Settings
from fedpdmc.sampling.defaults import choose
from fedpdmc.sampling.run_cost import (
    LEAST_COVERED,
    LEAST_SLOPE,
    LINES_EVENTS,
    flattest_tail,
    remedies,
    replace_if_unsuited,
    site_event_rate,
)

WIDE = fp.models.normal_prior(1, scale=100.0)
CAUCHY = [-1.0, 0.0, 4.0]


def site(potential):
    return [fp.Site(potential, name="one")]


def cauchy(y):
    return site(fp.models.student_t(np.ones((len(y), 1)), y, df=1.0))


def poisson(n, d, seed=0):
    rng = np.random.default_rng(seed)
    X = np.column_stack([np.ones(n), rng.normal(size=(n, d - 1))])
    y = rng.poisson(np.exp(X @ np.linspace(0.5, -0.4, d))).astype(float)
    return [fp.Site(fp.models.poisson(X[i::3], y[i::3]), name=f"site {i}") for i in range(3)]


@double_precision
def default(sites, prior_, prior_at="coordinator"):
    return choose(Settings(sites=sites, prior=prior_, prior_at=prior_at, seed=1))


@double_precision
def rate_of(method):
    return site_event_rate(method.sites, method.prior, method.control, method.reference)


def grid_of_cauchy(y, scale=100.0):
    """Points, and the posterior's weights on them."""
    x = np.sinh(np.linspace(-8.0, 8.0, 200_001))
    energy = np.log1p((x[:, None] - y) ** 2).sum(1) + 0.5 * (x / scale) ** 2
    weight = np.exp(energy.min() - energy) * np.gradient(x)
    return x, weight / weight.sum()


@pytest.mark.parametrize("y", [CAUCHY, [-1.0, 0.0, 1.5]])
def test_the_rate_of_one_parameter_is_an_integral(y):
    method = default(cauchy(y), WIDE)
    quadratic, scale = method.control["one"].quadratic, float(method.reference.matrix[0, 0])
    x, weight = grid_of_cauchy(y)
    slope = (2 * (x[:, None] - y) / (1 + (x[:, None] - y) ** 2)).sum(1)
    left = slope - float(quadratic.precision[0, 0]) * x - float(quadratic.linear[0])
    truth = scale * weight @ np.abs(left) / np.sqrt(2 * np.pi)
    assert rate_of(method) == pytest.approx(truth, rel=0.02)


def test_gaussians_meet_none_wherever_the_prior_is():
    X, normal = np.random.default_rng(0).normal(size=(20, 3)), fp.models.normal_prior(3, scale=2.0)
    linear = site(fp.models.linear(X, X.sum(1), scale=1.0))
    assert rate_of(default(linear, normal)) == pytest.approx(0.0, abs=1e-8)
    rates = [
        replace_if_unsuited(default(poisson(60, 3), normal, where)).site_event_rate
        for where in ("coordinator", "sites")
    ]
    assert rates[0] == pytest.approx(rates[1], rel=1e-6) and rates[0] > 0.01


@pytest.mark.long
@pytest.mark.parametrize(
    ("sites", "scale"), [(lambda: cauchy([-1.0, 0.0, 1.5]), 100.0), (hospitals, 0), (lambda: poisson(60, 5), 2.5)]
)
def test_runs_meet_what_was_foreseen(sites, scale):
    members = sites()
    dim = members[0].potential.dim
    own = prior() if scale == 0 else fp.models.normal_prior(dim, scale=scale)
    foreseen = rate_of(default(members, own))
    options = {"chains": 64, "burn_in": 20.0, "duration": 400.0, "seed": 1, "progress": False}
    post = fp.sample(members, own, dynamics=fp.Boomerang(refresh=1.2), **options)
    met = np.asarray(post.events) / post.duration
    error = met.std() / np.sqrt(len(met))
    # Rays are random where there is more than one parameter.
    assert abs(met.mean() - foreseen) < 4 * error + (0.02 if dim == 1 else 0.15) * foreseen


@pytest.mark.filterwarnings("ignore:This will take about")
def test_heavy_tails_are_drawn_by_zigzag_and_exactly():
    post = fp.sample(cauchy(CAUCHY), WIDE, seed=1, progress=False)
    assert isinstance(post.dynamics, fp.ZigZag) and "Zig-Zag was chosen before the burn-in" in post.settings["chosen"]
    assert post.settings["chosen"] in " ".join(str(post.summary()).split()) and post.run.given_up.rounds == 0
    assert post.rounds < 200 and post.verdict.converged
    x, weight = grid_of_cauchy(CAUCHY)
    ess, cumulated = min(post.ess().values()), np.cumsum(weight)
    draws = post.draws(200)[..., 0]
    for level in (0.05, 0.5, 0.9):
        quantile = x[np.searchsorted(cumulated, level)]
        assert abs((draws < quantile).mean() - level) < 4 * np.sqrt(level * (1 - level) / ess)
    # The test can fail: the reference's own law is narrower and elsewhere.
    sd = float(post.reference.matrix[0, 0])
    gaussian = float(post.reference.center[0]) + sd * np.random.default_rng(0).normal(size=20_000)
    above = x[np.searchsorted(cumulated, 0.9)]
    assert abs((gaussian < above).mean() - 0.9) > 4 * np.sqrt(0.09 / ess)


@pytest.mark.parametrize(
    ("sites", "own"),
    [
        (hospitals, prior),
        (lambda: poisson(60, 3), lambda: fp.models.normal_prior(3, scale=2.5)),
        (lambda: cauchy(np.random.default_rng(0).standard_cauchy(20)), lambda: WIDE),
    ],
)
def test_good_models_keep_the_few_rounds_method(sites, own):
    method = replace_if_unsuited(default(sites(), own()))
    assert isinstance(method.dynamics, fp.Boomerang) and method.chosen == ""
    assert 0 < method.site_event_rate < 0.7 * LINES_EVENTS * method.dim


def test_nobody_is_asked_where_it_would_take_long_or_the_dynamics_are_given():
    X = np.random.default_rng(0).normal(size=(80_000, 2))
    many = site(fp.models.logistic(X, (X[:, 0] > 0).astype(float)))
    assert rate_of(default(many, fp.models.normal_prior(2, scale=2.0))) is None
    said = default(cauchy(CAUCHY), WIDE).replace(open_dynamics=False)
    assert replace_if_unsuited(said) is said


def groups(x, data):
    """Effects of eight groups about a common mean: the scale may go to zero, and the density falls like its power."""
    y, power = data[:8], data[8]
    mean, log_scale, effect = x[0], x[1], x[2:]
    prior_ = 0.5 * jnp.sum(effect**2) + 0.5 * jnp.exp(2 * log_scale) - power * log_scale + 0.05 * mean**2
    return 0.5 * jnp.sum((y - mean - jnp.exp(log_scale) * effect) ** 2) + prior_


@double_precision
def flattest(method):
    return flattest_tail(method.sites, method.prior, method.control, method.reference, method.names)


def eight_groups(power):
    y = np.random.default_rng(1).normal(size=8) + 0.6 * np.random.default_rng(2).normal(size=8)
    names = ["mean", "log scale", *(f"effect {k}" for k in range(8))]
    return choose_named(fp.Site(groups, data=np.append(y, power), name="one"), names)


@double_precision
def test_lines_take_the_place_of_rotations_where_a_tail_is_flat():
    method = eight_groups(0.2)
    name, slope = flattest(method)
    assert name == "log scale" and 0 < slope < LEAST_COVERED
    better = replace_if_unsuited(method)
    assert isinstance(better.dynamics, fp.ZigZag) and "log scale" in better.chosen
    # A scale with a flat tail may be that of a horseshoe by hand.
    assert "fedpdmc.models.horseshoe_prior" in str(remedies(better))
    assert "horseshoe" not in str(remedies(method))


@double_precision
def test_rotations_stay_where_the_reference_is_as_wide_as_a_flat_tail():
    method = replace_if_unsuited(eight_groups(1.0))
    assert isinstance(method.dynamics, fp.Boomerang) and (
        method.reference.ridged or method.reference.narrow is None or method.reference.narrow[1] < 1.5
    )
    assert LEAST_COVERED < flattest(method)[1] < LEAST_SLOPE
    # The standard deviation of the log scale is 1.0: the reference is wider.
    assert np.sqrt(np.sum(np.asarray(method.reference.matrix)[1] ** 2)) > 1.1


@double_precision
def choose_named(one, names):
    return choose(Settings(sites=[one], prior=None, names=names, seed=1))


@double_precision
def test_rotations_stay_where_tails_fall_as_those_of_the_reference():
    X, y = np.random.default_rng(3).normal(size=(40, 3)), np.random.default_rng(4).normal(size=40)

    def linear(x, data):
        return 0.5 * jnp.sum((data["y"] - data["X"] @ x) ** 2)

    method = choose_named(fp.Site(linear, data={"X": X, "y": y}, name="one"), ["a", "b", "c"])
    # (6² − 3²)/(2 (6 − 3)) of a Gaussian.
    assert flattest(method)[1] == pytest.approx(4.5, rel=1e-6)
    assert isinstance(replace_if_unsuited(method).dynamics, fp.Boomerang)
