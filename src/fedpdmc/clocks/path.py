"""A walk along a plan: how far a site has come on every chain, and what it has found."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from fedpdmc.dynamics import Dynamics
from fedpdmc.plan import Arrival, Plan

FINE, VIOLATED, NOT_FINITE = 0, 1, 2


def pick(table: Shaped[Array, "C S ..."], index: Int[Array, " C"]) -> Shaped[Array, "C ..."]:
    """Each chain's entry of a table along its second axis."""
    if table.shape[1] == 1:
        return table[:, 0]
    return table[jnp.arange(table.shape[0]), index]


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

    def restricted(self, columns: Int[Array, " k"]) -> Path:
        """The same path of some coordinates."""
        return eqx.tree_at(
            lambda p: (p.start, p.velocity), self, (self.start[..., columns], self.velocity[..., columns])
        )

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
    def idle(cls, dynamics: Dynamics, chains: int, dim: int) -> Walk:
        """A walk that has answered everything: it waits for plans."""
        zeros, count = jnp.zeros(chains), jnp.zeros(chains, int)
        true = jnp.ones(chains, bool)
        normal = jnp.zeros((chains, 0 if dynamics.flips else dim))
        return cls(count, zeros, count, true, ~true, zeros, count, normal, count, count)

    def restart(self, new: Bool[Array, " C"], path: Path) -> Walk:
        """Start again on the chains that have a new plan; a plan of length zero is answered at once."""
        empty = path.horizon <= 0

        def pick(fresh, old):
            return jnp.where(new, fresh, old)

        return Walk(
            pick(0, self.segment),
            pick(0.0, self.offset),
            pick(0, self.draws),
            pick(empty, self.done),
            pick(False, self.rang),
            pick(0.0, self.time),
            pick(0, self.mark),
            self.normal,
            self.passes,
            pick(0, self.fault),
        )

    def moved(self, path: Path, segment, offset, over, mark, fault: Int[Array, " C"] | int = FINE) -> Walk:
        """The walk after one draw: here, or at the end of the plan if it is over or cannot go on."""
        fault = jnp.broadcast_to(fault, self.fault.shape)
        return eqx.tree_at(
            lambda w: (w.segment, w.offset, w.draws, w.done, w.time, w.mark, w.fault),
            self,
            (segment, offset, self.draws + 1, over | (fault != FINE), path.horizon, mark, fault),
        )

    def decided(self, path: Path, accepted, fault, normal=None, passes: int = 1) -> Walk:
        """The walk after a decision about its candidate: done if the candidate is accepted or there is a fault."""
        time = jnp.where(accepted, path.at(path.begin, self.segment) + self.offset, self.time)
        normal = self.normal if normal is None else jnp.where(accepted[:, None], normal, self.normal)
        return eqx.tree_at(
            lambda w: (w.done, w.rang, w.time, w.normal, w.passes, w.fault),
            self,
            (accepted | (fault != FINE), accepted, time, normal, self.passes + passes, fault),
        )

    def arrival(self, dynamics: Dynamics) -> Arrival:
        """The answer; where there was no event there is no mark either."""
        mark = jnp.where(self.rang, self.mark, 0) if dynamics.flips else jnp.where(self.rang[:, None], self.normal, 0.0)
        return Arrival(self.time, self.rang, mark)


def time_of(path: Path, walk: Walk) -> Float[Array, " C"]:
    """The time that a walk has reached in its plan."""
    return path.at(path.begin, walk.segment) + walk.offset


def reached(path: Path, walk: Walk) -> Float[Array, " C"]:
    """The time before which a walk has no event: that of its event, if it is known; infinite if it has none."""
    return jnp.where(walk.done, jnp.where(walk.rang, walk.time, jnp.inf), time_of(path, walk))


def judged(
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
