"""Sites with privacy budgets in this process: every reply goes through the site's own ledger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedpdmc.federation.base import Federation
from fedpdmc.federation.local import LocalFederation
from fedpdmc.plan import Arrival, Plan
from fedpdmc.private import PrivateSite, Terms


class GuardedFederation(Federation):
    """Private sites, and the plain ones beside them, asked one message after the other.

    Parameters
    ----------
    names : sequence of str
        All sites.
    guards : mapping of PrivateSite
        Those with a budget, by name.
    plain : LocalFederation or None
        The others.
    """

    def __init__(self, names: Sequence[str], guards: Mapping[str, PrivateSite], plain: LocalFederation | None):
        self._names, self.guards, self.plain = tuple(names), dict(guards), plain

    @property
    def names(self) -> tuple[str, ...]:
        """The sites' names."""
        return self._names

    @property
    def terms(self) -> list[Terms]:
        """What each private site's budget still covers: sites that share an account have equal parts of it."""
        accounts = [(guard.ledger.path, guard.dataset) for guard in self.guards.values()]
        return [
            guard.terms._replace(remaining=guard.terms.remaining / accounts.count(account))
            for guard, account in zip(self.guards.values(), accounts, strict=True)
        ]

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
        return [arrivals[name] for name in self._names]

    @property
    def privacy(self) -> dict[str, Any]:
        """What each site with a budget has granted and revealed."""
        return {name: guard.report() for name, guard in self.guards.items()}
