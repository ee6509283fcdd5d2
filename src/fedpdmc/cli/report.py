"""``fedpdmc report``: one HTML file of a run."""

from pathlib import Path
from typing import Annotated

import typer

from fedpdmc.console.wrapping import say
from fedpdmc.errors import InputError


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
    from fedpdmc.results.report.report_page import write_report
    from fedpdmc.study import read_study
    from fedpdmc.study.description import modelled, ratios, released

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
    seals = {line["site"]: line["seal"] for line in read_seals(run / SEALS)}
    write_report(
        post, out, title=title, question=question, about=[] if contract is None else modelled(contract),
        released=[] if contract is None else released(contract), assessment=Assessment(found) if found else None,
        logs=seals, ratios=None if contract is None else ratios(contract),
    )  # fmt: skip
    say(f"Written: {out}. It needs no network and can be sent as it is.")
    return 0
