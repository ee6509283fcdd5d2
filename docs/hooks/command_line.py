"""The page of the command line is made from the commands' own help."""

import typer
from typer.cli import get_docs_for_click

from fedpdmc.cli import app

MARKER = "<!-- commands -->"


def whole_sentences(command):
    """Let lists of commands show the first sentence of each, which is cut short otherwise."""
    for inner in getattr(command, "commands", {}).values():
        inner.short_help = inner.short_help or (inner.help or "").partition("\n\n")[0].replace("\n", " ")
        whole_sentences(inner)


def on_page_markdown(markdown, page, **others):
    """Put every command and its options in the place of the marker."""
    if MARKER not in markdown:
        return markdown
    command = typer.main.get_command(app)
    whole_sentences(command)
    context = typer.Context(command, info_name="fedpdmc")
    text = get_docs_for_click(obj=command, ctx=context, name="fedpdmc").split("\n", 1)[1]  # The page has its title.
    return markdown.replace(MARKER, text)
