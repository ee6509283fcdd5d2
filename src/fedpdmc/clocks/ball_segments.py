"""Thinning in stages for programs: on constants of balls, then on a polynomial, and only then on the program."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from fedpdmc._jax.random_streams import exponentials, uniforms
from fedpdmc.clocks.base import Clock, keep_done, unit
from fedpdmc.clocks.batching import in_lanes, lane_count
from fedpdmc.clocks.envelopes.second_order import RELATIVE_SLACK
from fedpdmc.clocks.path import FINE, NOT_FINITE, VIOLATED, Path, pick
from fedpdmc.clocks.segment_bounds import Hazard
from fedpdmc.clocks.thinning import ThinnedClock, ThinnedWalk
from fedpdmc.dynamics import Dynamics
from fedpdmc.potentials import PolynomialRemainder, Program

# Candidates per unit of time above which a segment is walked in cells.
MOST_CANDIDATES = 60.0
# A step never looks for longer than this.
MOST_LOOKS = 64
# What a look, a pass and a unit of time in cells cost, roughly.
LOOK, PASS, CELLS = 1.0, 3.0, 100.0


class PolynomialWalk(eqx.Module):
    """A walk on near segments, and the one in cells that it turns into on far ones.

    Attributes
    ----------
    cells : ThinnedWalk
        It holds the walk itself.
    level : (C,)
        The integral of the constants up to where the walk stands, far segments left out.
    pending : (C,)
        Whether the walk stands at a candidate that the polynomial could not reject.
    ceiling, threshold : (C,)
        The bound at that candidate, and the level that the rate must exceed for it to be accepted.
    """

    cells: ThinnedWalk
    level: Float[Array, " C"]
    pending: Bool[Array, " C"]
    ceiling: Float[Array, " C"]
    threshold: Float[Array, " C"]

    @property
    def walk(self):
        """Where it stands."""
        return self.cells.walk


def _walk(state: PolynomialWalk):
    return state.cells.walk


class PolynomialClock(Clock[PolynomialWalk]):
    """Reflections of a program along rotations.

    On a segment ``|a|² + |v|² = ρ²`` is conserved, so that one number bounds the rate on all of it; candidates of a whole
    plan are found by inverting their integral. A candidate is kept with probability ``((v·∇P)_+ + |v| E(|b|))`` over that
    constant, without the program, and then accepted with probability rate over that bound. Segments on which the constant
    is more than ``most``, or none is known, are walked in cells (`ThinnedClock`).
    """

    potential: Program
    remainder: PolynomialRemainder
    dynamics: Dynamics
    most: Float[Array, "*sites"] = eqx.field(default=MOST_CANDIDATES, converter=lambda x: jnp.asarray(x, jnp.float64))

    def usual_cost(self) -> float:
        """Work per unit of time where the posterior is like the reference, in units of a look."""
        a, v = np.random.default_rng(0).standard_normal((2, 512, self.dim))
        constant = self._constant(jnp.asarray(a), jnp.asarray(v))
        bound = jnp.minimum(self._bound(jnp.asarray(a), jnp.asarray(v)), constant)
        return float(jnp.mean(jnp.where(constant < self.most, LOOK * constant + PASS * bound, CELLS)))

    @property
    def _cells(self) -> ThinnedClock:
        return ThinnedClock(self.potential, self.dynamics)

    def idle(self, chains):
        """A walk that waits."""
        zeros = jnp.zeros(chains)
        return PolynomialWalk(self._cells.idle(chains), zeros, jnp.zeros(chains, bool), zeros, zeros)

    def walk(self, state):
        """The walk within."""
        return state.cells.walk

    def restart(self, state, new, path):
        """Set out."""
        cells, level = self._cells.restart(state.cells, new, path), jnp.where(new, 0.0, state.level)
        return PolynomialWalk(cells, level, state.pending & ~new, state.ceiling, state.threshold)

    def step(self, state, path, keys):
        """Walk on, on near segments some chains at a time; where enough chains stand on far ones, or no others, these."""
        walk = state.cells.walk
        place = jnp.minimum(walk.segment, path.last)
        far = self._constant(pick(path.start, place), pick(path.velocity, place))
        far = ~(far <= self.most)
        near, away = ~walk.done & ~far, ~walk.done & far
        due = (jnp.sum(away) >= lane_count(walk.done.shape[0])) | ~jnp.any(near)
        state = _some(self._near, state, path, keys, near)
        return jax.lax.cond(due, lambda s: _some(self._far, s, path, keys, away), lambda s: s, state)

    def _constant(self, a: Float[Array, "*C d"], v: Float[Array, "*C d"]) -> Float[Array, "*C"]:
        """A bound of the rate that holds on the whole rotation through ``(a, v)``."""
        distance = jnp.linalg.norm(self.remainder.center)
        reach = jnp.sqrt(jnp.sum(a * a + v * v, -1)) + distance
        return self.remainder.hazard(reach) * (1 + 2 * RELATIVE_SLACK) + self._slack(reach, reach)

    def _bound(self, a: Float[Array, "C d"], v: Float[Array, "C d"]) -> Float[Array, " C"]:
        """A bound of the rate at ``(a, v)``."""
        b, speed = a - self.remainder.center, jnp.linalg.norm(v, axis=-1)
        size = jnp.linalg.norm(b, axis=-1)
        rate = jnp.sum(v * self.remainder.gradient(b), -1)
        known = jnp.maximum(rate, 0.0) + RELATIVE_SLACK * jnp.abs(rate)
        return known + (1 + RELATIVE_SLACK) * speed * self.remainder.error(size) + 0.5 * self._slack(size, speed)

    def _slack(self, size, speed):
        return self.remainder.rounding * speed * (1 + size)

    def _hazard(self, path: Path) -> tuple[Hazard, Bool[Array, "C S"]]:
        """The constants of every segment, zero on far ones, and which those are."""
        rate = self._constant(path.start, path.velocity)
        far = ~(rate <= self.most)
        return Hazard.of(jnp.where(far, 0.0, rate), path.duration), far & (path.duration > 0)

    def _near(self, state: PolynomialWalk, path: Path, keys) -> PolynomialWalk:
        """Look until no chain searches, or most wait for the program; then one pass."""
        hazard, far = self._hazard(path)
        # For every segment the first far one from there on, or one beyond the last.
        places = jnp.where(far, jnp.arange(far.shape[1]), far.shape[1])
        stops = jax.lax.cummin(places, 1, reverse=True)

        def searching(carry):
            looks, now, over = carry
            without, waiting = jnp.sum(~(now.cells.walk.done | now.pending | over)), jnp.sum(now.pending)
            return (looks < MOST_LOOKS) & (without > 0) & (3 * without >= waiting)

        def look(carry):
            looks, now, over = carry
            following, blocked = self._look(now, path, hazard, stops, over, keys)
            return looks + 1, following, over | blocked

        start = (jnp.array(0), state, jnp.zeros_like(state.pending))
        _, state, _ = jax.lax.while_loop(searching, look, look(start))
        return self._inspect(state, path)

    def _look(self, state: PolynomialWalk, path: Path, hazard: Hazard, stops, waits, keys):
        """One candidate of the constants, put to the polynomial; or the start of a far segment, where the walk waits.

        A look takes four uniforms where `ThinnedClock` takes two: it counts as two draws and begins at an even one, so that
        draws of one plan never overlap.
        """
        walk = state.cells.walk
        draw = (walk.draws + 1) // 2
        u = uniforms(keys, path.number, draw, 4)
        level = state.level + exponentials(u[0])
        segment, offset, over = hazard.where(level)
        stop = pick(stops, jnp.minimum(walk.segment, path.last))
        blocked = stop < jnp.minimum(segment, path.last + 1)
        segment = jnp.where(blocked, stop, segment)
        within = jnp.minimum(segment, path.last)
        offset, level = jnp.where(blocked, 0.0, offset), jnp.where(blocked, _before(hazard, within), level)
        over &= ~blocked
        if path.cap is not None:
            over |= pick(path.begin, within) + offset > path.cap
        hit = ~over & ~blocked & (offset <= pick(path.duration, within))
        there, velocity = path.state(self.dynamics, within, offset)
        bound, constant = self._bound(there, velocity), pick(hazard.rate, within)
        fault = jnp.where(hit & ~(bound <= constant), jnp.where(jnp.isfinite(bound), VIOLATED, NOT_FINITE), FINE)
        pending = hit & (u[1] * constant < bound) & (fault == FINE)
        moved = eqx.tree_at(
            lambda c: (c.walk.segment, c.walk.offset, c.walk.draws, c.walk.done, c.walk.time, c.walk.fault, c.anchored),
            state.cells,
            (segment, offset, 2 * draw + 2, over | (fault != FINE), path.horizon, fault, jnp.zeros_like(hit)),
        )
        moved = eqx.tree_at(lambda c: c.candidate, moved, jnp.zeros_like(hit))
        still = walk.done | state.pending | waits
        new = PolynomialWalk(moved, level, pending, bound, u[2] * bound)
        return keep_done(still, state, new), blocked & ~over & ~still

    def _inspect(self, state: PolynomialWalk, path: Path) -> PolynomialWalk:
        """One pass: the rate at the candidates."""
        walk = state.cells.walk
        a, v = path.state(self.dynamics, walk.segment, walk.offset)
        gradient = self.potential.gradients(a)
        rate = jnp.sum(v * gradient, -1)
        fault = jnp.where(jnp.isfinite(rate), jnp.where(rate <= state.ceiling, FINE, VIOLATED), NOT_FINITE)
        accepted = (state.threshold < rate) & (fault == FINE)
        time = jnp.where(accepted, path.at(path.begin, walk.segment) + walk.offset, walk.time)
        inspected = eqx.tree_at(
            lambda w: (w.done, w.rang, w.time, w.normal, w.passes, w.fault),
            walk,
            (
                accepted | (fault != FINE),
                accepted,
                time,
                jnp.where(accepted[:, None], unit(gradient), walk.normal),
                walk.passes + 1,
                fault,
            ),
        )
        new = eqx.tree_at(lambda s: (s.cells.walk, s.pending), state, (inspected, jnp.zeros_like(accepted)))
        return keep_done(walk.done | ~state.pending, state, new)

    def _far(self, state: PolynomialWalk, path: Path, keys) -> PolynomialWalk:
        """One cell; where that ends its segment, the constants begin anew at the next."""
        cells = self._cells._step(state.cells, path, keys)
        hazard, _ = self._hazard(path)
        level = _before(hazard, jnp.minimum(cells.walk.segment, path.last))
        new = PolynomialWalk(cells, level, state.pending, state.ceiling, state.threshold)
        return keep_done(state.cells.walk.done, state, new)


def _before(hazard: Hazard, segment) -> Float[Array, " C"]:
    """The integral up to the start of a segment."""
    return jnp.where(segment > 0, pick(hazard.integral, jnp.maximum(segment - 1, 0)), 0.0)


def _some(step, state: PolynomialWalk, path: Path, keys, ready: Bool[Array, " C"]) -> PolynomialWalk:
    """``step`` on some of the chains that are ready, the others left as they are."""
    done = state.cells.walk.done
    masked = eqx.tree_at(lambda s: s.cells.walk.done, state, ~ready)
    found = in_lanes(step, masked, path, keys)
    return eqx.tree_at(lambda s: s.cells.walk.done, found, jnp.where(ready, found.cells.walk.done, done))
