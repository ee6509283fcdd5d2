"""A contract tried out on one machine, model files, and what can be done after a run: fit, effects, report, audit log."""

import contextlib
import logging
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedpdmc.cli.runner import CHECK_FAILED, Contract, Data, Ledger, Query, SiteName, Store, command
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

    _silence_single_answers()
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

    _silence_single_answers()
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


def _silence_single_answers() -> None:
    """No log line for every answer of sites in this process."""
    logging.getLogger("fedpdmc.site.bits").setLevel(logging.WARNING)


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


# A site's fit --------------------------------------------------------------------------------------------------------


def assess(
    study: Contract,
    name: SiteName,
    data: Data,
    posterior: Annotated[Path, typer.Option(help="The posterior, as the coordinator saved and sent it.")],
    out: Annotated[Path, typer.Option(help="The file to write, JSON.")],
    query: Query = None,
    least_records: Annotated[int, typer.Option(min=2, help="Release nothing that fewer records carry.")] = 10,
    only_p_values: Annotated[
        bool, typer.Option("--only-p-values", help="Of the checks, release p-values and no observed summaries.")
    ] = False,
) -> int:
    """Work out how this site's records fit a posterior. The contract says what may be released."""
    import fedpdmc as fp
    from fedpdmc.assessment.at_site import assess_site, public_draws
    from fedpdmc.console.progress import report, showing
    from fedpdmc.study import read_study
    from fedpdmc.study.read_data import site_records

    contract = read_study(study)
    if not contract.assessment:
        raise InputError(
            f"{study}: releases: assessment", "nothing", "Agree on it in the contract: assessment = ['loo', 'checks']."
        )
    if name not in contract.sites:
        raise InputError("name", repr(name), f"The contract's sites are {', '.join(contract.sites)}.")
    post = fp.load(posterior)
    if post.settings.get("contract", contract.digest.hex()) != contract.digest.hex():
        raise InputError("posterior", f"{posterior}, of another contract", "Ask for that of this study.")
    draws = public_draws(post)
    records = site_records(contract, name, data, query)
    with showing(True):
        found = assess_site(
            contract, name, records, draws, what=contract.assessment, values=not only_p_values, least_records=least_records,
            controlled=True, step=partial(report, "fit of the records", 1, 1),
        )  # fmt: skip
    found.write(out)
    say(f"Written: {out}, with {', '.join(contract.assessment)} of {found.records:,} records. Nothing was sent.")
    say("Read it, then send it to the coordinator: fedpdmc report takes it with --assessment.")
    return 0


# Effects of a site's own groups --------------------------------------------------------------------------------------


def effects(
    study: Contract,
    name: SiteName,
    data: Data,
    store: Store,
    out: Annotated[Path, typer.Option(help="Where to write: OUT.csv, a summary, and OUT.npz, the draws.")],
    query: Query = None,
) -> int:
    """Work out the effects of this site's groups from its store. They stay here: nothing is sent."""
    from fedpdmc.federation.site_agent.audit_replay import own_effects, write_effects
    from fedpdmc.study import read_study

    contract = read_study(study)
    found = own_effects(contract, name, data, store=store, query=query)
    table, draws = write_effects(found, contract.names, out)
    chains, times, effects = found.z.shape
    say(f"Written: {table}, a summary of {effects} effects, and {draws}, {chains * times:,} draws of them together with "
        f"draws of {', '.join(contract.names)}. Both are readable by you only. Nothing was sent.")  # fmt: skip
    return 0


# The report ----------------------------------------------------------------------------------------------------------


