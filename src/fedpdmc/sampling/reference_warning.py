"""Whether the posterior is too far from its reference for a rotation about it to be efficient."""

from __future__ import annotations

from fedpdmc.console.progress import Tick
from fedpdmc.console.warnings import warn

# Effective samples of a chain per unit of process time: with a good reference, and too few.
USUAL_YIELD, POOR_YIELD = 0.2, 0.02
# Events of sites per unit of time above which a rotation about the reference does not pay: of all chains on average,
# and rounds of the slowest chain, which far out in a heavy tail meets ``|a||v|`` events per unit of time.
MANY_EVENTS, MANY_ROUNDS = 2.0, 10.0
# Events of sites per unit of time and parameter above which Zig-Zag on the same reference takes fewer rounds. With linear
# control variates its sites flip at the rate ``E(v_i ∂_i U)₊ = 1/√(2π) = 0.4`` for each whitened coordinate, and a chain
# makes 0.44 effective samples per unit of time: 0.9 events for each parameter and effective sample, after a burn-in three
# times as long as on a reference that is as wide as the tails. With 0.45 events for each parameter (log-normal, most
# censored) quarter turns about such a reference took 100 rounds and Zig-Zag 210.
LINES_EVENTS = 0.6  # events per unit of process time and parameter
# Rounds that are few; and events of all chains below which a burn-in has shown nothing.
FEW_ROUNDS, LEAST_EVENTS = 200, 20
REMEDY = (
    "The draws are exact, but with heavy tails, separable data or very few records dynamics=fedpdmc.ZigZag() with "
    "reference='laplace' needs fewer rounds and less time."
)
LATENT_REMEDY = (
    "The draws are exact, but take many rounds. Private effects move with rotations only. A narrower prior of the spread "
    "(spread_scale=), fewer small groups, or more chains take fewer rounds."
)


class Unsuitable(Exception):
    """The burn-in has shown that the few-rounds method does not suit this posterior; the message gives the reason."""


class Distance:
    """Monitors a run of the few-rounds method and warns once, as soon as it is seen, that its reference is far off.

    Parameters
    ----------
    chains, dim : int
    remedy : str
        What the warning advises.

    Attributes
    ----------
    deciding : bool
        Whether another method can still be chosen: then `Unsuitable` is raised instead of a warning.
    """

    def __init__(self, chains: int, dim: int = 1, remedy: str = REMEDY):
        self.chains, self.dim, self.remedy, self.told, self.deciding = chains, dim, remedy, False, False
        self._began: tuple[float, int, int] | None = None

    def tick(self, tick: Tick) -> None:
        """Check an unfinished block: its cost so far is a lower bound of its cost."""
        if self._began is None or self._began[0] != tick.began:
            self._began = (tick.began, tick.events, tick.rounds)
            return
        length = tick.until - tick.began
        rate = (tick.events - self._began[1]) / self.chains / length
        rounds = tick.rounds - self._began[2]
        if rounds < FEW_ROUNDS:
            return
        if self.deciding and tick.until > 0:
            # A block that is kept in part: only what happens in its burn-in may decide.
            if tick.time < 0:
                self._tell(f"a chain that is far out took {rounds} rounds of the burn-in")
            return
        if rate > self._many:
            self._tell(f"the sites have {rate:.2g} events per unit of process time")
        elif rounds > max(MANY_ROUNDS, self._many) * length:
            self._tell(f"a chain that is far out took {rounds} rounds for at most {length:.3g} units of process time")

    def judge(self, events: float, ess: float | None, span: float) -> None:
        """Check the kept blocks: mean events of a chain and the worst ESS, if it is known, in a process time."""
        if span <= 0:
            return
        if events > self._many * span:
            self._tell(f"the sites have {events / span:.2g} events per unit of process time")
        elif ess is not None and ess < POOR_YIELD * self.chains * span:
            found = ess / self.chains / span
            self._tell(
                f"a chain makes {found:.1g} effective samples per unit of process time, where {USUAL_YIELD} are usual"
            )

    def judge_burn_in(self, events: float, span: float) -> None:
        """Check a burn-in. More events than Zig-Zag would have are too many, whether or not another method can be chosen.

        If none can, a few events of a short burn-in are no reason for a warning.
        """
        if not self.deciding and events * self.chains < LEAST_EVENTS:
            return
        if events > LINES_EVENTS * self.dim * span:
            self._tell(f"the sites have {events / span:.2g} events per unit of process time")

    @property
    def _many(self) -> float:
        """Site events per unit of process time above which a run is warned about, or another method is chosen."""
        return LINES_EVENTS * self.dim if self.deciding else MANY_EVENTS

    def _tell(self, reason: str) -> None:
        if self.deciding:
            raise Unsuitable(reason)
        if not self.told:
            self.told = True
            warn(f"The posterior is far from its reference: {reason}. {self.remedy}")
