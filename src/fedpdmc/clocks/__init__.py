"""WHEN it jumps."""

import equinox as eqx
from jaxtyping import Array, Float

from fedpdmc.clocks.ball_segments import PolynomialClock
from fedpdmc.clocks.base import AffineClock, Clock, ExponentialClock, is_exponential
from fedpdmc.clocks.envelopes.position_polynomial import FlippingClock, flipping_clock
from fedpdmc.clocks.envelopes.record_polynomial import squeezed_clock
from fedpdmc.clocks.envelopes.time_polynomial import CurveClock, curve_clock
from fedpdmc.clocks.path import FINE, NOT_FINITE, VIOLATED, Path, Walk, follow, pick
from fedpdmc.clocks.segment_bounds import StagedClock
from fedpdmc.clocks.thinning import ThinnedClock
from fedpdmc.clocks.uncertified import AdaptiveClock
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
