"""One round: plan ahead, ask the sites that must be asked, apply the earliest arrival, and cut or keep the rest.

The same two functions, `plan_and_ask` and `move_on`, serve all sites of one process within a compiled loop, and sites
elsewhere message by message. What differs is `SitesInRound.ask`: a step of compiled walks, after which some chains have all
arrivals; or an exchange, after which all have.

An arrival stays valid while the path on the site's own coordinates is unchanged. If flips move single coordinates on
straight lines and a site is sent only its own, most events leave its path unchanged. Such a site is sent its path to the end
of the block: the coordinator's plan, and then the last velocity for the time that is not simulated yet. When the coordinator
plans again, let σ be the first time at which the new path differs from the one that the site was sent, on its own
coordinates and with the coordinator's events. An arrival up to σ stays valid. Otherwise the site is known to be silent up to
σ and nothing else is known, so it is asked from σ on. Asking from the present instead would be biased: it would discard
what the arrival has shown, and only if the arrival was late.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fedpdmc._jax.compilation import compiled_outside
from fedpdmc.clocks import Path, follow, pick
from fedpdmc.dynamics import Dynamics
from fedpdmc.plan import Arrival, Plan
from fedpdmc.sampling.coordinator import Coordinator, Itinerary, PublicKeys, RoundKnots, State, where_chains


class LastRequest(eqx.Module):
    """What a site was last asked, by chain; or the sites of a group, stacked."""

    path: Path  # its own coordinates from the start of the plan with which it was asked, to the end of the block
    lead: Float[Array, "*G C"]  # the start of that plan, as a time of the present one: zero or negative
    rest: Path  # the part of the path that the site was sent
    since: Float[Array, "*G C"]  # where that part starts: the site is known to be silent before

    def time(self, time: Float[Array, "*G C"]) -> Float[Array, "*G C"]:
        """A time of the part that was sent, as a time of the present plan."""
        return self.lead + (self.since + time)

    def later(self, elapsed: Float[Array, " C"]) -> LastRequest:
        """The same, seen from a plan that starts so much later."""
        return LastRequest(self.path, self.lead - elapsed, self.rest, self.since)


class Round(eqx.Module):
    """Where the chains are between the two halves of a round."""

    state: State
    open: Bool[Array, " C"]  # the chains whose plan has not been answered by all sites
    answers: Any  # what `SitesInRound` know of the sites' answers
    itinerary: Itinerary | None = None  # the plans under way; None where no chain is open
    requests: tuple[LastRequest, ...] | None = None  # by site or group; None where every site is asked about every plan
    broken: Bool[Array, ""] | bool = False  # a site cannot go on, or a plan is not finite


@runtime_checkable
class SitesInRound(Protocol):
    """All sites, as a round sees them."""

    def ask(self, now: Round, new: Bool[Array, " C"], left: Float[Array, " C"]) -> tuple[Round, Any]:
        """Ask about the plans of ``new`` chains, and go on with the others; ``left``: time to the end of the block.

        Also returns whom it has asked, where not every site is asked about every plan.
        """
        ...

    def arrivals(self, now: Round) -> tuple[Arrival, Bool[Array, " C"]]:
        """Arrivals stacked over sites, along the plans about which each was asked last, and the chains that have all."""
        ...

    def cut(self, answers: Any, path: Path, elapsed: Float[Array, " C"], ready: Bool[Array, " C"]) -> Any:
        """The answers after the plans of ``ready`` chains have ended, ``elapsed`` after their start."""
        ...


def plan_and_ask(
    coordinator: Coordinator, keys: PublicKeys, now: Round, sites: SitesInRound, until: Float[Array, "*C"]
) -> tuple[Round, Any]:
    """Plan for the chains without a plan, and ask the sites that must be asked.

    ``until`` is the end of the block, or how far each chain may be planned.
    """
    new = ~now.open & (now.state.t < until)
    itinerary = plan_ahead(coordinator, keys, now.state, until, new, now.itinerary)
    now = Round(now.state, now.open | new, now.answers, itinerary, now.requests, now.broken)
    return sites.ask(now, new, jnp.maximum(until - now.state.t, 0.0))


def move_on(
    coordinator: Coordinator, now: Round, sites: SitesInRound, until: Float[Array, "*C"]
) -> tuple[Round, RoundKnots]:
    """Apply the earliest arrival on the chains that have all arrivals, and cut or keep the rest."""
    assert now.itinerary is not None
    arrivals, done = sites.arrivals(now)
    ready, requests = now.open & done, now.requests
    sent = None
    if requests is not None:
        # When each site was asked for its arrival, stacked over sites.
        leads, since = zip(*((x.lead, x.since) for x in requests), strict=True)
        sent = tuple(jnp.concatenate([x.reshape(-1, ready.shape[0]) for x in each]) for each in (leads, since))
    state, knots, elapsed = finish_round(coordinator, now.state, now.itinerary, arrivals, sent, until, ready)
    if requests is not None:
        requests = tuple(request.later(elapsed) for request in requests)
    answers = sites.cut(now.answers, now.itinerary.path, state.t - now.state.t, ready)
    return Round(state, now.open & ~ready, answers, now.itinerary, requests, now.broken), knots


@compiled_outside
def plan_ahead(
    coordinator: Coordinator,
    keys: PublicKeys,
    state: State,
    until: Float[Array, "*C"],
    new: Bool[Array, " C"] | None = None,
    under_way: Itinerary | None = None,
) -> Itinerary:
    """New plans; where others are under way, of the ``new`` chains only."""
    itinerary = coordinator.plan_ahead(state, keys, until)
    if under_way is None or new is None:
        return itinerary
    return where_chains(new, itinerary, under_way)


@compiled_outside
def finish_round(
    coordinator: Coordinator,
    state: State,
    itinerary: Itinerary,
    arrivals: Arrival,
    sent: tuple[Float[Array, "sites C"], ...] | None,
    until: Float[Array, "*C"],
    ready: Bool[Array, " C"],
) -> tuple[State, RoundKnots, Any]:
    """The end of a round: chains that are ready move on to the earliest arrival.

    ``sent`` is None where every site was asked about this plan. Otherwise it has `LastRequest.lead` and
    `LastRequest.since` of all sites, and arrivals are those along earlier plans: they are
    moved to times of this one, those beyond its horizon are left out, and it is returned how much of the plan is kept.
    """
    if sent is None:
        return *coordinator.apply_arrivals(state, itinerary, arrivals, until, ready), None
    (lead, since), horizon = sent, itinerary.path.horizon
    time = jnp.maximum(lead + (since + arrivals.time), 0.0)
    arrivals = Arrival(time, arrivals.rang & (time < horizon), arrivals.mark)
    kept = jnp.minimum(jnp.min(jnp.where(arrivals.rang, arrivals.time, jnp.inf), 0), horizon)
    return *coordinator.apply_arrivals(state, itinerary, arrivals, until, ready), jnp.where(ready, kept, 0.0)


# Which sites must be asked ---------------------------------------------------------------------------------------------


def applies(columns, coordinator: Coordinator) -> bool:
    """Whether flips are local, paths are lines, and some site is sent only its own coordinates.

    Paths that may end at a wall are not sent beyond it, where a model need not be defined.
    """
    dynamics = coordinator.dynamics
    lines = dynamics.flips and not dynamics.flow.rotating and coordinator.redistribution == 0
    public = coordinator.walls is None and coordinator.mixture is None
    return lines and public and any(own is not None for own in columns)


def first_request(chains: int, segments: int, own: int, sites: tuple[int, ...] = ()) -> LastRequest:
    """The request of a site, or of some, before the first plan of a block: a path that differs from every other."""
    nowhere, zero = jnp.full((chains, segments + 1, own), jnp.nan), jnp.zeros((chains, segments + 1))
    path, now = Path(jnp.zeros(chains, int), nowhere, nowhere, zero, zero), jnp.zeros(chains)
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (*sites, *x.shape)), LastRequest(path, now, path, now))


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

    Both are lines from the same point between the times at which segments begin, so only those times are compared.
    """
    began = old.begin + lead[:, None]
    times = jnp.concatenate([jnp.zeros_like(lead)[:, None], began[:, 1:], new.begin[:, 1:]], 1)

    def differs(time):
        then = pick(old.velocity, _segment(began, time)) != pick(new.velocity, _segment(new.begin, time))
        return jnp.any(then, -1)

    different = jax.vmap(differs, 1, 1)(times)
    return jnp.min(jnp.where(different & (times >= 0), times, jnp.inf), 1)


