"""Sites in the coordinator's process, to try a study out."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from fedpdmc.federation.remote import Transport


class DirectTransport(Transport):
    """Agents in this process, asked one after the other: the messages are the same, nothing travels.

    Parameters
    ----------
    agents : sequence of Agent
    temporary : bool
        Whether their logs are thrown away at the end.
    """

    def __init__(self, agents: Sequence, temporary: bool = False):
        self.agents, self._temporary = list(agents), temporary
        self._names = tuple(agent.site.name for agent in self.agents)

    @property
    def names(self):
        """The sites' names."""
        return self._names

    def ask(self, requests):
        """One round, site by site."""
        pairs = zip(self.agents, requests, strict=True)
        return [None if request is None else agent.answer(request.data) for agent, request in pairs]

    def close(self):
        """Close the logs."""
        for agent in self.agents:
            agent.journal.close()
            if self._temporary:
                shutil.rmtree(agent.journal.folder)
        self.agents = []
