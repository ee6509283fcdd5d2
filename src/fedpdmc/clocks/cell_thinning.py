"""Poisson thinning under affine bounds on cells of the path, with a squeeze where an envelope offers one."""

from __future__ import annotations

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fedpdmc._jax.random_streams import uniforms
from fedpdmc.clocks.base import Clock, keep_done, pick_mark, unit
from fedpdmc.clocks.closed_form import affine_clocks, earliest
from fedpdmc.clocks.envelopes.base import PointEnvelope, cell_length
from fedpdmc.clocks.envelopes.quadratic_rate_bound import RELATIVE_SLACK, RateBound, evaluate
from fedpdmc.clocks.path import FINE, VIOLATED, Path, Walk, advance, judged
from fedpdmc.clocks.unfinished_chains import in_lanes, served
from fedpdmc.dynamics import Dynamics
from fedpdmc.potentials import Potential, Program


class ThinnedWalk(eqx.Module):
    """A walk at an anchor (rates bounded from there on), at a candidate, or where the envelope or the records are due.

    Attributes
    ----------
    anchored : (C,)
        Whether ``bound`` holds from ``(anchor_a, anchor_v)``, the present position.
    candidate : (C,)
        Whether the walk is at an undecided candidate of coordinate ``walk.mark``.
    waiting : (C,)
        Whether a pass over the records is due at the present position.
    poor : (C,)
        Whether the envelope is unusable there, so that the pass starts a cell too.
    ceiling, threshold : (C,)
        The bound at the candidate, and the level that the rate must exceed for it to be accepted.
    least, most : (C,)
        The envelope's squeeze of the candidate's rate.
    """

    walk: Walk
    anchored: Bool[Array, " C"]
    candidate: Bool[Array, " C"]
    waiting: Bool[Array, " C"]
    poor: Bool[Array, " C"]
    ceiling: Float[Array, " C"]
    threshold: Float[Array, " C"]
    least: Float[Array, " C"]
    most: Float[Array, " C"]
    bound: RateBound
    anchor_a: Float[Array, "C d"]
    anchor_v: Float[Array, "C d"]


