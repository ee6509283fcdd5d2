"""``fedpdmc assess``: a site's report on the fit to its records, as a file that can be read before it is sent."""

from pathlib import Path
from typing import Annotated

import typer

from fedpdmc.cli.runner import Contract, Data, Query, SiteName
from fedpdmc.console.wrapping import say
from fedpdmc.errors import InputError


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
    found = assess_site(
        contract, name, site_records(contract, name, data, query), draws,
        what=contract.assessment, values=not only_p_values, least_records=least_records,
        controlled=True,
    )  # fmt: skip
    found.write(out)
    say(f"Written: {out}, with {', '.join(contract.assessment)} of {found.records:,} records. Nothing was sent.")
    say("Read it, then send it to the coordinator: fedpdmc report takes it with --assessment.")
    return 0
