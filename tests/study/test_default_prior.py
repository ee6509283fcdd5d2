"""Default priors: weak on the scale of the response in every family, from the values and never from declared bounds."""

import jax
import numpy as np
import pandas as pd
import pytest

import fedpdmc as fp
from fedpdmc.models.families import fit_weibull
from fedpdmc.study.formula import Design
from fedpdmc.study.prior_names import INTERCEPT_SD, term_of
from fedpdmc.study.study_response import Outcome

N = 400


def table(seed=0):
    """Covariates of unlike scales, one of them with a strong effect; times in days with a shape of 0.6."""
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({
        "centre": rng.choice(["north", "south", "west"], N), "age": rng.normal(60, 12, N), "crp": rng.gamma(1.5, 20, N),
        "drug": rng.choice(["placebo", "verum"], N), "ph": rng.normal(7.4, 0.05, N),
    })  # fmt: skip
    eta = -0.05 * (frame.crp - 30) + 0.6 * (frame.drug == "verum") + 4.0 * (frame.ph - 7.4)
    latent = eta + rng.logistic(size=N)
    time = np.exp(6 + eta) * rng.weibull(0.6, N)
    end = np.exp(6) * rng.exponential(2, N)
    share = 1 / (1 + np.exp(-eta))
    return frame.assign(
        ill=latent > 0, grade=np.digitize(latent, [-2, 1]), pressure=120 + 10 * latent,
        falls=rng.poisson(np.exp(eta) * rng.gamma(2, 0.5, N)), time=np.minimum(time, end),
        died=(time < end).astype(int), share=rng.beta(8 * share + 0.01, 8 * (1 - share) + 0.01).clip(1e-3, 1 - 1e-3),
        hits=rng.binomial(12, rng.beta(4 * share + 0.01, 4 * (1 - share) + 0.01)), cost=np.exp(eta) * rng.gamma(2, 500, N),
    ).assign(misses=lambda t: 12 - t.hits)  # fmt: skip


FAMILIES = {
    "logistic": ("ill", {}),
    "linear": ("pressure", {}),
    "student_t": ("pressure", {"df": 4.0, "scale": 15.0}),
    "poisson": ("falls", {}),
    "negative_binomial": ("falls", {}),
    "zero_inflated_poisson": ("falls", {}),
    "gamma": ("cost", {}),
    "beta": ("share", {}),
    "beta_binomial": ("hits", {"failures": "misses"}),
    "weibull": ("time", {"died": "died"}),
    "log_normal": ("time", {"died": "died"}),
    "piecewise_exponential": ("time", {"died": "died", "cuts": [50.0, 400.0]}),
    "ordered_logit": ("grade", {}),
    "ordered_probit": ("grade", {}),
    "multinomial_logit": ("grade", {}),
}
# Wider than what the table shows, by a lot.
BOUNDS = {"crp": {"bounds": [0, 5000]}, "age": {"bounds": [0, 300]}, "ph": {"bounds": [0, 14]}}


def of_family(family, frame, **told):
    response, options = FAMILIES[family]
    return fp.sites(frame, by="centre", formula=f"{response} ~ age + crp + drug + ph", family=family, **options, **told)


