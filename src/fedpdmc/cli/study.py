"""A contract tried out on one machine, and model files: ``fedpdmc study``, ``run`` and ``model``."""

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedpdmc.cli.runner import CHECK_FAILED, Contract, command
from fedpdmc.console.interrupts import INTERRUPTED, happened, remains
from fedpdmc.console.wrapping import say
from fedpdmc.errors import InputError

if TYPE_CHECKING:
    from fedpdmc import Model

study_app = typer.Typer(help="Check a study's contract.", no_args_is_help=True)


@command(study_app, "check")
def _check(
    study: Contract,
    records: Annotated[int, typer.Option(min=1, help="Number of synthetic records per site.")] = 100,
) -> int:
    """Read a contract, run it briefly on synthetic records, and estimate the cost of the whole run."""
    from fedpdmc.federation.dry_run import try_study
    from fedpdmc.study import read_study
    from fedpdmc.study.description import choice, released

    contract = read_study(study)
    say(f"{contract.name}: {contract.family}, {contract.formula}; sites {', '.join(contract.sites)}")
    say(f"parameters: {', '.join(contract.names)}")
    say(f"contract hash (sha256sum {study.name}): {contract.digest.hex()}")
    budget = "no privacy budget"
    if contract.epsilon is not None:
        budget = f"privacy budget epsilon = {contract.epsilon:g}, delta = {contract.delta:g}, {contract.neighbours}"
        budget += "" if contract.colluding is None else f", if at most {contract.colluding} sites collude"
    say("; ".join([f"sites release: {', '.join(released(contract))}", budget, *choice(contract)]))
    trial = try_study(contract, records=records)
    say(f"dry run on {records} synthetic records per site: {trial.posterior!r}")
    say(
        f"expected for the whole run: {trial.rounds:,} requests (limit {contract.rounds:,}), observed process time up to "
        f"{trial.observed_time:,.4g} (limit {contract.observed_time:,.4g}), {trial.bytes_per_round:,} bytes per round and "
        "site"
    )
    if trial.rounds > contract.rounds or trial.observed_time > contract.observed_time:
        say("The contract's limits are probably too small for the run that it describes.")
        return CHECK_FAILED
    return 0


def run(
    study: Contract,
    data: Annotated[list[str], typer.Option(help="NAME=RECORDS, once for each site.")],
    query: Annotated[list[str] | None, typer.Option(help="NAME=QUERY, for sites that use a database.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the run.")] = None,
    site_seed: Annotated[list[str] | None, typer.Option(help="NAME=SEED, for sites with their own seed.")] = None,
    store: Annotated[Path | None, typer.Option(help="Folder for checkpoints; a restart resumes from it.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where to save the posterior.")] = None,
) -> int:
    """Run a study with all its sites in this process, to try it out."""
    resume = "With --store FOLDER an interrupted run can be resumed."
    kept = f"The samples so far are in {store}. Run the same command to resume."
    remains(f"Interrupted. {kept if store else f'Nothing was saved. {resume}'}", finishes=True)
    import fedpdmc as fp

    sources, queries = _by_site(data, "data"), _by_site(query or [], "query")
    stray = sorted(set(queries) - set(sources))
    if stray:
        raise InputError("query", f"one for {stray[0]!r}, which has no data", "Give --data for it too.")
    given = {name: (source, queries.get(name)) for name, source in sources.items()}
    seeds = {name: _seed(value) for name, value in _by_site(site_seed or [], "site-seed").items()}
    with fp.connect(study, data=given, seed=seed, site_seeds=seeds, store=store) as connection, verdict_in_summary():
        post = fp.sample(connection)
    if happened() and store is not None:
        return INTERRUPTED
    if happened():
        remains(f"Interrupted. This is the result so far. {resume}", finishes=True)
    print(post.summary())
    if target := out or (store and store / "posterior.zarr"):
        post.save(target)
        say(f"Saved: {target} (read it with fedpdmc.load; `fedpdmc report {out or store}` makes a report).")
    else:
        say("The posterior was not saved. Give --out FOLDER to save it.")
    return 0


