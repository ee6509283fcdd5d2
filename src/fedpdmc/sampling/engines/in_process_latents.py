"""Private latents of sites in this process, which are compiled in groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from fedpdmc._jax.by_numpy import once
from fedpdmc.clocks import LatentClock, Path

if TYPE_CHECKING:
    from fedpdmc.sampling.engines.compiled_loop import Group


def latents(groups: Sequence[Group], names: Sequence[str], a, walks) -> dict[str, np.ndarray]:
    """The latents of each site that has them, where the chains are: of shape (chains, k)."""
    return _by_site(groups, names, walks, lambda group, walk: _to_z(group, a, walk))


def settled(groups: Sequence[Group], names: Sequence[str], walks) -> dict[str, np.ndarray]:
    """The same in the sites' private coordinates."""
    return _by_site(groups, names, walks, lambda group, walk: walk.settled)


def placed(groups: Sequence[Group], names: Sequence[str], walks, settled: Mapping[str, np.ndarray]) -> tuple:
    """Walks whose latents are at these places."""
    found = list(walks)
    for k, group in enumerate(groups):
        if isinstance(group.clock, LatentClock):
            own = jnp.stack([jnp.asarray(settled[names[int(place)]]) for place in np.asarray(group.place)])
            found[k] = eqx.tree_at(lambda walk: walk.settled, found[k], own)
    return tuple(found)


def gone_back(groups: Sequence[Group], walks, path: Path, elapsed, ready) -> tuple:
    """Latents go back to where their site was when the plan was cut."""

    def settled(group: Group, walk):
        if walk.times.shape[-1]:
            return jax.vmap(lambda clock, walk: clock.cut(walk, elapsed, ready))(group.clock, walk)
        # What has not changed is not written back.
        return group.each(lambda clock, keys, walk: clock.settle(walk, path, elapsed, ready, keys).settled, walk)

    return tuple(
        eqx.tree_at(lambda w: w.settled, walk, settled(group, walk)) if isinstance(group.clock, LatentClock) else walk
        for group, walk in zip(groups, walks, strict=True)
    )


def floor_of(groups: Sequence[Group], walks, path: Path, new) -> Array:
    """The time before which no site has an event that is not known, on each chain; zero where a plan is new."""
    times = [
        jax.vmap(lambda c, w: c.reached(w, path))(group.clock, walk) for group, walk in zip(groups, walks, strict=True)
    ]
    return jnp.where(new, 0.0, jnp.min(jnp.concatenate(times), 0))


def _by_site(groups, names, walks, of_group: Callable[[Any, Any], Any]) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for group, walk in zip(groups, walks, strict=True):
        if isinstance(group.clock, LatentClock):
            for place, z in zip(np.asarray(group.place), np.asarray(of_group(group, walk)), strict=True):
                found[names[place]] = z
    return found


@once
def _to_z(group: Group, a, walks):
    return group.each(lambda clock, _, walk: clock.potential.to_z(a, walk.settled), walks)
