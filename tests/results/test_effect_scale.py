"""Effects on the scale of their family: what the law of the response says, by site, and as drawn."""

from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from matplotlib import pyplot
from scipy.stats import norm
from tests.study.test_default_prior import FAMILIES, of_family, table

import fedpdmc as fp
from fedpdmc.errors import InputError
from fedpdmc.results.forest_plot import EffectScale, _limits, _ticks, each_site, numbers, row_of
from fedpdmc.results.report import html_table
from fedpdmc.study.study_response import Outcome

mpl.use("Agg")
STEPS = {"age": 10.0, "crp": 5.0, "ph": 0.1}
KINDS = {
    "logistic": "odds ratio", "linear": "difference in pressure",
    "student_t": "difference in pressure", "poisson": "rate ratio",
    "negative_binomial": "rate ratio", "zero_inflated_poisson": "rate ratio", "gamma": "ratio of means",
    "beta": "odds ratio", "beta_binomial": "odds ratio", "weibull": "time ratio", "log_normal": "time ratio",
    "piecewise_exponential": "hazard ratio", "ordered_logit": "odds ratio",
    "ordered_probit": "difference in the latent variable of grade",
    "multinomial_logit": "ratio of odds against the first level",
}  # fmt: skip


def odds(p):
    return p / (1 - p)


def hazard(law, t):
    y = np.full((1, 1), t)
    return np.exp(law.log_density(y, {"died": 1.0}) - law.log_density(y, {"died": 0.0}))


def compared(family, before, after, kind):
    """The effect by the law of the response before and after the increase."""
    a, b = before.mean(), after.mean()
    if kind == "hazard ratio":
        return hazard(after, 100.0) / hazard(before, 100.0)
    if family == "ordered_logit":
        return odds(b[..., -1]) / odds(a[..., -1])
    if family == "ordered_probit":
        return norm.isf(a[..., -1]) - norm.isf(b[..., -1])
    if family == "multinomial_logit":
        return (b[..., 1] / b[..., 0]) / (a[..., 1] / a[..., 0])
    return odds(b) / odds(a) if kind == "odds ratio" else b - a if "difference" in kind else b / a


@pytest.mark.parametrize("family", list(FAMILIES))
def test_an_effect_is_what_the_law_of_the_response_says(family):
    """Odds, rates, times and hazards before and after each increase; not with another sign or half the step."""
    found = of_family(family, table())
    study, records = found.study, next(iter(found.tables.values())).iloc[:1]
    scale = EffectScale(**(found.effect_scale or {"kinds": {}}))
    assert next(iter(scale.kinds)) == KINDS[family] and scale.ratio == ("difference" not in KINDS[family])
    rng = np.random.default_rng(1)
    x = rng.normal(0, 0.3, (5, len(found.names))) * np.minimum(np.asarray(study.prior_scale, float), 0.5)
    naming = study.naming
    values = dict(zip(found.names, x.T, strict=True))
    if naming is not None and naming.constrain is not None:
        values |= {name: np.asarray([naming.constrain(row)[name] for row in x]) for name in naming.constrain(x[0])}
    changes = {
        name: records.assign(**{name: records[name] + step / study.columns[name].scale}) for name, step in STEPS.items()
    }
    levels = ["placebo", "verum"]
    changes["drug[T.verum]"] = records.assign(drug=pd.Categorical(["verum"], categories=levels))
    start = records.assign(drug=pd.Categorical(["placebo"], categories=levels))
    for kind in scale.kinds:
        effects = {one.name.split("[verum]")[0]: one for one in scale.effects(values, STEPS, kind)}
        assert not any("Intercept" in name for name in effects)
        for name, changed in changes.items():
            one = next(e for key, e in effects.items() if key == name or key.startswith(f"{name}["))
            before = start if name.startswith("drug") else records
            truth = compared(family, Outcome(study, x).law(before), Outcome(study, x).law(changed), kind)[0]
            if not scale.ratio:
                response = study.columns[study.design.response_name]
                truth = truth * response.scale
            np.testing.assert_allclose(one.draws, truth, rtol=1e-6, err_msg=f"{kind} of {name}")
            assert not np.allclose(
                one.draws ** (0.5 if scale.ratio else 1) / (1 if scale.ratio else 2), truth, rtol=1e-3
            )


