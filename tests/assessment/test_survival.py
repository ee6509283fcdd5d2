"""Survival families after sampling: functions of time, Kaplan-Meier estimates, curves, and what sites release of them."""

import json

import matplotlib
import numpy as np
import pandas as pd
import pytest
from scipy import integrate, stats
from tests.assessment.test_response_distributions import Drawn
from typer.testing import CliRunner

import fedpdmc as fp
from fedpdmc.assessment.all_sites import Assessment
from fedpdmc.assessment.at_site import (
    MODEL,
    STEP,
    Carried,
    PublicDraws,
    SiteAssessment,
    assess_site,
    average_survival,
    kaplan_meier,
    pooled,
    site_survival,
    steps_of,
)
from fedpdmc.assessment.predict import draw_panels
from fedpdmc.cli import app
from fedpdmc.errors import InputError
from fedpdmc.study.study_response import Outcome

matplotlib.use("Agg")
CUTS = [1.0, 3.0]
FAMILIES = {"weibull": {}, "log_normal": {}, "piecewise_exponential": {"cuts": CUTS}}
WHERE = [0.4, 1.0, 2.7, 9.0]


def frame(n=120, seed=2):
    rng = np.random.default_rng(seed)
    found = pd.DataFrame({"centre": np.repeat(["a", "b"], [n // 2, n - n // 2]), "dose": rng.integers(0, 2, n)})
    time, limit = 3 * rng.weibull(1.4, n) * np.exp(-0.4 * found.dose), rng.uniform(0.5, 8, n)
    found["years"], found["status"] = np.minimum(time, limit).round(2) + 0.01, (time <= limit).astype(int)
    return found


def study(family, **told):
    formula = told.pop("formula", "Surv(years, status) ~ dose")
    return fp.sites(told.pop("table", frame()), by="centre", formula=formula, family=family, **FAMILIES[family], **told)


def posterior(found, size=200, seed=1):
    values = np.random.default_rng(seed).normal(0.3, 0.2, (size, len(found.names)))
    return Drawn(values, found.names)


@pytest.mark.parametrize("family", FAMILIES)
def test_functions_of_time_are_those_of_the_law(family):
    found = study(family)
    post, new = posterior(found, 3), pd.DataFrame({"dose": [1]})
    one = Outcome(found.study, post.values)
    records = found.tables["a"].iloc[[0]].assign(dose=1.0)

    def survival(t, s):
        if family == "weibull":
            a, b, k = post.values[s]
            return stats.weibull_min(np.exp(k), scale=np.exp(a + b)).sf(t)
        if family == "log_normal":
            a, b, sigma = post.values[s]
            return stats.lognorm(np.exp(sigma), scale=np.exp(a + b)).sf(t)
        b, *hazards = post.values[s]
        spent = np.clip(t - np.array([0.0, *CUTS]), 0, np.diff([0.0, *CUTS, np.inf]))
        return np.exp(-np.sum(np.exp(np.array(hazards) + b) * spent))

    for t in WHERE:
        for s in range(3):
            assert one.expected(records, "survival", t)[0, s] == pytest.approx(survival(t, s), rel=1e-9)
            slope = -(np.log(survival(t - 1e-6, s)) - np.log(survival(t - 3e-6, s))) / 2e-6
            assert one.expected(records, "hazard", t)[0, s] == pytest.approx(slope, rel=1e-4)
            edges = [0.0, *(c for c in CUTS if c < t), t]
            area = sum(integrate.quad(survival, x, y, args=(s,))[0] for x, y in zip(edges, edges[1:], strict=False))
            assert one.expected(records, "restricted_mean", t)[0, s] == pytest.approx(area, rel=1e-7)
    middle = one.expected(records, "median", 1.0)[0]
    assert [survival(middle[s], s) for s in range(3)] == pytest.approx([0.5] * 3)
    table = fp.assessment.predict(post, found, new, kind="survival", at=WHERE, draws=3)
    assert list(table.index) == [(0, t) for t in WHERE] and list(table.columns) == ["mean", "sd", "2.5%", "97.5%"]
    assert table["mean"].iloc[2] == pytest.approx(np.mean([survival(2.7, s) for s in range(3)]))
    many = fp.assessment.effects(post, found, "dose", kind="survival", at=2.0, draws=3)
    every = pd.concat(found.tables.values())
    before, after = (one.expected(every.assign(dose=every.dose + x), "survival", 2.0) for x in (0, 1))
    assert many["mean"].iloc[0] == pytest.approx(np.mean(after - before))


@pytest.mark.parametrize(
    "told", [{}, {"kind": "response"}, {"kind": "survival", "at": 2.0}, {"kind": "median"}], ids=str
)
def test_rows_of_predictions_are_those_of_the_table_where_values_are_missing(told):
    found = study("weibull", missing="drop")
    post, new = posterior(found, 3), pd.DataFrame({"dose": [1, None, 0]})
    table = fp.assessment.predict(post, found, new, draws=3, **told)
    whole = fp.assessment.predict(post, found, new.dropna(), draws=3, **told)
    assert len(table) == 3 and table.iloc[1].isna().all()
    np.testing.assert_array_equal(table.iloc[[0, 2]], whole)


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"kind": "survival"}, "at: found None"),
        ({"kind": "hazard", "at": [0.0]}, "positive"),
        ({"kind": "mean", "at": 1.0}, "only with them"),
        ({"kind": "mode"}, "kind"),
    ],
)
def test_times_that_are_none_are_refused(told, words):
    found = study("weibull")
    with pytest.raises(InputError, match=words):
        fp.assessment.predict(posterior(found), found, pd.DataFrame({"dose": [0]}), **told)
    table = frame().assign(sick=np.arange(120) % 2)
    other = fp.sites(table, by="centre", formula="sick ~ dose", family="logistic")
    with pytest.raises(InputError, match="survival families, not of logistic"):
        fp.assessment.predict(posterior(other), other, pd.DataFrame({"dose": [0]}), kind="survival", at=1)


