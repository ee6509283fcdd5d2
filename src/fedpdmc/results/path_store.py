"""What is kept of a run: its state between two blocks, and its paths as a whole skeleton, or as moments and some draws."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from fedpdmc.dynamics import QUARTER, Flow, first_waits
from fedpdmc.errors import InputError
from fedpdmc.results.skeleton import Block, Moments, Skeleton, join

MOST_DRAWS = 4096
# Thinning takes every third draw.
LEAST_DRAWS = MOST_DRAWS // 3
# A subset of draws with equal steps is taken if it covers this share of the run.
LEAST_COVER = 0.9
# Averages and draws are taken at the turns if every chain has at least this many.
LEAST_TURNS = 6


class SkeletonStore:
    """Every knot of a run, block by block, and moments and draws from them in whitened coordinates.

    Positions at the turns are more informative than the paths between them. On a Gaussian they are independent,
    ``2/π = 0.64`` per unit of time. The integral along the paths is worth ``π/8 = 0.39`` independent draws: the turn
    from a to v adds ``∫ a cos s + v sin s ds = a + v``, so every velocity counts twice, and n turns give the variance
    ``4n/(nπ/2)²``.

    Parameters
    ----------
    flow : Flow
    skeleton : Skeleton, optional
    origin : float, optional
        The process time at which the chains started, for dynamics with turns.
    """

    most_draws = 2**31

    def __init__(self, flow: Flow, skeleton: Skeleton | None = None, origin: float | None = None):
        self.flow, self.origin = flow, origin
        self._blocks: list[Skeleton | Block] = [] if skeleton is None else [skeleton]

    @property
    def skeleton(self) -> Skeleton:
        """All blocks as one, joined when first used."""
        if not self._blocks:
            raise InputError("posterior", "no completed block", "Run it to a positive duration first.")
        whole = self._blocks[0] if len(self._blocks) == 1 else join(self._blocks)
        if isinstance(whole, Block):
            whole = whole.skeleton()
        self._blocks = [whole]
        return whole

    @property
    def span(self) -> tuple[float, float]:
        """First and last process time."""
        return self._blocks[0].begin, self._blocks[-1].end

    def append(self, block: Block | Skeleton) -> None:
        """Take the next block; copies of this store do not see it."""
        self._blocks = [*self._blocks, block]

    @property
    def turns(self) -> int:
        """The number of turns that every chain has, if averages and draws are taken there; else zero."""
        count = self._turn_times().shape[1]
        return count if count >= LEAST_TURNS else 0

    def _turn_times(self) -> np.ndarray:
        """Times (C, n) of the turns of every chain, as many as all have. They depend on no state."""
        if self.origin is None:
            return np.empty((self.skeleton.chains, 0))
        begin, end = self.span
        first = self.origin + first_waits(self.skeleton.chains)
        first = first + QUARTER * np.ceil((begin - first) / QUARTER)
        count = max(int(np.floor((end - first.max()) / QUARTER)) + 1, 0)
        return first[:, None] + QUARTER * np.arange(count)

    def moments(self) -> Moments:
        """Sums over the turns, or exact integrals over the skeleton."""
        if not self.turns:
            return self.skeleton.moments(self.flow, self.skeleton.a[0])
        a = self.draws(self.turns).reshape(-1, self.skeleton.dim)
        return Moments(float(len(a)), a.sum(0), a.T @ a, np.zeros(a.shape[1]))

    def draws(self, n: int) -> np.ndarray:
        """Positions at n evenly chosen turns of every chain; if it has fewer, in the middle of n equal intervals."""
        begin, end = self.span
        if n <= self.turns:
            times = self._turn_times()
            return self.skeleton.at(self.flow, times[:, ((np.arange(n) + 0.5) * times.shape[1] / n).astype(int)])
        return self.skeleton.at(self.flow, begin + (np.arange(n) + 0.5) * (end - begin) / n)


@dataclasses.dataclass
class DrawStore:
    """Exact moments and at most `MOST_DRAWS` draws of each chain, on a grid that is thinned as the run grows.

    ``spacing`` is the process time between two draws of a chain.
    """

    flow: Flow
    _moments: Moments | None = None
    _draws: np.ndarray | None = None
    begin: float = 0.0
    end: float = 0.0
    spacing: float = 0.0
    turns = 0

    @property
    def span(self) -> tuple[float, float]:
        """First and last process time."""
        return self.begin, self.end

    @property
    def most_draws(self) -> int:
        """As many as were kept of each chain."""
        return 0 if self._draws is None else self._draws.shape[1]

    def append(self, block: Block | Skeleton) -> None:
        """Add the block's moments and the draws that fall into it, or neither."""
        path = block if isinstance(block, Skeleton) else block.skeleton()
        if self._moments is None or self._draws is None:
            begin, draws = path.begin, np.empty((path.chains, 0, path.a.shape[1]))
            spacing = (path.end - path.begin) / (MOST_DRAWS // 2)
            moments = path.moments(self.flow, path.a[0])
        else:
            begin, draws, spacing = self.begin, self._draws, self.spacing
            moments = self._moments.plus(path.moments(self.flow, self._moments.pivot))
        # Draw k is in the middle of interval k. Every third of them is the middle of an interval three times as long.
        while (path.end - begin) / spacing + 0.5 > MOST_DRAWS + 1:
            draws, spacing = draws[:, 1::3], 3 * spacing
        total = int(np.floor((path.end - begin) / spacing * (1 + 1e-12) + 0.5))
        fresh = path.at(self.flow, begin + (np.arange(draws.shape[1], total) + 0.5) * spacing)
        draws = np.concatenate([draws, fresh], 1)
        self._moments, self._draws, self.spacing, self.begin, self.end = moments, draws, spacing, begin, path.end

    def moments(self) -> Moments:
        """Exact integrals, accumulated."""
        if self._moments is None:
            raise InputError("posterior", "no completed block", "Run it to a positive duration first.")
        return self._moments

    def draws(self, n: int) -> np.ndarray:
        """A subset of the kept draws: equally spaced, or to within one kept draw if no such subset covers the run."""
        kept = self.most_draws
        if self._draws is None or n > kept:
            raise InputError(
                "draws(n)", str(n), f"This run kept {kept} draws a chain (keep='draws'): ask for at most that."
            )
        step = kept // n
        if n * step >= LEAST_COVER * kept:
            return self._draws[:, (kept - 1 - step * (n - 1)) // 2 :: step][:, :n]
        return self._draws[:, ((np.arange(n) + 0.5) * kept / n).astype(int)]


Store = SkeletonStore | DrawStore


class RunState(NamedTuple):
    """Facts that JSON can hold, and arrays by name.

    An archive and the store of a network study both hold one. `fedpdmc.sampling.run_state_arrays` says what the arrays are.
    """

    facts: dict[str, Any]
    arrays: dict[str, np.ndarray]


def cannot_go_on(settings: dict[str, Any]) -> InputError:
    """Why a posterior has no run, and what to do."""
    if settings.get("exact") is False:
        found = "a private answer in one shot, which has no chains"
        remedy = "Sample again, with method='exact' or more budget."
    elif "contract" in settings:
        found = f"a saved posterior of study {settings['study']!r}, whose sites are on a network"
        remedy = (
            "The study continues from the coordinator's store: fedpdmc.sample(fedpdmc.connect(contract, ..., store=folder), "
            "ess=...), or `fedpdmc coordinator study.toml --store folder`."
        )
    else:
        found = "a saved posterior without the state of its run"
        remedy = "Restore the archive from a whole copy, or sample again and save with this version of fedpdmc."
    return InputError("extend", found, remedy)
