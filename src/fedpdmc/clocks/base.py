"""A clock finds the first event of a potential along a path, in steps over all chains at once.

A clock's ``step`` does a bounded amount of work for every chain, so that one caller can walk many sites and chains
together. The randomness of a step is keyed by (chain, plan number, draws so far): it does not depend on the caller or on
the order of calls.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from equinox import AbstractVar
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt32

from fedpdmc._jax.random_streams import ChainKeys
from fedpdmc.clocks.envelopes import exact_rates
from fedpdmc.dynamics import Dynamics, draw_bounce
from fedpdmc.plan import Arrival, Plan
from fedpdmc.potentials import Potential

FINE, VIOLATED, NOT_FINITE = 0, 1, 2


def pick(table: Shaped[Array, "C S ..."], index: Int[Array, " C"]) -> Shaped[Array, "C ..."]:
    """Each chain's entry of a table along its second axis."""
    if table.shape[1] == 1:
        return table[:, 0]
    return table[jnp.arange(table.shape[0]), index]


CW = TypeVar("CW", bound="CandidateWalk")


class Path(eqx.Module):
    """A plan with the position at the start of every segment and the times at which segments begin.

    ``cap`` is a time at which a walk may stop, because another site is known to have had an event by then; ``floor`` one
    before which no site can have an event that is not known yet.
    """

    number: Int[Array, " C"]
    start: Float[Array, "C S d"]
    velocity: Float[Array, "C S d"]
    begin: Float[Array, "C S"]
    duration: Float[Array, "C S"]
    share: Float[Array, "C M"] | Float[Array, " C"] | None = None
    cap: Float[Array, " C"] | None = None
    floor: Float[Array, " C"] | None = None

    @property
    def horizon(self) -> Float[Array, " C"]:
        """Time at which the plan ends."""
        return self.begin[:, -1] + self.duration[:, -1]

    @property
    def last(self) -> int:
        """Index of the last segment."""
        return self.duration.shape[1] - 1

    def state(self, dynamics: Dynamics, segment: Int[Array, " C"], offset: Float[Array, " C"]):
        """Position and velocity at ``offset`` after the start of ``segment``."""
        return dynamics.flow.move(pick(self.start, segment), pick(self.velocity, segment), offset)

    def restricted(self, columns: Int[Array, " k"]) -> "Path":
        """The same path of some coordinates."""
        return dataclasses.replace(self, start=self.start[..., columns], velocity=self.velocity[..., columns])

    def at(self, table: Float[Array, "C S"], segment: Int[Array, " C"]) -> Float[Array, " C"]:
        """Entry of a segment table for each chain."""
        return pick(table, jnp.minimum(segment, self.last))


def follow(dynamics: Dynamics, plan: Plan) -> Path:
    """The path that a plan describes."""
    begin = jnp.concatenate([jnp.zeros_like(plan.duration[:, :1]), jnp.cumsum(plan.duration, 1)[:, :-1]], 1)
    if plan.duration.shape[1] == 1:
        return Path(plan.number, plan.start[:, None], plan.velocity, begin, plan.duration, plan.share)

    def segment(a, leg):
        velocity, duration = leg
        return dynamics.flow.move(a, velocity, duration)[0], a

    legs = (jnp.swapaxes(plan.velocity, 0, 1), plan.duration.T)
    _, starts = jax.lax.scan(segment, plan.start, legs)
    return Path(plan.number, jnp.swapaxes(starts, 0, 1), plan.velocity, begin, plan.duration, plan.share)


