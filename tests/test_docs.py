"""Every Python example of the documentation runs, page by page, in order."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
# Pages whose examples need more than Python have a test of their own.
APART = {"deploy.md"}
# Every model of its own is compiled anew: by default only the first example of these.
LONG = {"models.md"}
PAGES = sorted(page for page in DOCS.glob("*.md") if "```python" in page.read_text(encoding="utf-8"))


def run(page, count=None):
    examples = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    exec(compile("\n".join(examples[:count]), page.name, "exec"), {})


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in APART | LONG], ids=lambda page: page.name)
def test_examples_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(page)


@pytest.mark.parametrize("name", sorted(LONG))
@pytest.mark.parametrize("count", [1, pytest.param(None, marks=pytest.mark.long)])
def test_long_pages_run(name, count, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(DOCS / name, count)


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_figures_and_links_exist(page):
    for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
        assert (DOCS / link).exists(), f"{page.name} points to {link}"
