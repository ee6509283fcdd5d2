"""Every Python example of the documentation runs, page by page, in order."""

import re
from inspect import isfunction
from pathlib import Path

import pytest
from docs.hooks import no_network

import fedpdmc as fp

DOCS = Path(__file__).parents[2] / "docs"
# The first needs more than Python and has a test of its own; the second shows the README's example.
APART = {"deploy.md", "index.md"}
# Every model of a user's own is compiled again, which takes a minute.
LONG = {"families.md", "hierarchical.md", "model-files.md", "models.md", "privacy.md"}
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


def test_the_first_page_shows_the_example_of_the_readme():
    (example,) = re.findall(r"```python\n(.*?)```", (DOCS / "index.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    assert example in (DOCS.parent / "README.md").read_text(encoding="utf-8")


def test_the_reference_has_every_public_name():
    pages = "".join(page.read_text(encoding="utf-8") for page in (DOCS / "reference").glob("*.md"))
    shown = set(re.findall(r"^::: fedpdmc\.(\w+)", pages, flags=re.MULTILINE))
    assert shown >= set(fp.__all__) - {"__version__"}
    (listed,) = re.findall(r"::: fedpdmc\.models\n(?: .*\n)*? +members: \[(.*)\]", pages)
    headings = set(re.findall(r"^::: ([\w.]+)", pages, flags=re.MULTILINE))
    functions = {name: value for name, value in vars(fp.models).items() if isfunction(value) and name[0] != "_"}
    apart = {
        name
        for name, value in functions.items()
        if headings & {value.__module__, f"{value.__module__}.{name}"} and value.__module__ != "fedpdmc.models"
    }
    own = {name for name, value in functions.items() if value.__module__.startswith("fedpdmc.models")}
    assert set(listed.split(", ")) | apart == own - {"user_model"}


def test_a_page_that_loads_from_a_network_is_found(tmp_path):
    """What `make docs` does with the whole site."""
    page = tmp_path / "index.html"
    page.write_text('<a href="https://example.org">a link loads nothing</a><script src="here.js"></script>')
    assert no_network.found(tmp_path) == []
    page.write_text(
        '<script async src="https://example.org/a.js"></script><link rel="stylesheet" href="//example.org/b.css">'
    )
    (tmp_path / "c.css").write_text("@font-face { src: url(https://example.org/c.woff2) }")
    assert len(no_network.found(tmp_path)) == 3


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_figures_and_links_exist(page):
    for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
        assert (DOCS / link).exists(), f"{page.name} points to {link}"