class Walk(eqx.Module):
    """Progress of one site along the plans of all chains.

    Attributes
    ----------
    segment, offset : (C,)
        The present position: ``offset`` after the start of ``segment``.
    draws : (C,)
        How many times this plan has drawn randomness; with the plan's number it keys the next draw.
    done, rang, time, mark, normal
        The answer, once ``done``; ``normal`` has no columns for flips.
    passes : (C,)
        Passes over the records so far, over all plans.
    fault : (C,)
        Zero, or why the walk cannot go on.
    """

    segment: Int[Array, " C"]
    offset: Float[Array, " C"]
    draws: Int[Array, " C"]
    done: Bool[Array, " C"]
    rang: Bool[Array, " C"]
    time: Float[Array, " C"]
    mark: Int[Array, " C"]
    normal: Float[Array, "C n"]
    passes: Int[Array, " C"]
    fault: Int[Array, " C"]

    @classmethod
    def idle(cls, dynamics: Dynamics, chains: int, dim: int) -> "Walk":
        """A walk that has answered everything: it waits for plans."""
        zeros, count = jnp.zeros(chains), jnp.zeros(chains, int)
        true = jnp.ones(chains, bool)
        normal = jnp.zeros((chains, 0 if dynamics.flips else dim))
        return cls(count, zeros, count, true, ~true, zeros, count, normal, count, count)

    def restart(self, new: Bool[Array, " C"], path: Path) -> "Walk":
        """Start again on the chains that have a new plan; a plan of length zero is answered at once."""
        fresh = {"segment": 0, "offset": 0.0, "draws": 0, "done": path.horizon <= 0, "rang": False, "time": 0.0}
        fresh |= {"mark": 0, "fault": FINE}
        return dataclasses.replace(self, **{k: jnp.where(new, x, getattr(self, k)) for k, x in fresh.items()})

    def moved(self, path: Path, segment, offset, over, mark, fault: Int[Array, " C"] | int = FINE) -> "Walk":
        """The walk after one draw: here, or at the end of the plan if it is over or cannot go on."""
        fault = jnp.broadcast_to(fault, self.fault.shape)
        return dataclasses.replace(
            self, segment=segment, offset=offset, draws=self.draws + 1, done=over | (fault != FINE), time=path.horizon,
            mark=mark, fault=fault,
        )  # fmt: skip

    def decided(self, path: Path, accepted, fault, normal=None, passes: int = 1) -> "Walk":
        """The walk after a decision about its candidate: done if the candidate is accepted or there is a fault."""
        time = jnp.where(accepted, time_of(path, self), self.time)
        normal = self.normal if normal is None else jnp.where(accepted[:, None], normal, self.normal)
        return dataclasses.replace(
            self, done=self.done | accepted | (fault != FINE), rang=accepted, time=time, normal=normal,
            passes=self.passes + passes, fault=fault,
        )  # fmt: skip

    def drawn(self, path: Path, step, ends, accepted, mark, broken, normal=None, passes: int = 1) -> "Walk":
        """The walk after a draw that is decided at once: at its candidate, or where it goes without one."""
        moved = self.moved(path, *advance(path, self.segment, self.offset, step, ends), mark)
        return moved.decided(path, accepted, jnp.where(broken, NOT_FINITE, FINE), normal, passes)

    def arrival(self, dynamics: Dynamics) -> Arrival:
        """The answer; where there was no event there is no mark either."""
        mark = jnp.where(self.rang, self.mark, 0) if dynamics.flips else jnp.where(self.rang[:, None], self.normal, 0.0)
        return Arrival(self.time, self.rang, mark)


