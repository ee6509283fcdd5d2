"""The Zig-Zag process."""

import equinox as eqx

from fedpdmc.dynamics.base import Dynamics, rate
from fedpdmc.dynamics.flows import Line


class ZigZag(Dynamics):
    """``a(t) = a + v t`` with ``v ∈ {−1, 1}^d``; coordinate i flips at rate ``(v_i ∂_i U)_+ + excess``.

    The excess is even under the flip, so it cancels in ``λ_i(a, v) − λ_i(a, F_i v) = v_i ∂_i U``, the condition for
    invariance.

    Parameters
    ----------
    excess : float
        Rate of additional flips of every coordinate, made by the coordinator.
    """

    excess: float = eqx.field(default=0.0, static=True, converter=lambda value: rate("ZigZag(excess)", value))
    refresh = 0.0
    flow = Line()
    flips = True
    unit_speed = True
