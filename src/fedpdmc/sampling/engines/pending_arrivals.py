"""The arrivals kept from round to round if not every site is asked: `selective_requests` message by message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from fedpdmc._jax.compilation import compiled
from fedpdmc.plan import Arrival, Plan
from fedpdmc.sampling.coordinator import Coordinator, Itinerary
from fedpdmc.sampling.engines import selective_requests
from fedpdmc.sampling.engines.base import Federation, globalised
from fedpdmc.sampling.engines.selective_requests import Request, Sent


class Kept(eqx.Module):
    """A site's last request and answer on every chain."""

    request: Request
    arrival: Arrival


class Answers(NamedTuple):
    """A round: the kept answers of each site, and the chains that each was asked about."""

    kept: tuple[Kept, ...]
    asked: np.ndarray


def nothing_kept(columns: Sequence[np.ndarray | None], chains: int, segments: int, dim: int) -> tuple[Kept, ...]:
    """Before the first plan of a block every site is asked."""
    silent = Arrival(jnp.zeros(chains), jnp.zeros(chains, bool), jnp.zeros(chains, int))
    sizes = [dim if own is None else len(own) for own in columns]
    return tuple(Kept(selective_requests.first_request(chains, segments, size), silent) for size in sizes)


def ask(
    federation: Federation,
    coordinator: Coordinator,
    itinerary: Itinerary,
    kept: tuple[Kept, ...],
    left: Float[Array, " C"],
    going: Bool[Array, " C"],
) -> Answers:
    """One exchange with the sites whose arrivals are no longer valid; the others are sent nothing."""
    requests, plans, asked = [], [], []
    for own, old in zip(federation.columns, kept, strict=True):
        columns = None if own is None else jnp.asarray(own)
        request, plan, about = _consider(coordinator, old, itinerary, columns, left, going)
        requests.append(request)
        asked.append(np.asarray(about))
        plans.append(plan if asked[-1].any() else None)
    answers = federation.ask(plans) if np.any(asked) else [None] * len(plans)
    now = []
    for old, request, about, answer in zip(kept, requests, asked, answers, strict=True):
        arrival = old.arrival if answer is None else _replaced(old.arrival, answer, about)
        now.append(Kept(request, arrival))
    return Answers(tuple(now), np.asarray(asked))


@compiled
def _consider(coordinator: Coordinator, kept: Kept, itinerary: Itinerary, own, left, going):
    """What a site is asked now: the request, the plan that is sent, and the chains that it is of."""
    path = selective_requests.to_the_end(itinerary, left)
    path = path if own is None else path.restricted(own)
    request, asked = selective_requests.consider(coordinator.dynamics, kept.request, kept.arrival, path, left, going)
    rest = request.rest
    plan = Plan(
        itinerary.path.number,
        jnp.where(asked[:, None], rest.start[:, 0], 0.0),
        jnp.where(asked[:, None], rest.duration, 0.0),
        jnp.where(asked[:, None, None], rest.velocity, 0.0),
    )
    return request, plan, asked


def _replaced(old: Arrival, new: Arrival, asked: np.ndarray) -> Arrival:
    """The new arrival on the chains that were asked about."""
    pairs = ((new.time, old.time), (new.rang, old.rang), (new.mark, old.mark))
    return Arrival(*(jnp.asarray(np.where(asked, np.asarray(x), np.asarray(y))) for x, y in pairs))


def stacked(kept: tuple[Kept, ...], columns: Sequence[np.ndarray | None]) -> tuple[Arrival, Sent]:
    """The arrivals of all sites, and when each was asked."""
    found = [globalised(one.arrival, own) for one, own in zip(kept, columns, strict=True)]
    arrivals = Arrival(*(jnp.stack(x) for x in zip(*((a.time, a.rang, a.mark) for a in found), strict=True)))
    times = [(one.request.lead, one.request.since) for one in kept]
    return arrivals, Sent(*(jnp.stack(x) for x in zip(*times, strict=True)))


def later(kept: tuple[Kept, ...], elapsed: Float[Array, " C"]) -> tuple[Kept, ...]:
    """The same, seen from plans that start so much later."""
    return tuple(Kept(one.request.later(elapsed), one.arrival) for one in kept)
