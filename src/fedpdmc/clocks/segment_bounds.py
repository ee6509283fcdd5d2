"""Thinning in stages for controlled potentials: on constants, then on a tensor, and only then on the records."""

from __future__ import annotations

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from fedpdmc._jax.random_streams import exponentials, uniforms
from fedpdmc.clocks.base import Clock, keep_done, unit
from fedpdmc.clocks.batching import in_lanes
from fedpdmc.clocks.envelopes.second_order import RELATIVE_SLACK, signed_rates
from fedpdmc.clocks.path import FINE, NOT_FINITE, VIOLATED, Path, Walk, advance, pick
from fedpdmc.clocks.thinning import pick_mark
from fedpdmc.dynamics import Dynamics
from fedpdmc.potentials import CubicRemainder, LinearPredictor

# On a line the constants hold on a cell on which the distance grows by at most this much (posterior standard deviations).
CELL = 1.5
# A step never looks for longer than this: far out in the tails the constants are large and candidates many.
MOST_LOOKS = 256
# Numbers in the design above which a pass costs so much that it waits for every lane.
LARGE = 2**16
# Binary digits of the constants on a rotation, and of their integrals.
RATE_DIGITS, INTEGRAL_DIGITS = 10, 20
# What a look costs in passes over the records, roughly.
LOOK_COST = 0.02


class Hazard(NamedTuple):
    """A rate that is constant on every segment of a plan, and its integral up to the end of each.

    Both are rounded up to few digits, the integral by segment: what two programs compute that differ in the last bits comes
    out the same. An integral that is too large for its segment reaches points beyond the end, where nothing happens.
    """

    rate: Float[Array, "C S"]
    integral: Float[Array, "C S"]

    @classmethod
    def of(cls, rate: Float[Array, "C S"], duration: Float[Array, "C S"]) -> Hazard:
        """From bounds of the rates and the lengths of the segments."""
        rate = rounded_up(rate, RATE_DIGITS)
        return cls(rate, jnp.cumsum(rounded_up(rate * duration, INTEGRAL_DIGITS), -1))

    def where(self, level: Float[Array, " C"]) -> tuple[Int[Array, " C"], Float[Array, " C"], Bool[Array, " C"]]:
        """Segment and offset at which the integral is ``level``, and whether the plan ends before."""
        segment = jnp.sum(self.integral <= level[:, None], -1)
        over = segment >= self.rate.shape[-1]
        within = jnp.where(over, 0, segment)
        before = jnp.where(within > 0, pick(self.integral, within - 1), 0.0)
        return segment, jnp.where(over, 0.0, (level - before) / pick(self.rate, within)), over


def rounded_up(x: Float[Array, "*shape"], digits: int) -> Float[Array, "*shape"]:
    """The next larger number of so many binary digits; zero and what is not finite as they are."""
    spare = jnp.uint64(52 - digits)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint64)
    larger = jax.lax.bitcast_convert_type(((bits >> spare) + jnp.uint64(1)) << spare, jnp.float64)
    return jnp.where((x > 0) & (x < jnp.inf), larger, x)


class StagedWalk(eqx.Module):
    """A walk that stands at a candidate which the tensor could not reject, or has yet to find one.

    Attributes
    ----------
    pending : (C,)
        Whether the walk stands at such a candidate: its records are due.
    ceiling, threshold : (C,)
        The tensor's bound at the candidate, and the level that the rate must exceed for it to be accepted.
    level : (C,)
        On rotations, the integral of the constant bounds up to where the walk stands.
    """

    walk: Walk
    level: Float[Array, " C"]
    pending: Bool[Array, " C"]
    ceiling: Float[Array, " C"]
    threshold: Float[Array, " C"]


