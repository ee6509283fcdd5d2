"""An envelope for flips: the gradient of a program as a polynomial of the position, with a proved error on balls."""

from __future__ import annotations

import math
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fedpdmc._jax.by_numpy import once
from fedpdmc.clocks.envelopes.base import (
    POINT_PRICE,
    PROGRAM_CELL_PRICE,
    Known,
    PointEnvelope,
    bernstein,
    reach_of,
    usual_states,
)
from fedpdmc.clocks.envelopes.quadratic_rate_bound import RELATIVE_SLACK
from fedpdmc.dynamics import Dynamics
from fedpdmc.potentials import PolynomialCover, PolynomialRemainder, Program, RateBound

# If the error adds more candidates than this to a cell, the cell is bounded by the program, which costs as much as many.
MOST_ADDED = 30.0
# How much shorter than usual a cell may be.
SHORTEST = 1 / 16
# Points at which the envelope is tried out, and the lengths of cells that are tried.
TRIALS, LENGTHS = 512, 2.0 ** np.arange(2, -7, -1)


class FlipPolynomial(PointEnvelope):
    """Flips of a program whose gradient is known as a polynomial with a proved error on balls (`PolynomialRemainder`).

    Along a line ``v_i P_i(b + v s)`` is a polynomial of s; with Bernstein coefficients ``β_k`` on a cell of length h it lies
    below ``β_0 + c s`` for ``c = max_k (β_k − β_0) m/(k h)``, since a straight line has the coefficients ``β_0 + c k h/m``.
    ``E(|b + v s|)`` is convex in s, so it lies below its chord.

    Attributes
    ----------
    cell : ()
        The usual length of a cell.
    far : ()
        The distance from the centre that a cell should not exceed: cells there are shorter, down to a `SHORTEST` part.
    """

    domain: ClassVar[str] = "a Taylor polynomial with a proved error on balls, then the function"
    position_decides: ClassVar[bool] = False

    remainder: PolynomialRemainder | PolynomialCover
    cell: Float[Array, ""]
    far: Float[Array, ""]

    def known(self, a):
        """``∇P`` with ``E`` and the rounding."""
        local = self.remainder.about(a)
        error = local.error(a)[:, None] * (1 + RELATIVE_SLACK) + local.slip(a)
        return Known(a, local.gradients(a[None])[0], error)

    def bounded(self, dynamics, known, v):
        """Usable where the error adds few candidates; with the polynomial that is best half way through the cell."""
        a, (nodes, matrix) = known.position, bernstein(self.remainder.order - 1)
        h = self._length(a, v)
        there = a + nodes[:, None, None] * (h[:, None] * v)
        local = self.remainder.about(a + 0.5 * h[:, None] * v)
        rates = v * local.gradients(there)
        beta = jnp.einsum("kj,jci->kci", matrix, rates)
        steps = np.arange(1, len(nodes))[:, None, None] / (len(nodes) - 1)
        rise = jnp.max((beta[1:] - rates[0]) / steps, 0)
        start, end = local.error(there[0]), local.error(there[-1])
        speed, size = jnp.abs(v), jnp.max(jnp.abs(rates), 0)
        worst = float(np.abs(matrix).sum(1).max())
        slack = worst * (RELATIVE_SLACK * size + speed * (local.slip(there[0]) + local.slip(there[-1])))
        wider = speed * (1 + RELATIVE_SLACK)
        value = rates[0] + wider * start[:, None] + slack
        slope = (rise + wider * (end - start)[:, None] + slack) / h[:, None]
        # Not finite where the bound is not.
        added = jnp.sum(speed, -1) * 0.5 * (start + end) + jnp.sum(slack, -1) + 0.0 * jnp.sum(value + slope, -1)
        return RateBound(value, slope, jnp.zeros_like(value), h), added * self.cell <= MOST_ADDED

    def _length(self, a, v):
        """Length of a cell: the usual one, or shorter where it would reach too far."""
        if isinstance(self.remainder, PolynomialCover):
            return jnp.broadcast_to(self.cell, a.shape[:1])
        room = self.far - jnp.linalg.norm(a - self.remainder.center, axis=-1)
        return jnp.clip(room / jnp.maximum(jnp.linalg.norm(v, axis=-1), 1e-300), SHORTEST * self.cell, self.cell)

    def cost(self, potential, dynamics):
        """The envelope once for each cell, the program at undecided candidates, and cells where the envelope is unusable."""
        reach, useful = _tried(self, dynamics, *usual_states(dynamics, potential.dim, TRIALS))
        if not float(reach) > 0:
            return math.inf
        return (POINT_PRICE + (1 - float(useful)) * PROGRAM_CELL_PRICE) / float(reach)


def flip_polynomial(
    program: Program, remainder: PolynomialRemainder | PolynomialCover, dynamics: Dynamics
) -> FlipPolynomial:
    """The envelope with the length of cells that needs the fewest cells."""
    nodes = np.asarray(remainder.spacing) * np.arange(len(remainder.errors))
    errors = np.asarray(remainder.errors).reshape(len(nodes), -1).max(1)

    def made(h: float) -> FlipPolynomial:
        near = program.dim * h * errors <= 0.5 * MOST_ADDED
        return FlipPolynomial(remainder, jnp.asarray(h), jnp.asarray(np.max(nodes, initial=0.0, where=near)))

    envelopes = [made(h) for h in LENGTHS]
    a, v = usual_states(dynamics, program.dim, TRIALS)
    reaches = [float(_tried(envelope, dynamics, a, v)[0]) for envelope in envelopes]
    return envelopes[int(np.argmax(reaches))]


@once
def _tried(envelope: FlipPolynomial, dynamics: Dynamics, a: Float[Array, "n d"], v: Float[Array, "n d"]):
    """How far the envelope reaches on average (zero where it is unusable), and the share of points at which it is usable."""
    bound, useful = envelope.bounded(dynamics, envelope.known(a), v)
    return jnp.mean(jnp.where(useful, reach_of(bound.value, bound.slope, bound.reach), 0.0)), jnp.mean(useful)
