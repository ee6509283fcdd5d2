"""One site lies about its derivatives: what no records tell is named, and what they could is said."""

import dataclasses
import warnings

import numpy as np
import pytest
from tests.federation.studies import SITE_SEED, Folder
from tests.federation.test_derivative_disclosure import OWN, RUN, Guarded, searched
from tests.study.contracts import EFFECTS, rows, write_csv

import fedpdmc as fp
from fedpdmc.certificates import read_credentials
from fedpdmc.errors import BadAnswer, InputError
from fedpdmc.federation import messages
from fedpdmc.federation.derivative_plausibility import Plausible, doubts
from fedpdmc.federation.derivative_rounding import release
from fedpdmc.federation.site_agent.start import open_agent
from fedpdmc.results.verdict import ConvergenceWarning
from fedpdmc.study import parse_study


def lying(agent, change):
    """A site whose derivatives are others than it has."""
    honest = agent.answer

    def answer(data):
        out = honest(data)
        message = messages.decode(out)
        if not isinstance(message, messages.Derivatives):
            return out
        return messages.encode(dataclasses.replace(message, **change(message, messages.decode(data).x)))

    agent.answer = answer
    return agent


LIES = {
    "a Hessian of 1e140": (lambda m, x: {"hessian": np.eye(3) * 1e140}, "Hessian that 1,000,000 records"),
    "a gradient of 1e300": (lambda m, x: {"gradient": np.full(3, 1e300)}, "gradient that 1,000,000 records"),
    "a gradient of 1e8": (lambda m, x: {"gradient": np.array([0.0, 1e8, 0.0])}, "gradient that 1,000,000 records"),
    "negative curvature": (lambda m, x: {"hessian": m.hessian - 30 * np.eye(3)}, "negative curvature"),
    "a Hessian a hundred times too large": (lambda m, x: {"hessian": 100 * m.hessian}, "contradict each other"),
    "gradients of another place": (lambda m, x: {"gradient": m.gradient + 30 * np.sin(5 * x)}, "contradict each other"),
    "one Hessian that grows": (lambda m, x: {"hessian": m.hessian * (1 + 50 * bool(x.any()))}, "contradict each other"),
}


@pytest.mark.parametrize(("change", "words"), LIES.values(), ids=LIES)
def test_derivatives_that_no_records_have_stop_the_run_by_name(tmp_path, change, words):
    folder = Guarded(tmp_path / "study", records=60, policy=LOOSE)
    with folder.listening() as connection:
        agents = {name: fresh(folder, name, tmp_path) for name in folder.study.sites}
        lying(agents["south"], change)
        with folder.sites(connection, agents), pytest.raises(BadAnswer, match=f"site 'south': .*{words}"):
            fp.sample(connection, progress=False)


LOOSE = """
least_records = 2
most_bits = 1e9
most_bits_in_all = 1e9
least_without_budget = 0
most_parameters_per_record = 0.5
families = ["logistic"]
derivatives = "own"
passes = true
largest_share = 1.0
most_rounds = 1000000
most_observed_time = 1e6
"""


def fresh(folder, name, tmp_path):
    credentials = read_credentials(folder.keys(name))
    return open_agent(
        folder.study, name, folder.data[name], store=tmp_path / name, seed=SITE_SEED, credentials=credentials
    )


