"""The search for the mode: parameters of any units, what is said where there is none, and functions of the wrong sign."""

import jax.numpy as jnp
import numpy as np
import pytest
from tests.study.contracts import CONTRACT
from tests.zoo import CASES

import fedpdmc as fp
from fedpdmc.errors import ImproperPosterior, InputError, ModeNotFound, NoMode
from fedpdmc.sampling import mode_search
from fedpdmc.sampling.mode_search import check_rays
from fedpdmc.study import parse_study

RNG = np.random.default_rng(1)
INCOME, AGE = RNG.normal(6e4, 2e4, 120), RNG.normal(50.0, 10.0, 120)
LINEAR = -1.0 + 2e-5 * INCOME - 0.01 * AGE
UNITS = np.array([1.0, 1e5, 10.0])
DESIGN = np.column_stack([np.ones(120), INCOME, AGE])
MODELS = {
    "logistic": lambda X: fp.models.logistic(X, RESPONSES["logistic"]),
    "poisson": lambda X: fp.models.poisson(X, RESPONSES["poisson"]),
    "linear": lambda X: fp.models.linear(X, RESPONSES["linear"]),
}
RESPONSES = {
    "logistic": (RNG.random(120) < 1 / (1 + np.exp(-LINEAR))).astype(float),
    "poisson": RNG.poisson(np.exp(LINEAR)),
    "linear": 2e5 * LINEAR + 3e4 * RNG.normal(size=120),
}


@pytest.mark.parametrize("name", MODELS)
def test_covariates_of_any_size_give_the_same_mode_and_curvature_in_as_many_rounds(name):
    raw, scaled = (fp.laplace([fp.Site(MODELS[name](X), name="a")]) for X in (DESIGN, DESIGN / UNITS))
    units = UNITS if name != "linear" else np.append(UNITS, 1.0)
    assert raw.rounds == scaled.rounds <= 12
    np.testing.assert_allclose(np.asarray(raw.center) * units, scaled.center, rtol=1e-5, atol=1e-8)
    np.testing.assert_allclose(np.asarray(raw.scale_tril) * units[:, None], scaled.scale_tril, rtol=1e-4, atol=1e-9)


def test_a_covariate_of_size_1e5_is_sampled_as_the_scaled_one_is():
    found = []
    for X in (DESIGN, DESIGN / UNITS):
        sites = [fp.Site(fp.models.logistic(X[k::2], RESPONSES["logistic"][k::2]), name=f"{k}") for k in range(2)]
        found.append(fp.sample(sites, duration=4.0, burn_in=1.0, chains=8, seed=3, progress=False))
    raw, scaled = found
    sd = np.sqrt(np.diag(scaled.cov()))
    # The same path but for rounding, which reflections amplify.
    np.testing.assert_allclose(raw.mean() * UNITS / sd, scaled.mean() / sd, atol=1e-3)
    np.testing.assert_allclose(np.sqrt(np.diag(raw.cov())) * UNITS, sd, rtol=1e-3)


SEPARABLE = (np.array([[1.0, -2.0], [1.0, -1.0], [1.0, 1.0], [1.0, 2.0]]), np.array([0.0, 0.0, 1.0, 1.0]))


def centred(x):
    """Means ``x[2:]`` about ``x[0]`` with scale ``e^{x[1]}``, which has a proper prior."""
    tau = jnp.exp(x[1])
    return 0.5 * (x[0] / 5) ** 2 + 0.5 * tau**2 - x[1] + 0.5 * jnp.sum(((x[2:] - x[0]) / tau) ** 2) + 3 * x[1]


def of_means(x, data):
    return 0.5 * jnp.sum((data["y"] - x[2:]) ** 2)


def test_a_centred_hierarchy_has_no_mode_and_is_not_called_improper():
    site = fp.Site(of_means, data={"y": np.array([0.1, -0.2, 0.3])}, name="a")
    with pytest.raises(NoMode, match="non-centred") as caught:
        fp.laplace([site], centred, start=np.zeros(5))
    assert "improper" not in str(caught.value)


def test_separable_data_are_improper_under_a_flat_prior_only():
    site = fp.Site(fp.models.logistic(*SEPARABLE), name="a")
    with pytest.raises(ImproperPosterior, match="flat prior"):
        fp.laplace([site])
    assert fp.laplace([site], fp.models.normal_prior(2, scale=5.0)).rounds < 12


def test_parameters_without_a_mode_are_told_by_their_names():
    site = fp.Site(fp.models.logistic(*SEPARABLE), name="a")
    with pytest.raises(ImproperPosterior, match="mostly in parameter 'dose': the posterior is improper"):
        fp.sample([site], names=["base", "dose"], progress=False)
    with pytest.raises(ImproperPosterior, match="mostly in parameter 'dose'"):
        fp.laplace([site], names=["base", "dose"])
    with pytest.raises(ImproperPosterior, match=r"mostly in parameter 1 \(counted from 0\)"):
        fp.sample([site], progress=False)
    with pytest.raises(InputError, match="names: found 1 names"):
        fp.laplace([site], names=["base"])


