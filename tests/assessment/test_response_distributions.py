"""The law of the response in every family: normalised, the one that is sampled, with draws and means that are its own."""

import arviz as az
import jax
import numpy as np
import pandas as pd
import pytest
from scipy import integrate, stats

import fedpdmc as fp
from fedpdmc._jax.precision import double_precision
from fedpdmc.assessment.all_sites import Assessment
from fedpdmc.assessment.at_site import PublicDraws, assess_site, censoring_times, predictive_checks
from fedpdmc.assessment.loo import pointwise
from fedpdmc.assessment.predict import effects, predict
from fedpdmc.errors import InputError
from fedpdmc.study.sites_from_table import sites
from fedpdmc.study.study_response import Outcome

N = 40
CUTS = [0.5, 1.5]
SURVIVAL = {"died": "status"}
# Formula, options, and what the response is.
FAMILIES = {
    "negative_binomial": ("falls ~ dose", {}, "count"),
    "zero_inflated_poisson": ("falls ~ dose", {}, "count"),
    "beta_binomial": ("good ~ dose", {"failures": "bad"}, "trials"),
    "gamma": ("days ~ dose", {}, "positive"),
    "beta": ("share ~ dose", {}, "unit"),
    "weibull": ("days ~ dose", SURVIVAL, "time"),
    "log_normal": ("days ~ dose", SURVIVAL, "time"),
    "piecewise_exponential": ("days ~ dose", SURVIVAL | {"cuts": CUTS}, "time"),
    "ordered_logit": ("stage ~ dose", {}, "level"),
    "ordered_probit": ("stage ~ dose", {}, "level"),
    "multinomial_logit": ("stage ~ dose", {}, "level"),
}


def frame():
    rng = np.random.default_rng(3)
    found = pd.DataFrame({"centre": np.repeat(["a", "b"], [22, 18]), "dose": rng.normal(0.2, 0.7, N).round(2)})
    found["falls"], found["good"], found["bad"] = rng.poisson(2, N), rng.integers(0, 7, N), rng.integers(0, 5, N)
    found["days"], found["share"] = rng.gamma(2.0, 0.6, N).round(3) + 0.01, rng.beta(2, 3, N).round(3)
    found["status"] = np.where(rng.random(N) < 0.7, 1, 0)
    found["stage"] = pd.Categorical.from_codes(
        rng.permutation(np.arange(N) % 4), ["I", "II", "III", "IV"], ordered=True
    )
    return found


def study(family):
    formula, options, kind = FAMILIES[family]
    return sites(frame(), by="centre", formula=formula, family=family, **options), kind


def draws(found, size, seed=1):
    return np.random.default_rng(seed).normal(0.0, 0.3, (size, len(found.names)))


@pytest.mark.parametrize("family", FAMILIES)
@double_precision
def test_log_densities_are_those_that_are_sampled(family):
    """The potential of a site is minus their sum, up to a number of the records alone."""
    found, _ = study(family)
    at = draws(found, 5)
    for name, records in found.tables.items():
        total = Outcome(found.study, at, name).log_density(records).sum(0)
        model = found[name].model
        value = np.array([jax.jit(lambda x: model.function(x, model.data))(x) for x in at])  # noqa: B023
        np.testing.assert_allclose(total + value, (total + value)[0], rtol=1e-8, atol=1e-9)


def one_record(family, found, values):
    """The first record many times, with other responses."""
    records = found.tables["a"].iloc[[0] * len(values)].copy()
    response = found.study.design.response_name
    if family in ("ordered_logit", "ordered_probit", "multinomial_logit"):
        records[response] = pd.Categorical.from_codes(values, found.study.columns[response].levels)
    else:
        records[response] = values
    if "status" in records:
        records["status"] = pd.Categorical(["1"] * len(values), categories=["0", "1"])
    return records


def moments(family, kind, outcome, found):
    """Total mass, mean and mean square of the first record's response by its density, at each draw."""
    if kind == "level":
        values, weight = np.arange(4), np.ones(4)
    elif kind == "count":
        values = np.arange(400)
        weight = np.ones(400)
    elif kind == "trials":
        trials = int(found.tables["a"][["good", "bad"]].iloc[0].sum())
        values, weight = np.arange(trials + 1), np.ones(trials + 1)
    elif kind == "unit":
        # Densities may be infinite at the ends: the trapezoidal rule in the log odds.
        step = np.linspace(-34, 34, 2001)
        values = 1 / (1 + np.exp(-step))
        weight = values * (1 - values) * (step[1] - step[0])
    else:
        # In pieces, since a piecewise hazard jumps.
        nodes, share = np.polynomial.legendre.leggauss(300)
        edges = [0.0, 1e-3, *CUTS, 5.0, 20.0, 100.0, 1000.0]
        values = np.concatenate([a + (b - a) * (nodes + 1) / 2 for a, b in zip(edges, edges[1:], strict=False)])
        weight = np.concatenate([(b - a) / 2 * share for a, b in zip(edges, edges[1:], strict=False)])
    records = one_record(family, found, values)
    if kind == "trials":
        records["bad"] = trials - values
    density = np.exp(outcome.log_density(records)) * weight[:, None]
    return density.sum(0), values @ density, values**2 @ density


