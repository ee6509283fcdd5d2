"""Studies with a privacy budget: the ledger is the site's, and charges before the answer leaves."""

import numpy as np
import pytest
from tests.federation.studies import SEED, SITE_SEED, ZIGZAG, Folder, same_bits
from tests.privacy.support import a_ledger
from tests.study.contracts import POLICY, write_csv

import fedpdmc as fp
from fedpdmc._jax.precision import double_precision
from fedpdmc.errors import InputError
from fedpdmc.federation import messages
from fedpdmc.federation.site_agent import computation
from fedpdmc.federation.site_agent.audit_log import Kind, read_log
from fedpdmc.federation.site_agent.audit_replay import NO_SECRET, replay
from fedpdmc.federation.site_agent.start import open_agent
from fedpdmc.members import private_site
from fedpdmc.members.site import derivatives
from fedpdmc.privacy.ledger import Ledger, read
from fedpdmc.study import parse_study, read_policy

# Twelve records and covariates up to five: no privacy worth the name, but an account that must be right.
BUDGET = "\n[privacy]\nepsilon = 20000.0\ndelta = 1e-6\n"
PRIVATE = ZIGZAG.replace("chains = 4", "chains = 2").replace("duration = 6.0", "duration = 0.05") + BUDGET
PRIVATE = PRIVATE.replace("burn_in = 1.0", "burn_in = 0.01").replace("rounds = 2000", "rounds = 100000")
PRIVATE = PRIVATE.replace("passes = true\n", "")
NOISY = PRIVATE.replace("excess = 0.1", 'excess = 0.1\nreference = "laplace"\ncontrol = "quadratic"')
NOISY = NOISY.replace('derivatives = "none"', 'derivatives = "noisy"') + "release = 0.25\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return Folder(tmp_path_factory.mktemp("private"), PRIVATE)


@pytest.fixture(scope="module")
def noisy(tmp_path_factory):
    """Sites that release noisy derivatives for a reference."""
    return Folder(tmp_path_factory.mktemp("noisy"), NOISY)


def in_process(folder, path, **options):
    seeds = dict.fromkeys(folder.study.sites, SITE_SEED)
    with fp.connect(
        folder.study, data=folder.data, seed=SEED, site_seeds=seeds, ledger=a_ledger(path / "ledger.db"), store=path / "run",
        seeded_for_tests=True,
    ) as connection:  # fmt: skip
        return fp.sample(connection, progress=False, **options)


def spent(path, name):
    ledger = Ledger.open(path)
    found = ledger.spent(name)
    ledger.close()
    return found


def alike(one, other):
    """The same account, whatever the run is called."""
    assert set(one) == set(other)
    return all(
        one[key] == (pytest.approx(other[key], rel=1e-9) if isinstance(other[key], float) else other[key])
        for key in one
        if key not in ("run", "dataset")
    )


def says_no_more_than_arrivals(store, report):
    """Every byte that a coordinator got follows from its plans, the arrivals, noisy releases, and the account of those."""
    request, observed, plans = None, 0.0, 0
    for entry in read_log(store):
        if entry.kind is Kind.REQUEST:
            request = messages.decode(entry.payload)
        if entry.kind is not Kind.ANSWER or not isinstance(request, messages.Plans):
            continue
        answer, horizon = messages.decode(entry.payload), request.duration.sum(-1)
        rang = answer.rang.astype(bool)
        np.testing.assert_allclose(answer.time[~rang], horizon[~rang], rtol=1e-12)
        observed, plans = observed + answer.time.sum(), plans + 1
        assert not answer.coordinate[~rang].any() and not answer.velocity.size and answer.passes == 0
        assert answer.observed == pytest.approx(observed, rel=1e-6)
        account = (report["cap"] * (1 - answer.spent), answer.observed / report["cap"] + 0.25)
        assert (answer.remaining, answer.spent) == pytest.approx(account, rel=1e-6)
    assert plans > 5


def test_bounds_follow_from_the_declared_columns(folder):
    budget = folder.study.budget()
    np.testing.assert_allclose(budget.bounds.sizes("box", 3), [1.0, 1.0, 5.0])
    assert budget.epsilon == 20000.0 and folder.study.epsilon == 20000.0


