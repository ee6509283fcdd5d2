"""Refuses settings that private latents do not support, before anything runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedpdmc.dynamics import Dynamics
from fedpdmc.errors import InputError
from fedpdmc.members.member import Member
from fedpdmc.members.site import Site
from fedpdmc.potentials import Quadratic, RandomEffects
from fedpdmc.potentials.latent import NEEDS_ROTATION
from fedpdmc.sampling.sites_and_prior import PRIOR_SITE


def check_latents(members: Sequence[Member], prior: Quadratic | None, dynamics: Dynamics) -> None:
    """Check that dynamics, prior and groups are possible with private latents."""
    if not any(site.latents for site in members):
        return
    if dynamics.flips or not dynamics.flow.rotating:
        raise InputError("dynamics", repr(dynamics), NEEDS_ROTATION)
    for site in members:
        if site.budget is not None or site.log is not None:
            raise InputError(
                f"sites ({site.name!r})",
                "a budget or a log together with a site with private latents",
                "Such sites are asked one message at a time, which private latents are not ready for: leave it out.",
            )
    grouped = {site.name: site.potential for site in members if isinstance(site, Site)}
    models = {name: model for name, model in grouped.items() if isinstance(model, RandomEffects)}
    _check_groups(models)
    if models and not any(site.name == PRIOR_SITE for site in members):
        _check_spreads(next(iter(models.values())), prior)


def _check_groups(models: dict[str, RandomEffects]) -> None:
    """A group at two sites has one effect, which neither of them can keep to itself."""
    owner: dict[str, str] = {}
    for name, model in models.items():
        for label in model.labels:
            if label and label in owner:
                raise InputError(
                    f"sites ({name!r}) groups",
                    f"group {label!r}, which site {owner[label]!r} has too",
                    "A group at two sites has no private effect: put its records together, or, if these are two groups, "
                    "give them names of their own.",
                )
            owner[label] = name


def _check_spreads(model: RandomEffects, prior: Quadratic | None) -> None:
    """As a spread goes to zero the likelihood tends to a positive number: a flat prior of its logarithm is improper."""
    start = model.dim - model.effects.shape[1] - model.correlated
    held = np.zeros(model.dim) if prior is None else np.diag(np.asarray(prior.precision))
    if not np.all(held[start:] > 0):
        raise InputError(
            "prior",
            "a flat prior of the log spread of effects, under which the posterior is improper",
            "Give prior=fedpdmc.models.effects_prior(model), or a normal prior of all parameters.",
        )
