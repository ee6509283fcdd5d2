"""Every Python example of the documentation runs, page by page, in order."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
# Pages whose examples need more than Python have a test of their own.
APART = {"deploy.md"}
# Every model of a user's own is compiled anew, which takes a minute.
LONG = {"models.md", "privacy.md"}
PAGES = sorted(page for page in DOCS.glob("*.md") if "```python" in page.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.name, marks=pytest.mark.long if page.name in LONG else [])
        for page in PAGES
        if page.name not in APART
    ],
)
def test_examples_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    exec(compile("\n".join(examples), page.name, "exec"), {})


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_figures_and_links_exist(page):
    for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
        assert (DOCS / link).exists(), f"{page.name} points to {link}"
