"""An envelope of records after their quadratic control variate: the third order of what is left, with a proved error."""

from __future__ import annotations

from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fedpdmc._jax.by_numpy import once
from fedpdmc.clocks.envelopes.base import DRAW_WORK, SegmentEnvelope, gradient_work, usual_states
from fedpdmc.clocks.envelopes.quadratic_rate_bound import RELATIVE_SLACK, signed_rates
from fedpdmc.dynamics import Dynamics
from fedpdmc.potentials import CubicRemainder, Quadratic
from fedpdmc.potentials.cubic_remainder import ROOM, ULPS

# On a line the constants hold on a cell on which the distance grows by at most this much (posterior standard deviations).
CELL = 1.5
# States at which the envelope is tried out.
TRIALS = 256


class QuadraticPart(eqx.Module):
    """``∇Q = g + B b``: the quadratic part of a site's potential, apart from the remainder, such as its share of the prior.

    Attributes
    ----------
    matrix, slope : (d, d), (d,)
        ``B`` and ``g``.
    norm, norms : (), (d,)
        Bounds of ``|B b|`` and of its coordinates over unit vectors.
    rounding : ()
        Bound of the rounding of ``∇Q``, per unit of ``1 + |b|``.
    """

    matrix: Float[Array, "d d"]
    slope: Float[Array, " d"]
    norm: Float[Array, ""]
    norms: Float[Array, " d"]
    rounding: Float[Array, ""]

    @classmethod
    def of(cls, quadratic: Quadratic, center: Float[Array, " d"]) -> QuadraticPart:
        """About a centre."""
        matrix, linear, at = (np.asarray(x) for x in (quadratic.precision, quadratic.linear, center))
        size = np.abs(matrix).sum() * (1 + np.abs(at).sum()) + np.abs(linear).sum()
        norms = np.linalg.norm(matrix, axis=1)
        numbers = (matrix, matrix @ at + linear, ROOM * np.linalg.norm(matrix, 2), ROOM * norms, ULPS * size)
        return cls(*(jnp.asarray(x) for x in numbers))

    def gradient(self, b: Float[Array, "C d"]) -> Float[Array, "C d"]:
        """``g + B b``."""
        return self.slope + b @ self.matrix

    def largest(self, size: Float[Array, "*C"], flips: bool) -> Float[Array, "*C k"]:
        """Bound of ``|e·∇Q|`` for ``|b| ≤ size``: by coordinate, or for any unit vector e."""
        if flips:
            return size[..., None] * self.norms + jnp.abs(self.slope)
        return (size * self.norm + ROOM * jnp.linalg.norm(self.slope))[..., None]


class ThirdOrder(SegmentEnvelope):
    """The third-order remainder of records (`CubicRemainder`), and a quadratic where the control variate leaves one."""

    domain: ClassVar[str] = "a third-order remainder with a proved error, then the records"

    remainder: CubicRemainder
    quadratic: QuadraticPart | None = None

    def constants(self, dynamics, a, v, remaining):
        """Constants from the energy on a rotation, and from the distance on a cell of a line."""
        flips, rotating, remainder = dynamics.flips, dynamics.flow.rotating, self.remainder
        if rotating:
            distance = jnp.linalg.norm(remainder.center)
            size, cell = jnp.sqrt(jnp.sum(a**2 + v**2, -1)) + distance, remaining
            speed = jnp.hypot(a, v)
        else:
            pace = jnp.linalg.norm(v, axis=-1)
            cell = jnp.minimum(remaining, CELL / jnp.maximum(pace, 1e-300))
            size = jnp.linalg.norm(a - remainder.center, axis=-1) + pace * cell
            speed = jnp.abs(v)
        if rotating and not flips:
            # Over |b|² + |v|² ≤ ρ²: |b|²|v| ≤ 2ρ³/(3√3), |b|³|v| ≤ 3√3ρ⁴/16 and |b||v| ≤ ½ρ².
            cubic = 0.5 * remainder.norm * 2 * size**3 / (3 * jnp.sqrt(3.0))
            rates = cubic[..., None] + size[..., None] * (3 * jnp.sqrt(3.0) / 16) * remainder.beyond(size, False)
            if self.quadratic is not None:
                rates = rates + size[..., None] * self.quadratic.largest(0.5 * size, False)
        else:
            faster = speed if flips else jnp.linalg.norm(v, axis=-1, keepdims=True)
            rates = faster * remainder.largest(size, flips)
            if self.quadratic is not None:
                rates = rates + faster * self.quadratic.largest(size, flips)
        return rates * (1 + 2 * RELATIVE_SLACK) + self._slack(size, speed), cell

    def bound(self, dynamics, a, v):
        """The bound of third order with its error, or that of fourth order if it is sharper."""
        b, remainder, flips = a - self.remainder.center, self.remainder, dynamics.flips
        size = jnp.linalg.norm(b, axis=-1)
        speed = jnp.abs(v) if flips else jnp.linalg.norm(v, axis=-1, keepdims=True)
        signed = signed_rates(dynamics, remainder.gradient(b), v)
        terms = jnp.abs(signed)
        if self.quadratic is not None:
            second = signed_rates(dynamics, self.quadratic.gradient(b), v)
            signed, terms = signed + second, terms + jnp.abs(second)
        bound = _ceiling(signed, terms, speed * remainder.beyond(size, flips))
        if remainder.sharper is not None:
            fourth = signed_rates(dynamics, remainder.sharper.gradient(b), v)
            beyond = speed * remainder.sharper.beyond(size, remainder.growth, flips)
            bound = jnp.minimum(bound, _ceiling(signed + fourth, terms + jnp.abs(fourth), beyond))
        return bound + 0.5 * self._slack(size, v)

    def _slack(self, size, v):
        """Room for the rounding of sums over records, in units of the whitened rates."""
        rounding = self.remainder.rounding + (0.0 if self.quadratic is None else self.quadratic.rounding)
        return rounding * jnp.sum(jnp.abs(v), -1, keepdims=True) * (1 + size[..., None])

    def cost(self, potential, dynamics):
        """The records as often as the mean bound, and the bound at a point for every candidate of the constants."""
        tensors = (self.remainder.tensor, None if self.remainder.sharper is None else self.remainder.sharper.tensor)
        price = (DRAW_WORK + 2 * sum(x.size for x in tensors if x is not None)) / gradient_work(potential)
        passes, points = _usual(self, dynamics, *usual_states(dynamics, potential.dim, TRIALS))
        return float(passes) + price * float(points)


@once
def _usual(envelope: ThirdOrder, dynamics: Dynamics, a: Float[Array, "n d"], v: Float[Array, "n d"]):
    """Mean bound and mean constant."""
    constants, _ = envelope.constants(dynamics, a, v, jnp.full(a.shape[0], jnp.inf))
    return jnp.mean(jnp.sum(envelope.bound(dynamics, a, v), -1)), jnp.mean(jnp.sum(constants, -1))


def _ceiling(signed: Float[Array, "C k"], terms: Float[Array, "C k"], beyond: Float[Array, "C k"]):
    """The positive part of a rate that is known up to ``beyond``, with room for the rounding of its terms."""
    return jnp.maximum(signed, 0.0) + RELATIVE_SLACK * terms + (1 + RELATIVE_SLACK) * beyond
