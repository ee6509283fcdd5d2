"""Posterior predictive checks at a site: replicated against observed summaries of the response."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedpdmc.assessment.study_response import Outcome
from fedpdmc.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

STATISTICS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "mean": lambda y: y.mean(0),
    "sd": lambda y: y.std(0),
    "zeros": lambda y: (y == 0).mean(0),
    "largest": lambda y: y.max(0),
    "smallest": lambda y: y.min(0),
    "skewness": lambda y: ((y - y.mean(0)) ** 3).mean(0) / np.maximum(y.std(0), 1e-300) ** 3,
}
# The share of events among times that may be censored, and of each level: each needs a family of its kind.
EVENTS, LEVELS = "events", "levels"
COUNTS, TIMES, NUMBERS = ("mean", "sd", "zeros"), ("mean", EVENTS), ("mean", "sd", "skewness")
# The default statistics of each family.
USUAL = {"logistic": ("mean",), "poisson": COUNTS, "negative_binomial": COUNTS, "zero_inflated_poisson": COUNTS,
         "beta_binomial": COUNTS, "linear": NUMBERS, "student_t": NUMBERS, "gamma": NUMBERS, "beta": NUMBERS,
         "weibull": TIMES, "log_normal": TIMES, "piecewise_exponential": TIMES, "ordered_logit": (LEVELS,),
         "ordered_probit": (LEVELS,), "multinomial_logit": (LEVELS,)}  # fmt: skip
# Extreme values are those of single records: they stay at the site.
OF_ONE_RECORD = ("largest", "smallest")


def check_statistics(wanted: Sequence[str] | None, family: str) -> tuple[str, ...]:
    """The names of the statistics, or the usual ones."""
    usual = USUAL[family]
    names = usual if wanted is None else tuple(wanted)
    known = (LEVELS,) if LEVELS in usual else (*STATISTICS, *((EVENTS,) if EVENTS in usual else ()))
    for name in names:
        if name not in known:
            raise InputError("checks", repr(name), f"For {family} give some of {', '.join(known)}.")
    return names


def predictive_checks(
    outcome: Outcome, records: pd.DataFrame, names: Sequence[str], rng: np.random.Generator, *, values: bool
) -> Mapping[str, Mapping[str, float]]:
    """The two-sided p-value of each statistic, and with ``values`` the observed and the replicated one.

    p is twice the smaller of the shares of replicates that are at most, and at least, the observed value.
    """
    observed = outcome.observed(records)
    replicated = np.concatenate([outcome.draw(block, rng) for block in outcome.blocks(records)])
    events: tuple[np.ndarray, np.ndarray] | None = None
    if "died" in (own := outcome.own(records)):
        limit = censoring_times(observed[:, 0], own["died"][:, 0], rng)[:, None]
        events = own["died"], replicated <= limit
        replicated = np.minimum(replicated, limit)
    found = {}
    for name in names:
        for shown, seen, expected in _summaries(outcome, name, observed, replicated, events):
            tails = np.mean(expected <= seen), np.mean(expected >= seen)
            told = {"p": float(min(1.0, 2 * min(tails)))}
            if values and name not in OF_ONE_RECORD:
                told |= {"observed": float(seen), "replicated": float(expected.mean()), "sd": float(expected.std())}
            found[shown] = told
    return found


def _summaries(outcome: Outcome, name: str, observed, replicated, events):
    """Name, observed and replicated value of a statistic; of levels, of the share of each."""
    if name == LEVELS:
        for code, level in enumerate(outcome.response.levels):
            yield f"share of {level}", np.mean(observed == code), (replicated == code).mean(0)
    elif name == EVENTS:
        yield name, events[0].mean(), events[1].mean(0)
    else:
        yield name, STATISTICS[name](observed)[0], STATISTICS[name](replicated)


def censoring_times(time: np.ndarray, died: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """When each record would have been censored: known where it was, else drawn from the law of censoring after its event.

    That law is the Kaplan-Meier estimate in which censoring is the event; beyond the last time at which somebody was
    censored, no response is.
    """
    order = np.unique(time[died == 0])
    at_risk = np.array([np.sum(time >= t) for t in order])
    gone = np.array([np.sum((time == t) & (died == 0)) for t in order])
    left = np.cumprod(1 - gone / np.maximum(at_risk, 1)) if len(order) else np.zeros(0)
    found = np.array(time, float)
    for i in np.flatnonzero(died > 0):
        later = np.searchsorted(order, time[i], side="left")
        start = left[later - 1] if later else 1.0
        reached = np.flatnonzero(left[later:] <= start * rng.random())
        found[i] = order[later + reached[0]] if reached.size else np.inf
    return found