def test_over_tls_as_in_process_and_charged_at_the_site(noisy, tmp_path, monkeypatch):
    folder, built = noisy, []
    expected = in_process(folder, tmp_path / "one")
    for module, name in ((computation, "PrivateSite"), (private_site, "less_public")):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given, real=real, name=name: built.append(name) or real(*given))
    agents = {
        name: open_agent(
            folder.study,
            name,
            folder.data[name],
            store=tmp_path / name,
            seed=SITE_SEED,
            ledger=a_ledger(tmp_path / f"{name}.db"),
            dataset=name,
            seeded_for_tests=True,
        )  # fmt: skip
        for name in folder.study.sites
    }
    with folder.listening() as connection, folder.sites(connection, agents):
        post = fp.sample(connection, progress=False)
        told = {one.site: one.remaining for one in connection.federation.accounts}
        kept = {name: agent.computation.private.status.remaining for name, agent in agents.items()}
        assert "; privacy spent: north " in connection.status()
        reports = {name: agent.computation.private.report() for name, agent in agents.items()}
    assert told == kept and all(value > 0 for value in told.values())
    # Each site builds its part of the run, and its potential in whitened coordinates, once.
    assert sorted(built) == ["PrivateSite"] * 2 + ["less_public"] * 2
    assert same_bits(post, expected)
    # What the sites have told over the network is what their ledgers say, and in process.
    assert set(post.privacy) == {"north", "south"}
    for name, report in reports.items():
        assert alike(post.privacy[name], report) and report["run"] == f"{post.privacy[name]['run']}/{name}"
        assert alike(expected.privacy[name], report)
        assert 0.25 < report["spent"] < 1 and report["observed"] > 0 and report["releases"] == 4
    assert not post.gradient_evaluations.any()
    for name, report in reports.items():
        says_no_more_than_arrivals(tmp_path / name, report)
    Ledger.open(tmp_path / "one" / "ledger.db").close()
    for name, agent in agents.items():
        agent.computation.private.ledger.close()
        assert spent(tmp_path / f"{name}.db", name) == pytest.approx(spent(tmp_path / "one" / "ledger.db", name))


def test_noisy_derivatives_are_charged_before_they_leave_and_told_again_for_nothing(noisy, tmp_path):
    options = {"store": tmp_path / "store", "ledger": a_ledger(tmp_path / "ledger.db")}
    agent = open_agent(noisy.study, "north", noisy.data["north"], **options)
    agent.join(messages.encode(messages.Welcome(bytes(16), noisy.study.digest)))
    ledger, account = agent.site.budget.open()
    exact = double_precision(derivatives)(agent.site, np.zeros(3))[1:]
    asked = [messages.encode(messages.Derive(bytes(16), k + 1, np.full(3, 0.1 * k))) for k in range(5)]
    answers = []
    for k, request in enumerate(asked[:4]):
        answers.append(agent.answer(request))
        found = messages.decode(answers[-1])
        assert isinstance(found, messages.Derivatives) and found.value == 0.0
        assert ledger.spent("records") == pytest.approx((k + 1) / 4 * 0.25 * account.limit)
        stored = [entry.reply for entry in read(ledger.path) if entry.kind == "release"][-1]
        # With the sizes of the noise, which are public.
        assert stored[:-16] == found.gradient.tobytes() + found.hessian.tobytes()
    first = messages.decode(answers[0])
    assert not np.any(first.gradient == exact[0]) and not np.any(first.hessian == exact[1])
    assert [agent.answer(request) for request in asked[:4]] == answers
    assert messages.decode(agent.answer(asked[4])).code == "BUDGET_SPENT"
    assert ledger.spent("records") <= 0.25 * account.limit
    far = messages.encode(messages.Derive(bytes(16), 5, np.full(3, 1e200)))
    assert messages.decode(agent.answer(far)).code == "PLAN_REFUSED"
    agent.log.close()
    ledger.close()