def minus_log_posterior(found, x):
    with jax.enable_x64(True):
        x = jax.numpy.asarray(x)
        return sum(float(site.potential.value(x)) for site in found) + float(found.prior.value(x))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_posterior_does_not_depend_on_declared_bounds(family):
    frame, response = table(), FAMILIES[family][0]
    declared = {} if family in ("logistic", "ordered_logit", "ordered_probit", "multinomial_logit") else {
        response: {"bounds": [1e-4, 0.9999] if family == "beta" else [0 if frame[response].min() <= 0 else 1e-9, 1e7]}
    }  # fmt: skip
    plain, bounded = of_family(family, frame), of_family(family, frame, columns=BOUNDS | declared)
    assert bounded.study.columns["crp"].bounds == (0, 5000)
    for x in np.random.default_rng(1).normal(0, 0.1, (3, len(plain.names))):
        assert minus_log_posterior(bounded, x) == minus_log_posterior(plain, x)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_default_prior_is_weak(family):
    """It moves no coefficient by more than the third of a standard error from where a flat prior has it."""
    frame = table()
    found = of_family(family, frame)
    mode, flat = (fp.laplace(list(found), prior) for prior in (found.prior, None))
    root = np.asarray(flat.scale_tril)
    moved = (np.asarray(mode.center) - np.asarray(flat.center)) / np.sqrt(np.diag(root @ root.T))
    assert np.abs(moved).max() < 0.33, dict(zip(found.names, moved, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_prior_predictive_holds_the_data(family):
    """Summaries of the response are well within what the prior predicts, and the records differ by about their spread."""
    frame, rng = table(), np.random.default_rng(2)
    found = of_family(family, frame)
    prior = np.asarray(found.study.prior_mean), np.asarray(found.study.prior_scale)
    tables = pd.concat(found.tables.values())
    design = found.study.design
    X = design.matrix(tables)
    terms = [i for i, name in enumerate(design.names) if name != "Intercept"]
    slopes = [next(i for i, name in enumerate(found.names) if term_of(name, design) == term) for term in terms]
    draws = rng.normal(*prior, (500, len(found.names)))
    spread = (draws[:, slopes] @ (X[:, terms] - X[:, terms].mean(0)).T).std(1)
    # Without covariates the same family has the response's spread on the scale of the predictor as its τ.
    tau = prior[1][slopes] * X[:, terms].std(0) * np.sqrt(len(slopes))
    assert 0.7 * np.median(tau) < np.median(spread) < 1.5 * np.median(tau)
    # Drawn from the prior, the typical response is now above that of the data, now below it.
    outcome = Outcome(found.study, draws)
    with np.errstate(over="ignore"):
        mean, observed = outcome.law(tables).mean(), outcome.observed(tables)
    if mean.ndim == 3:
        observed = observed[..., None] == np.arange(mean.shape[-1])
    if family == "beta_binomial":
        observed = observed / 12
    above = np.mean(np.median(mean, 0) > np.mean(observed, 0), 0)
    assert np.all((above > 0.02) & (above < 0.98)), above


def test_few_events_with_a_wide_spread_of_times():
    """A log time ratio of 1.9 with 30 events and a shape of 0.5: a prior of unit residual spread would take it to 1.2."""
    rng = np.random.default_rng(3)
    n = 60
    frame = pd.DataFrame({"centre": rng.choice(["north", "south"], n), "drug": rng.choice(["placebo", "verum"], n)})
    frame = frame.assign(a=rng.normal(size=n), b=rng.normal(size=n))
    time, end = np.exp(3 + 1.9 * (frame.drug == "verum")) * rng.weibull(0.5, n), np.exp(3) * rng.exponential(1.5, n)
    frame = frame.assign(time=np.minimum(time, end), died=(time < end).astype(int))
    found = fp.sites(frame, by="centre", formula="time ~ drug + a + b", family="weibull", died="died")
    index = found.names.index("drug[T.verum]")
    with_prior, flat = (np.asarray(fp.laplace(list(found), prior).center)[index] for prior in (found.prior, None))
    assert flat > 1.5 and with_prior > 0.85 * flat


def test_units_do_not_matter():
    """Times in seconds and weights in grams give the prior of days and kilograms."""
    frame = table()
    days = of_family("weibull", frame)
    seconds = of_family("weibull", frame.assign(time=86400 * frame.time, crp=1000 * frame.crp))
    index = days.names.index("crp")
    assert seconds.study.prior_scale[index] == pytest.approx(days.study.prior_scale[index] / 1000, rel=0.01)
    assert seconds.study.prior_mean[0] - days.study.prior_mean[0] == pytest.approx(np.log(86400), abs=0.11)


def test_a_stated_scale_is_the_unit_of_the_prior():
    frame = table()
    stated = of_family("weibull", frame, columns={"crp": {"scale": 10.0}})
    tau = (np.asarray(stated.study.prior_scale) * 0.5 * np.sqrt(4))[stated.names.index("drug[T.verum]")]
    assert stated.study.prior_scale[stated.names.index("crp")] == pytest.approx(tau / 2, rel=0.01)


def test_the_intercept_allows_for_columns_that_are_not_centred():
    frame = table()
    found = of_family("weibull", frame)
    scale = dict(zip(found.names, found.study.prior_scale, strict=True))
    tau = scale["drug[T.verum]"]
    far = [scale[name] * center for name, center in (("age", 60), ("crp", 30), ("ph", 7.4))]
    assert scale["Intercept"] == pytest.approx(np.sqrt((INTERCEPT_SD * tau) ** 2 + np.sum(np.square(far))), rel=0.05)


def test_a_weibull_law_of_censored_times():
    rng = np.random.default_rng(4)
    time, end = 50 * rng.weibull(1.7, 4000), rng.uniform(10, 120, 4000)
    scale, shape = fit_weibull(np.minimum(time, end), (time < end).astype(float))
    assert scale == pytest.approx(50, rel=0.05) and shape == pytest.approx(1.7, rel=0.05)
    assert fit_weibull(np.ones(3), np.zeros(3))[1] == 1.0


def test_a_model_of_ones_own_is_told_that_no_scale_is_known():
    model = fp.Model(
        lambda x, row: 0.5 * (row["y"] - x["eta"]) ** 2, columns={"y": "real"}, predictors=["eta"], title="normal"
    )
    told = {"by": "centre", "formula": "pressure ~ age", "family": model}
    with pytest.warns(UserWarning, match="nothing states the scale of Intercept, age"):
        fp.sites(table(), **told)
    fp.sites(table(), **told, prior="normal(0, 50)")


def test_products_of_terms():
    found = of_family("linear", table())
    design = Design("pressure ~ drug * age", found.study.columns)
    np.testing.assert_array_equal(design.products({"drug": 0.5, "age": 3.0}), [1, 0.5, 3, 1.5])


def test_every_prior_is_printed_before_sampling_and_in_the_summary(capsys, tmp_path):
    frame = table().assign(ward=lambda t: t.centre)
    found = fp.sites(frame, by="centre", formula="ill ~ drug + (1 + age | ward)", family="logistic")
    for words in ("Intercept ~ normal(0, 9.07)", "sd[0], sd[1] ~ half-normal(1)", "atanh_correlation ~ normal(0, 0.5)"):
        assert words in repr(found)
    ordered = of_family("ordered_logit", frame)
    assert "first_cut ~ normal" in repr(ordered) and "log_gaps[0] ~ normal(0.9, 2)" in repr(ordered)
    plain = of_family("weibull", frame)
    post = fp.sample(plain, ess=50, seed=1)
    shown = capsys.readouterr().err
    for line in plain.prior_lines:
        assert f"  {line}\n" in shown and line in " ".join(str(post.summary()).split())
    post.save(tmp_path / "run.zarr")
    assert fp.load(tmp_path / "run.zarr").settings["prior"] == list(plain.prior_lines)
