"""The Bouncy Particle process."""

import equinox as eqx

from fedpdmc.dynamics.base import Dynamics, rate
from fedpdmc.dynamics.flows import Line


class BouncyParticle(Dynamics):
    """``a(t) = a + v t`` with ``v ~ N(0, I)``; reflection ``v − 2⟨v,g⟩/|g|² g`` at rate ``⟨v, g⟩_+``, ``g = ∇U``.

    Parameters
    ----------
    refresh : float
        Rate at which the coordinator refreshes the velocity; without it the process need not be ergodic.
    """

    refresh: float = eqx.field(default=1.0, static=True, converter=lambda value: rate("BouncyParticle(refresh)", value))
    excess = 0.0
    flow = Line()
    flips = False
    unit_speed = False
