"""Arrivals of model files under a privacy budget: those of the built-in model, and no record exceeds its bound."""

import jax.numpy as jnp
import numpy as np
import pytest
from tests.federation.studies import SEED, SITE_SEED, Folder, same_bits
from tests.members.test_private_model_files import STUDY, a_model, records
from tests.privacy.support import a_ledger

import fedpdmc as fp
from fedpdmc._jax.precision import double_precision
from fedpdmc.clocks.private_arrivals import time_grid
from fedpdmc.errors import Discontinuous, InputError, PlanRefused
from fedpdmc.federation.site_agent.start import open_agent
from fedpdmc.members.bounded_records import ClippedSum, ProgramFacts
from fedpdmc.members.private_site import PrivateSite, _arrays, _first, chain_secrets, less_public
from fedpdmc.members.run_coordinates import Opening
from fedpdmc.plan import Plan
from fedpdmc.potentials import Quadratic
from fedpdmc.potentials.quadratic import ControlVariate
from fedpdmc.whitening import Reference

ROWS = np.array([[0.3, 0.0], [0.1, 0.2]])


def a_budget(path, **terms):
    bounds = {"norm": 1.0, "region": 4.0, "most_records": 64} | terms.pop("bounds", {})
    return fp.Budget(8.0, 1e-5, ledger=a_ledger(path), bounds=fp.Bounds(**bounds), **terms)


def an_opening(dynamics, control=True):
    quadratic = Quadratic(jnp.array([[9.0, 2.0], [2.0, 8.0]]), jnp.array([-3.0, 1.0]))
    own = ControlVariate(quadratic, jnp.zeros(2), 2) if control else None
    return Opening(Reference(jnp.array([0.5, -0.3]), jnp.asarray(ROWS)), dynamics, own)


@pytest.mark.parametrize("dynamics", [fp.ZigZag(), pytest.param(fp.FactorisedBoomerang(), marks=pytest.mark.long)])
@double_precision
def test_they_are_those_of_the_built_in_model(tmp_path, dynamics):
    """With the same secret points: which of them are looked at differs, which is the first below the rates does not."""
    X, y = records(n=60)
    file = fp.Site(a_model("logistic").of({"y": y}, X), name="s", budget=a_budget(tmp_path / "file.db"))
    known = fp.Site(fp.models.logistic(X, y), name="s", budget=a_budget(tmp_path / "known.db"))
    opening, rng = an_opening(dynamics), np.random.default_rng(1)
    own, other = (PrivateSite(site, opening, "run") for site in (file, known))
    np.testing.assert_allclose(own.sensitivity, other.sensitivity, rtol=1e-2)
    chains = 64
    velocity = rng.choice([-1.0, 1.0], (chains, 1, 2)) if dynamics.unit_speed else rng.normal(size=(chains, 1, 2))
    plan = Plan(
        jnp.zeros(chains, int), jnp.asarray(rng.normal(size=(chains, 2))), jnp.ones((chains, 1)), jnp.asarray(velocity)
    )
    passes = own._check_plan(_arrays(plan))[1]
    keys, grid = chain_secrets(b"k" * 32, b"points", chains), time_grid(np.ones(chains), 2)
    found = [
        _first(
            less_public(site, opening), dynamics, jnp.asarray(2.0), jnp.asarray(1e-9), grid, keys,
            jnp.asarray(passes), plan,
        )
        for site in (file, known)
    ]  # fmt: skip
    for one, two in zip(*found, strict=True):
        np.testing.assert_array_equal(one, two)
    assert np.mean(found[0][1]) > 0.5


def _whitened(model, budget, x):
    """The gradient that a private site computes, at points x, in whitened coordinates."""
    reference = Reference(jnp.zeros(2), jnp.asarray(ROWS))
    a = np.linalg.solve(ROWS, np.asarray(x).T).T
    return np.asarray(ProgramFacts(model, budget).walked().whiten(reference, None).gradients(jnp.asarray(a)))


