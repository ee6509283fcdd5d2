"""`--check`, against a coordinator that runs: what is good is said, what is not is named with its remedy."""

import re
import shutil
import socket
import types

import pytest
from cryptography.hazmat.primitives import serialization
from tests.federation.processes import Parties
from tests.federation.studies import ZIGZAG, Folder
from tests.study.contracts import rows, write_csv
from typer.testing import CliRunner

from fedpdmc.certificates import certify, make_keys, open_authority, revoke
from fedpdmc.cli import app
from fedpdmc.federation.grpc import server
from fedpdmc.federation.site_agent.agent import SOFTWARE

PRIVATE = ZIGZAG.replace("passes = true\n", "") + "\n[privacy]\nepsilon = 2.0\ndelta = 1e-6\n"


@pytest.fixture(scope="module")
def parties(tmp_path_factory):
    """A coordinator in a process of its own."""
    folder = Folder(tmp_path_factory.mktemp("study"))
    found = Parties(folder, (3, 5))
    try:
        found.start("coordinator")
        log = folder.path / "coordinator.log"
        found.wait_for(lambda: "listening on" in log.read_text())
        yield found
    finally:
        found.stop()


@pytest.fixture
def call(monkeypatch, parties, tmp_path):
    path = parties.folder.path
    monkeypatch.chdir(path)
    monkeypatch.setenv("FEDPDMC_LEDGER", str(tmp_path / "ledger.db"))

    def call(status, *words):
        result = CliRunner().invoke(app, [str(word) for word in words])
        assert result.exit_code == status, result.output
        lines = [line for line in result.output.splitlines() if ": " in line]
        return {line.partition(": ")[0].split(maxsplit=1)[1]: line for line in lines if line[:4] in MARKS}

    def site(status=0, **changes):
        given = {
            "study": "study.toml", "name": "north", "data": "north.csv", "policy": "policy.toml",
            "coordinator": parties.address, "keys": parties.folder.keys("north"), "store": tmp_path / "store", **changes,
        }  # fmt: skip
        words = [word for key, value in given.items() if key != "study" for word in (f"--{key}", value)]
        return call(status, "site", given["study"], *words, "--check")

    return types.SimpleNamespace(any=call, site=site)


MARKS = ("ok  ", "FAIL", "--  ")


def bad(found):
    return {what for what, line in found.items() if line.startswith("FAIL")}


def test_a_site_that_is_ready(call, parties, tmp_path):
    found = call.site()
    assert len(found) == 13 and all(line.startswith("ok") for line in found.values()), found
    assert "12 records" in found["data"] and "TLSv1.3" in found["TLS"] and "within" in found["clock"]
    # It has not joined, and nothing was written.
    said = (parties.folder.path / "coordinator.log").read_text()
    assert "has joined" not in said and "north runs --check" in said
    assert not (tmp_path / "store").exists()


def certified(folder, name, days):
    """The party's key with a certificate of another length."""
    key = serialization.load_pem_private_key((folder.keys(name) / "key.pem").read_bytes(), None)
    authority = open_authority(folder.path / "keys" / "authority")
    made, _ = certify(*authority, name, key.public_key(), days, [])
    return made.public_bytes(serialization.Encoding.PEM)


def copied(folder, name, to):
    shutil.copytree(folder.keys(name), to)
    return to


def test_an_expired_certificate(call, parties, tmp_path):
    keys = copied(parties.folder, "north", tmp_path / "keys")
    (keys / "certificate.pem").write_bytes(certified(parties.folder, "north", 0))
    found = call.site(1, keys=keys)
    assert bad(found) == {"certificate"} and "expired at" in found["certificate"] and "renewed" in found["certificate"]
    assert found["TLS"].startswith("--")
    (keys / "certificate.pem").write_bytes(certified(parties.folder, "north", 3))
    assert "renew it soon" in call.site(keys=keys)["certificate"]


def test_another_authority(call, tmp_path):
    make_keys(tmp_path / "other", ["north"])
    found = call.site(1, keys=tmp_path / "other" / "sites" / "north")
    assert bad(found) == {"TLS"} and "authority.pem" in found["TLS"]


def test_a_certificate_that_only_the_coordinator_refuses(call, parties, tmp_path):
    """Its own authority.pem is the study's, but another one has signed it: each half is found by its own step."""
    make_keys(tmp_path / "other", ["north"])
    keys = tmp_path / "other" / "sites" / "north"
    shutil.copy(parties.folder.keys("north") / "authority.pem", keys / "authority.pem")
    found = call.site(1, keys=keys)
    assert bad(found) == {"certificate"} and "not signed by" in found["certificate"]


def test_bad_records_and_a_name_that_the_contract_lacks(call, tmp_path):
    write_csv(tmp_path / "bad.csv", [*rows("north"), ("yes", "verum", 300)])
    found = call.site(1, data=tmp_path / "bad.csv")
    assert bad(found) == {"data"} and "300" in found["data"] and found["policy"].startswith("--")
    found = call.site(1, name="west")
    assert bad(found) == {"contract", "certificate"} and "north, south" in found["contract"]


