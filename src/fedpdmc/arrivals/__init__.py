"""WHEN it jumps."""

from fedpdmc.arrivals.clocks import AffineClock, Clock, ExponentialClock, is_exponential
from fedpdmc.arrivals.staged import StagedClock
from fedpdmc.arrivals.thinning import ThinnedClock
from fedpdmc.arrivals.walk import FINE, NOT_FINITE, VIOLATED, Path, Walk, follow, pick
from fedpdmc.dynamics import Dynamics
from fedpdmc.potentials import Potential

__all__ = ["FINE", "NOT_FINITE", "VIOLATED", "Clock", "Path", "StagedClock", "Walk", "clock_for", "follow", "pick"]


def clock_for(potential: Potential, dynamics: Dynamics) -> Clock:
    """The cheapest exact clock for a potential in whitened coordinates."""
    if potential.affine(dynamics.flow.rotating):
        return AffineClock(potential, dynamics)
    if is_exponential(potential, dynamics):
        return ExponentialClock(potential, dynamics)  # type: ignore[arg-type]
    return ThinnedClock(potential, dynamics)
