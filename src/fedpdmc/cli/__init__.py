"""The command line. Importing it, or printing its help, does not import JAX."""

from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from fedpdmc.cli import network, privacy, study
from fedpdmc.cli.runner import CHECK_FAILED, command
from fedpdmc.console.interrupts import remains

# Local variables in a traceback could show a site's records, so they are never printed.
app = typer.Typer(
    name="fedpdmc",
    help="Exact Bayesian inference over records that stay at their sites.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
app.add_typer(study.study_app, name="study")
app.add_typer(study.model_app, name="model")
app.add_typer(study.audit_app, name="audit")
app.add_typer(network.keys_app, name="keys")
app.add_typer(privacy.privacy_app, name="privacy")
app.add_typer(privacy.ledger_app, name="ledger")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fedpdmc {version('fedpdmc')}")
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@command(app, "demo")
def _demo(
    out: Annotated[Path, typer.Option(help="Folder for the forest plot and the posterior.")] = Path("fedpdmc-demo"),
    seed: Annotated[int, typer.Option(help="Seed of the run.")] = 2012,
    check: Annotated[bool, typer.Option(help="Compare with NUTS on pooled records, if BlackJAX is installed.")] = True,
) -> int:
    """Analyse a clinical trial at four hospitals without pooling their records."""
    remains("Interrupted. Nothing was saved; run `fedpdmc demo` again.")
    from fedpdmc.cli.demo import run

    return 0 if run(out, seed=seed, check=check) else CHECK_FAILED


for work in (
    study.run, network.coordinator, network.site, network.bundle, network.invite, network.join, network.revoke,
    study.assess, study.effects, study.report,
):  # fmt: skip
    command(app, work.__name__)(work)
command(app, "flower-app")(network.flower_app)
