"""How plans reach sites."""

from __future__ import annotations

import abc
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from fedpdmc.plan import Arrival, Plan
from fedpdmc.privacy.account_status import AccountStatus


class Federation(abc.ABC):
    """A way to bring plans to sites and arrivals back from them.

    Attributes
    ----------
    bytes : array or None
        What has passed between the coordinator and each site so far, where it was counted.
    """

    bytes: np.ndarray | None = None

    @property
    @abc.abstractmethod
    def names(self) -> tuple[str, ...]:
        """The sites' names, in the order of the arrivals."""

    @property
    @abc.abstractmethod
    def columns(self) -> list[np.ndarray | None]:
        """The coordinates that each site is sent; None for all."""

    @abc.abstractmethod
    def ask(self, plans: Sequence[Plan | None]) -> list[Arrival | None]:
        """One round: to each site its own plan, and its arrival, with marks among its own coordinates.

        A site whose plan is None is not asked. Of the others, chains whose plan has no length are not.
        """

    def exchange(self, plan: Plan) -> list[Arrival]:
        """One round with every site: their arrivals along the plan, in the order of `names`."""
        answers = self.ask([restricted(plan, own, place) for place, own in enumerate(self.columns)])
        return [globalised(a, own) for a, own in zip(answers, self.columns, strict=True) if a is not None]

    @property
    def accounts(self) -> list[AccountStatus]:
        """The account of each site with a privacy budget."""
        return []

    @property
    def evaluations(self) -> np.ndarray:
        """Passes over each site's records so far; zero for a site that does not tell."""
        return np.zeros(len(self.names), dtype=np.int64)


def restricted(plan: Plan, columns: np.ndarray | None, place: int) -> Plan:
    """What one site is sent of a plan."""
    if columns is None and plan.share is None:
        return plan
    share = None if plan.share is None else plan.share[:, place]
    own = slice(None) if columns is None else columns
    return Plan(plan.number, plan.start[:, own], plan.duration, plan.velocity[..., own], share)


def globalised(arrival: Arrival, columns: np.ndarray | None) -> Arrival:
    """An arrival with its marks among all coordinates."""
    return arrival if columns is None else Arrival(arrival.time, arrival.rang, jnp.asarray(columns)[arrival.mark])


def message_bytes(plans: int, segments: int, sent: int, flips: bool, share: bool = False) -> tuple[int, int]:
    """Size of plans and of their arrivals as raw buffers, for a site that is sent ``sent`` coordinates.

    Of each of ``plans`` plans of single chains: the chain, the plan's number, how many segments it has, the start, and
    the site's ``share`` of a prior that is redistributed; of each of their ``segments`` segments in all, a duration and a
    velocity. An arrival is the time, whether it rang, and a coordinate or a normal.
    """
    plan = 8 * (plans * (3 + sent + share) + segments * (1 + sent))
    return plan, plans * (8 + 1 + (4 if flips else 8 * sent))
