"""Studies with a privacy budget: the ledger is the site's, and charges before the answer leaves."""

import numpy as np
import pytest
from tests.federation.studies import SEED, SITE_SEED, ZIGZAG, Folder, same_bits

import fedpdmc as fp
from fedpdmc.errors import InputError
from fedpdmc.federation.agent import open_agent
from fedpdmc.federation.journal import Kind
from fedpdmc.privacy.ledger import Ledger

# Twelve records and covariates up to five: no privacy worth the name, but an account that must be right.
BUDGET = "\n[privacy]\nepsilon = 20000.0\ndelta = 1e-6\n"
PRIVATE = ZIGZAG.replace("chains = 4", "chains = 2").replace("duration = 6.0", "duration = 0.05") + BUDGET
PRIVATE = PRIVATE.replace("burn_in = 1.0", "burn_in = 0.01").replace("rounds = 2000", "rounds = 100000")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return Folder(tmp_path_factory.mktemp("private"), PRIVATE)


def in_process(folder, path, **options):
    seeds = dict.fromkeys(folder.study.sites, SITE_SEED)
    with fp.connect(
        folder.study, data=folder.data, seed=SEED, site_seeds=seeds, ledger=path / "ledger.db", store=path / "run",
        seeded_for_tests=True,
    ) as connection:  # fmt: skip
        return fp.sample(connection, progress=False, **options)


def spent(path, name):
    ledger = Ledger.open(path)
    found = ledger.spent(name)
    ledger.close()
    return found


def test_bounds_follow_from_the_declared_columns(folder):
    budget = folder.study.budget()
    np.testing.assert_allclose(budget.bounds.sizes("box", 3), [1.0, 1.0, 5.0])
    assert budget.epsilon == 20000.0 and folder.study.epsilon == 20000.0


def test_over_tls_as_in_process_and_charged_at_the_site(folder, tmp_path):
    expected = in_process(folder, tmp_path / "one")
    assert expected.settings["privacy"]["epsilon"] == 20000.0
    agents = {
        name: open_agent(
            folder.study,
            name,
            folder.data[name],
            store=tmp_path / name,
            seed=SITE_SEED,
            ledger=tmp_path / f"{name}.db",
            dataset=name,
            seeded_for_tests=True,
        )  # fmt: skip
        for name in folder.study.sites
    }
    with folder.listening() as connection, folder.sites(connection, agents):
        post = fp.sample(connection, progress=False)
        told = {one.name: one.remaining for one in connection.federation.terms}
        kept = {name: agent._private.terms.remaining for name, agent in agents.items()}
    assert told == kept and all(value > 0 for value in told.values())
    assert same_bits(post, expected)
    Ledger.open(tmp_path / "one" / "ledger.db").close()
    for name, agent in agents.items():
        agent._private.ledger.close()
        assert spent(tmp_path / f"{name}.db", name) == pytest.approx(spent(tmp_path / "one" / "ledger.db", name))


def test_a_budget_that_does_not_cover_the_run_is_said_before_it(folder, tmp_path):
    with pytest.raises(InputError, match="privacy budget of site"):
        in_process(folder, tmp_path, duration=1e7)
    Ledger.open(tmp_path / "ledger.db").close()


def test_a_seed_under_a_budget_is_refused_unless_for_tests(folder, tmp_path):
    with pytest.raises(InputError, match="seeded_for_tests"):
        fp.connect(folder.study, data=folder.data, site_seeds={"north": 1}, ledger=tmp_path / "ledger.db")
    options = {"store": tmp_path / "store", "ledger": tmp_path / "ledger.db"}
    with pytest.raises(InputError, match="seeded_for_tests"):
        open_agent(folder.study, "north", folder.data["north"], seed=1, **options)
    agent = open_agent(folder.study, "north", folder.data["north"], seed=1, seeded_for_tests=True, **options)
    notes = [entry.note["event"] for entry in agent.journal.entries() if entry.kind is Kind.NOTE]
    assert notes == ["seeded for tests: NOT private"] and agent.site.budget.account_name == "records"
    agent.journal.close()
    Ledger.open(tmp_path / "ledger.db").close()
