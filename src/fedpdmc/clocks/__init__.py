"""Clocks: when the next event of a potential happens along a path."""

from fedpdmc.clocks.base import Clock
from fedpdmc.clocks.cell_thinning import ThinnedClock
from fedpdmc.clocks.choose import Choice, clock_for
from fedpdmc.clocks.closed_form import AffineClock
from fedpdmc.clocks.discontinuous_potentials import JumpClock
from fedpdmc.clocks.interval_thinning import IntervalClock
from fedpdmc.clocks.path import FINE, NOT_FINITE, VIOLATED, Path, Walk, follow, pick
from fedpdmc.clocks.private_latents import LatentClock
from fedpdmc.clocks.segment_thinning import SegmentClock
from fedpdmc.clocks.uncertified import AdaptiveClock
from fedpdmc.clocks.walking import answer, begin_walk, holding, walk_on

__all__ = [
    "FINE",
    "NOT_FINITE",
    "VIOLATED",
    "AdaptiveClock",
    "AffineClock",
    "Choice",
    "Clock",
    "IntervalClock",
    "JumpClock",
    "LatentClock",
    "Path",
    "SegmentClock",
    "ThinnedClock",
    "Walk",
    "answer",
    "begin_walk",
    "clock_for",
    "follow",
    "holding",
    "pick",
    "walk_on",
]
