"""Thinning in stages: on constants of segments, then on a bound at a point, and only then on the records."""

from __future__ import annotations

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fedpdmc._jax.random_streams import exponentials, uniforms
from fedpdmc.clocks.base import Clock, keep_done, pick_mark, unit
from fedpdmc.clocks.closed_form import affine_clock
from fedpdmc.clocks.envelopes.base import SegmentEnvelope, cell_length
from fedpdmc.clocks.envelopes.quadratic_rate_bound import signed_rates
from fedpdmc.clocks.path import FINE, NOT_FINITE, VIOLATED, Path, Walk, advance, judged, pick
from fedpdmc.clocks.unfinished_chains import in_lanes, lane_count
from fedpdmc.dynamics import Dynamics
from fedpdmc.potentials import Potential, Program, records_of

# The most candidates of one step: far out in the tails the constants are large and candidates many.
MOST_EVALUATIONS = 256
# Numbers in the design above which a pass costs so much that it waits for the whole batch.
LARGE = 2**16
# Binary digits of the constants on a rotation, and of their integrals.
RATE_DIGITS, INTEGRAL_DIGITS = 10, 20


class Hazard(NamedTuple):
    """A rate that is constant on every segment of a plan, and its integral up to the end of each.

    Both are rounded up to few digits, the integral by segment, so that programs that differ in the last bits get the same
    numbers. An integral that is too large for its segment reaches points beyond the end, where nothing happens.
    """

    rate: Float[Array, "C S"]
    integral: Float[Array, "C S"]

    @classmethod
    def of(cls, rate: Float[Array, "C S"], duration: Float[Array, "C S"]) -> Hazard:
        """The hazard from bounds of the rates and the lengths of the segments."""
        rate = rounded_up(rate, RATE_DIGITS)
        return cls(rate, jnp.cumsum(rounded_up(rate * duration, INTEGRAL_DIGITS), -1))

    def before(self, segment: Int[Array, " C"]) -> Float[Array, " C"]:
        """The integral up to the start of a segment."""
        return jnp.where(segment > 0, pick(self.integral, jnp.maximum(segment - 1, 0)), 0.0)

    def where(self, level: Float[Array, " C"]) -> tuple[Int[Array, " C"], Float[Array, " C"], Bool[Array, " C"]]:
        """Segment and offset at which the integral is ``level``, and whether the plan ends before."""
        segment = jnp.sum(self.integral <= level[:, None], -1)
        over = segment >= self.rate.shape[-1]
        within = jnp.where(over, 0, segment)
        offset = (level - self.before(within)) / pick(self.rate, within)
        return segment, jnp.where(over, 0.0, offset), over


def rounded_up(x: Float[Array, "*shape"], digits: int) -> Float[Array, "*shape"]:
    """The next larger number of so many binary digits; zero and what is not finite as they are."""
    spare = jnp.uint64(52 - digits)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint64)
    larger = jax.lax.bitcast_convert_type(((bits >> spare) + jnp.uint64(1)) << spare, jnp.float64)
    return jnp.where((x > 0) & (x < jnp.inf), larger, x)


class Candidate(NamedTuple):
    """Where the next candidate of the constants is, or where the walk goes without one.

    ``rates`` are the constants by mark, ``total`` the rate with which the candidate was drawn, at least their sum; ``far``
    is true if the walk stops at the start of a segment without a constant.
    """

    segment: Int[Array, " C"]
    offset: Float[Array, " C"]
    hit: Bool[Array, " C"]
    over: Bool[Array, " C"]
    rates: Float[Array, "C k"]
    total: Float[Array, " C"]
    level: Float[Array, " C"]
    far: Bool[Array, " C"]


class SegmentWalk(eqx.Module):
    """A walk at a candidate that the envelope could not reject, or one that has yet to find such a candidate.

    Attributes
    ----------
    level : (C,)
        On rotations, the integral of the constant bounds up to the present position.
    pending : (C,)
        Whether the walk is at such a candidate, which the records have to decide.
    ceiling, threshold : (C,)
        The envelope's bound at the candidate, and the level that the rate must exceed for it to be accepted.
    """

    walk: Walk
    level: Float[Array, " C"]
    pending: Bool[Array, " C"]
    ceiling: Float[Array, " C"]
    threshold: Float[Array, " C"]


