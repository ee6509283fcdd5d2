"""The clock of a site with private latents: arrivals along a plan, and silent events, of which no message is sent.

The state is (θ, v) on the plan and ζ at the site. Two things happen at the site:

- *arrivals*, at the rate ``(v·∇_a R(a, ζ))₊``, with the unit normal of ``∇_a R`` as mark;
- *silent events*, at a constant rate κ: ζ is moved by a kernel that leaves ``π(ζ | θ)`` invariant.

**Invariance.** With ``π ∝ exp(−q − R_1 − … − R_M − ½Σ…)`` and v standard normal, flow and reflections of v on the shares of
``∇_a`` of each factor leave ``π ⊗ N(0, I)`` invariant for every fixed ζ, since ``Σ_m v·∇_a R_m + …`` is the derivative along
the flow and each reflection cancels its own share. A silent event leaves π invariant by itself, and its rate is
constant. So the sum of the generators leaves it invariant.

**Going back.** Given the plan, a site's clocks are independent of all others, so that it walks to its own first arrival,
silent events included. If another site's arrival cuts the plan at τ, what was walked beyond τ did not happen. τ is a
stopping time: the site goes on from its own state at τ with fresh randomness. A kernel at the start of every plan, or a
state taken from the plan's start or from the walk's end, would be wrong: where plans begin depends on arrivals. There are
two ways to the state at τ:

- On a network a site knows nothing of other walks. `LatentClock.settle` repeats the silent events of the plan up to τ,
  whose times and chances are functions of (chain, plan number, event); nothing else of the walk is kept.
- In one process the engine knows how far every site has come: no arrival is before that, so neither is τ (`Path.floor`). A
  walk remembers its last few silent events, and waits with the next one until the oldest of them is at most the floor, and
  need not be undone. `LatentClock.cut` takes the latents before the first event that is not before τ. Waiting changes
  when an event is computed, not its time or its chances. The site that is farthest behind never waits: its own events are
  before where it is. This saves a second kernel to compile. Many latents take too much memory: they are repeated.
"""

from __future__ import annotations

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from fedpdmc._jax.random_streams import ChainKeys, exponentials, normals, uniforms
from fedpdmc.clocks.base import (
    FINE,
    NOT_FINITE,
    CandidateWalk,
    Clock,
    Path,
    accept,
    advance,
    enough,
    in_turns,
    keep_done,
    pick,
    time_of,
    unit,
)
from fedpdmc.clocks.thinning import CANDIDATES, DRAWN, first_candidate
from fedpdmc.dynamics import Dynamics
from fedpdmc.potentials.base import PrivateRemainder
from fedpdmc.potentials.chebyshev import RateCurve
from fedpdmc.potentials.random_effects_rates import POINTS

# Rate of silent events.
SILENT = 1.0
# Silent events that a walk remembers, and the most latents of a site that does.
HISTORY, MOST_REMEMBERED = 4, 32
# Apart from the keys of arrivals: those of silent events, of the first one's time, and of the first latents.
SILENT_KEY, WAIT_KEY, FIRST_KEY = np.uint32(0x9E3779B9), np.uint32(0x6A09E667), np.uint32(0x7F4A7C15)


class LatentWalk(CandidateWalk):
    """A walk with private latents.

    Attributes
    ----------
    settled : (C, k)
        The latents at the start of the plan. NaN before the first one.
    zeta : (C, k)
        The latents at the present position of the walk.
    silent : (C,)
        Time, since the plan's start, of the next silent event.
    count : (C,)
        Silent events of this plan so far.
    new : (C,)
        Whether the plan has not been started yet.
    due : (C,)
        Whether the walk is at a silent event.
    times : (C, h)
        Of the last silent events, newest first; negative where there was none.
    before : (C, h, k)
        The latents before each of them.
    """

    settled: Float[Array, "C k"]
    zeta: Float[Array, "C k"]
    silent: Float[Array, " C"]
    count: Int[Array, " C"]
    new: Bool[Array, " C"]
    due: Bool[Array, " C"]
    times: Float[Array, "C h"]
    before: Float[Array, "C h k"]


