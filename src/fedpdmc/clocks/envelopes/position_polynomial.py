"""Flips of a program on lines, thinned on its Taylor polynomial; the program is asked only where that leaves a doubt."""

from __future__ import annotations

import functools
import math

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fedpdmc.clocks.base import keep_done
from fedpdmc.clocks.envelopes.record_polynomial import Known, SqueezedWalk, Squeezing, decided
from fedpdmc.clocks.envelopes.second_order import RELATIVE_SLACK, RateBound
from fedpdmc.clocks.path import FINE, NOT_FINITE, VIOLATED, Path
from fedpdmc.clocks.thinning import ThinnedWalk, draw, pick_mark
from fedpdmc.dynamics import Dynamics
from fedpdmc.potentials import PolynomialCover, PolynomialRemainder, Program

# A cell to which the error adds more candidates than this is bounded through the program, which costs as much as many.
MOST_DOUBT = 30.0
# How much shorter than usual a cell may be.
SHORTEST = 1 / 16
# Points at which it is tried out, the lengths of cells that are tried, and the share of points at which it must be of use.
TRIALS, LENGTHS, MOSTLY = 512, 2.0 ** np.arange(2, -7, -1), 0.5


@functools.cache
def bernstein(degree: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Nodes on [0, 1], the matrix from values there to Bernstein coefficients, and the largest sum of a row of it."""
    nodes = 0.5 - 0.5 * np.cos(np.pi * np.arange(degree + 1) / degree)
    k = np.arange(degree + 1)
    choose = np.array([math.comb(degree, i) for i in k])
    matrix = np.linalg.inv(choose * nodes[:, None] ** k * (1 - nodes[:, None]) ** (degree - k))
    return nodes, matrix, float(np.abs(matrix).sum(1).max())


class FlippingClock(Squeezing):
    """Flips of a program whose gradient is known as a polynomial with a proved error on balls (`PolynomialRemainder`).

    Along a line ``v_i P_i(b + v s)`` is a polynomial of s; with Bernstein coefficients ``β_k`` on a cell of length h it lies
    below ``β_0 + c s`` for ``c = max_k (β_k − β_0) m/(k h)``, since a straight line has the coefficients ``β_0 + c k h/m``.
    ``E(|b + v s|)`` is convex in s, so that it lies below its chord.

    Attributes
    ----------
    cell : ()
        The usual length of a cell.
    far : ()
        How far from the centre a cell should not reach: it is shorter there, down to a `SHORTEST` part.
    """

    potential: Program
    remainder: PolynomialRemainder | PolynomialCover
    dynamics: Dynamics
    cell: Float[Array, ""]
    far: Float[Array, ""]

    def known(self, a):
        """``∇P`` with ``E`` and the rounding."""
        local = self.remainder.about(a)
        error = local.error(a)[:, None] * (1 + RELATIVE_SLACK) + local.slip(a)
        return Known(a, local.gradients(a[None])[0], error)

    def bounded(self, known, v):
        """Of use where the error adds few candidates to a cell."""
        bound, extra = self._bound(known, v)
        return bound, extra * self.cell <= MOST_DOUBT

    def _bound(self, known: Known, v) -> tuple[RateBound, Float[Array, " C"]]:
        """The bound, and how much the error adds to the rates; by the polynomial that is best half way through the cell."""
        a, (nodes, matrix, worst) = known.position, bernstein(self.remainder.order - 1)
        h = self._length(a, v)
        there = a + nodes[:, None, None] * (h[:, None] * v)
        local = self.remainder.about(a + 0.5 * h[:, None] * v)
        rates = v * local.gradients(there)
        beta = jnp.einsum("kj,jci->kci", matrix, rates)
        steps = np.arange(1, len(nodes))[:, None, None] / (len(nodes) - 1)
        rise = jnp.max((beta[1:] - rates[0]) / steps, 0)
        start, end = local.error(there[0]), local.error(there[-1])
        speed, size = jnp.abs(v), jnp.max(jnp.abs(rates), 0)
        slack = worst * (RELATIVE_SLACK * size + speed * (local.slip(there[0]) + local.slip(there[-1])))
        doubt = speed * (1 + RELATIVE_SLACK)
        value = rates[0] + doubt * start[:, None] + slack
        slope = (rise + doubt * (end - start)[:, None] + slack) / h[:, None]
        extra = jnp.sum(speed, -1) * 0.5 * (start + end) + jnp.sum(slack, -1) + 0.0 * jnp.sum(value + slope, -1)
        return RateBound(value, slope, jnp.zeros_like(value), h), extra

    def _length(self, a, v):
        """Of a cell: the usual one, or shorter where it would reach too far."""
        if isinstance(self.remainder, PolynomialCover):
            return jnp.broadcast_to(self.cell, a.shape[:1])
        room = self.far - jnp.linalg.norm(a - self.remainder.center, axis=-1)
        return jnp.clip(room / jnp.maximum(jnp.linalg.norm(v, axis=-1), 1e-300), SHORTEST * self.cell, self.cell)

    def step(self, state, path, keys):
        """Draw where the rates are bounded, survey where they are not, ask the program where enough chains are in doubt."""
        state = eqx.tree_at(lambda s: s.thinned, state, draw(state.thinned, path, keys))
        state = self._survey(state, path)
        state = self._served(state, path, lambda now: now.waiting & ~now.poor, self._decide)
        return self._served(state, path, lambda now: now.waiting & now.poor, self._started)

    def _started(self, state: SqueezedWalk, path: Path) -> SqueezedWalk:
        """A cell through the program. A plan that starts where it did looks anew: the velocity decides what is of use."""
        found = self._inspect(state, path)
        anchor = jnp.where(state.waiting[:, None], jnp.nan, found.thinned.anchor_a)
        return eqx.tree_at(lambda s: s.thinned.anchor_a, found, anchor)

    def _decide(self, state: SqueezedWalk, path: Path) -> SqueezedWalk:
        """The program's gradient at candidates; the next survey starts a cell."""
        thinned, walk = state.thinned, state.thinned.walk
        a, v = path.state(self.dynamics, walk.segment, walk.offset)
        gradient = self.potential.gradients(a)
        rate = pick_mark(v * gradient, walk.mark)
        known = (rate >= state.least) & (rate <= state.most) & (rate <= thinned.ceiling)
        fault = jnp.where(jnp.all(jnp.isfinite(gradient), -1), jnp.where(known, FINE, VIOLATED), NOT_FINITE)
        inspected, none = decided(thinned, path, rate, fault), jnp.zeros_like(known)
        new = ThinnedWalk(
            inspected, none, none, thinned.ceiling, thinned.threshold, thinned.bound, jnp.full_like(a, jnp.nan), v
        )  # fmt: skip
        return keep_done(~state.waiting, state, SqueezedWalk(new, none, none, state.least, state.most))


def flipping_clock(
    program: Program, remainder: PolynomialRemainder | PolynomialCover, dynamics: Dynamics
) -> FlippingClock | None:
    """Such a clock with the length of cells that takes the fewest, where the polynomial is good enough to be of use."""
    rng = np.random.default_rng(0)
    a = jnp.asarray(rng.standard_normal((TRIALS, program.dim)))
    v = jnp.asarray(np.sign(rng.standard_normal((TRIALS, program.dim))))
    nodes = np.asarray(remainder.spacing) * np.arange(len(remainder.errors))
    errors = np.asarray(remainder.errors).reshape(len(nodes), -1).max(1)

    def made(h: float) -> FlippingClock:
        near = program.dim * h * errors <= 0.5 * MOST_DOUBT
        far = jnp.asarray(np.max(nodes, initial=0.0, where=near))
        return FlippingClock(potential=program, remainder=remainder, dynamics=dynamics, cell=jnp.asarray(h), far=far)

    clocks = [made(h) for h in LENGTHS]
    advance, useful = (np.asarray(x) for x in zip(*(_tried(clock, a, v) for clock in clocks), strict=True))
    best = int(np.argmax(advance))
    return clocks[best] if useful[best] >= MOSTLY else None


@eqx.filter_jit
def _tried(clock: FlippingClock, a: Float[Array, "n d"], v: Float[Array, "n d"]):
    """How far a survey reaches on average, nowhere where it is of no use, and the share of points at which it is."""
    known = clock.known(a)
    bound, useful = clock.bounded(known, v)
    h = bound.reach[:, None]
    # Of the positive part of an affine function.
    one, other = jnp.maximum(bound.value, 0.0), jnp.maximum(bound.value + bound.slope * h, 0.0)
    rising = jnp.maximum(jnp.maximum(one, other), 1e-300)
    load = jnp.sum(0.5 * h * jnp.where((one > 0) & (other > 0), one + other, rising**2 / jnp.abs(bound.slope * h)), -1)
    reach = jnp.where(useful, bound.reach * -jnp.expm1(-load) / jnp.maximum(load, 1e-300), 0.0)
    return jnp.mean(reach), jnp.mean(useful)
