"""Poisson thinning under certified affine bounds on cells of the path."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fedpdmc._jax.random_streams import uniforms
from fedpdmc.clocks.base import Clock, affine_clocks, earliest, keep_done, unit
from fedpdmc.clocks.batching import in_lanes
from fedpdmc.clocks.envelopes.second_order import RateBound, look
from fedpdmc.clocks.path import FINE, NOT_FINITE, VIOLATED, Path, Walk, advance
from fedpdmc.dynamics import Dynamics
from fedpdmc.potentials import Potential, Program


class ThinnedWalk(eqx.Module):
    """A walk that stands at an anchor (rates known there), at a candidate, or where a pass is due.

    Attributes
    ----------
    anchored : (C,)
        Whether ``bound`` holds from ``(anchor_a, anchor_v)``, where the walk stands.
    candidate : (C,)
        Whether the walk stands at a candidate of coordinate ``walk.mark``.
    ceiling, threshold : (C,)
        The bound at the candidate, and the level that the rate must exceed for it to be accepted.
    """

    walk: Walk
    anchored: Bool[Array, " C"]
    candidate: Bool[Array, " C"]
    ceiling: Float[Array, " C"]
    threshold: Float[Array, " C"]
    bound: RateBound
    anchor_a: Float[Array, "C d"]
    anchor_v: Float[Array, "C d"]


class ThinnedClock(Clock[ThinnedWalk]):
    """Any potential that encloses its field.

    On a cell of length h the bound ``b + c s + ½ k s²`` lies below its chord, so ``(b + (c + ½ k h) s)_+`` dominates the
    rate and is inverted in closed form. A candidate of mark i is accepted with probability rate over bound; a rate above
    its bound is a fault. One pass over the records at a candidate serves to accept it and to start the next cell.

    For flips the pass looks ahead: it takes the velocity that the flip would give, so that if the flip is accepted and
    the next plan starts there, no pass is needed to start. What is drawn is the same either way.
    """

    potential: Potential
    dynamics: Dynamics

    def idle(self, chains):
        """A walk that waits."""
        k = self.dim if self.dynamics.flips else 1
        false, zeros, wide = jnp.zeros(chains, bool), jnp.zeros(chains), jnp.zeros((chains, k))
        state = jnp.full((chains, self.dim), jnp.nan)
        walk = Walk.idle(self.dynamics, chains, self.dim)
        return ThinnedWalk(walk, false, false, zeros, zeros, RateBound(wide, wide, wide, zeros), state, state)

    def walk(self, state):
        """The walk within."""
        return state.walk

    def restart(self, state, new, path):
        """Set out; a chain whose plan starts at the anchor, velocity included, has its first pass already."""
        a, v = path.start[:, 0], path.velocity[:, 0]
        at_anchor = jnp.all((a == state.anchor_a) & (v == state.anchor_v), -1)
        return eqx.tree_at(
            lambda s: (s.walk, s.anchored, s.candidate),
            state,
            (
                state.walk.restart(new, path),
                jnp.where(new, at_anchor, state.anchored),
                state.candidate & ~new,
            ),
        )

    def step(self, state, path, keys):
        """Draw where the rates are known, then pass over the records where they are not.

        Bounding a program costs so much that its chains take turns.
        """
        dear = any(isinstance(term, Program) for term in getattr(self.potential, "terms", (self.potential,)))
        return in_lanes(self._step, state, path, keys, fair=True) if dear else self._step(state, path, keys)

    def _step(self, state, path, keys):
        return self._inspect(draw(state, path, keys), path)

    def _inspect(self, state: ThinnedWalk, path: Path) -> ThinnedWalk:
        """One pass: the rates where the walk stands, to accept or reject a candidate and to start a cell."""
        walk, flips = state.walk, self.dynamics.flips
        a, v = path.state(self.dynamics, walk.segment, walk.offset)
        ahead = self.dynamics.jump(v, jnp.where(state.candidate, walk.mark, -1)) if flips else v
        gradient, rates, bound = look(self.dynamics, self.potential, a, v, ahead)
        rate = pick_mark(rates, walk.mark)
        violated = state.candidate & ~(rate <= state.ceiling)
        broken = ~jnp.all(jnp.isfinite(gradient), -1) | ~jnp.all(jnp.isfinite(bound.curve), -1)
        fault = jnp.where(broken, NOT_FINITE, jnp.where(violated, VIOLATED, FINE))
        accepted = state.candidate & (state.threshold < rate) & (fault == FINE)
        time = jnp.where(accepted, path.at(path.begin, walk.segment) + walk.offset, walk.time)
        normal = walk.normal if flips else jnp.where(accepted[:, None], unit(gradient), walk.normal)
        stopped = walk.done | accepted | (fault != FINE)
        inspected = eqx.tree_at(
            lambda w: (w.done, w.rang, w.time, w.normal, w.passes, w.fault),
            walk,
            (stopped, accepted, time, normal, walk.passes + 1, fault),
        )
        anchored = ~state.candidate if flips else ~accepted
        new = ThinnedWalk(
            inspected, anchored, jnp.zeros_like(anchored), state.ceiling, state.threshold, bound, a, ahead
        )
        return keep_done(walk.done | state.anchored, state, new)


def draw(state: ThinnedWalk, path: Path, keys) -> ThinnedWalk:
    """From an anchor: the first candidate of the chord bounds, or the end of the cell."""
    walk, bound = state.walk, state.bound
    remaining = path.at(path.duration, walk.segment) - walk.offset
    cell = jnp.minimum(remaining, jnp.minimum(bound.reach, cell_length(bound)))
    slope = bound.slope + 0.5 * bound.curve * cell[:, None]
    u = uniforms(keys, path.number, walk.draws, slope.shape[-1] + 1)
    wait, mark = earliest(affine_clocks(bound.value.T, slope.T, u[:-1], path.number))
    hit = wait < cell
    ceiling = pick_mark(bound.value + slope * wait[:, None], mark)
    step = jnp.where(hit, wait, cell)
    segment, offset, over = advance(path, walk.segment, walk.offset, step, ~hit & (cell >= remaining))
    moved = eqx.tree_at(
        lambda w: (w.segment, w.offset, w.draws, w.done, w.time, w.mark),
        walk,
        (segment, offset, walk.draws + 1, over, path.horizon, mark),
    )
    drawn = eqx.tree_at(
        lambda s: (s.walk, s.anchored, s.candidate, s.ceiling, s.threshold),
        state,
        (moved, jnp.zeros_like(hit), hit, ceiling, u[-1] * ceiling),
    )
    return keep_done(walk.done | ~state.anchored, state, drawn)


def cell_length(bound: RateBound) -> Float[Array, " C"]:
    """The length h that minimises ``1/h + ¼ k h²``: cells a unit of time, and candidates that only the chord adds.

    Any choice that looks only at the anchor is exact.
    """
    return jnp.cbrt(2 / jnp.maximum(jnp.sum(bound.curve, -1), 1e-300))


def pick_mark(rates: Float[Array, "C k"], mark) -> Float[Array, " C"]:
    """Each chain's entry for its mark."""
    return jnp.take_along_axis(rates, mark[:, None], -1)[:, 0]
