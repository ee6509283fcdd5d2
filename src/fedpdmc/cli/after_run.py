"""What can be done after a run: a site's fit and effects, the report, and a site's audit log."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from fedpdmc.cli.runner import CHECK_FAILED, Contract, Data, Ledger, Query, SiteName, Store, command
from fedpdmc.console.wrapping import say
from fedpdmc.errors import InputError

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
def _show(store: SiteStore) -> None:
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
