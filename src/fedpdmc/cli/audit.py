"""``fedpdmc audit``: a site's audit log printed, replayed, and compared with the coordinator's seals."""

from pathlib import Path
from typing import Annotated

import typer

from fedpdmc.cli.runner import CHECK_FAILED, Contract, Data, Ledger, Query, SiteName, Store, command
from fedpdmc.console.wrapping import say

app = typer.Typer(help="Inspect a site's audit log.", no_args_is_help=True)
SiteStore = Annotated[Path, typer.Argument(help="The site's store.")]
MOST_SHOWN = 10


@command(app, "show")
def _show(store: SiteStore) -> None:
    """Print every request and answer in a site's log, after checking its hash chain."""
    from fedpdmc.federation.site_agent.audit_replay import show

    for line in show(store):
        print(line)


@command(app, "compare")
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


@command(app, "replay")
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
