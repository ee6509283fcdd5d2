"""Sites in this process that are asked one message at a time: replies go through ledgers, or are logged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedpdmc.clocks import Clock
from fedpdmc.members.private_site import PrivateSite
from fedpdmc.plan import Arrival, Plan
from fedpdmc.privacy.account_status import AccountStatus
from fedpdmc.sampling.engines.base import Federation
from fedpdmc.sampling.engines.compiled_loop import LocalFederation

Log = Callable[[Plan, Arrival], None]


class GuardedFederation(Federation):
    """Private sites, sites with a log, and plain sites in the same run; messages are answered one after the other.

    Parameters
    ----------
    names : sequence of str
        All sites.
    guards : mapping of PrivateSite
        Those with a budget, by name.
    plain : LocalFederation or None
        The others.
    logs : mapping of callables, optional
        By name, for sites that have one: called with every plan that the site receives, and its arrival.
    """

    def __init__(
        self,
        names: Sequence[str],
        guards: Mapping[str, PrivateSite],
        plain: LocalFederation | None,
        logs: Mapping[str, Log] | None = None,
    ):
        self._names, self.guards, self.plain, self.logs = tuple(names), dict(guards), plain, dict(logs or {})

    @property
    def names(self) -> tuple[str, ...]:
        """The sites' names."""
        return self._names

    @property
    def accounts(self) -> list[AccountStatus]:
        """The account of each private site: sites that share one have equal parts of the rest."""
        shared = Counter((guard.ledger.path, guard.dataset) for guard in self.guards.values())
        found = [(guard.status, shared[guard.ledger.path, guard.dataset]) for guard in self.guards.values()]
        return [status._replace(remaining=status.remaining / sites) for status, sites in found]

    @property
    def columns(self) -> list[np.ndarray | None]:
        """The coordinates that each site is sent."""
        plain = {} if self.plain is None else dict(zip(self.plain.names, self.plain.columns, strict=True))
        own = plain | {name: guard.columns for name, guard in self.guards.items()}
        return [own[name] for name in self._names]

    def ask(self, plans: Sequence[Plan | None]) -> list[Arrival | None]:
        """One round; a private site's arrival is charged before it is seen, and one that is not asked is not charged."""
        plan = dict(zip(self._names, plans, strict=True))
        arrivals: dict[str, Arrival | None] = {}
        if self.plain is not None:
            answers = self.plain.ask([plan[name] for name in self.plain.names])
            arrivals = dict(zip(self.plain.names, answers, strict=True))
        for name, guard in self.guards.items():
            own = plan[name]
            arrivals[name] = None if own is None else guard.answer(own)
        for name, log in self.logs.items():
            own, arrival = plan[name], arrivals[name]
            if own is not None and arrival is not None:
                log(*jax.tree.map(np.asarray, (own, _marked(arrival))))
        return [arrivals[name] for name in self._names]

    @property
    def clocks(self) -> dict[str, Clock]:
        """The clocks of the plain sites."""
        return {} if self.plain is None else self.plain.clocks

    @property
    def choices(self) -> dict[str, dict[str, Any]]:
        """Why the plain sites have their clocks; a site with a budget has one way only."""
        plain = {} if self.plain is None else self.plain.choices
        return plain | {name: {"clock": "public proposals", "why": "a privacy budget"} for name in self.guards}

    @property
    def privacy(self) -> dict[str, Any] | None:
        """What each site with a budget has granted and revealed."""
        return {name: guard.report() for name, guard in self.guards.items()} or None

    def continue_accounts(self, privacy: dict[str, Any]) -> None:
        """Add the observed time before this process continued the run."""
        for name, guard in self.guards.items():
            guard.observed_before = privacy[name]["observed"]


def _marked(arrival: Arrival) -> Arrival:
    """The arrival with mark -1 on chains without an event."""
    rang = arrival.rang.reshape(arrival.rang.shape + (1,) * (arrival.mark.ndim - 1))
    return Arrival(arrival.time, arrival.rang, jnp.where(rang, arrival.mark, -1))
