"""A declared column of the records."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Column:
    """A declared column of the records.

    ``number`` and ``count`` have bounds; values outside are refused. The model uses ``(f(value) − center)/scale``, where f
    is the logarithm if ``log``. ``level`` has a list of levels; the first is the baseline. ``key`` is any text: rows
    with the same key form a group.
    """

    name: str
    type: str
    levels: tuple[str, ...] = ()
    bounds: tuple[float, float] = (0.0, 0.0)
    center: float = 0.0
    scale: float = 1.0
    log: bool = False

    @property
    def range(self) -> tuple[float, float]:
        """The bounds after the transformation to model units."""
        low, high = (float(np.log(x)) if self.log else x for x in self.bounds)
        return (low - self.center) / self.scale, (high - self.center) / self.scale