class CandidateWalk(eqx.Module):
    """A walk that may be at a candidate which the exact rate has to decide.

    Attributes
    ----------
    waiting : (C,)
        Whether it is.
    ceiling, threshold : (C,)
        The bound at the candidate, and the level that the rate must exceed for it to be accepted.
    least, most : (C,), optional
        The squeeze of the rate that was claimed there.
    """

    walk: Walk
    waiting: Bool[Array, " C"]
    ceiling: Float[Array, " C"]
    threshold: Float[Array, " C"]
    least: Float[Array, " C"] | None
    most: Float[Array, " C"] | None

    @classmethod
    def idle(cls, dynamics: Dynamics, chains: int, dim: int, squeezed: bool = True, **others: Any):
        """A walk that waits for plans."""
        zeros = jnp.zeros(chains)
        squeeze = (zeros, zeros) if squeezed else (None, None)
        return cls(Walk.idle(dynamics, chains, dim), jnp.zeros(chains, bool), zeros, zeros, *squeeze, **others)

    @property
    def squeeze(self) -> tuple[Float[Array, " C"], Float[Array, " C"]] | None:
        """The least and the most that the rate can be, where they are claimed."""
        return None if self.least is None or self.most is None else (self.least, self.most)

    def restart(self: CW, new: Bool[Array, " C"], path: Path) -> CW:
        """Start again on the chains that have a new plan."""
        return dataclasses.replace(self, walk=self.walk.restart(new, path), waiting=self.waiting & ~new)


def time_of(path: Path, walk: Walk) -> Float[Array, " C"]:
    """The time that a walk has reached in its plan."""
    return path.at(path.begin, walk.segment) + walk.offset


def reached(path: Path, walk: Walk) -> Float[Array, " C"]:
    """The time before which a walk has no event: that of its event, if it is known; infinite if it has none."""
    return jnp.where(walk.done, jnp.where(walk.rang, walk.time, jnp.inf), time_of(path, walk))


def accept(
    threshold: Float[Array, " C"],
    rate: Float[Array, " C"],
    ceiling: Float[Array, " C"],
    finite: Bool[Array, " C"],
    squeeze: tuple[Float[Array, " C"], Float[Array, " C"]] | None = None,
    candidate: Bool[Array, " C"] | bool = True,
) -> tuple[Bool[Array, " C"], Int[Array, " C"]]:
    """Whether candidates are accepted, given their exact rates, and the faults.

    A candidate is accepted where its threshold, uniform below the ceiling, lies below the rate. A rate above the ceiling,
    or outside the squeeze that was claimed for it, is a fault, because then earlier candidates had the wrong law.
    """
    known = rate <= ceiling
    if squeeze is not None:
        known &= (rate >= squeeze[0]) & (rate <= squeeze[1])
    fault = jnp.where(finite, jnp.where(known | ~jnp.asarray(candidate), FINE, VIOLATED), NOT_FINITE)
    return candidate & (threshold < rate) & (fault == FINE), fault


def advance(path: Path, segment, offset, step, ends_segment):
    """Move on by ``step``; at the end of a segment go to the start of the next.

    Also returns whether the walk is over: at the end of the plan, or beyond its cap.
    """
    moved = jnp.where(ends_segment, 0.0, offset + step)
    following = segment + ends_segment
    began = path.at(path.begin, following)
    over = ends_segment & ((segment >= path.last) | (began >= path.horizon))
    if path.cap is not None:
        over |= began + moved > path.cap
    return following, moved, over


W = TypeVar("W")


