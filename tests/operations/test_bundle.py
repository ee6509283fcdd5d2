"""A site invited with one file: made ready step by step, against a coordinator that runs; changed files are refused."""

import dataclasses
import hashlib
import json
import re
import shlex
import stat
import zipfile
from pathlib import Path

import pytest
from tests.federation.studies import MODEL_ZIGZAG, Folder
from tests.study.contracts import CONTRACT, DIGEST, MODEL_FILE, rows, write_csv
from typer.testing import CliRunner

from fedpdmc.certificates import sign_request
from fedpdmc.cli import app
from fedpdmc.errors import InputError, Refused
from fedpdmc.operations.bundle import (
    MEMBERS,
    UNIT,
    Joining,
    draft_policy,
    make_bundle,
    read_bundle,
    read_settings,
    site_unit,
)
from fedpdmc.operations.preflight import CoordinatorCheck
from fedpdmc.study import read_policy


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = Folder(tmp_path_factory.mktemp("study"))
    write_csv(found.path / "many.csv", rows("north", n=200))
    return found


def call(*words, status=0):
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == status, result.output
    return result.output


def test_from_an_invitation_to_a_site_that_is_ready(folder, tmp_path, caplog):
    with folder.listening() as connection:
        bundle, site = tmp_path / "study.zip", tmp_path / "site"
        authority = folder.keys("coordinator") / "authority.pem"
        words = ("--authority", authority, "--coordinator", connection.address, "--out", bundle)
        told = call("bundle", folder.path / "study.toml", *words)
        join = ("join", bundle, "--name", "north", "--data", folder.path / "many.csv", "--folder", site)
        said = call(*join)
        hashes = re.findall(r"^SHA-256 of .*?([0-9a-f]{64})", said, re.M | re.S)
        assert len(hashes) == 2 and re.findall(r"[0-9a-f]{64}", told) == hashes[:1]
        assert hashlib.sha256(bundle.read_bytes()).hexdigest() == hashes[0]
        assert "ok   data: 200 records" in said and "ok   policy" in said
        key = site / "keys" / "key.pem"
        secret = key.read_bytes()
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
        # The authority reads the same hash from the request; the certificate comes back.
        request = site / "keys" / "request.pem"
        assert sign_request(folder.path / "keys" / "authority", request, "north", tmp_path / "signed") == hashes[1]
        (site / "keys" / "certificate.pem").write_bytes((tmp_path / "signed" / "certificate.pem").read_bytes())
        (site / "policy.toml").write_text((site / "policy.toml").read_text() + "# read\n")
        said = call(*join, "--sha256", hashes[0])
        assert "Ready." in said and "FAIL" not in said and said.count("ok   ") == 13
    assert key.read_bytes() == secret and (site / "policy.toml").read_text().endswith("# read\n")
    assert "has joined" not in caplog.text and not (site / "store").exists()
    # The unit runs the command that was looked at.
    line = re.search(r"^ExecStart=(.*)$", (site / UNIT).read_text(), re.M)[1]
    command = shlex.split(line)[1:]
    assert command == ["site", "--folder", str(site)]
    settings = read_settings(site)
    assert settings.name == "north" and settings.data == str(folder.path / "many.csv")


def invited(folder, tmp_path, name="study.zip"):
    return make_bundle(
        folder.path / "study.toml", folder.keys("coordinator") / "authority.pem", "192.0.2.7:4433", tmp_path / name
    )


def test_what_is_there_is_not_overwritten_by_another_study(folder, tmp_path):
    bundle = invited(folder, tmp_path)
    with pytest.raises(InputError, match="which already exists"):
        invited(folder, tmp_path)
    Joining(read_bundle(bundle), "north", folder.path / "many.csv", tmp_path / "site").write()
    other = Folder(tmp_path / "other")
    found = read_bundle(invited(other, tmp_path, "other.zip"))
    with pytest.raises(InputError, match="a different authority.pem"):
        Joining(found, "north", folder.path / "many.csv", tmp_path / "site").write()
    with pytest.raises(InputError, match="north, south"):
        Joining(found, "west", folder.path / "many.csv", tmp_path / "site")


def test_bad_records_and_few_records_are_named_before_anything_is_sent(folder, tmp_path):
    bundle = invited(folder, tmp_path)
    said = call(
        "join", bundle, "--name", "north", "--data", folder.path / "north.csv", "--folder", tmp_path / "a", status=1
    )
    assert "POLICY_RECORDS" in said and "Not ready. Fix: policy" in said
    write_csv(tmp_path / "bad.csv", [("yes", "verum", 300)])
    said = call("join", bundle, "--name", "north", "--data", tmp_path / "bad.csv", "--folder", tmp_path / "b", status=1)
    assert "FAIL data" in said and "300" in said


