import subprocess
import sys
from importlib.metadata import version

import fedpdmc as fp

SCRIPT = """
import sys
from fedpdmc.cli import main
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
    assert "demo" in text and "reproduce" in text
    assert heavy == []


def test_help_of_a_command_imports_nothing_heavy():
    text, heavy = run("demo", "--help")
    assert "--seed" in text
    assert heavy == []


def test_help_of_the_experiments_names_them_and_imports_nothing_heavy():
    text, heavy = run("reproduce", "--help")
    assert "--quick" in text and "gaussian" in text
    assert heavy == []


def test_version_is_the_installed_one():
    text, heavy = run("--version")
    assert text == f"fedpdmc {version('fedpdmc')}"
    assert version("fedpdmc") == fp.__version__
    assert heavy == []
