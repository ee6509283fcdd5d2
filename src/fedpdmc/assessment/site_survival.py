"""Kaplan-Meier estimates and average survival curves, which each site computes from its own records.

A site on a network releases an estimate at the contract's times, in steps. A time is left out, and its step becomes one
with the next, until the numbers of events and of censored records in the step, and the number still at risk after it, are
each zero or at least ``least``. Released are these numbers, the estimate at the end of each step with three decimals, and
the model's average survival over the site's records there. So no number is that of fewer than ``least`` records; that a
time is left out tells that one would have been. Posteriors that a coordinator makes up decide on the averages alone:
`Carried` controls them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedpdmc.study.study_response import Outcome

if TYPE_CHECKING:
    import pandas as pd

# Decimal places of a released survival.
DECIMALS = 3
# Draws that average curves are made of, and times of a grid that nobody declared.
CURVE_DRAWS, GRID = 500, 12
# What a step is: its end, numbers at risk at its start, of events and of censored records, and survival at its end.
STEP = ("time", "at_risk", "events", "censored", "survival")
# The model's average survival at the end of each step, and its interval.
MODEL = ("model", "low", "high")


class KaplanMeier(NamedTuple):
    """The product-limit estimate ``Π (1 − d_i/n_i)`` over the times of events up to t."""

    time: np.ndarray
    survival: np.ndarray

    def at(self, t: Any) -> np.ndarray:
        """The estimate at times t."""
        return np.append(1.0, self.survival)[np.searchsorted(self.time, t, side="right")]


def kaplan_meier(time: np.ndarray, died: np.ndarray | None = None) -> KaplanMeier:
    """The estimate from times and zeros where they are censored: after events of the same time. None: none is."""
    time = np.asarray(time, float)
    seen = time if died is None else time[np.asarray(died) > 0]
    events, count = np.unique(seen, return_counts=True)
    at_risk = len(time) - np.searchsorted(np.sort(time), events, side="left")
    return KaplanMeier(events, np.cumprod(1 - count / np.maximum(at_risk, 1)))


def times_and_events(outcome: Outcome, records: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """The records' times in the units of the table, and ones where they are those of events."""
    response = outcome.response
    died = outcome.own(records).get("died")
    time = outcome.observed(records)[:, 0] * response.scale + response.center
    return time, np.ones(len(time)) if died is None else died[:, 0]


def time_grid(time: np.ndarray, died: np.ndarray, size: int = GRID) -> tuple[float, ...]:
    """Times of three digits, equally spaced up to the last event, or up to the last time if there is none."""
    last = time[died > 0].max(initial=0.0) or time.max()
    return tuple(sorted({float(f"{t:.3g}") for t in np.linspace(0, last, size + 1)[1:]}))


def steps_of(time: np.ndarray, died: np.ndarray, grid: Sequence[float], least: int) -> dict[str, list[float]]:
    """The steps of a Kaplan-Meier estimate whose numbers are zero or at least ``least``, by the names of `STEP`."""
    curve, start, rows = kaplan_meier(time, died), 0.0, []
    for end in grid:
        inside = (time > start) & (time <= end)
        counts = [float(np.sum(part)) for part in (time > start, inside & (died > 0), inside & (died == 0), time > end)]
        if counts[0] and all(count == 0 or count >= least for count in counts[1:]):
            rows.append([float(end), *counts[:3], round(float(curve.at(end)), DECIMALS)])
            start = end
    return dict(zip(STEP, np.asarray(rows).reshape(-1, len(STEP)).T.tolist(), strict=True))


class Carried:
    """Whether released averages are carried by enough records, at each of S draws and T times.

    With draws far out an average survival is the share of the records on one side of a plane, and its change from time to
    time, or from draw to draw, that of single records. So the effective number in both must be at least ``least``; a change
    is let through that the released decimals do not show.
    """

    def __init__(self, least: int):
        self.least, self._records = least, 0
        self._sums: Any = 0.0

    def add(self, place: int, of: int, change: np.ndarray) -> None:
        """Changes of some records, (n, S), at a place among the ``of`` kinds and times."""
        if isinstance(self._sums, float):
            self._sums = np.zeros((2, of, change.shape[1]))
        self._sums[:, place] += [np.abs(change).sum(0), np.sum(change**2, 0)]

    def enough(self, records: int) -> bool:
        """Whether all changes are carried by enough of so many records."""
        size, squares = self._sums
        seen = ~(size / records < 10.0**-DECIMALS)
        return bool(np.all(size[seen] ** 2 >= self.least * squares[seen]))


def average_survival(
    outcome: Outcome,
    records: pd.DataFrame,
    times: Sequence[float],
    step: Callable[[float], None],
    carried: Carried | None = None,
) -> np.ndarray:
    """Survival at each draw and time, averaged over the records: of shape (S, T)."""
    total, done = np.zeros((len(outcome.draws), len(times))), 0
    for block in outcome.blocks(records):
        step(done / len(records))
        done += len(block)
        before: Any = 1.0
        for j, time in enumerate(times):
            now = outcome.expected(block, "survival", time)
            total[:, j] += now.sum(0)
            if carried is not None:
                carried.add(2 * j, 2 * len(times), before - now)
                carried.add(2 * j + 1, 2 * len(times), now - now.mean(1, keepdims=True))
            before = now
    return total / len(records)


def site_survival(
    outcome: Outcome,
    records: pd.DataFrame,
    times: Sequence[float],
    level: float,
    least: int | None,
    step: Callable[[float], None],
) -> dict[str, list[float]] | None:
    """The steps of a site with the model's average survival, by the names of `STEP` and `MODEL`.

    With ``least`` None nothing is withheld. Without `MODEL` if too few records carry the averages.
    """
    found = steps_of(*times_and_events(outcome, records), times, least or 0)
    every = max(len(outcome.draws) // CURVE_DRAWS, 1)
    outcome = Outcome(outcome.study, outcome.draws[::every], outcome.site)
    carried = None if least is None else Carried(least)
    if not found["time"]:
        return found
    curves = average_survival(outcome, records, found["time"], step, carried)
    if carried is None or carried.enough(len(records)):
        ends = np.quantile(curves, [(1 - level) / 2, (1 + level) / 2], axis=0)
        found |= dict(zip(MODEL, np.round([curves.mean(0), *ends], DECIMALS).tolist(), strict=True))
    return found


def pooled(sites: Sequence[dict[str, list[float]]]) -> dict[str, list[float]]:
    """The estimate of all sites from their steps: conditional survival from time to time, weighted by those at risk.

    Exact where all sites have the same steps and nobody is censored within one. Between a site's own steps its hazard is
    taken as constant, and a site whose steps have ended no longer counts.
    """
    sites = [one for one in sites if one["time"]]
    time, survival, before, value = sorted({t for one in sites for t in one["time"]}), [], 0.0, 1.0
    for t in time:
        kept = []
        for one in (one for one in sites if one["time"][-1] >= t):
            ends = [0.0, *one["time"]]
            left = one["at_risk"][-1] - one["events"][-1] - one["censored"][-1]
            log = np.log(np.maximum([1.0, *one["survival"]], 1e-12))
            ratio = np.exp(np.interp(t, ends, log) - np.interp(before, ends, log))
            kept.append((float(np.interp(before, ends, [*one["at_risk"], left])), float(ratio)))
        at_risk = sum(n for n, _ in kept)
        value, before = value * (sum(n * q for n, q in kept) / at_risk if at_risk else 1.0), t
        survival.append(value)
    return {"time": time, "survival": survival}
