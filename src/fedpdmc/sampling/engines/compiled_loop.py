"""All sites in one process: whole rounds compiled, no Python per event.

Sites of one family and padded size form a group, whose numbers are stacked and walked by one compiled step. With short
plans, chains do not wait for each other: a chain whose sites have all answered moves on and gets a new plan while others
still walk. If plans are long and costly to make, or every clock is inverted (`compiled_gaussian`), chains advance together.
The draws of a chain depend on its own plans and keys alone, so this changes no result. `selective_requests` decides which
sites are asked, and ends a round, as for `rounds`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from fedpdmc._jax.compilation import compiled, on_device
from fedpdmc.clocks import NOT_FINITE, Clock, LatentClock, Path, Walk, answer, follow, holding
from fedpdmc.clocks.walking import reveal_first
from fedpdmc.errors import NotFinite
from fedpdmc.plan import Arrival, Plan
from fedpdmc.sampling.by_chain import where_chains
from fedpdmc.sampling.coordinator import Coordinator, Itinerary, PublicKeys, State
from fedpdmc.sampling.engines import compiled_gaussian, in_process_latents, selective_requests
from fedpdmc.sampling.engines.base import Federation
from fedpdmc.sampling.engines.event_buffer import Record
from fedpdmc.sampling.engines.faults import not_finite, raise_faults
from fedpdmc.sampling.engines.selective_requests import Request, Sent, finish_round


class Group(eqx.Module):
    """Sites whose clocks have the same structure and shapes, stacked along the first axis.

    Attributes
    ----------
    clock : Clock
        Stacked over the G sites.
    keys : (G, C, words)
        The sites' secret keys, by chain.
    columns : (G, k) or None
        The coordinates that each site is sent; None for all.
    place : (G,)
        Each site's place in the federation.
    """

    clock: Clock
    keys: UInt32[Array, "G C words"]
    columns: Int[Array, "G k"] | None
    place: Int[Array, " G"]

    @property
    def size(self) -> int:
        """Number of sites."""
        return self.keys.shape[0]

    def each(self, function, *stacked):
        """Map ``function(clock, keys, …)`` over the sites, one at a time, on the shapes that a site alone would use."""
        everything = (self.clock, self.keys, *stacked)
        if self.size == 1:
            alone = function(*jax.tree.map(lambda x: x[0], everything))
            return jax.tree.map(lambda x: x[None], alone)
        return jax.lax.map(lambda args: function(*args), everything)


class Progress(eqx.Module):
    """All that a run carries from one iteration to the next."""

    state: State
    itinerary: Itinerary
    walks: tuple[Any, ...]
    open: Bool[Array, " C"]
    broken: Bool[Array, ""]
    requests: tuple[Request, ...] | None = None


class LocalFederation(Federation):
    """Sites in this process.

    Parameters
    ----------
    names : sequence of str
    clocks : sequence of Clock
        One for each site, as `fedpdmc.members.run_coordinates.open_site` gives it.
    columns : sequence of arrays or None
        The coordinates that each site is sent.
    keys : sequence of arrays
        The sites' secret keys, by chain.
    chains : int
    choices : sequence of dict, optional
        Why each site has its clock (`fedpdmc.clocks.Choice.report`).
    """

    def __init__(self, names, clocks, columns, keys, chains: int, choices: Sequence[dict[str, Any]] = ()):
        self._names = tuple(names)
        self._clocks, self._columns = list(clocks), list(columns)
        self._chain_keys = list(keys)
        self.groups, self.order = _group(self._clocks, self._columns, self._chain_keys)
        self.chains = chains
        self._choices = dict(zip(self._names, choices, strict=False))

    @property
    def names(self) -> tuple[str, ...]:
        """The sites' names."""
        return self._names

    @property
    def clocks(self) -> dict[str, Clock]:
        """The sites' clocks by name."""
        return dict(zip(self._names, self._clocks, strict=True))

    @property
    def choices(self) -> dict[str, dict[str, Any]]:
        """Why each site has its clock."""
        return self._choices

    @property
    def columns(self) -> list[np.ndarray | None]:
        """The coordinates that each site is sent."""
        return self._columns

    def ask(self, plans: Sequence[Plan | None]) -> list[Arrival | None]:
        """One round, site by site."""
        arrivals: list[Arrival | None] = []
        for name, clock, keys, plan in zip(self._names, self._clocks, self._chain_keys, plans, strict=True):
            if plan is None:
                arrivals.append(None)
                continue
            arrival, walk = _answer(clock, keys, plan)
            raise_faults([name], np.asarray(walk.fault)[None])
            arrivals.append(arrival)
        return arrivals

    def faults(self, progress: Progress) -> None:
        """Raise the first fault of any site, with the operation that is not finite where it is known."""
        try:
            raise_faults([self._names[i] for i in self.order], self._faults(progress))
        except NotFinite as error:
            place = self._names.index(error.site)
            where = not_finite(self._clocks[place], self._columns[place], *self._walks(progress, place), error.chain)
            raise NotFinite(error.site, error.chain, where=where) from None
        if bool(progress.broken):
            raise NotFinite("coordinator", 0)

    def _walks(self, progress: Progress, place: int) -> tuple[Path | None, Walk]:
        """The path that a site walks, where all sites walk the same, and how far it has come."""
        parts = [jax.vmap(lambda c, w: c.walk(w))(g.clock, w) for g, w in zip(self.groups, progress.walks, strict=True)]
        row = int(np.argmax(self.order == place))
        walk = jax.tree.map(lambda *x: np.concatenate([np.asarray(part) for part in x])[row], *parts)
        return progress.itinerary.path if progress.requests is None else None, walk

    def _faults(self, progress: Progress) -> np.ndarray:
        parts = zip(self.groups, progress.walks, strict=True)
        return np.concatenate([np.asarray(g.clock.walk(w).fault).reshape(g.size, -1) for g, w in parts])

    def passes(self, progress: Progress) -> np.ndarray:
        """Passes over the records of each site, summed over chains."""
        return self._by_site(progress, lambda clock, state: clock.walk(state).passes)

    def violations(self, progress: Progress) -> np.ndarray:
        """How often each site saw a rate above a bound that is not certified, summed over chains."""
        return self._by_site(progress, lambda clock, state: clock.violations(state))

    def latents(self, progress: Progress) -> dict[str, np.ndarray]:
        """The private latents of each site that has them, where the chains are: of shape (chains, k)."""
        return in_process_latents.latents(self.groups, self._names, progress.state.a, progress.walks)

    def settled(self, progress: Progress) -> dict[str, np.ndarray]:
        """The same in the sites' private coordinates."""
        return in_process_latents.settled(self.groups, self._names, progress.walks)

    @property
    def has_latents(self) -> bool:
        """Whether a site has private latents."""
        return any(isinstance(group.clock, LatentClock) for group in self.groups)

    def with_latents(self, progress: Progress, settled: Mapping[str, np.ndarray]) -> Progress:
        """The run with its sites' latents at these places."""
        walks = in_process_latents.placed(self.groups, self._names, progress.walks, settled)
        return eqx.tree_at(lambda now: now.walks, progress, walks)

    def _by_site(self, progress: Progress, count) -> np.ndarray:
        counts = np.concatenate(
            [
                np.asarray(count(g.clock, w)).reshape(g.size, -1).sum(1)
                for g, w in zip(self.groups, progress.walks, strict=True)
            ]
        )
        out = np.zeros(len(self._names), dtype=np.int64)
        out[self.order] = counts
        return out


