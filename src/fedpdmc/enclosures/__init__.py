"""Proved enclosures of the values of a JAX program on a piece of path, in a box or on balls."""

from fedpdmc.enclosures.cell_values import Cell, Interval, Series, span
from fedpdmc.enclosures.continuity.proof import check_continuity, jump_surfaces
from fedpdmc.enclosures.domain import Truth
from fedpdmc.enclosures.interpreter import enclose
from fedpdmc.enclosures.inventory import inventory
from fedpdmc.enclosures.not_finite import not_finite_along, not_finite_at
from fedpdmc.enclosures.recognised_calls import smoothed
from fedpdmc.enclosures.registry import register
from fedpdmc.enclosures.taylor_models.taylor_model import Curve, TimeInterval

__all__ = [
    "Cell", "Curve", "Interval", "Series", "TimeInterval", "Truth", "check_continuity", "enclose", "inventory",
    "jump_surfaces", "not_finite_along", "not_finite_at", "register", "smoothed", "span",
]  # fmt: skip
