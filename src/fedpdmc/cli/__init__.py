"""The command line. Importing it, or asking it for help, does not import JAX."""

from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

# Locals in a traceback could show a site's records, so they are never printed.
app = typer.Typer(
    name="fedpdmc",
    help="Exact federated Bayesian sampling: the coordinator plans, the sites object, no record leaves its site.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fedpdmc {version('fedpdmc')}")
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    pass


@app.command("demo")
def _demo(
    out: Annotated[Path, typer.Option(help="Folder for the forest plot and the posterior.")] = Path("fedpdmc-demo"),
    seed: Annotated[int, typer.Option(help="Seed of the run.")] = 2012,
    check: Annotated[bool, typer.Option(help="Compare with pooled NUTS, if BlackJAX is installed.")] = True,
) -> None:
    """Fit a real trial in four hospitals without pooling their records."""
    from fedpdmc.cli.demo import run

    raise typer.Exit(0 if run(out, seed=seed, check=check) else 1)


def main() -> None:
    """Entry point of the console script ``fedpdmc``."""
    app()
