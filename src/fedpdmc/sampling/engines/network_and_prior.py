"""Sites on a network together with a prior that the coordinator walks with in its own process."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedpdmc.clocks import Clock
from fedpdmc.plan import Arrival, Plan
from fedpdmc.privacy.account_status import AccountStatus
from fedpdmc.sampling.engines.base import Federation
from fedpdmc.sampling.engines.compiled_loop import LocalFederation


class JoinedFederation(Federation):
    """Sites elsewhere first, then those of this process, which cost no bytes.

    Parameters
    ----------
    elsewhere : Federation
    own : LocalFederation
    """

    def __init__(self, elsewhere: Federation, own: LocalFederation):
        self.elsewhere, self.own = elsewhere, own
        self.needs_time = elsewhere.needs_time

    @property
    def names(self) -> tuple[str, ...]:
        """The sites' names."""
        return (*self.elsewhere.names, *self.own.names)

    @property
    def columns(self) -> list[np.ndarray | None]:
        """The coordinates that each site is sent."""
        return [*self.elsewhere.columns, *self.own.columns]

    @property
    def bytes(self) -> np.ndarray | None:  # type: ignore[override]
        """Messages and bytes between the coordinator and each site so far, if counted."""
        counted = self.elsewhere.bytes
        return None if counted is None else np.append(counted, np.zeros(len(self.own.names), counted.dtype))

    def ask(self, plans: Sequence[Plan | None]) -> list[Arrival | None]:
        """One round."""
        first = len(self.elsewhere.names)
        own = [None if plan is None else dataclasses.replace(plan, time=None) for plan in plans[first:]]
        return [*self.elsewhere.ask(plans[:first]), *self.own.ask(own)]

    @property
    def accounts(self) -> list[AccountStatus]:
        """The account of each site with a privacy budget."""
        return self.elsewhere.accounts

    @property
    def evaluations(self) -> np.ndarray:
        """Passes over each site's records so far."""
        return np.append(self.elsewhere.evaluations, self.own.evaluations)

    @property
    def clocks(self) -> dict[str, Clock]:
        """The clocks of this process."""
        return self.own.clocks

    @property
    def choices(self) -> dict[str, dict[str, Any]]:
        """Why the sites of this process have their clocks."""
        return self.own.choices