def rewritten(bundle, to, **changes):
    with zipfile.ZipFile(bundle) as file:
        parts = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(to, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in (parts | changes).items():
            if data is not None:
                file.writestr(name, data)
    return to


@pytest.mark.parametrize(
    "changes",
    [
        {"../../evil": b"x"},
        {"keys/key.pem": b"x"},
        {"study.toml": None},
        {"README.txt": b"\0" * 2**21},
        {"authority.pem": b"none"},
        {"README.txt": "Compare \u202eHSAH\u202c with its sender.".encode()},
        {"README.txt": b"Compare the hash.\x1b[1A\x1b[2K"},
        {"bundle.json": b"[]"},
        {"bundle.json": b"{"},
        {"bundle.json": json.dumps({"format": 1, "coordinator": 5, "server_name": "a", "fedpdmc": "1"}).encode()},
        {"bundle.json": json.dumps({"format": 1, "coordinator": "x\n", "server_name": "a", "fedpdmc": "1"}).encode()},
        {"bundle.json": json.dumps({"format": 2, "coordinator": "h:1", "server_name": "a", "fedpdmc": "1"}).encode()},
        {"bundle.json": json.dumps({"format": 1, "coordinator": "h", "server_name": "a", "fedpdmc": "1"}).encode()},
    ],
)
def test_a_bundle_that_was_changed_is_refused_and_nothing_is_unpacked(folder, tmp_path, changes):
    bundle = rewritten(invited(folder, tmp_path), tmp_path / "changed.zip", **changes)
    before = {path for path in tmp_path.rglob("*")}
    with pytest.raises(InputError):
        read_bundle(bundle)
    assert {path for path in tmp_path.rglob("*")} == before
    # What it says in an error is one line that does nothing on a terminal.
    with pytest.raises(InputError) as error:
        read_bundle(rewritten(tmp_path / "study.zip", tmp_path / "changed.zip", **{"x\x1b[2J\nReady. Run: id": b"x"}))
    assert str(error.value).isprintable()
    certificate = (folder.path / "keys" / "authority" / "authority.pem").read_text()
    hidden = {"authority.pem": ("# of this\u200b study\n" + certificate).encode()}
    with pytest.raises(InputError, match=r"bundle: authority.pem: found the character U\+200B"):
        read_bundle(rewritten(tmp_path / "study.zip", tmp_path / "changed.zip", **hidden))
    (tmp_path / "changed.zip").unlink()
    (tmp_path / "text.zip").write_text("no archive")
    with pytest.raises(InputError, match="fedpdmc bundle"):
        read_bundle(tmp_path / "text.zip")


INJECTIONS = [
    "`id`",
    "$(id)",
    "a;id",
    "a|id",
    "a&id",
    "a\nid",
    "a id",
    "'a'",
    '"a"',
    "--keys",
    "a>b",
    "",
    "fe80::1%$(id)",
]


@pytest.mark.parametrize("value", INJECTIONS)
@pytest.mark.parametrize("field", ["server_name", "coordinator", "fedpdmc"])
def test_what_a_shell_would_run_is_refused_in_writing_and_in_reading(folder, tmp_path, field, value):
    facts = {"format": 1, "coordinator": "192.0.2.7:4433", "server_name": "coordinator", "fedpdmc": "0.1.0"}
    value += ":4433" if field == "coordinator" else ""
    changes = {"bundle.json": json.dumps(facts | {field: value}).encode()}
    with pytest.raises(InputError, match=f"bundle: {field}|host:port"):
        read_bundle(rewritten(invited(folder, tmp_path), tmp_path / "changed.zip", **changes))
    if field != "fedpdmc":
        told = {"coordinator": "192.0.2.7:4433", field: value}
        with pytest.raises(InputError, match="host"):
            make_bundle(
                folder.path / "study.toml", folder.keys("coordinator") / "authority.pem", out=tmp_path / "b", **told
            )
    # The control: a name of a host passes.
    changes = {"bundle.json": json.dumps(facts | {"server_name": "trial-1.example.org"}).encode()}
    found = read_bundle(rewritten(tmp_path / "study.zip", tmp_path / "good.zip", **changes))
    assert found.server_name == "trial-1.example.org"


@pytest.mark.parametrize("member", sorted(MEMBERS))
def test_the_compared_hash_covers_every_member_of_a_bundle(folder, tmp_path, member, caplog):
    """The old control compared contract and authority only: a changed name of the server or instruction passed."""
    bundle = invited(folder, tmp_path)
    told = hashlib.sha256(bundle.read_bytes()).hexdigest()
    with zipfile.ZipFile(bundle) as file:
        before = file.read(member)
    after = before.replace(b'"server_name": "coordinator"', b'"server_name": "attacker.example"')
    after = before + b"\n" if after == before else after
    changed = rewritten(bundle, tmp_path / "changed.zip", **{member: after})
    # Without the hash this file is read: nothing else protects it.
    assert read_bundle(changed).digest != told
    site = tmp_path / "site"
    words = ("--name", "north", "--data", folder.path / "many.csv", "--folder", site)
    call("join", changed, *words, "--sha256", told, status=2)
    assert "changed on its way" in caplog.text and not site.exists()
    call("join", bundle, *words, "--sha256", told)
    # Nor does it replace the bundle of the first step.
    with pytest.raises(InputError, match="a different"):
        Joining(read_bundle(changed), "north", folder.path / "many.csv", site).write()


def test_a_drafted_policy_allows_the_contract_and_no_more(folder, tmp_path):
    (tmp_path / "policy.toml").write_text(draft_policy(folder.study))
    policy = read_policy(tmp_path / "policy.toml")
    policy.check("north", folder.study, 100)
    assert (policy.most_rounds, policy.most_observed_time) == (folder.study.rounds, folder.study.observed_time)
    assert len(MEMBERS) == 4


def test_a_drafted_policy_does_not_allow_a_contract_that_would_fill_the_memory(folder, tmp_path):
    study = dataclasses.replace(folder.study, chains=2**16)
    (tmp_path / "policy.toml").write_text(draft_policy(study))
    with pytest.raises(Refused, match="POLICY_CHAINS"):
        read_policy(tmp_path / "policy.toml").check("north", study, 100)


@pytest.mark.parametrize("control", ["linear", "quadratic"])
def test_both_sides_read_before_the_run_that_a_coordinator_would_choose(tmp_path, control, recwarn):
    study = Folder(tmp_path / "study", CONTRACT.replace("[dynamics]", f'[dynamics]\ncontrol = "{control}"'))
    contract, chooses = study.path / "study.toml", control == "linear"
    bundle = read_bundle(invited(study, tmp_path))
    warned = [str(one.message) for one in recwarn if "coordinator_may_choose = true" in str(one.message)]
    assert [text.partition(":")[0] for text in warned] == ['control = "linear"'] * chooses
    found = CoordinatorCheck(contract, listen="127.0.0.1:0", keys=None, store=tmp_path / "run").findings()[0]
    assert found.good and ("coordinator_may_choose" in found.words) == chooses
    joining = Joining(
        bundle,
        "north",
        write_csv(tmp_path / "many.csv", rows("north", n=200)),
        tmp_path / "site",
        ledger=tmp_path / "l",
    )
    joining.write()
    policy = next(one for one in joining.findings() if one.what == "policy")
    assert policy.good != chooses and ("POLICY_CHOICE" in policy.words) == chooses, policy
    if chooses:
        with (tmp_path / "site" / "policy.toml").open("a") as file:
            file.write("coordinator_may_choose = true\n")
        assert next(one for one in joining.findings() if one.what == "policy").good


def test_a_database_of_a_relative_path_is_found_by_the_unit(folder, tmp_path, monkeypatch):
    """The unit runs in the study's folder, not where `fedpdmc join` was called."""
    monkeypatch.chdir(tmp_path)
    found = read_bundle(invited(folder, tmp_path))
    joining = Joining(found, "north", "sqlite:records.db", tmp_path / "site", query="SELECT 1")
    assert joining.source == f"sqlite:{tmp_path / 'records.db'}" and joining.source in joining.settings()
    remote = Joining(found, "north", "postgresql://host/db", tmp_path / "site", query="SELECT 1")
    assert remote.source == "postgresql://host/db"


def test_names_in_a_unit_stay_words():
    folder = Path("/srv/a study")
    text = site_unit("user", folder, ["/opt/fedpdmc", "--name", 'a "b" $HOME %h; rm'], [folder])
    assert 'ExecStart=/opt/fedpdmc --name "a \\"b\\" $$HOME %%h; rm"\n' in text
    assert 'ReadWritePaths="/srv/a study"\n' in text and "ProtectHome=true" in text
    assert "ProtectHome=read-only" in site_unit(
        "user", Path("/home/u/study"), ["/opt/fedpdmc"], [Path("/home/u/study")]
    )


def test_the_unit_in_the_docs_is_the_one_that_is_written():
    page = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text()
    shown = re.search(r"^```ini\n(.*?)^```", page, re.S | re.M)[1].split("\n", 1)[1].replace(" \\\n   ", "")
    command = re.search(r"^ExecStart=(.*)$", shown, re.M)[1].split()
    assert site_unit("fedpdmc", Path("/srv/study"), command, [Path("/srv/study"), Path("/srv/ledger")]) == shown


def test_a_model_file_travels_in_the_bundle_and_a_changed_one_is_refused(tmp_path):
    study = Folder(tmp_path / "study", MODEL_ZIGZAG)
    path = make_bundle(
        study.path / "study.toml", study.keys("coordinator") / "authority.pem", "127.0.0.1:4433", tmp_path / "b.zip"
    )
    found = read_bundle(path)
    assert found.model.decode() == MODEL_FILE and found.study.model_digest == DIGEST
    joining = Joining(found, "north", study.path / "north.csv", tmp_path / "site")
    joining.write()
    assert (tmp_path / "site" / "cloglog.fpm").read_text() == MODEL_FILE
    assert f'models = ["{DIGEST}"]' in (tmp_path / "site" / "policy.toml").read_text()
    changed = found._replace(model=MODEL_FILE.replace("sub 1.0 y", "sub 2.0 y").encode())
    with pytest.raises(InputError, match="sha256"):
        Joining(changed, "north", study.path / "north.csv", tmp_path / "other")
