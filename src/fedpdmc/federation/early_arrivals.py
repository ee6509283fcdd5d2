"""Who ends the plans: a site that always rings at once uses up what all the others have granted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedpdmc.errors import BadAnswer
from fedpdmc.plan import Arrival

# A ring before this share of the plan is one at once: a clock with a finite rate has next to none of them. So many in a
# row, of one site on one chain, are no accident.
AT_ONCE, MOST_AT_ONCE = 1e-12, 32


class Haste:
    """Counts, for each site, the plans of single chains that it has ended, and of each chain those ended at once in a row.

    Parameters
    ----------
    names : sequence of str
        The sites.
    """

    def __init__(self, names: Sequence[str]):
        self.names, self.ended = tuple(names), np.zeros(len(names), dtype=np.int64)
        self._row = np.zeros(0, dtype=np.int64)
        self._last = np.zeros(0, dtype=np.int64)

    def see(self, arrivals: Sequence[Arrival | None], horizon: np.ndarray) -> None:
        """The arrivals of one round, and how long the plan of each chain was.

        Raises
        ------
        BadAnswer
            A site has rung at once too often.
        """
        if not len(self._row):
            self._row, self._last = np.zeros((2, len(horizon)), dtype=np.int64)
        times = np.stack(
            [np.full(len(horizon), np.inf) if one is None else np.where(one.rang, one.time, np.inf) for one in arrivals]
        )
        first, earliest = times.argmin(0), times.min(0)
        rang = np.isfinite(earliest)
        self.ended += np.bincount(first[rang], minlength=len(self.names))
        at_once = rang & (earliest <= AT_ONCE * horizon)
        again = at_once & (first == self._last)
        self._row = np.where(again, self._row + 1, at_once.astype(np.int64))
        self._last = first
        if (self._row >= MOST_AT_ONCE).any():
            chain = int(self._row.argmax())
            raise BadAnswer(self.names[first[chain]], f"it rang at once {MOST_AT_ONCE} times in a row on chain {chain}")

    def words(self) -> str:
        """Who has ended how many plans, if any were."""
        if not self.ended.any():
            return ""
        told = ", ".join(f"{name} {count:,}" for name, count in zip(self.names, self.ended, strict=True))
        return f" Plans of single chains that a site has ended: {told}."
