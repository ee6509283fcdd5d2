"""Notebook pages without the scripts that nbconvert adds for formulas and diagrams: they would be loaded from a network."""

import re

SCRIPTS = re.compile(
    r"<!-- Load mathjax -->.*?<!-- End of mathjax configuration -->"
    r"|<script type=\"module\">(?:(?!</script>).)*?mermaid.*?<!-- End of mermaid configuration -->",
    re.DOTALL,
)


def on_page_content(html, page, **others):
    """Drop each from its beginning to the comment that ends it."""
    return SCRIPTS.sub("", html) if page.file.src_uri.endswith(".ipynb") else html
