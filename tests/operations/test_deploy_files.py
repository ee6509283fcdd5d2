"""The container files: what they copy is there, what they run is a command, and they let the process do little."""

import re
import shlex
from pathlib import Path

import pytest
import typer

from fedpdmc import __version__
from fedpdmc.cli import app

ROOT = Path(__file__).parents[2]
UNITS = sorted((ROOT / "deploy").glob("*.container"))


def test_the_image_is_made_of_what_is_there_and_runs_without_rights():
    text = (ROOT / "deploy" / "Containerfile").read_text()
    # All that is copied comes from `make wheelhouse`, and is checked by its hash.
    assert re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.M) == ["wheelhouse"]
    assert "\nwheelhouse:\n" in (ROOT / "Makefile").read_text()
    final = text[text.rindex("FROM ") :]
    assert re.search(r"^USER [1-9]\d*:", final, re.M) and 'ENTRYPOINT ["fedpdmc"]' in final
    assert "--no-index --find-links /wheelhouse --require-hashes" in text and ":latest" not in text
    assert f"fedpdmc:{__version__}" in text


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_container_lets_the_process_do_little_and_runs_a_command(unit):
    text = unit.read_text()
    for line in ("ReadOnly=true", "DropCapability=all", "NoNewPrivileges=true", "RestartPreventExitStatus=2"):
        assert f"\n{line}\n" in text
    assert f"Image=localhost/fedpdmc:{__version__}\n" in text
    # The study's folder cannot be written, but for the store.
    assert re.findall(r"^Volume=\S+:/study:(\w+)$", text, re.M) == ["ro"]
    words = shlex.split(re.search(r"^Exec=(.*)$", text, re.M)[1])
    command = typer.main.get_command(app).commands[words[0]]
    known = {option: parameter for parameter in command.params for option in parameter.opts}
    given = [word for word in words if word.startswith("--")]
    assert set(given) <= set(known)
    needed = {option for option, parameter in known.items() if parameter.required and option.startswith("--")}
    assert needed <= set(given)
    assert re.search(rf"^Volume=\S+:/study/{words[words.index('--store') + 1]}:rw$", text, re.M)


def test_a_status_page_in_a_container_is_published_on_loopback_only():
    text = (ROOT / "deploy" / "fedpdmc-coordinator.container").read_text()
    assert [one for one in re.findall(r"^PublishPort=(.*)$", text, re.M) if one.endswith(":8080")] == [
        "127.0.0.1:8080:8080"
    ]


def test_there_are_two():
    assert [unit.stem for unit in UNITS] == ["fedpdmc-coordinator", "fedpdmc-site"]


def test_every_pinned_version_that_is_locked_has_the_hashes_of_its_files():
    """Of all that is installed with the extras of a service, in the versions of constraints.txt, and nowhere a host."""
    text = (ROOT / "deploy" / "requirements.txt").read_text()
    found = re.findall(r"^([a-z0-9-]+)==(\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", text, re.M)
    assert len(found) > 40 and "".join(re.findall(r"^[^ #]\S*", text, re.M)).count("==") == len(found)
    assert "://" not in text
    pins = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if "==" in line and not line.startswith("#"):
            name, version = line.split("==")
            pins[re.sub(r"[-_.]+", "-", name.strip()).lower()] = version.split(";")[0].strip()
    # An environment has setuptools from the beginning, in a version of its own; here it is a requirement of arviz.
    other = [name for name, version, _ in found if pins.get(name) != version]
    assert other == ["setuptools"]
    direct = {
        "jax",
        "jaxlib",
        "numpy",
        "grpcio",
        "cryptography",
        "polars",
        "formulaic",
        "zarr",
        "psycopg",
        "dp-accounting",
    }
    assert direct <= {name for name, _, _ in found}