def test_a_policy_that_does_not_allow_the_contract(call, tmp_path, parties):
    text = (parties.folder.path / "policy.toml").read_text().replace("least_records = 2", "least_records = 2000")
    (tmp_path / "policy.toml").write_text(text)
    found = call.site(1, policy=tmp_path / "policy.toml")
    assert bad(found) == {"policy"} and "POLICY_RECORDS" in found["policy"]


def test_a_limit_of_bits_that_a_run_will_reach_is_said_before(call, tmp_path, parties):
    text = (parties.folder.path / "policy.toml").read_text()
    for most, early in ((1.0, True), (1e3, False)):
        (tmp_path / "policy.toml").write_text(re.sub(r"most_bits(_in_all)? = .*", rf"most_bits\1 = {most}", text))
        said = call.site(policy=tmp_path / "policy.toml")["policy"]
        assert f"{12 * most:,.0f} bits about 12 records" in said and ("INFORMATION_SPENT" in said) == early


def test_a_missing_ledger_and_another_contract(call, tmp_path):
    (tmp_path / "private.toml").write_text(PRIVATE)
    found = call.site(1, study=tmp_path / "private.toml")
    assert bad(found) == {"ledger", "coordinator"}
    assert "fedpdmc ledger create" in found["ledger"] and "sha256sum" in found["coordinator"]
    call.any(0, "ledger", "create", tmp_path / "ledger.db")
    before = (tmp_path / "ledger.db").read_bytes()
    found = call.site(1, study=tmp_path / "private.toml")
    assert bad(found) == {"coordinator"} and "will be opened when the site starts" in found["ledger"]
    assert (tmp_path / "ledger.db").read_bytes() == before
    shutil.copy(tmp_path / "ledger.db", tmp_path / "copy.db")
    found = call.site(1, study=tmp_path / "private.toml", ledger=tmp_path / "copy.db")
    assert "is a copy of a ledger" in found["ledger"]


def test_nobody_there(call, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    found = call.site(1, coordinator=f"127.0.0.1:{port}")
    assert bad(found) == {"address"} and "firewall" in found["address"]


def test_a_coordinator_whose_certificate_has_expired_or_who_has_revoked_ours(call, parties, tmp_path):
    folder = parties.folder
    keys = copied(folder, "coordinator", tmp_path / "coordinator")
    (keys / "certificate.pem").write_bytes(certified(folder, "coordinator", 0))
    with folder.listening(keys=keys) as connection:
        found = call.site(1, coordinator=connection.address)
    assert bad(found) == {"TLS"} and "expired" in found["TLS"] and "must renew its certificate" in found["TLS"]
    keys = copied(folder, "coordinator", tmp_path / "again")
    revoke(keys, [own_fingerprint(folder)])
    with folder.listening(keys=keys) as connection:
        found = call.site(1, coordinator=connection.address)
    assert bad(found) == {"coordinator"} and "REVOKED" in found["coordinator"]


def own_fingerprint(folder):
    from fedpdmc.certificates import fingerprint

    return fingerprint((folder.keys("north") / "certificate.pem").read_bytes())


def test_clocks_and_versions_that_differ(call, parties, monkeypatch):
    real = server.time
    fast = types.SimpleNamespace(time=lambda: real.time() + 3600, monotonic=real.monotonic, sleep=real.sleep)
    with parties.folder.listening() as connection:
        monkeypatch.setattr(server, "time", fast)
        monkeypatch.setattr(server, "SOFTWARE", "fedpdmc 9.9.9")
        found = call.site(1, coordinator=connection.address)
    assert bad(found) == {"clock", "versions"}
    assert "ahead of this one" in found["clock"] and "3600 s" in found["clock"]
    assert "9.9.9" in found["versions"] and SOFTWARE in found["versions"]


def test_a_coordinator_looks_at_its_own_side(call, parties, tmp_path):
    keys, store = parties.folder.keys("coordinator"), tmp_path / "run"
    words = ("coordinator", "study.toml", "--store", store, "--check")
    found = call.any(0, *words, "--listen", "127.0.0.1:0", "--keys", keys)
    assert len(found) == 8 and all(line.startswith("ok") for line in found.values()), found
    assert "accepts this certificate" in found["TLS"] and not store.exists()
    found = call.any(1, *words, "--listen", parties.address, "--keys", keys)
    assert bad(found) == {"address"} and "stop it first" in found["address"]
    found = call.any(1, *words, "--listen", "127.0.0.1:0", "--keys", parties.folder.keys("north"))
    assert bad(found) == {"certificate"} and "coordinator" in found["certificate"]
    own = copied(parties.folder, "coordinator", tmp_path / "keys")
    (own / "certificate.pem").write_bytes(certified(parties.folder, "coordinator", 0))
    found = call.any(1, *words, "--listen", "127.0.0.1:0", "--keys", own)
    assert bad(found) == {"certificate"} and "expired" in found["certificate"]
    found = call.any(
        1, "coordinator", "study.toml", "--store", store, "--check", "--listen", "192.0.2.7:1", "--plain-on-loopback"
    )
    assert bad(found) == {"certificate", "address"}
