"""Reports: whole, self-contained, and saying what the run was."""

import re
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest

import fedpdmc as fp

VOID = {"meta", "br", "wbr", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """The text, the tags and what a page would fetch; tags must nest."""

    def __init__(self, text):
        super().__init__()
        self.open, self.text, self.fetched, self.titles = [], "", [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.fetched += [value for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.fetched += [value for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text += data
        if self.open and self.open[-1] == "h2":
            self.titles.append(data)


@pytest.fixture(scope="module")
def post():
    rng = np.random.default_rng(0)
    sites = [fp.Site(fp.models.gaussian_mean(rng.normal(1, 1, (30, 2))), name=f"<{name}>") for name in ("a", "b")]
    prior = fp.models.normal_prior(2, scale=3.0)
    return fp.sample(sites, prior, names=["dose & age", "sex"], ess=400, seed=1, progress=False)


def test_a_report_needs_nothing_else_and_says_what_the_run_was(post, tmp_path):
    text = post.report(tmp_path / "study.html", title="Trial", question="Does it work?").read_text()
    page = Page(text)
    assert all(target.startswith("#") for target in page.fetched)
    assert not re.search(r"url\((?!#)|@import", text)
    assert page.titles == [
        "Question", "Estimates", "Sites", "Convergence", "Privacy", "Exactness", "Methods", "Citation", "Record of the run",
        "Words",
    ]  # fmt: skip
    for words in ("Trial", "Does it work?", "<a>", "dose & age", f"{post.rounds} rounds", "not differentially private"):
        assert words in page.text
    assert "certified" in page.text and str(post.settings["seed"]) in page.text
    assert text.count("<svg") == 4 and "prefers-color-scheme: dark" in text and "@media print" in text
    assert "#000000" not in text  # what matplotlib draws in black is in the page's own colour


def test_a_run_that_has_not_converged_is_said_first(tmp_path):
    site = fp.Site(fp.models.gaussian_mean(np.full((3, 1), 50.0)), name="a")
    short = fp.sample(site, dynamics=fp.ZigZag(), reference="identity", chains=2, duration=3.0, burn_in=0.0,
                      init=np.zeros(1), seed=1, progress=False)  # fmt: skip
    text = short.report(tmp_path / "short.html").read_text()
    assert '<p class="verdict bad"><b>Sampling</b>: NOT converged' in text
    assert '<p class="verdict open"><b>Fit</b>: not assessed:' in text and text.index("not assessed") < text.index(
        "Estimates"
    )


def test_misfit_and_dropped_records_are_in_the_banner(tmp_path):
    """A run that has converged is no fit: sites with slopes of opposite sign, and records that are left out."""
    rng = np.random.default_rng(1)
    n = 240
    frame = pd.DataFrame({"region": np.repeat(["n", "s", "w"], n // 3), "dose": rng.normal(size=n)})
    slope = frame.region.map({"n": 2.0, "s": -2.0, "w": 0.0})
    frame["falls"] = rng.poisson(np.exp(1 + slope * frame.dose).clip(upper=60) * rng.gamma(0.3, 1 / 0.3, n))
    frame.loc[:19, "dose"] = np.nan
    with pytest.warns(UserWarning, match="leaves out many records: n 25 %"):
        sites = fp.sites(frame, by="region", formula="falls ~ dose", family="poisson", missing="drop")
    assert "20 of 240 records (n 25 %) dropped for a missing value" in repr(sites)
    post = fp.sample(sites, ess=200, seed=1, progress=False)
    fit = fp.assessment.assess(post, sites)
    banner = post.report(tmp_path / "study.html", sites=sites, assessment=fit).read_text().split("<h2>")[0]
    assert '<p class="verdict"><b>Sampling</b>: converged' in banner
    assert '<p class="verdict bad"><b>Fit</b>: n, s' in banner and "do not share the parameters" in banner
    assert "predictive checks have p &lt; 0.01" in banner
    assert '<p class="verdict bad"><b>Records</b> dropped for a missing value: n 20 of 80 (25 %).' in banner
    one_law = frame.dropna().assign(falls=rng.poisson(np.exp(1 + 0.3 * frame.dose.dropna())))
    good = fp.sites(one_law, by="region", formula="falls ~ dose", family="poisson")
    post = fp.sample(good, ess=200, seed=1, progress=False)
    page = post.report(tmp_path / "good.html", sites=good, assessment=fp.assessment.assess(post, good)).read_text()
    assert '<p class="verdict"><b>Fit</b>: no misfit was found at the sites.' in page and "<b>Records" not in page


def _with_effects():
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"region": np.repeat(["n", "s", "w"], 20), "dose": rng.normal(size=60)})
    frame["ill"] = rng.integers(0, 2, 60)
    sites = fp.sites(frame, by="region", formula="ill ~ dose + (1 | region)", family="logistic")
    return fp.sample(sites, chains=2, duration=4.0, burn_in=1.0, seed=1, progress=False)


def _of_means(names=("n", "s", "w"), **options):
    sites = [fp.Site(fp.models.gaussian_mean(np.ones((9, 1))), name=name) for name in names]
    prior = fp.models.normal_prior(1, scale=3.0)
    return fp.sample(sites, prior, **options, chains=2, duration=4.0, burn_in=1.0, seed=1, progress=False)


@pytest.mark.parametrize(
    "made", [pytest.param(_with_effects, marks=pytest.mark.long), lambda: _of_means(prior_at="extra")]
)
def test_who_walks_the_prior_is_not_a_site(made, tmp_path):
    run = made()
    assert run.settings["sites"] == ["n", "s", "w", "prior"]
    run.save(tmp_path / "run")
    post = fp.load(tmp_path / "run")
    text = post.report(tmp_path / "study.html").read_text()
    sites = text[text.index("<h2>Sites") : text.index("<h2>Convergence")]
    assert "<th>w</th>" in sites and "<th>prior</th>" not in sites
    assert f"{int(post.bytes[:3].sum()):,} bytes in all" in sites
    assert "from records at 3 sites" in text and "\nprior (coordinator): " in text and re.search("\n(n, s, )?w: ", text)
    assert "messages (the coordinator's own for the prior included)" in str(post.summary()).replace("\n", " ")


def test_a_site_that_is_named_prior_is_a_site(tmp_path):
    post = _of_means(names=("n", "prior"))
    text = post.report(tmp_path / "study.html").read_text()
    assert "<th>prior</th>" in text and "from records at 2 sites" in text and "(coordinator)" not in text


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("logistic", "odds ratio"),
        pytest.param("poisson", "rate ratio", marks=pytest.mark.long),
        ("linear", "difference in ill"),
    ],
)
def test_effects_prior_and_dropped_records_are_told(family, kind, tmp_path):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"region": np.repeat(["n", "s"], 20), "dose": rng.normal(size=40)})
    frame["ill"] = rng.integers(0, 2, 40)
    frame.loc[3, "dose"] = np.nan
    sites = fp.sites(frame, by="region", formula="ill ~ dose", family=family, missing="drop", standardize=False)
    post = fp.sample(sites, chains=2, duration=6.0, burn_in=1.0, seed=1, progress=False)
    text = post.report(tmp_path / "study.html", sites=sites).read_text()
    page = Page(text)
    methods = page.text[page.text.index("Model: ") :]
    assert "1 of 40 records (n 5 %) dropped for a missing value." in methods and "hold 95 % of the posterior" in methods
    deviation = np.asarray(sites.prior.precision)[1, 1] ** -0.5
    assert "The prior was weakly informative" in methods and f"dose ~ normal(0, {deviation:.3g})" in methods
    table = text[text.index(f"<th>{kind} (median)</th>") :].split("</table>")[0]
    (row,) = re.findall("<tr>(.*?)</tr>", table.split("<tbody>")[1])
    label, median, interval = re.findall(r"<t[hd](?: data-column=\"[^\"]*\")?>(.*?)</t[hd]>", row)
    assert label == "dose (+ 1)"
    draws = post.draws(1000)[..., 1] if family == "linear" else np.exp(post.draws(1000)[..., 1])
    np.testing.assert_allclose(
        [float(x) for x in (median, *interval.split(" to "))],
        np.quantile(draws, [0.5, 0.025, 0.975]),
        rtol=0.1,
        atol=0.01,
    )
    assert "<h3>By site</h3>" in text and text.count('aria-label="forest plot') == 2
    assert "<td>" not in text.split("<h2>Fit")[0]  # every cell knows its column, so that rows can wrap


def test_plots_are_arviz_plots(post):
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    for plot in (post.plot_trace, post.plot_pairs):
        axes = np.ravel(plot())
        assert axes.size and all(hasattr(one, "figure") for one in axes)
    plt.close("all")
    assert "<table" in post._repr_html_() and "converged" in post._repr_html_()