_answer = compiled(answer)


def _group(clocks, columns, keys) -> tuple[tuple[Group, ...], np.ndarray]:
    """Stack clocks of equal structure; returns the groups and, for each stacked site, its place in the federation."""
    members: dict[Any, list[int]] = {}
    for i, (clock, own) in enumerate(zip(clocks, columns, strict=True)):
        leaves, structure = jax.tree.flatten(clock)
        shape = (structure, tuple((x.shape, str(x.dtype)) for x in leaves), own is None)
        members.setdefault(shape, []).append(i)
    groups = []
    for index in members.values():
        own = None if columns[index[0]] is None else _stacked(*(columns[i] for i in index))
        clock = jax.tree.map(_stacked, *[clocks[i] for i in index])
        groups.append(Group(clock, _stacked(*(keys[i] for i in index)), own, jnp.asarray(index)))
    return tuple(groups), np.concatenate([np.asarray(index) for index in members.values()])


def _stacked(*arrays) -> Array:
    """Stacked by NumPy: nothing is compiled for it."""
    return on_device(np.stack([np.asarray(array) for array in arrays]))


def begin(groups: tuple[Group, ...], coordinator: Coordinator, state: State) -> Progress:
    """A run before its first round."""
    chains, dim = state.a.shape
    s = coordinator.segments
    path = follow(
        coordinator.dynamics,
        Plan(state.number, state.a, jnp.zeros((chains, s)), jnp.zeros((chains, s, dim)), state.share),
    )
    none, never = jnp.zeros((chains, s), int), jnp.zeros(chains, bool)
    wait = None if state.turn is None else jnp.zeros((chains, s + 1))
    turns = coordinator.schedule(state, jnp.zeros(chains))
    held = None if state.scales is None else jnp.repeat(state.scales[:, None], s + 1, 1)
    itinerary = Itinerary(path, none, state.a, state.v, never, state.share, wait, turns, held)
    walks = tuple(jax.vmap(lambda c: c.idle(chains))(group.clock) for group in groups)
    requests = None
    if selective_requests.applies([group.columns for group in groups], coordinator):
        requests = tuple(_first_requests(group, chains, s, dim) for group in groups)
    return Progress(state, itinerary, walks, jnp.zeros(chains, bool), jnp.array(False), requests)


