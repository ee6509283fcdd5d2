import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_example_of_the_readme_runs(example, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "README.md", "exec"), {})


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_every_file_that_the_maps_name_is_there(page):
    root = README.parent
    names = re.findall(r"`([\w./-]+/(?:[\w-]+\.\w+)?)`", (root / page).read_text(encoding="utf-8"))
    made = {"fedpdmc-demo/", "fedpdmc-paper/", "fedpdmc-soak/"}
    missing = [n for n in names if n not in made and not any((root / at / n).exists() for at in (".", "src/fedpdmc"))]
    assert len(names) > 10 and not missing


def test_the_readme_has_an_example():
    assert EXAMPLES
