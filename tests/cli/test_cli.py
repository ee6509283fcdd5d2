import logging
import subprocess
import sys
from importlib.metadata import version

import pytest

import fedpdmc as fp
from fedpdmc.cli.runner import log_to
from fedpdmc.errors import InputError

SCRIPT = """
import sys
from fedpdmc.__main__ import main
sys.argv = ["fedpdmc", *sys.argv[1:]]
try:
    main()
finally:
    print("HEAVY", *sorted({"jax", "numpy", "matplotlib", "arviz"} & set(sys.modules)))
"""


def run(*arguments):
    done = subprocess.run([sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True, check=True)
    *text, heavy = done.stdout.strip().splitlines()
    return "\n".join(text), heavy.split()[1:]


def test_help_names_the_commands_and_imports_nothing_heavy():
    text, heavy = run("--help")
    assert "demo" in text and "coordinator" in text
    assert heavy == []


def test_help_of_a_command_imports_nothing_heavy():
    text, heavy = run("demo", "--help")
    assert "--seed" in text
    assert heavy == []


def test_help_explains_arguments_too():
    text, heavy = run("coordinator", "--help")
    assert "contract, study.toml" in text and "--listen" in text
    assert heavy == []


def test_version_is_the_installed_one():
    text, heavy = run("--version")
    assert text == f"fedpdmc {version('fedpdmc')}"
    assert version("fedpdmc") == fp.__version__
    assert heavy == []


def test_a_log_file_is_begun_again_when_it_is_moved_away(tmp_path, capsys):
    """As logrotate does it: no signal, no line lost, readable by its owner only; a disk that fails stops nothing."""
    path, logger = tmp_path / "site.log", logging.getLogger("fedpdmc")
    log_to(path)
    handler = logger.handlers[-1]
    try:
        for number in range(6):
            logger.warning("line %d", number)
            if number % 2:
                path.rename(tmp_path / f"site.log.{number}")
        said = "".join(one.read_text() for one in sorted(tmp_path.glob("site.log.*")))
        assert [line[-1] for line in said.splitlines()] == list("012345") and "WARNING fedpdmc: line 0" in said
        assert all(one.stat().st_mode & 0o777 == 0o600 for one in tmp_path.iterdir())
        path.mkdir()
        logger.warning("nowhere")
        assert "a line could not be written" in capsys.readouterr().err
        path.rmdir()
        logger.warning("again")
        assert "again" in path.read_text()
    finally:
        logger.removeHandler(handler)
        handler.close()
    with pytest.raises(InputError, match="log-file"):
        log_to(tmp_path / "nowhere" / "site.log")
