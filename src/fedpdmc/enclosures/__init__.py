"""WHAT a JAX program can be on a piece of path: proved enclosures of any model."""

from fedpdmc.enclosures.continuity import check_continuity
from fedpdmc.enclosures.curves import Curve, Stretch
from fedpdmc.enclosures.forms import Cell, Interval, Series, Truth, span
from fedpdmc.enclosures.interpret import enclose
from fedpdmc.enclosures.inventory import inventory
from fedpdmc.enclosures.patterns import smoothed
from fedpdmc.enclosures.registry import register

__all__ = [
    "Cell", "Curve", "Interval", "Series", "Stretch", "Truth", "check_continuity", "enclose", "inventory",
    "register", "smoothed", "span",
]  # fmt: skip
