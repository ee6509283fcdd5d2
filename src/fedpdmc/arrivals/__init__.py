"""WHEN it jumps."""

import equinox as eqx
from jaxtyping import Array, Float

from fedpdmc.arrivals.adaptive import AdaptiveClock
from fedpdmc.arrivals.clocks import AffineClock, Clock, ExponentialClock, is_exponential
from fedpdmc.arrivals.curves import CurveClock, curve_clock
from fedpdmc.arrivals.flips import FlippingClock, flipping_clock
from fedpdmc.arrivals.polynomial import PolynomialClock
from fedpdmc.arrivals.squeezed import squeezed_clock
from fedpdmc.arrivals.staged import StagedClock
from fedpdmc.arrivals.thinning import ThinnedClock
from fedpdmc.arrivals.walk import FINE, NOT_FINITE, VIOLATED, Path, Walk, follow, pick
from fedpdmc.dynamics import Dynamics
from fedpdmc.potentials import Potential, Shared

__all__ = [
    "FINE",
    "NOT_FINITE",
    "VIOLATED",
    "AdaptiveClock",
    "AffineClock",
    "Clock",
    "CurveClock",
    "FlippingClock",
    "Path",
    "PolynomialClock",
    "StagedClock",
    "Walk",
    "clock_for",
    "curve_clock",
    "flipping_clock",
    "follow",
    "holding",
    "pick",
]


def clock_for(potential: Potential, dynamics: Dynamics) -> Clock:
    """The cheapest exact clock for a potential in whitened coordinates."""
    if potential.affine(dynamics.flow.rotating):
        return AffineClock(potential, dynamics)
    if is_exponential(potential, dynamics):
        return ExponentialClock(potential, dynamics)  # type: ignore[arg-type]
    squeezed = squeezed_clock(potential, dynamics)
    return ThinnedClock(potential, dynamics) if squeezed is None else squeezed


def holding(clock: Clock, share: Float[Array, " C"] | None) -> Clock:
    """The clock of a site that holds this part of the prior on each chain; itself where the prior is not redistributed.

    A clock may start a plan with rates that it found at the end of the one before. That is a plan which an objection ended,
    and then the parts are the same: they change at horizons, where nothing has been looked at.
    """
    if share is None or not isinstance(clock.potential, Shared):
        return clock
    return eqx.tree_at(lambda c: c.potential, clock, clock.potential.holding(share))
