"""The table of attacks in the documentation names tests that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_attack_of_the_documentation_has_its_test():
    table = [line for line in (ROOT / "docs" / "privacy.md").read_text().splitlines() if "| `test_" in line]
    known = {
        name for path in (ROOT / "tests").rglob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    named = {name for line in table for name in re.findall(r"`(test_\w+)`", line)}
    assert len(table) >= 15 and named and named <= known, named - known
