"""Only the sites that must be asked: an arrival stands while the path on the site's own coordinates stays as it was.

Where flips move single coordinates on straight lines and a site is sent only its own, most events leave its path as it was.
A site is sent its path to the end of the block: what the coordinator plans, and then the last velocity, for what is not
simulated yet. When the coordinator plans anew, let σ be the first time at which the new path differs from the one that the
site was sent, on its own coordinates and with the coordinator's events. If its arrival comes by σ it stands. Otherwise all
that is known of the site is that it is silent up to σ, and it is asked from σ on: not from now, for that would throw away
what its arrival has told, and only when it was late.
"""

from __future__ import annotations

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fedpdmc.clocks import Path, follow, pick
from fedpdmc.dynamics import Dynamics
from fedpdmc.plan import Arrival, Plan
from fedpdmc.sampling.coordinator import Coordinator, Itinerary


class Errand(eqx.Module):
    """What a site was last asked, by chain; or the sites of a group, stacked.

    Attributes
    ----------
    path : Path
        The site's own coordinates from the start of the plan with which it was asked, to the end of the block.
    lead : (C,)
        The start of that plan, as a time of the present one: zero or negative.
    rest : Path
        The part of the path that the site was sent.
    since : (C,)
        Where that part starts: the site is known to be silent before.
    """

    path: Path
    lead: Float[Array, "*G C"]
    rest: Path
    since: Float[Array, "*G C"]

    def time(self, time: Float[Array, "*G C"]) -> Float[Array, "*G C"]:
        """A time of the part that was sent, as a time of the present plan."""
        return self.lead + (self.since + time)

    def later(self, elapsed: Float[Array, " C"]) -> Errand:
        """The same, seen from a plan that starts so much later."""
        return Errand(self.path, self.lead - elapsed, self.rest, self.since)


class Decision(NamedTuple):
    """Whether a site is asked about a chain, and from which time of the new plan on."""

    ask: Bool[Array, " C"]
    since: Float[Array, " C"]


def applies(columns, coordinator: Coordinator) -> bool:
    """Whether flips are local, paths are lines, and some site is sent only its own coordinates."""
    dynamics = coordinator.dynamics
    lines = dynamics.flips and not dynamics.flow.rotating and coordinator.redistribution == 0
    return lines and any(own is not None for own in columns)


def first_errand(chains: int, segments: int, own: int) -> Errand:
    """Of a site before the first plan of a block: a path that differs from every other."""
    nowhere, zero = jnp.full((chains, segments + 1, own), jnp.nan), jnp.zeros((chains, segments + 1))
    path, now = Path(jnp.zeros(chains, int), nowhere, nowhere, zero, zero), jnp.zeros(chains)
    return Errand(path, now, path, now)


def to_the_end(itinerary: Itinerary, left: Float[Array, " C"]) -> Path:
    """The path that is planned, and the last velocity from its horizon up to ``left``."""
    path = itinerary.path
    return Path(
        path.number,
        jnp.concatenate([path.start, itinerary.end_a[:, None]], 1),
        jnp.concatenate([path.velocity, itinerary.end_v[:, None]], 1),
        jnp.concatenate([path.begin, path.horizon[:, None]], 1),
        jnp.concatenate([path.duration, jnp.maximum(left - path.horizon, 0.0)[:, None]], 1),
    )


def first_difference(old: Path, lead: Float[Array, " C"], new: Path) -> Float[Array, " C"]:
    """σ: the first time of the new path at which its velocity is not that of the old one, infinite if there is none.

    Both are lines from the same point between the times at which segments begin, so only those times need a look.
    """
    began = old.begin + lead[:, None]
    times = jnp.concatenate([jnp.zeros_like(lead)[:, None], began[:, 1:], new.begin[:, 1:]], 1)

    def differs(time):
        then = pick(old.velocity, _segment(began, time)) != pick(new.velocity, _segment(new.begin, time))
        return jnp.any(then, -1)

    different = jax.vmap(differs, 1, 1)(times)
    return jnp.min(jnp.where(different & (times >= 0), times, jnp.inf), 1)


def decide(errand: Errand, arrival: Arrival, new: Path, left: Float[Array, " C"]) -> Decision:
    """The rule: an arrival by σ stands, and a site that is known to be silent for all that is left is not asked."""
    sigma = first_difference(errand.path, errand.lead, new)
    silent = jnp.maximum(jnp.minimum(sigma, errand.lead + errand.path.horizon), 0.0)
    # Of the site that objected σ is zero: its arrival, which has come, does not stand.
    stands = arrival.rang & (errand.time(arrival.time) <= sigma) & (sigma > 0)
    return Decision(~(stands | (silent >= left)), silent)


def consider(
    dynamics: Dynamics, errand: Errand, arrival: Arrival, path: Path, left: Float[Array, " C"], new: Bool[Array, " C"]
) -> tuple[Errand, Bool[Array, " C"]]:
    """What a site is asked about the new plans of some chains, and on which of them it is asked at all.

    ``path`` is the site's own to the end, as `to_the_end` gives it.
    """
    decision = decide(errand, arrival, path, left)
    ask = new & decision.ask
    fresh = Errand(path, jnp.zeros_like(left), path_since(dynamics, path, decision.since), decision.since)

    def choose(x, y):
        return jnp.where(ask.reshape(ask.shape + (1,) * (x.ndim - 1)), x, y)

    return jax.tree.map(choose, fresh, errand), ask


def path_since(dynamics: Dynamics, path: Path, time: Float[Array, " C"]) -> Path:
    """The rest of a path from a time on, as a site makes it of the plan that it is sent."""
    chains, count = path.begin.shape
    first = _segment(path.begin, time)
    index = first[:, None] + jnp.arange(count)
    inside, index, rows = index < count, jnp.minimum(index, count - 1), jnp.arange(chains)[:, None]
    skipped = time - pick(path.begin, first)
    a, v = path.state(dynamics, first, skipped)
    duration = jnp.where(inside, path.duration[rows, index], 0.0).at[:, 0].add(-skipped)
    velocity = path.velocity[rows, index].at[:, 0].set(v)
    return follow(dynamics, Plan(path.number, a, jnp.maximum(duration, 0.0), velocity))


def of_this_plan(
    arrivals: Arrival, lead: Float[Array, "sites C"], since: Float[Array, "sites C"], horizon: Float[Array, " C"]
) -> Arrival:
    """Arrivals along earlier plans, stacked over sites, as times of the present one, those beyond its horizon left out."""
    time = jnp.maximum(lead + (since + arrivals.time), 0.0)
    return Arrival(time, arrivals.rang & (time < horizon), arrivals.mark)


def elapsed(arrivals: Arrival, horizon: Float[Array, " C"]) -> Float[Array, " C"]:
    """How much of the plan is kept."""
    return jnp.minimum(jnp.min(jnp.where(arrivals.rang, arrivals.time, jnp.inf), 0), horizon)


def _segment(begin: Float[Array, "C S"], time: Float[Array, " C"]):
    """The last segment that has begun by a time."""
    return jnp.maximum(jnp.sum(begin <= time[:, None], 1) - 1, 0)
