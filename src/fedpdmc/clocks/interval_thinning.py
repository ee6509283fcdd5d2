"""Poisson thinning on intervals of the path on which the rates are known as polynomials of time with a proved error."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fedpdmc._jax.random_streams import uniforms
from fedpdmc.clocks.base import Clock, keep_done, pick_mark, unit
from fedpdmc.clocks.closed_form import affine_clocks, earliest
from fedpdmc.clocks.envelopes.base import MOST_ADDED, IntervalEnvelope, IntervalRates
from fedpdmc.clocks.envelopes.quadratic_rate_bound import signed_rates
from fedpdmc.clocks.path import FINE, NOT_FINITE, VIOLATED, Path, Walk, advance, judged
from fedpdmc.clocks.unfinished_chains import served
from fedpdmc.dynamics import Dynamics
from fedpdmc.potentials import Program

# If the error adds too many candidates to an interval, the interval is shortened, at most and at least by these factors, so
# that the error would add the first number. At a kink the error is the range of both sides, so it adds few on a short
# interval. If no interval above a part of the usual length suffices, the rates are not finite.
AIM, LEAST_CUT, MOST_CUT, SHORTEST = 0.1, 0.7, 0.1, 1e-12


class IntervalWalk(eqx.Module):
    """A walk on intervals.

    Attributes
    ----------
    rates : IntervalRates
        In columns, one for each chain; in rows as `_turned` has it.
    known : (C,)
        Whether ``rates`` hold at the present position, ``since`` after their start.
    waiting : (C,)
        Whether the walk is at a candidate that the program has to decide.
    length : (C,)
        The interval to try next.
    ceiling, threshold : (C,)
        The bound at the candidate, and the level that the rate must exceed for it to be accepted.
    least, most : (C,)
        The polynomial's squeeze of the candidate's rate.
    """

    walk: Walk
    rates: IntervalRates
    since: Float[Array, " C"]
    known: Bool[Array, " C"]
    waiting: Bool[Array, " C"]
    length: Float[Array, " C"]
    ceiling: Float[Array, " C"]
    threshold: Float[Array, " C"]
    least: Float[Array, " C"]
    most: Float[Array, " C"]


class IntervalClock(Clock[IntervalWalk]):
    """Rates that an envelope knows as ``p(s) ± e`` on intervals of the path.

    A candidate at s is accepted if its threshold is below ``p(s) − e``, rejected if above ``p(s) + e``, and decided by the
    program in between. The events are those of thinning by the program alone under the same bounds. Unlike the bounds of
    `ThinnedClock`, which are renewed at every evaluated candidate, those of an interval remain in use after candidates are
    rejected on it. An interval with too large an error is cut.
    """

    potential: Program
    dynamics: Dynamics
    envelope: IntervalEnvelope

    def idle(self, chains):
        """A walk that waits."""
        no, zeros, wide = jnp.zeros(chains, bool), jnp.zeros(chains), jnp.zeros((self.marks, chains))
        rates = IntervalRates((wide,) * (self.envelope.order + 1), wide, wide, wide, zeros)
        walk = Walk.idle(self.dynamics, chains, self.dim)
        return IntervalWalk(walk, rates, zeros, no, no, zeros, zeros, zeros, zeros, zeros)

    def restart(self, state, new, path):
        """Start on new plans."""
        return eqx.tree_at(
            lambda s: (s.walk, s.known, s.waiting, s.length),
            state,
            (
                state.walk.restart(new, path),
                state.known & ~new,
                state.waiting & ~new,
                jnp.where(new, self.envelope.usual, state.length),
            ),
        )

    def step(self, state, path, keys):
        """Bound the rates on an interval where they are not known, draw, and ask the program where enough chains wait."""
        state = self._surveyed(state, path)
        state = self._drawn(state, path, keys)
        return served(self.walk, state, path, lambda now: now.waiting, self._decided, _turned)

    def _surveyed(self, state: IntervalWalk, path: Path) -> IntervalWalk:
        """The rates where they are not known, or a shorter interval to try."""
        walk, usual = state.walk, self.envelope.usual
        a, v = path.state(self.dynamics, walk.segment, walk.offset)
        rates, added = self.envelope.rates(self.potential, self.dynamics, a, v, state.length)
        good = added <= MOST_ADDED
        cut = jnp.clip((AIM / added) ** (1 / (self.envelope.order + 2)), MOST_CUT, LEAST_CUT)
        length = jnp.where(good, usual, state.length * jnp.where(jnp.isfinite(added), cut, MOST_CUT))
        lost = ~good & (length < SHORTEST * usual)
        stopped = eqx.tree_at(lambda w: (w.done, w.fault), walk, (lost, jnp.where(lost, NOT_FINITE, FINE)))
        new = eqx.tree_at(
            lambda s: (s.walk, s.rates, s.since, s.known, s.length),
            state,
            (stopped, rates, jnp.zeros_like(added), good, length),
        )
        return _kept(walk.done | state.known | state.waiting, state, new)

    def _drawn(self, state: IntervalWalk, path: Path, keys) -> IntervalWalk:
        """The first candidate of the bounds, decided if the polynomial can, or the end of the interval."""
        walk, rates = state.walk, state.rates
        remaining = path.at(path.duration, walk.segment) - walk.offset
        room = jnp.minimum(remaining, rates.length - state.since)
        value = rates.value + rates.slope * state.since
        u = uniforms(keys, path.number, walk.draws, self.marks + 1)
        wait, mark = earliest(affine_clocks(value, rates.slope, u[:-1], path.number))
        hit = wait < room
        step = jnp.where(hit, wait, room)
        since = state.since + step
        rate, error, ceiling = rates.at(mark, since)
        threshold, least, most = u[-1] * ceiling, rate - error, rate + error
        sure = threshold < least
        undecided = hit & ~(threshold >= most) & ~sure
        # A reflection needs the gradient of the program even if the candidate is surely accepted.
        waiting = undecided if self.dynamics.flips else undecided | (hit & sure)
        fault = jnp.where(hit & ~(least <= ceiling), VIOLATED, FINE)
        segment, offset, over = advance(path, walk.segment, walk.offset, step, ~hit & (room >= remaining))
        moved = walk.moved(path, segment, offset, over, mark, fault)
        accepted = hit & sure & ~waiting
        time = jnp.where(accepted, path.at(path.begin, walk.segment) + offset, moved.time)
        moved = eqx.tree_at(lambda w: (w.done, w.rang, w.time), moved, (moved.done | accepted, accepted, time))
        drawn = IntervalWalk(
            moved, rates, since, hit, waiting & ~over, state.length, ceiling, threshold, least, most
        )  # fmt: skip
        return _kept(walk.done | ~state.known | state.waiting, state, drawn)

    def _decided(self, state: IntervalWalk, path: Path) -> IntervalWalk:
        """The program at candidates."""
        walk, flips = state.walk, self.dynamics.flips
        a, v = path.state(self.dynamics, walk.segment, walk.offset)
        gradient = self.potential.gradients(a)
        rates = signed_rates(self.dynamics, gradient, v) if flips else self.potential.speeds(a, v)
        finite = jnp.all(jnp.isfinite(gradient), -1)
        squeeze = state.least, state.most
        accepted, fault = judged(state.threshold, pick_mark(rates, walk.mark), state.ceiling, finite, squeeze)
        decided = walk.decided(path, accepted, fault, None if flips else unit(gradient))
        new = eqx.tree_at(lambda s: (s.walk, s.waiting), state, (decided, jnp.zeros_like(accepted)))
        return keep_done(~state.waiting, state, new)


def _turned(state: IntervalWalk) -> IntervalWalk:
    """The state with its rates transposed; its own inverse."""
    return eqx.tree_at(lambda s: s.rates, state, jax.tree.map(jnp.transpose, state.rates))


def _kept(done: Bool[Array, " C"], old: IntervalWalk, new: IntervalWalk) -> IntervalWalk:
    """`keep_done` with rates in columns."""
    rates = old.rates
    if new.rates is not rates:
        rates = jax.tree.map(lambda before, after: jnp.where(done, before, after), rates, new.rates)
    rest = keep_done(done, *(eqx.tree_at(lambda s: s.rates, state, None) for state in (old, new)))
    return eqx.tree_at(lambda s: s.rates, rest, rates, is_leaf=lambda x: x is None)
