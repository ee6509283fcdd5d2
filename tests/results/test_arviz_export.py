"""What ArviZ is given of records: densities and new responses of every family, and responses under the prior."""

from typing import Any

import arviz as az
import numpy as np
import pandas as pd
import pytest
from scipy import stats
from tests.study.test_default_prior import FAMILIES, of_family, table

import fedpdmc as fp
from fedpdmc.errors import InputError
from fedpdmc.study.study_response import Outcome


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_densities_and_new_responses(family):
    """The densities are those of the law; the observed responses are as likely as responses of the law are."""
    found = of_family(family, table())
    rng = np.random.default_rng(1)
    place = np.broadcast_to(np.asarray(found.study.prior_mean), (len(found.names),))
    x = place + rng.normal(0, 0.05, (40, len(found.names))) * np.minimum(
        np.asarray(found.study.prior_scale, float), 1.0
    )
    site = found[0]
    groups = site.responses.groups(x, True, True, rng)
    records = found.tables[site.name]
    outcome = Outcome(found.study, x, site.name)
    response = outcome.response
    scale = response.scale if response.type == "number" else 1.0
    np.testing.assert_allclose(groups["log_likelihood"], outcome.log_density(records) - np.log(scale), rtol=1e-9)
    assert groups["predictive"].shape == (len(records), 40) and groups["observed"].shape == (len(records),)
    mean = outcome.law(records).mean()
    if mean.ndim == 2 and family not in ("beta_binomial", "gamma", "weibull", "log_normal", "piecewise_exponential"):
        # The average response over records and draws, whose variance is at most that of a record over their number.
        drawn, wanted = groups["predictive"], mean * scale + (response.center if response.type == "number" else 0.0)
        assert abs((drawn - wanted).mean()) < 5 * (drawn - wanted).std() / np.sqrt(drawn.size)
        assert abs((drawn - 1.5 * wanted).mean()) > 5 * (drawn - wanted).std() / np.sqrt(drawn.size)


