"""Whether a continued run has the sites and the prior that it began with.

The state of a run holds a hash of each site's model and records. Whoever reads an archive can test a guess of all records of
a site against it; the paths and the seed, which are there too, allow that test without the hash. Of a site with a privacy
budget no hash leaves the ledger: the ledger is asked whether it knows the run with these records.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fedpdmc.errors import InputError
from fedpdmc.members.clipping import fingerprint as records_fingerprint
from fedpdmc.members.member import DescribedSites
from fedpdmc.members.site import Site
from fedpdmc.models.captured_values import check_unchanged, program_digest
from fedpdmc.models.mixture_prior import MixturePrior
from fedpdmc.potentials import Quadratic
from fedpdmc.privacy.ledger_entries import Request
from fedpdmc.results.run_state import RunState
from fedpdmc.sampling.prior_redistribution import Redistributed
from fedpdmc.sampling.sites_and_prior import PRIOR_SITE, PriorSite, resolve_members

AS_BEFORE = "Give the sites that sample() was given"


def identify(sites: Sequence[Site], prior: Quadratic | MixturePrior | None, redistribution: float) -> dict[str, Any]:
    """What is stored about the sites and the prior of a run, to recognise them when it continues."""
    members = [
        {
            "name": site.name,
            "coordinates": None if site.coordinates is None else site.coordinates.tolist(),
            "private": site.budget is not None,
            "fingerprint": None if site.budget is not None else site_fingerprint(site),
        }
        for site in sites
    ]
    return {"sites": members, "prior": _prior(prior, redistribution)}


def site_fingerprint(site: Site) -> str:
    """A hash of a site's model and its records; a user's function counts as the program that it is traced to."""
    digest = hashlib.sha256()
    if site.model is None:
        _feed(digest, site.raw)
    else:
        digest.update(program_digest(site.model, site.dim).encode())
        _feed(digest, jax.tree.leaves(site.model.data))
    return digest.hexdigest()


def _feed(digest, value: Any) -> None:
    """Add numbers, arrays and containers of them to a hash, each with its type."""
    if dataclasses.is_dataclass(value):
        digest.update(type(value).__name__.encode())
        for field in dataclasses.fields(value):
            digest.update(field.name.encode())
            _feed(digest, getattr(value, field.name))
    elif isinstance(value, (list, tuple)):
        digest.update(f"{len(value)} items".encode())
        for item in value:
            _feed(digest, item)
    elif isinstance(value, (np.ndarray, jax.Array)):
        array = np.asarray(value)
        digest.update(repr((array.shape, array.dtype.str)).encode() + np.ascontiguousarray(array).tobytes())
    elif value is None or isinstance(value, (bool, int, float, str, np.generic)):
        digest.update(repr(value).encode())


def _prior(prior: Quadratic | MixturePrior | None, redistribution: float) -> str | None:
    if prior is None:
        return None
    digest = hashlib.sha256(repr(float(redistribution)).encode())
    if isinstance(prior, MixturePrior):
        _feed(digest, prior)
    else:
        _feed(digest, [np.asarray(prior.precision), np.asarray(prior.linear)])
    return digest.hexdigest()


def members_of(
    state: RunState, names: list[str], sites: Any, prior: Any
) -> tuple[tuple[Site, ...], Quadratic | None, float]:
    """The sites in the order of the run, the prior and its rate of redistribution, once they are found to be the run's own.

    Parameters
    ----------
    state : RunState
    names : list of str
        The parameters' names.
    sites, prior
        As `fedpdmc.sample` takes them.

    Raises
    ------
    InputError
        Names the argument, and the site, that is not as it was.
    """
    rate = prior.rate if isinstance(prior, Redistributed) else 0.0
    told = sites.prior if prior is None and isinstance(sites, DescribedSites) else prior
    members, prior, dim = resolve_members(sites, told, None, names)
    if dim != len(names):
        raise InputError(
            "sites", f"models of {dim} parameters", f"The posterior has {len(names)}: {', '.join(names)}. {AS_BEFORE}."
        )
    own = [site for site in members if isinstance(site, Site)]
    if prior is not None and state.facts["prior_at"] == "extra":
        own.append(PriorSite(prior))
    return _in_order(state, own, told if isinstance(told, MixturePrior) else prior, rate), prior, rate


def _in_order(
    state: RunState, sites: Sequence[Site], prior: Quadratic | MixturePrior | None, redistribution: float
) -> tuple[Site, ...]:
    known = {one["name"]: one for one in state.facts["sites"]}
    given = {site.name: site for site in sites}
    if (PRIOR_SITE in known) != (PRIOR_SITE in given) or _prior(prior, redistribution) != state.facts["prior"]:
        found = (
            "None, a flat prior" if prior is None and PRIOR_SITE not in given else "another prior than that of the run"
        )
        raise InputError("prior", found, "Give the prior that sample() was given.")
    if set(known) != set(given):
        raise InputError(
            "sites", f"{len(given)} named {_list(given)}", f"The run has {len(known)}: {_list(known)}. {AS_BEFORE}."
        )
    for name, one in known.items():
        _check_site(given[name], one, state.facts["versions"])
    return tuple(given[name] for name in known)


def _list(names: Mapping[str, Any]) -> str:
    return ", ".join(sorted(name for name in names if name != PRIOR_SITE))


def _check_site(site: Site, known: dict[str, Any], versions: dict[str, str]) -> None:
    argument = f"sites ({site.name!r})"
    coordinates = None if site.coordinates is None else site.coordinates.tolist()
    if coordinates != known["coordinates"]:
        raise InputError(argument, f"coordinates={coordinates}", f"The run has {known['coordinates']}. {AS_BEFORE}.")
    if (site.budget is not None) != known["private"]:
        found = "no privacy budget" if known["private"] else "a privacy budget"
        raise InputError(argument, found, f"It is not as the run began. {AS_BEFORE}.")
    if known["private"]:
        return
    if site.model is not None:
        check_unchanged(site.model, site.dim, site.name)
    if site_fingerprint(site) != known["fingerprint"]:
        remedy = f"{AS_BEFORE}, or sample again."
        if site.model is not None:
            remedy += f" A function is known by the program that JAX {versions['jax']} traced it to."
        raise InputError(argument, "another model or other records than those of the run", remedy)


def check_ledger(site: Site, run: str) -> None:
    """Check that the ledger of a private site knows a run with these records, before anything is charged."""
    budget = site.budget
    assert budget is not None
    records = bytes.fromhex(records_fingerprint(site.raw))
    ledger, _ = budget.open()
    if not ledger.answered(Request(budget.account_name, budget.study, run, "open", 0, records)):
        raise InputError(
            f"sites ({site.name!r})",
            f"a budget whose ledger does not have run {run!r} on these records",
            "Give the records, the ledger, the data set and the study with which the posterior was sampled.",
        )
