"""Posterior predictive checks at a site: replicated against observed summaries of the response."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedpdmc.assessment.outcome import Outcome
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
# What is worth looking at.
USUAL = {"logistic": ("mean",), "poisson": ("mean", "sd", "zeros"), "linear": ("mean", "sd", "skewness"),
         "student_t": ("mean", "sd", "skewness")}  # fmt: skip
# Extreme values are those of single records: they stay at the site.
OF_ONE_RECORD = ("largest", "smallest")


def check_statistics(wanted: Sequence[str] | None, family: str) -> tuple[str, ...]:
    """The names of the statistics, or the usual ones."""
    names = USUAL.get(family, ("mean", "sd")) if wanted is None else tuple(wanted)
    for name in names:
        if name not in STATISTICS:
            raise InputError("checks", repr(name), f"Give some of {', '.join(STATISTICS)}.")
    return names


def predictive_checks(
    outcome: Outcome, records: pd.DataFrame, names: Sequence[str], rng: np.random.Generator, *, values: bool
) -> Mapping[str, Mapping[str, float]]:
    """The two-sided p-value of each statistic, and with ``values`` the observed and the replicated one.

    p is twice the smaller of the shares of replicates that are at most and at least as large as what was observed.
    """
    observed = outcome.study.design.response(records)[:, None]
    replicated = np.concatenate([outcome.replicate(block, rng) for block in outcome.blocks(records)])
    found = {}
    for name in names:
        seen, expected = STATISTICS[name](observed)[0], STATISTICS[name](replicated)
        tails = np.mean(expected <= seen), np.mean(expected >= seen)
        found[name] = {"p": float(min(1.0, 2 * min(tails)))}
        if values and name not in OF_ONE_RECORD:
            found[name] |= {"observed": float(seen), "replicated": float(expected.mean()), "sd": float(expected.std())}
    return found
