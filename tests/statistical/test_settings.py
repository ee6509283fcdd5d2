"""References, control variates, the prior's place, unlike sites and the defaults change the work, never the posterior."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.statistical.checks import CHAINS, assert_exact, features, t_test
from tests.statistical.targets import MODELS, Member, Target, mixed, on_grid, records, target, truth
from tests.statistical.test_posteriors import DURATION, DYNAMICS, sampled

import fedpdmc as fp

EVERY_DYNAMICS = pytest.mark.parametrize("dynamics", DYNAMICS)


def near(found, diagonal):
    """A public guess of the posterior that is neither its centre nor its scale."""
    scale = np.array([0.8, 1.3]) * found.sd if diagonal else np.linalg.cholesky(found.cov) @ [[1.2, 0.0], [0.4, 0.9]]
    return fp.Reference(found.mean + [0.4, -0.3] * found.sd, scale)


# For each dynamics a model that it runs every day with three sites: the compiled code is shared.
COMPILED = {
    "zigzag": "logistic",
    "zigzag-excess": "student_t",
    "bouncy": "poisson",
    "boomerang": "logistic",
    "factorised": "student_t",
}


@pytest.mark.parametrize(
    ("dynamics", "model", "diagonal"),
    [
        pytest.param(*pair, diagonal, marks=pytest.mark.long if pair[0] in ("bouncy", "factorised") else ())
        for pair, diagonal in zip(COMPILED.items(), itertools.cycle([False, True]), strict=False)
    ],
)
def test_references(dynamics, model, diagonal):
    found = truth(model, 3)
    post = sampled(model, 3, dynamics, 2 * DURATION[dynamics], reference=near(found, diagonal))
    assert_exact(post, found, least_ess=500)


@pytest.mark.long
@EVERY_DYNAMICS
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("diagonal", [False, True], ids=["dense", "diagonal"])
def test_references_on_every_model(model, dynamics, diagonal):
    found = truth(model, 3)
    post = sampled(model, 3, dynamics, 2 * DURATION[dynamics], reference=near(found, diagonal))
    assert_exact(post, found, least_ess=500)


# Every day also the defaults, below: quadratic control with the Boomerang.
EVERYDAY_CONTROLS = {
    ("linear", "poisson", "bouncy"),
}
CONTROLS = [
    pytest.param(*case, marks=() if case in EVERYDAY_CONTROLS else pytest.mark.long)
    for case in itertools.product(("linear", "quadratic"), MODELS, DYNAMICS)
]


@pytest.mark.parametrize(("control", "model", "dynamics"), CONTROLS)
def test_control_variates_on_the_laplace_reference(control, model, dynamics):
    post = sampled(model, 3, dynamics, reference="laplace", control=control)
    assert_exact(post, truth(model, 3), least_ess=500)


@pytest.mark.parametrize(
    ("prior_at", "dynamics"), [("sites", "zigzag"), pytest.param("extra", "bouncy", marks=pytest.mark.long)]
)
def test_the_prior_may_sit_anywhere(prior_at, dynamics):
    """With the coordinator it sits in all other tests."""
    assert_exact(sampled("logistic", 3, dynamics, prior_at=prior_at), truth("logistic", 3), least_ess=500)


@pytest.mark.long
@EVERY_DYNAMICS
@pytest.mark.parametrize("model", [model for model in MODELS if model != "log_gaussian_cox"])
@pytest.mark.parametrize("prior_at", ["sites", "extra"])
def test_the_prior_may_sit_anywhere_for_every_model(prior_at, model, dynamics):
    assert_exact(sampled(model, 10, dynamics, prior_at=prior_at), truth(model, 10), least_ess=500)


UNLIKE = [
    pytest.param(name, own, marks=() if name == "zigzag" and own else pytest.mark.long)
    for name in DYNAMICS
    for own in (True, False)
]


@pytest.mark.parametrize(("dynamics", "diagonal"), UNLIKE)
def test_sites_need_not_be_alike(dynamics, diagonal):
    """A logistic, a Poisson and a Student-t site on the same parameters, and one that sees only the second."""
    federation, found = mixed(), on_grid(mixed())
    post = fp.sample(
        federation.sites(), federation.prior(), dynamics=DYNAMICS[dynamics], chains=CHAINS, duration=DURATION[dynamics],
        burn_in=0.0, reference=near(found, diagonal), init=found.draws(CHAINS, 51), seed=52, progress=False,
    )  # fmt: skip
    assert_exact(post, found, least_ess=500)


def test_the_defaults_are_exact():
    """Nothing but sites and a prior: chains start anywhere, so the check leans on burn-in as a user's would."""
    federation, found = target("poisson", 3), truth("poisson", 3)
    post = fp.sample(federation.sites(), prior=federation.prior(), seed=53)
    draws = post.draws(int(2 * post.duration))
    names, values, expected = features(draws, found)
    comparison = t_test(names, values.mean(1), expected)
    assert comparison.exact, str(comparison)
    assert comparison.ess[:2].min() > 700
    assert min(post.ess().values()) > 1000


def test_sites_of_one_seed_are_independent():
    """Seeds that two owners chose alike by accident must not tie their clocks together."""
    federation, found = target("logistic", 3), truth("logistic", 3)
    sites = [fp.Site(m.potential, name=f"site{i}", seed=7) for i, m in enumerate(federation.members)]
    post = fp.sample(
        sites, federation.prior(), dynamics=fp.ZigZag(), chains=CHAINS, duration=400.0, burn_in=0.0,
        init=found.draws(CHAINS, 54), seed=7, progress=False, reference="identity",
    )  # fmt: skip
    assert_exact(post, found)


def test_a_prior_is_never_too_wide_to_count():
    """Parameters of size 1e5 under a prior of precision 1e-10, which counts as much as at size one."""
    stretch, rng = 1e5, np.random.default_rng(55)
    X = np.stack([np.ones(16), rng.normal(0.4, 1.0, 16)], 1) / stretch
    y = X @ [stretch, stretch / 2] + 1.5 * rng.normal(size=16)
    member = Member(records("gaussian", X, y, scale=1.5), fp.models.linear(X, y, 1.5))
    wide = Target((member,), np.zeros(2), np.array([[2.0, 0.3], [0.3, 1.0]]) / stretch**2)
    found = on_grid(wide)
    post = fp.sample(
        wide.sites(), wide.prior(), dynamics=fp.ZigZag(), chains=CHAINS, duration=100 * stretch, burn_in=0.0,
        init=found.draws(CHAINS, 56), seed=57, progress=False, reference="identity",
    )  # fmt: skip
    assert_exact(post, found, least_ess=500)


@pytest.mark.parametrize("dynamics", ["zigzag", "boomerang"])
def test_expectations_are_exact(dynamics):
    """Of a function that is no polynomial, by quadrature along the paths."""
    found = truth("logistic", 3)
    post = sampled("logistic", 3, dynamics)
    drawn = np.exp(-(post.draws(200)[..., 0] ** 2)).mean(1)
    expected = found.weights.sum(1) @ np.exp(-(found.axes[0] ** 2))
    comparison = t_test(["along draws"], drawn[:, None], np.array([expected]))
    assert comparison.exact, str(comparison)
    with jax.enable_x64(True):
        along = post.expectation(lambda x: jnp.exp(-(x[0] ** 2)))
    assert abs(along - expected) < 6 / np.sqrt(comparison.ess[0])
