"""References that are as wide as the posterior's tails, where chains start on them, and other modes."""

import warnings

import jax.numpy as jnp
import numpy as np
import pytest
from tests.support import logistic_site, prior

import fedpdmc as fp
from fedpdmc._jax.precision import double_precision
from fedpdmc.sampling import factory
from fedpdmc.sampling.arguments import Settings
from fedpdmc.sampling.defaults import SLOW_LINES_BURN_IN, choose, other_modes
from fedpdmc.sampling.laplace_reference import linear_control
from fedpdmc.sampling.mode_search import potential_values
from fedpdmc.sampling.run_cost import replace_if_unsuited
from fedpdmc.sampling.run_state_arrays import pack_reference, unpack_reference
from fedpdmc.sampling.vb_reference import MOST_TAIL, Tails, search_vb, vb

NORMAL = fp.models.normal_prior(2, scale=5.0)


def arms(sites=3, kind=fp.models.logistic):
    """Eleven of 50 events against none of 40."""
    X = np.c_[np.ones(90), np.repeat([0.0, 1.0], (50, 40))]
    y = (np.arange(90) < 11).astype(float)
    order = np.random.default_rng(0).permutation(90)
    parts = [order[k::sites] for k in range(sites)]
    return [fp.Site(kind(X[p], y[p]), name=f"site{k}") for k, p in enumerate(parts)]


@pytest.mark.parametrize("kind", [fp.models.logistic, fp.models.poisson])
def test_prior_and_control_variates_still_add_up_to_the_reference(kind):
    found = vb(arms(kind=kind), NORMAL)
    assert found.wide is not None and found.starts is not None
    precision = np.asarray(NORMAL.precision) + sum(np.asarray(c.quadratic.precision) for c in found.control.values())
    linear = sum(np.asarray(c.quadratic.linear) for c in found.control.values())
    scale = np.asarray(found.scale_tril)
    np.testing.assert_allclose(scale.T @ precision @ scale, np.eye(2), atol=1e-9)
    np.testing.assert_allclose(precision @ np.asarray(found.center) + linear, 0, atol=1e-8)


def test_it_is_wider_than_the_posterior_where_that_is_skewed_and_not_by_more_than_nine(monkeypatch):
    wide = np.asarray(vb(arms(), NORMAL).matrix)
    monkeypatch.setattr(Tails, "widens", False)
    found = vb(arms(), NORMAL)
    narrow = np.asarray(found.matrix)
    sds = [np.sqrt(np.sum(root**2, 1)) for root in (wide, narrow)]
    # The posterior's standard deviation of the effect is 2.7.
    assert sds[1][1] < 2.2 < 3.3 < sds[0][1] < np.sqrt(MOST_TAIL) * sds[1][1]
    assert found.narrow is not None and found.narrow[0] == 1 and found.narrow[1] > 3


def test_well_informed_regressions_are_not_asked_again():
    X = np.c_[np.ones(1000), np.random.default_rng(1).normal(size=(1000, 3))]
    y = (np.random.default_rng(2).random(1000) < 1 / (1 + np.exp(-X @ [0.2, 0.5, -0.5, 0.0]))).astype(float)
    found = vb([fp.Site(fp.models.logistic(X, y), name="one")], fp.models.normal_prior(4, scale=2.5))
    assert found.wide is None and found.starts is None and found.narrow is None and found.rounds <= 5


@double_precision
def test_linear_control_variates_are_the_sites_gradients_all_the_same():
    found = vb(arms(), NORMAL)
    for site in arms():
        own = found.control[site.name]
        _, gradient, _ = site.derivatives(np.asarray(own.point), np.asarray(own.spread))
        np.testing.assert_allclose(linear_control(found)[site.name].quadratic.linear, gradient, rtol=1e-6, atol=1e-6)


@double_precision
def test_what_a_run_needs_of_it_is_saved():
    found = vb(arms(), NORMAL)
    again = unpack_reference(*pack_reference(found))
    for name, own in found.control.items():
        np.testing.assert_array_equal(again.control[name].gradient, own.gradient)
        np.testing.assert_array_equal(again.control[name].quadratic.precision, own.quadratic.precision)