def spiteful() -> fp.Model:
    """A loss with a large second derivative, and values that are not numbers beyond its region."""
    return fp.Model(
        lambda x, row: jnp.exp(3 * x["eta"]) - row["y"] * x["eta"] + 0.1 * jnp.log(2.0 - x["eta"]),
        predictors=["eta"], columns={"y": "real"},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("neighbours", "model"), [pytest.param("replace", "logistic", marks=pytest.mark.long), ("add-remove", "spiteful")]
)
@double_precision
def test_no_pair_of_neighbours_is_further_apart_than_the_account_says(tmp_path, neighbours, model):
    """Records at the corners, points within the region and far beyond it; without clipping the same attack succeeds."""
    made, columns = (a_model("logistic"), {}) if model == "logistic" else (spiteful(), {"y": (-3.0, 3.0)})
    region = 4.0 if model == "logistic" else 0.7
    budget = a_budget(tmp_path / "a.db", neighbours=neighbours, bounds={"region": region, "columns": columns})
    rng = np.random.default_rng(2)
    X, y = records(n=30)
    corners = np.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.6, 0.8], [-0.6, -0.8]])
    x = np.concatenate([rng.uniform(-region, region, (40, 2)), rng.normal(size=(40, 2)) * 30, [[1e6, -1e6]]])
    k = np.array(ProgramFacts(made.of({"y": y}, X), budget).change(ROWS))
    base = _whitened(made.of({"y": y}, X), budget, x)
    largest, loose = np.zeros(3), 0.0
    for corner in corners:
        for label in (0.0, 1.0) if model == "logistic" else (-3.0, 3.0):
            if neighbours == "replace":
                other_X, other_y = np.r_[X[:-1], corner[None]], np.r_[y[:-1], label]
            else:
                other_X, other_y = np.r_[X, corner[None]], np.r_[y, label]
            other = made.of({"y": other_y}, other_X)
            change = _whitened(other, budget, x) - base
            norms = [np.abs(change).max(1), np.abs(change).sum(1), np.linalg.norm(change, axis=1)]
            largest = np.maximum(largest, [norm.max() for norm in norms])
            free = ClippedSum(other.function, np.inf, 2.0**-40)
            part = ProgramFacts(other, budget).walked()
            wild = np.asarray(free(jnp.asarray([0.0, 2.0]) * (region + 20) / 2, part.data)) @ ROWS
            loose = max(loose, float(np.linalg.norm(wild - _whitened(made.of({"y": y}, X), budget, x)[-1])))
    assert np.all(largest <= k * (1 + 1e-9))
    assert largest[2] > (0.4 if neighbours == "replace" else 0.3) * k[2]
    if model == "spiteful":
        assert loose > 1e3 * k[2]


@double_precision
def test_what_no_budget_covers_is_refused(tmp_path):
    X, y = records(n=60)
    site = fp.Site(a_model("logistic").of({"y": y}, X), name="s", budget=a_budget(tmp_path / "a.db"))
    own = PrivateSite(site, an_opening(fp.ZigZag(), control=False), "run")

    def plan(start, duration):
        return Plan(jnp.zeros(1, int), jnp.asarray([start]), jnp.asarray([[duration]]), jnp.ones((1, 1, 2)))

    with pytest.raises(PlanRefused, match="REGION"):
        own.answer(plan([0.0, 0.0], 30.0))
    many = a_budget(tmp_path / "b.db", bounds={"most_records": 1 << 22})
    site = fp.Site(a_model("logistic").of({"y": y}, X), name="s", budget=many)
    with pytest.raises((PlanRefused, InputError), match="most_records"):
        PrivateSite(site, an_opening(fp.ZigZag(), control=False), "run").answer(plan([0.0, 0.0], 1.0))
    with pytest.raises(InputError, match="'label' with a model file"):
        fp.Site(a_model("logistic").of({"y": y}, X), name="s", budget=a_budget(tmp_path / "c.db", neighbours="label"))
    jumps = fp.Model(
        lambda x, row: jnp.where(x["eta"] > 0, 1.0, 0.0) + x["eta"] * row["y"],
        predictors=["eta"],
        columns={"y": "binary"},
    )
    with pytest.raises(Discontinuous):
        fp.Site(jumps.of({"y": y}, X), name="s", budget=a_budget(tmp_path / "d.db"))


