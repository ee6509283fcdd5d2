"""What someone who listens to the messages of one site learns of it, with and without a prior that is redistributed.

The listener sees the plans that a site gets and its arrivals. Flips of coordinate i come at rate ``(v_i g_i)_+`` with ``g``
the gradient of what the site walks with, so the rate seen at ``v_i = 1`` less that at ``v_i = −1`` is ``g_i`` itself.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from numpy import ndarray

import fedpdmc as fp

# Where a path is looked at, to count the time that it spends in each bin.
LOOKS = 24


class Overheard(NamedTuple):
    """Plans and arrivals of one site: straight paths, cut at the arrival or at the horizon."""

    start: Float[ndarray, "n d"]
    velocity: Float[ndarray, "n d"]
    length: Float[ndarray, " n"]
    flipped: ndarray

    @classmethod
    def joined(cls, parts: list[Overheard]) -> Overheard:
        """One after the other."""
        return cls(*(np.concatenate(column) for column in zip(*parts, strict=True)))

    def first(self, count: int) -> Overheard:
        """The first so many of them."""
        return Overheard(*(column[:count] for column in self))


def listen(site: fp.Site, starts: Float[ndarray, "n d"], horizon: float, share: float, seed: int) -> Overheard:
    """The site's first arrival from each starting point, while it holds this share of a standard normal prior.

    The site is made a federation of its own for it: what its first arrival is does not depend on others.
    """
    chains, dim = starts.shape
    prior = fp.models.normal_prior(dim, scale=float(1 / np.sqrt(share))) if share > 0 else None
    post = fp.sample(
        [site], prior, prior_at="sites", dynamics=fp.ZigZag(), chains=chains, duration=horizon, burn_in=0.0, init=starts,
        seed=seed, progress=False,
    )  # fmt: skip
    path = post.skeleton
    here = path.offsets[:-1]
    rang = np.diff(path.offsets) > 1
    after = np.where(rang, here + 1, here)
    flipped = np.where(rang, np.argmax(path.v[after] != path.v[here], 1), -1)
    return Overheard(path.a[here], path.v[here], np.where(rang, path.t[after] - path.begin, horizon), flipped)


class Profile(NamedTuple):
    """An estimate of ``E(∂_i U | x_i)`` in bins of ``x_i``, and what each bin weighs."""

    centers: Float[ndarray, " b"]
    slope: Float[ndarray, " b"]
    weight: Float[ndarray, " b"]


def estimate(heard: Overheard, i: int, edges: Float[ndarray, " b1"]) -> Profile:
    """From flips of coordinate i and the time that paths spend in each bin, by the sign of ``v_i``."""
    moments = (np.arange(LOOKS) + 0.5) / LOOKS * heard.length[:, None]
    x = heard.start[:, i, None] + heard.velocity[:, i, None] * moments
    rang = heard.flipped == i
    ends = heard.start[rang, i] + heard.velocity[rang, i] * heard.length[rang]
    rates, time = [], 0.0
    for sign in (1.0, -1.0):
        own = heard.velocity[:, i] == sign
        spent = np.histogram(x[own], edges, weights=np.repeat(heard.length[own] / LOOKS, LOOKS).reshape(-1, LOOKS))[0]
        events = np.histogram(ends[heard.velocity[rang, i] == sign], edges)[0]
        rates.append(events / np.maximum(spent, 1e-12))
        time = time + spent
    return Profile((edges[1:] + edges[:-1]) / 2, rates[0] - rates[1], time / np.sum(time))


def average(
    slopes: Float[ndarray, " n"], x: Float[ndarray, " n"], edges: Float[ndarray, " b1"]
) -> Float[ndarray, " b"]:
    """The mean of a gradient's entry over draws, in the same bins."""
    total, count = np.histogram(x, edges, weights=slopes)[0], np.histogram(x, edges)[0]
    return total / np.maximum(count, 1)


def error(found: Profile, truth: Float[ndarray, " b"]) -> float:
    """Root mean squared error of a profile over that of knowing nothing."""
    return float(np.sqrt(found.weight @ (found.slope - truth) ** 2) / np.sqrt(found.weight @ truth**2))