def _first_requests(group: Group, chains: int, segments: int, dim: int) -> Request:
    own = dim if group.columns is None else group.columns.shape[1]
    one = selective_requests.first_request(chains, segments, own)
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (group.size, *x.shape)), one)


def run_chunk(
    groups: tuple[Group, ...],
    coordinator: Coordinator,
    keys: PublicKeys,
    progress: Progress,
    until: Float[Array, ""],
    limit: Int[Array, ""],
    rows: int,
) -> tuple[Progress, Record, Int[Array, ""]]:
    """Up to ``limit`` iterations of the loop: move on and plan the chains that are ready, then let the sites walk.

    Returns the progress, the record of knots (one row for each iteration, ``rows`` at most) and the number of rows.
    """
    asked = sum(group.size for group in groups) if progress.requests is not None else None
    chains, dim = progress.state.a.shape
    empty = Record.empty(rows, chains, dim, coordinator.segments, coordinator.dynamics.unit_speed, asked)
    if compiled_gaussian.applies(groups, coordinator):
        return _run_inverted(groups, coordinator, keys, progress, until, limit, empty)

    def unfinished(carry):
        now, _, row = carry
        return (row < limit) & ~now.broken & jnp.any(now.open | (now.state.t < until))

    def iteration(carry):
        now, record, row = carry
        new, fresh, asked = _round(groups, coordinator, keys, now, until)
        return new, record.written(fresh, row, asked), row + 1

    return jax.lax.while_loop(unfinished, iteration, (progress, empty, jnp.array(0)))


def _run_inverted(groups, coordinator: Coordinator, keys, progress: Progress, until, limit, empty):
    """`run_chunk` where no clock needs thinning: each site evaluates its rates once for every plan."""
    state, broken, record, rows = compiled_gaussian.run(groups, coordinator, keys, progress.state, until, limit, empty)
    plans, walks, place = state.number - progress.state.number, [], int(coordinator.clock is not None)
    for group, walk in zip(groups, progress.walks, strict=True):
        faults = jnp.where(broken[place : place + group.size], NOT_FINITE, walk.fault)
        walks.append(eqx.tree_at(lambda w: (w.passes, w.fault), walk, (walk.passes + plans, faults)))
        place += group.size
    return Progress(state, progress.itinerary, tuple(walks), progress.open, jnp.any(broken)), record, rows


def _round(groups, coordinator: Coordinator, keys, now: Progress, until):
    """Move the chains on whose sites have all answered, plan for them, and let every site walk on.

    Also returns the knots, and the numbers of the plans that each site was asked about, where not every site is.
    """
    answers = [_arrivals(group, state) for group, state in zip(groups, now.walks, strict=True)]
    done = jnp.all(jnp.concatenate([d for d, _ in answers]), 0)
    arrivals = jax.tree.map(lambda *x: jnp.concatenate(x), *[a for _, a in answers])
    if coordinator.dynamics.draws:
        site_keys = jnp.concatenate([group.keys for group in groups])
        arrivals = reveal_first(arrivals, site_keys, now.itinerary.path.number, now.open & done)
    sent = None
    if now.requests is not None:
        sent = Sent(*(jnp.concatenate(x) for x in zip(*((r.lead, r.since) for r in now.requests), strict=True)))
    ready = now.open & done
    state, knots, kept = finish_round(coordinator, now.state, now.itinerary, arrivals, sent, until, ready)
    walks = in_process_latents.gone_back(groups, now.walks, now.itinerary.path, state.t - now.state.t, ready)
    now = eqx.tree_at(lambda n: n.walks, now, walks)
    new = (ready | ~now.open) & (state.t < until)
    itinerary = where_chains(new, coordinator.plan_ahead(state, keys, until), now.itinerary)
    if kept is None:
        requests, asked = None, None
        walks = _walk_on(groups, now.walks, itinerary.path, new, coordinator.segments > 1)
    else:
        walks, requests, asked = _ask_selected(
            groups, coordinator, now, itinerary, kept, jnp.maximum(until - state.t, 0), new
        )
    faulty = [
        jnp.any(jax.vmap(lambda c, w: c.walk(w).fault)(g.clock, w) != 0) for g, w in zip(groups, walks, strict=True)
    ]
    broken = jnp.any(jnp.stack(faulty)) | jnp.any(new & ~jnp.isfinite(itinerary.path.horizon))
    return Progress(state, itinerary, walks, new | (now.open & ~ready), broken, requests), knots, asked


