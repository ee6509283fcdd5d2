"""Clocks: when the next event of a potential happens along a path."""

from fedpdmc.clocks.base import (
    FINE,
    NOT_FINITE,
    VIOLATED,
    Clock,
    Path,
    Walk,
    answer,
    begin_walk,
    follow,
    holding,
    pick,
    walk_on,
)
from fedpdmc.clocks.choose import ClockChoice, clock_for
from fedpdmc.clocks.closed_form import AffineClock
from fedpdmc.clocks.private_latents import LatentClock
from fedpdmc.clocks.thinning import AdaptiveClock, CurveClock, SegmentClock, ThinnedClock

__all__ = [
    "FINE", "NOT_FINITE", "VIOLATED", "AdaptiveClock", "AffineClock", "ClockChoice", "Clock", "CurveClock",
    "LatentClock", "Path", "SegmentClock", "ThinnedClock", "Walk", "answer", "begin_walk", "clock_for",
    "follow", "holding", "pick", "walk_on",
]  # fmt: skip
