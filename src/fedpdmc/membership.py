"""Who is in a federation: sites and prior that fit together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedpdmc.errors import InputError
from fedpdmc.federation.remote import RemoteSite
from fedpdmc.potentials import Quadratic
from fedpdmc.redistribution import Redistributed
from fedpdmc.site import Site


def check_sites(sites: Any) -> tuple[Site, ...]:
    """At least one site, and no two of one name; a `RemoteSite` stands for one that is elsewhere."""
    if isinstance(sites, Site):
        sites = [sites]
    try:
        members: tuple[Any, ...] = tuple(sites)
    except TypeError as error:
        raise InputError("sites", type(sites).__name__, "Give a list of fedpdmc.Site.") from error
    if not members:
        raise InputError("sites", "no sites", "Give at least one fedpdmc.Site.")
    for site in members:
        if not isinstance(site, (Site, RemoteSite)):
            raise InputError("sites", f"a {type(site).__name__}", "Give fedpdmc.Site objects only.")
    names = [site.name for site in members]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InputError("sites", f"several sites named {twice[0]!r}", "Give every site a name of its own.")
    return members


def check_prior(prior: Any) -> Quadratic | None:
    """None, or a prior from `fedpdmc.models`, also where it is redistributed."""
    prior = prior.prior if isinstance(prior, Redistributed) else prior
    if prior is None or (isinstance(prior, Quadratic) and not prior.records):
        return prior
    raise InputError(
        "prior", type(prior).__name__, "Give None for a flat prior, or fedpdmc.models.normal_prior(dim, ...)."
    )


def check_dimensions(sites: Sequence[Site], prior: Quadratic | None) -> int:
    """The number of parameters, on which prior and sites must agree."""
    dim = problem_dim(sites, prior)
    covered = np.zeros(dim, bool)
    for site in sites:
        if site.coordinates is None and site.dim != dim:
            raise InputError(
                f"sites ({site.name!r})",
                f"a model of {site.dim} parameters where the federation has {dim}",
                "Give all sites models of the same parameters, or say with coordinates= which ones a site depends on.",
            )
        if site.coordinates is not None and site.coordinates.max(initial=-1) >= dim:
            raise InputError(
                f"sites ({site.name!r}) coordinates", str(int(site.coordinates.max())), f"Give indices below {dim}."
            )
        covered[slice(None) if site.coordinates is None else site.coordinates] = True
    if prior is None and not covered.all():
        raise InputError("prior", f"None, with no site that sees coordinate {int(np.argmin(covered))}", "Give a prior.")
    return dim


def problem_dim(sites: Sequence[Site], prior: Quadratic | None) -> int:
    """Number of parameters of the federation."""
    if prior is not None:
        return prior.dim
    whole = [site.dim for site in sites if site.coordinates is None]
    parts = [
        int(site.coordinates.max()) + 1 for site in sites if site.coordinates is not None and site.coordinates.size
    ]
    return max(whole + parts)
