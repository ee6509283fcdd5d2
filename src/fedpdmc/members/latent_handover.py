"""Hands the sites of this process their own draws of private latents after a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from fedpdmc._jax.precision import double_precision
from fedpdmc.errors import InputError
from fedpdmc.members.latent_posterior import LatentPosterior
from fedpdmc.members.site import Site
from fedpdmc.potentials import RandomEffects
from fedpdmc.whitening import Reference


class Run(Protocol):
    """What is needed from a run: an engine of `fedpdmc.sampling`."""

    latents: tuple[tuple[float, np.ndarray, dict[str, np.ndarray]], ...]
    continued: bool

    @property
    def settled(self) -> Mapping[str, np.ndarray]:
        """The current latents, in private coordinates."""
        ...


@double_precision
def hand_over(sites: Sequence[Site], reference: Reference, run: Run) -> None:
    """Give each site its own latents at the ends of blocks, and their last state.

    If the run was ``continued``, they are appended to the site's earlier draws.
    """
    drawn = run.latents
    if not drawn:
        return
    last = run.settled
    times = np.array([time for time, _, _ in drawn])
    theta = np.stack([reference.to_x(np.asarray(a)) for _, a, _ in drawn], 1)
    for site in sites:
        if site.latents:
            names = latent_names(site)
            z = np.stack([found[site.name][:, : len(names)] for _, _, found in drawn], 1)
            found = LatentPosterior(times, theta, z, names, last[site.name])
            # A run that continues in memory includes its earlier draws.
            earlier = [own for own in site.drawn if run.continued and own.times[-1] < times[0]]
            site.drawn[:] = [earlier[0].followed_by(found) if earlier else found]


def latents_at(sites: Sequence[Site], time: float, chains: int) -> dict[str, np.ndarray]:
    """The sites' latents at this time of a run.

    Raises
    ------
    InputError
        A site has no latents of that run: `Site.restore_latents` was not called.
    """
    found = {}
    for site in sites:
        if not site.latents:
            continue
        own = site.drawn[0] if site.drawn else None
        if own is None or own.last is None or own.times[-1] != time or len(own.last) != chains:
            raise InputError(
                f"sites ({site.name!r})",
                "no latents at the end of the saved run",
                "Latents stay with their site: save them there with site.latent_posterior().save(path), and give them back "
                "with site.restore_latents(path).",
            )
        found[site.name] = own.last
    return found


def latent_names(site: Site) -> tuple[str, ...]:
    """Names of the latents: the group's name, with the number of the effect if there are several."""
    model = site.potential
    if not isinstance(model, RandomEffects):
        return () if site.model is None else site.model.latent_names
    labels, effects = (label or site.name for label in model.labels), model.effects.shape[1]
    return tuple(label if effects == 1 else f"{label}[{k}]" for label in labels for k in range(effects))