class SegmentClock(Clock[SegmentWalk]):
    """Potentials that are small after their quadratic control variate.

    A candidate comes from constants: on a rotation ``|a|² + |v|²`` is conserved, so that one number bounds the rate on a
    whole segment, and the candidates of a whole plan are found by inverting their integral; on a line constants hold on a
    cell. A candidate is kept with probability envelope over constant, without the records, and then accepted with
    probability rate over envelope, in one pass over the records for all chains that wait for it.

    Attributes
    ----------
    limit : (), optional
        On rotations with a program: segments on which the constant is larger, or none is known, are walked in cells.
    """

    potential: Potential
    dynamics: Dynamics
    envelope: SegmentEnvelope
    limit: Float[Array, ""] | None = None

    def idle(self, chains):
        """A walk that waits."""
        zeros = jnp.zeros(chains)
        walk = Walk.idle(self.dynamics, chains, self.dim)
        return SegmentWalk(walk, zeros, jnp.zeros(chains, bool), zeros, zeros)

    def restart(self, state, new, path):
        """Start on new plans."""
        walk, level = state.walk.restart(new, path), jnp.where(new, 0.0, state.level)
        return SegmentWalk(walk, level, state.pending & ~new, state.ceiling, state.threshold)

    def step(self, state, path, keys):
        """Search for candidates on some chains until most of them have one or are done; then one pass over the records.

        Chains are served in batches, so that finished ones cost nothing. Chains on segments without a constant wait until
        there are enough of them, or no others.
        """
        if self.limit is None:
            return in_lanes(self._near, state, path, keys)
        walk, place = state.walk, jnp.minimum(state.walk.segment, path.last)
        here = (pick(table, place) for table in (path.start, path.velocity, path.duration))
        far = self._is_far(jnp.sum(self.envelope.constants(self.dynamics, *here)[0], -1)) & ~state.pending
        near, away = ~walk.done & ~far, ~walk.done & far
        due = (jnp.sum(away) >= lane_count(walk.done.shape[0])) | ~jnp.any(near)
        state = _some(self._near, state, path, keys, near)
        return jax.lax.cond(due, lambda s: _some(self._far, s, path, keys, away), lambda s: s, state)

    def _hazard(self, path: Path) -> tuple[Hazard, Bool[Array, "C S"]]:
        """The constant bounds of every segment of rotating plans, zero where there is none, and which segments have none."""
        rates, _ = self.envelope.constants(self.dynamics, path.start, path.velocity, path.duration)
        rate = jnp.sum(rates, -1)
        far = self._is_far(rate) & (path.duration > 0)
        return Hazard.of(jnp.where(far, 0.0, rate), path.duration), far

    def _is_far(self, rate: Float[Array, "*C"]) -> Bool[Array, "*C"]:
        return jnp.zeros(rate.shape, bool) if self.limit is None else ~(rate <= self.limit)

    def _near(self, state: SegmentWalk, path: Path, keys) -> SegmentWalk:
        """Search until no chain of the batch searches or, if a pass is cheap, until three in four of them wait for it."""
        records = records_of(self.potential)
        cheap = records is None or records.design.size <= LARGE
        hazard, stops = None, None
        if self.dynamics.flow.rotating:
            hazard, far = self._hazard(path)
            if self.limit is not None:
                # For every segment the first far one from there on, or one beyond the last.
                places = jnp.where(far, jnp.arange(far.shape[1]), far.shape[1])
                stops = jax.lax.cummin(places, 1, reverse=True)

        def searching(carry):
            evaluations, now, stopped = carry
            without, waiting = jnp.sum(~(now.walk.done | now.pending | stopped)), jnp.sum(now.pending)
            return (evaluations < MOST_EVALUATIONS) & (without > 0) & (not cheap or 3 * without >= waiting)

        def evaluate(carry):
            evaluations, now, stopped = carry
            following, far = self._evaluated(now, path, hazard, stops, keys, stopped)
            return evaluations + 1, following, stopped | far

        start = (jnp.array(0), state, jnp.zeros_like(state.pending))
        _, state, _ = jax.lax.while_loop(searching, evaluate, evaluate(start))
        return self._inspect(state, path)

    def _evaluated(self, state: SegmentWalk, path: Path, hazard: Hazard | None, stops, keys, stopped):
        """One candidate of the constant bounds, thinned by the envelope."""
        walk = state.walk
        u = uniforms(keys, path.number, walk.draws, 4)
        level = state.level + exponentials(u[0])
        found = self._on_line(walk, path, level) if hazard is None else self._on_rotation(
            walk, path, level, hazard, stops
        )  # fmt: skip
        there, velocity = path.state(self.dynamics, jnp.minimum(found.segment, path.last), found.offset)
        total = jnp.cumsum(found.rates, -1)
        mark = jnp.sum(total < (u[1] * found.total)[:, None], -1)
        hit, mark = found.hit & (mark < total.shape[-1]), jnp.minimum(mark, total.shape[-1] - 1)
        bound = pick_mark(self.envelope.bound(self.dynamics, there, velocity), mark)
        constant = pick_mark(found.rates, mark)
        fault = jnp.where(hit & ~(bound <= constant), jnp.where(jnp.isfinite(bound), VIOLATED, NOT_FINITE), FINE)
        fault = jnp.where(jnp.isfinite(total[:, -1]) | found.over | found.far, fault, NOT_FINITE)
        moved = walk.moved(path, found.segment, found.offset, found.over, mark, fault)
        pending = hit & (u[2] * constant < bound) & (fault == FINE)
        still = walk.done | state.pending | stopped
        new = SegmentWalk(moved, found.level, pending, bound, u[3] * bound)
        return keep_done(still, state, new), found.far & ~still

    def _on_line(self, walk: Walk, path: Path, level) -> Candidate:
        """The next candidate of a cell of the present segment, or the end of the cell."""
        a, v = path.state(self.dynamics, walk.segment, walk.offset)
        remaining = path.at(path.duration, walk.segment) - walk.offset
        rates, cell = self.envelope.constants(self.dynamics, a, v, remaining)
        total = jnp.sum(rates, -1)
        wait = level / jnp.maximum(total, 1e-300)
        hit = wait < cell
        step, ends = jnp.where(hit, wait, cell), ~hit & (cell >= remaining)
        segment, offset, over = advance(path, walk.segment, walk.offset, step, ends)
        return Candidate(
            segment, offset, hit & ~over, over, rates, total, jnp.zeros_like(level), jnp.zeros_like(hit)
        )  # fmt: skip

    def _on_rotation(self, walk: Walk, path: Path, level, hazard: Hazard, stops) -> Candidate:
        """The next candidate of the whole plan: a constant holds on a segment, so their integral is inverted at once.

        A walk stops at the start of a far segment on its way.
        """
        segment, offset, over = hazard.where(level)
        far = jnp.zeros_like(over)
        if stops is not None:
            stop = pick(stops, jnp.minimum(walk.segment, path.last))
            far = stop < jnp.minimum(segment, path.last + 1)
            segment, offset, over = jnp.where(far, stop, segment), jnp.where(far, 0.0, offset), over & ~far
            level = jnp.where(far, hazard.before(jnp.minimum(segment, path.last)), level)
        within = jnp.minimum(segment, path.last)
        if path.cap is not None:
            over |= pick(path.begin, within) + offset > path.cap
        start, velocity = pick(path.start, within), pick(path.velocity, within)
        rates, _ = self.envelope.constants(self.dynamics, start, velocity, offset)
        hit = ~over & ~far & (offset <= pick(path.duration, within))
        return Candidate(segment, offset, hit, over, rates, pick(hazard.rate, within), level, far & ~over)

    def _inspect(self, state: SegmentWalk, path: Path) -> SegmentWalk:
        """One pass: the rate at the candidates."""
        walk = state.walk
        a, v = path.state(self.dynamics, walk.segment, walk.offset)
        gradient = self.potential.gradients(a)
        rate = pick_mark(signed_rates(self.dynamics, gradient, v), walk.mark)
        least = self.envelope.least(self.dynamics, a, v)
        squeeze = None if least is None else (pick_mark(least, walk.mark), state.ceiling)
        accepted, fault = judged(state.threshold, rate, state.ceiling, jnp.isfinite(rate), squeeze)
        decided = walk.decided(path, accepted, fault, None if self.dynamics.flips else unit(gradient))
        new = SegmentWalk(decided, state.level, jnp.zeros_like(accepted), state.ceiling, state.threshold)
        return keep_done(walk.done | ~state.pending, state, new)

    def _far(self, state: SegmentWalk, path: Path, keys) -> SegmentWalk:
        """A cell of a far segment, up to the first candidate of the program's own bound; constants begin at the next one."""
        assert isinstance(self.potential, Program)
        walk = state.walk
        a, v = path.state(self.dynamics, walk.segment, walk.offset)
        bound = self.potential.bound(True, False, a, v)
        remaining = path.at(path.duration, walk.segment) - walk.offset
        cell = jnp.minimum(remaining, jnp.minimum(bound.reach, cell_length(bound)))
        value, slope = bound.value[:, 0], (bound.slope + 0.5 * bound.curve * cell[:, None])[:, 0]
        u = uniforms(keys, path.number, walk.draws, 4)
        wait = affine_clock(value, slope, exponentials(u[0]))
        hit = wait < cell
        step, ends = jnp.where(hit, wait, cell), ~hit & (cell >= remaining)
        segment, offset, over = advance(path, walk.segment, walk.offset, step, ends)
        fault = jnp.where(jnp.isfinite(value + slope), FINE, NOT_FINITE)
        moved, ceiling = walk.moved(path, segment, offset, over, jnp.zeros_like(walk.mark), fault), value + slope * wait
        level = self._hazard(path)[0].before(jnp.minimum(segment, path.last))
        new = SegmentWalk(moved, level, hit & ~over & (fault == FINE), ceiling, u[3] * ceiling)
        return keep_done(walk.done, state, new)


def _some(step, state: SegmentWalk, path: Path, keys, ready: Bool[Array, " C"]) -> SegmentWalk:
    """``step`` on some of the chains that are ready, the others left as they are."""
    done = state.walk.done
    masked = eqx.tree_at(lambda s: s.walk.done, state, ~ready)
    found = in_lanes(step, masked, path, keys)
    return eqx.tree_at(lambda s: s.walk.done, found, jnp.where(ready, found.walk.done, done))