@pytest.mark.parametrize("family", ["logistic", "poisson", "linear", "student_t"])
def test_honest_sites_are_believed(tmp_path, family):
    """Records of many kinds, all points of a search and many others."""
    text = OWN if family == "logistic" else OWN.replace('"logistic"', f'"{family}"')
    options = {"poisson": "", "linear": "scale = 2.0", "student_t": "scale = 2.0\ndf = 3.0", "logistic": ""}[family]
    column = {"poisson": '{ type = "count", bounds = [0, 60] }'}.get(family, '{ type = "number", bounds = [-20, 80] }')
    if family != "logistic":
        text = text.replace('formula = "ill', f'{options}\nformula = "ill')
        text = text.replace('ill = { type = "level", levels = ["no", "yes"] }', f"ill = {column}")
    study, rng = parse_study(text.encode()), np.random.default_rng(4)
    for seed in range(6):
        table = rows("north", 15 + 40 * seed, seed)
        if family != "logistic":
            table = [(int(rng.poisson(3)), drug, age) for _, drug, age in table]
        path = write_csv(tmp_path / "north.csv", table)
        agent = open_agent(study, "north", path, store=tmp_path / f"{family} {seed}", seed=1)
        agent.join(messages.encode(messages.Welcome(RUN, study.digest)))
        plausible, x = Plausible(study), np.zeros(3)
        for k in range(11):
            message = messages.decode(agent.answer(messages.encode(messages.Derive(RUN, k + 1, x))))
            plausible.check("north", x, message.gradient, message.hessian)
            x = x if k == 9 else x + 10 ** rng.uniform(-3, 0) * rng.normal(size=3) / [1, 1, 3]
        agent.log.close()


def test_rounding_of_correlated_columns_is_believed_and_a_hundredfold_hessian_is_not():
    """On the grid the Hessian of nearly collinear columns has negative eigenvalues; no lie is as small as that."""
    study, rng, flat, named = parse_study(OWN.encode()), np.random.default_rng(3), 0, 0
    largest = Plausible(study)._largest
    for trial in range(60):
        n = int(rng.choice([20, 200, 5000]))
        design = np.c_[np.ones(n), rng.integers(0, 2, n), rng.uniform(-3, 5, n)]
        if trial % 2:
            design[:, 1] = np.clip(design[:, 0] - 0.01 * rng.random(n), 0, 1)
        y = rng.random(n) < 0.3
        honest, liar, before, x, lied = Plausible(study), Plausible(study), None, np.zeros(3), False
        for _ in range(6):
            p = 1 / (1 + np.exp(-design @ x))
            exact = design.T @ (p - y), design.T @ ((p * (1 - p))[:, None] * design)
            before = release(x, *exact, before, rng.bytes(8))
            honest.check("north", x, before.gradient, before.hessian)
            flat += np.linalg.eigvalsh(before.hessian)[0] < 0
            try:
                liar.check("north", x, before.gradient, 100 * before.hessian)
            except BadAnswer:
                lied = True
            x = x + rng.normal(size=3) / largest / 3
        named += lied
    assert flat > 20 and named > 50


def test_a_site_with_more_records_than_the_contract_has_is_refused(tmp_path):
    study = parse_study(OWN.replace("[limits]", "[limits]\nrecords = 11").encode())
    path = write_csv(tmp_path / "north.csv", rows("north", 12))
    with pytest.raises(InputError, match="12 records.*allows 11"):
        open_agent(study, "north", path, store=tmp_path / "store", seed=1)