@pytest.mark.long
def test_a_private_chain_is_exact(tmp_path):
    """Two sites with the budget of a giant, against the posterior on a grid."""
    prior, sites, pooled = fp.models.normal_prior(2, scale=1.0), [], []
    for m in range(2):
        X, y = records(m, 40)
        pooled.append((X, y))
        budget = fp.Budget(
            1e6, 1e-5, ledger=a_ledger(tmp_path / f"{m}.db"), bounds=fp.Bounds(norm=1.0, region=8.0, most_records=64),
            excess=0.5,
        )  # fmt: skip
        sites.append(fp.Site(a_model("logistic").of({"y": y}, X), name=f"{m}", budget=budget))
    reference = Reference(jnp.array([0.5, -0.3]), jnp.array([0.4, 0.4]))
    post = fp.sample(
        sites, prior, dynamics=fp.ZigZag(), reference=reference, chains=64, duration=60.0, burn_in=10.0, seed=1,
        progress=False,
    )  # fmt: skip
    grid = np.stack(np.meshgrid(*[np.linspace(-3, 4, 281)] * 2, indexing="ij"), -1).reshape(-1, 2)
    energy = 0.5 * np.sum(grid**2, 1)
    for X, y in pooled:
        eta = grid @ X.T
        energy += np.sum(np.logaddexp(0, eta) - y * eta, 1)
    p = np.exp(-(energy - energy.min()))
    p /= p.sum()
    draws = post.draws(120)
    for power in (1, 2, 3):
        exact, found = p @ grid**power, (draws**power).reshape(64, -1, 2).mean(1)
        error = found.std(0, ddof=1) / 8
        assert np.all(np.abs(found.mean(0) - exact) < 4 * error), (power, exact, found.mean(0), error)
        shifted = p @ (grid + 0.15) ** power
        assert np.any(np.abs(found.mean(0) - shifted) > 4 * error)


# Two sites of sixty patients: no privacy worth the name, but an account that must be right.
RUN = '[dynamics]\nkind = "ZigZag"\nchains = 2\n\n[run]\nduration = 0.1\nburn_in = 0.01'
CHAIN = (
    STUDY.replace('[run]\nmethod = "private-laplace"', RUN)
    .replace('arrivals = false\nderivatives = "noisy"', 'derivatives = "none"')
    .replace("rounds = 100\nrecords = 1000", "rounds = 100000\nrecords = 64\nobserved_time = 100.0")
    .replace("epsilon = 300.0", "epsilon = 200000.0")
)


# A short run has not converged, and looks as if no records could give it.
@pytest.mark.filterwarnings("ignore:The posterior's standard deviation")
@pytest.mark.long
@pytest.mark.parametrize("neighbours", ["replace", "add-remove"])
def test_over_tls_as_in_process(tmp_path, neighbours):
    rng, data = np.random.default_rng(5), {}
    for name in ("north", "south"):
        rows = zip(
            rng.uniform(0.5, 2.0, 60).round(3),
            rng.choice(["no", "yes"], 60),
            rng.choice(["no", "yes"], 60),
            strict=True,
        )
        data[name] = tmp_path / f"{name}.csv"
        data[name].write_text("time,died,drug\n" + "".join(f"{t},{d},{g}\n" for t, d, g in rows))
    folder = Folder(tmp_path / "study", CHAIN + f'neighbours = "{neighbours}"\n')
    seeds = dict.fromkeys(folder.study.sites, SITE_SEED)
    with fp.connect(
        folder.study, data=data, seed=SEED, site_seeds=seeds, ledger=a_ledger(tmp_path / "ledger.db"),
        store=tmp_path / "run", seeded_for_tests=True,
    ) as connection:  # fmt: skip
        expected = fp.sample(connection, progress=False)
    agents = {
        name: open_agent(
            folder.study, name, data[name], store=tmp_path / name, seed=SITE_SEED, seeded_for_tests=True, dataset=name,
            ledger=a_ledger(tmp_path / f"{name}.db"),
        )
        for name in folder.study.sites
    }  # fmt: skip
    with folder.listening() as connection, folder.sites(connection, agents):
        post = fp.sample(connection, progress=False)
    assert same_bits(post, expected)
    for told in post.privacy.values():
        assert 0 < told["spent"] < 1 and told["observed"] > 0 and told["neighbours"] == neighbours
