"""``fedpdmc effects``: the effects of a site's own groups, written at the site."""

from pathlib import Path
from typing import Annotated

import typer

from fedpdmc.cli.runner import Contract, Data, Query, SiteName, Store
from fedpdmc.console.wrapping import say


def effects(
    study: Contract,
    name: SiteName,
    data: Data,
    store: Store,
    out: Annotated[Path, typer.Option(help="Where to write: OUT.csv, a summary, and OUT.npz, the draws.")],
    query: Query = None,
) -> int:
    """Work out the effects of this site's groups from its store. They stay here: nothing is sent."""
    from fedpdmc.federation.site_agent.own_effects import own_effects, write_effects
    from fedpdmc.study import read_study

    contract = read_study(study)
    found = own_effects(contract, name, data, store=store, query=query)
    table, draws = write_effects(found, contract.names, out)
    chains, times, effects = found.z.shape
    say(f"Written: {table}, a summary of {effects} effects, and {draws}, {chains * times:,} draws of them together with "
        f"draws of {', '.join(contract.names)}. Both are readable by you only. Nothing was sent.")  # fmt: skip
    return 0
