import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"
SOURCE = README.parent / "src" / "fedpdmc"
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


def _missing(name: str) -> bool:
    """Whether a dotted name below a folder of the package is neither a module nor in the module or package that it names."""
    at = SOURCE
    for part in name.split(".")[1:]:
        if (at / part).is_dir():
            at = at / part
        elif (at / f"{part}.py").exists():
            at = at / f"{part}.py"
        else:
            return not re.search(
                rf"\b{part}\b", (at / "__init__.py" if at.is_dir() else at).read_text(encoding="utf-8")
            )
    return False


def test_every_module_that_docs_and_docstrings_name_is_there():
    texts = [
        *SOURCE.rglob("*.py"),
        *(README.parent / "docs").rglob("*.md"),
        README,
        README.with_name("CONTRIBUTING.md"),
    ]
    rooms = "|".join(path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists())
    named = {
        (path.name, name)
        for path in texts
        for name in re.findall(rf"\bfedpdmc\.(?:{rooms})(?:\.[A-Za-z_]\w*)+", path.read_text(encoding="utf-8"))
    }
    assert len(named) > 500 and not [one for one in named if _missing(one[1])]
    assert _missing("fedpdmc.clocks.arrivals") and _missing("fedpdmc.clocks.choose.open_site")


def test_the_readme_has_an_example():
    assert EXAMPLES
