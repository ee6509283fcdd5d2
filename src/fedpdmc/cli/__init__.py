"""The command line. Importing it, or printing its help, does not import JAX."""

from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import click
import typer

from fedpdmc.cli import assess, audit, effects, keys, model, network, privacy, report, study
from fedpdmc.cli.runner import CHECK_FAILED, REFUSED, command
from fedpdmc.console.interrupts import remains
from fedpdmc.console.wrapping import say
from fedpdmc.experiments import NAMES

# Local variables in a traceback could show a site's records, so they are never printed.
app = typer.Typer(
    name="fedpdmc",
    help="Exact Bayesian inference over records that stay at their sites.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
app.add_typer(study.app, name="study")
app.add_typer(model.app, name="model")
app.add_typer(audit.app, name="audit")
app.add_typer(keys.app, name="keys")
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


@command(app, "reproduce")
def _reproduce(
    name: Annotated[str, typer.Argument(help="Which experiment.", click_type=click.Choice([*NAMES, "all"]))],
    quick: Annotated[bool, typer.Option("--quick", help="Run a small version of the experiment.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for figures (PNG, SVG) and numbers (CSV).")] = Path("fedpdmc-paper"),
) -> int:
    """Reproduce the paper's figures and check its claims."""
    from importlib.util import find_spec

    missing = [package for package in ("blackjax", "scipy") if find_spec(package) is None]
    if missing:
        typer.echo(
            f"{' and '.join(missing)} not found. Install the extra: pip install 'fedpdmc[experiments]'.", err=True
        )
        return REFUSED
    remains(f"Interrupted. Finished figures are in {out}.")
    from fedpdmc.experiments import reproduce

    good = True
    for verdict in reproduce(name, out, quick):
        typer.echo(str(verdict))
        good &= verdict.holds
    say(f"Figures and numbers are in {out}.")
    return 0 if good else CHECK_FAILED


command(app, "run")(study.run)
command(app, "coordinator")(network.coordinator)
command(app, "site")(network.site)
command(app, "bundle")(network.bundle)
command(app, "join")(network.join)
command(app, "revoke")(keys.revoke)
command(app, "assess")(assess.assess)
command(app, "effects")(effects.effects)
command(app, "report")(report.report)
command(app, "flower-app")(network.flower_app)