class StagedClock(Clock[StagedWalk]):
    """The remainder of a potential after its quadratic control variate.

    A candidate comes from constants: on a rotation ``|a|² + |v|² = ρ²`` is conserved, so ``|b|`` is at most ``ρ`` plus the
    distance of the expansion point, on a whole segment. It is kept with probability tensor bound over constant, in O(d³),
    and then accepted with probability rate over tensor bound, in one pass over the records for all chains that wait for it.
    """

    potential: LinearPredictor
    remainder: CubicRemainder
    dynamics: Dynamics

    def usual_passes(self) -> float:
        """Work per unit of time where the posterior is like the reference, in passes over the records.

        The mean tensor bound says how often the records are asked; looks are much cheaper, but not free.
        """
        rng = np.random.default_rng(0)
        a, v = rng.standard_normal((2, 256, self.dim))
        return float(_work(self, jnp.asarray(a), jnp.asarray(np.sign(v) if self.dynamics.unit_speed else v)))

    def idle(self, chains):
        """A walk that waits."""
        false, zeros = jnp.zeros(chains, bool), jnp.zeros(chains)
        return StagedWalk(Walk.idle(self.dynamics, chains, self.dim), zeros, false, zeros, zeros)

    def walk(self, state):
        """The walk within."""
        return state.walk

    def restart(self, state, new, path):
        """Set out."""
        walk, level = state.walk.restart(new, path), jnp.where(new, 0.0, state.level)
        return StagedWalk(walk, level, state.pending & ~new, state.ceiling, state.threshold)

    def step(self, state, path, keys):
        """Look for candidates on some chains until most of them have one or are done; then one pass over the records.

        Chains take turns in a few lanes, so that those that are done cost nothing.
        """
        return in_lanes(self._step, state, path, keys)

    def _step(self, state, path, keys):
        """Look until no lane searches or, where a pass is cheap, until three of four that can ask for it do."""
        cheap = self.potential.design.size <= LARGE
        hazard = self._hazard(path) if self.dynamics.flow.rotating else None

        def searching(carry):
            looks, now = carry
            without, waiting = jnp.sum(~(now.walk.done | now.pending)), jnp.sum(now.pending)
            return (looks < MOST_LOOKS) & (without > 0) & (not cheap or 3 * without >= waiting)

        def look(carry):
            return carry[0] + 1, self._look(carry[1], path, hazard, keys)

        _, state = jax.lax.while_loop(searching, look, look((jnp.array(0), state)))
        return self._inspect(state, path)

    def _hazard(self, path: Path) -> Hazard:
        """The constant bounds of every segment of rotating plans."""
        rates, _ = self._constants(path.start, path.velocity, path.duration)
        return Hazard.of(jnp.sum(rates, -1), path.duration)

    def _constants(self, a, v, remaining):
        """Bounds of the rates by mark that hold for a while, and for how long."""
        flips, rotating = self.dynamics.flips, self.dynamics.flow.rotating
        distance = jnp.linalg.norm(self.remainder.center)
        if rotating:
            size, cell = jnp.sqrt(jnp.sum(a**2 + v**2, -1)) + distance, remaining
            speed = jnp.hypot(a, v)
        else:
            pace = jnp.linalg.norm(v, axis=-1)
            cell = jnp.minimum(remaining, CELL / jnp.maximum(pace, 1e-300))
            size = jnp.linalg.norm(a - self.remainder.center, axis=-1) + pace * cell
            speed = jnp.abs(v)
        if flips:
            rates = speed * self.remainder.largest(size, True)
        elif rotating:
            # Over |b|² + |v|² ≤ ρ²: |b|²|v| ≤ 2ρ³/(3√3) and |b|³|v| ≤ 3√3ρ⁴/16.
            cubic = 0.5 * self.remainder.norm * 2 * size**3 / (3 * jnp.sqrt(3.0))
            rates = cubic[..., None] + size[..., None] * (3 * jnp.sqrt(3.0) / 16) * self.remainder.beyond(size, False)
        else:
            rates = jnp.linalg.norm(v, axis=-1, keepdims=True) * self.remainder.largest(size, False)
        return rates * (1 + 2 * RELATIVE_SLACK) + self._slack(size, speed), cell

    def _tensor_bound(self, a, v):
        """Bound of the rate of every mark at ``(a, v)``: to third order with the error of the rest, or sharper."""
        b, remainder, flips = a - self.remainder.center, self.remainder, self.dynamics.flips
        size = jnp.linalg.norm(b, axis=-1)
        speed = jnp.abs(v) if flips else jnp.linalg.norm(v, axis=-1, keepdims=True)
        signed = signed_rates(self.dynamics, remainder.gradient(b), v)
        bound = _ceiling(signed, jnp.abs(signed), speed * remainder.beyond(size, flips))
        if remainder.sharper is not None:
            fourth = signed_rates(self.dynamics, remainder.sharper.gradient(b), v)
            beyond = speed * remainder.sharper.beyond(size, remainder.growth, flips)
            bound = jnp.minimum(bound, _ceiling(signed + fourth, jnp.abs(signed) + jnp.abs(fourth), beyond))
        return bound + 0.5 * self._slack(size, v)

    def _slack(self, size, v):
        """Room for the rounding of sums over records, in units of the whitened rates."""
        scale = jnp.sum(jnp.abs(v), -1, keepdims=True) * (1 + size[..., None])
        return self.remainder.rounding * scale

    def _look(self, state: StagedWalk, path: Path, hazard: Hazard | None, keys) -> StagedWalk:
        """One candidate of the constant bounds, put to the tensor."""
        walk = state.walk
        u = uniforms(keys, path.number, walk.draws, 4)
        level = state.level + exponentials(u[0])
        if hazard is None:
            segment, offset, hit, over, rates, largest = self._on_line(walk, path, level)
        else:
            segment, offset, hit, over, rates, largest = self._on_rotation(hazard, path, level)
        there, velocity = path.state(self.dynamics, jnp.minimum(segment, path.last), offset)
        total = jnp.cumsum(rates, -1)
        mark = jnp.sum(total < (u[1] * largest)[:, None], -1)
        hit, mark = hit & (mark < total.shape[-1]), jnp.minimum(mark, total.shape[-1] - 1)
        bound, constant = pick_mark(self._tensor_bound(there, velocity), mark), pick_mark(rates, mark)
        fault = jnp.where(hit & ~(bound <= constant), jnp.where(jnp.isfinite(bound), VIOLATED, NOT_FINITE), FINE)
        fault = jnp.where(jnp.isfinite(total[:, -1]) | over, fault, NOT_FINITE)
        moved = eqx.tree_at(
            lambda w: (w.segment, w.offset, w.draws, w.done, w.time, w.mark, w.fault),
            walk,
            (segment, offset, walk.draws + 1, over | (fault != FINE), path.horizon, mark, fault),
        )
        pending = hit & (u[2] * constant < bound) & (fault == FINE)
        reached = state.level if hazard is None else level
        return keep_done(walk.done | state.pending, state, StagedWalk(moved, reached, pending, bound, u[3] * bound))

    def _on_line(self, walk: Walk, path: Path, level):
        """The next candidate of a cell of the present segment, or the end of the cell.

        Returns where that is, whether it is a candidate, whether the walk is over, the rates by mark and their sum.
        """
        a, v = path.state(self.dynamics, walk.segment, walk.offset)
        remaining = path.at(path.duration, walk.segment) - walk.offset
        rates, cell = self._constants(a, v, remaining)
        total = jnp.sum(rates, -1)
        wait = level / jnp.maximum(total, 1e-300)
        hit = wait < cell
        step, ends = jnp.where(hit, wait, cell), ~hit & (cell >= remaining)
        segment, offset, over = advance(path, walk.segment, walk.offset, step, ends)
        return segment, offset, hit & ~over, over, rates, total

    def _on_rotation(self, hazard: Hazard, path: Path, level):
        """The next candidate of the whole plan: a constant holds on a segment, so their integral is inverted at once.

        Returns what `_on_line` does, with the larger rate by which the candidate came in place of the sum.
        """
        segment, offset, over = hazard.where(level)
        within = jnp.minimum(segment, path.last)
        if path.cap is not None:
            over |= pick(path.begin, within) + offset > path.cap
        rates, _ = self._constants(pick(path.start, within), pick(path.velocity, within), offset)
        hit = ~over & (offset <= pick(path.duration, within))
        return segment, offset, hit, over, rates, pick(hazard.rate, within)

    def _inspect(self, state: StagedWalk, path: Path) -> StagedWalk:
        """One pass: the rate at the candidates."""
        walk = state.walk
        a, v = path.state(self.dynamics, walk.segment, walk.offset)
        gradient = self.potential.gradients(a)
        rate = pick_mark(signed_rates(self.dynamics, gradient, v), walk.mark)
        violated = ~(rate <= state.ceiling)
        fault = jnp.where(jnp.isfinite(rate), jnp.where(violated, VIOLATED, FINE), NOT_FINITE)
        accepted = (state.threshold < rate) & (fault == FINE)
        time = jnp.where(accepted, path.at(path.begin, walk.segment) + walk.offset, walk.time)
        normal = walk.normal if self.dynamics.flips else jnp.where(accepted[:, None], unit(gradient), walk.normal)
        inspected = eqx.tree_at(
            lambda w: (w.done, w.rang, w.time, w.normal, w.passes, w.fault),
            walk,
            (accepted | (fault != FINE), accepted, time, normal, walk.passes + 1, fault),
        )
        new = StagedWalk(inspected, state.level, jnp.zeros_like(accepted), state.ceiling, state.threshold)
        return keep_done(walk.done | ~state.pending, state, new)


@eqx.filter_jit
def _work(clock: StagedClock, a: Float[Array, "n d"], v: Float[Array, "n d"]) -> Float[Array, ""]:
    passes = jnp.mean(jnp.sum(clock._tensor_bound(a, v), -1))
    looks = jnp.mean(jnp.sum(clock._constants(a, v, jnp.full(a.shape[0], jnp.inf))[0], -1))
    return passes + LOOK_COST * looks


def _ceiling(signed: Float[Array, "C k"], terms: Float[Array, "C k"], beyond: Float[Array, "C k"]):
    """The positive part of a rate that is known up to ``beyond``, with room for the rounding of its terms."""
    return jnp.maximum(signed, 0.0) + RELATIVE_SLACK * terms + (1 + RELATIVE_SLACK) * beyond