@contextlib.contextmanager
def verdict_in_summary() -> Iterator[None]:
    """Suppress the warning of poor convergence: the printed summary begins with the verdict."""
    from fedpdmc.results.verdict import ConvergenceWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        yield


def _by_site(options: Sequence[str], option: str) -> dict[str, str]:
    out = {}
    for text in options:
        name, mark, value = text.partition("=")
        if not mark or not name or not value or name in out:
            raise InputError(option, repr(text), "Give NAME=VALUE, once for each site.")
        out[name] = value
    return out


def _seed(text: str) -> int:
    from fedpdmc.validation import MOST_SEED, integer

    digits = text.isascii() and text.isdigit() and len(text) < 20
    return integer("site-seed", int(text) if digits else text, 0, MOST_SEED, "Give an integer from 0 to 2**63 − 1.")


# Model files ---------------------------------------------------------------------------------------------------------


model_app = typer.Typer(help="Build and review model files.", no_args_is_help=True)

Out = Annotated[Path, typer.Option(help="The model file to write, such as weibull.fpm.")]


@command(model_app, "build")
def _build(
    source: Annotated[Path, typer.Argument(help="A Python file that defines `model`, a fedpdmc.Model.")], out: Out
) -> None:
    """Run a Python file on this machine and write the model that it defines. Sites never see the Python."""
    import runpy

    import fedpdmc as fp

    if not source.is_file():
        raise InputError("source", f"no file {source}", "Give a Python file that defines `model`.")
    found = runpy.run_path(str(source))
    models = [value for value in found.values() if isinstance(value, fp.Model)]
    models = [found["model"]] if isinstance(found.get("model"), fp.Model) else models
    if len(models) != 1:
        raise InputError("source", f"{source} with {len(models)} models", "Define one: model = fedpdmc.Model(f, ...).")
    _write(models[0], out)


@command(model_app, "family")
def _family(
    name: Annotated[str, typer.Argument(help="A family of the standard library.")],
    out: Out,
    levels: Annotated[int | None, typer.Option(help="Number of levels of the response.")] = None,
    pieces: Annotated[int | None, typer.Option(help="Number of pieces of time.")] = None,
) -> None:
    """Write a family of the standard library as a model file, to read it or to change it."""
    from fedpdmc.models.families import FAMILIES, LIBRARY, family

    if name not in LIBRARY:
        raise InputError("name", repr(name), f"Give one of {', '.join(LIBRARY)}.")
    sizes = {}
    for option, given, needed in (("levels", levels, FAMILIES[name].levels), ("pieces", pieces, FAMILIES[name].pieces)):
        if (given is None) == needed:
            remedy = "Give it." if needed else "This family has none: leave it out."
            raise InputError(f"--{option}", repr(given), remedy)
        if given is not None and given < 2:
            raise InputError(f"--{option}", repr(given), "Give at least 2.")
        sizes |= {} if given is None else {option: given}
    _write(family(name, **sizes), out)


@command(model_app, "show")
def _show(
    file: Annotated[Path, typer.Argument(help="The model file.")],
    text: Annotated[bool, typer.Option("--text", help="Print the file itself.")] = False,
) -> None:
    """Read and check a model file, and print its parameters, columns, formulas and values at test points."""
    import fedpdmc as fp

    model = fp.Model.load(file)
    print(model.text if text else model.review())


def _write(model: "Model", out: Path) -> None:
    if out.suffix != ".fpm":
        raise InputError("--out", str(out), "Give a name that ends in .fpm.")
    model.save(out)
    say(f"{out}: {model.source.title}; {model.operations} operations.")
    say(f'In the contract: [model] file = "{out.name}", sha256 = "{model.digest}"')
