"""The deployment page: its contract and policy are read, and its commands exist."""

import re
import shlex
from pathlib import Path

import pytest
import typer

from fedpdmc.cli import app
from fedpdmc.study import parse_study, read_policy

PAGE = (Path(__file__).parents[1] / "docs" / "deploy.md").read_text()


def blocks(language):
    found = re.findall(r"^```(\w*)\n(.*?)^```", PAGE, re.S | re.M)
    return [text for tag, text in found if tag == language]


def test_the_contract_and_the_policy_can_be_used(tmp_path):
    contract, without, privacy, policy = blocks("toml")
    study = parse_study(contract.encode())
    assert study.names == ("Intercept", "drug[T.verum]", "age")
    other = contract.replace("[dynamics]", without.strip() + "\n#").replace('"own"', '"none"', 1)
    assert parse_study(other.encode()).kind == "ZigZag"
    assert parse_study((other + privacy).encode()).epsilon == 2.0
    (tmp_path / "policy.toml").write_text(policy)
    read_policy(tmp_path / "policy.toml").check("north", study, 100)


def commands():
    lines = "".join(blocks("")).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.startswith("fedpdmc ")]


@pytest.mark.parametrize("line", commands())
def test_every_command_is_one(line):
    words = shlex.split(line)[1:]
    command = typer.main.get_command(app)
    context = command.make_context("fedpdmc", words, resilient_parsing=True)
    while hasattr(command, "resolve_command"):
        _, command, words = command.resolve_command(context, words)
        context = command.make_context(command.name, list(words), parent=context, resilient_parsing=True)
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known


def test_every_code_a_site_can_send_is_explained():
    source = (Path(__file__).parents[1] / "src/fedpdmc/federation/agent.py").read_text()
    for code in set(re.findall(r'_No\("([A-Z_]+)"', source)):
        assert f"`{code}`" in PAGE, code
