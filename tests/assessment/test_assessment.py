"""Assessments at the sites against the same of pooled records, and against exact answers."""

import json
import signal

import arviz as az
import numpy as np
import pandas as pd
import pytest
from scipy import stats
from scipy.special import logsumexp

import fedpdmc as fp
from fedpdmc._jax.precision import double_precision
from fedpdmc.assessment.all_sites import Assessment, prior_pull
from fedpdmc.assessment.at_site import PublicDraws, SiteAssessment, assess_site
from fedpdmc.assessment.loo import pass_over, totals
from fedpdmc.console.interrupts import Interrupted, check
from fedpdmc.errors import InputError
from fedpdmc.study.sites_from_table import sites
from fedpdmc.study.study_response import Outcome

SD, PRIOR_SD = 2.0, 3.0


def gaussian_study(seed=0, shift=0.0, n=90):
    """A linear regression with known scale, whose posterior is known: ``sites``, X, y, mean and covariance."""
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({"centre": np.repeat(["a", "b", "c"], [n // 2, n // 3, n - n // 2 - n // 3])})
    frame["dose"] = rng.normal(size=n)
    frame["y"] = 1.0 - 0.7 * frame.dose + SD * rng.normal(size=n) + shift * (frame.centre == "c")
    found = sites(frame, by="centre", formula="y ~ dose", family="linear", scale=SD, standardize=False,
                  prior=f"normal(0, {PRIOR_SD})")  # fmt: skip
    return found, frame


def exact(frame):
    X = np.column_stack([np.ones(len(frame)), frame.dose])
    precision = X.T @ X / SD**2 + np.eye(2) / PRIOR_SD**2
    cov = np.linalg.inv(precision)
    return cov @ (X.T @ frame.y.to_numpy() / SD**2), cov


def draws_of(found, frame, size=4000, seed=5):
    mean, cov = exact(frame)
    values = np.random.default_rng(seed).multivariate_normal(mean, cov, size)
    return PublicDraws(values, found.names, 1.0)


def assessed(found, draws, **told):
    return Assessment(
        [assess_site(found.study, name, table, draws, **told) for name, table in found.tables.items()],
        prior_pull(found, draws),
    )


def test_loo_and_waic_are_those_of_pooled_records():
    found, frame = gaussian_study()
    draws = draws_of(found, frame)
    density = np.concatenate([Outcome(found.study, draws.values).log_density(t) for t in found.tables.values()])
    data = az.from_dict(posterior={"x": draws.values[None]}, log_likelihood={"y": density.T[None]})
    pooled, waic = az.loo(data, reff=1.0), az.waic(data)
    whole = assessed(found, draws).loo.loc["all"]
    assert whole["elpd"] == pytest.approx(pooled.elpd_loo, rel=1e-9)
    assert whole["se"] == pytest.approx(pooled.se, rel=0.01)  # ArviZ divides by n, not n − 1
    assert whole["parameters"] == pytest.approx(pooled.p_loo, rel=1e-6)
    assert whole["waic"] == pytest.approx(waic.elpd_waic, rel=1e-3)


def test_loo_is_the_exact_left_out_density():
    found, frame = gaussian_study()
    X, y = np.column_stack([np.ones(len(frame)), frame.dose]), frame.y.to_numpy()
    total = 0.0
    for i in range(len(y)):
        mean, cov = exact(frame.drop(index=i))
        total += stats.norm.logpdf(y[i], X[i] @ mean, np.sqrt(SD**2 + X[i] @ cov @ X[i]))
    assert assessed(found, draws_of(found, frame)).loo.loc["all", "elpd"] == pytest.approx(total, abs=0.05)


def test_the_posterior_without_a_site_is_that_of_the_others():
    found, frame = gaussian_study()
    table = assessed(found, draws_of(found, frame, 20_000)).without
    mean, cov = exact(frame[frame.centre != "c"])
    assert table.loc["c", "pareto_k"] < 0.5
    error = np.abs(table.loc["c", list(found.names)].to_numpy(float) - mean) / np.sqrt(np.diag(cov))
    assert error.max() < 0.15


def test_the_posterior_without_a_site_that_dominates_is_not_known(tmp_path):
    _, frame = gaussian_study()
    frame = pd.concat([frame[frame.centre != "a"], *[frame[frame.centre == "a"]] * 6], ignore_index=True)
    found = sites(frame, by="centre", formula="y ~ dose", family="linear", scale=SD, standardize=False,
                  prior=f"normal(0, {PRIOR_SD})")  # fmt: skip
    draws, names = draws_of(found, frame, 20_000), list(found.names)
    fit = assessed(found, draws)
    assert fit.without.loc["a", "pareto_k"] > 0.7 and fit.without.loc["a", names].isna().all()
    mean, cov = exact(frame[frame.centre != "c"])
    error = np.abs(fit.without.loc["c", names].to_numpy(float) - mean) / np.sqrt(np.diag(cov))
    assert fit.without.loc["c", "pareto_k"] < 0.5 and error.max() < 0.15
    note = f"without a (Pareto k {fit.without.loc['a', 'pareto_k']:.3g}): –, too far from the posterior of all sites"
    assert note in repr(fit)
    for shown in (repr(fit), fit._repr_html_()):
        assert shown.count("too far from") == 1 and "–" in shown and "nan" not in shown.lower()
    told = next(one for one in fit.sites if one.site == "a").write(tmp_path / "a.json").read_text()
    assert json.loads(told, parse_constant=pytest.fail)["without"]["mean"] == dict.fromkeys(names)
    again = Assessment([SiteAssessment.read(tmp_path / "a.json")])
    assert again.without.loc["a", names].isna().all() and "too far from" in repr(again)


def test_heterogeneity_of_a_posterior_that_was_read_from_disk(tmp_path):
    found, _ = gaussian_study()
    post = fp.sample(found, duration=200.0, chains=2, seed=1, progress=False)
    post.save(tmp_path / "whole")
    post.save(tmp_path / "bare", state=False)
    fit = fp.assessment.assess(post, found, draws=200)
    whole = fp.assessment.assess(fp.load(tmp_path / "whole"), found, draws=200)
    bare = fp.assessment.assess(fp.load(tmp_path / "bare"), found, draws=200)
    assert fit.scores is not None and whole.scores is not None and bare.scores is None
    pd.testing.assert_frame_equal(fit.scores, whole.scores)
    said = "heterogeneity: not known for a posterior that was read from disk"
    assert said in repr(bare) and said in bare._repr_html_() and said not in repr(whole)
    with pytest.raises(InputError, match=r"columns=\{\"dose\": \{\"bounds\""):
        fp.assessment.predict(post, found, pd.DataFrame({"dose": [1e6]}))


def test_pulls_add_up_and_show_who_is_unlike_the_others():
    """``Cov(x, log π) = 0`` for a Gaussian posterior: the pulls of the prior and all sites cancel."""
    found, frame = gaussian_study(shift=4.0)
    draws = draws_of(found, frame, 20_000)
    pull = assessed(found, draws).pull
    # Monte Carlo error of a covariance of a coordinate with a quadratic of two.
    assert np.abs(pull.sum()).max() < 4 * np.sqrt(1.0 / 20_000) * 3
    assert pull.loc["c", "Intercept"] > 1.0 and pull.loc["a", "Intercept"] < 0


@pytest.mark.parametrize(("shift", "caught"), [(0.0, False), (4.0, True)])
def test_predictive_checks_find_a_site_that_does_not_fit(shift, caught):
    found, frame = gaussian_study(shift=shift)
    checks = assessed(found, draws_of(found, frame)).checks
    assert (checks.loc[("c", "mean"), "p"] < 0.01) == caught


def test_only_sums_leave_a_site(tmp_path):
    found, frame = gaussian_study()
    draws = draws_of(found, frame)
    one = assess_site(found.study, "a", found.tables["a"], draws, checks=["mean", "largest"])
    told = json.loads(one.write(tmp_path / "a.json").read_text())
    numbers = [x for part in ("loo", "pull") for x in told[part].values()]
    numbers += [x for part in told["checks"].values() for x in part.values()]
    for value in frame.y[frame.centre == "a"]:
        assert not np.isclose(numbers, value, rtol=1e-9).any()
    assert set(told["checks"]["largest"]) == {"p"}
    assert (
        SiteAssessment.read(tmp_path / "a.json").write(tmp_path / "again.json").read_text()
        == json.dumps(told, indent=2) + "\n"
    )


def test_few_records_other_parameters_other_draws_are_refused(tmp_path):
    found, frame = gaussian_study()
    draws = draws_of(found, frame, 100)
    with pytest.raises(InputError, match="9 records"):
        assess_site(found.study, "a", found.tables["a"].iloc[:9], draws, controlled=True)
    with pytest.raises(InputError, match="The study has Intercept, dose"):
        assess_site(found.study, "a", found.tables["a"], draws._replace(names=("x", "y")))
    with pytest.raises(InputError, match="checks: found 'median'"):
        assess_site(found.study, "a", found.tables["a"], draws, checks=["median"])
    first = assess_site(found.study, "a", found.tables["a"], draws)
    other = assess_site(found.study, "b", found.tables["b"], draws_of(found, frame, 100, seed=6))
    with pytest.raises(InputError, match="different contracts or draws"):
        Assessment([first, other])
    with pytest.raises(InputError, match="a site twice"):
        Assessment([first, first])
    (tmp_path / "x.json").write_text('{"site": 1}')
    with pytest.raises(InputError, match="fedpdmc assess"):
        SiteAssessment.read(tmp_path / "x.json")


@pytest.mark.parametrize("family", ["logistic", "poisson", "student_t", "linear"])
def test_log_densities_of_all_families(family):
    """Up to a constant in the parameters they are minus the potential that is sampled."""
    rng = np.random.default_rng(1)
    frame = pd.DataFrame({"site": ["a"] * 40, "x": rng.normal(size=40), "days": rng.uniform(1, 9, 40)})
    frame["y"] = rng.integers(0, 2, 40) if family == "logistic" else rng.poisson(3, 40)
    options = {"student_t": {"df": 4.0, "scale": 1.5}, "poisson": {"exposure": "days"}}.get(family, {})
    found = sites(frame, by="site", formula="y ~ x", family=family, **options)
    draws = rng.normal(size=(2, len(found.names)))
    density = Outcome(found.study, draws).log_density(found.tables["a"]).sum(0)
    value = [float(_value(found[0], x)) for x in draws]
    np.testing.assert_allclose(density[0] - density[1], value[1] - value[0], rtol=1e-9)
    assert np.asarray(logsumexp(density)) < np.inf


def _value(site, x):
    import jax

    with jax.enable_x64(True):
        return site.potential.value(jax.numpy.asarray(x))


@pytest.mark.parametrize("family", ["logistic", "poisson", "linear", "student_t", "weibull", "multinomial_logit"])
@double_precision
def test_compiled_blocks_have_the_densities_of_the_law(family):
    rng, n = np.random.default_rng(1), 300
    frame = pd.DataFrame({"site": ["a"] * n, "x": rng.normal(size=n), "days": rng.uniform(1, 9, n), "died": 1})
    level = family in ("logistic", "multinomial_logit")
    frame["y"] = rng.integers(0, 2 + (family != "logistic"), n) if level else rng.poisson(3, n) + (family == "weibull")
    options = {"student_t": {"df": 4.0, "scale": 1.5}, "poisson": {"exposure": "days"}}.get(family, {})
    found = sites(frame, by="site", formula="y ~ x", family=family, **options)
    records, draws = found.tables["a"], 0.5 * rng.normal(size=(5000, len(found.names)))
    outcome = Outcome(found.study, draws, "a")
    blocks = list(outcome.compiled(records))
    assert len({density.shape for _, density in blocks}) == 1 and len(blocks) == 10
    np.testing.assert_array_equal(np.concatenate([at for at, _ in blocks]), np.arange(n))
    density = np.concatenate([np.asarray(part)[: len(at)] for at, part in blocks])
    np.testing.assert_allclose(density, outcome.log_density(records), rtol=1e-9, atol=1e-9)


def test_many_records_are_assessed_as_few_are(monkeypatch):
    """Smoothing all weights, and those of the thousand largest: the difference is below the Monte Carlo error."""
    found, frame = gaussian_study(n=6000)
    draws = draws_of(found, frame, 1000)
    fast = pass_over(Outcome(found.study, draws.values, "a"), found.tables["a"], 1.0, step=lambda share: None)
    monkeypatch.setattr("fedpdmc.assessment.loo.SMOOTHED", 10_000)
    slow = pass_over(Outcome(found.study, draws.values, "a"), found.tables["a"], 1.0, step=lambda share: None)
    assert np.sum(np.isnan(fast.records.k)) == 2000 and not np.isnan(slow.records.k).any()
    for one, other in zip(fast, slow, strict=True):
        if isinstance(one, np.ndarray):
            np.testing.assert_allclose(one, other, rtol=1e-7, atol=1e-9)
    error = np.abs(fast.records.loo - slow.records.loo)
    monte_carlo = np.sqrt((slow.records.within - slow.records.waic) / 1000)
    assert np.all(error < 0.05 * monte_carlo) and np.nanmax(fast.records.k) < 0.5 and slow.records.k.max() < 0.5
    assert totals(fast.records)["elpd"] == pytest.approx(totals(slow.records)["elpd"], abs=0.01)


def test_an_interrupt_ends_an_assessment_between_two_blocks(monkeypatch):
    found, _ = gaussian_study(n=6000)
    post = fp.sample(found, duration=4.0, chains=8, seed=1, progress=False)
    seen = []

    def press(*told):
        seen.append(told)
        signal.raise_signal(signal.SIGINT)
        check()

    monkeypatch.setattr("fedpdmc.assessment.all_sites.report", press)
    # A process that was started in the background ignores Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(Interrupted, match=r"call assess\(\) again"):
            fp.assessment.assess(post, found, draws=500, progress=False)
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(seen) == 1 and seen[0][:3] == ("fit of the records", 1, 3) and 0 < seen[0][3] < 1
