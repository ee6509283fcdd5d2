"""The pages on studies over a network: their contract, policy and Python are used, and their commands exist."""

import re
import shlex
import threading
import tomllib
from pathlib import Path

import pytest
import typer
from tests.federation.processes import free_port
from tests.federation.studies import Folder

from fedpdmc.certificates import read_credentials
from fedpdmc.cli import app
from fedpdmc.federation.grpc.client import serve
from fedpdmc.study import parse_study, read_policy

DOCS = Path(__file__).parents[2] / "docs"
PAGE = "".join((DOCS / name).read_text() for name in ("deploy.md", "operate.md", "study-security.md"))


def weibull():
    """The model that the page on model files builds."""
    text = (DOCS / "model-files.md").read_text(encoding="utf-8")
    found = {}
    exec(re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)[0], found)
    return found["model"]


WEIBULL = weibull()


def blocks(language):
    found = re.findall(r"^```(\w*)\n(.*?)^```", PAGE, re.S | re.M)
    return [text for tag, text in found if tag == language]


def test_the_contract_and_the_policy_can_be_used(tmp_path):
    contract, without, privacy, policy, survival, allowed, superlink, pinned = blocks("toml")
    study = parse_study(contract.encode())
    assert study.names == ("Intercept", "drug[T.verum]", "age")
    other = contract.replace("[dynamics]", without.strip() + "\n#").replace('"own"', '"none"', 1)
    other = other.replace("passes = true", "")
    assert parse_study(other.encode()).kind == "ZigZag"
    assert parse_study((other + privacy).encode()).epsilon == 2.0
    assert set(tomllib.loads(superlink)["superlink"]["study"]) == {"address", "root-certificates"}
    (tmp_path / "policy.toml").write_text(policy + pinned)
    found = read_policy(tmp_path / "policy.toml")
    found.check("north", study, 100)
    assert set(found.certificates) == {"south"}
    with_file = parse_study(survival.encode(), lambda name: WEIBULL.text.encode())
    assert with_file.names[-1] == "log_shape"
    (tmp_path / "policy.toml").write_text(allowed)
    read_policy(tmp_path / "policy.toml").check("north", with_file, 60)
    three = contract.replace('"south"]', '"south", "west"]').replace('"own"', '"summed"', 1)
    assert parse_study(three.encode()).derivatives == "summed"


def commands():
    lines = "".join(blocks("") + blocks("ini")).replace("\\\n", " ").splitlines()
    lines = [line.removeprefix("ExecStart=/srv/venv/bin/") for line in lines]
    return [line for line in lines if line.startswith("fedpdmc ")]


def test_the_unit_lets_the_process_do_little():
    """What makes most of the exposure that `systemd-analyze security` finds."""
    (unit,) = blocks("ini")
    for line in (
        "CapabilityBoundingSet=", "NoNewPrivileges=true", "ProtectSystem=strict", "ProtectHome=true", "PrivateDevices=true",
        "PrivateUsers=true", "SystemCallFilter=@system-service", "RestrictNamespaces=true", "UMask=0077",
    ):  # fmt: skip
        assert f"\n{line}\n" in unit, line
    assert int(re.search(r"\nLimitNOFILE=(\d+)\n", unit)[1]) >= 4096
    # JAX compiles: with these it would not start, or make other bits.
    assert "MemoryDenyWriteExecute" not in unit and "ProcSubset=" not in unit


@pytest.mark.parametrize("line", commands())
def test_every_command_is_one(line):
    words = shlex.split(line)[1:]
    command = typer.main.get_command(app)
    context = command.make_context("fedpdmc", words, resilient_parsing=True)
    while hasattr(command, "resolve_command"):
        _, command, words = command.resolve_command(context, [*context._protected_args, *context.args])
        context = command.make_context(command.name, list(words), parent=context, resilient_parsing=True)
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known


def test_every_code_a_site_can_send_is_explained():
    folder = Path(__file__).parents[2] / "src/fedpdmc/federation/site_agent"
    source = "".join((folder / name).read_text() for name in ("agent.py", "request_checks.py"))
    codes = set(re.findall(r'\bNo\("([A-Z_]+)"', source)) | set(re.findall(r'"([A-Z]+_[A-Z_]+)"', source))
    assert len(codes) > 20
    for code in codes:
        assert re.search(rf"\b{code}`", PAGE), code


def test_the_python_examples_run(tmp_path, monkeypatch):
    """With the page's contract, on loopback, the sites in threads."""
    contract = blocks("toml")[0].replace("ess = 400", "ess = 20").replace("chains = 16", "chains = 4")
    folder, address = Folder(tmp_path, contract), f"127.0.0.1:{free_port()}"
    agents = {name: folder.agent(name) for name in folder.study.sites}
    threads = [
        threading.Thread(target=serve, args=(agent, address, read_credentials(folder.keys(name))), daemon=True)
        for name, agent in agents.items()
    ]
    for thread in threads:
        thread.start()
    monkeypatch.chdir(tmp_path)
    read, connect = blocks("python")
    names: dict = {}
    exec(compile(connect.replace("192.0.2.7:4433", address), "deploy.md", "exec"), names)
    for thread in threads:
        thread.join(30)
    assert all(agent.finished for agent in agents.values())
    names["post"].save("run/posterior.zarr")
    exec(compile(read, "deploy.md", "exec"), {})
    for agent in agents.values():
        agent.log.close()
