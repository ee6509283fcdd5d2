"""``fedpdmc model``: build model files from Python, and show what a model file says."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedpdmc.cli.runner import command
from fedpdmc.console.wrapping import say
from fedpdmc.errors import InputError

if TYPE_CHECKING:
    from fedpdmc import Model

app = typer.Typer(help="Build and review model files.", no_args_is_help=True)

Out = Annotated[Path, typer.Option(help="The model file to write, such as weibull.fpm.")]


@command(app, "build")
def _build(
    source: Annotated[Path, typer.Argument(help="A Python file that defines `model`, a fedpdmc.Model.")], out: Out
) -> None:
    """Run a Python file on this machine and write the model that it defines. Sites never see the Python."""
    _write(_defined(source), out)


@command(app, "family")
def _family(
    name: Annotated[str, typer.Argument(help="A family of the standard library.")],
    out: Out,
    levels: Annotated[int | None, typer.Option(help="Number of levels of the response.")] = None,
    pieces: Annotated[int | None, typer.Option(help="Number of pieces of time.")] = None,
) -> None:
    """Write a family of the standard library as a model file, to read it or to change it."""
    from fedpdmc.models.families import FAMILIES, family

    if name not in FAMILIES:
        raise InputError("name", repr(name), f"Give one of {', '.join(FAMILIES)}.")
    sizes = {}
    for option, given, needed in (("levels", levels, FAMILIES[name].levels), ("pieces", pieces, FAMILIES[name].pieces)):
        if (given is None) == needed:
            raise InputError(
                f"--{option}", repr(given), "Give it." if needed else "This family has none: leave it out."
            )
        if given is not None and given < 2:
            raise InputError(f"--{option}", repr(given), "Give at least 2.")
        sizes |= {} if given is None else {option: given}
    _write(family(name, **sizes), out)


@command(app, "show")
def _show(
    file: Annotated[Path, typer.Argument(help="The model file.")],
    text: Annotated[bool, typer.Option("--text", help="Print the file itself.")] = False,
) -> None:
    """Read and check a model file, and print its parameters, columns, formulas and values at test points."""
    import fedpdmc as fp

    model = fp.Model.load(file)
    print(model.text if text else model.review())


def _defined(source: Path) -> "Model":
    """The one model that a Python file defines."""
    import runpy

    import fedpdmc as fp

    if not source.is_file():
        raise InputError("source", f"no file {source}", "Give a Python file that defines `model`.")
    found = runpy.run_path(str(source))
    models = [value for value in found.values() if isinstance(value, fp.Model)]
    named = found.get("model")
    if isinstance(named, fp.Model):
        return named
    if len(models) != 1:
        raise InputError("source", f"{source} with {len(models)} models", "Define one: model = fedpdmc.Model(f, ...).")
    return models[0]


def _write(model: "Model", out: Path) -> None:
    if out.suffix != ".fpm":
        raise InputError("--out", str(out), "Give a name that ends in .fpm.")
    model.save(out)
    say(f"{out}: {model.source.title}; {model.operations} operations.")
    say(f'In the contract: [model] file = "{out.name}", sha256 = "{model.digest}"')