def test_sites_that_see_some_parameters_have_a_longer_burn_in_instead():
    sites = [logistic_site("north", coordinates=[0, 1]), logistic_site("south", coordinates=[1, 2])]
    found = vb(sites, fp.models.normal_prior(3, scale=5.0))
    assert found.wide is None and (found.narrow is None or found.narrow[1] > 1)


def test_chains_start_on_the_side_of_the_tail():
    found = vb(arms(), NORMAL)
    x = found.starts.about(np.asarray(found.center), np.random.default_rng(0).standard_normal((4000, 2)))
    away = x[:, 1] - float(found.center[1])
    assert np.quantile(-away, 0.9) > 1.5 * np.quantile(away, 0.9)


def censored_times():
    """Forty log-normal times of which four are known: the scale grows with the intercept along a curved ridge."""
    rng = np.random.default_rng(22)
    X = np.c_[np.ones(40), rng.integers(0, 2, 40)]
    time = np.exp(X @ [1.0, 0.5] + 0.6 * np.log(rng.exponential(size=40)))
    limit = rng.exponential(1.5, 40)
    model = fp.models.log_normal(X, np.minimum(time, limit), (time <= limit).astype(float))
    return [fp.Site(model, name="one")]


def heights(found):
    """Of U and of the reference at a point of the ridge beyond the 99.9 % quantile of the intercept, above the centre."""
    center, scale = np.asarray(found.center), np.asarray(found.matrix)
    point, prior_ = np.array([5.2, -1.27, 1.01]), 0.5 / 2.5**2
    value = [censored_times()[0].derivatives(x, None)[0] + prior_ * x @ x for x in (point, center)]
    away = np.linalg.solve(scale, point - center)
    return value[0] - value[1], 0.5 * away @ away


@double_precision
def test_the_reference_reaches_as_far_as_a_curved_ridge(monkeypatch):
    normal = fp.models.normal_prior(3, scale=2.5)
    rises, falls = heights(vb(censored_times(), normal))
    assert falls < rises + 2.0
    # Straight directions do not show it.
    monkeypatch.setattr(Tails, "_follow_ridges", lambda *_: None)
    rises, falls = heights(vb(censored_times(), normal))
    assert falls > rises + 6.0


@double_precision
def test_chains_start_where_rates_are_finite_on_a_posterior_unlike_its_mode(monkeypatch):
    # One death among twenty: averages of the double exponential over the Gaussian do not settle.
    rng = np.random.default_rng(61)
    X = np.c_[np.ones(20), rng.integers(0, 2, 20)]
    time, limit = np.exp(X @ [1.0, 0.5] + 0.6 * np.log(rng.exponential(size=20))), rng.exponential(0.35, 20)

    def value(x, data):
        X, time, died = data
        z = (jnp.log(time) - X @ x[:2]) * jnp.exp(-x[2])
        return jnp.sum(jnp.exp(z) - died * (z - x[2]))

    site = fp.Site(value, data=(X, np.minimum(time, limit), (time <= limit) * 1.0), name="one")
    method = choose(Settings(sites=[site], prior=fp.models.normal_prior(3, scale=2.5), ess=1000, seed=1))
    potential = method.own_sites[0].potential
    assert method.unsettled

    def highest():
        points = method.reference.to_x(np.asarray(factory.start_state(method).a))
        return float(np.max(potential_values(potential, points)))

    lowest = float(potential.value(jnp.asarray(method.reference.center)))
    assert highest() < lowest + factory.HIGHEST_START + 4
    monkeypatch.setattr(factory, "HALVINGS", 0)
    assert highest() > lowest + 1e6