def decide(
    request: LastRequest, arrival: Arrival, new: Path, left: Float[Array, " C"]
) -> tuple[Bool[Array, " C"], Float[Array, " C"]]:
    """Whether a site is asked about each chain, and from which time of the new plan on.

    An arrival up to σ stays valid, and a site without an arrival in the rest of the block is not asked.
    """
    sigma = first_difference(request.path, request.lead, new)
    silent = jnp.maximum(jnp.minimum(sigma, request.lead + request.path.horizon), 0.0)
    # For the site whose event it was, σ is zero: its arrival has been used and is no longer valid.
    stands = arrival.rang & (request.time(arrival.time) <= sigma) & (sigma > 0)
    return ~(stands | (silent >= left)), silent


def consider(
    dynamics: Dynamics,
    request: LastRequest,
    arrival: Arrival,
    path: Path,
    left: Float[Array, " C"],
    new: Bool[Array, " C"],
) -> tuple[LastRequest, Bool[Array, " C"]]:
    """What a site is asked about the new plans of some chains, and on which of them it is asked at all.

    ``path`` is the site's own to the end, as `to_the_end` gives it.
    """
    ask, since = decide(request, arrival, path, left)
    ask &= new
    fresh = LastRequest(path, jnp.zeros_like(left), path_since(dynamics, path, since), since)
    return where_chains(ask, fresh, request), ask


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


def _segment(begin: Float[Array, "C S"], time: Float[Array, " C"]):
    return jnp.maximum(jnp.sum(begin <= time[:, None], 1) - 1, 0)
