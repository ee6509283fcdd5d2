"""Functions in formulas: the same columns everywhere, proved bounds, and nothing that is evaluated."""

import warnings

import jax
import numpy as np
import pandas as pd
import pytest
from scipy.interpolate import BSpline, CubicSpline
from scipy.special import expit
from tests.study.contracts import CONTRACT, EFFECTS

import fedpdmc as fp
from fedpdmc.errors import InputError
from fedpdmc.study import read_study
from fedpdmc.study.contract import parse_study
from fedpdmc.study.formula import Design, FormulaFunction, outward, split
from fedpdmc.study.read_data import check_cells, read_records
from fedpdmc.study.schema import Column
from fedpdmc.study.sites_from_table import check_table, sites
from fedpdmc.study.study_response import Outcome


def table(n=150, seed=0):
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({
        "centre": rng.choice(["north", "south", "west"], n, p=[0.6, 0.3, 0.1]), "age": rng.normal(60, 12, n).clip(20, 94),
        "dose": rng.gamma(2, 3, n) + 0.1, "arm": rng.choice(["active", "placebo", "sham"], n),
        "days": rng.uniform(5, 30, n), "ward": rng.choice(list("ABCD"), n),
    })  # fmt: skip
    eta = np.sin(frame.age / 12) + 0.5 * np.log(frame.dose)
    return frame.assign(
        died=rng.random(n) < expit(eta), falls=rng.poisson(frame.days * np.exp(eta) / 10),
        bmi=25 + 3 * eta + rng.normal(size=n),
        grade=pd.Categorical(np.asarray(["mild", "bad", "grave"])[np.digitize(eta + rng.logistic(size=n), [0, 1.5])],
                             ["mild", "bad", "grave"], ordered=True),
    )  # fmt: skip


def value(site, x):
    with jax.enable_x64(True):
        return float(site.potential.value(jax.numpy.asarray(x)))


def settings(formula):
    """The settings of each function, by its label."""
    return {one.label: one.settings for one in split(formula) if isinstance(one, FormulaFunction)}


def by_hand(frame, formula):
    """Columns of bs, ns, poly and others by SciPy and NumPy, with the constants that the formula states."""
    own = settings(formula)
    bs, ns = own["bs(age)"], own["ns(dose)"]
    ends = [bs["lower"]] * 4 + bs["knots"] + [bs["upper"]] * 4
    count = len(ends) - 4
    splines = [BSpline(ends, np.eye(count)[i], 3)(frame.age) for i in range(1, count)]
    knots = [ns["lower"], *ns["knots"], ns["upper"]]
    natural = CubicSpline(knots, np.eye(len(knots))[:, 1:], bc_type="natural")(frame.dose).T
    first, second = (frame.days - own["poly(days)"]["alpha"][0], own["poly(days)"]["norms"])
    quadratic = ((frame.days - own["poly(days)"]["alpha"][1]) * first - second[0]) / np.sqrt(second[1])
    levels = [frame.arm == "active", frame.arm == "sham"]
    crossed = [a * b for a in splines for b in levels]
    plain = [np.log(frame.dose), *natural, first / np.sqrt(second[0]), quadratic, frame.age * frame.days / 100]
    return np.stack([np.ones(len(frame)), *splines, *levels, *plain, *crossed], 1).astype(float)


COVARIATES = "log(dose) + ns(dose, df=3) + poly(days, 2) + I(age * days / 100)"
FORMULA = f"died ~ bs(age, df=5) * C(arm, Treatment('placebo')) + {COVARIATES}"