def few_events():
    """Weibull times of which 27 in 30 are censored."""
    rng, died = np.random.default_rng(241), np.zeros(30)
    died[[2, 9, 20]] = 1
    arrays = np.c_[np.ones(30), np.arange(30) % 2], rng.uniform(0.5, 3.0, 30), died
    return [fp.Site(fp.models.weibull(*(x[k::2] for x in arrays)), name=f"site{k}") for k in range(2)]


@double_precision
def test_lines_on_a_reference_that_did_not_settle_have_a_longer_burn_in_than_turns():
    lines = replace_if_unsuited(
        choose(Settings(sites=few_events(), prior=fp.models.normal_prior(3, scale=2.5), ess=1000))
    )
    turns = lines.replace(dynamics=fp.Boomerang())
    assert lines.unsettled and lines.chosen
    assert lines.burn_in(None, None) == SLOW_LINES_BURN_IN > 3 * turns.burn_in(None, None)


def test_a_prior_that_is_a_site_has_no_share():
    value = lambda x: 0.5 * jnp.sum(x**2) / 25  # noqa: E731
    post = fp.sample(arms(), value, duration=1.0, burn_in=1.0, chains=4, seed=1, progress=False)
    control = post.reference.control["prior"]
    np.testing.assert_allclose(control.quadratic.precision, np.eye(2) / 25, atol=1e-6)


def two_modes(distance):
    def value(x, data):
        return (
            -jnp.logaddexp(-0.5 * (x[0] - distance) ** 2, -0.5 * (x[0] + distance) ** 2) + 0.5 * (x[1] - data[0]) ** 2
        )

    return fp.Site(value, data=np.zeros(1), name="one")


def test_a_distant_mode_is_found_and_named_and_nothing_is_converged():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        post = fp.sample([two_modes(9.0)], fp.models.normal_prior(2, scale=10.0), duration=20.0, seed=1, progress=False)
    (mode,) = post.settings["modes"]
    assert abs(abs(mode["at"][0]) - 9 / 1.01) < 0.1 and 0.4 < mode["share"] < 0.6
    assert not post.verdict and "another mode at x0 = " in str(post.verdict) and "one mode" in post.verdict.remedies[-1]


@pytest.mark.parametrize(("limit", "count"), [(20.0, 1), (0.0, 0)])
def test_another_mode_within_constraints_is_found_and_one_outside_is_not(limit, count):
    site, normal = two_modes(9.0), fp.models.normal_prior(2, scale=10.0)
    limits = (np.array([[1.0, 0.0], [-1.0, 0.0]]), np.array([limit, 20.0]))
    start = fp.Reference(np.array([-9.0, 0.0]), np.ones(2))
    assert len(other_modes([site], normal, start, limits)[0]) == count
    # Of a default call too, whose reference is the sites' own.
    inside = (np.array([[1.0, 0.0], [-1.0, 0.0]]), np.array([20.0, 20.0]))
    assert len(choose(Settings(sites=[site], prior=normal, constraints=inside)).reference.modes) == 1


def test_another_mode_is_found_however_narrow_the_reference_is():
    """A mean of unknown sign: with 650 records its modes are 125 standard deviations apart."""
    rng = np.random.default_rng(4)
    y = jnp.asarray(rng.choice([-2.5, 2.5], 650) + rng.normal(size=650))
    value = lambda x, y: -jnp.sum(jnp.logaddexp(-0.5 * (y - x[0]) ** 2, -0.5 * (y + x[0]) ** 2))  # noqa: E731
    site, normal = fp.Site(value, data=y, name="one"), fp.models.normal_prior(1, scale=2.5, mean=0.4)
    (mode,) = choose(Settings(sites=[site], prior=normal)).reference.modes
    assert abs(mode["at"][0]) > 2 and 0.3 < mode["share"] < 0.7


def test_a_search_for_modes_that_was_not_made_is_said():
    normal, given = fp.models.normal_prior(2, scale=10.0), fp.Reference(np.zeros(2), np.ones(2))
    for sites, known in [([two_modes(9.0)], False), (arms(), True)]:
        post = fp.sample(
            sites, normal, reference=given, dynamics=fp.ZigZag(), chains=16, duration=0.5, burn_in=0.1, seed=1,
            progress=False,
        )  # fmt: skip
        assert post.settings["modes_searched"] == known and bool(post.verdict.note) != known
        assert known or "reference was given" in post.verdict.note


