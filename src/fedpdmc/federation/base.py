"""How plans reach sites."""

from __future__ import annotations

import abc

import numpy as np

from fedpdmc.plan import Arrival, Plan


class Federation(abc.ABC):
    """A way to bring one plan to every site and one arrival back from each."""

    @property
    @abc.abstractmethod
    def names(self) -> tuple[str, ...]:
        """The sites' names, in the order of the arrivals."""

    @abc.abstractmethod
    def exchange(self, plan: Plan) -> list[Arrival]:
        """One round: every site's arrival along the plan, in the order of `names`."""

    @property
    def evaluations(self) -> np.ndarray:
        """Passes over each site's records so far; zero for a site that does not tell."""
        return np.zeros(len(self.names), dtype=np.int64)


def message_bytes(chains: int, segments: int, sent: int, flips: bool, share: bool = False) -> tuple[int, int]:
    """Size of a plan and of an arrival as raw buffers: what one round costs a site that is sent ``sent`` coordinates.

    A plan holds for each chain its number, the start, and a duration and a velocity for each segment, and the site's
    ``share`` of a prior that is redistributed; an arrival the time, whether it rang, and a coordinate or a normal.
    """
    plan = chains * 8 * (1 + sent + segments * (1 + sent) + share)
    arrival = chains * (8 + 1 + (4 if flips else 8 * sent))
    return plan, arrival
