"""Thinning under bounds that are guessed on a grid and monitored, for models without proved bounds."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fedpdmc._jax.random_streams import exponentials, uniforms
from fedpdmc.clocks.base import Clock, Walk, keep_done, unit
from fedpdmc.clocks.dense import Ceilings
from fedpdmc.clocks.envelopes import signed_rates
from fedpdmc.dynamics import Dynamics
from fedpdmc.potentials import Potential

# Pieces of a cell, and the part of its range on a piece by which the guess is raised.
PIECES = 4
MARGIN = 0.1
# The longest cell on a line (in whitened units of length at speed one) and on a rotation (radians).
LONGEST_LINE, LONGEST_TURN = 1.0, 0.5


class AdaptiveWalk(eqx.Module):
    """A walk, and how often a rate was seen above its bound, over all plans."""

    walk: Walk
    violations: Int[Array, " C"]


class AdaptiveClock(Clock[AdaptiveWalk]):
    """Any potential with a gradient; not certified.

    The length of a cell follows the slope of the rates where it starts. Rates and slopes are evaluated on a grid of the
    cell. On each piece the bound is the larger end, or where the tangents of both ends meet if the rate rises at the left
    and falls at the right, and a margin: valid for rates that are monotone, convex or concave on a piece, otherwise a guess.
    Where a rate at a candidate exceeds its bound the candidate is accepted and counted; the law of the time is then wrong.
    """

    potential: Potential
    dynamics: Dynamics

    @property
    def domain(self) -> str:
        return "bounds guessed on a grid: nothing is proved"

    def idle(self, chains):
        return AdaptiveWalk(Walk.idle(self.dynamics, chains, self.dim), jnp.zeros(chains, int))

    def restart(self, state, new, path):
        return AdaptiveWalk(state.walk.restart(new, path), state.violations)

    def violations(self, state):
        return state.violations

    def step(self, state, path, keys):
        walk = state.walk
        a, v = path.state(self.dynamics, walk.segment, walk.offset)
        remaining = path.at(path.duration, walk.segment) - walk.offset
        tops, cell = self._guess(a, v, remaining)
        u = uniforms(keys, path.number, walk.draws, 3)
        wait, mark, ceiling, over = Ceilings.of(jnp.swapaxes(tops, 1, 2), cell).point(exponentials(u[0]), u[1])
        hit = ~over
        there, velocity = self.dynamics.flow.move(a, v, jnp.where(hit, wait, 0.0))
        gradient = self.potential.gradients(there)
        rate = jnp.take_along_axis(signed_rates(self.dynamics, gradient, velocity), mark[:, None], -1)[:, 0]
        broken = ~jnp.isfinite(jnp.sum(tops, (0, 2))) | ~jnp.isfinite(rate)
        accepted = hit & (u[2] * ceiling < rate) & ~broken
        normal = None if self.dynamics.flips else jnp.where(accepted[:, None], unit(gradient), walk.normal)
        step, ends = jnp.where(hit, wait, cell), ~hit & (cell >= remaining)
        moved = walk.drawn(path, step, ends, accepted, mark, broken, normal, PIECES + 2)
        new = AdaptiveWalk(moved, state.violations + (hit & (rate > ceiling)))
        return keep_done(walk.done, state, new)

    def _guess(
        self, a: Float[Array, "C d"], v: Float[Array, "C d"], remaining: Float[Array, " C"]
    ) -> tuple[Float[Array, "pieces C k"], Float[Array, " C"]]:
        """A bound for each piece of a cell, and the cell's length."""

        def rates(s):
            there, velocity = self.dynamics.flow.move(a, v, s)
            return signed_rates(self.dynamics, self.potential.gradients(there), velocity)

        def rates_at(s):
            return jax.jvp(rates, (s,), (jnp.ones_like(s),))

        first = rates_at(jnp.zeros_like(remaining))
        longest = LONGEST_TURN if self.dynamics.flow.rotating else LONGEST_LINE
        steepest = jnp.sum(jnp.abs(first[1]), -1)
        cell = jnp.minimum(remaining, jnp.minimum(longest, 1 / jnp.sqrt(jnp.maximum(steepest, 1e-300))))
        times = cell * (jnp.arange(1, PIECES + 1) / PIECES)[:, None]
        rest = jax.vmap(rates_at)(times)
        value, slope = (jnp.concatenate([one[None], more]) for one, more in zip(first, rest, strict=True))
        return piece_tops(value, slope, (cell / PIECES)[:, None]), cell


def piece_tops(
    value: Float[Array, "nodes C k"], slope: Float[Array, "nodes C k"], width: Float[Array, "C 1"]
) -> Float[Array, "pieces C k"]:
    """A guess of the largest positive part on each piece between nodes, from values and slopes at its ends."""
    left, right, rise, fall = value[:-1], value[1:], slope[:-1], slope[1:]
    hump = (rise > 0) & (fall < 0)
    meet = jnp.clip((right - left - fall * width) / jnp.where(hump, rise - fall, 1.0), 0.0, width)
    top = jnp.maximum(jnp.maximum(left, right), jnp.where(hump, left + rise * meet, -jnp.inf))
    return jnp.maximum(top + MARGIN * (top - jnp.minimum(left, right)), 0.0)