def test_another_mode_of_a_model_file_is_found():
    function = lambda x, row: (  # noqa: E731
        -jnp.logaddexp(-0.5 * (x["m"] - 9.0) ** 2, -0.5 * (x["m"] + 9.0) ** 2) + 0.5 * (x["b"] - row["y"]) ** 2
    )
    model = fp.Model(function, title="two modes", parameters=["m", "b"], columns={"y": "real"})
    normal = fp.models.normal_prior(2, scale=10.0)
    site = fp.Site(model.of({"y": [0.0]}), name="one")
    (mode,), rounds = other_modes([site], normal, vb([site], normal))
    assert abs(abs(mode["at"][0]) - 9 / 1.01) < 0.1 and 0 < rounds <= 8


def test_a_tail_on_one_side_is_seen_where_the_mean_curvature_is_that_of_the_mode(monkeypatch):
    value = lambda x, data: 0.6 * x[0] + jnp.exp(data[0] - x[0]) + (x[1] - x[0] / 2) ** 2  # noqa: E731
    site, normal = fp.Site(value, data=np.zeros(1), name="one"), fp.models.normal_prior(2, scale=30.0)
    assert vb([site], normal).starts is not None
    # Over a network, where it is guessed, too.
    guessed = search_vb([site], normal, 1e-3, None, None, None, points=12)[0]
    assert guessed.starts is not None and guessed.narrow is None
    # The change of curvature alone does not show it.
    monkeypatch.setattr("fedpdmc.sampling.vb_reference.UNSEEN", np.inf)
    assert search_vb([site], normal, 1e-3, None, None, None, points=12)[0].starts is None
    monkeypatch.setattr("fedpdmc.sampling.vb_reference.SHIFTED_EACH", 1.0)
    assert vb([site], normal).starts is None


@double_precision
def test_the_reference_reaches_to_where_a_half_normal_tail_ends():
    # No event of the reference arm: the intercept and the effect have the prior's tail together.
    counts = ((0, 15), (9, 60))
    X = np.concatenate([np.tile([1.0, k], (n, 1)) for k, (_, n) in enumerate(counts)])
    y = np.concatenate([np.arange(n) < events for events, n in counts]).astype(float)
    reference = vb([fp.Site(fp.models.logistic(X, y), name="one")], fp.models.normal_prior(2, scale=20.0))
    sd = np.sqrt(np.sum(np.asarray(reference.matrix) ** 2, 1))
    # Along the tail the posterior is a normal density with these standard deviations, cut off.
    np.testing.assert_array_less(0.75 * 20 / np.sqrt(2), sd)
    assert reference.narrow is None


def test_one_mode_is_one_and_families_are_not_searched():
    value = lambda x, data: jnp.sum(jnp.logaddexp(0.0, data @ x)) + 0.5 * jnp.sum(x**2)  # noqa: E731
    one = fp.Site(value, data=np.random.default_rng(0).normal(size=(30, 2)), name="one")
    found = vb([one], prior())
    modes, rounds = other_modes([one], prior(), found)
    assert modes == () and 0 < rounds <= 8
    assert other_modes(arms(), NORMAL, vb(arms(), NORMAL)) == ((), 0)


def test_saved_constraints_hold_after_loading(tmp_path):
    limits = np.array([[-1.0, 0.0]]), np.array([0.0])
    options = {"constraints": limits, "duration": 3.0, "chains": 8, "seed": 1, "progress": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fp.sample([logistic_site("one")], prior(), **options).save(tmp_path / "run.zarr")
        post = fp.load(tmp_path / "run.zarr").extend(duration=30.0, sites=[logistic_site("one")], prior=prior())
    assert post.draws(200)[..., 0].min() > -1e-9