def test_kaplan_meier_is_that_of_the_textbook():
    """Remission of leukaemia under 6-mercaptopurine (Freireich et al., 1963), in weeks."""
    time = [6, 6, 6, 6, 7, 9, 10, 10, 11, 13, 16, 17, 19, 20, 22, 23, 25, 32, 32, 34, 35]
    died = [1, 1, 1, 0, 1, 0, 1, 0, 0, 1, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0]
    found = kaplan_meier(np.array(time), np.array(died))
    assert found.time.tolist() == [6, 7, 10, 13, 16, 22, 23]
    np.testing.assert_allclose(found.survival, [0.857, 0.807, 0.753, 0.690, 0.627, 0.538, 0.448], atol=5e-4)
    np.testing.assert_allclose(found.at([5.9, 6, 9.9, 40]), [1, 0.857, 0.807, 0.448], atol=5e-4)
    np.testing.assert_allclose(kaplan_meier(np.array([3.0, 1.0, 2.0])).survival, [2 / 3, 1 / 3, 0], atol=1e-12)


@pytest.mark.parametrize("least", [0, 3, 10])
def test_no_released_step_has_few_records(least):
    table = frame(200)
    time, died = table.years.to_numpy(), table.status.to_numpy()
    found = steps_of(time, died, np.linspace(0.4, 8, 20), least)
    counts = np.array([found["events"], found["censored"]])
    assert np.all((counts == 0) | (counts >= least)) and len(found["time"]) == {0: 17, 3: 9, 10: 4}[least]
    np.testing.assert_allclose(found["survival"], kaplan_meier(time, died).at(found["time"]), atol=5e-4)
    at_risk = [len(time), *(len(time) - counts.sum(0).cumsum())]
    assert found["at_risk"] == at_risk[:-1] and (at_risk[-1] == 0 or at_risk[-1] >= least)


def test_the_sites_estimates_pool_to_that_of_all_records():
    rng = np.random.default_rng(0)
    parts, grid = [rng.exponential(s, 150) for s in (1.0, 2.0)], np.linspace(0.2, 3, 8)
    found = pooled([steps_of(one, np.ones(150), grid, 0) for one in parts])
    np.testing.assert_allclose(found["survival"], kaplan_meier(np.concatenate(parts)).at(found["time"]), atol=2e-3)
    limits = [rng.uniform(0.5, 4, 150) for _ in parts]
    pairs = [(np.minimum(t, c), t <= c) for t, c in zip(parts, limits, strict=True)]
    whole = kaplan_meier(*(np.concatenate(one) for one in zip(*pairs, strict=True)))
    for least, error in ((0, 0.015), (12, 0.04)):  # steps that are one with the next have a constant hazard
        found = pooled([steps_of(*one, grid, k) for one, k in zip(pairs, (0, least), strict=True)])
        np.testing.assert_allclose(found["survival"], whole.at(found["time"]), atol=error)


