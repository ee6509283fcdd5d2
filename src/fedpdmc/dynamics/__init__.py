"""The processes: how a state moves between events, and how it jumps."""

from fedpdmc.dynamics.base import Dynamics
from fedpdmc.dynamics.boomerang import Boomerang, FactorisedBoomerang
from fedpdmc.dynamics.bouncy import BouncyParticle
from fedpdmc.dynamics.flows import Flow, Line, Rotation, SegmentIntegrals
from fedpdmc.dynamics.quarter_turns import QUARTER, QUARTER_TURNS, Turn
from fedpdmc.dynamics.zigzag import ZigZag

__all__ = [
    "QUARTER",
    "QUARTER_TURNS",
    "Boomerang",
    "BouncyParticle",
    "Dynamics",
    "FactorisedBoomerang",
    "Flow",
    "Line",
    "Rotation",
    "SegmentIntegrals",
    "Turn",
    "ZigZag",
]