def test_a_posterior_that_records_cannot_make_or_have_not_made_is_said():
    study = parse_study(OWN.replace("[limits]", "[limits]\nrecords = 100").encode())
    plausible, prior = Plausible(study), np.full(3, 2.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plausible.check_posterior(np.full(3, 0.5), np.array([0.4, 0.5, 0.2]))
    with pytest.warns(UserWarning, match=r"deviation of drug\[T.verum\] is far below what 100 records"):
        plausible.check_posterior(np.full(3, 0.5), np.array([0.4, 1e-2, 0.2]))
    with pytest.warns(UserWarning, match="The posterior equals the prior"):
        plausible.check_posterior(np.full(3, 0.01), prior)


def test_a_sum_is_held_to_the_records_of_all_sites():
    plausible, x = Plausible(parse_study(OWN.encode())), np.zeros(3)
    plausible.check("north, south", x, np.ones(3), np.eye(3) * 4e5, sites=2)
    with pytest.raises(BadAnswer, match="north, south.*a Hessian that"):
        plausible.check("north, south", x, np.ones(3), np.eye(3) * 9e5, sites=2)


def test_an_honest_site_may_round_up_what_is_the_most():
    """A million records of curvature ¼; the usual grid has 64 steps and that of first and far releases eight."""
    plausible, x = Plausible(parse_study(OWN.encode())), np.zeros(3)
    plausible.check("north", x, np.ones(3), np.eye(3) * 2**18 * 1.125)
    with pytest.raises(BadAnswer, match="a Hessian that"):
        plausible.check("north", x, np.ones(3), np.eye(3) * 2**18 * (1.125 + 1 / 64))


def test_a_site_that_tells_nearly_everything_is_named(tmp_path):
    folder = Guarded(tmp_path / "study", records=12, policy=LOOSE)
    write_csv(folder.path / "south.csv", rows("south", 4000))
    with pytest.warns(UserWarning, match=r"Site 'south' contributes 99\.\d+ %"):
        searched(folder, tmp_path, believed=True)


THREE = OWN.replace('"south"]', '"south", "west"]')


def patients(n, effect, seed):
    """Records of a site at which a drug has this log odds ratio."""
    rng = np.random.default_rng(seed)
    drug, age = rng.integers(0, 2, n), rng.integers(20, 90, n)
    ill = rng.random(n) < 1 / (1 + np.exp(-effect * drug))
    return [(("no", "yes")[int(i)], ("placebo", "verum")[d], int(a)) for i, d, a in zip(ill, drug, age, strict=True)]


def three_sites(path, records, effect):
    folder = Guarded(path, THREE, LOOSE)
    for seed, (name, n, own) in enumerate((("north", 100, 0.0), ("south", 100, 0.0), ("west", records, effect))):
        write_csv(folder.data[name], patients(n, own, seed))
    return folder


def test_a_site_of_invented_records_that_moves_the_posterior_is_named(tmp_path):
    """9,900 invented records with a log odds ratio of 6 move it from 0 to above 4. No other check says so."""
    with pytest.warns(UserWarning, match=r"Site 'west' contradicts the other sites: drug\[T.verum\]") as said:
        post = three_sites(tmp_path / "lie", 9900, 6.0).in_process()
    assert post.mean()[1] > 4 and not any("contributes" in str(one.message) for one in said)
    west = post.settings["influence"]["west"]
    assert 0.8 < west["share"] < 0.99 and west["contradicts"] > 10
    # A bound on the number of records, not more than there are.
    assert 100 < west["least_records"] <= 9900
    told = str(post.summary())
    assert "Site 'west' contradicts" in told
    post.report(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "contradicts the other sites" in page and "west: 9" in page
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        honest = three_sites(tmp_path / "honest", 9900, 0.0).in_process()
    assert honest.settings["doubts"] == [] and honest.settings["influence"]["west"]["contradicts"] < 5
    assert "contradicts" not in str(honest.summary())


def test_honest_sites_contradict_each_other_no_more_than_by_chance():
    """The largest of three moves, in standard errors: as of correlated normal variables, whatever the sites' sizes."""
    study, found = parse_study(THREE.encode()), []
    rng = np.random.default_rng(8)
    for _ in range(200):
        truth, sizes = rng.normal(size=3) / [1, 1, 3], (60, 200, 1500)
        designs = [np.c_[np.ones(n), rng.integers(0, 2, n), rng.uniform(-3, 4, n)] for n in sizes]
        outcomes = [rng.random(n) < 1 / (1 + np.exp(-X @ truth)) for n, X in zip(sizes, designs, strict=True)]
        X, y, x = np.concatenate(designs), np.concatenate(outcomes), np.zeros(3)
        for _ in range(20):
            p = 1 / (1 + np.exp(-X @ x))
            x = x - np.linalg.solve(X.T @ ((p * (1 - p))[:, None] * X) + np.eye(3) / 2.5**2, X.T @ (p - y) + x / 2.5**2)
        plausible = Plausible(study)
        for name, X, y in zip(study.sites, designs, outcomes, strict=True):
            p = 1 / (1 + np.exp(-X @ x))
            plausible.check(name, x, X.T @ (p - y), X.T @ ((p * (1 - p))[:, None] * X))
        weights = plausible.weigh_sites()
        assert doubts(weights) == []
        found.append([weights[name]["contradicts"] for name in study.sites])
    # The median and the 90 % quantile of the largest of three independent normal variables are 1.26 and 2.11.
    assert (abs(np.median(found, 0) - 1.2) < 0.25).all() and (abs(np.quantile(found, 0.9, 0) - 2.05) < 0.35).all()


EFFECTS_LIES = {
    "a Hessian of 1e140": (lambda m, x: {"hessian": np.eye(len(x)) * 1e140}, "Hessian that 1,000,000 records"),
    "of the spread": (lambda m, x: {"hessian": m.hessian + 1e140 * np.diag(np.eye(len(x))[-1])}, "Hessian that"),
    "a gradient of 1e300": (lambda m, x: {"gradient": np.full(len(x), 1e300)}, "gradient that 1,000,000 records"),
}


@pytest.mark.parametrize(("change", "words"), EFFECTS_LIES.values(), ids=EFFECTS_LIES)
def test_they_do_where_effects_are_integrated_out(tmp_path, change, words):
    folder = Folder(tmp_path / "study", EFFECTS)
    with folder.listening() as connection:
        agents = {name: fresh(folder, name, tmp_path) for name in folder.study.sites}
        lying(agents["south"], change)
        with folder.sites(connection, agents), pytest.raises(BadAnswer, match=f"site 'south': .*{words}"):
            fp.sample(connection, progress=False)


def silent_with_many_records(agent, times):
    """A site that tells derivatives of so many times its records, and then no arrivals: it signs that it has none."""
    lying(agent, lambda m, x: {"gradient": times * m.gradient, "hessian": times * m.hessian})
    handlers = agent.computation._handlers
    honest = handlers[messages.Plans]

    def answer(message, asked):
        none = np.zeros(len(message.chain))
        given = honest(message, asked)
        return messages.Arrivals.of_chains(given.run, given.sequence, asked, none, none > 0, none.astype(int))

    handlers[messages.Plans] = answer


def test_a_site_of_made_up_records_that_is_silent_is_warned_of(tmp_path):
    """Live: the whole run, which gives the posterior of the lie, does not end without a warning that says so."""
    folder = Guarded(tmp_path / "study", OWN.replace("[limits]", "[limits]\nrecords = 100000"), LOOSE, 60)
    with folder.listening() as connection:
        agents = {name: fresh(folder, name, tmp_path) for name in folder.study.sites}
        silent_with_many_records(agents["south"], 1000)
        with folder.sites(connection, agents), pytest.warns(UserWarning) as said:
            post = fp.sample(connection, progress=False)
    texts = [str(one.message) for one in said]
    assert any("Site 'south' contributes 99" in text for text in texts), texts
    assert np.sqrt(np.diag(post.cov())).max() < 0.05


def test_some_chains_set_out_wider_than_the_reference(tmp_path):
    folder = Folder(tmp_path, OWN.replace("chains = 4", "chains = 64"))
    from fedpdmc._jax.precision import double_precision
    from fedpdmc.federation.session import _method
    from fedpdmc.results.diagnostics import wide_chains
    from fedpdmc.sampling.factory import start_state

    with fp.connect(folder.study, data=folder.data, seed=3) as connection:
        method = double_precision(_method)(connection, None, "skeleton")
        method = method.replace(reference=dataclasses.replace(method.reference, starts=None))
        start = np.asarray(double_precision(start_state)(method, 1.0).a)
    distance, far = np.sqrt(np.mean(start**2, -1)), wide_chains(64)
    np.testing.assert_allclose(distance[far], 2.0)
    assert 0.7 < np.sqrt(np.mean(distance[~far] ** 2)) < 1.3