def _ask_selected(groups, coordinator: Coordinator, now: Progress, itinerary: Itinerary, elapsed, left, new):
    """Ask the sites that must be asked about the new plans, and let all of them walk one step."""
    whole, dynamics = selective_requests.to_the_end(itinerary, left), coordinator.dynamics

    def one(clock: Clock, keys, state, request: Request, own):
        path, walk = whole if own is None else whole.restricted(own), clock.walk(state)
        arrival = Arrival(walk.time, walk.rang, walk.mark)
        request, ask = selective_requests.consider(dynamics, request.later(elapsed), arrival, path, left, new)
        return clock.step(clock.restart(state, ask, request.rest), request.rest, keys), request, ask

    parts = zip(groups, now.walks, now.requests or (), strict=True)
    walks, requests, asked = zip(
        *(group.each(one, walk, request, group.columns) for group, walk, request in parts), strict=True
    )
    return walks, requests, jnp.where(jnp.concatenate(asked), itinerary.path.number, -1)


def _walk_on(groups: tuple[Group, ...], walks, path: Path, new, to_the_end: bool):
    """Start on new plans and take one step, or all steps if making a plan costs more than letting chains wait.

    A site that has passed the earliest arrival found so far stops: it cannot be the first. No site learns of this.
    """
    if not to_the_end:
        return _steps(groups, walks, path, new)

    def unfinished(carry):
        walks, new = carry
        done = [jax.vmap(lambda c, w: c.walk(w).done)(g.clock, w) for g, w in zip(groups, walks, strict=True)]
        return jnp.any(new) | ~jnp.all(jnp.concatenate(done))

    # The first step is part of the loop, so that a step is compiled once.
    def step(carry):
        return _steps(groups, carry[0], path, carry[1]), jnp.zeros_like(new)

    return jax.lax.while_loop(unfinished, step, (walks, new))[0]


def _steps(groups: tuple[Group, ...], walks, path: Path, new) -> tuple:
    """One step of every site."""
    if sum(group.size for group in groups) > 1:
        path = eqx.tree_at(lambda p: p.cap, path, _earliest(groups, walks, new), is_leaf=lambda x: x is None)
    if any(isinstance(group.clock, LatentClock) for group in groups):
        floor = in_process_latents.floor_of(groups, walks, path, new)
        path = eqx.tree_at(lambda p: p.floor, path, floor, is_leaf=lambda x: x is None)
    return tuple(_step(group, walk, path, new) for group, walk in zip(groups, walks, strict=True))


def _earliest(groups: tuple[Group, ...], walks, new) -> Float[Array, " C"]:
    """The earliest arrival found so far on each chain; infinite where none is, and where a plan is new."""

    def times(clock: Clock, state):
        walk = clock.walk(state)
        return jnp.where(walk.done & walk.rang & ~new, walk.time, jnp.inf)

    found = [jax.vmap(times)(group.clock, walk) for group, walk in zip(groups, walks, strict=True)]
    return jnp.min(jnp.concatenate(found), 0)


def _step(group: Group, walks, path: Path, new):
    def one(clock: Clock, keys, state, own, place):
        own_path = path if own is None else path.restricted(own)
        clock = holding(clock, None if path.share is None else path.share[:, place])
        return clock.step(clock.restart(state, new, own_path), own_path, keys)

    return group.each(one, walks, group.columns, group.place)


def _arrivals(group: Group, walks) -> tuple[Bool[Array, "G C"], Arrival]:
    """Who is done, and the arrivals with marks in the federation's coordinates."""
    walk: Walk = jax.vmap(lambda c, w: c.walk(w))(group.clock, walks)
    mark = walk.mark if group.clock.dynamics.flips else walk.normal
    if group.columns is not None:
        mark = jnp.take_along_axis(group.columns, mark, 1)
    return walk.done, Arrival(walk.time, walk.rang, mark)