def test_curves_are_averages_over_the_records_of_each_level():
    found = study("weibull")
    post = posterior(found)
    table = fp.assessment.survival_curves(post, found, by="dose", at=[1.0, 4.0], draws=200)
    for dose in (0, 1):
        a, b, k = post.values.T
        direct = np.exp(-((4.0 / np.exp(a + b * dose)) ** np.exp(k)))
        row = table.loc[(f"dose: {dose}", 4.0)]
        assert row["mean"] == pytest.approx(direct.mean()) and row["97.5%"] == pytest.approx(np.quantile(direct, 0.975))
        part = frame()[frame().dose == dose]
        assert row["kaplan_meier"] == pytest.approx(kaplan_meier(part.years, part.status).at(4.0))
    share = (frame().dose == 1).mean()
    whole = fp.assessment.survival_curves(post, found, at=4.0, draws=200)["mean"].iloc[0]
    both = table.xs(4.0, level="time")["mean"]
    assert whole == pytest.approx((1 - share) * both.iloc[0] + share * both.iloc[1])
    for told in ({}, {"by": "site"}, {"new": pd.DataFrame({"dose": [0, 1]})}):
        ax = fp.assessment.plot_survival(post, found, **told, draws=50)
        assert ax.get_xlabel() == "years" and len(ax.lines) == {0: 2, 1: 4}.get(len(told), 0) - ("new" in told)
        matplotlib.pyplot.close(ax.figure)
    curve = fp.assessment.survival_curves(post, found, at=[1.0, 4.0], draws=50).droplevel(0)
    names, steps = [f"ward {i}" for i in range(5)], (np.asarray([1.0, 4.0]), np.asarray([0.9, 0.7]))
    observed = dict.fromkeys(names, steps) | {names[-1]: (np.asarray([6.0]), np.asarray([0.5]))}
    axes = draw_panels(dict.fromkeys(names, curve), observed, "years", matplotlib.pyplot.figure())
    assert [ax.get_title() for ax in axes.flat] == [*names, ""] and [len(ax.lines) for ax in axes.flat] == [2] * 5 + [0]
    assert axes[0, 0].get_xlim()[1] > 6.0
    words = axes[0, 0].get_legend().get_texts()
    assert [text.get_text() for text in words] == ["Kaplan-Meier", "model"] and not axes[
        0, 1
    ].get_legend().get_visible()
    matplotlib.pyplot.close("all")
    with pytest.raises(InputError, match="Give one of 'site', 'dose'"):
        fp.assessment.survival_curves(post, found, by="sex")


def test_data_without_censoring_are_accepted_in_every_form(tmp_path):
    events = frame().assign(status=1)
    forms = [
        study("weibull", table=events),
        study("weibull", table=events.drop(columns="status"), formula="Surv(years) ~ dose"),
        study("weibull", table=events.drop(columns="status"), formula="years ~ dose", died=True),
        study("weibull", table=events.assign(status=True)),
    ]
    at = np.random.default_rng(0).normal(size=(3, 3))
    density = [Outcome(one.study, at).log_density(one.tables["a"]) for one in forms]
    for one, found in zip(density, forms, strict=True):
        np.testing.assert_array_equal(one, density[0])
        assert found.study.prior_scale == forms[0].study.prior_scale
    path = forms[1].write(tmp_path / "study.toml")
    again = fp.study.read_study(path)
    assert "status" not in again.used and again.survival
    post = fp.sample(forms[1], duration=3.0, chains=8, seed=1, progress=False)
    fit = fp.assessment.assess(post, forms[1], draws=100)
    assert set(fit.checks.index.get_level_values("statistic")) == {"mean"} and len(fit.survival)
    with pytest.raises(InputError, match=r"Surv\(time, status\)"):
        study("weibull", died="status")
    with pytest.raises(InputError, match="needs it"):
        study("weibull", table=events.drop(columns="status"), formula="years ~ dose")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_site_without_events_is_assessed(family):
    table = frame()
    table.loc[table.centre == "b", "status"] = 0
    found = study(family, table=table)
    fit = Assessment([assess_site(found.study, n, t, public(found), times=[1.0, 4.0]) for n, t in found.tables.items()])
    assert fit.survival.loc[("b", 4.0), "survival"] == 1 and fit.checks.loc[("b", "events"), "observed"] == 0
    assert np.isfinite(fit.loo["elpd"]).all()


def public(found, size=300):
    return PublicDraws(posterior(found, size).values, found.names, 1.0)


