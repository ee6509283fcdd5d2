"""Who is in a federation: sites and prior that fit together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedpdmc.bent_coordinates import Bend
from fedpdmc.errors import InputError
from fedpdmc.members.member import Member, NotBent
from fedpdmc.members.site import Site, no_size
from fedpdmc.models.grouped import SpreadPrior
from fedpdmc.models.mixture_prior import MixturePrior
from fedpdmc.models.user_function import UserModel
from fedpdmc.potentials import BentSpreadPrior, LinearPredictor, Potential, Quadratic, RandomEffects
from fedpdmc.potentials.padding import bucket, whole_vectors
from fedpdmc.sampling.prior_redistribution import Redistributed

# Number of records that cost little compared with a compilation, and the largest padding factor beyond that.
CHEAP, BURDEN = 256, 8
# Of sites with effects: records that padding may add to those that are this many times smaller than the largest, before they
# are compiled on their own.
PADDING, SMALLER = 16384, 4
# The site that walks with a non-Gaussian prior.
PRIOR_SITE = "prior"


class PriorSite(Site):
    """The coordinator's own member, which walks with the prior: it is asked as a site is, but owns no records."""

    def __init__(self, prior: Any):
        super().__init__(prior, name=PRIOR_SITE)

    def bent(self, bend: Bend | None) -> Site:
        """The prior of spreads in bent coordinates."""
        if bend is None:
            return self
        if not isinstance(self.potential, LinearPredictor):
            raise NotBent
        return PriorSite(BentSpreadPrior.of(self.potential, bend))


def check_sites(sites: Any) -> tuple[Member, ...]:
    """At least one site, and no two of one name; some may be elsewhere."""
    if isinstance(sites, Site):
        sites = [sites]
    try:
        members: tuple[Any, ...] = tuple(sites)
    except TypeError as error:
        raise InputError("sites", type(sites).__name__, "Give a list of fedpdmc.Site.") from error
    if not members:
        raise InputError("sites", "no sites", "Give at least one fedpdmc.Site.")
    for site in members:
        if not isinstance(site, Member):
            raise InputError("sites", f"a {type(site).__name__}", "Give fedpdmc.Site objects only.")
    names = [site.name for site in members]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InputError("sites", f"several sites named {twice[0]!r}", "Give every site its own name.")
    return members


def _is_function(prior: Any) -> bool:
    return callable(prior) and not isinstance(prior, (Potential, Redistributed, MixturePrior))


def check_prior(prior: Any) -> Quadratic | None:
    """None, or a prior from `fedpdmc.models`, also where it is redistributed; of one with scales, the normal stand-in."""
    prior = prior.prior if isinstance(prior, Redistributed) else prior
    prior = prior.stand_in if isinstance(prior, MixturePrior) else prior
    if prior is None or (isinstance(prior, Quadratic) and not prior.records):
        return prior
    raise InputError(
        "prior",
        type(prior).__name__,
        "Give None for a flat prior, one of fedpdmc.models such as normal_prior(dim, ...), or a function of the parameters.",
    )


def resolve_members(
    sites: Any, prior: Any, init: Any = None, names: Any = None
) -> tuple[tuple[Member, ...], Quadratic | None, int]:
    """Sites that know their number of parameters, a Gaussian prior if there is one, and that number.

    A prior that is a function becomes a site of its own. The number comes from the prior, from a site that knows it, from
    ``init`` or from ``names``.
    """
    members = check_sites(sites)
    if isinstance(prior, (SpreadPrior, UserModel)) or _is_function(prior):
        if any(site.name == PRIOR_SITE for site in members):
            raise InputError(
                "sites", f"a site named {PRIOR_SITE!r}", "Rename it: a prior that is a function is that site."
            )
        walked, prior = (prior.spreads, prior.normal) if isinstance(prior, SpreadPrior) else (prior, None)
        members = (*members, PriorSite(walked))
    prior = check_prior(prior)
    unknown = [site for site in members if isinstance(site, Site) and site.known_dim is None]
    if unknown:
        dim = _told_dim([site for site in members if site not in unknown], prior, init, names)
        if dim is None:
            raise no_size(unknown[0].name)
        members = tuple(site.sized(dim) if isinstance(site, Site) and site in unknown else site for site in members)
    dim = check_dimensions(members, prior)
    return _of_one_size(members), prior, dim


def _of_one_size(members: tuple[Member, ...]) -> tuple[Member, ...]:
    """Sites with the same function and unequal numbers of records padded alike, so that it is compiled once for all."""
    families: dict[Any, list[Site]] = {}
    for site in members:
        if isinstance(site, Site) and site.model is not None:
            families.setdefault((site.model.family, site.dim), []).append(site)
    padded = {}
    for family in families.values():
        most = max(site.records for site in family)
        if any(site.records != most for site in family):
            padded.update({site.name: site.padded(_common(site.records, most)) for site in family})
    padded.update(_alike_effects([site for site in members if isinstance(site, Site)]))
    return tuple(padded.get(site.name, site) for site in members)


def _alike_effects(sites: list[Site]) -> dict[str, Site]:
    """Sites with grouped effects padded to one size, or to few where that would add many records."""
    models = {site.name: site.potential for site in sites if isinstance(site.potential, RandomEffects)}
    found, left = {}, sorted(models, key=lambda name: models[name].records)
    while left:
        size = whole_vectors(models[left[-1]].records)
        small = [name for name in left if SMALLER * models[name].records <= size]
        added = sum(size - whole_vectors(models[name].records) for name in small)
        kept = left[len(small) :] if added > PADDING else left
        groups = max(models[name].groups for name in kept)
        found |= {name: models[name].padded(size, groups) for name in kept}
        left = left[: len(left) - len(kept)]
    return {site.name: site.holding(found[site.name]) for site in sites if site.name in found}


def _common(records: int, most: int) -> int:
    """A padded number of records: that of the largest site, or where this would be a burden that of the site itself."""
    size = bucket(most)
    return size if size <= CHEAP or records * BURDEN >= size else bucket(records)


def _told_dim(known: list[Member], prior: Quadratic | None, init: Any, names: Any) -> int | None:
    """The number of parameters, from the prior, a site, ``init`` or ``names``."""
    if prior is not None or any(site.coordinates is None for site in known):
        return problem_dim(known, prior)
    if init is not None and np.ndim(init) in (1, 2):
        return int(np.shape(init)[-1])
    if names is not None and not isinstance(names, str):
        return len(list(names))
    return problem_dim(known, None) if known else None


def check_dimensions(sites: Sequence[Member], prior: Quadratic | None) -> int:
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


def problem_dim(sites: Sequence[Member], prior: Quadratic | None) -> int:
    """Number of parameters of the federation."""
    if prior is not None:
        return prior.dim
    whole = [site.dim for site in sites if site.coordinates is None]
    parts = [
        int(site.coordinates.max()) + 1 for site in sites if site.coordinates is not None and site.coordinates.size
    ]
    return max(whole + parts)