def test_densities_are_in_the_units_of_the_response():
    """A centred and scaled response, and one that enters by its logarithm, against SciPy."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"site": ["a", "b"] * 40, "dose": rng.normal(size=80)})
    frame["y"] = np.exp(2 + 0.3 * frame.dose + 0.5 * rng.normal(size=80))
    for log in (False, True):
        found = fp.sites(frame, by="site", formula="y ~ dose", family="linear", columns={"y": {"log": log}})
        x = rng.normal(0, 0.3, (3, 3))
        groups = found["a"].responses.groups(x, True, True, rng)
        response, records = found.study.columns["y"], found.tables["a"]
        eta = (x[:, :1] + x[:, 1:2] * records.dose.to_numpy()).T * response.scale + response.center
        law: Any = stats.norm(eta, np.exp(x[:, 2]) * response.scale)
        y = frame.y[frame.site == "a"].to_numpy()
        wanted = law.logpdf(np.log(y)[:, None]) - np.log(y)[:, None] if log else law.logpdf(y[:, None])
        np.testing.assert_allclose(groups["log_likelihood"], wanted, rtol=1e-9)
        np.testing.assert_allclose(groups["observed"], y, rtol=1e-9)
        assert (groups["predictive"] > 0).all() == log


@pytest.fixture(scope="module")
def fitted():
    rng = np.random.default_rng(1)
    frame = pd.DataFrame({"centre": np.repeat(["a", "b"], 60), "age": rng.normal(60, 10, 120)})
    frame["falls"] = rng.poisson(np.exp(0.5 + 0.03 * (frame.age - 60)))
    sites = fp.sites(frame, by="centre", formula="falls ~ age", family="poisson")
    return frame, sites, fp.sample(sites, seed=1, ess=400, progress=False)


def test_arviz_computes_loo_and_draws_checks_from_it(fitted, tmp_path):
    frame, sites, post = fitted
    data = post.to_arviz(draws=200, log_likelihood=True, posterior_predictive=True, seed=1)
    assert data.log_likelihood["falls"].shape == (4, 208, 120) == data.posterior_predictive["falls"].shape
    np.testing.assert_array_equal(data.observed_data["falls"], frame.falls)
    assert list(np.unique(data.constant_data["site"])) == ["a", "b"]
    whole = fp.assessment.assess(post, sites).loo.loc["all"]
    assert az.loo(data).elpd_loo == pytest.approx(whole["elpd"], abs=0.2)
    assert az.plot_ppc(data, num_pp_samples=10) is not None
    # The density is that of the same draw.
    eta = data.posterior["Intercept"].to_numpy() + data.posterior["age"].to_numpy() * frame.age[5]
    np.testing.assert_allclose(data.log_likelihood["falls"][..., 5], stats.poisson.logpmf(frame.falls[5], np.exp(eta)))
    post.save(tmp_path / "post.zarr")
    loaded = fp.load(tmp_path / "post.zarr")
    with pytest.raises(InputError, match="Records stay at their sites: use fedpdmc.assessment.assess"):
        loaded.to_arviz(log_likelihood=True)
    again = loaded.to_arviz(draws=200, log_likelihood=True, sites=sites)
    np.testing.assert_allclose(again.log_likelihood["falls"], data.log_likelihood["falls"])
    np.testing.assert_allclose(again.posterior["age"], data.posterior["age"])


def test_records_that_have_no_law_or_do_not_fit_are_refused(fitted, monkeypatch):
    monkeypatch.setattr("fedpdmc.results.arviz_export.MOST_NUMBERS", 1000)
    with pytest.raises(InputError, match="Ask for at most 8 draws"):
        fitted[2].to_arviz(log_likelihood=True)
    site = fp.Site(fp.models.gaussian_mean(np.ones((9, 2))), name="a")
    post = fp.sample(site, chains=2, duration=4.0, burn_in=1.0, seed=1, progress=False)
    with pytest.raises(InputError, match="'a', which is not from a table"):
        post.to_arviz(posterior_predictive=True)


def test_a_posterior_from_disk_has_the_summary_of_the_one_in_memory(fitted, tmp_path):
    _, _, post = fitted
    assert post.transformed and post.store.turns
    post.save(tmp_path / "post.zarr")
    pd.testing.assert_frame_equal(fp.load(tmp_path / "post.zarr").summary(), post.summary())


def test_responses_under_the_prior(fitted):
    frame, sites, _ = fitted
    data = sites.prior_predictive(400, seed=1)
    assert data.prior_predictive["falls"].shape == (1, 400, 120) and set(data.prior.data_vars) == {"Intercept", "age"}
    np.testing.assert_array_equal(data.observed_data["falls"], frame.falls)
    sd = sites.study.prior_scale[1] / sites.study.columns["age"].scale
    assert float(data.prior["age"].std()) == pytest.approx(sd, rel=0.15)
    same = fp.prior_predictive(sites, 400, seed=1)
    np.testing.assert_array_equal(data.prior_predictive["falls"], same.prior_predictive["falls"])
    flat = fp.sites(frame, by="centre", formula="falls ~ age", family="poisson", prior="flat")
    with pytest.raises(InputError, match="found list"):
        fp.prior_predictive(list(sites))
    with pytest.raises(InputError, match="a flat one"):
        flat.prior_predictive()
    groups = frame.assign(ward=np.arange(120) % 7)
    effects = fp.sites(groups, by="centre", formula="falls ~ age + (1 | ward)", family="poisson")
    with pytest.raises(InputError, match="effects of groups"):
        effects.prior_predictive()


@pytest.mark.parametrize("words", ["student_t(3, 1, 2)", "horseshoe(0.5, 1.5)"])
def test_draws_of_a_prior_have_its_density(fitted, words):
    """Kolmogorov's distance from the density that the sampler walks with; a horseshoe without its slab is far from it."""
    told = {"age": words, "others": "normal(0, 1)"}
    sites = fp.sites(fitted[0], by="centre", formula="falls ~ age", family="poisson", prior=told)
    rule, potential = sites._prior, sites.prior
    n, grid = 20_000, np.sinh(np.linspace(-7, 7, 8001))
    draws = rule.draws(n, np.random.default_rng(0))[:, 1]
    x = np.column_stack([np.zeros(len(grid)), grid])
    density = np.exp(-potential.minus_log_density(x))
    mass = np.concatenate([[0], np.cumsum(0.5 * (density[1:] + density[:-1]) * np.diff(grid))])
    cdf = mass / mass[-1]
    assert stats.kstest(draws, lambda z: np.interp(z, grid, cdf)).pvalue > 1e-3
    if words.startswith("horseshoe"):
        rng = np.random.default_rng(1)
        loose = rng.standard_normal(n) * 0.5 * np.abs(rng.standard_cauchy(n) * rng.standard_cauchy(n))
        assert stats.kstest(loose, lambda z: np.interp(z, grid, cdf)).pvalue < 1e-6
