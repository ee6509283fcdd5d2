"""Privacy budgets of model files: bounds of one record's derivatives, and the answers made of them."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from jax.nn import softplus
from tests.federation.studies import SEED, SITE_SEED, Folder
from tests.privacy.support import a_ledger

import fedpdmc as fp
from fedpdmc._jax.precision import double_precision
from fedpdmc.errors import InputError
from fedpdmc.federation.site_agent.start import open_agent
from fedpdmc.members import bounded_records
from fedpdmc.members.bounded_records import (
    ProgramFacts,
    RecordBounds,
    clip_and_add,
    grid,
    record_bounds,
    supremum,
)
from fedpdmc.members.private_site import plan_release
from fedpdmc.members.site import derivatives
from fedpdmc.models.families import family
from fedpdmc.privacy.budget_planning import ONE_SHOT
from fedpdmc.privacy.sensitivity import ModelFacts, derivative_sensitivity
from fedpdmc.study import parse_study, read_records

LOSSES = {
    "logistic": (lambda x, row: softplus(x["eta"]) - row["y"] * x["eta"], "binary", None),
    "poisson": (lambda x, row: jnp.exp(x["eta"]) - row["y"] * x["eta"], "count", (0.0, 10.0)),
    "linear": (lambda x, row: 0.5 * (row["y"] - x["eta"]) ** 2, "real", (-2.0, 2.0)),
    "student_t": (lambda x, row: 2.0 * jnp.log1p((row["y"] - x["eta"]) ** 2 / 3.0), "real", (-2.0, 2.0)),
}


def a_model(name):
    function, kind, _ = LOSSES[name]
    return fp.Model(function, columns={"y": kind}, predictors=["eta"], title=name)


def declared(name, **more):
    outcome = LOSSES[name][2]
    columns = {} if outcome is None else {"y": outcome}
    return fp.Bounds(norm=1.0, region=1.5, outcome=outcome, columns=columns, **more)


def bounds_of(model, bounds, width=3):
    return record_bounds(model, width, json.dumps(bounds.describe()))


@pytest.mark.parametrize("name", LOSSES)
def test_bounds_are_those_that_are_known_by_hand_and_never_below_a_value(name):
    bounds = declared(name)
    found = bounds_of(a_model(name), bounds)
    known = derivative_sensitivity(ModelFacts(name, 3, df=3.0), bounds, "replace")
    # By hand, predictors of logistic and Student-t models may be anything: these are a little larger.
    for change, by_hand in zip(found.changes("replace"), known, strict=True):
        assert 0.9 < change / by_hand < 1.1
    assert found.convex == (name != "student_t")
    rng = np.random.default_rng(3)
    X = rng.normal(size=(4000, 3))
    X /= np.linalg.norm(X, axis=1, keepdims=True)
    beta = rng.uniform(-1.5, 1.5, (4000, 3)) * rng.integers(0, 2, (4000, 1)) + 1.5 * np.sign(X) * rng.choice(
        [-1, 1], (4000, 1)
    )
    eta = np.sum(X * np.clip(beta, -1.5, 1.5), 1)
    low, high = LOSSES[name][2] or (0.0, 1.0)
    y = rng.choice([low, high], 4000)
    first = {
        "logistic": 1 / (1 + np.exp(-eta)) - y, "poisson": np.exp(eta) - y, "linear": eta - y,
        "student_t": 4 * (eta - y) / (3 + (eta - y) ** 2),
    }[name]  # fmt: skip
    assert 0.85 * found.gradient < np.max(np.abs(first)) <= found.gradient


def test_what_has_no_bound_is_refused_by_name():
    weibull = family("weibull")
    assert np.isfinite(bounds_of(weibull, fp.Bounds(norm=1.0, region=0.5, columns={"time": (0.5, 2.0)}), 2)).all()
    with pytest.raises(InputError, match="derivative by eta, log_shape has no bound"):
        bounds_of(weibull, fp.Bounds(norm=1.0, region=0.5, columns={"time": (0.0, 2.0)}), 2)
    with pytest.raises(InputError, match=r"Bounds\(columns: time\)"):
        bounds_of(weibull, fp.Bounds(norm=1.0, region=0.5), 2)
    with pytest.raises(InputError, match=r"Bounds\(region\)"):
        bounds_of(weibull, fp.Bounds(norm=1.0, columns={"time": (0.5, 2.0)}), 2)


def test_branch_and_bound_holds_and_is_sharp():
    """A function with its largest value inside, of which enclosures are twice too wide."""

    def value(points):
        return np.exp(-np.sum((points - 0.3) ** 2, 1))

    def upper(low, high):
        near = np.clip(0.3, low, high)
        return value(near) + 0.5 * np.sum(high - low, 1)

    found = supremum(upper, value, np.full((1, 2), -1.0), np.full((1, 2), 1.0))
    assert 1.0 <= found <= 1.03
    assert supremum(lambda low, high: np.full(len(low), np.inf), value, np.zeros((1, 1)), np.ones((1, 1))) == np.inf


def records(seed=0, n=1500):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, 2))
    X /= np.maximum(1.0, np.linalg.norm(X, axis=1, keepdims=True))
    return X, (rng.random(n) < 1 / (1 + np.exp(-X @ [0.8, -0.5]))).astype(float)


def a_site(path, model, X, y, name="site", **terms):
    bounds = {"bounds": fp.Bounds(norm=1.0, region=4.0)} | terms
    return fp.Site(model.of({"y": y}, X), name=name, budget=fp.Budget(2.0, 1e-5, ledger=a_ledger(path), **bounds))


def test_a_release_has_the_derivatives_and_noise_of_the_built_in_model(tmp_path):
    X, y = records()
    site = a_site(tmp_path / "file.db", a_model("logistic"), X, y)
    other = fp.Site(
        fp.models.logistic(X, y), name="site",
        budget=fp.Budget(2.0, 1e-5, ledger=a_ledger(tmp_path / "other.db"), bounds=fp.Bounds(norm=1.0, region=4.0)),
    )  # fmt: skip
    x = np.array([0.3, -0.1])
    found, (_, *known) = ProgramFacts(site.model, site.budget).derivatives(x), double_precision(derivatives)(other, x)
    for one, two in zip(found, known, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-6)
    noise = [plan_release(one, x, ONE_SHOT).noise(ONE_SHOT, 2.0, 0.1) for one in (site, other)]
    np.testing.assert_allclose(noise[0], noise[1], rtol=0.03)


def test_a_record_counts_for_no_more_than_its_bound_whatever_the_program_does(tmp_path, monkeypatch):
    """If the enclosures were wrong, one record would still change sums by no more than was said."""
    small = RecordBounds(0.01, 0.002)
    monkeypatch.setattr(bounded_records, "record_bounds", lambda *terms: small)
    X, y = records(n=1100)
    sums = []
    for value in (0.0, 1.0):
        y[7] = value
        site = a_site(tmp_path / f"{value}.db", a_model("logistic"), X, y)
        sums.append(ProgramFacts(site.model, site.budget).derivatives(np.zeros(2)))
    (first, second), rounding = ProgramFacts(site.model, site.budget).release(np.zeros(2), None, site.name)
    change = np.linalg.norm(sums[0][0] - sums[1][0])
    assert 0.015 < change <= first + 2 * rounding[0]
    # A record that is no number adds nothing, and sums are the same bits in every order.
    rng = np.random.default_rng(1)
    parts = rng.normal(size=(1000, 3))
    q, ones = grid(5.0, 1 << 22), np.ones(1000)
    held = double_precision(lambda *given: np.asarray(clip_and_add(*map(jnp.asarray, given))))
    total = held(ones, parts, 5.0, q)
    np.testing.assert_array_equal(held(ones, rng.permutation(parts), 5.0, q), total)
    np.testing.assert_allclose(total, parts.sum(0), atol=1000 * q)
    broken = np.concatenate([parts, [[np.nan, 1.0, 1.0]]])
    np.testing.assert_array_equal(held(np.ones(1001), broken, 5.0, q), total)


def test_the_posterior_is_that_of_the_records_where_noise_is_small(tmp_path):
    model, prior = a_model("logistic"), fp.models.normal_prior(2)
    sites, pooled = [], []
    for m in range(2):
        pooled.append(records(m))
        budget = {"bounds": fp.Bounds(norm=1.0, region=4.0), "ledger": a_ledger(tmp_path / f"{m}.db")}
        sites.append(
            fp.Site(model.of({"y": pooled[m][1]}, pooled[m][0]), name=f"{m}", budget=fp.Budget(1e3, 1e-5, **budget))
        )
    post = fp.sample(sites, prior, seed=1, progress=False)
    reference = fp.laplace([fp.Site(fp.models.logistic(X, y), name=f"{m}") for m, (X, y) in enumerate(pooled)], prior)
    mean, scale = np.asarray(reference.center), np.asarray(reference.matrix)
    sd = np.sqrt(np.diag(scale @ scale.T))
    assert np.all(np.abs(post.mean() - mean) < 0.1 * sd)
    np.testing.assert_allclose(np.sqrt(np.diag(post.cov())), sd, rtol=0.06)
    assert post.settings["exact"] is False and "exact posterior" not in post.settings["chosen"]


def test_sites_with_model_files_can_share_their_noise(tmp_path):
    model, prior = a_model("logistic"), fp.models.normal_prior(2)
    sites = [a_site(tmp_path / f"{m}.db", model, *records(m, 400), name=f"{m}", colluding=1) for m in range(3)]
    post = fp.sample(sites, prior, seed=1, progress=False)
    assert "shared by 3 sites" in post.settings["chosen"]
    assert all(told["spent"] == pytest.approx(1.0, abs=1e-6) for told in post.privacy.values())


def test_bad_terms_are_refused_before_anything_is_charged(tmp_path):
    X, y = records(n=50)
    model = a_model("logistic")
    with pytest.raises(InputError, match="'label' with a model file"):
        a_site(tmp_path / "a.db", model, X, y, neighbours="label")
    with pytest.raises(InputError, match="outside the declared bounds"):
        a_site(tmp_path / "a.db", model, 3 * X, y)
    clipped = a_site(tmp_path / "a.db", model, 3 * X, y, on_violation="clip")
    assert np.linalg.norm(np.asarray(clipped.model.data["X "]), axis=1).max() <= 1 + 1e-9
    with pytest.raises(InputError, match="at most 10 are declared"):
        a_site(tmp_path / "a.db", model, X, y, bounds=fp.Bounds(norm=1.0, region=4.0, most_records=10))
    with pytest.raises(InputError, match="or a model file"):
        fp.Site(lambda x: x @ x, name="function", budget=fp.Budget(1.0, 1e-5))


STUDY = """
format = 1
name = "survival"
sites = ["north", "south"]

