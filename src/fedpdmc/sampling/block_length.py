"""How long the blocks of a run are: up to a process time, or until an effective sample size is reached."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fedpdmc.dynamics import QUARTER, Flow
from fedpdmc.dynamics.quarter_turns import first_waits
from fedpdmc.results.skeleton import Block, Skeleton
from fedpdmc.results.verdict import STOP_ESS_PER_CHAIN
from fedpdmc.sampling.defaults import Method
from fedpdmc.sampling.engines.base import BlockMemory
from fedpdmc.sampling.reference_warning import USUAL_YIELD

DEFAULT_ESS, FIRST_BLOCK = 1000.0, 10.0
# Effective samples of a turn on a good reference, at least; and the least turns of the first block.
TURN_YIELD, LEAST_TURNS = 0.82, 6
# With private latents, by the largest standard deviation of a log spread.
LATENT_YIELD = ((0.2, 0.66), (np.inf, 0.55))
MOST_GROWTH = 4.0
# The most process time that is run together with the burn-in.
MOST_JOINED = 500.0
# Limits of a run to an effective sample size: the number of blocks, and for the few-rounds method the number of times that
# its length may exceed its first block.
MOST_BLOCKS, MOST_LENGTH = 40, 50
MOST_BLOCK = 50.0  # process time of a block in one process; in a run of more than `MOST_PIECES` of them a part of it
# Chains wait for each other at the end of a block: few blocks, of many plans each.
PLANS_PER_BLOCK, MOST_PIECES = 5000, 20
# The least number of blocks if sites have private latents, which are recorded at the ends of blocks; and the least length.
LATENT_BLOCKS, LATENT_BLOCK = 4, 1.0


class Goal(NamedTuple):
    """A process time that is reached in whole blocks.

    Attributes
    ----------
    begin, until : float
        Process time from and to which the run goes.
    pieces : int
        Blocks of equal length, where all knots are kept.
    step : float
        Length of the next block where they are not: it follows the rate of events, to bound memory.
    """

    begin: float
    until: float
    pieces: int
    step: float

    @classmethod
    def to(cls, until: float, begin: float, pieces: int, memory: BlockMemory) -> Goal:
        """A goal before its first block."""
        return cls(begin, until, pieces, min((until - begin) / 64, memory.first))

    def next_stop(self, now: float, keep: str) -> float:
        """Process time at which all chains meet next."""
        if keep == "skeleton":
            done = round((now - self.begin) / (self.until - self.begin) * self.pieces) + 1
            # The last stop is set, not computed: rounding must not leave a piece after it.
            return self.until if done >= self.pieces else self.begin + (self.until - self.begin) * done / self.pieces
        return self.until if now + 1.5 * self.step >= self.until else now + self.step

    def after(self, plans: float, rounds: int, dim: int, memory: BlockMemory) -> Goal:
        """The goal with the length of the next block, given the plans and rounds of the last one."""
        made = max(plans, 1.0) * 8 * (2 * dim + 2) + memory.per_round * rounds
        return self._replace(step=self.step * float(np.clip(memory.most / made, 0.25, 4.0)))


def pieces(plans_per_time: float, length: float) -> int:
    """Division of a process time into blocks, for a chain with this many plans per unit of time."""
    return int(np.clip(plans_per_time * length / PLANS_PER_BLOCK, 1, MOST_PIECES))


def fewest(method: Method, length: float, before: float = 0.0) -> int:
    """The least number of blocks: not too few if sites record private latents at their ends, given the time before.

    In one process Ctrl-C drops the unfinished block, so none is long. A run over a network goes on from its store.
    """
    if not any(site.latents for site in method.own_sites):
        return 1 if method.elsewhere else int(np.clip(np.ceil(length / MOST_BLOCK), 1, MOST_PIECES))
    return int(np.clip(length / max(LATENT_BLOCK, before / LATENT_BLOCKS), 1, LATENT_BLOCKS))


def first_length(
    target: float, chains: int, whitened: bool, turns: bool = False, turn_yield: float = TURN_YIELD
) -> float:
    """Process time of the first block of a run to an effective sample size: whole turns, if there are any."""
    if turns and whitened:
        count = np.ceil(target / (turn_yield * chains))
        return QUARTER * float(np.clip(count, LEAST_TURNS, 100 * LEAST_TURNS))
    usual = target / (USUAL_YIELD * chains) if whitened else FIRST_BLOCK
    return float(np.clip(usual, FIRST_BLOCK, 100 * FIRST_BLOCK))


def first_block(method: Method, duration: float | None, ess: float | None) -> float:
    """Process time of the first block: as requested, or as probably needed; with turns not too long."""
    if duration is None:
        latents = any(site.latents for site in method.sites)
        own = next(own for width, own in LATENT_YIELD if method.spread_width <= width) if latents else TURN_YIELD
        length = first_length(ess or DEFAULT_ESS, method.chains, method.whitened, method.dynamics.turns, own)
    else:
        length = float(duration)
    return min(length, MOST_JOINED) if method.dynamics.turns else length


def joined_block(method: Method, duration: float | None, ess: float | None) -> float:
    """Process time that is run together with the burn-in."""
    return min(first_block(method, duration, ess), MOST_JOINED if method.elsewhere else MOST_BLOCK)


def ess_to_reach(method: Method, ess: float | None) -> float:
    """What was asked for; where the number of chains was left open, at least enough of each chain to tell if they agree."""
    wanted = DEFAULT_ESS if ess is None else float(ess)
    return max(wanted, STOP_ESS_PER_CHAIN * method.chains) if method.open_chains else wanted


def next_length(target: float, worst: float, span: float) -> tuple[float, float]:
    """Process time that an effective sample size still needs, and of the next block.

    ``worst`` is the effective sample size of the first ``span`` units. A block is at least a tenth of the run so far and at
    most three times as long, since the effective sample size of a short run is inaccurate.
    """
    need = span * (1.05 * target / max(worst, 1.0) - 1.0)
    return need, float(np.clip(need, 0.1 * span, (MOST_GROWTH - 1) * span))


def split_burn_in(block: Block, flow: Flow) -> tuple[np.ndarray, Skeleton]:
    """Split a block with turns that begins with the burn-in: events of each chain in it, and the paths from time zero on.

    Velocities change at events and at turns, whose number is known.
    """
    path = block.skeleton()
    turns = np.floor((-block.begin - first_waits(path.chains)) / QUARTER) + 1
    return np.maximum(path.jumps(flow, 0.0) - turns.astype(np.int64), 0), path.since(flow, 0.0)
