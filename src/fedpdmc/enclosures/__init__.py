"""Proved enclosures of the values of a JAX program on a piece of path or in a box."""

from fedpdmc.enclosures.cell_values import Cell, Interval, Series, span
from fedpdmc.enclosures.continuity import assertions, check_continuity, continuous
from fedpdmc.enclosures.domain import Truth
from fedpdmc.enclosures.interpreter import enclose, inventory, not_finite_along, not_finite_at, register
from fedpdmc.enclosures.known_functions import smoothed
from fedpdmc.enclosures.taylor_models import Curve, TimeInterval

__all__ = [
    "Cell", "Curve", "Interval", "Series", "TimeInterval", "Truth", "assertions", "check_continuity",
    "continuous", "enclose", "inventory",
    "not_finite_along", "not_finite_at", "register", "smoothed", "span",
]  # fmt: skip