def test_design_and_posterior_are_those_of_columns_made_by_hand():
    frame = table()
    found = sites(frame, by="centre", formula=FORMULA, family="logistic")
    assert found.names[:8] == (
        "Intercept",
        *(f"bs(age)[{i}]" for i in range(1, 6)),
        "C(arm)[T.active]",
        "C(arm)[T.sham]",
    )
    assert "bs(age)[2]:C(arm)[T.sham]" in found.names and "I(age * days / 100)" in found.names
    x = np.random.default_rng(1).normal(size=len(found.names)) / 3
    for site in found:
        own = frame[frame.centre == site.name]
        X = by_hand(own, found.study.formula)
        order = [list(found.names).index(name) for name in found.names if ":" not in name]
        pairs = [f"bs(age)[{i}]:C(arm)[T.{level}]" for i in range(1, 6) for level in ("active", "sham")]
        X = X[:, np.argsort([*order, *(list(found.names).index(name) for name in pairs)])]
        np.testing.assert_allclose(found.study.matrix(found.tables[site.name]), X, rtol=0, atol=1e-12)
        plain = fp.Site(fp.models.logistic(X, own.died.to_numpy(float)), name="by hand")
        assert value(site, x) == pytest.approx(value(plain, x), rel=1e-12)


def test_all_sites_and_new_patients_have_one_basis_which_their_own_knots_would_not_give(tmp_path):
    frame = table()
    found = sites(frame, by="centre", formula=FORMULA, family="logistic")
    study = read_study(found.write(tmp_path / "study.toml"))
    told = [line for line in study.text.splitlines() if not line.startswith(b"from_table")]
    assert told == found.study.text.splitlines() and "knots=[" in study.formula and "df=" not in study.formula
    assert repr(found).count("knots=[") == 2
    west = frame[frame.centre == "west"]
    west.to_csv(tmp_path / "west.csv")
    records = read_records(study, tmp_path / "west.csv")
    np.testing.assert_array_equal(study.matrix(records), found.study.matrix(found.tables["west"]))
    alone = sites({"west": west}, formula=FORMULA, family="logistic")
    assert settings(alone.study.formula)["bs(age)"] != settings(study.formula)["bs(age)"]
    assert np.max(np.abs(alone.study.matrix(alone.tables["west"]) - study.matrix(records))) > 0.05


def test_over_a_network_with_splines(tmp_path):
    """The posterior of a linear regression with a wide prior is centred at least squares; another basis is elsewhere."""
    frame = table(120)
    found = sites(frame, by="centre", formula="bmi ~ bs(age, df=4) + log(dose)", family="linear", prior="normal(0, 20)")
    text = found.study.text.decode().replace(
        "[releases]", "[run]\nduration = 30.0\n\n[dynamics]\nchains = 16\n\n[releases]"
    )
    study, files = parse_study(text.encode()), {}
    for name in study.sites:
        files[name] = tmp_path / f"{name}.csv"
        frame[frame.centre == name].to_csv(files[name])
    with fp.connect(study, data=files, seed=1) as connection:
        post = fp.sample(connection, progress=False)
    own = settings(study.formula)["bs(age)"]

    def fit(knots):
        ends = [own["lower"]] * 4 + knots + [own["upper"]] * 4
        splines = [BSpline(ends, np.eye(5)[i], 3)(frame.age) for i in range(1, 5)]
        return np.linalg.lstsq(np.stack([np.ones(120), *splines, np.log(frame.dose)], 1), frame.bmi, rcond=None)[0]

    mean, sd = post.summary()[["mean", "sd"]].iloc[:6].to_numpy(float).T
    assert post.certified and np.all(np.abs(mean - fit(own["knots"])) < 0.4 * sd)
    assert np.any(np.abs(mean - fit([own["knots"][0] - 15])) > 0.8 * sd)


