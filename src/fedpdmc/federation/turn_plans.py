"""Plans that a site computes by itself: turns at known times, with velocities from a public key.

The coordinator's own events in such a plan are turns only. Their times follow from the time to the first one, and their
velocities from the key in the opening, the chain and the number of the turn (`fedpdmc.dynamics`). A message
has the current state and five numbers of each chain, whatever the length of its plan. It reveals what whole plans reveal:
velocities are public randomness, and only the current state depends on the other sites.

Both sides compute the same bits on every machine, and a hash of the whole plans verifies it. If it differs, the site refuses
with the code ``OTHER_VELOCITIES``: it never answers a plan other than the coordinator's.
"""

from __future__ import annotations

import functools
import hashlib

import jax.numpy as jnp
import numpy as np

from fedpdmc._jax.compilation import compiled
from fedpdmc._jax.random_streams import ChainKeys
from fedpdmc.dynamics import turn_durations, turn_velocities
from fedpdmc.federation import messages
from fedpdmc.plan import Plan


def abbreviated(run: bytes, sequence: int, plans: messages.Plans, plan: Plan) -> messages.TurnPlans:
    """The short form of the plans of a `Plan` with turns."""
    turns, chain = plan.turns, plans.chain
    assert turns is not None
    wait, number, left = (np.asarray(x)[chain] for x in (turns.wait, turns.number, turns.left))
    return messages.TurnPlans(
        run, sequence, plans.number, number, chain, plans.start, plans.velocity[:, 0], wait, left,
        fingerprint(plans.duration, plans.velocity), plans.time, plans.until, plans.evidence,
    )  # fmt: skip


def whole(message: messages.TurnPlans, keys: ChainKeys, segments: int) -> messages.Plans:
    """The plans from their short form; their hash is not checked.

    Parameters
    ----------
    message : TurnPlans
        Of existing chains.
    keys : (C, 2)
        The public keys of the turns.
    segments : int
        The maximum number of segments of a plan.
    """
    duration = turn_durations(message.wait, message.left, segments)
    longest = max(int(np.max(np.sum(duration > 0, 1), initial=0)), 1)
    rows, dim = message.start.shape
    velocity = np.empty((rows, longest, dim))
    velocity[:, 0] = message.velocity
    if longest > 1:
        first = np.zeros(len(keys), np.int64)
        first[message.chain] = message.turn
        # Padded to one of a few lengths, because each is compiled.
        count = min(1 << (longest - 2).bit_length(), segments - 1)
        made = np.asarray(_velocities(count, dim)(keys, jnp.asarray(first)))
        velocity[:, 1:] = np.swapaxes(made[: longest - 1, message.chain], 0, 1)
    number, chain = (x.astype(np.int64) for x in (message.number, message.chain))
    rest = message.time, message.until, message.evidence
    return messages.Plans(
        message.run, message.sequence, number, message.start, duration[:, :longest], velocity, chain, *rest
    )


@functools.cache
def _velocities(count: int, dim: int):
    return compiled(functools.partial(turn_velocities, count=count, dim=dim))


def fingerprint(duration: np.ndarray, velocity: np.ndarray) -> bytes:
    """A hash of the segments of plans: their lengths, and the velocities of those that have a length."""
    used = np.where((duration > 0)[..., None], velocity, 0.0)
    parts = (np.ascontiguousarray(x, "<f8").tobytes() for x in (duration, used))
    return hashlib.sha256(b"".join(parts)).digest()
