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

# Relative differences of requests that are the same but for rounding, as on another machine: of points, and of coordinates,
# which both sides then use with a difference of this size.
SAME_POINT, SAME_COORDINATES = 1e-9, 1e-12


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
        if len(sent) != len(requests) or not all(_alike(a, b.data) for a, b in zip(sent, requests, strict=True)):
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

    def last_request(self) -> messages.Message:
        """The first site's request of the last round, as it was sent."""
        return messages.decode(self.rounds[self._at - 1][0][0])

    def _save(self) -> None:
        if self._write is not None:
            parts = [
                (place, k, part) for place, one in enumerate(self.rounds) for k, part in enumerate(one[0] + one[1])
            ]
            arrays = {f"opening.{place}.{k}": np.frombuffer(part, np.uint8) for place, k, part in parts}
            self._write({"opening": [list(map(len, one)) for one in self.rounds]}, arrays)


def _alike(stored: bytes, made: bytes) -> bool:
    """Whether two requests are the same but for rounding."""
    a, b = vars(messages.decode(stored)), vars(messages.decode(made))
    most = SAME_COORDINATES if "center" in a else SAME_POINT
    return stored == made or a.keys() == b.keys() and all(close(value, b[name], most) for name, value in a.items())


def close(a: Any, b: Any, most: float = SAME_POINT) -> bool:
    """Whether two values are the same but for rounding; what is no array of real numbers must be equal."""
    if not isinstance(a, np.ndarray) or a.shape != np.shape(b) or a.dtype.kind != "f":
        return np.array_equal(a, b)
    return bool(np.all(np.abs(a - b) <= most * max(np.abs(a).max(initial=0.0), 1e-3)))
