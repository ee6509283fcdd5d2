"""The walk through the paper names tests, modules and figures that exist."""

import re
from pathlib import Path

import pytest

from paper import NAMES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")


def missing_tests(page):
    """Names of tests, with or without their file, that no file has; and named files that are not there."""
    missing, defined = [], set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        defined |= set(re.findall(r"^def (test_\w+)\(", path.read_text(encoding="utf-8"), re.MULTILINE))
    for path, name in re.findall(r"(tests/[\w/]+\.py)::(\w+)", page):
        file = ROOT / path
        if not file.exists() or f"def {name}(" not in file.read_text(encoding="utf-8"):
            missing.append(f"{path}::{name}")
    for path in re.findall(r"(?<![\w/])((?:tests/[\w/]*)?test_\w+\.py)", page):
        if not (list((ROOT / "tests").rglob(path)) if "/" not in path else (ROOT / path).exists()):
            missing.append(path)
    missing += [name for name in re.findall(r"\btest_\w+\b(?!\.py)", page) if name not in defined]
    return missing


def test_every_named_test_exists():
    assert len(re.findall(r"tests/[\w/]+\.py::\w+", PAGE)) >= 9
    assert missing_tests(PAGE) == []


@pytest.mark.parametrize(
    "words",
    [
        "`test_that_nobody_wrote`",
        "`tests/privacy/test_single_arrival.py::test_that_nobody_wrote`",
        "`tests/nowhere/test_theorem.py`",
        "`test_of_nothing.py`",
        # In another file than the one named.
        "`tests/privacy/test_single_arrival.py::test_gaussian`",
    ],
)
def test_a_test_that_does_not_exist_is_missed(words):
    assert missing_tests(f"See {words} for it.")


def test_every_figure_and_experiment_is_there():
    figures = re.findall(r"\]\((figures/paper/[\w-]+\.png)\)", PAGE)
    assert sorted(Path(name).name for name in figures) == sorted(
        path.name for path in (ROOT / "docs" / "figures" / "paper").glob("*.png")
    )
    for name in NAMES:
        assert f"| `{name}` |" in PAGE and (ROOT / f"paper/{name.replace('-', '_')}.py").exists()
    for path in re.findall(r"`((?:paper|clocks|dynamics|potentials|federation)/[\w/]+\.py)`", PAGE):
        assert any((root / path).exists() for root in (ROOT, ROOT / "src" / "fedpdmc")), path
