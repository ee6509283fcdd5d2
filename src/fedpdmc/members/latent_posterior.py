"""Giving sites in this process what they own of a run: draws of their private latents."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedpdmc._jax.precision import double_precision
from fedpdmc.members.latent_draws import LatentPosterior
from fedpdmc.members.site import Site
from fedpdmc.potentials import RandomEffects
from fedpdmc.whitening import Reference


@double_precision
def hand_over(
    sites: Sequence[Site], reference: Reference, drawn: tuple[tuple[float, np.ndarray, dict[str, np.ndarray]], ...]
) -> None:
    """Give each site its own latents at the ends of blocks."""
    if not drawn:
        return
    times = np.array([time for time, _, _ in drawn])
    theta = np.stack([reference.to_x(np.asarray(a)) for _, a, _ in drawn], 1)
    for site in sites:
        if site.latents:
            names = latent_names(site)
            z = np.stack([found[site.name][:, : len(names)] for _, _, found in drawn], 1)
            site.drawn[:] = [LatentPosterior(times, theta, z, names)]


def latent_names(site: Site) -> tuple[str, ...]:
    """Names of the latents: the groups', with the number of the effect where there are several."""
    model = site.potential
    if not isinstance(model, RandomEffects):
        return () if site.model is None else site.model.latent_names
    labels, effects = (label or site.name for label in model.labels), model.effects.shape[1]
    return tuple(label if effects == 1 else f"{label}[{k}]" for label in labels for k in range(effects))
