"""Whether the posterior is too far from its reference for a rotation about it to be wise."""

from __future__ import annotations

import warnings

from fedpdmc.run import Tick

# Effective samples that a chain on a good reference makes per unit of process time, and what is too few.
USUAL_YIELD, POOR_YIELD = 0.2, 0.02
# Objections per unit of time above which a rotation about the reference is not worth its while: of all chains on average,
# and rounds of the slowest chain, which far out in a heavy tail meets ``|a||v|`` objections per unit of time.
MANY_OBJECTIONS, MANY_ROUNDS = 2.0, 10.0
# Below this many rounds nobody minds.
FEW_ROUNDS = 200
REMEDY = (
    "The draws are exact, but with heavy tails, separable data or very few records dynamics=fedpdmc.ZigZag() with "
    "reference='laplace' needs fewer rounds and less time."
)


class Distance:
    """Watches a run of the few-rounds method and says, once and as soon as it shows, that its reference is far off.

    Parameters
    ----------
    chains : int
    """

    def __init__(self, chains: int):
        self.chains, self.told = chains, False
        self._began: tuple[float, int, int] | None = None

    def tick(self, tick: Tick) -> None:
        """Look at a block while it is being made: what it has cost so far is the least that it will cost."""
        if self._began is None or self._began[0] != tick.began:
            self._began = (tick.began, tick.events, tick.rounds)
            return
        length = tick.until - tick.began
        rate = (tick.events - self._began[1]) / self.chains / length
        rounds = tick.rounds - self._began[2]
        if rounds < FEW_ROUNDS:
            return
        if rate > MANY_OBJECTIONS:
            self._tell(f"the sites object {rate:.2g} times per unit of process time")
        elif rounds > MANY_ROUNDS * length:
            self._tell(f"a chain that is far out took {rounds} rounds for at most {length:.3g} units of process time")

    def judge(self, objections: float, ess: float | None, span: float) -> None:
        """Look at what was kept: mean objections of a chain and the worst ESS, if it is known, in a process time."""
        if span <= 0:
            return
        if objections > MANY_OBJECTIONS * span:
            self._tell(f"the sites object {objections / span:.2g} times per unit of process time")
        elif ess is not None and ess < POOR_YIELD * self.chains * span:
            found = ess / self.chains / span
            self._tell(
                f"a chain makes {found:.1g} effective samples per unit of process time, where {USUAL_YIELD} are usual"
            )

    def _tell(self, reason: str) -> None:
        if not self.told:
            self.told = True
            warnings.warn(f"The posterior is far from its Laplace reference: {reason}. {REMEDY}", stacklevel=2)
