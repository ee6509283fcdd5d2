"""Detects a site whose arrivals always end the plans immediately, which would use up the limits of all other sites."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedpdmc.errors import BadAnswer
from fedpdmc.plan import Arrival

# An arrival before this share of the plan is immediate. A clock with a finite rate has practically none. This many in a
# row, from one site on one chain, are not an accident.
IMMEDIATE, MOST_IMMEDIATE = 1e-12, 32


class ImmediateArrivals:
    """Counts the plans that each site has ended and, for each chain, consecutive immediate arrivals of one site.

    Parameters
    ----------
    names : sequence of str
        The sites.
    """

    def __init__(self, names: Sequence[str]):
        self.names, self.ended = tuple(names), np.zeros(len(names), dtype=np.int64)
        self._row = np.zeros(0, dtype=np.int64)
        self._last = np.zeros(0, dtype=np.int64)

    def add(self, arrivals: Sequence[Arrival | None], horizon: np.ndarray) -> None:
        """Add the arrivals of one round, with the length of each chain's plan.

        Raises
        ------
        BadAnswer
            A site had too many immediate arrivals in a row.
        """
        if not len(self._row):
            self._row, self._last = np.zeros((2, len(horizon)), dtype=np.int64)
        times = np.stack(
            [np.full(len(horizon), np.inf) if one is None else np.where(one.rang, one.time, np.inf) for one in arrivals]
        )
        first, earliest = times.argmin(0), times.min(0)
        rang = np.isfinite(earliest)
        self.ended += np.bincount(first[rang], minlength=len(self.names))
        immediate = rang & (earliest <= IMMEDIATE * horizon)
        again = immediate & (first == self._last)
        self._row = np.where(again, self._row + 1, immediate.astype(np.int64))
        self._last = first
        if (self._row >= MOST_IMMEDIATE).any():
            chain = int(self._row.argmax())
            raise BadAnswer(self.names[first[chain]], f"{MOST_IMMEDIATE} immediate arrivals in a row on chain {chain}")

    def words(self) -> str:
        """How many plans each site has ended; empty if none."""
        if not self.ended.any():
            return ""
        told = ", ".join(f"{name} {count:,}" for name, count in zip(self.names, self.ended, strict=True))
        return f" Plans ended by each site, counted by chain: {told}."