def test_an_ordinal_regression_with_a_spline_its_predictions_and_patients_beyond_it():
    frame = table()
    found = sites(frame, by="centre", formula="grade ~ bs(age, df=3)", family="ordered_logit")
    own = settings(found.study.formula)["bs(age)"]
    curve = BSpline([own["lower"]] * 4 + [own["upper"]] * 4, np.eye(4)[:, 1:], 3)
    x = np.asarray([0.4, -0.3, 0.8, -0.5, 0.2])
    assert found.names == ("bs(age)[1]", "bs(age)[2]", "bs(age)[3]", "first_cut", "log_gaps[0]")
    for site in found:
        own = frame[frame.centre == site.name]
        below = expit(np.asarray([x[3], x[3] + np.exp(x[4])])[:, None] - curve(own.age) @ x[:3])
        share = np.diff(np.r_[np.zeros((1, len(own))), below, np.ones((1, len(own)))], axis=0)
        exact = -np.sum(np.log(share[own.grade.cat.codes, np.arange(len(own))]))
        assert value(site, x) == pytest.approx(exact, rel=1e-10)
    post = fp.sample(found, ess=100, seed=1, progress=False)
    new = pd.DataFrame({"age": [40.0, 70.0]})
    seen = fp.assessment.predict(post, found, new).xs("mild", level="level")["mean"]
    draws = post.draws(2000 // post.chains).reshape(-1, 5)
    np.testing.assert_allclose(seen, expit(draws[:, 3] - curve(new.age) @ draws[:, :3].T).mean(1), atol=0.05)
    with pytest.raises(
        InputError,
        match=r"column 'age': found a value out of bounds .'97'.*declared bounds are 22 to 94.*In bs\(\) give the same ends",
    ):
        fp.assessment.predict(post, found, pd.DataFrame({"age": [50, 97]}))
    with pytest.raises(
        InputError, match=r"column 'age': found .* out of bs\(age\), which is known from .* lower=..., upper="
    ):
        fp.assessment.effects(post, found, "age", by=10)


COLUMNS = {
    "y": Column("y", "count", (), (0.0, 9.0)),
    "u": Column("u", "number", (), (-3.0, 5.0)),
    "v": Column("v", "number", (), (0.5, 20.0), 5.0, 2.0),
    "w": Column("w", "number", (), (1.0, 8.0), log=True),
    "arm": Column("arm", "level", ("a", "b", "c")),
}
# Each with the share of its largest values that records attain, all but.
TERMS = {
    "log(v)": 0.999, "I(u ** 2)": 0.999, "I(1 / v)": 0.99, "I(v ** 0.5)": 0.999, "I(u ** 3 / 2 - 1)": 0.99, "I(u * v)": 0.97,
    "log(w)": 0.999, "center(u, 1)": 0.99, "scale(log(v), 1, 0.5)": 0.99, "bs(u, knots=[-1, 2])": 0.4,
    "bs(v, knots=[3], degree=1, lower=0, upper=21)": 0.9, "cr(u, knots=[-1, 0, 4])": 0.99,
    "ns(v, knots=[2, 9], upper=10)": 0.99,
    "poly(u, 4, raw=True)": 0.99, "poly(u, 3, alpha=[1, 1.2, 0.8], norms=[4, 20, 90])": 0.98, "bs(log(v), knots=[1])": 0.4,
    "I(-(u + 2) ^ 2)": 0.999, "bs(u, knots=[-1, 2]) * log(v)": 0.4, "log(v) * C(arm, Treatment('b'))": 0.99,
}  # fmt: skip


@pytest.mark.parametrize("term", TERMS)
def test_bounds_of_the_design_hold_and_are_attained(term):
    design, rng, n = Design(f"y ~ {term}", COLUMNS), np.random.default_rng(0), 20_000
    raw = {
        name: np.r_[one.bounds, rng.uniform(*one.bounds, n)] for name, one in COLUMNS.items() if one.type == "number"
    }
    records = pd.DataFrame({name: (np.log(x) if COLUMNS[name].log else x) for name, x in raw.items()})
    records = records.assign(v=(raw["v"] - 5) / 2, arm=pd.Categorical(rng.choice(list("abc"), n + 2)))
    seen, largest = np.abs(design.matrix(records)).max(0), design.largest
    assert np.all(seen <= largest * (1 + 1e-12)) and np.all(seen >= TERMS[term] * largest)


def test_values_in_functions_are_those_that_were_recorded():
    """Whatever center, scale and log the contract declares for the column as a term of its own."""
    design = Design("y ~ v + log(v) + w + I(w / 2)", COLUMNS)
    records = pd.DataFrame({"v": [0.5], "w": [np.log(4.0)]})
    np.testing.assert_allclose(design.matrix(records), [[1, 0.5, np.log(6), np.log(4), 2]], rtol=1e-14)


def test_names_of_functions_that_differ_in_settings_and_products_of_one():
    names = Design("y ~ bs(u, knots=[0]) + bs(u, knots=[1], degree=1) + log(v)", COLUMNS).names
    assert {"bs(u)[1]", "bs(u, knots=[1], degree=1)[2]", "log(v)"} <= set(names)
    assert Design("y ~ (bs(u, degree=2) + v) ** 2", COLUMNS).names == (
        "Intercept", "bs(u)[1]", "bs(u)[2]", "v", "bs(u)[1]:v", "bs(u)[2]:v",
    )  # fmt: skip
    assert Design("y ~ log(v) - 1 + bs(u, degree=1) - bs(u, degree=1)", COLUMNS).names == ("log(v)",)
    odd = {"y": COLUMNS["y"], "BMI (kg)": Column("BMI (kg)", "number", (), (15.0, 50.0)), "ph.ecog": COLUMNS["u"]}
    assert Design("y ~ log(`BMI (kg)`) + I(ph.ecog ^ 2)", odd).names[1:] == ("log(BMI (kg))", "I(ph.ecog ** 2)")


def test_offsets_in_a_formula_are_those_of_the_arguments_and_added_once(tmp_path):
    frame, x = table().assign(log_days=lambda t: np.log(t.days)), np.asarray([0.1, 0.2])
    told = {"by": "centre", "family": "poisson"}
    found = sites(frame, **told, formula="falls ~ log(dose) + offset(log(days))")
    exposure = sites(frame, **told, formula="falls ~ log(dose)", exposure="days")
    assert found.names == ("Intercept", "log(dose)") and found.prior_lines == exposure.prior_lines
    twice = sites(frame, **told, formula="falls ~ log(dose) + offset(log_days) + offset(I(0 * age))")
    for other in (exposure, twice, sites(frame, **told, formula="falls ~ log(dose)", offset="log_days")):
        assert [value(site, x) for site in other] == pytest.approx([value(site, x) for site in found], rel=1e-12)
    study = read_study(found.write(tmp_path / "study.toml"))
    assert study.used == {"falls", "dose", "days"} and study.model.declared(study.columns)["offset"] == pytest.approx(
        np.log(study.columns["days"].bounds)
    )
    new = check_table(found.study, pd.DataFrame({"dose": [2.0, 2.0], "days": [10.0, 20.0]}), response=False)
    low, high = Outcome(found.study, x[None]).law(new).mean()[:, 0]
    assert low == pytest.approx(10 * np.exp(0.1 + 0.2 * np.log(2))) and high == pytest.approx(2 * low)
    for formula, family, options, words in (
        (
            "falls ~ offset(log(days))",
            "poisson",
            {"exposure": "days"},
            "'days' is a term of the formula too|Give one of them",
        ),
        ("falls ~ age + offset(log(days))", "poisson", {"offset": "log_days"}, "both would be added"),
        ("died ~ offset(log(days))", "logistic", {}, "Offsets are for family 'poisson'"),
        ("days ~ offset(log(dose))", "gamma", {}, "Offsets are for family 'poisson'"),
        ("falls ~ offset(log(days)) * age", "poisson", {}, "a term of its own"),
        ("falls ~ offset(days)", "poisson", {}, "write offset.log"),
    ):
        with pytest.raises(InputError, match=words):
            sites(frame, by="centre", formula=formula, family=family, **options)


def test_default_priors_are_of_the_values_and_not_of_bounds():
    frame = table(300)
    told = {
        "by": "centre",
        "formula": "bmi ~ ns(age, df=4) + log(dose) + scale(log(days)) + poly(days, 2)",
        "family": "linear",
    }
    plain = sites(frame, **told)
    bounded = sites(frame, **told, columns={"age": {"bounds": [0, 500]}, "dose": {"bounds": [1e-6, 1e4]}})
    assert plain.prior_lines == bounded.prior_lines and plain.study.formula == bounded.study.formula
    x = np.random.default_rng(0).normal(size=len(plain.names))
    assert [value(site, x) for site in plain] == [value(site, x) for site in bounded]
    line = next(line for line in plain.prior_lines if "ns(age)[1]" in line)
    assert "ns(age)[4]" in line and "log(dose)" in " ".join(plain.prior_lines)
    # Prior draws of the curve vary as the response does, not a tenth and not ten times as much.
    scale = dict(zip(plain.names, np.broadcast_to(plain.study.prior_scale, len(plain.names)), strict=False))
    X = plain.study.design.matrix(pd.concat(plain.tables.values()))
    columns = [i for i, name in enumerate(plain.study.design.names) if name.startswith("ns(")]
    b = np.random.default_rng(1).normal(size=(500, 4)) * scale["ns(age)[1]"]
    assert 0.2 < np.mean((X[:, columns] @ b.T).std(0)) < 2


def test_coefficients_of_groups_may_be_of_functions(tmp_path):
    frame = table()
    told = {"by": "centre", "family": "logistic"}
    found = sites(frame, **told, formula="died ~ log(dose) + (1 + center(age) | ward)")
    own = frame[frame.centre == "north"]
    effects = np.asarray(found["north"].potential.effects)[: len(own), 1]
    middle = float(found.study.formula.split("center(age, ")[1].split(")")[0])
    np.testing.assert_allclose(np.sort(effects), np.sort(own.age - middle), atol=1e-12)
    assert read_study(found.write(tmp_path / "study.toml")).used == {"died", "dose", "age", "ward"}
    by_site = sites(frame, **told, formula="died ~ 1 + (1 + log(dose) | centre)")
    assert by_site.study.effects.formula.groups == "site"
    with pytest.raises(InputError, match="4 columns of the design. Between groups one column of numbers can vary"):
        sites(frame, **told, formula="died ~ 1 + (1 + bs(age, df=4) | ward)")


def changed(*pairs, text=CONTRACT):
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    return parse_study(text.encode())


BUDGET = (
    ('derivatives = "own"', 'derivatives = "none"'), ("passes = true", "passes = false"),
    ("chains = 4", 'chains = 4\nkind = "ZigZag"'), ("[limits]", "[privacy]\nepsilon = 1.0\ndelta = 1e-6\n\n[limits]"),
)  # fmt: skip


def test_a_budget_rests_on_the_bounds_of_functions():
    study = changed(("drug + age", "drug + ns(age, knots=[60]) + log(age) + center(age, 50)"), *BUDGET)
    box = study.budget().bounds.box
    assert (
        box[2:].tolist() == study.design.largest[2:].tolist()
        and box[4] == pytest.approx(np.log(100))
        and box[5] == pytest.approx(50)
    )
    with pytest.raises(InputError, match="log.age. of age from 0 to 100. Logarithms need values above 0"):
        changed(("drug + age", "drug + log(age)"), ("[18, 100]", "[0, 100]"), *BUDGET)


@pytest.mark.long
def test_a_contract_with_functions_runs_on_synthetic_records():
    from fedpdmc.federation.dry_run import try_study

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert try_study(changed(("drug + age", "drug + bs(age, knots=[60])"))).rounds > 0


def test_few_records_of_a_spline_are_a_small_cell():
    study = changed(("drug + age", "bs(age, knots=[40, 60, 80], degree=1)"))
    records = pd.DataFrame(
        {"ill": pd.Categorical(["no", "yes"] * 20), "age": (np.r_[np.linspace(20, 79, 38), 95, 99] - 50) / 10}
    )
    check_cells(study, records, 2)
    with pytest.raises(InputError, match=r"values other than 0 of 'bs\(age\)\[4\]': found only 2 records"):
        check_cells(study, records, 3)


@pytest.mark.parametrize(
    ("formula", "words"),
    [
        ("drug + bs(age, df=5)", r"Write knots in place of df, as in bs\(age, knots=\[40, 60\], lower=18, upper=95\)"),
        ("drug + poly(age, 2)", "Write raw=True, or alpha"),
        ("drug + center(age)", r"center\(age\). Write its numbers, as in center\(age, 50\)"),
        ("drug + I(scale(age) ** 2)", "Write its numbers"),
        ("drug + bs(age, knots=[17])", "Knots rise, above lower = 18 and below upper = 100"),
        (
            "drug + bs(age, upper=90)",
            "from 18 to 90, of age whose bounds allow 18 to 100. Write wider ends, lower=18, upper=100",
        ),
        ("drug + log(weight)", "'weight'. Declare this column"),
        ("drug + log(drug)", r"C\(...\) is of levels"),
        ("C(age)", r"C\(...\) is of levels"),
        ("drug + I(age / (age - 50))", "Divisors cannot be 0"),
        ("drug + I((age - 50) ** 0.5)", "Powers that are not whole"),
        ("drug + log(log(age - 17.5))", "Logarithms need values above 0"),
        ("log(ill)", "both sides|levels"),
    ],
)
def test_a_contract_says_everything_or_what_to_write(formula, words):
    with pytest.raises(InputError, match=words):
        changed(("drug + age", formula))


@pytest.mark.parametrize(
    ("formula", "words"),
    [
        ("sqrt(age)", "^formula: found 'sqrt.age.'. Write I.... .. 0.5.. The functions are bs, cr, ns, poly, log"),
        ("ln(age)", "Write log"),
        ("factor(arm)", "Write C"),
        ("bss(age)", "Did you mean 'bs'?"),
        ("log(arm)", "column 'arm': found text, in a function .* write C.arm."),
        ("log(zero)", "column 'zero': found 0 in log.zero.. Logarithms need values above 0.* log.1 . dose."),
        ("I(age / zero)", "column 'age', 'zero': found .* and 0 in I.age / zero."),
        ("I(age * (1 / 0))", "column 'age': found .* divisors are not 0"),
        ("scale(log(-age))", "column 'age': found .* in scale.log.-age.."),
        ("bs(age, df=2)", "df, which is at least the degree"),
        ("bs(age, df=4, knots=[50])", "Give df, which is at least the degree, or knots"),
        ("bs(age, knots=[5])", "Knots rise, above lower"),
        ("bs(few, df=6)", "6 columns of 4 different values. Give fewer knots, or a smaller df"),
        ("poly(few, 4)", "4 columns of 4 different values"),
        ("ns(age)", "Give df, the number of columns, or knots: ns.age, df=4."),
        ("bs(age, df=5, knot=3)", "bs takes one column or expression, df, knots, lower, upper, degree"),
        ("bs(age, df=4.5)", "df is a whole number"),
        ("bs(age, lower='a')", "lower is a number"),
        ("C(arm, Sum)", "the only one there is"),
        ("C(arm, Treatment('none'))", "The declared levels are 'active', 'placebo', 'sham'"),
        ("log(age", "Close the parentheses"),
        ("age**(age", "Close|valid|formula such as"),
        ("weight + log(age)", "no column 'weight'"),
        ("log(weight)", "no column 'weight'"),
    ],
)
def test_errors_are_in_words_of_the_table(formula, words):
    frame = table().assign(zero=lambda t: np.arange(len(t)) % 3, few=lambda t: np.arange(len(t)) % 4)
    with pytest.raises(InputError, match=words.replace("?", "[?]")) as error:
        sites(frame, by="centre", formula=f"died ~ {formula}", family="logistic")
    assert "study.toml" not in str(error.value) and len(str(error.value)) < 500


def test_the_response_is_a_column():
    with pytest.raises(InputError, match='For its log: columns={"y": {"log": True}}'):
        sites(table(), by="centre", formula="log(bmi) ~ age", family="linear")


def test_levels_and_their_order_in_a_table():
    frame = table().assign(stage=lambda t: np.arange(len(t)) % 3)
    order = sites(
        frame, by="centre", formula="died ~ C(stage) + C(arm, levels=['sham', 'placebo', 'active'])", family="logistic"
    )
    assert order.names == ("Intercept", "C(stage)[T.1]", "C(stage)[T.2]", "C(arm)[T.placebo]", "C(arm)[T.active]")
    assert order.study.columns["stage"].type == "level"


def test_the_ends_of_a_spline_are_of_the_table_or_given():
    frame = table()
    told = {"by": "centre", "family": "logistic"}
    found = sites(frame, **told, formula="died ~ bs(age, df=4)")
    with pytest.raises(InputError, match="Write wider ends, lower=.*, upper=110, or declare narrower bounds"):
        sites(frame, **told, formula="died ~ bs(age, df=4)", columns={"age": {"bounds": [20, 110]}})
    both = sites(frame, **told, formula="died ~ bs(age, df=4) + log(age) + I(dose / age)")
    assert both.study.columns["age"].bounds == found.study.columns["age"].bounds == outward(frame.age.to_numpy())
    wide = sites(frame, **told, formula="died ~ bs(age, df=4, lower=10, upper=110)")
    assert wide.study.columns["age"].bounds == (10, 110)
    assert settings(wide.study.formula)["bs(age)"]["knots"] == settings(found.study.formula)["bs(age)"]["knots"]
    natural = sites(frame, **told, formula="died ~ ns(age, df=4)")
    assert natural.study.columns["age"].bounds[1] > outward(frame.age.to_numpy())[1]


CALLS = [
    "__import__('os').system('touch /tmp/x')", "I(__import__('os'))", "log(age.__class__)", "I(age[0])", "I(lambda: age)",
    "bs(age, knots=[x for x in age])", "bs(*age)", "bs(age, **age)", "I(f'{age}')", "I((age := 3))", "log(age)(3)",
    "I(age if 1 else 2)", "I(age @ age)", "bs(age, degree=99)", "poly(age, 0)",
    "I(" + "(" * 300 + "age" + ")" * 300 + ")", "I(" + "-" * 1500 + "age)", "I(age ** 9 ** 9)",
    "I(9" + "9" * 400 + " * age)",
    "I(age ** age)", "I(age ** 1j)", "I(True * age)", "bs(bs(age, df=4), df=4)", "log()", "I(2)", "C(1)", "log(age, 3)",
    "bs(age, knots=[" + "1, " * 60 + "2])", "I(age and age)", "log(`age)", "bs(age, knots=[1e999])",
    "poly(age, 2, alpha=[1, 2], norms=[1, -1])", "poly(age, 2, alpha=[1], norms=[1])", "I('age')",
    "scale(age, 1, 0)", "log(\\u202eage)",
]  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_strange_calls_are_refused_at_once_and_in_a_sentence(call):
    with pytest.raises(InputError) as error:
        changed(("ill ~ drug + age", f"ill ~ drug + {call}".replace('"', "'")))
    assert len(str(error.value)) < 600


def test_a_slope_in_a_contract_is_declared():
    study = changed(("(1 | ward)", "(1 + I(age / 10) | ward)"), text=EFFECTS)
    assert study.names[-3:] == ("log_sd[0]", "log_sd[1]", "atanh_correlation")
    with pytest.raises(InputError, match="Write its numbers"):
        changed(("(1 | ward)", "(1 + center(age) | ward)"), text=EFFECTS)
