"""A transport to agents in the coordinator's process, to try out a study."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from fedpdmc.federation.transport import Transport


class DirectTransport(Transport):
    """Agents in this process, asked one after the other with the same messages as on a network.

    Parameters
    ----------
    agents : sequence of Agent
    temporary : bool
        Whether their logs are deleted at the end.
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
            agent.log.close()
            if self._temporary:
                shutil.rmtree(agent.log.folder)
        self.agents = []
