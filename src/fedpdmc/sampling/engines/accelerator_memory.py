"""Where the knots of a run are kept: on the accelerator as long as it has room, else on the host."""

from __future__ import annotations

import jax

from fedpdmc.results.skeleton import Chunk

# The share of an accelerator's memory above which knots go to the host at once.
MOST_FILLED = 0.5


def knots_in_memory(knots: Chunk) -> Chunk:
    """Knots as they are, or copied to the host where much of the accelerator's memory is in use."""
    return knots.on_host() if filled_share() > MOST_FILLED else knots


def filled_share() -> float:
    """The share of the accelerator's memory that is in use."""
    found = jax.local_devices()[0].memory_stats()
    return found["bytes_in_use"] / found["bytes_limit"] if found else 1.0
