"""Exact samples from a Bayesian posterior whose data stay at the sites that own them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fedpdmc.version import __version__ as __version__

if TYPE_CHECKING:
    from fedpdmc import assessment as assessment
    from fedpdmc import models as models
    from fedpdmc.dynamics import Boomerang as Boomerang
    from fedpdmc.dynamics import BouncyParticle as BouncyParticle
    from fedpdmc.dynamics import FactorisedBoomerang as FactorisedBoomerang
    from fedpdmc.dynamics import ZigZag as ZigZag
    from fedpdmc.federation.session import connect as connect
    from fedpdmc.members.site import Site as Site
    from fedpdmc.models.model_file.model import Model as Model
    from fedpdmc.privacy.budget import Budget as Budget
    from fedpdmc.privacy.ledger import create_ledger as create_ledger
    from fedpdmc.privacy.sensitivity import Bounds as Bounds
    from fedpdmc.results.posterior import Posterior as Posterior
    from fedpdmc.sampling.api import sample as sample
    from fedpdmc.sampling.arguments import Redistributed as Redistributed
    from fedpdmc.sampling.driver import load as load
    from fedpdmc.sampling.laplace_reference import laplace as laplace
    from fedpdmc.study.sites_from_table import prior_predictive as prior_predictive
    from fedpdmc.study.sites_from_table import sites as sites
    from fedpdmc.whitening import Reference as Reference

# The public names and where they live. They are loaded on first use, so that the command line starts without JAX.
_HOMES = {
    "Boomerang": "fedpdmc.dynamics",
    "BouncyParticle": "fedpdmc.dynamics",
    "Bounds": "fedpdmc.privacy.sensitivity",
    "Budget": "fedpdmc.privacy.budget",
    "FactorisedBoomerang": "fedpdmc.dynamics",
    "Model": "fedpdmc.models.model_file.model",
    "Posterior": "fedpdmc.results.posterior",
    "Redistributed": "fedpdmc.sampling.arguments",
    "Reference": "fedpdmc.whitening",
    "Site": "fedpdmc.members.site",
    "ZigZag": "fedpdmc.dynamics",
    "assessment": "fedpdmc.assessment",
    "connect": "fedpdmc.federation.session",
    "create_ledger": "fedpdmc.privacy.ledger",
    "laplace": "fedpdmc.sampling.laplace_reference",
    "load": "fedpdmc.sampling.driver",
    "models": "fedpdmc.models",
    "prior_predictive": "fedpdmc.study.sites_from_table",
    "sample": "fedpdmc.sampling.api",
    "sites": "fedpdmc.study.sites_from_table",
}

__all__ = [*_HOMES, "__version__"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fedpdmc' has no attribute {name!r}")
    home = importlib.import_module(_HOMES[name])
    value = home if _HOMES[name] == f"fedpdmc.{name}" else getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
