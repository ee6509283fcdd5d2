"""Events of a program on stretches of path, thinned on polynomials of time with a proved error."""

from __future__ import annotations

import functools
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from fedpdmc._jax.random_streams import uniforms
from fedpdmc.clocks.base import Clock, affine_clocks, earliest, keep_done, unit
from fedpdmc.clocks.batching import served
from fedpdmc.clocks.envelopes.second_order import RELATIVE_SLACK, signed_rates
from fedpdmc.clocks.path import FINE, NOT_FINITE, VIOLATED, Path, Walk, advance
from fedpdmc.clocks.thinning import cell_length, pick_mark
from fedpdmc.dynamics import Dynamics
from fedpdmc.errors import NoEnclosure
from fedpdmc.potentials import Program

# A stretch to which the error adds more candidates than this is made shorter, at most and at least by these factors, so
# that the error would add that many; below a part of the usual length the program is bounded in cells.
MOST_DOUBT, AIM, LEAST_CUT, MOST_CUT, SHORTEST = 0.5, 0.1, 0.7, 0.1, 1e-3
# Points at which it is tried out, the lengths that are tried, and the orders.
TRIALS, LENGTHS, ORDER = 256, 2.0 ** np.arange(2, -8, -0.5), 3
# How far from the centre they are, in units of the reference.
SPREADS = (1.0, 2.0)
# The share of them at which it must be of use.
MOSTLY = 0.25


@functools.cache
def bernstein(degree: int) -> np.ndarray:
    """The matrix from coefficients of powers on [−1, 1] to Bernstein coefficients."""
    k = np.arange(degree + 1)
    nodes = -np.cos(np.pi * k / degree)
    share = 0.5 * (nodes[:, None] + 1)
    choose = np.array([math.comb(degree, i) for i in k])
    return np.linalg.solve(choose * share**k * (1 - share) ** (degree - k), nodes[:, None] ** k)


class Stretched(eqx.Module):
    """The signed rates on a stretch: polynomials of ``τ = 2s/length − 1``, their error, and affine bounds of them in s.

    In columns, one for each chain; in rows as `_turned` has it.
    """

    parts: tuple[Float[Array, ...], ...]
    error: Float[Array, ...]
    value: Float[Array, ...]
    slope: Float[Array, ...]
    length: Float[Array, " C"]


class CurveWalk(eqx.Module):
    """A walk on stretches.

    Attributes
    ----------
    standing : (C,)
        Whether ``rates`` hold where the walk stands, ``since`` after their start.
    waiting : (C,)
        Whether the program is due at the candidate where the walk stands.
    poor : (C,)
        Whether the program is due to bound the rates from here on.
    length : (C,)
        The stretch to try next.
    ceiling, threshold : (C,)
        The bound at the candidate, and the level that the rate must exceed for it to be accepted.
    least, most : (C,)
        What the polynomial says of the rate of the candidate.
    """

    walk: Walk
    rates: Stretched
    since: Float[Array, " C"]
    standing: Bool[Array, " C"]
    waiting: Bool[Array, " C"]
    poor: Bool[Array, " C"]
    length: Float[Array, " C"]
    ceiling: Float[Array, " C"]
    threshold: Float[Array, " C"]
    least: Float[Array, " C"]
    most: Float[Array, " C"]