class Clock(eqx.Module, Generic[W]):
    """Finds the first arrival of one potential along plans."""

    potential: AbstractVar[Potential]
    dynamics: AbstractVar[Dynamics]

    @property
    def dim(self) -> int:
        """Number of whitened coordinates that the potential sees."""
        return self.potential.dim

    @property
    def name(self) -> str:
        """What reports call it: its envelope, if it has one."""
        envelope = getattr(self, "envelope", None)
        return type(self if envelope is None else envelope).__name__

    @property
    def domain(self) -> str:
        """How event times are drawn, in words."""
        envelope = getattr(self, "envelope", None)
        return "bounds on cells of the path" if envelope is None else envelope.domain

    @property
    def marks(self) -> int:
        """Kinds of events: one for each coordinate's flip, or one reflection."""
        return self.dim if self.dynamics.flips else 1

    @abc.abstractmethod
    def idle(self, chains: int) -> W:
        """The state of a walk that waits for its first plan."""

    @abc.abstractmethod
    def restart(self, state: W, new: Bool[Array, " C"], path: Path) -> W:
        """Start on the chains that have a new plan."""

    @abc.abstractmethod
    def step(self, state: W, path: Path, keys: ChainKeys) -> W:
        """Walk on, on every chain that is not done."""

    def decide(self, state: CW, path: Path) -> CW:
        """The exact rate at the candidates that wait for it: one pass over the records."""
        walk, flips = state.walk, self.dynamics.flips
        a, v = path.state(self.dynamics, walk.segment, walk.offset)
        gradient, rates = exact_rates(self.dynamics, self.potential, a, v)
        rate = pick_mark(rates, walk.mark)
        finite = jnp.isfinite(rate) & jnp.all(jnp.isfinite(gradient), -1)
        accepted, fault = accept(state.threshold, rate, state.ceiling, finite, state.squeeze)
        decided = walk.decided(path, accepted, fault, None if flips else unit(gradient))
        new = dataclasses.replace(state, walk=decided, waiting=jnp.zeros_like(accepted))
        return keep_done(~state.waiting, state, new)

    def walk(self, state: W) -> Walk:
        """The walk within the state."""
        return state.walk  # type: ignore[attr-defined]

    def reached(self, state: W, path: Path) -> Float[Array, " C"]:
        """The time of a plan before which there is no event: that of the event, once it is known; infinite if none is."""
        return reached(path, self.walk(state))

    def violations(self, state: W) -> Int[Array, "*sites C"]:
        """How often a rate was above a bound that is not certified. A rate above a certified bound is a fault."""
        return jnp.zeros_like(self.walk(state).fault)


def unit(g: Float[Array, "C d"]) -> Float[Array, "C d"]:
    """``g/|g|``, zero for zero."""
    length = jnp.linalg.norm(g, axis=-1, keepdims=True)
    return g / jnp.where(length > 0, length, 1.0)


def keep_done(done: Bool[Array, " C"], old, new):
    """The old state on the chains that are done, the new one elsewhere."""

    def pick(before, after):
        if before is after:
            return before
        return jnp.where(done.reshape(done.shape + (1,) * (before.ndim - 1)), before, after)

    return jax.tree.map(pick, old, new)


def pick_mark(rates: Shaped[Array, "C k"], mark: Int[Array, " C"]) -> Shaped[Array, " C"]:
    """Each chain's entry for its mark."""
    return jnp.take_along_axis(rates, mark[:, None], -1)[:, 0]


# Chains that are not done ----------------------------------------------------------------------------------------------


# Chains whose records are passed over together.
MOST_LANES, LEAST_LANES = 16, 8
# Chains in one batch: an eighth of them, within these limits.
MOST_SERVED = 64

S = TypeVar("S")


