"""The Bouncy Particle process."""

import equinox as eqx

from fedpdmc.dynamics.base import Dynamics, check_bounce, rate
from fedpdmc.dynamics.flows import Line
from fedpdmc.dynamics.jumps import REFLECT


class BouncyParticle(Dynamics):
    """``a(t) = a + v t`` with ``v ~ N(0, I)``; reflection ``v − 2⟨v,g⟩/|g|² g`` at rate ``⟨v, g⟩_+``, ``g = ∇U``.

    Parameters
    ----------
    refresh : float
        Rate at which the coordinator refreshes the velocity; without it the process need not be ergodic.
    bounce : "reflect" or "draw"
        As for `Boomerang`.
    """

    refresh: float = eqx.field(default=1.0, static=True, converter=lambda value: rate("BouncyParticle(refresh)", value))
    bounce: str = eqx.field(
        default=REFLECT, static=True, converter=lambda value: check_bounce("BouncyParticle(bounce)", value)
    )
    excess = 0.0
    flow = Line()
    flips = False
    unit_speed = False
