"""Provenance of a posterior: the settings and versions of its run."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import numpy as np

from fedpdmc.sampling.defaults import Method
from fedpdmc.sampling.engines.base import Engine
from fedpdmc.sampling.sites_and_prior import PRIOR_SITE, PriorSite

MOST_NAMED = 3  # parameters in the description of a mode


def versions() -> dict[str, str]:
    """Versions of what decides the bits of a run."""
    return {name: metadata.version(name) for name in ("fedpdmc", "jax", "jaxlib", "numpy", "equinox")}


def describe(method: Method, engine: Engine) -> dict[str, Any]:
    """The choices of a run and how far it has come, as `Posterior.settings` has them."""
    return {
        "dynamics": repr(method.dynamics),
        "reference": method.reference_name,
        "reference_why": method.reference.why,
        "narrow": _narrow(method),
        "wide_starts": method.wide_starts,
        "modes": [mode | {"place": _place(method, mode)} for mode in method.reference.modes],
        "control": method.control_name,
        "chosen": method.chosen,
        "prior_at": _prior_at(method),
        "prior_site": _prior_site(method),
        "redistribution": method.redistribution,
        "chains": method.chains,
        "segments": method.segments,
        "ended_by_arrival": float(engine.site_events.sum() / max((engine.plans - method.first_plan).sum(), 1)),
        "duration": max(engine.time, 0.0),
        "seed": method.seed,
        "bounds": method.bounds,
        "constraints": 0 if method.constraints is None else len(method.constraints[1]),
        "sites": [site.name for site in method.sites],
        "clocks": _clocks(method, engine),
        "versions": versions(),
    }


def _narrow(method: Method) -> dict[str, Any] | None:
    """The parameter whose tail is wider than the reference, and by how much."""
    if method.reference.narrow is None:
        return None
    which, ratio = method.reference.narrow
    return {"name": method.names[which], "ratio": ratio}


def _place(method: Method, mode: dict[str, Any]) -> str:
    """The parameters at a mode that differ most from those at the centre of the reference."""
    away = np.abs(np.linalg.solve(np.asarray(mode["scale"]), np.asarray(mode["at"]) - np.asarray(mode["center"])))
    first = np.argsort(-away)[:MOST_NAMED]
    return ", ".join(f"{method.names[i]} = {mode['at'][i]:.3g}" for i in first if away[i] > 0.5 * away.max())


def _clocks(method: Method, engine: Engine) -> list[dict[str, Any]]:
    """Which clock each site walks with and why; for remote sites this is not known here."""
    choices = engine.federation.choices
    return [{"site": site.name, **choices.get(site.name, {"clock": "at the site"})} for site in method.sites]


def _prior_at(method: Method) -> str:
    if method.prior is not None:
        return method.prior_at
    return "extra" if any(site.name == PRIOR_SITE for site in method.sites) else "flat"


def _prior_site(method: Method) -> str | None:
    """The member that walks with the prior for the coordinator; a site that happens to have its name is a site."""
    return next((site.name for site in method.sites if isinstance(site, PriorSite)), None)