class LatentClock(Clock[LatentWalk]):
    """Arrivals of a potential with private latents, under certified bounds.

    Parameters
    ----------
    potential : PrivateRemainder
    dynamics : Dynamics
        A rotation with reflections.
    silent_rate : float
        κ.
    """

    potential: PrivateRemainder
    dynamics: Dynamics
    silent_rate: float = eqx.field(default=SILENT, static=True)

    @property
    def domain(self) -> str:
        return "polynomials of time, bounded through complex times; private latents"

    @property
    def history(self) -> int:
        """How many silent events a walk remembers where others' walks are known; zero if it repeats them."""
        return HISTORY if self.potential.latents <= MOST_REMEMBERED else 0

    def idle(self, chains):
        zeta = jnp.full((chains, self.potential.latents), jnp.nan)
        no, times = jnp.zeros(chains, bool), jnp.zeros((chains, self.history))
        return LatentWalk.idle(
            self.dynamics, chains, self.dim, settled=zeta, zeta=zeta, silent=jnp.zeros(chains),
            count=jnp.zeros(chains, int), new=no, due=no, times=times,
            before=jnp.zeros((chains, self.history, zeta.shape[1])),
        )  # fmt: skip

    def restart(self, state, new, path):
        return dataclasses.replace(state.restart(new, path), new=state.new | new)

    def _begun(self, state: LatentWalk, path: Path, keys: ChainKeys) -> LatentWalk:
        """On new plans: the settled latents, or standard normal ones before the first, and the first silent event."""
        first = jnp.isnan(state.settled[:, 0])
        fresh = jax.lax.cond(
            jnp.any(first & state.new), lambda: self.first(path.number, keys), lambda: jnp.zeros_like(state.settled)
        )
        settled = jnp.where((first & state.new)[:, None], fresh, state.settled)
        wait = self._first_wait(path, keys)
        new = state.new
        return dataclasses.replace(
            state,
            settled=settled,
            zeta=jnp.where(new[:, None], settled, state.zeta),
            silent=jnp.where(new, wait, state.silent),
            times=jnp.where(new[:, None], -1.0, state.times),
            count=jnp.where(new, 0, state.count),
            new=jnp.zeros_like(new),
            due=state.due & ~new,
        )

    def first(self, number: Int[Array, " C"], keys: ChainKeys) -> Float[Array, "C k"]:
        """Latents at the start of a chain, whose first plan has this number: standard normal."""
        return normals(uniforms(keys ^ FIRST_KEY, number, jnp.zeros_like(number), self.potential.latents)).T

    def position(self, path: Path, elapsed: Float[Array, " C"]) -> Float[Array, "C d"]:
        """Where the path is at these times since its start."""
        at = jnp.clip(elapsed, 0.0, path.horizon)
        segment = jnp.sum(path.begin <= at[:, None], -1) - 1
        return path.state(self.dynamics, segment, at - path.at(path.begin, segment))[0]

    def _first_wait(self, path: Path, keys: ChainKeys) -> Float[Array, " C"]:
        chance = uniforms(keys ^ WAIT_KEY, path.number, jnp.zeros_like(path.number), 1)[0]
        return exponentials(chance) / self.silent_rate

    def _moved(self, which: Bool[Array, " C"], a, zeta, path: Path, keys: ChainKeys, count: Int[Array, " C"]):
        """The latents after this silent event of the plan, and the time to the next one, on some chains."""

        def kernel(rows):
            (a, zeta), (number, count), keys = rows
            u = uniforms(keys ^ SILENT_KEY, number, count, self.potential.chances + 1)
            wait = exponentials(u[-1]) / self.silent_rate
            return jnp.concatenate([self.potential.kernel(a, zeta, u[:-1]), wait[:, None]], 1)

        moved = in_turns(kernel, which, ((a, zeta), (path.number, count), keys), zeta.shape[1] + 1)
        return jnp.where(which[:, None], moved[:, :-1], zeta), moved[:, -1]

    def settle(
        self, state: LatentWalk, path: Path, elapsed: Float[Array, " C"], which: Bool[Array, " C"], keys: ChainKeys
    ) -> LatentWalk:
        """The latents at time ``elapsed`` of a plan, on some chains: the walk's silent events up to there, again."""

        def due(carry):
            _, silent, _ = carry
            return jnp.any(which & (silent < elapsed))

        def event(carry):
            zeta, silent, count = carry
            happens = which & (silent < elapsed)
            zeta, wait = self._moved(happens, self.position(path, silent), zeta, path, keys, count)
            return zeta, jnp.where(happens, silent + wait, silent), count + happens

        start = (state.settled, self._first_wait(path, keys), jnp.zeros_like(state.count))
        zeta, _, _ = jax.lax.while_loop(due, event, start)
        return dataclasses.replace(state, settled=jnp.where(which[:, None], zeta, state.settled))

    def cut(self, state: LatentWalk, elapsed: Float[Array, " C"], which: Bool[Array, " C"]) -> Float[Array, "C k"]:
        """The latents at time ``elapsed`` of a plan that was walked with a floor, on some chains; else the settled ones."""
        ever = jnp.concatenate([state.zeta[:, None], state.before], 1)
        undone = jnp.sum(state.times >= elapsed[:, None], 1)
        return jnp.where(which[:, None], pick(ever, undone), state.settled)

    def step(self, state, path, keys):
        """One cell of the path on every chain; arrivals and silent events are worked out where enough chains wait."""
        begun = jax.lax.cond(jnp.any(state.new), lambda: self._begun(state, path, keys), lambda: state)
        state = self._cell(_passed(begun, path), path, keys)
        a, v = path.state(self.dynamics, state.walk.segment, state.walk.offset)
        due, floor = state.due, path.floor if self.history else None
        if floor is not None:
            due = due & (state.times[:, -1] <= floor)
        waiting, due = enough(jnp.stack([state.waiting, due]), _moving(state))
        return self._silenced(self._decided(state, waiting, path, a, v), due, path, keys, a)

    def _cell(self, state: LatentWalk, path: Path, keys: ChainKeys) -> LatentWalk:
        """Bound the rate on a cell and go to the first candidate, to the silent event, or to the cell's end."""
        walk, moving = state.walk, _moving(state)
        a, v = path.state(self.dynamics, walk.segment, walk.offset)
        now = time_of(path, walk)
        remaining = path.at(path.duration, walk.segment) - walk.offset
        before = jnp.maximum(state.silent - now, 0.0)

        def search(rows):
            (a, v, zeta, room), (number, draws), keys = rows
            cell = self.potential.cell(a, v, zeta, room)
            curve = RateCurve(cell.values[None], cell.error[None], cell.length)
            first = first_candidate(curve, uniforms(keys, number, draws, CANDIDATES * DRAWN))
            finite = (cell.length > 0) & jnp.all(jnp.isfinite(cell.values + cell.error), 0) | (room <= 0)
            squeezed = first.threshold, first.ceiling, first.least, first.most
            return jnp.stack([*squeezed, first.time, first.hit, ~first.hit & ~first.cut, cell.length, finite], -1)

        room = jnp.minimum(remaining, before)
        rows = ((a, v, state.zeta, room), (path.number, walk.draws), keys)
        found = in_turns(search, moving, rows, 9)
        threshold, ceiling, least, most, since, hit, whole, length, finite = found.T
        hit, whole, finite = hit > 0, whole > 0, finite > 0
        ends = whole & (length >= remaining)
        segment, offset, over = advance(path, walk.segment, walk.offset, since, ends)
        moved = walk.moved(path, segment, offset, over, walk.mark, jnp.where(finite, FINE, NOT_FINITE))
        moved = dataclasses.replace(moved, passes=moved.passes + POINTS)
        new = dataclasses.replace(
            state, walk=moved, waiting=hit & ~over & finite, due=whole & (length >= before) & ~over,
            ceiling=ceiling, threshold=threshold, least=least, most=most,
        )  # fmt: skip
        return keep_done(~moving, state, new)

    def _decided(self, state: LatentWalk, which: Bool[Array, " C"], path: Path, a, v) -> LatentWalk:
        walk, rows = state.walk, (a, state.zeta)
        gradient = in_turns(lambda rows: self.potential.gradients(*rows), which, rows, a.shape[1])
        rate = jnp.sum(gradient * v, -1)
        accepted, fault = accept(state.threshold, rate, state.ceiling, jnp.isfinite(rate), state.squeeze, which)
        decided = walk.decided(path, accepted, fault, unit(gradient))
        return dataclasses.replace(state, walk=keep_done(~which, walk, decided), waiting=state.waiting & ~which)

    def _silenced(self, state: LatentWalk, which: Bool[Array, " C"], path: Path, keys: ChainKeys, a) -> LatentWalk:
        zeta, wait = self._moved(which, a, state.zeta, path, keys, state.count)
        silent = jnp.where(which, state.silent + wait, state.silent)
        moved = dataclasses.replace(state, zeta=zeta, silent=silent, count=state.count + which, due=state.due & ~which)
        if path.floor is None or not self.history:
            return moved
        times = jnp.concatenate([state.silent[:, None], state.times[:, :-1]], 1)
        before = jnp.concatenate([state.zeta[:, None], state.before[:, :-1]], 1)
        times, before = keep_done(~which, (state.times, state.before), (times, before))
        return dataclasses.replace(moved, times=times, before=before)


def _passed(state: LatentWalk, path: Path) -> LatentWalk:
    """The walk ended where it waits beyond an arrival of another site."""
    if path.cap is None:
        return state
    walk = state.walk
    over = ~walk.done & (time_of(path, walk) > path.cap)
    ended = dataclasses.replace(walk, done=walk.done | over, time=jnp.where(over, path.horizon, walk.time))
    return dataclasses.replace(state, walk=ended)


def _moving(state: LatentWalk) -> Bool[Array, " C"]:
    return ~(state.walk.done | state.waiting | state.due)
