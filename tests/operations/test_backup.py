"""Backup, restore and upgrade of a study: what docs/operate.md says of copies of stores and ledgers."""

import shutil

import pytest
from tests.federation.studies import SEED, SITE_SEED, Folder, same_bits

import fedpdmc as fp
from fedpdmc.errors import InputError, LedgerError, Refused
from fedpdmc.federation.site_agent import audit_log
from fedpdmc.privacy.ledger import Ledger, adopt_ledger, create_ledger


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return Folder(tmp_path_factory.mktemp("study"))


def go_on(folder, store, duration):
    """Run a study in its store to a process time; started again it goes on."""
    seeds = dict.fromkeys(folder.study.sites, SITE_SEED)
    with fp.connect(folder.study, data=folder.data, seed=SEED, site_seeds=seeds, store=store) as connection:
        return fp.sample(connection, duration=duration, progress=False)


@pytest.fixture(scope="module")
def stores(folder, tmp_path_factory):
    """A store after a first part of the run, a copy of it from then, and what the whole run has come to."""
    store, copy = tmp_path_factory.mktemp("run") / "store", tmp_path_factory.mktemp("backup") / "store"
    go_on(folder, store, 1.0)
    shutil.copytree(store, copy)
    return store, copy, go_on(folder, store, 2.0)


def restored(source, to):
    shutil.copytree(source, to)
    return to


def test_a_copy_of_all_stores_goes_on_to_the_same_bits(folder, stores, tmp_path):
    _, copy, expected = stores
    post = go_on(folder, restored(copy, tmp_path / "store"), 2.0)
    assert same_bits(post, expected) and post.rounds == expected.rounds


def test_an_older_copy_at_the_coordinator_alone_goes_on_to_the_same_bits(folder, stores, tmp_path):
    store, copy, expected = stores
    mixed = restored(copy, tmp_path / "store")
    shutil.rmtree(mixed / "sites")
    restored(store / "sites", mixed / "sites")
    assert same_bits(go_on(folder, mixed, 2.0), expected)


def test_a_site_that_is_older_than_its_coordinator_is_found(folder, stores, tmp_path):
    store, copy, _ = stores
    mixed = restored(store, tmp_path / "store")
    shutil.rmtree(mixed / "sites" / "north")
    restored(copy / "sites" / "north", mixed / "sites" / "north")
    with pytest.raises(Refused, match="OUT_OF_ORDER"):
        go_on(folder, mixed, 3.0)


def test_a_copy_that_is_not_whole_is_found(folder, stores, tmp_path):
    _, copy, _ = stores
    broken = restored(copy, tmp_path / "store")
    next(broken.glob("state-*.npz")).unlink()
    with pytest.raises(InputError, match="missing"):
        go_on(folder, broken, 2.0)


def test_an_upgrade_is_written_into_the_site_s_log(folder, stores, tmp_path, monkeypatch):
    _, copy, _ = stores
    own = restored(copy, tmp_path / "store")
    here = audit_log.software_here()
    monkeypatch.setattr(audit_log, "software_here", lambda: here | {"jaxlib": "99.0"})
    go_on(folder, own, 1.5)
    from fedpdmc.federation.site_agent.audit_log import read_log

    written = [note["jaxlib"] for entry in read_log(own / "sites" / "north") if (note := audit_log.software_of(entry))]
    assert written == [here["jaxlib"], "99.0"]


def test_a_copy_of_a_ledger_is_no_second_budget(tmp_path):
    path = create_ledger(tmp_path / "ledger.db")
    shutil.copy(path, tmp_path / "copy.db")
    with pytest.raises(LedgerError, match="fedpdmc ledger adopt"):
        Ledger.open(tmp_path / "copy.db")
    # The disk is lost, and nothing was charged after the copy was made.
    path.unlink()
    adopt_ledger(tmp_path / "copy.db")
    Ledger.open(tmp_path / "copy.db").close()


def test_a_saved_posterior_of_a_study_says_that_the_store_goes_on(stores, tmp_path):
    stores[2].save(tmp_path / "posterior.zarr")
    with pytest.raises(InputError, match=r"posterior of study .* on a network.* store: .*connect\("):
        fp.load(tmp_path / "posterior.zarr").extend(duration=1.0)
