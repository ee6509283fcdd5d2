"""The rounds of an opening on disk: a coordinator that was killed goes on where it was.

A round is stored before it is sent, and again with its answers. A restarted coordinator takes stored answers instead of
asking, and sends a round that has none again, the same bytes: no site answers, counts or charges anything twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fedpdmc.errors import InputError
from fedpdmc.federation import messages
from fedpdmc.federation.transport import Request, Transport
from fedpdmc.results.manifest import RESTORE
from fedpdmc.results.run_state import RunState


class OpeningJournal:
    """The rounds so far; ``write(facts, arrays)`` stores them, None keeps them in memory."""

    def __init__(self, write: Callable[[dict[str, Any], dict[str, np.ndarray]], None] | None = None):
        self._write, self._at = write, 0
        # Requests to all sites and their answers; no answers before all are there.
        self.rounds: list[tuple[list[bytes], list[bytes]]] = []

    def read(self, saved: RunState) -> None:
        """Take over the rounds of a stored state, which may be anything."""
        try:
            for place, (asked, answered) in enumerate(saved.facts.get("opening", [])):
                parts = [saved.arrays[f"opening.{place}.{k}"].tobytes() for k in range(asked + answered)]
                _ = [messages.decode(part) for part in parts]
                self.rounds.append((parts[:asked], parts[asked:]))
        except Exception as error:
            raise InputError("store", f"an opening that cannot be read ({type(error).__name__})", RESTORE) from error

    def rewind(self) -> None:
        """Begin again with the first round."""
        self._at = 0

    def ask(self, requests: Sequence[Request], transport: Transport, check: Callable[..., list]) -> list:
        """The result of ``check(answers, requests)`` for the next round, as it was stored or from the sites."""
        if self._at == len(self.rounds):
            self.rounds.append(([request.data for request in requests], []))
            self._save()
        sent, answers = self.rounds[self._at]
        # Compared in the present wire version: the last process may have had another.
        stored, made = ([messages.encode(messages.decode(x)) for x in a] for a in (sent, [r.data for r in requests]))
        if stored != made:
            found = f"an opening whose request {self._at + 1} this software computes otherwise"
            raise InputError("store", found, "Continue with the version and the kind of machine that began the run.")
        requests = [Request(data) for data in sent]
        given = answers or transport.ask(requests)
        checked = check(given, requests)
        if not answers:
            answers.extend(given)  # type: ignore[arg-type]
            self._save()
        self._at += 1
        return checked

    def _save(self) -> None:
        if self._write is not None:
            parts = ((i, k, part) for i, one in enumerate(self.rounds) for k, part in enumerate(one[0] + one[1]))
            arrays = {f"opening.{i}.{k}": np.frombuffer(part, np.uint8) for i, k, part in parts}
            self._write({"opening": [list(map(len, one)) for one in self.rounds]}, arrays)
