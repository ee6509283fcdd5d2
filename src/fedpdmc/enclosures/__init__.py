"""Proved enclosures of the values of a JAX program on a piece of path or in a box."""

from fedpdmc.enclosures.continuity import assertions, check_continuity, continuous
from fedpdmc.enclosures.domain import Interval, Truth
from fedpdmc.enclosures.interpreter import enclose, inventory, not_finite_along, not_finite_at, register
from fedpdmc.enclosures.known_functions import smoothed
from fedpdmc.enclosures.taylor_models import Curve, TimeInterval

__all__ = [
    "Curve", "Interval", "TimeInterval", "Truth", "assertions", "check_continuity",
    "continuous", "enclose", "inventory",
    "not_finite_along", "not_finite_at", "register", "smoothed",
]  # fmt: skip
