"""Flower: a real SuperLink with TLS and node authentication, real SuperNodes, and the same bits as in process."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.federation.processes import free_port
from tests.federation.studies import FEW_ROUNDS, MODEL_FEW_ROUNDS, SEED, SITE_SEED, Folder, same_bits

import fedpdmc as fp
from fedpdmc.certificates import make_keys, read_credentials, sign, signer
from fedpdmc.operations.serve import write_flower_app

BIN = Path(sys.executable).parent


def test_signatures_name_the_party_and_nothing_else_does(tmp_path):
    make_keys(tmp_path / "a", ["north", "south"], hosts=["127.0.0.1"])
    make_keys(tmp_path / "b", ["north"])
    north, south, other = (read_credentials(tmp_path / x) for x in ("a/sites/north", "a/sites/south", "b/sites/north"))
    signature = sign(north, b"data")
    assert signer(south, north.certificate, signature, b"data") == "north"
    assert signer(south, north.certificate, signature, b"date") is None
    assert signer(south, south.certificate, signature, b"data") is None
    assert signer(south, other.certificate, sign(other, b"data"), b"data") is None
    assert signer(south, b"", b"", b"data") is None
    assert (tmp_path / "a/sites/north/node").stat().st_mode & 0o077 == 0


def test_what_is_wrong_at_a_site_stays_there(tmp_path, caplog):
    """Flower passes on what an exception says: a record that cannot be used would leave the site with it."""
    pytest.importorskip("flwr")
    from tests.federation.grids import GridHere

    from fedpdmc.federation.flower import GridTransport

    folder = Folder(tmp_path)
    with open(folder.data["north"], "a") as file:
        file.write("yes,verum,123456,A\n")
    names = ("study", "policy")
    node = {"name": "north", "data": str(folder.data["north"]), "keys": str(folder.keys("north"))}
    node |= {name: str(tmp_path / f"{name}.toml") for name in names} | {"store": str(tmp_path / "store")}
    grid = GridHere({1: node})
    told = []
    carried = grid.send_and_receive
    grid.send_and_receive = lambda messages: told.extend(carried(messages)) or told
    transport = GridTransport(grid, folder.study, bytes(16), read_credentials(folder.keys("coordinator")))
    assert transport._send({1: b""}) == {}
    (reply,) = told
    assert reply.has_error() and "NOT_ANSWERED" in reply.error.reason
    assert "123456" not in reply.error.reason and "row" not in reply.error.reason
    assert any("line 14" in record.message and "123456" in record.message for record in caplog.records)


class Flower:
    """A SuperLink and the SuperNodes of a study on loopback."""

    def __init__(self, folder):
        self.folder, self.running, self.port = folder, {}, free_port()
        self.home = folder.path / "home"
        self.home.mkdir()
        compiled = {
            "JAX_COMPILATION_CACHE_DIR": str(folder.path / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
        }
        quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "FLWR_HOME": str(self.home)}
        path = {"PATH": f"{BIN}:{os.environ['PATH']}"}
        self.environment = os.environ | compiled | quiet | path
        root = folder.keys("coordinator") / "authority.pem"
        (self.home / "config.toml").write_text(
            f'[superlink]\ndefault = "study"\n[superlink.study]\naddress = "127.0.0.1:{self.port}"\n'
            f'root-certificates = "{root}"\n'
        )

    def start(self, name, *words):
        with open(self.folder.path / f"{name}.log", "wb") as log:
            self.running[name] = subprocess.Popen(
                [str(BIN / words[0]), *map(str, words[1:])], env=self.environment, stdout=log, stderr=log
            )

    def call(self, *words):
        done = subprocess.run(
            [str(BIN / "flwr"), *map(str, words)], env=self.environment, capture_output=True, text=True
        )
        return done.returncode == 0, done.stdout + done.stderr

    def start_link(self):
        keys = self.folder.keys("coordinator")
        self.start(
            "link", "flower-superlink", "--host", "127.0.0.1", "--port", self.port,
            "--ssl-certfile", keys / "certificate.pem", "--ssl-keyfile", keys / "key.pem",
            "--ssl-ca-certfile", keys / "authority.pem", "--enable-supernode-auth",
            "--disable-runtime-dependency-installation",
        )  # fmt: skip

    def start_node(self, name):
        path, keys = self.folder.path, self.folder.keys(name)
        options = {
            "name": name, "study": path / "study.toml", "data": path / f"{name}.csv", "policy": path / "policy.toml",
            "keys": keys, "store": path / "stores" / name,
        }  # fmt: skip
        words = " ".join(f'{key}="{value}"' for key, value in options.items()) + f" seed={SITE_SEED}"
        self.start(
            name, "flower-supernode", "--superlink", f"127.0.0.1:{self.port}",
            "--root-certificates", keys / "authority.pem", "--auth-supernode-private-key", keys / "node",
            "--host", "127.0.0.1", "--port", free_port(), "--node-config", words,
        )  # fmt: skip

    def stop(self):
        for process in reversed(self.running.values()):
            process.terminate()
        for process in self.running.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def eventually(ready, seconds):
    end = time.monotonic() + seconds
    while not (found := ready()):
        assert time.monotonic() < end
        time.sleep(2)
    return found


@pytest.mark.long
@pytest.mark.parametrize("contract", [FEW_ROUNDS, MODEL_FEW_ROUNDS], ids=["family", "file"])
def test_a_study_on_a_superlink_and_its_supernodes(tmp_path, contract):
    folder = Folder(tmp_path, contract)
    make_keys(tmp_path / "flower", folder.study.sites, hosts=["127.0.0.1"])
    folder.keys = lambda name: tmp_path / "flower" / (name if name == "coordinator" else f"sites/{name}")
    write_flower_app(tmp_path / "app")
    project = tmp_path / "app" / "pyproject.toml"
    text = (
        project.read_text().replace('"study.toml"', f'"{tmp_path}/study.toml"').replace("seed = -1", f"seed = {SEED}")
    )
    text = text.replace('"keys/coordinator"', f'"{folder.keys("coordinator")}"').replace('"run"', f'"{tmp_path}/run"')
    project.write_text(text)
    flower = Flower(folder)
    try:
        flower.start_link()
        for name in folder.study.sites:
            eventually(
                lambda name=name: flower.call("supernode", "register", folder.keys(name) / "node.pub", "study")[0], 120
            )
            flower.start_node(name)
        done, said = flower.call("run", tmp_path / "app", "study")
        assert done, said
        eventually(lambda: (tmp_path / "run" / "posterior.zarr" / "zarr.json").exists(), 1200)
        time.sleep(5)
        post = fp.load(tmp_path / "run" / "posterior.zarr")
    finally:
        flower.stop()
    assert same_bits(post, folder.in_process())
