"""The coordinator's checks of what sites answer: the right kind of message, for this request, within the plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedpdmc.errors import BadAnswer, BoundViolation, BudgetSpent, LimitReached, NotFinite, Refused, WireError
from fedpdmc.federation import messages
from fedpdmc.federation.messages import OtherVersion, version_remedy
from fedpdmc.plan import Arrival, Plan
from fedpdmc.privacy.accountant import AccountStatus

ROUNDING = 1e-9  # times are sums of durations, which are rounded
# The largest entry of a velocity: normals of uniforms with 52 bits are below 8.3, and a draw is at most twice as long.
FASTEST = 40.0
LARGEST = 1e150  # entry of a Hessian
SYMMETRIC = 1e-6  # largest relative asymmetry of a Hessian
LIMITS = ("TOO_MANY_ROUNDS", "OBSERVED_TIME_SPENT", "INFORMATION_SPENT")
# What the site's operator can do if its policy refuses.
REMEDIES = {
    "FEW_RECORDS": "Too few of the site's records contribute to the answer, by the least_records and largest_share of its "
    "policy. The site's log names the limit.",
    "TOO_FAR": "The point is further from the prior's mean than the site's policy allows (farthest). Check the prior.",
    "SIMILAR_RECORDS": "The site's records differ in few from those of another study. Its operator decides what to do.",
    "NOT_ANSWERED": "An error occurred at the site. The site's own log has it.",
    "NARROW_PART": "The model file lets a narrow part of a column's range carry the answers. Its author must change it.",
    "NOT_MY_PLAN": "The site makes the plans itself, and has another one. Restore the store; compare the versions of both.",
    "TOO_MANY_DERIVATIVES": "The search for the mode needs more points than the contract's [limits] derivatives.",
    "TOO_WIDE": "The reference is wider than the site's records allow, or its derivatives were false. Check the prior.",
    "OTHER_RUN": "The site's store belongs to another run. Restore the coordinator's store, or give all parties new ones.",
    "SAME_ROUND_OTHER_PLAN": "The site has answered this round of another computation: go on with the software, machine "
    "and store that began the run.",
    "TOO_MANY_REFUSALS": "The site has stopped after 20 refusals in a row. `fedpdmc audit show` at the site shows them.",
}


def check_answer(name: str, data: bytes, kind: type, asked: tuple[bytes, int, bytes]) -> Any:
    """The decoded answer of a site, if it is of this kind and answers this run, sequence number and request hash."""
    try:
        message = messages.decode(data)
    except OtherVersion as error:
        raise Refused(name, "VERSION", version_remedy(data, "MALFORMED") or str(error)) from error
    except WireError as error:
        raise BadAnswer(name, str(error)) from error
    if isinstance(message, messages.Refusal):
        if (remedy := version_remedy(data, message.code)) is not None:
            raise Refused(name, "VERSION", remedy)
        raise _refusal(name, message)
    if not isinstance(message, kind):
        raise BadAnswer(name, f"{type(message).__name__} instead of {kind.__name__}")
    if (message.run, message.sequence, message.request) != asked:  # type: ignore[attr-defined]
        raise BadAnswer(name, "the answer to another request")
    return message


def _refusal(name: str, message: messages.Refusal) -> Exception:
    code, chain = message.code, message.chain - 1
    if code == "BOUND_VIOLATED":
        return BoundViolation(name, chain)
    if code == "NOT_FINITE":
        return NotFinite(name, max(chain, 0))
    if code == "BUDGET_SPENT":
        return BudgetSpent(
            f"site {name!r}: the plan costs more than the rest of its privacy budget (code BUDGET_SPENT)."
        )
    if code in LIMITS:
        return LimitReached(name, code)
    return Refused(name, code, REMEDIES[code]) if code in REMEDIES else Refused(name, code)


def check_derivatives(name: str, message: messages.Derivatives, dim: int) -> None:
    """Raise `BadAnswer` for derivatives of the wrong dimension, or a Hessian that is not symmetric or too large."""
    if message.gradient.shape != (dim,):
        raise BadAnswer(name, "derivatives of another number of parameters")
    skew, size = (float(np.abs(a).max()) for a in (message.hessian - message.hessian.T, message.hessian))
    if size > LARGEST or skew > SYMMETRIC * size:
        raise BadAnswer(name, "a Hessian that is not symmetric, or too large to be added to others")


def read_account(name: str, dim: int, remaining: float, numbers: Sequence[float]) -> AccountStatus:
    """The status of a site's privacy account."""
    try:
        return AccountStatus.from_numbers(name, dim, remaining, numbers)
    except ValueError as error:
        raise BadAnswer(name, str(error)) from error