def test_increments_are_round_numbers_near_one_sd_and_the_label_says_them():
    frame = table().assign(women=lambda t: (t.age > 60) * 1, kids=np.arange(400) % 4)
    found = fp.sites(frame, by="centre", family="logistic", columns={"crp": {"log": True, "bounds": [1e-6, 1e4]}},
                     formula="ill ~ age * drug + crp + ph + women + kids")  # fmt: skip
    scale = EffectScale(**(found.effect_scale or {"kinds": {}}))
    draws = {name: np.linspace(0.1, 0.2, 5) for name in found.names}
    effects = {one.name: one for one in scale.effects(draws)}
    assert sorted(one.label for one in effects.values()) == sorted([
        "drug: verum vs placebo", "age (+ 10)", "age × drug: verum vs placebo (+ 10)", "crp (× 2)", "ph (+ 0.05)", "women",
        "kids (+ 1)",
    ])  # fmt: skip
    np.testing.assert_allclose(effects["crp"].draws, 2.0 ** draws["crp"])
    np.testing.assert_allclose(effects["ph"].draws, np.exp(0.05 * draws["ph"]))
    (named,) = scale.effects(draws, {"age": 1}, names=["age"])
    assert named.label == "age (+ 1)"
    (odds_at_zero,) = scale.effects(draws, names=["Intercept"])
    np.testing.assert_allclose(odds_at_zero.draws, np.exp(draws["Intercept"]))
    told: Any
    for told, words in (
        ({"increments": {"sex": 1}}, "'sex'"), ({"increments": {"crp": 1.0}}, "a factor above 1"),
        ({"increments": {"age": 0}}, "other than zero"), ({"kind": "odd ratio"}, "Did you mean 'odds ratio'"),
        ({"names": ["agee"]}, "Did you mean 'age'"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=words):
            scale.effects(draws, **told)


def test_columns_of_curves_are_left_aside_and_recoded_levels_are_named():
    frame = table().assign(grade=np.arange(400) % 3)
    formula = "ill ~ C(grade, Treatment('1')) + bs(age, df=4) * drug + poly(crp, 2)"
    found = fp.sites(frame, by="centre", family="logistic", formula=formula)
    scale = EffectScale(**(found.effect_scale or {"kinds": {}}))
    draws = {name: np.linspace(0.1, 0.2, 5) for name in found.names}
    assert [one.label for one in scale.effects(draws)] == ["grade: 0 vs 1", "grade: 2 vs 1", "drug: verum vs placebo"]
    (curve,) = scale.effects(draws, names=["bs(age)[2]"])
    assert curve.label == "bs(age)[2]"
    alone = fp.sites(frame, by="centre", family="logistic", formula="ill ~ ns(age, df=3)")
    draws = {name: np.linspace(0.1, 0.2, 5) for name in alone.names}
    assert len(EffectScale(**(alone.effect_scale or {"kinds": {}})).effects(draws)) == 4


@pytest.fixture(scope="module")
def means():
    """A linear regression with known scale and a normal prior: each site's own posterior is known."""
    rng = np.random.default_rng(3)
    frame = pd.DataFrame({"centre": np.repeat(["a", "b", "c"], [100, 40, 10]), "dose": rng.normal(0, 12, 150)})
    frame["y"] = 2.0 + 0.1 * frame.dose + 2.0 * rng.normal(size=150)
    found = fp.sites(frame, by="centre", formula="y ~ dose", family="linear", scale=2.0, standardize=False,
                     prior="normal(0, 3)")  # fmt: skip
    return found, frame, fp.sample(found, seed=1, ess=400, progress=False)


def own(frame, site, prior=True):
    """Mean and covariance by one site's records."""
    part = frame[frame.centre == site]
    X = np.column_stack([np.ones(len(part)), part.dose])
    cov = np.linalg.inv(X.T @ X / 4.0 + prior * np.eye(2) / 9.0)
    return cov @ (X.T @ part.y.to_numpy()) / 4.0, cov


def test_each_site_is_estimated_by_its_own_records(means, tmp_path):
    found, frame, post = means
    post.save(tmp_path / "post.zarr")
    loaded = fp.load(tmp_path / "post.zarr")
    for (estimates, how), prior in (
        (each_site(post), True),
        (each_site(loaded, found), True),
        (each_site(loaded), False),
    ):
        assert ("without the prior" in how) != prior
        for site in "abc":
            mean, cov = own(frame, site, prior)
            drawn = np.stack([estimates[site][name] for name in found.names])
            np.testing.assert_allclose(drawn.mean(1), mean, atol=0.01 * np.sqrt(np.diag(cov)).max())
            np.testing.assert_allclose(np.cov(drawn), cov, rtol=0.05, atol=0.02 * cov.max())
            assert not np.allclose(drawn.mean(1), own(frame, "b" if site == "a" else "a")[0], atol=0.01)


def test_a_forest_plot_by_site_has_squares_by_weight_and_the_posterior_as_a_diamond(means):
    _, frame, post = means
    (axes,) = post.plot_forest(by="site")
    assert axes.get_title(loc="left") == "dose (+ 10)" and axes.get_xscale() == "linear"
    squares = [line for line in axes.lines if line.get_marker() == "s"]
    precision = np.asarray([1 / own(frame, site)[1][1, 1] for site in "abc"])
    area = np.asarray([line.get_markersize() ** 2 for line in squares])
    np.testing.assert_allclose(area[:2] / area[0], (precision / precision[0])[:2], rtol=0.05)
    (diamond,) = axes.patches
    low, high = np.quantile(10 * post.draws(2000)[..., 1], [0.025, 0.975])
    np.testing.assert_allclose([diamond.get_xy()[:, 0].min(), diamond.get_xy()[:, 0].max()], [low, high], atol=0.05)
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["a", "b", "c", "all sites"]
    assert "mode of its own likelihood" in axes.get_xlabel()
    with pytest.raises(InputError, match="'site'"):
        post.plot_forest(by="sites")
    pyplot.close("all")


def test_sites_that_cannot_be_estimated_alone_are_said(tmp_path):
    """A flat prior and a site where everybody has the same dose; sums only of the derivatives on a network."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"centre": np.repeat(["a", "b", "c"], 30), "dose": rng.normal(size=90)})
    frame.loc[60:, "dose"] = 0.5
    frame["ill"] = rng.integers(0, 2, 90)
    found = fp.sites(frame, by="centre", formula="ill ~ dose", family="logistic", prior="flat")
    post = fp.sample(found, seed=1, chains=4, duration=6.0, burn_in=1.0, progress=False)
    (axes,) = post.plot_forest(by="site")
    assert "none for c" in axes.get_xlabel() and [t.get_text() for t in axes.get_yticklabels()] == [
        "a",
        "b",
        "all sites",
    ]
    post.save(tmp_path / "post.zarr", state=False)
    with pytest.raises(InputError, match="derivatives of their own"):
        fp.load(tmp_path / "post.zarr").plot_forest(by="site")
    pyplot.close("all")


def test_a_forest_plot_has_ratios_on_a_log_axis_with_a_line_at_one():
    rng = np.random.default_rng(2)
    frame = pd.DataFrame({"centre": rng.choice(["a", "b"], 300), "age": rng.normal(60, 11, 300)})
    frame["ill"] = rng.random(300) < 1 / (1 + np.exp(-0.05 * (frame.age - 60)))
    found = fp.sites(frame, by="centre", formula="ill ~ age", family="logistic")
    post = fp.sample(found, seed=1, ess=400, progress=False)
    (axes,) = post.plot_forest()
    assert axes.get_xscale() == "log" and axes.get_xlabel() == "odds ratio"
    assert any(np.allclose(line.get_xdata(), 1.0) for line in axes.lines)
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["age (+ 10)"]
    ratios = post.ratios()
    assert ratios.index.name == "odds ratio" and list(ratios.columns) == ["median", "2.5%", "97.5%", "P(> 1)"]
    row = post.summary().loc["age"]
    np.testing.assert_allclose(ratios.iloc[0, :3], np.exp(10 * row[["median", "2.5%", "97.5%"]]), rtol=0.05)
    assert ratios.loc["age (+ 10)", "median"] == pytest.approx(
        fp.assessment.ratios(post, found, by={"age": 10}).iloc[0, 0], rel=1e-2
    )
    (plain,) = post.plot_forest(exp=False)
    assert plain.get_xscale() == "linear" and len(plain.get_yticklabels()) == 2
    pyplot.close("all")


def test_ratios_of_a_model_that_is_not_known_are_refused_and_its_parameters_are_drawn():
    site = fp.Site(fp.models.gaussian_mean(np.ones((9, 2))), name="a")
    post = fp.sample(site, chains=2, duration=4.0, burn_in=1.0, seed=1, progress=False)
    with pytest.raises(InputError, match="the scale 'parameter'"):
        post.ratios()
    assert post.plot_forest()[0].get_xlabel() == "parameter"
    assert post.plot_forest(exp=True)[0].get_xscale() == "log"
    pyplot.close("all")


def test_intervals_far_outside_are_cut_and_ticks_are_round():
    spreads = {"a": 0.1, "b": 0.1, "wide": 50.0}
    rows = [row_of(name, np.exp(spread * np.linspace(-2, 2, 101)), 0.95) for name, spread in spreads.items()]
    low, high = _limits(rows, True)
    assert rows[2].high > 1e20 and high < 10
    assert _ticks(0.4, 12.0, True) == [0.5, 1.0, 2.0, 5.0, 10.0] and 1.0 in _ticks(low, high, True)
    for lowest, highest in ((1e-6, 1e6), (0.9, 1.1), (0.999, 1.002), (0.3, 0.31)):
        assert 2 <= len(_ticks(lowest, highest, True)) <= 8


def test_decimals_of_an_estimate_and_its_interval():
    assert numbers(-71.32, 47.81, 172.4, False) == ["48", "-71", "172"]
    assert numbers(0.63, 0.887, 1.23, True) == ["0.89", "0.63", "1.23"]
    assert numbers(1.543, 2.7605, 5.6496, True) == ["2.76", "1.54", "5.65"]
    assert numbers(0.0017, 0.7298, 332.3127, True) == ["0.73", "0.0017", "332"]
    assert numbers(0.0998, 1.02, 10.48, True) == ["1.02", "0.10", "10.5"]
    assert numbers(25.28, 25.31, 25.35, True) == ["25.310", "25.280", "25.350"]
    assert numbers(0.9991, 1.0004, 1.0018, True) == ["1.0004", "0.9991", "1.0018"]
    assert numbers(0.12, 3000.4, 5e7, True) == ["3,000", "0.12", "5e+07"]


def test_cells_of_tables_are_escaped_and_know_their_column():
    text = html_table(pd.DataFrame({"<a>": ["1 & 2"], "b": ["3"]}, index=["x<y"]))
    assert "<th>x&lt;y</th>" in text and '<td data-column="&lt;a&gt;">1 &amp; 2</td>' in text
    assert "<th>drug<wbr>[T.verum]</th>" in html_table(pd.DataFrame({"drug[T.verum]": ["1"]}))
    assert 'class="many"' in html_table(pd.DataFrame({str(i): ["0"] for i in range(12)}))


def test_a_site_that_knows_nothing_of_an_effect_is_left_out_and_named():
    """All of a centre's patients have one value there; its own estimate would be the prior."""
    rng = np.random.default_rng(4)
    frame = pd.DataFrame({"centre": np.repeat(["a", "b", "c"], 30), "dose": rng.normal(0, 1, 90).round(2)})
    frame["ward"] = np.where(frame["centre"] == "c", 0, rng.integers(0, 2, 90))
    frame["ill"] = (rng.random(90) < 1 / (1 + np.exp(-frame["dose"]))).astype(int)
    post = fp.sample(
        fp.sites(frame, by="centre", formula="ill ~ dose + ward", family="logistic"), duration=3.0, chains=8, seed=1,
        progress=False,
    )  # fmt: skip
    axes = post.plot_forest(by="site")
    rows = [[label.get_text() for label in one.get_yticklabels()] for one in axes]
    assert [len(one) for one in rows] == [4, 3] and "c" not in rows[1]
    text = " ".join(one.get_text() for one in axes[-1].figure.findobj(lambda x: hasattr(x, "get_text")))
    assert "c: nothing about ward" in " ".join(text.split())
