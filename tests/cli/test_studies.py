"""The commands of a study, as an operator types them."""

import errno
import re

import numpy as np
import pytest
from tests.federation.studies import SEED, SITE_SEED, Folder
from tests.privacy.test_shared_noise import SHARED
from tests.study.contracts import write_csv
from typer.testing import CliRunner

import fedpdmc as fp
from fedpdmc.cli import app
from fedpdmc.cli.runner import exit_status
from fedpdmc.federation import dry_run
from fedpdmc.federation.site_agent import audit_log
from fedpdmc.study.description import DERIVATIVES as DESCRIBED
from fedpdmc.study.schema import DERIVATIVES


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return Folder(tmp_path_factory.mktemp("study"))


@pytest.fixture
def call(folder, monkeypatch):
    monkeypatch.chdir(folder.path)

    def call(*words, status=0):
        result = CliRunner().invoke(app, [str(word) for word in words])
        assert result.exit_code == status, result.output
        return result.output

    return call


def test_keys_for_the_sites_of_a_contract(call, tmp_path):
    call("keys", tmp_path / "keys", "--study", "study.toml", "--site", "west")
    assert sorted(path.name for path in (tmp_path / "keys" / "sites").iterdir()) == ["north", "south", "west"]
    call("keys", tmp_path / "other", status=2)
    call("keys", "--site", "west", tmp_path / "third")
    assert (tmp_path / "third" / "sites" / "west" / "key.pem").exists()


def test_a_key_is_requested_and_signed(call, tmp_path):
    said = call("keys", "request", tmp_path / "north", "--name", "north")
    assert re.search(r"[0-9a-f]{64}", call("keys", "authority", tmp_path / "ca").replace("\n", ""))
    signed = call(
        "keys",
        "sign",
        tmp_path / "ca",
        tmp_path / "north" / "request.pem",
        "--name",
        "north",
        "--out",
        tmp_path / "signed",
    )
    digits = re.findall(r"[0-9a-f]{64}", said.replace("\n", ""))
    assert digits and digits == re.findall(r"[0-9a-f]{64}", signed.replace("\n", ""))
    call("keys", "sign", tmp_path / "ca", tmp_path / "none.pem", "--name", "x", "--out", tmp_path / "y", status=2)


def test_a_contract_is_tried_on_made_up_records(call, folder):
    said = call("study", "check", "study.toml", "--records", 12)
    assert folder.study.digest.hex() in said.replace("\n", "")
    assert "drug[T.verum]" in said and "limit 2,000" in said.replace("\n", " ")


@pytest.mark.parametrize("derivatives", DERIVATIVES)
def test_a_contract_with_any_release_is_described(call, folder, monkeypatch, tmp_path, derivatives):
    monkeypatch.setattr(dry_run, "try_study", lambda study, records: dry_run.DryRun(None, 1, 1.0, 1))
    text = folder.contract.replace('derivatives = "none"', f'derivatives = "{derivatives}"').replace(
        "passes = true\n", ""
    )
    if derivatives == "noisy":
        text += "\n[privacy]\nepsilon = 2.0\ndelta = 1e-6\nrelease = 0.25\n"
    if derivatives == "summed":
        text = text.replace('"south"]', '"south", "west"]')
    if derivatives == "noisy-summed":
        text = SHARED
    (tmp_path / "study.toml").write_text(text)
    said = call("study", "check", tmp_path / "study.toml").replace("\n", " ")
    arrivals = [] if derivatives == "noisy-summed" else ["arrivals"]
    assert f"release: {', '.join([*arrivals, *DESCRIBED[derivatives]])}; " in said


def test_a_study_runs_in_process_is_shown_and_replayed(call, folder, tmp_path, monkeypatch):
    words = ["--seed", SEED, "--store", tmp_path / "run", "--out", tmp_path / "post.zarr"]
    for name in folder.study.sites:
        words += ["--data", f"{name}={name}.csv", "--site-seed", f"{name}={SITE_SEED}"]
    said = call("run", "study.toml", *words)
    assert (
        said.startswith("fedpdmc: prior\n  Intercept, drug[T.verum], age ~ normal(0.1, 1.5)\nNOT converged: ")
        and "event bounds: certified" in said
    )
    expected = folder.in_process()
    np.testing.assert_array_equal(fp.load(tmp_path / "post.zarr").mean(), expected.mean())
    store = tmp_path / "run" / "sites" / "north"
    shown = call("audit", "show", store)
    assert "joined" in shown and "Arrivals" in shown and "arrivals on" in shown
    replayed = call("audit", "replay", "study.toml", "--name", "north", "--data", "north.csv", "--store", store)
    assert "0 differ" in replayed and "written with" not in replayed
    here = audit_log.software_here()
    monkeypatch.setattr(audit_log, "software_here", lambda: here | {"jax": "99.0"})
    other = ("audit", "replay", "study.toml", "--name", "north", "--data", "south.csv", "--store", store)
    said = " ".join(call(*other, status=1).split())
    assert "the answer differs from the log" in said
    assert f"It was written with jax {here['jax']} (here 99.0). Answers may differ in the last bits" in said


def test_a_report_of_a_simulated_run_needs_its_store_only(call, folder, tmp_path, caplog):
    words = ["run", "study.toml", "--seed", SEED, "--store", tmp_path / "run"]
    for name in folder.study.sites:
        words += ["--data", f"{name}={name}.csv"]
    said = call(*words)
    assert "posterior.zarr" in said and "fedpdmc report" in said
    call("report", tmp_path / "run", "--out", tmp_path / "report.html")
    assert "<b>Sampling</b>" in (tmp_path / "report.html").read_text()
    (tmp_path / "empty").mkdir()
    call("report", tmp_path / "empty", status=2)
    assert "which holds no posterior. Give the folder of a run that has ended" in caplog.text


def test_the_faults_of_all_files_are_told_at_once(call, folder, tmp_path, caplog):
    words = ["run", "study.toml", "--store", tmp_path / "store"]
    for name in folder.study.sites:
        path = write_csv(tmp_path / f"{name}.csv", [("no", "verum", 10), ("no", "drug", 40)])
        words += ["--data", f"{name}={path}"]
    call(*words, status=2)
    assert "found 4 faults at 2 of 2 sites" in caplog.text and not (tmp_path / "store").exists()
    for name in folder.study.sites:
        assert f"data of site {name!r} ({tmp_path / name}.csv): 2 faults in 2 of 2 records" in caplog.text
    assert caplog.text.count("line 3, column 'drug': an unknown level ('drug')") == 2


def test_a_full_disk_is_told_in_a_sentence(caplog):
    def work():
        raise OSError(errno.ENOSPC, "No space left on device", "run/state.npz")

    assert exit_status(work) == 75
    assert "No space left on device: 'run/state.npz'. The data in the store is intact" in caplog.text


def test_without_descriptors_a_service_is_started_again():
    def work():
        raise OSError(errno.EMFILE, "Too many open files")

    assert exit_status(work) == 75


@pytest.mark.parametrize(
    ("words", "status", "what"),
    [
        (["run", "study.toml", "--data", "north"], 2, "NAME=VALUE"),
        (["run", "study.toml", "--data", "north=north.csv"], 2, "Give the records of"),
        (["run", "nowhere.toml", "--data", "north=north.csv"], 2, "No such file"),
        (["coordinator", "study.toml", "--listen", "127.0.0.1:0", "--store", "x"], 2, "--plain-on-loopback"),
        (["audit", "show", "nowhere"], 2, "audit log"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_sentence(call, caplog, words, status, what):
    said = call(*words, status=status)
    assert what in said + caplog.text
    assert "Traceback" not in said
