"""Thinning on a polynomial that is known up to a proved error; the records are asked only where that leaves a doubt."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fedpdmc.clocks.base import Clock, keep_done
from fedpdmc.clocks.batching import gathered, scattered
from fedpdmc.clocks.envelopes.second_order import RELATIVE_SLACK, RateBound, certified, look
from fedpdmc.clocks.path import FINE, NOT_FINITE, VIOLATED, Path, Walk
from fedpdmc.clocks.thinning import ThinnedClock, ThinnedWalk, cell_length, draw, pick_mark
from fedpdmc.dynamics import Dynamics
from fedpdmc.potentials import LinearPredictor, Potential
from fedpdmc.potentials.base import Field
from fedpdmc.potentials.record_taylor import Expansion, expansion, usual_points

# Where the error adds more candidates than this to a cell the records are asked at once.
MOST_DOUBT = 0.25
# Chains whose records are passed over together: an eighth of them, within these limits.
LEAST_LANES, MOST_LANES = 8, 64
# Points at which it is tried out, and the share of them that must be within `MOST_DOUBT`.
TRIALS, MOSTLY = 256, 0.75


class Known(NamedTuple):
    """A polynomial at some positions: its values, bounds of its error with rounding, and what else it is made of."""

    position: Float[Array, "C d"]
    gradient: Float[Array, "C d"]
    error: Float[Array, "C d"]
    parts: Any = None


class SqueezedWalk(eqx.Module):
    """A thinned walk that may wait for a pass over the records.

    Attributes
    ----------
    waiting : (C,)
        Whether the records are due where the walk stands.
    poor : (C,)
        Whether the polynomial is of no use there, so that the pass starts a cell too.
    least, most : (C,)
        What the polynomial says of the rate of the candidate.
    """

    thinned: ThinnedWalk
    waiting: Bool[Array, " C"]
    poor: Bool[Array, " C"]
    least: Float[Array, " C"]
    most: Float[Array, " C"]


class Squeezing(Clock[SqueezedWalk]):
    """Flips on lines, for gradients that are nearly a polynomial where the process goes.

    A candidate of mark i comes from the chord bound, as in `ThinnedClock`, of ``v_i P_i + |v_i| e_i`` with ``e_i`` a bound
    of the polynomial's error. It is accepted if its threshold is below ``v_i P_i − |v_i| e_i``, rejected if above
    ``v_i P_i + |v_i| e_i``, and decided by the records in between: what is drawn is what thinning on the records alone would
    give under the same bound. Where the polynomial is of no use (far from where it was expanded) the records give the bound
    as well; which of the two it is depends on the anchor alone.
    """

    potential: eqx.AbstractVar[Potential]
    dynamics: eqx.AbstractVar[Dynamics]

    @abc.abstractmethod
    def known(self, a: Float[Array, "C d"]) -> Known:
        """What the polynomial says of the gradient."""

    @abc.abstractmethod
    def bounded(self, known: Known, v: Float[Array, "C d"]) -> tuple[RateBound, Bool[Array, " C"]]:
        """The bound with this velocity from there on, and whether it is of use."""

    def idle(self, chains):
        """A walk that waits for plans."""
        false, zeros = jnp.zeros(chains, bool), jnp.zeros(chains)
        return SqueezedWalk(ThinnedClock(self.potential, self.dynamics).idle(chains), false, false, zeros, zeros)

    def walk(self, state):
        """The walk within."""
        return state.thinned.walk

    def restart(self, state, new, path):
        """Set out."""
        thinned = ThinnedClock(self.potential, self.dynamics).restart(state.thinned, new, path)
        return eqx.tree_at(lambda s: (s.thinned, s.waiting), state, (thinned, state.waiting & ~new))

    def step(self, state, path, keys):
        """Draw where the rates are bounded, survey where they are not, and pass over the records when enough chains wait."""
        state = eqx.tree_at(lambda s: s.thinned, state, draw(state.thinned, path, keys))
        state = self._survey(state, path)
        return self._served(state, path, lambda now: now.waiting, self._inspect)

    def _served(self, state: SqueezedWalk, path: Path, which: Callable, inspect: Callable) -> SqueezedWalk:
        """``inspect`` some of the chains that are of this kind and wait, for as long as there are enough of them."""
        chains = state.waiting.shape[0]
        lanes = min(chains, max(LEAST_LANES, min(MOST_LANES, chains // LEAST_LANES)))

        def due(now):
            # Where other sites hold up most chains, few are left to wait for.
            moving = jnp.sum(~(now.waiting | now.thinned.walk.done))
            return jnp.sum(which(now)) >= jnp.minimum(lanes, 1 + moving // LEAST_LANES)

        def serve(now):
            # Those that had the fewest passes.
            passes, waiting = now.thinned.walk.passes, which(now)
            _, index = jax.lax.top_k(jnp.where(waiting, -passes, jnp.iinfo(passes.dtype).min), lanes)
            index = jnp.where(waiting[index], index, chains)
            some, own = gathered(index, (now, path))
            some = eqx.tree_at(lambda s: s.waiting, some, some.waiting & (index < chains))
            return scattered(index, now, inspect(some, own))

        return jax.lax.while_loop(due, serve, state)

    def _survey(self, state: SqueezedWalk, path: Path) -> SqueezedWalk:
        """What the polynomial says of a candidate, and the bound from there on, with the velocity that it leaves."""
        thinned, walk = state.thinned, state.thinned.walk
        a, v = path.state(self.dynamics, walk.segment, walk.offset)
        known = self.known(a)
        rate, doubt = pick_mark(v * known.gradient, walk.mark), pick_mark(jnp.abs(v) * known.error, walk.mark)
        doubt = doubt + RELATIVE_SLACK * jnp.abs(rate)
        least, most = rate - doubt, rate + doubt
        accepted = thinned.candidate & (thinned.threshold < least)
        undecided = thinned.candidate & ~accepted & ~(thinned.threshold >= most)
        ahead = self.dynamics.jump(v, jnp.where(accepted, walk.mark, -1))
        bound, useful = self.bounded(known, ahead)
        poor = ~useful
        waiting = undecided | poor
        fault = jnp.where(thinned.candidate & ~waiting & ~(least <= thinned.ceiling), VIOLATED, FINE)
        accepted &= ~waiting & (fault == FINE)
        time = jnp.where(accepted, path.at(path.begin, walk.segment) + walk.offset, walk.time)
        seen = eqx.tree_at(
            lambda w: (w.done, w.rang, w.time, w.fault), walk, (accepted | (fault != FINE), accepted, time, fault)
        )
        new = ThinnedWalk(
            seen, ~waiting, thinned.candidate & waiting, thinned.ceiling, thinned.threshold, bound, a, ahead
        )  # fmt: skip
        surveyed = SqueezedWalk(new, waiting, poor, least, most)
        return keep_done(walk.done | thinned.anchored | state.waiting, state, surveyed)

    def _inspect(self, state: SqueezedWalk, path: Path) -> SqueezedWalk:
        """Decide by the records; where the polynomial is of no use, start a cell with them as `ThinnedClock` does."""
        thinned, walk = state.thinned, state.thinned.walk
        a, v = path.state(self.dynamics, walk.segment, walk.offset)
        ahead = self.dynamics.jump(v, jnp.where(thinned.candidate, walk.mark, -1))
        gradient, rates, bound = look(self.dynamics, self.potential, a, v, ahead)
        rate = pick_mark(rates, walk.mark)
        outside = ~state.poor & ~((rate >= state.least) & (rate <= state.most))
        violated = thinned.candidate & (~(rate <= thinned.ceiling) | outside)
        broken = ~jnp.all(jnp.isfinite(gradient), -1) | ~jnp.all(jnp.isfinite(bound.curve), -1)
        fault = jnp.where(broken, NOT_FINITE, jnp.where(violated, VIOLATED, FINE))
        inspected, none = decided(thinned, path, rate, fault), jnp.zeros_like(violated)
        # Where the polynomial is good, the next survey starts the cell, as it would if the plan began here.
        from_here = jnp.where(state.poor[:, None], a, jnp.nan)
        new = ThinnedWalk(
            inspected, state.poor & ~thinned.candidate, none, thinned.ceiling, thinned.threshold, bound, from_here, ahead
        )  # fmt: skip
        return keep_done(~state.waiting, state, SqueezedWalk(new, none, none, state.least, state.most))


def decided(thinned: ThinnedWalk, path: Path, rate: Float[Array, " C"], fault) -> Walk:
    """The walk after a pass: over where its candidate is accepted, with this rate, and where there is a fault."""
    walk = thinned.walk
    accepted = thinned.candidate & (thinned.threshold < rate) & (fault == FINE)
    time = jnp.where(accepted, path.at(path.begin, walk.segment) + walk.offset, walk.time)
    return eqx.tree_at(
        lambda w: (w.done, w.rang, w.time, w.passes, w.fault),
        walk,
        (accepted | (fault != FINE), accepted, time, walk.passes + 1, fault),
    )


class SqueezedClock(Squeezing):
    """Flips of many records with a loss whose derivatives are bounded (`Expansion`).

    Attributes
    ----------
    cell : ()
        The usual length of a cell, by which the polynomial's error is judged.
    """

    potential: Potential
    expansion: Expansion
    dynamics: Dynamics
    cell: Float[Array, ""]

    def known(self, a):
        """From the monomials of the distance."""
        b = (a - self.expansion.center).T
        error, slip = self.expansion.error(b), self.expansion.slip(b)
        return Known(a, self.expansion.gradient(b).T, (error + slip).T, (b, error, slip))

    def bounded(self, known, v):
        """Of use where the error adds few candidates."""
        bound, extra = self._bound(known, v)
        return bound, extra * self.cell <= MOST_DOUBT

    def _bound(self, known: Known, v) -> tuple[RateBound, Float[Array, " C"]]:
        """The bound, and how much the polynomial's error adds to the rates."""
        a, (b, error, slip) = known.position, known.parts
        slope = self.expansion.slope(b, v.T)
        records = next(t for t in getattr(self.potential, "terms", (self.potential,)) if isinstance(t, LinearPredictor))
        curve = records.curve_on_line(v)
        field = Field(known.gradient, slope.T, curve, jnp.full(a.shape[0], jnp.inf), jnp.max(slip, 0))
        bound, speed = certified(self.dynamics, field, a, v), jnp.abs(v)
        value, tilt = speed * error.T, speed * self.expansion.slope_error(error, v.T).T
        bound = bound._replace(value=bound.value + value, slope=bound.slope + tilt)
        # Not finite where the bound is not.
        extra = jnp.sum(value + speed * slip.T + 0.0 * (bound.value + bound.slope), -1)
        return bound, extra


def squeezed_clock(potential: Potential, dynamics: Dynamics) -> SqueezedClock | None:
    """Such a clock, where it applies and where the polynomial is good enough around the site's own mode."""
    records = [t for t in getattr(potential, "terms", (potential,)) if isinstance(t, LinearPredictor)]
    if not dynamics.flips or dynamics.flow.rotating or not all(t.cubic is not None for t in records):
        return None
    known = expansion(potential)
    if known is None:
        return None
    a, v = usual_points(potential, known.center, TRIALS)
    cell, good = _tried(potential, known, dynamics, jnp.asarray(a), jnp.asarray(v))
    return SqueezedClock(potential=potential, expansion=known, dynamics=dynamics, cell=cell) if good >= MOSTLY else None


@eqx.filter_jit
def _tried(potential, known: Expansion, dynamics: Dynamics, a: Float[Array, "n d"], v: Float[Array, "n d"]):
    """The median cell, and the share of points at which the polynomial is good."""
    clock = SqueezedClock(potential=potential, expansion=known, dynamics=dynamics, cell=jnp.ones(()))
    bound, extra = clock._bound(clock.known(a), v)
    cell = jnp.median(cell_length(bound))
    return cell, jnp.mean(extra * cell <= MOST_DOUBT)
