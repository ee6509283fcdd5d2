"""Plan and Arrival: the two messages that pass between coordinator and sites."""

from __future__ import annotations

from typing import TYPE_CHECKING

import equinox as eqx
import numpy as np
from jaxtyping import Array, Bool, Float, Int

# Arrivals of sites on a network are NumPy's, until those of all sites are together.
if TYPE_CHECKING:
    Either = Array
else:
    Either = Array | np.ndarray


class TurnSchedule(eqx.Module):
    """The numbers from which a plan follows whose segments end in turns only.

    Attributes
    ----------
    wait, number : (C,)
        Time to the first turn, and its number: with the public key of the turns it decides the velocities after them.
    left : (C,)
        Time to the horizon, which may be cut by the number of segments.
    """

    wait: Float[Array, " C"]
    number: Int[Array, " C"]
    left: Float[Array, " C"]


class Plan(eqx.Module):
    """The path that the coordinator intends, for every chain, in whitened coordinates.

    Attributes
    ----------
    number : (C,)
        The plan's number within the run; with the chain it keys the site's randomness.
    start : (C, d)
        Where the path starts.
    duration : (C, S)
        How long each segment lasts; segments that are not used last zero. Their sum is the horizon.
    velocity : (C, S, d)
        The velocity at the start of each segment.
    share : (C, M), or (C,) as a site gets it; optional
        The sites' parts of a prior that is redistributed, for the whole plan.
    turns : TurnSchedule, optional
        What the segments after the first follow from, where the coordinator has no other events than turns.
    time : (C,), optional
        The process time at which each plan begins, where sites must know it.
    """

    number: Int[Array, " C"]
    start: Float[Array, "C d"]
    duration: Float[Array, "C S"]
    velocity: Float[Array, "C S d"]
    share: Float[Array, "C M"] | Float[Array, " C"] | None = None
    turns: TurnSchedule | None = None
    time: Float[Array, " C"] | None = None

    @property
    def horizon(self) -> Float[Array, " C"]:
        """Time at which the plan ends."""
        return self.duration.sum(-1)


class Arrival(eqx.Module):
    """A site's answer: for every chain its first event along the plan, or none by the horizon. Or those of M sites.

    Attributes
    ----------
    time : (C,) or (M, C)
        Time since the plan's start (the horizon if there is no event).
    rang : (C,) or (M, C)
        Whether there was an event.
    mark : (C,) or (C, d), with an axis for sites before them or not
        The coordinate that flips; or, in whitened coordinates, the unit normal of a reflection or the velocity drawn.
    """

    time: Float[Either, "*M C"]
    rang: Bool[Either, "*M C"]
    mark: Int[Either, "*M C"] | Float[Either, "*M C d"]
