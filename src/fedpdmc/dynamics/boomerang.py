"""The Boomerang process and its factorised form."""

import equinox as eqx

from fedpdmc.dynamics.base import Dynamics, rate
from fedpdmc.dynamics.flows import Rotation


class Boomerang(Dynamics):
    """``a(t) = a cos t + v sin t``; reflection at rate ``⟨v, g⟩_+`` with ``g`` the gradient of ``U − ½|a|²``.

    The rotation keeps ``N(0, I)`` invariant, so a Gaussian target equal to the reference costs no event at all. The term
    ``−½|a|²`` is the coordinator's.

    Parameters
    ----------
    refresh : float
        Rate at which the coordinator refreshes the velocity: between reflections ``|a|² + |v|²`` is conserved.
    """

    refresh: float = eqx.field(default=1.0, static=True, converter=lambda value: rate("Boomerang(refresh)", value))
    excess = 0.0
    flow = Rotation()
    flips = False
    unit_speed = False


class FactorisedBoomerang(Dynamics):
    """The rotation of `Boomerang` with coordinate flips at rate ``(v_i ∂_i(U − ½|a|²))_+ + excess |v_i|``.

    Flow and flips conserve every ``a_i² + v_i²``: only refreshment changes them. The excess rate is even under the flip.

    Parameters
    ----------
    refresh : float
        Rate at which the coordinator refreshes the velocity.
    excess : float
        Rate, per unit of path length of a coordinate, of additional flips made by the coordinator.
    """

    refresh: float = eqx.field(
        default=1.0, static=True, converter=lambda value: rate("FactorisedBoomerang(refresh)", value)
    )
    excess: float = eqx.field(
        default=0.0, static=True, converter=lambda value: rate("FactorisedBoomerang(excess)", value)
    )
    flow = Rotation()
    flips = True
    unit_speed = False
