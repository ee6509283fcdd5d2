"""A site's private latents between plans: their state when the last plan of each chain was cut, and draws of them.

The site answers a plan with its first arrival and keeps the plan. The next plan of the chain says at which process time it
begins, and hence when the last one was cut: the latents return to their state at that time (`clocks.private_latents`).
Everything follows from the site's seed, its records and the plans in its log, so that a restarted site has the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from fedpdmc._jax.compilation import compiled
from fedpdmc._jax.random_streams import ChainKeys
from fedpdmc.clocks import LatentClock, follow
from fedpdmc.federation import messages
from fedpdmc.federation.site_agent.request_checks import RequestRefused
from fedpdmc.members.latent_posterior import LatentPosterior
from fedpdmc.plan import Plan
from fedpdmc.whitening import Reference

# Process times differ from sums of durations by rounding; positions by that of the coordinator's own arithmetic.
ROUNDING = 1e-8
# Process time between two draws of a site's latents.
SPACING = 1.0

Arrays = tuple[np.ndarray, ...]


class _Last(NamedTuple):
    """The last plan of every chain: its arrays, when it began, how far the site walked, and whether it had an arrival."""

    plan: Arrays
    time: np.ndarray
    walked: np.ndarray
    rang: np.ndarray
    known: np.ndarray


class LatentMemory:
    """The latents of all chains, and the plans along which they moved last.

    Parameters
    ----------
    clock : LatentClock
    keys : ChainKeys
        The site's own.
    shape : (int, int, int)
        Chains, segments and coordinates of plans.
    """

    def __init__(self, clock: LatentClock, keys: ChainKeys, shape: tuple[int, int, int]):
        chains, segments, dim = shape
        self._clock, self._keys = clock, keys
        self.settled: Float[Array, "C k"] = jnp.full((chains, clock.potential.latents), jnp.nan)
        empty = np.zeros(chains, np.int64), np.zeros((chains, dim)), np.zeros((chains, segments))
        plan = (*empty, np.zeros((chains, segments, dim)))
        zeros, no = np.zeros(chains), np.zeros(chains, bool)
        self._last = _Last(plan, zeros, zeros, no, no)
        self.draws: list[tuple[np.ndarray, ...]] | None = None

    def before(self, message: messages.Plans, plan: Arrays) -> Float[Array, "C k"]:
        """The latents at the start of new plans, ``plan`` being their arrays of all chains.

        Raises
        ------
        RequestRefused
            The plans do not continue the last ones: time goes back, or beyond the site's own arrival, or the path jumps.
        """
        last, chain = self._last, message.chain
        if len(message.time) != len(chain):
            raise RequestRefused("NOT_CONTINUED")
        going = last.known[chain]
        elapsed = np.zeros(len(last.time))
        elapsed[chain[going]] = message.time[going] - last.time[chain[going]]
        slack = ROUNDING * (1 + np.abs(last.time) + last.walked)
        wrong = (elapsed < -slack) | (elapsed > last.walked + slack)
        elapsed = np.clip(elapsed, 0.0, last.walked)
        which = np.zeros(len(elapsed), bool)
        which[chain[going]] = True
        settled, a = _carried(self._clock, self._keys, self.settled, elapsed, which, plan[0], *last.plan)
        off = np.max(np.abs(np.asarray(a)[chain] - message.start), axis=1, initial=0.0)
        size = 1 + np.max(np.abs(message.start), axis=1, initial=0.0)
        wrong[chain] |= going & ~(off <= 1e3 * slack[chain] * size)
        if wrong[which].any():
            raise RequestRefused("NOT_CONTINUED", int(np.flatnonzero(wrong & which)[0]) + 1)
        return settled

    def answered(self, message: messages.Plans, plan: Arrays, given: messages.Arrivals) -> None:
        """Store answered plans."""
        settled = self.before(message, plan)
        if self.draws is not None:
            self._draw(message.chain, message.time)
        self.settled, last, chain = settled, self._last, message.chain
        parts = tuple(np.array(part) for part in last.plan)
        for part, new in zip(parts, plan, strict=True):
            part[chain] = new[chain]
        time, walked, rang, known = (np.array(x) for x in last[1:])
        time[chain], rang[chain], known[chain] = message.time, given.rang.astype(bool), True
        walked[chain] = given.observed_times(message.duration.sum(-1))
        self._last = _Last(parts, time, walked, rang, known)

    def keep_draws(self) -> None:
        """Keep draws of the latents from here on."""
        self.draws = []

    def finish(self) -> None:
        """The run has ended: every chain is at the end of its last plan."""
        last = self._last
        if self.draws is not None and last.known.all() and not last.rang.any():
            self._draw(np.arange(len(last.time)), last.time + last.walked)

    def _draw(self, chain: np.ndarray, time: np.ndarray) -> None:
        """Latents at multiples of `SPACING` from where the last plans of these chains began to where they were cut."""
        assert self.draws is not None
        last = self._last
        first = np.maximum(np.ceil(last.time / SPACING), 0.0)
        until = np.full(len(last.time), -np.inf)
        until[chain] = np.where(last.known[chain], time, -np.inf)
        while (due := (at := first * SPACING) < until).any():
            since = np.clip(np.where(due, at - last.time, 0.0), 0.0, last.walked)
            a, z = _latents(self._clock, self._keys, self.settled, since, due, *last.plan)
            self.draws.append((np.flatnonzero(due), first[due].astype(int), np.asarray(a)[due], np.asarray(z)[due]))
            first = np.where(due, first + 1, first)

    def posterior(self, reference: Reference, names: tuple[str, ...]) -> LatentPosterior:
        """The draws at all times that every chain has reached."""
        chains, dim = self._last.plan[1].shape
        drawn = self.draws or []
        counts = np.zeros(chains, int)
        for rows, number, _, _ in drawn:
            counts[rows] = np.maximum(counts[rows], number + 1)
        n = int(counts.min())
        a, z = np.zeros((chains, n, dim)), np.zeros((chains, n, self.settled.shape[1]))
        for rows, number, place, latents in drawn:
            held = number < n
            a[rows[held], number[held]], z[rows[held], number[held]] = place[held], latents[held]
        theta = np.asarray(reference.to_x(jnp.asarray(a)))
        return LatentPosterior(SPACING * np.arange(n), theta, z[..., : len(names)], names)


def _settled(clock: LatentClock, keys: ChainKeys, settled, elapsed, which, plan: Plan):
    """Latents and positions at times of plans."""
    path = follow(clock.dynamics, plan)
    state = eqx.tree_at(lambda s: s.settled, clock.idle(plan.start.shape[0]), settled)
    return clock.settle(state, path, elapsed, which, keys).settled, clock.position(path, elapsed)


@compiled
def _carried(clock: LatentClock, keys: ChainKeys, settled, elapsed, which: Bool[Array, " C"], number, *plan):
    """Latents at the start of new plans, newly drawn on chains that have none yet, and the positions there."""
    found, a = _settled(clock, keys, settled, jnp.asarray(elapsed), jnp.asarray(which), Plan(*plan))
    return jnp.where(jnp.isnan(found[:, :1]), clock.first(jnp.asarray(number), keys), found), a


@compiled
def _latents(clock: LatentClock, keys: ChainKeys, settled, elapsed, which: Bool[Array, " C"], *plan):
    """Positions and latents at times of plans, in the site's own units."""
    found, a = _settled(clock, keys, settled, jnp.asarray(elapsed), jnp.asarray(which), Plan(*plan))
    return a, clock.potential.to_z(a, found)
