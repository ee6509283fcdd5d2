"""Declared public bounds on a site's records, and the treatment of records outside them."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from fedpdmc.errors import InputError
from fedpdmc.validation import integer

# Relative tolerance for a record on the border, whose norm is rounded.
ROUNDING = 1e-9
# Default of most_records. Rounding of a sum over that many records is below 2⁻⁹ of the sensitivity to one record. It grows
# with the square of their number: at 2²⁴ it is 2⁻⁵, and beyond that no run stays below the limit of one tenth.
MOST_RECORDS, LARGEST_MOST_RECORDS = 1 << 22, 1 << 24


@dataclass(frozen=True, eq=False)
class Bounds:
    """Bounds on a site's records, declared in advance and never computed from the data.

    Parameters
    ----------
    norm : float, optional
        The Euclidean norm of a record's covariates is at most this (for `gaussian_mean`: of the record).
    box : float or array of shape (d,), optional
        Each covariate is at most this in absolute value. If ``norm`` is given too, both hold.
    outcome : (low, high), optional
        The range of the outcome (for `ar1_student_t`: of every value of a series).
    offset : (low, high), optional
        The range of the offsets of `poisson`; zero if left out.
    region : float or array of shape (d,), optional
        The parameters stay within ``|x_j| ≤ region_j``: the site refuses plans that leave it. Needed if a gradient
        grows without bound.
    weight : float
        The largest weight of a record; with trials times their largest number.
    columns : mapping, optional
        The ranges ``(low, high)`` of the columns of a model file, by name. Binary columns and levels need none.
    most_records : int
        An upper bound on the number of records (of transitions, for series), at most 16,777,216. It bounds the rounding
        error of sums.
    """

    norm: float | None = None
    box: Any = None
    outcome: tuple[float, float] | None = None
    offset: tuple[float, float] | None = None
    region: Any = None
    most_records: int = MOST_RECORDS
    columns: Any = None
    weight: float = 1.0

    def __post_init__(self):
        def put(name: str, check: Callable[[str, Any], Any]) -> None:
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, check(f"Bounds({name})", value))

        for name in ("norm", "weight"):
            put(name, lambda argument, value: float(_sizes(argument, value, scalar=True)))
        put(
            "most_records", lambda argument, value: integer(argument, value, 1, sys.maxsize, "Give a positive integer.")
        )
        if self.most_records > LARGEST_MOST_RECORDS:
            raise InputError(
                "Bounds(most_records)",
                f"{self.most_records:,}",
                f"Give at most {LARGEST_MOST_RECORDS:,}: in a sum over more records rounding would hide what one record "
                "changes. Divide the records among several sites (in a contract: [limits] records).",
            )
        for name, check in (("box", _sizes), ("region", _sizes), ("outcome", _interval), ("offset", _interval)):
            put(name, check)
        if self.columns is not None:
            ranges = {str(name): _interval(f"Bounds(columns: {name})", x) for name, x in dict(self.columns).items()}
            object.__setattr__(self, "columns", ranges)

    def sizes(self, name: str, dim: int) -> np.ndarray | None:
        """``box`` or ``region`` by coordinate."""
        value = getattr(self, name)
        if value is None:
            return None
        if value.ndim and value.shape != (dim,):
            raise InputError(f"Bounds({name})", f"shape {value.shape}", f"Give a number or an array of shape ({dim},).")
        return np.broadcast_to(value, (dim,))

    def clip_rows(self, rows: np.ndarray) -> np.ndarray:
        """Covariates moved into the box, then scaled into the ball (which keeps them in the box)."""
        box = self.sizes("box", rows.shape[1])
        clipped = rows if box is None else np.clip(rows, -box, box)
        if self.norm is None:
            return clipped
        length = np.linalg.norm(clipped, axis=1, keepdims=True)
        outside = length > self.norm * (1 + ROUNDING)
        return np.where(outside, clipped * (self.norm / np.maximum(length, 1e-300)), clipped)

    def clip_values(self, name: str, values: np.ndarray) -> np.ndarray:
        """Outcomes or offsets moved into their range."""
        interval = getattr(self, name)
        return values if interval is None else np.clip(values, *interval)

    def describe(self) -> dict[str, Any]:
        """The bounds as plain numbers, for reports."""
        known = {field.name: value for field in fields(self) if (value := getattr(self, field.name)) is not None}
        return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in known.items()}


def _sizes(argument: str, value: Any, scalar: bool = False) -> np.ndarray:
    try:
        array = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        array = np.asarray(math.nan)
    if array.ndim > (0 if scalar else 1) or array.size == 0 or not np.all((array > 0) & np.isfinite(array)):
        raise InputError(argument, repr(value), "Give positive finite numbers.")
    return array


def _interval(argument: str, value: Any) -> tuple[float, float]:
    try:
        low, high = (float(end) for end in value)
    except (TypeError, ValueError) as error:
        raise InputError(argument, repr(value), "Give (low, high).") from error
    if not -math.inf < low <= high < math.inf:
        raise InputError(argument, repr(value), "Give finite numbers, the lower one first.")
    return low, high