def lane_count(chains: int) -> int:
    """How many chains are walked at a time: enough to fill vectors, few enough to stay in the cache."""
    return min(chains, max(LEAST_LANES, min(MOST_LANES, chains // 4)))


def in_lanes(step: Callable[[Any, Any, Any], Any], state: Any, path: Any, keys: Any) -> Any:
    """``step`` on some of the chains that are not done. The state holds a ``walk``, and arrays with a row for each chain.

    ``path`` and ``keys`` have rows for the chains too. The chains with the fewest passes so far are taken, so that with
    short plans no chain waits until others have reached the end of the block.
    """
    walk = state.walk
    chains = walk.done.shape[0]
    lanes = lane_count(chains)
    if lanes == chains:
        return step(state, path, keys)
    _, index = jax.lax.top_k(jnp.where(walk.done, jnp.iinfo(walk.passes.dtype).min, -walk.passes), lanes)
    index = jnp.where(walk.done[index], chains, index)
    some = gathered(index, (state, path, keys))
    some = eqx.tree_at(lambda s: s[0].walk.done, some, some[0].walk.done | (index >= chains))
    return scattered(index, state, some[0], step(*some))


def first_of(which: Bool[Array, " C"]) -> Int[Array, " C"]:
    """The places of these chains, in order; the number of chains in place of all others.

    By a sort: the sums of ``jnp.nonzero`` are twenty kernels to compile.
    """
    chains = which.shape[0]
    return jnp.sort(jnp.where(which, jnp.arange(chains), chains))


def gathered(index: Int[Array, " L"], rows: S) -> S:
    """Some rows of all arrays, the last one in place of those beyond it."""
    return jax.tree.map(lambda x: x.at[index].get(mode="clip"), rows)


def scattered(index: Int[Array, " L"], old: S, some: S, new: S) -> S:
    """The old rows with the new ones in their places; ``some`` are those that were gathered.

    Arrays that are still the gathered ones are the old ones. Each chain looks up its new row: a row that is written to its
    place is another kernel, or a loop, to compile.
    """
    chains = jax.tree.leaves(old)[0].shape[0]
    own = index[:, None] == jnp.arange(chains)
    place = jnp.sum(jnp.where(own, jnp.arange(1, index.shape[0] + 1)[:, None], 0), 0)

    def put(before, gathered, after):
        if gathered is after:
            return before
        fresh = (place > 0).reshape(chains, *(1,) * (before.ndim - 1))
        return jnp.where(fresh, after.at[place - 1].get(mode="clip"), before)

    return jax.tree.map(put, old, some, new)


def in_turns(
    function: Callable[[Any], Shaped[Array, "L n"]], which: Bool[Array, " C"], rows: Any, width: int
) -> Float[Array, "C n"]:
    """``function`` of the rows of these chains, some at a time; zeros for the others.

    It gathers few arrays and writes one back, because each of them adds a kernel to compile.
    """
    chains = which.shape[0]
    lanes = lane_count(chains)
    # These chains first; all others are beyond the last row, which ends the loop: a sum is three kernels to compile.
    order = jnp.pad(first_of(which), (0, lanes), constant_values=chains)

    def some(carry):
        turn, out = carry
        index = jax.lax.dynamic_slice(order, (turn * lanes,), (lanes,))
        return turn + 1, out.at[index].set(function(gathered(index, rows)), mode="drop")

    start = (jnp.zeros((), order.dtype), jnp.zeros((chains, width)))
    return jax.lax.while_loop(lambda carry: order[carry[0] * lanes] < chains, some, start)[1]


def enough(which: Bool[Array, "k C"], moving: Bool[Array, " C"]) -> Bool[Array, "k C"]:
    """Of several kinds of chains those that fill a batch, or that few others are moving to join; else none of the kind."""
    counts = jnp.sum(jnp.concatenate([which, moving[None]]), 1)
    full = counts[:-1] >= jnp.minimum(lane_count(which.shape[1]), 1 + counts[-1] // LEAST_LANES)
    return which & full[:, None]


def served(decide: Callable[[CW, Any], CW], state: CW, path: Any) -> CW:
    """``decide`` on the waiting chains in batches, as long as there are enough of them."""
    chains = state.walk.done.shape[0]
    lanes = min(chains, max(LEAST_LANES, min(MOST_SERVED, chains // LEAST_LANES)))

    def due(now):
        # If most chains wait for other sites, few are left that could join a batch.
        moving = jnp.sum(~(now.waiting | now.walk.done))
        return jnp.sum(now.waiting) >= jnp.minimum(lanes, 1 + moving // LEAST_LANES)

    def serve(now):
        # Those that had the fewest passes.
        passes, waiting = now.walk.passes, now.waiting
        _, index = jax.lax.top_k(jnp.where(waiting, -passes, jnp.iinfo(passes.dtype).min), lanes)
        index = jnp.where(waiting[index], index, chains)
        some, its_path = gathered(index, (now, path))
        return scattered(index, now, some, decide(some, its_path))

    return jax.lax.while_loop(due, serve, state)


# Walking along plans ---------------------------------------------------------------------------------------------------


TIME_GRID = 2.0**-32  # of process time: the spacing of the times that a site reveals


def holding(clock: Clock, share: Float[Array, " C"] | None) -> Clock:
    """The clock of a site that holds this part of the prior on each chain; itself where the prior is not redistributed.

    A clock may start a plan with rates that it found at the end of the one before. An event ended that plan, so the parts
    are the same: they change at horizons, where nothing has been evaluated.
    """
    return clock if share is None else eqx.tree_at(lambda c: c.potential, clock, clock.potential.with_share(share))


def answer(clock: Clock, keys: ChainKeys, plan: Plan) -> tuple[Arrival, Walk]:
    """Walk a plan to the end on every chain: the site's whole part in a round."""
    path, clock = follow(clock.dynamics, plan), holding(clock, plan.share)
    state = clock.restart(clock.idle(plan.start.shape[0]), jnp.ones(plan.start.shape[0], bool), path)
    state = jax.lax.while_loop(lambda s: jnp.any(~clock.walk(s).done), lambda s: clock.step(s, path, keys), state)
    walk = clock.walk(state)
    arrival = walk.arrival(clock.dynamics)
    return reveal(clock, keys, plan.number, arrival) if clock.dynamics.draws else arrival, walk


def reveal(clock: Clock, keys: ChainKeys, number: Int[Array, " C"], arrival: Arrival) -> Arrival:
    """An arrival as it leaves a site: on the public grid of times, with a velocity that is drawn in place of a normal."""
    if not clock.dynamics.draws:
        return Arrival(on_grid(arrival), arrival.rang, arrival.mark)
    return Arrival(on_grid(arrival), arrival.rang, draw_bounce(keys, number, arrival.mark, arrival.rang))


def reveal_first(
    arrivals: Arrival, keys: UInt32[Array, "M C words"], number: Int[Array, " C"], which: Bool[Array, " C"]
) -> Arrival:
    """The arrivals of M sites as they would be revealed, with the velocity of the earliest one only, on some chains."""
    time = on_grid(arrivals)
    first = jnp.argmin(jnp.where(arrivals.rang, time, jnp.inf), 0)
    key, normal, rang = (pick(jnp.swapaxes(x, 0, 1), first) for x in (keys, arrivals.mark, arrivals.rang))
    velocity = draw_bounce(key, number, normal, rang & which)
    return Arrival(time, arrivals.rang, jnp.broadcast_to(velocity, arrivals.mark.shape))


def on_grid(arrival: Arrival) -> Float[Array, "*M C"]:
    """The times, those of events rounded down to a multiple of `TIME_GRID`.

    The probability of each value is that of its cell, positive whatever the records are. Times as they are computed have
    last bits that are a function of the records. The grid is as far below the scale of the process as rounding errors are.
    """
    return jnp.where(arrival.rang, jnp.floor(arrival.time / TIME_GRID) * TIME_GRID, arrival.time)


def begin_walk(clock: Clock[W], plan: Plan) -> W:
    """A walk at the start of a plan."""
    path, chains = follow(clock.dynamics, plan), plan.start.shape[0]
    return clock.restart(clock.idle(chains), jnp.ones(chains, bool), path)


def walk_on(clock: Clock[W], keys: ChainKeys, state: W, plan: Plan, steps: Int[Array, ""]) -> tuple[W, Bool[Array, ""]]:
    """At most so many steps more of a walk, and whether it is at its end."""
    path = follow(clock.dynamics, plan)

    def going(carry):
        return jnp.any(~clock.walk(carry[1]).done) & (carry[0] < steps)

    _, state = jax.lax.while_loop(
        going, lambda carry: (carry[0] + 1, clock.step(carry[1], path, keys)), (jnp.zeros_like(steps), state)
    )
    return state, ~jnp.any(~clock.walk(state).done)
