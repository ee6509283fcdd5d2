"""What rounds keep of each site where only those that must be asked are: `sparing` for one message after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from fedpdmc._jax.compilation import compiled
from fedpdmc.plan import Arrival, Plan
from fedpdmc.sampling.coordinator import Coordinator, Itinerary, Knots, State
from fedpdmc.sampling.engines import selective_requests
from fedpdmc.sampling.engines.base import Federation, globalised
from fedpdmc.sampling.engines.selective_requests import Errand


class Kept(eqx.Module):
    """What a site was last asked, and what it answered, on every chain."""

    errand: Errand
    arrival: Arrival


class Answers(NamedTuple):
    """A round: what is now kept of each site, and of each the chains that it was asked about."""

    kept: tuple[Kept, ...]
    asked: np.ndarray


def nothing_kept(columns: Sequence[np.ndarray | None], chains: int, segments: int, dim: int) -> tuple[Kept, ...]:
    """Before the first plan of a block every site is asked."""
    silent = Arrival(jnp.zeros(chains), jnp.zeros(chains, bool), jnp.zeros(chains, int))
    sizes = [dim if own is None else len(own) for own in columns]
    return tuple(Kept(selective_requests.first_errand(chains, segments, size), silent) for size in sizes)


def ask(
    federation: Federation,
    coordinator: Coordinator,
    itinerary: Itinerary,
    kept: tuple[Kept, ...],
    left: Float[Array, " C"],
    going: Bool[Array, " C"],
) -> Answers:
    """One exchange with the sites whose arrivals no longer stand; the others are sent nothing."""
    errands, plans, asked = [], [], []
    for own, old in zip(federation.columns, kept, strict=True):
        columns = None if own is None else jnp.asarray(own)
        errand, plan, about = _consider(coordinator, old, itinerary, columns, left, going)
        errands.append(errand)
        asked.append(np.asarray(about))
        plans.append(plan if asked[-1].any() else None)
    answers = federation.ask(plans) if np.any(asked) else [None] * len(plans)
    now = []
    for old, errand, about, answer in zip(kept, errands, asked, answers, strict=True):
        arrival = old.arrival if answer is None else _replaced(old.arrival, answer, about)
        now.append(Kept(errand, arrival))
    return Answers(tuple(now), np.asarray(asked))


@compiled
def _consider(coordinator: Coordinator, kept: Kept, itinerary: Itinerary, own, left, going):
    """What a site is asked now: the errand, the plan that is sent, and the chains that it is of."""
    path = selective_requests.to_the_end(itinerary, left)
    path = path if own is None else path.restricted(own)
    errand, asked = selective_requests.consider(coordinator.dynamics, kept.errand, kept.arrival, path, left, going)
    rest = errand.rest
    plan = Plan(
        itinerary.path.number,
        jnp.where(asked[:, None], rest.start[:, 0], 0.0),
        jnp.where(asked[:, None], rest.duration, 0.0),
        jnp.where(asked[:, None, None], rest.velocity, 0.0),
    )
    return errand, plan, asked


def _replaced(old: Arrival, new: Arrival, asked: np.ndarray) -> Arrival:
    """The new arrival on the chains that were asked about."""
    pairs = ((new.time, old.time), (new.rang, old.rang), (new.mark, old.mark))
    return Arrival(*(jnp.asarray(np.where(asked, np.asarray(x), np.asarray(y))) for x, y in pairs))


def settle(
    coordinator: Coordinator,
    state: State,
    itinerary: Itinerary,
    kept: tuple[Kept, ...],
    columns: Sequence[np.ndarray | None],
    end: Float[Array, " C"],
) -> tuple[State, Knots, tuple[Kept, ...]]:
    """Keep the path up to the earliest of the arrivals, and what is kept of each site seen from there."""
    found = [globalised(one.arrival, own) for one, own in zip(kept, columns, strict=True)]
    arrivals = Arrival(*(jnp.stack(x) for x in zip(*((a.time, a.rang, a.mark) for a in found), strict=True)))
    times = [(one.errand.lead, one.errand.since) for one in kept]
    lead, since = (jnp.stack(x) for x in zip(*times, strict=True))
    new, knots, elapsed = _settle(coordinator, state, itinerary, arrivals, lead, since, end)
    return new, knots, tuple(Kept(one.errand.later(elapsed), one.arrival) for one in kept)


@compiled
def _settle(coordinator: Coordinator, state: State, itinerary: Itinerary, arrivals: Arrival, lead, since, end):
    horizon = itinerary.path.horizon
    arrivals = selective_requests.of_this_plan(arrivals, lead, since, horizon)
    kept = jnp.where(state.t < end, selective_requests.elapsed(arrivals, horizon), 0.0)
    return *coordinator.settle_going(state, itinerary, arrivals, end), kept