def report(
    run: Annotated[Path, typer.Argument(help="A saved posterior, or a coordinator's store that holds one.")],
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("report.html"),
    study: Annotated[Path | None, typer.Option(help="The study's contract, to say what was modelled.")] = None,
    assessment: Annotated[
        list[Path] | None, typer.Option(help="What a site's `fedpdmc assess` has written; once for each site.")
    ] = None,
    title: Annotated[str | None, typer.Option(help="The heading.")] = None,
    question: Annotated[str | None, typer.Option(help="What the study asks.")] = None,
) -> int:
    """Write a report of a run: estimates, sites, convergence, privacy, exactness, and a text for a methods section."""
    import fedpdmc as fp
    from fedpdmc.assessment.all_sites import Assessment
    from fedpdmc.assessment.at_site import SiteAssessment, public_draws
    from fedpdmc.federation.audit_seals import FILE as SEALS
    from fedpdmc.federation.audit_seals import read_seals
    from fedpdmc.results.report import write_report
    from fedpdmc.study import read_study
    from fedpdmc.study.description import effect_scale, modelled, released

    inside = run / "posterior.zarr"
    if not inside.exists() and not (run / "zarr.json").exists():
        remedy = "Give the folder of a run that has ended: what --out or --store named there."
        raise InputError("run", f"{run}, which holds no posterior", remedy)
    post = fp.load(inside if inside.exists() else run)
    contract = None if study is None else read_study(study)
    if contract is not None and post.settings.get("contract", contract.digest.hex()) != contract.digest.hex():
        raise InputError("study", f"{study}, which is not the contract of this run", "Give the contract that was used.")
    found = [SiteAssessment.read(path) for path in assessment or []]
    digest = public_draws(post).digest
    for one in found:
        if one.draws != digest:
            raise InputError("assessment", f"that of {one.site!r}, under other draws", "Assess this posterior again.")
    heard = {one.site for one in found} | {post.settings.get("prior_site")}
    silent = [site for site in post.settings["sites"] if site not in heard]
    seals = {line["site"]: line["seal"] for line in read_seals(run / SEALS)}
    write_report(
        post, out, title=title, question=question, about=[] if contract is None else modelled(contract),
        released=[] if contract is None else released(contract), logs=seals,
        assessment=Assessment(found, silent=silent) if found else None,
        effect_scale=None if contract is None else effect_scale(contract),
        naming=None if contract is None else contract.naming,
    )  # fmt: skip
    say(f"Written: {out}. It needs no network and can be sent as it is.")
    return 0


# The audit log -------------------------------------------------------------------------------------------------------


audit_app = typer.Typer(help="Inspect a site's audit log.", no_args_is_help=True)
SiteStore = Annotated[Path, typer.Argument(help="The site's store.")]
MOST_SHOWN = 10


@command(audit_app, "show")
def _show_log(store: SiteStore) -> None:
    """Print every request and answer in a site's log, after checking its hash chain."""
    from fedpdmc.federation.site_agent.audit_replay import show

    for line in show(store):
        print(line)


@command(audit_app, "compare")
def _compare(
    store: SiteStore,
    seals: Annotated[Path, typer.Option(help="The coordinator's seals.jsonl.")],
    authority: Annotated[Path, typer.Option(help="The study's authority.pem.")],
) -> int:
    """Compare a site's log with the seals (signed log hashes) that the coordinator has stored."""
    from fedpdmc.federation.site_agent.audit_replay import compare

    faults = compare(store, seals, authority)
    for fault in faults:
        say(fault)
    if not faults:
        say("All seals that the coordinator has stored match this log and are signed by the site.")
    return CHECK_FAILED if faults else 0


@command(audit_app, "replay")
def _replay(
    study: Contract, name: SiteName, data: Data, store: Store, query: Query = None, ledger: Ledger = None
) -> int:
    """Recompute every answer in a site's log from its records, and compare."""
    from fedpdmc.federation.site_agent.audit_replay import replay
    from fedpdmc.study import read_study

    same, different, unchecked, software = replay(
        read_study(study), name, data, store=store, query=query, ledger=ledger
    )
    say("The log is intact: every entry contains the hash of all entries before it.")
    if software:
        say(f"It was written with {', '.join(software)}. Answers may differ in the last bits for this reason alone.")
    say(f"{same} answers are the same, {len(different)} differ.")
    for why, count in unchecked.items():
        say(f"{count} answers contain the hash of their request but were not recomputed: {why}.")
    for sequence in different[:MOST_SHOWN]:
        say(f"request {sequence}: the answer differs from the log")
    return CHECK_FAILED if different else 0