def test_collinear_parameters_are_told_by_their_names():
    X = np.column_stack([np.ones(120), AGE / 10, -0.2 * AGE])
    site = fp.Site(fp.models.logistic(X, RESPONSES["logistic"]), name="a")
    with pytest.raises(ImproperPosterior, match="flat in parameters '(age', 'days|days', 'age)':"):
        fp.laplace([site], names=["base", "age", "days"])


def test_a_search_without_an_end_tells_the_parameters_by_their_names(monkeypatch):
    site = fp.Site(of_means, data={"y": np.array([0.1, -0.2, 0.3])}, name="a")
    with pytest.raises(NoMode, match=r"the curvature keeps growing in parameters 'mu', 'a', 'b' and 1 more:"):
        fp.laplace([site], centred, start=np.zeros(5), names=["mu", "log_tau", "a", "b", "c"])
    monkeypatch.setattr(mode_search, "MOST_ROUNDS", 3)
    site = fp.Site(MODELS["poisson"](DESIGN), name="a")
    with pytest.raises(ModeNotFound, match="the last step is longest in parameters 'income', 'base', 'age'"):
        fp.laplace([site], fp.models.normal_prior(3, scale=10.0), names=["base", "income", "age"])


def test_a_study_tells_parameters_by_the_names_of_its_contract(tmp_path):
    contract = CONTRACT.replace("mean = 0.1\nscale = 1.5", "flat = true") + "derivatives = 20\n"
    study = parse_study(contract.encode())
    data = {name: tmp_path / f"{name}.csv" for name in study.sites}
    for path in data.values():
        path.write_text("ill,drug,age\n" + "no,placebo,40\nno,verum,50\nyes,placebo,60\nyes,verum,70\n" * 3)
    with fp.connect(study, data=data, seed=1) as connection:
        with pytest.raises(ImproperPosterior, match="'age'"):
            fp.sample(connection, progress=False)


def test_an_iteration_limit_is_not_taken_for_anything_else(monkeypatch):
    monkeypatch.setattr(mode_search, "MOST_ROUNDS", 3)
    site = fp.Site(MODELS["poisson"](DESIGN), name="a")
    with pytest.raises(ModeNotFound, match="start=") as caught:
        fp.laplace([site], fp.models.normal_prior(3, scale=10.0))
    assert "improper" not in str(caught.value) and "no mode after 3 rounds" in str(caught.value)


def site_and_prior(case, likelihood=1.0, prior=1.0):
    """All records at one site; the signs of both functions."""
    site = fp.Site(lambda x, data: likelihood * case.likelihood(x, data), data=case.data(), name="all")
    return site, lambda x: prior * case.prior(x)


@pytest.mark.parametrize("name", CASES)
def test_no_false_alarm(name):
    case = CASES[name]
    site, prior = site_and_prior(case)
    assert fp.laplace([site], prior, start=case.start).rounds < mode_search.MOST_ROUNDS


FEW = ("softmax", "michaelis_menten", "banana")


@pytest.mark.parametrize("name", [pytest.param(k, marks=[] if k in FEW else pytest.mark.long) for k in CASES])
def test_a_log_likelihood_is_found(name):
    case = CASES[name]
    site, prior = site_and_prior(case, likelihood=-1.0)
    with pytest.raises(InputError, match=r"sites \('all'\).*MINUS the log likelihood.*from_logdensity"):
        fp.laplace([site], prior, start=case.start)


def heavy(x, data):
    """Cauchy errors, minus the log likelihood."""
    return jnp.sum(jnp.log1p((data - x[0]) ** 2))


def test_heavy_tails_far_from_the_start_are_no_false_alarm():
    check_rays([fp.Site(heavy, data=np.array([999.0, 1000.0, 1002.0]), name="a").sized(1)], np.zeros(1), np.eye(1))


def test_a_bad_place_of_a_change_point_is_no_false_alarm():
    """Far out on both sides nothing changes any more, and both may be better than where the search begins."""

    def changed(x, t):
        return jnp.sum(0.3 * (t - jnp.where(t < x[0], 1.0, -0.5)) ** 2)

    site = fp.Site(changed, data=np.array([-2.0, -1.0, 0.0, 0.5, 2.0]), name="a").sized(1)
    check_rays([site], np.array([0.2]), np.eye(1))


def test_a_log_likelihood_is_found_where_no_mode_is_looked_for():
    case = CASES["probit"]
    site, _ = site_and_prior(case, likelihood=-1.0)
    options = {"dynamics": fp.ZigZag(), "reference": "identity", "init": case.start, "progress": False}
    with pytest.raises(InputError, match="MINUS"):
        fp.sample([site], fp.models.normal_prior(3), **options)


def test_a_log_prior_and_a_density_with_a_minus_are_found():
    case = CASES["weibull"]
    site, prior = site_and_prior(case, prior=-1.0)
    with pytest.raises(InputError, match=r"^prior: .*minus the log of the prior"):
        fp.laplace([site], prior, start=case.start)
    model = fp.models.from_logdensity(case.likelihood, case.data())
    gaussian = fp.models.normal_prior(case.dim, mean=case.mean, precision=case.precision)
    with pytest.raises(InputError, match="takes the log density itself"):
        fp.sample([fp.Site(model, name="a")], gaussian, progress=False)
