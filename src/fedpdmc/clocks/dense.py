"""A clock that knows the rate of its records along a whole piece of a rotation from one product with their design."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fedpdmc._jax.random_streams import exponentials, uniforms
from fedpdmc.clocks.base import Clock, keep_done, unit
from fedpdmc.clocks.closed_form import affine_clock
from fedpdmc.clocks.envelopes.base import cell_length
from fedpdmc.clocks.envelopes.quadratic_rate_bound import evaluate
from fedpdmc.clocks.path import Path, Walk, advance, judged
from fedpdmc.clocks.superposed_candidates import CANDIDATES, DRAWN, Found, cells_of, first_candidate
from fedpdmc.clocks.unfinished_chains import served
from fedpdmc.dynamics import Dynamics
from fedpdmc.potentials import LinearPredictor
from fedpdmc.potentials.dense_rates import Curves, RecordCurves

# Candidates that the error may add to a piece.
MOST_ADDED = 4.0


class DenseWalk(eqx.Module):
    """A walk at the end of a piece, which may be a candidate that waits for the records."""

    walk: Walk
    waiting: Bool[Array, " C"]
    found: Found


class DenseClock(Clock[DenseWalk]):
    """Reflections of records on a rotation, by curves of their rates (`RecordCurves`) that are renewed on every piece.

    Attributes
    ----------
    curves : RecordCurves
    length : ()
        The longest piece.
    """

    potential: LinearPredictor
    dynamics: Dynamics
    curves: RecordCurves
    length: Float[Array, ""]

    @property
    def domain(self) -> str:
        """How event times are drawn."""
        return "a polynomial of time through all records with a proved error, then the records"

    def idle(self, chains):
        """A walk that waits."""
        zero, no = jnp.zeros(chains), jnp.zeros(chains, bool)
        found = Found(zero, no, no, jnp.zeros(chains, int), zero, zero, zero, zero)
        return DenseWalk(Walk.idle(self.dynamics, chains, self.dim), no, found)

    def restart(self, state, new, path):
        """Start on new plans."""
        return DenseWalk(state.walk.restart(new, path), state.waiting & ~new, state.found)

    def step(self, state, path, keys):
        """One piece on every chain that does not wait, then the records where enough chains wait for them."""
        state = self._walked(state, path, keys)
        return served(self.walk, state, path, lambda now: now.waiting, self._decided)

    def _walked(self, state: DenseWalk, path: Path, keys) -> DenseWalk:
        walk = state.walk
        a, v = path.state(self.dynamics, jnp.minimum(walk.segment, path.last), walk.offset)
        remaining = path.at(path.duration, walk.segment) - walk.offset
        length = jnp.minimum(remaining, self.length)
        curves = self.stacked(1).along(a.T, v.T, length)
        u = uniforms(keys, path.number, walk.draws, CANDIDATES * DRAWN)
        found = first_candidate(cells_of(curves, length), length, u)
        poor = is_poor(curves, length)
        found = jax.lax.cond(
            jnp.any(poor & ~walk.done),
            lambda: chosen(poor, second_order_candidate(self.dynamics, self.potential, a, v, remaining, u), found),
            lambda: found,
        )
        ends = ~found.hit & ~found.cut & (found.time >= remaining)
        segment, offset, over = advance(path, walk.segment, walk.offset, found.time, ends)
        moved = walk.moved(path, segment, offset, over, jnp.zeros_like(walk.mark))
        moved = eqx.tree_at(lambda w: w.passes, moved, moved.passes + 1)
        return keep_done(walk.done | state.waiting, state, DenseWalk(moved, found.hit & ~over, found))

    def _decided(self, state: DenseWalk, path: Path) -> DenseWalk:
        """The records at candidates: the rate in 64 bits, and the normal of the reflection."""
        walk, found = state.walk, state.found
        a, v = path.state(self.dynamics, walk.segment, walk.offset)
        accepted, fault, normal = decide(self.potential.gradients(a), v, found)
        decided = walk.decided(path, accepted, fault, normal)
        return keep_done(~state.waiting, state, DenseWalk(decided, jnp.zeros_like(accepted), found))

    def stacked(self, sites: int) -> RecordCurves:
        """The curves with an axis for sites."""
        return jax.tree.map(lambda x: x[None], self.curves) if sites == 1 else self.curves


def is_poor(curves: Curves, length: Float[Array, " C"]):
    """Where the errors add so many candidates that a bound from the records is better, or are not finite."""
    return ~(jnp.sum(curves.error, 0) * length <= MOST_ADDED)


def decide(gradient: Float[Array, "C d"], v: Float[Array, "C d"], found: Found):
    """Whether candidates are accepted, faults, and the normals: a sure acceptance is checked against its squeeze too."""
    rate = jnp.sum(gradient * v, -1)
    accepted, fault = judged(found.threshold, rate, found.ceiling, jnp.isfinite(rate), (found.least, found.most))
    return accepted, fault, unit(gradient)


def second_order_candidate(
    dynamics: Dynamics, potential: LinearPredictor, a: Float[Array, "C d"], v: Float[Array, "C d"], remaining, u
) -> Found:
    """The candidate of a cell that is bounded by a pass over the records in 64 bits; they decide it."""
    bound = evaluate(dynamics, potential, a, v, v).bound
    cell = jnp.minimum(remaining, jnp.minimum(bound.reach, cell_length(bound)))
    value, slope = bound.value[:, 0], bound.slope[:, 0] + 0.5 * bound.curve[:, 0] * cell
    wait = affine_clock(value, slope, exponentials(u[0]))
    hit = wait < cell
    time, ceiling, infinite = jnp.where(hit, wait, cell), value + slope * wait, jnp.full_like(cell, jnp.inf)
    # What is not finite goes to the records, where it is a fault.
    hit = hit | ~jnp.isfinite(value + slope)
    site = jnp.zeros(cell.shape, int)
    return Found(time, hit, ~hit & (cell < remaining), site, ceiling, u[1] * ceiling, -infinite, infinite)


def chosen(which: Bool[Array, " C"], one: Found, other: Found) -> Found:
    """``one`` on the chains where ``which`` is true, else ``other``."""
    return Found(*(jnp.where(which, x, y) for x, y in zip(one, other, strict=True)))