@pytest.mark.parametrize("family", FAMILIES)
def test_laws_are_normalised_and_means_and_draws_are_theirs(family):
    found, kind = study(family)
    outcome = Outcome(found.study, draws(found, 3), "a")
    mass, mean, square = moments(family, kind, outcome, found)
    np.testing.assert_allclose(mass, 1, atol=2e-6)
    first = found.tables["a"].iloc[[0]]
    if kind == "level":
        probability = outcome.law(first).mean()[0]
        np.testing.assert_allclose(probability @ np.arange(4), mean, rtol=1e-9)
    else:
        trials = float(first[["good", "bad"]].iloc[0].sum()) if kind == "trials" else 1.0
        np.testing.assert_allclose(trials * outcome.law(first).mean()[0], mean, rtol=1e-4)
    many = found.tables["a"].iloc[[0] * 20_000]
    drawn = outcome.draw(many, np.random.default_rng(2))
    error = np.sqrt(np.maximum(square - mean**2, 1e-12) / len(many))
    assert np.all(np.abs(drawn.mean(0) - mean) < 5 * error)
    spread = drawn.var(0)
    np.testing.assert_allclose(spread, square - mean**2, rtol=0.25)


@pytest.mark.parametrize("family", ["weibull", "ordered_logit", "negative_binomial"])
def test_loo_and_waic_are_those_of_pooled_records(family):
    found, _ = study(family)
    public = PublicDraws(0.2 * draws(found, 500), found.names, 1.0)
    density = np.concatenate([Outcome(found.study, public.values, n).log_density(t) for n, t in found.tables.items()])
    data = az.from_dict(posterior={"x": public.values[None]}, log_likelihood={"y": density.T[None]})
    told = [assess_site(found.study, name, table, public) for name, table in found.tables.items()]
    whole = Assessment(told)
    assert whole.loo.loc["all", "elpd"] == pytest.approx(az.loo(data, reff=1.0).elpd_loo, rel=1e-9)
    assert whole.loo.loc["all", "waic"] == pytest.approx(az.waic(data).elpd_waic, rel=1e-3)
    expected = {
        "weibull": {"mean", "events"},
        "ordered_logit": {"share of I", "share of II", "share of III", "share of IV"},
        "negative_binomial": {"mean", "sd", "zeros"},
    }[family]
    assert set(whole.checks.index.get_level_values("statistic")) == expected
    assert set(told[0].pull) == set(public.reported(found.study))


class Drawn:
    """A posterior of given draws."""

    def __init__(self, values, names):
        self.values, self.names, self.chains, self.most_draws = values, names, 1, len(values)

    def draws(self, n):
        return self.values[None, :n]

    def cov(self):
        return np.cov(self.values.T)

    def ess(self):
        return dict.fromkeys(self.names, float(len(self.values)))


def test_levels_are_predicted_by_their_probabilities():
    found, _ = study("ordered_logit")
    post = Drawn(draws(found, 300), found.names)
    table = predict(post, found, pd.DataFrame({"dose": [0.0, 1.0]}), draws=300)
    assert list(table.index) == [(i, level) for i in range(2) for level in ("I", "II", "III", "IV")]
    np.testing.assert_allclose(table["mean"].groupby(level="record").sum(), 1.0)
    rows = effects(post, found, "dose", draws=300)
    assert list(rows.index) == [f"dose: + 1, P({level})" for level in ("I", "II", "III", "IV")]
    assert rows["mean"].sum() == pytest.approx(0, abs=1e-12)
    with pytest.raises(InputError, match="kind"):
        predict(post, found, pd.DataFrame({"dose": [0.0]}), kind="response")


def test_times_are_predicted_until_the_event_and_need_no_status():
    found, _ = study("weibull")
    values = np.zeros((200, 3))
    post = Drawn(values + [0.5, -0.4, np.log(2.0)], found.names)
    new = pd.DataFrame({"dose": [0.0, 1.0]})
    scale = np.exp([0.5, 0.1])
    np.testing.assert_allclose(predict(post, found, new, draws=200)["mean"], stats.weibull_min(2, scale=scale).mean())
    low = predict(post, found, pd.concat([new.iloc[:1]] * 400), kind="response", level=0.9, draws=200)["5%"]
    assert low.mean() == pytest.approx(stats.weibull_min(2, scale=scale[0]).ppf(0.05), rel=0.05)
    ratio = effects(post, found, "dose", ratio=True, draws=200)["mean"].iloc[0]
    assert ratio == pytest.approx(np.exp(-0.4))