class CurveClock(Clock[CurveWalk]):
    """Any program that curves can follow (`fedpdmc.enclosures.taylor_models.taylor_model`).

    On a stretch of length h the signed rate is ``p(s) ± e``. With Bernstein coefficients ``β_k`` of p, of degree m, it lies
    below ``β_0 + c s + e`` for ``c = max_k (β_k − β_0) m/(k h)``, since a straight line has the coefficients
    ``β_0 + c k h/m``. A candidate at s is accepted if its threshold is below ``p(s) − e``, rejected if above ``p(s) + e``,
    and decided by the program in between. What is drawn is what thinning by the program alone would give under the same
    bounds. A stretch with too large an error is cut; where no stretch will do, at a kink, the program is bounded in a cell
    as by `ThinnedClock`, and decides every candidate.

    Attributes
    ----------
    usual : ()
        The length of a stretch that is tried first.
    order : int
        Of the polynomials.
    """

    potential: Program
    dynamics: Dynamics
    usual: Float[Array, ""]
    order: int = eqx.field(static=True, default=ORDER)

    @property
    def _clocks(self) -> int:
        return self.dim if self.dynamics.flips else 1

    def idle(self, chains):
        """A walk that waits."""
        false, zeros, wide = jnp.zeros(chains, bool), jnp.zeros(chains), jnp.zeros((self._clocks, chains))
        rates = Stretched((wide,) * (self.order + 1), wide, wide, wide, zeros)
        walk = Walk.idle(self.dynamics, chains, self.dim)
        return CurveWalk(walk, rates, zeros, false, false, false, zeros, zeros, zeros, zeros, zeros)

    def walk(self, state):
        """The walk within."""
        return state.walk

    def restart(self, state, new, path):
        """Set out."""
        return eqx.tree_at(
            lambda s: (s.walk, s.standing, s.waiting, s.poor, s.length),
            state,
            (
                state.walk.restart(new, path),
                state.standing & ~new,
                state.waiting & ~new,
                state.poor & ~new,
                jnp.where(new, self.usual, state.length),
            ),
        )

    def step(self, state, path, keys):
        """Set out on a stretch where there is none, draw, and ask the program where enough chains are in doubt."""
        state = self._surveyed(state, path)
        state = self._drawn(state, path, keys)
        state = served(self.walk, state, path, lambda now: now.poor, self._in_cells, _turned)
        return served(self.walk, state, path, lambda now: now.waiting, self._decided, _turned)

    def stretched(self, a: Float[Array, "C d"], v: Float[Array, "C d"], h: Float[Array, " C"]):
        """The rates from there on, and how many candidates the error adds; not finite where there is no bound."""
        parts, error = self.potential.curves(self.dynamics.flow.rotating, self.dynamics.flips, a.T, v.T, h, self.order)
        slack = RELATIVE_SLACK * sum(map(jnp.abs, parts))
        error = error + slack
        start, *others = (sum(c * part for c, part in zip(row, parts, strict=True)) for row in bernstein(self.order))
        rises = [(beta - start) * (self.order / k) for k, beta in enumerate(others, 1)]
        rise = functools.reduce(jnp.maximum, rises) + slack
        rates = Stretched(parts, error, start + error, rise / h, h)
        return rates, jnp.sum(error + 0.0 * (rates.value + rates.slope), 0) * h

    def _surveyed(self, state: CurveWalk, path: Path) -> CurveWalk:
        """The rates where they are not known, or a shorter stretch to try."""
        walk = state.walk
        a, v = path.state(self.dynamics, walk.segment, walk.offset)
        rates, doubt = self.stretched(a, v, state.length)
        good = doubt <= MOST_DOUBT
        cut = jnp.clip((AIM / doubt) ** (1 / (self.order + 2)), MOST_CUT, LEAST_CUT)
        length = jnp.where(good, self.usual, state.length * jnp.where(jnp.isfinite(doubt), cut, MOST_CUT))
        poor = ~good & (length < SHORTEST * self.usual)
        new = eqx.tree_at(
            lambda s: (s.rates, s.since, s.standing, s.poor, s.length),
            state,
            (rates, jnp.zeros_like(doubt), good, poor, length),
        )
        return _kept(walk.done | state.standing | state.waiting | state.poor, state, new)

    def _drawn(self, state: CurveWalk, path: Path, keys) -> CurveWalk:
        """The first candidate of the bounds, decided if the polynomial can, or the end of the stretch."""
        walk, rates = state.walk, state.rates
        remaining = path.at(path.duration, walk.segment) - walk.offset
        room = jnp.minimum(remaining, rates.length - state.since)
        value = rates.value + rates.slope * state.since
        u = uniforms(keys, path.number, walk.draws, self._clocks + 1)
        wait, mark = earliest(affine_clocks(value, rates.slope, u[:-1], path.number))
        hit = wait < room
        since = state.since + jnp.where(hit, wait, room)
        tau = 2 * since / rates.length - 1
        rate = _value([_of(part, mark) for part in rates.parts], tau)
        doubt, ceiling = _of(rates.error, mark), _of(rates.value, mark) + _of(rates.slope, mark) * since
        threshold = u[-1] * ceiling
        least, most = rate - doubt, rate + doubt
        sure = threshold < least
        undecided = hit & ~(threshold >= most) & ~sure
        accepted = hit & sure
        waiting = undecided if self.dynamics.flips else undecided | accepted
        accepted &= ~waiting
        fault = jnp.where(hit & ~(least <= ceiling), VIOLATED, FINE)
        step = jnp.where(hit, wait, room)
        segment, offset, over = advance(path, walk.segment, walk.offset, step, ~hit & (room >= remaining))
        time = jnp.where(accepted, path.at(path.begin, walk.segment) + offset, path.horizon)
        moved = eqx.tree_at(
            lambda w: (w.segment, w.offset, w.draws, w.done, w.rang, w.time, w.mark, w.fault),
            walk,
            (segment, offset, walk.draws + 1, over | accepted | (fault != FINE), accepted, time, mark, fault),
        )
        drawn = CurveWalk(
            moved, rates, since, hit, waiting & ~over, state.poor, state.length, ceiling, threshold, least, most
        )  # fmt: skip
        return _kept(walk.done | ~state.standing | state.waiting, state, drawn)

    def _decided(self, state: CurveWalk, path: Path) -> CurveWalk:
        """The program at candidates."""
        walk = state.walk
        a, v = path.state(self.dynamics, walk.segment, walk.offset)
        gradient = self.potential.gradients(a)
        flips = self.dynamics.flips
        rates = signed_rates(self.dynamics, gradient, v) if flips else self.potential.speeds(a, v)
        rate = pick_mark(rates, walk.mark)
        known = (rate >= state.least) & (rate <= state.most) & (rate <= state.ceiling)
        fault = jnp.where(jnp.all(jnp.isfinite(gradient), -1), jnp.where(known, FINE, VIOLATED), NOT_FINITE)
        accepted = (state.threshold < rate) & (fault == FINE)
        time = jnp.where(accepted, path.at(path.begin, walk.segment) + walk.offset, walk.time)
        normal = walk.normal if flips else jnp.where(accepted[:, None], unit(gradient), walk.normal)
        decided = eqx.tree_at(
            lambda w: (w.done, w.rang, w.time, w.normal, w.passes, w.fault),
            walk,
            (accepted | (fault != FINE), accepted, time, normal, walk.passes + 1, fault),
        )
        new = eqx.tree_at(lambda s: (s.walk, s.waiting), state, (decided, jnp.zeros_like(accepted)))
        return keep_done(~state.waiting, state, new)

    def _in_cells(self, state: CurveWalk, path: Path) -> CurveWalk:
        """A stretch on which nothing but a bound is known: the chord of that of a cell. In rows, as `_turned` has it."""
        walk = state.walk
        a, v = path.state(self.dynamics, walk.segment, walk.offset)
        bound = self.potential.bound(self.dynamics.flow.rotating, self.dynamics.flips, a, v)
        h = jnp.minimum(bound.reach, cell_length(bound))
        slope = bound.slope + 0.5 * bound.curve * h[:, None]
        parts = (jnp.zeros_like(bound.value),) * (self.order + 1)
        rates = Stretched(parts, jnp.full_like(slope, jnp.inf), bound.value, slope, h)
        fault = jnp.where(jnp.isfinite(jnp.sum(bound.value + slope, -1)), FINE, NOT_FINITE)
        cell = eqx.tree_at(
            lambda w: (w.done, w.passes, w.fault), walk, (fault != FINE, walk.passes + 1, fault)
        )  # fmt: skip
        none = jnp.zeros_like(state.poor)
        new = eqx.tree_at(
            lambda s: (s.walk, s.rates, s.since, s.standing, s.poor, s.length),
            state,
            (cell, rates, jnp.zeros_like(h), fault == FINE, none, jnp.broadcast_to(self.usual, h.shape)),
        )
        return keep_done(~state.poor, state, new)


