"""What someone who listens to the messages of one site learns of it, with and without a prior that is redistributed.

The eavesdropper sees the plans that the site is sent and its arrivals, in a federation of several sites. The start of the
next plan shows how much of the last one was kept. The process is in stationarity there, ``v`` independent of ``x``. This
site flips coordinate i at rate ``(v_i g_i)_+`` with ``g`` the gradient of what it walks with, so the rate seen at
``v_i = 1`` less that at ``v_i = −1`` is ``g_i`` itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

import fedpdmc as fp
from paper.problems import Regression

# Points of a path at which its bin is found, to measure the time in each bin.
MOMENTS = 4


class Overheard(NamedTuple):
    """Plans of one site as far as they were kept, chain after chain.

    Every chain runs to the same process time: a fixed number of first rounds would be a biased sample.

    Attributes
    ----------
    start, velocity : (n, d)
    length : (n,)
        How long the plan was kept.
    flipped : (n,)
        The coordinate that the site's arrival flipped there, −1 if the plan ended otherwise.
    share : (n,)
        The site's part of the prior, which the plan says; zero without redistribution.
    """

    start: Float[ndarray, "n d"]
    velocity: Float[ndarray, "n d"]
    length: Float[ndarray, " n"]
    flipped: Int[ndarray, " n"]
    share: Float[ndarray, " n"]

    def first(self, count: int) -> Overheard:
        """The first ones."""
        return Overheard(*(column[:count] for column in self))

    def positions(self, i: int) -> Float[ndarray, "n moments"]:
        """Coordinate i at moments equally spaced along each path."""
        moments = (np.arange(MOMENTS) + 0.5) / MOMENTS * self.length[:, None]
        return self.start[:, i, None] + self.velocity[:, i, None] * moments


def listen(
    problem: Regression, sites: int, prior: Any, starts: Float[ndarray, "c d"], duration: float, seed: int
) -> Overheard:
    """The first site's messages while all of them sample with the Zig-Zag from these points on."""
    heard = []
    members = problem.sites(sites)
    members[0] = fp.Site(members[0].potential, name=members[0].name, log=lambda *messages: heard.append(messages))
    fp.sample(
        members, prior, dynamics=fp.ZigZag(), reference="identity", chains=len(starts), duration=duration, burn_in=0.0,
        init=starts, seed=seed, progress=False,
    )  # fmt: skip
    rounds, chains = zip(*_kept(heard), strict=True)
    order = np.argsort(np.concatenate(chains), kind="stable")
    return Overheard(*(np.concatenate(column)[order] for column in zip(*rounds, strict=True)))


def _kept(heard: list) -> Iterator[tuple[Overheard, Int[ndarray, " n"]]]:
    """Each round's plans up to where the next ones start, with their chains; of the last round, without a next, nothing."""
    for (plan, arrival), (after, _) in zip(heard, heard[1:], strict=False):
        velocity = plan.velocity[:, 0]
        length = (velocity * (after.start - plan.start)).mean(1)
        # A finished chain is sent plans of no length.
        going = plan.duration[:, 0] > 0
        won = arrival.rang & (arrival.time <= length * (1 + 1e-9))
        share = np.zeros(len(length)) if plan.share is None else plan.share
        columns = (plan.start, velocity, length, np.where(won, arrival.mark, -1), share)
        yield Overheard(*(column[going] for column in columns)), np.flatnonzero(going)


class Profile(NamedTuple):
    """An estimate of ``E(∂_i U | x_i)`` in bins of ``x_i``, its standard error, and what each bin weighs."""

    centers: Float[ndarray, " b"]
    slope: Float[ndarray, " b"]
    error: Float[ndarray, " b"]
    weight: Float[ndarray, " b"]

    def less(self, part: Float[ndarray, " b"]) -> Profile:
        """The profile with the known part of the prior subtracted."""
        return self._replace(slope=self.slope - part)

    def distance(self, truth: Float[ndarray, " b"]) -> float:
        """Root mean squared error over that of knowing nothing."""
        return float(np.sqrt(self.weight @ (self.slope - truth) ** 2) / np.sqrt(self.weight @ truth**2))

    def misfit(self, truth: Float[ndarray, " b"]) -> float:
        """Root mean square of the errors in units of their standard errors: about one for a listener who is not misled."""
        return float(np.sqrt(np.mean(((self.slope - truth) / self.error) ** 2)))


def estimate(heard: Overheard, i: int, edges: Float[ndarray, " b1"]) -> Profile:
    """The profile, from flips of coordinate i and the time that paths spend in each bin, by the sign of ``v_i``."""
    x, rang = heard.positions(i), heard.flipped == i
    ends = heard.start[rang, i] + heard.velocity[rang, i] * heard.length[rang]
    rates, variance, time = [], 0.0, 0.0
    for sign in (1.0, -1.0):
        own = heard.velocity[:, i] == sign
        spent = np.histogram(x[own], edges, weights=_weights(heard.length[own]))[0]
        events = np.histogram(ends[heard.velocity[rang, i] == sign], edges)[0]
        rates.append(events / np.maximum(spent, 1e-12))
        variance = variance + np.maximum(events, 1) / np.maximum(spent, 1e-12) ** 2
        time = time + spent
    return Profile((edges[1:] + edges[:-1]) / 2, rates[0] - rates[1], np.sqrt(variance), time / np.sum(time))


def prior_part(
    heard: Overheard, share: float | Float[ndarray, " n"], i: int, edges: Float[ndarray, " b1"]
) -> Float[ndarray, " b"]:
    """Mean of ``α x_i`` in each bin, the slope of a part α of the standard normal prior, for given parts."""
    x, weights = heard.positions(i), _weights(heard.length)
    parts = np.broadcast_to(np.asarray(share), heard.length.shape)[:, None] * x
    return np.histogram(x, edges, weights=weights * parts)[0] / np.histogram(x, edges, weights=weights)[0]


def average(
    slopes: Float[ndarray, " n"], x: Float[ndarray, " n"], edges: Float[ndarray, " b1"]
) -> Float[ndarray, " b"]:
    """The mean of a gradient's entry over draws, in the same bins."""
    total, count = np.histogram(x, edges, weights=slopes)[0], np.histogram(x, edges)[0]
    return total / np.maximum(count, 1)


def _weights(length: Float[ndarray, " n"]) -> Float[ndarray, "n moments"]:
    return np.repeat(length / MOMENTS, MOMENTS).reshape(-1, MOMENTS)