def read_arrival(name: str, message: messages.Arrivals, plan: Plan, flips: bool | None = None) -> Arrival:
    """The arrivals of a site: times within the plan, and marks that are coordinates or velocities."""
    horizon, dim = np.asarray(plan.duration).sum(-1), plan.start.shape[1]
    chain = np.flatnonzero(horizon > 0)
    if message.rang.shape != chain.shape:
        raise BadAnswer(name, "arrivals of another number of chains")
    came = chain[message.rang.astype(bool)]
    times, coordinates, velocities = message.arrivals()
    has_velocities = bool(len(velocities))
    if flips is not None and len(came) and flips == has_velocities:
        words = f"{'velocities' if flips else 'coordinates'}, but the dynamics have the other kind of mark"
        raise BadAnswer(name, words)
    if (times > horizon[came] * (1 + ROUNDING)).any():
        raise BadAnswer(name, "an arrival after the end of the plan")
    if has_velocities:
        if velocities.shape[1] != dim:
            raise BadAnswer(name, "a velocity of another dimension")
        if (np.abs(velocities) > FASTEST).any():
            raise BadAnswer(name, f"a velocity above {FASTEST:g}, which no draw has")
    elif ((coordinates < 0) | (coordinates >= dim)).any():
        raise BadAnswer(name, "a mark that is not a coordinate")
    marks = has_velocities or flips is False
    # NumPy arrays, without arrivals for chains that were not asked: they are stacked over sites before JAX uses them.
    time, rang = np.where(horizon > 0, horizon, 0.0), np.zeros(len(horizon), bool)
    mark = np.zeros((len(horizon), dim)) if marks else np.zeros(len(horizon), np.int64)
    time[came], rang[came] = times, True
    mark[came] = (velocities if has_velocities else coordinates) if len(came) else 0
    return Arrival(time, rang, mark)  # type: ignore[arg-type]


IMMEDIATE = (
    1e-12  # share of a plan before which an arrival is immediate: a clock with a finite rate has practically none
)
MOST_IMMEDIATE = 32  # so many in a row, from one site on one chain, are not an accident


class ImmediateArrivals:
    """Counts the plans that each site has ended and, for each chain, consecutive immediate arrivals of one site."""

    def __init__(self, names: Sequence[str]):
        self.names, self.ended = tuple(names), np.zeros(len(names), dtype=np.int64)
        self._row = np.zeros(0, dtype=np.int64)
        self._last = np.zeros(0, dtype=np.int64)

    def add(self, arrivals: Sequence[Arrival | None], horizon: np.ndarray) -> None:
        """Add the arrivals of one round, with the length of each chain's plan.

        Raises `BadAnswer`: A site had too many immediate arrivals in a row.
        """
        if not len(self._row):
            self._row, self._last = np.zeros((2, len(horizon)), dtype=np.int64)
        times = np.stack(
            [np.full(len(horizon), np.inf) if one is None else np.where(one.rang, one.time, np.inf) for one in arrivals]
        )
        first, earliest = times.argmin(0), times.min(0)
        rang = np.isfinite(earliest)
        self.ended += np.bincount(first[rang], minlength=len(self.names))
        immediate = rang & (earliest <= IMMEDIATE * horizon)
        again = immediate & (first == self._last)
        self._row = np.where(again, self._row + 1, immediate.astype(np.int64))
        self._last = first
        if (self._row >= MOST_IMMEDIATE).any():
            chain = int(self._row.argmax())
            raise BadAnswer(self.names[first[chain]], f"{MOST_IMMEDIATE} immediate arrivals in a row on chain {chain}")

    def words(self) -> str:
        """How many plans each site has ended; empty if none."""
        if not self.ended.any():
            return ""
        counts = ", ".join(f"{name} {count:,}" for name, count in zip(self.names, self.ended, strict=True))
        return f" Plans ended by each site, counted by chain: {counts}."