def test_another_contract_on_the_same_data_is_charged_to_the_account_of_the_policy(noisy, tmp_path):
    """Other columns, another name of the site, another budget: the data set is what its owner says it is."""
    (tmp_path / "policy.toml").write_text(
        POLICY.replace('derivatives = "own"', 'derivatives = "noisy"')
        + 'dataset = "cohort"\ntotal_epsilon = 30000.0\ntotal_delta = 1e-6\n'
    )
    policy = read_policy(tmp_path / "policy.toml")
    texts = (NOISY, NOISY.replace("drug + age", "age").replace('"north"', '"nord"').replace("20000.0", "9000.0"))
    spent = []
    for k, text in enumerate(texts):
        study = parse_study(text.replace("two hospitals", f"study {k}").encode())
        options = {"store": tmp_path / str(k), "ledger": a_ledger(tmp_path / "ledger.db"), "policy": policy}
        agent = open_agent(study, study.sites[0], noisy.data["north"], **options)
        agent.join(messages.encode(messages.Welcome(bytes(16), study.digest)))
        agent.answer(messages.encode(messages.Derive(bytes(16), 1, np.zeros(len(study.names)))))
        ledger, account = agent.site.budget.open()
        assert (account.dataset, account.epsilon) == ("cohort", 30000.0)
        spent.append(ledger.spent("cohort"))
        agent.log.close()
    assert spent[0] > 0 and spent[1] == pytest.approx(spent[0] * (1 + 9000 / 20000), rel=1e-2)
    ledger.close()


def test_a_budget_that_does_not_cover_the_run_is_said_before_it(folder, tmp_path):
    with pytest.raises(InputError, match="privacy budget of site"):
        in_process(folder, tmp_path, duration=1e7)
    Ledger.open(tmp_path / "ledger.db").close()


def test_a_private_site_is_opened_once_for_a_run_and_has_no_other_clock(folder, tmp_path, monkeypatch):
    opened, make = [], computation.PrivateSite
    monkeypatch.setattr(computation, "PrivateSite", lambda site, *told: opened.append(site.name) or make(site, *told))
    monkeypatch.setattr(computation, "open_site", lambda site, opening: pytest.fail(f"{site.name} made a second clock"))
    assert in_process(folder, tmp_path).rounds > 1
    assert sorted(opened) == sorted(folder.study.sites)


def test_a_seed_under_a_budget_is_refused_unless_for_tests(folder, tmp_path):
    with pytest.raises(InputError, match="seeded_for_tests"):
        fp.connect(folder.study, data=folder.data, site_seeds={"north": 1}, ledger=a_ledger(tmp_path / "ledger.db"))
    options = {"store": tmp_path / "store", "ledger": a_ledger(tmp_path / "ledger.db")}
    with pytest.raises(InputError, match="seeded_for_tests"):
        open_agent(folder.study, "north", folder.data["north"], seed=1, **options)
    agent = open_agent(folder.study, "north", folder.data["north"], seed=1, seeded_for_tests=True, **options)
    notes = [entry.note["event"] for entry in agent.log.entries() if entry.kind is Kind.NOTE]
    assert notes == ["seeded for tests: NOT private", "software"] and agent.site.budget.account_name == "records"
    agent.log.close()
    Ledger.open(tmp_path / "ledger.db").close()


@pytest.mark.long
def test_a_private_site_is_replayed_from_its_ledger_and_says_what_it_cannot_without(folder, tmp_path):
    """Its randomness is the ledger's own: with a copy of it as it was before the run the same answers come out."""
    ledger, store = a_ledger(tmp_path / "ledger.db"), tmp_path / "run"
    with fp.connect(folder.study, data=folder.data, seed=SEED, ledger=ledger, store=store) as connection:
        fp.sample(connection, progress=False)
    Ledger.open(ledger).close()
    before, north = ledger.read_bytes(), store / "sites" / "north"
    found = replay(folder.study, "north", folder.data["north"], store=north, ledger=ledger)
    assert found.same > 5 and found.different == [] and found.unchecked == {}
    # The second site of the run comes after the first in the ledger: what it says is left is not compared.
    other = replay(folder.study, "south", folder.data["south"], store=store / "sites" / "south", ledger=ledger)
    assert other.same == found.same and other.different == []
    assert ledger.read_bytes() == before
    # So many other records that their arrivals come before those of the excess.
    wrong = write_csv(tmp_path / "wrong.csv", 400 * [("yes", "verum", 90)])
    assert replay(folder.study, "north", wrong, store=north, ledger=ledger).different
    without = replay(folder.study, "north", folder.data["north"], store=north, ledger=tmp_path / "none.db")
    assert (without.same, without.different) == (1, [])
    assert without.unchecked == {NO_SECRET: found.same - 1}
