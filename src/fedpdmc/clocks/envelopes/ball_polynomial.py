"""An envelope of a program on rotations: one number for each ball, and its Taylor polynomial with a proved error."""

from __future__ import annotations

from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from fedpdmc.clocks.envelopes.base import POINT_PRICE, PROGRAM_CELLS, SegmentEnvelope, usual_states
from fedpdmc.clocks.envelopes.quadratic_rate_bound import RELATIVE_SLACK
from fedpdmc.potentials import PolynomialRemainder

# Candidates per unit of time above which a segment is walked in cells.
MOST_CANDIDATES = 60.0
# States at which the envelope is tried out.
TRIALS = 512


class BallPolynomial(SegmentEnvelope):
    """Reflections of a program whose gradient is known as a polynomial on balls (`PolynomialRemainder`).

    On a rotation ``|a|² + |v|² = ρ²`` is conserved, so that the ball of radius ρ bounds the rate on a segment; at a point
    the rate is at most ``(v·∇P)_+ + |v| E(|b|)``.

    This is proved for the rate r in exact arithmetic, whereas the clock evaluates a computed rate c. Candidates of the
    bound B are accepted with probability ``min(c₊, B)/B``, so events have the rate ``min(c₊, B)``. Since ``r₊ ≤ B``, it is
    at least as near to ``r₊`` as ``c₊`` is: the law is that of the function up to the rounding of its own gradient. The
    remainder's ``rounding`` only decides when a run stops: a computed rate outside ``v·∇P ± |v|(E + rounding)`` is a fault.
    """

    domain: ClassVar[str] = "a Taylor polynomial with a proved error on balls, then the function"

    remainder: PolynomialRemainder

    def constants(self, dynamics, a, v, remaining):
        """Constants from the table of hazards; infinite where nothing is known."""
        distance = jnp.linalg.norm(self.remainder.center)
        reach = jnp.sqrt(jnp.sum(a * a + v * v, -1)) + distance
        rate = self.remainder.hazard(reach) * (1 + 2 * RELATIVE_SLACK) + self._slack(reach, reach)
        return rate[..., None], remaining

    def bound(self, dynamics, a, v):
        """From the polynomial."""
        rate, beyond = self._known(a, v)
        return (jnp.maximum(rate, 0.0) + beyond)[:, None]

    def least(self, dynamics, a, v):
        """From the polynomial."""
        rate, beyond = self._known(a, v)
        return (rate - beyond)[:, None]

    def _known(self, a, v):
        """The polynomial's rate, and how far the computed one may be from it."""
        b, speed = a - self.remainder.center, jnp.linalg.norm(v, axis=-1)
        size = jnp.linalg.norm(b, axis=-1)
        rate = jnp.sum(v * self.remainder.gradient(b), -1)
        beyond = RELATIVE_SLACK * jnp.abs(rate) + (1 + RELATIVE_SLACK) * speed * self.remainder.error(size)
        return rate, beyond + 0.5 * self._slack(size, speed)

    def _slack(self, size: Float[Array, "*C"], speed: Float[Array, "*C"]) -> Float[Array, "*C"]:
        return self.remainder.rounding * speed * (1 + size)

    def cost(self, potential, dynamics):
        """The polynomial at every candidate, the program as often as the mean bound, and cells if the constant is large."""
        a, v = usual_states(dynamics, potential.dim, TRIALS)
        constant = self.constants(dynamics, a, v, jnp.zeros(TRIALS))[0][:, 0]
        bound = jnp.minimum(self.bound(dynamics, a, v)[:, 0], constant)
        near = POINT_PRICE * constant + bound
        return float(jnp.mean(jnp.where(constant < MOST_CANDIDATES, near, PROGRAM_CELLS)))