def test_checks_of_times_hold_for_records_of_the_model_and_see_other_times():
    """Replicates are censored as the records are, also where censoring is heavy."""
    rng = np.random.default_rng(4)
    p = []
    for k in range(40):
        time, limit = rng.weibull(2.0, 200) * 1.5, rng.exponential(2.0, 200)
        table = pd.DataFrame({"site": "a", "days": np.minimum(time, limit), "status": (time <= limit).astype(int)})
        table["dose"] = rng.normal(size=200)
        found = sites({"a": table}, formula="days ~ dose", family="weibull", died="status")
        for scale in (1.5, 2.2):
            at = np.tile([np.log(scale), 0.0, np.log(2.0)], (200, 1))
            told = assess_site(found.study, "a", found.tables["a"], PublicDraws(at, found.names, 1.0), what=("checks",))
            p.append([k, scale, told.checks["events"]["p"], told.checks["mean"]["p"]])
    right, wrong = (np.array([row[2:] for row in p if row[1] == s]) for s in (1.5, 2.2))
    assert np.all((right < 0.05).mean(0) < 0.2) and np.median(wrong.min(1)) < 0.01


def test_censoring_times_are_known_or_later():
    time, died = np.array([1.0, 2.0, 2.0, 3.0, 4.0]), np.array([1, 0, 1, 0, 1])
    found = censoring_times(time, died, np.random.default_rng(0), 2000).T
    assert np.all(found[:, [1, 3]] == [2.0, 3.0]) and np.all(np.isinf(found[:, 4]))
    # Of four at risk one is censored at 2, of two one at 3.
    np.testing.assert_allclose([np.mean(found[:, 0] == t) for t in (2.0, 3.0)], [0.25, 0.375], atol=0.05)
    assert np.mean(np.isinf(found[:, 2])) == pytest.approx(0.375, abs=0.05)


def test_effects_of_groups_are_refused():
    table = frame().assign(ward=np.tile(["1", "2", "3", "4"], 10), sick=np.arange(N) % 2)
    found = fp.sites(table, by="centre", formula="sick ~ dose + (1 | ward)", family="logistic")
    with pytest.raises(InputError, match="effects of groups"):
        Outcome(found.study, np.zeros((2, len(found.names))))


def test_the_integral_of_a_piecewise_exponential_is_its_mean():
    found, _ = study("piecewise_exponential")
    at = draws(found, 1)
    outcome, first = Outcome(found.study, at, "a"), found.tables["a"].iloc[[0]]
    hazard = np.exp(at[0, 1:] + at[0, 0] * first["dose"].iloc[0])
    survival = lambda t: np.exp(-np.sum(hazard * np.clip(t - np.array([0, *CUTS]), 0, [0.5, 1.0, np.inf])))  # noqa: E731
    mean = sum(integrate.quad(survival, a, b)[0] for a, b in ((0, 0.5), (0.5, 1.5), (1.5, np.inf)))
    assert outcome.law(first).mean()[0, 0] == pytest.approx(mean)


@pytest.mark.parametrize("family", ["logistic", "weibull"])
@double_precision
def test_weighted_densities_are_those_that_are_sampled(family):
    """Events among trials, and weights, of which some are zero."""
    told = {"trials": "all"} if family == "logistic" else {"died": "status"}
    data = frame().assign(all=lambda t: t.good + t.bad, w=lambda t: (t.falls % 3) * 1.0)
    formula = "good ~ dose" if family == "logistic" else "days ~ dose"
    found = sites(data, by="centre", formula=formula, family=family, weights="w", **told)
    at = draws(found, 5)
    for name, records in found.tables.items():
        outcome = Outcome(found.study, at, name)
        density = outcome.log_density(records)
        assert np.all(density[records.w == 0] == 0) and pointwise(density, 1.0).k[records.w == 0].max() == 0
        value = np.array([found[name].potential.value(x) for x in at])
        total = density.sum(0)
        np.testing.assert_allclose(total + value, (total + value)[0], rtol=1e-8, atol=1e-9)
        rng = np.random.default_rng(0)
        drawn = np.mean([outcome.draw(records, rng) for _ in range(400)], 0)
        if family == "logistic":
            np.testing.assert_allclose(drawn, records[["all"]].to_numpy() * outcome.law(records).mean(), atol=0.5)
        # Means of checks are those of records as often as their weights say.
        p = predictive_checks(outcome, records, ["mean"], rng, values=True, step=lambda _: None)["mean"]
        repeated = np.repeat(outcome.observed(records)[:, 0], records.w.astype(int))
        np.testing.assert_allclose(p["observed"], repeated.mean(), rtol=1e-12)
