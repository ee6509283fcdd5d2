"""The Boomerang process and its factorised form."""

import equinox as eqx

from fedpdmc.dynamics.base import Dynamics, check_bounce, rate, rate_or_turns
from fedpdmc.dynamics.flows import Rotation
from fedpdmc.dynamics.jumps import REFLECT
from fedpdmc.dynamics.quarter_turns import QUARTER_TURNS


class Boomerang(Dynamics):
    """``a(t) = a cos t + v sin t``; reflection at rate ``⟨v, g⟩_+`` with ``g`` the gradient of ``U − ½|a|²``.

    The rotation keeps ``N(0, I)`` invariant, so a Gaussian target equal to the reference costs no event at all. The term
    ``−½|a|²`` is the coordinator's.

    *Quarter turns.* The velocity is refreshed at fixed times π/2 apart. On a Gaussian the position after a quarter turn is
    the velocity at its start, so the positions at the turns are independent draws: 2/π = 0.64 effective samples per unit
    of time. Refreshment at the best rate gives 0.35, limited by the energy.

    They leave the target invariant. Let ``P_s`` be the kernel of flow and reflections for the fixed time s, and R the kernel
    that replaces v by a draw of N(0, I). The generator of the process without refreshment leaves ``μ = π ⊗ N(0, I)``
    invariant, so ``μ P_s = μ`` for every s, and ``μ R = μ`` since v is independent of a under μ. With turns at times
    ``t_1 < t_2 < …`` that are constants the law at time t is ``μ P_{t_1} R P_{t_2 − t_1} R … P_{t − t_k} = μ``. So a chain
    that starts in μ has the law μ at every fixed time, at the turns too. The times must be constants: at a time that
    depends on the state the law is not μ. Each chain has its own phase, a constant too.

    Parameters
    ----------
    refresh : "quarter-turns" or float
        How the coordinator refreshes the velocity, since ``|a|² + |v|²`` is conserved between reflections: at fixed times,
        or at random ones with this rate.
    bounce : "reflect" or "draw"
        How an event of a site changes the velocity (`fedpdmc.dynamics.jumps`).
    """

    refresh: float | str = eqx.field(
        default=QUARTER_TURNS, static=True, converter=lambda value: rate_or_turns("Boomerang(refresh)", value)
    )
    bounce: str = eqx.field(
        default=REFLECT, static=True, converter=lambda value: check_bounce("Boomerang(bounce)", value)
    )
    excess = 0.0
    flow = Rotation()
    flips = False
    unit_speed = False


class FactorisedBoomerang(Dynamics):
    """The rotation of `Boomerang` with coordinate flips at rate ``(v_i ∂_i(U − ½|a|²))_+ + excess |v_i|``.

    Flow and flips conserve every ``a_i² + v_i²``: only refreshment changes them. The excess rate is even under the flip.

    Parameters
    ----------
    refresh : float or "quarter-turns"
        Rate at which the coordinator refreshes the velocity; or at fixed times, as in `Boomerang`, with the same proof.
    excess : float
        Rate, per unit of path length of a coordinate, of additional flips made by the coordinator.
    """

    refresh: float | str = eqx.field(
        default=1.0, static=True, converter=lambda value: rate_or_turns("FactorisedBoomerang(refresh)", value)
    )
    excess: float = eqx.field(
        default=0.0, static=True, converter=lambda value: rate("FactorisedBoomerang(excess)", value)
    )
    flow = Rotation()
    flips = True
    unit_speed = False