def _turned(state: CurveWalk) -> CurveWalk:
    """With rows for columns in the rates, and back."""
    return eqx.tree_at(lambda s: s.rates, state, jax.tree.map(jnp.transpose, state.rates))


def _kept(done: Bool[Array, " C"], old: CurveWalk, new: CurveWalk) -> CurveWalk:
    """`keep_done` with rates in columns."""
    rates = jax.tree.map(lambda before, after: jnp.where(done, before, after), old.rates, new.rates)
    rest = keep_done(done, *(eqx.tree_at(lambda s: s.rates, state, None) for state in (old, new)))
    return eqx.tree_at(lambda s: s.rates, rest, rates, is_leaf=lambda x: x is None)


def _of(rates: Float[Array, ...], mark) -> Float[Array, " C"]:
    """Each chain's entry for its mark."""
    return jnp.take_along_axis(rates, mark[None], 0)[0]


def _value(parts: list[Float[Array, " C"]], tau: Float[Array, " C"]) -> Float[Array, " C"]:
    """A polynomial, by Horner's rule."""
    total = parts[-1]
    for part in parts[-2::-1]:
        total = part + tau * total
    return total


def curve_clock(program: Program, dynamics: Dynamics) -> CurveClock | None:
    """Such a clock with the length of stretches that takes the fewest, where the program can be followed."""
    rng = np.random.default_rng(0)
    spread = np.repeat(SPREADS, -(-TRIALS // len(SPREADS)))[:TRIALS, None]
    a = jnp.asarray(spread * rng.standard_normal((TRIALS, program.dim)))
    v = rng.standard_normal((TRIALS, program.dim))
    v = jnp.asarray(np.sign(v) if dynamics.flips and not dynamics.flow.rotating else v)
    clock = CurveClock(potential=program, dynamics=dynamics, usual=jnp.ones(()))
    try:
        reach = np.asarray(_tried(clock, a, v, jnp.asarray(LENGTHS)))
    except NoEnclosure:
        return None
    best = int(np.argmax(reach.mean(1)))
    useful = np.mean(reach[best] > 0)
    return eqx.tree_at(lambda c: c.usual, clock, jnp.asarray(LENGTHS[best])) if useful >= MOSTLY else None


@eqx.filter_jit
def _tried(clock: CurveClock, a: Float[Array, "n d"], v: Float[Array, "n d"], lengths: Float[Array, " m"]):
    """How far a stretch of each length reaches at each point: to its end or the first candidate, nowhere if it is cut."""

    def one(length):
        rates, doubt = clock.stretched(a, v, jnp.broadcast_to(length, a.shape[:1]))
        # The integral of the positive part of an affine function.
        start, end = jnp.maximum(rates.value, 0.0), jnp.maximum(rates.value + rates.slope * length, 0.0)
        rising = jnp.maximum(jnp.maximum(start, end), 1e-300)
        part = jnp.where((start > 0) & (end > 0), start + end, rising**2 / jnp.abs(rates.slope * length))
        load = jnp.sum(0.5 * length * part, 0)
        share = jnp.where(load > 1e-6, -jnp.expm1(-load) / jnp.maximum(load, 1e-6), 1.0)
        return jnp.where(doubt <= MOST_DOUBT, length * share, 0.0)

    return jax.lax.map(one, lengths)