class ThinnedClock(Clock[ThinnedWalk]):
    """Any potential that encloses its field.

    On a cell of length h the bound ``b + c s + ½ k s²`` lies below its chord, so ``(b + (c + ½ k h) s)_+`` dominates the
    rate and is inverted in closed form. A candidate of mark i is accepted with probability rate over bound; a rate above
    its bound is a fault. One pass over the records at a candidate serves to accept it and to start the next cell.

    For flips the pass uses the velocity after the flip, so that if the flip is accepted and the next plan starts there, no
    pass is needed to start. The events are the same either way.

    With an envelope the bound is that of ``v_i P_i + |v_i| e_i``, P the envelope's approximation of the gradient and ``e`` a
    bound of its error. A candidate is accepted if its threshold is below ``v_i P_i − |v_i| e_i``, rejected if above
    ``v_i P_i + |v_i| e_i``, and decided by the records in between: the events are those of thinning on the records alone
    under the same bound. Where the envelope is unusable (far from where it was made) the records give the bound as well;
    which of the two is used depends on the anchor alone.
    """

    potential: Potential
    dynamics: Dynamics
    envelope: PointEnvelope | None = None

    def idle(self, chains):
        """A walk that waits."""
        no, zeros, wide = jnp.zeros(chains, bool), jnp.zeros(chains), jnp.zeros((chains, self.marks))
        nowhere = jnp.full((chains, self.dim), jnp.nan)
        walk, bound = Walk.idle(self.dynamics, chains, self.dim), RateBound(wide, wide, wide, zeros)
        return ThinnedWalk(walk, no, no, no, no, zeros, zeros, zeros, zeros, bound, nowhere, nowhere)

    def restart(self, state, new, path):
        """Start on new plans; a chain whose plan starts at the anchor, velocity included, has its first pass already."""
        a, v = path.start[:, 0], path.velocity[:, 0]
        at_anchor = jnp.all((a == state.anchor_a) & (v == state.anchor_v), -1)
        return eqx.tree_at(
            lambda s: (s.walk, s.anchored, s.candidate, s.waiting),
            state,
            (
                state.walk.restart(new, path),
                jnp.where(new, at_anchor, state.anchored),
                state.candidate & ~new,
                state.waiting & ~new,
            ),
        )

    def step(self, state, path, keys):
        """Draw where the rates are bounded, use the envelope where they are not, and the records where they are due.

        Bounding a program costs so much that its chains are batched; with an envelope, those that wait for the records are.
        """
        if self.envelope is not None:
            state = self._survey(self.envelope, draw(state, path, keys), path)
            state = served(self.walk, state, path, lambda now: now.waiting & ~now.poor, self._decide)
            return served(self.walk, state, path, lambda now: now.waiting & now.poor, self._start)
        costly = any(isinstance(term, Program) for term in getattr(self.potential, "terms", (self.potential,)))
        return in_lanes(self._plain, state, path, keys, fair=True) if costly else self._plain(state, path, keys)

    def _plain(self, state: ThinnedWalk, path: Path, keys) -> ThinnedWalk:
        """A step without an envelope: a pass that is due decides the candidate and starts the next cell."""
        state = draw(state, path, keys)
        return keep_done(state.walk.done | state.anchored, state, self._passed(state, path))

    def _passed(self, state: ThinnedWalk, path: Path) -> ThinnedWalk:
        """One pass: the rates at the present position, to accept or reject a candidate and to start a cell."""
        walk, flips = state.walk, self.dynamics.flips
        a, v = path.state(self.dynamics, walk.segment, walk.offset)
        ahead = self.dynamics.jump(v, jnp.where(state.candidate, walk.mark, -1)) if flips else v
        gradient, rates, bound = evaluate(self.dynamics, self.potential, a, v, ahead)
        # A bound that is not a number has no candidates: the walk would go on as if the rate were zero.
        finite = jnp.all(jnp.isfinite(gradient), -1) & jnp.all(
            jnp.isfinite(bound.value + bound.slope + bound.curve), -1
        )
        rate = pick_mark(rates, walk.mark)
        accepted, fault = judged(state.threshold, rate, state.ceiling, finite, candidate=state.candidate)
        no = jnp.zeros_like(accepted)
        return eqx.tree_at(
            lambda s: (s.walk, s.anchored, s.candidate, s.waiting, s.poor, s.bound, s.anchor_a, s.anchor_v),
            state,
            (
                walk.decided(path, accepted, fault, None if flips else unit(gradient)),
                ~state.candidate if flips else ~accepted,
                no, no, no, bound, a, ahead,
            ),
        )  # fmt: skip

    def _survey(self, envelope: PointEnvelope, state: ThinnedWalk, path: Path) -> ThinnedWalk:
        """The envelope's squeeze of a candidate, and its bound from there on with the velocity that the candidate leaves."""
        walk = state.walk
        a, v = path.state(self.dynamics, walk.segment, walk.offset)
        known = envelope.known(a)
        rate, error = pick_mark(v * known.gradient, walk.mark), pick_mark(jnp.abs(v) * known.error, walk.mark)
        error = error + RELATIVE_SLACK * jnp.abs(rate)
        least, most = rate - error, rate + error
        accepted = state.candidate & (state.threshold < least)
        undecided = state.candidate & ~accepted & ~(state.threshold >= most)
        ahead = self.dynamics.jump(v, jnp.where(accepted, walk.mark, -1))
        bound, useful = envelope.bounded(self.dynamics, known, ahead)
        waiting = undecided | ~useful
        fault = jnp.where(state.candidate & ~waiting & ~(least <= state.ceiling), VIOLATED, FINE)
        new = ThinnedWalk(
            walk.decided(path, accepted & ~waiting & (fault == FINE), fault, passes=0),
            ~waiting, state.candidate & waiting, waiting, ~useful, state.ceiling, state.threshold, least, most,
            bound, a, ahead,
        )  # fmt: skip
        return keep_done(walk.done | state.anchored | state.waiting, state, new)

    def _decide(self, state: ThinnedWalk, path: Path) -> ThinnedWalk:
        """The exact rates of candidates that the squeeze leaves undecided; the envelope then starts the next cell."""
        walk = state.walk
        a, v = path.state(self.dynamics, walk.segment, walk.offset)
        gradient = self.potential.gradients(a)
        rate, finite = pick_mark(v * gradient, walk.mark), jnp.all(jnp.isfinite(gradient), -1)
        accepted, fault = judged(state.threshold, rate, state.ceiling, finite, (state.least, state.most))
        no = jnp.zeros_like(accepted)
        new = eqx.tree_at(
            lambda s: (s.walk, s.anchored, s.candidate, s.waiting, s.anchor_a),
            state,
            (walk.decided(path, accepted, fault), no, no, no, jnp.full_like(a, jnp.nan)),
        )
        return keep_done(~(state.waiting & ~state.poor), state, new)

    def _start(self, state: ThinnedWalk, path: Path) -> ThinnedWalk:
        """A cell bounded by the records, where the envelope is unusable."""
        assert self.envelope is not None
        new = self._passed(state, path)
        if not self.envelope.position_decides:
            # A plan that starts here tries the envelope again, since it may be usable with the new velocity.
            new = eqx.tree_at(lambda s: s.anchor_a, new, jnp.full_like(new.anchor_a, jnp.nan))
        return keep_done(~(state.waiting & state.poor), state, new)


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
    drawn = eqx.tree_at(
        lambda s: (s.walk, s.anchored, s.candidate, s.ceiling, s.threshold),
        state,
        (walk.moved(path, segment, offset, over, mark), jnp.zeros_like(hit), hit, ceiling, u[-1] * ceiling),
    )
    return keep_done(walk.done | ~state.anchored, state, drawn)