def test_a_made_up_posterior_learns_no_average_of_few_records():
    """A steep hazard makes the average survival the share of records on one side of a plane."""
    rng, n = np.random.default_rng(0), 120
    table = frame(n).assign(age=np.round(rng.normal(0, 10, n), 1))
    found = study("weibull", table=table, formula="Surv(years, status) ~ age")
    records, times = found.tables["a"], [0.5, 1.0, 2.0, 4.0]
    honest = rng.normal([1.0, -0.01, 0.3], 0.05, (200, 3))
    oldest = np.sort(records.age)[-2:].mean()
    steep = np.tile([np.log(1.5) - 0.5 * oldest, 0.5, 6.0], (200, 1))
    two_planes = np.tile([np.log(3.0), 1e-3, 6.0], (200, 1))
    two_planes[::2] = [np.log(3.0) + 0.2 * oldest, -0.2, 6.0]
    for draws, good in ((honest, True), (steep, False), (two_planes, False)):
        carried = Carried(10)
        average = average_survival(Outcome(found.study, draws), records, times, lambda share: None, carried)
        assert carried.enough(len(records)) == good
        if draws is steep:  # without the control the step at 1.5 is one patient's
            assert average[0, 2] == pytest.approx(1 / len(records), abs=1e-3)
    told = site_survival(Outcome(found.study, honest), records, times, 0.95, 10, lambda share: None)
    assert set(told) == {*STEP, *MODEL}


def contract(found, tmp_path):
    study = found.write(tmp_path / "study.toml")
    released = '[releases]\nassessment = ["loo", "survival"]\ntimes = [0.5, 1.0, 2.0, 4.0]'
    study.write_text(study.read_text().replace("[releases]", released))
    return study


def test_sites_release_curves_and_one_with_nine_records_stops_no_other(tmp_path):
    table = frame(209)
    table["centre"] = np.repeat(["a", "b", "c"], [100, 100, 9])
    found = study("weibull", table=table)
    path = contract(found, tmp_path)
    post = fp.sample(found, duration=4.0, chains=8, seed=1, progress=False)
    assert len(fp.assessment.assess(post, found, draws=200).sites) == 3
    post.save(tmp_path / "post.zarr")
    codes = []
    for name in "abc":
        table[table.centre == name].to_csv(tmp_path / f"{name}.csv", index=False)
        words = ["assess", path, "--name", name, "--data", tmp_path / f"{name}.csv", "--out", tmp_path / f"{name}.json"]
        codes.append(CliRunner().invoke(app, [*map(str, words), "--posterior", str(tmp_path / "post.zarr")]).exit_code)
    assert codes[:2] == [0, 0] and codes[2] != 0 and not (tmp_path / "c.json").exists()
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    words = ["report", tmp_path / "post.zarr", "--out", tmp_path / "r.html", "--study", path]
    words += [x for file in files for x in ("--assessment", file)]
    assert CliRunner().invoke(app, list(map(str, words))).exit_code == 0
    page = (tmp_path / "r.html").read_text()
    assert "c: released nothing" in page and "Kaplan-Meier" in page
    fit = Assessment([SiteAssessment.read(file) for file in files])
    assert ((fit.survival["events"].dropna() == 0) | (fit.survival["events"].dropna() >= 10)).all()
    assert len(fit.plot_survival().axes) == 2
    matplotlib.pyplot.close("all")
    told = json.loads(files[0].read_text())
    for change in ({"time": [2.0, 1.0]}, {"survival": [2.0]}, {"time": "x"}, {"more": []}, {"events": [float("nan")]}):
        files[0].write_text(json.dumps(told | {"survival": told["survival"] | change}))
        with pytest.raises(InputError, match="another kind|Expected"):
            SiteAssessment.read(files[0])


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('assessment = ["survival"]', "times"),
        ('assessment = ["survival"]\ntimes = [2.0, 1.0]', "increasing"),
        ('assessment = ["loo"]\ntimes = [1.0]', "only then"),
    ],
)
def test_contracts_say_the_times_of_curves(tmp_path, line, words):
    path = study("weibull").write(tmp_path / "study.toml")
    path.write_text(path.read_text().replace("[releases]", f"[releases]\n{line}"))
    with pytest.raises(InputError, match=words):
        fp.study.read_study(path)


def test_hazard_ratios_of_weibull_are_powers_of_time_ratios():
    found = study("weibull")
    post = fp.sample(found, duration=4.0, chains=8, seed=1, progress=False)
    table = fp.assessment.ratios(post, found, hazard=True)
    drawn = {name: x.reshape(-1) for name, x in post.variables(250).items()}
    assert table.index.name == "hazard ratio"
    direct = np.exp(-drawn["shape"] * drawn["dose"])
    assert table["median"].iloc[0] == pytest.approx(np.median(direct), rel=1e-9)
    other = study("log_normal")
    with pytest.raises(InputError, match="proportional"):
        fp.assessment.ratios(posterior(other), other, hazard=True)