[model]
family = "weibull"
formula = "time ~ drug"

[columns]
time = { type = "number", bounds = [0.5, 2.0] }
died = { type = "level", levels = ["no", "yes"] }
drug = { type = "level", levels = ["no", "yes"] }

[prior]
scale = 0.5

[run]
method = "private-laplace"

[releases]
arrivals = false
derivatives = "noisy"

[limits]
rounds = 100
records = 1000

[privacy]
epsilon = 300.0
delta = 1e-6
region = 0.5
"""


@pytest.mark.filterwarnings("ignore:The noise that the privacy budgets ask for")
def test_over_tls_a_family_of_the_library_as_in_process(tmp_path):
    rng = np.random.default_rng(5)
    for name in ("north", "south"):
        drug, died = rng.choice(["no", "yes"], 60), rng.choice(["no", "yes"], 60)
        rows = zip(rng.uniform(0.5, 2.0, 60).round(3), died, drug, strict=True)
        (tmp_path / f"{name}.csv").write_text("time,died,drug\n" + "".join(f"{t},{d},{g}\n" for t, d, g in rows))
    folder = Folder(tmp_path / "study", STUDY)
    data = {name: tmp_path / f"{name}.csv" for name in folder.study.sites}
    asked = {
        name: open_agent(
            folder.study, name, data[name], store=tmp_path / name, seed=SITE_SEED, seeded_for_tests=True,
            ledger=a_ledger(tmp_path / f"{name}.db"),
        )
        for name in folder.study.sites
    }  # fmt: skip
    with folder.listening() as connection, folder.sites(connection, asked):
        post = fp.sample(connection, progress=False)
    local = []
    for name in folder.study.sites:
        budget = folder.study.budget(a_ledger(tmp_path / f"here {name}.db"), name, seeded_for_tests=True)
        potential = folder.study.potential(read_records(folder.study, data[name]), name)
        local.append(fp.Site(potential, name=name, seed=SITE_SEED, budget=budget))
    expected = fp.sample(local, folder.study.prior(), method="private-laplace", seed=SEED, progress=False)
    np.testing.assert_array_equal(post.draws(50), expected.draws(50))
    assert post.rounds == 4 and all(told["spent"] == pytest.approx(1.0, abs=1e-6) for told in post.privacy.values())
    assert list(post.names) == list(folder.study.names) and "shape" in expected.variables(5)


@pytest.mark.parametrize(("old", "new", "match"), [
    ("region = 0.5\n", "", "privacy: region"),
    ("region = 0.5\n", 'region = 0.5\nneighbours = "label"\n', "privacy: neighbours"),
    ('[run]\nmethod = "private-laplace"', "", "observed_time|arrivals"),
])  # fmt: skip
def test_contracts_that_no_budget_covers_are_refused(old, new, match):
    assert old in STUDY
    with pytest.raises(InputError, match=match):
        parse_study(STUDY.replace(old, new).encode())


def test_weights_count_up_to_the_declared_one(tmp_path):
    """Of a family by its program as of a built-in one: derivatives are weighted, and what a record changes is scaled."""
    X, y = records()
    weights, x = np.random.default_rng(4).uniform(0, 3, len(y)), np.array([0.3, -0.1])
    found = {}
    for bound in (1.0, 3.0):
        budget = {"bounds": fp.Bounds(norm=1.0, region=4.0, weight=bound)}
        for kind, model in (
            ("program", a_model("logistic").of({"y": y}, X, weights=weights)),
            ("built in", fp.models.logistic(X, y, weights=weights)),
        ):

            def site(kind=kind, model=model, budget=budget, bound=bound, **terms):
                own = fp.Budget(2.0, 1e-5, ledger=a_ledger(tmp_path / f"{kind} {bound}.db"), **budget, **terms)
                return fp.Site(model, name="site", budget=own)

            if bound < weights.max():
                with pytest.raises(InputError, match="outside the declared bounds.*weight"):
                    site()
            held = site(on_violation="clip")
            sums = ProgramFacts(held.model, held.budget).derivatives(x) if kind == "program" else None
            sums = double_precision(derivatives)(held, x)[1:] if sums is None else sums
            found[kind, bound] = (*sums, *plan_release(held, x, ONE_SHOT).sensitivity)
    for bound in (1.0, 3.0):
        plain = fp.Site(fp.models.logistic(X, y, weights=np.minimum(weights, bound)), name="site")
        expected = double_precision(derivatives)(plain, x)[1:]
        for kind in ("program", "built in"):
            for one, two in zip(found[kind, bound], expected, strict=False):
                np.testing.assert_allclose(one, two, rtol=1e-6, atol=1e-9)
    for kind in ("program", "built in"):
        np.testing.assert_allclose(np.array(found[kind, 3.0][2:]) / found[kind, 1.0][2:], 3.0, rtol=1e-3)
