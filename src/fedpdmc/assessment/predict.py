"""Predictions for new records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from fedpdmc.assessment.at_site import DRAWS, public_draws
from fedpdmc.errors import InputError
from fedpdmc.study.sites_from_table import check_table
from fedpdmc.study.study_response import OF_TIMES, Outcome, own_units
from fedpdmc.validation import LEVEL, interval_ends, one_of

if TYPE_CHECKING:
    from fedpdmc.results.posterior import Posterior
    from fedpdmc.study.sites_from_table import Sites


def predict(
    post: Posterior,
    sites: Sites,
    table: Any,
    *,
    kind: str = "mean",
    at: float | Sequence[float] | None = None,
    level: float = LEVEL,
    draws: int = DRAWS,
    seed: int = 0,
) -> pd.DataFrame:
    """Predictions for new records.

    Parameters
    ----------
    post : Posterior
    sites : Sites
        From `fedpdmc.sites`, which ``post`` was sampled from.
    table : pandas or polars DataFrame, or Arrow table
        The formula's columns, without the response. Values must be within the declared bounds:
        `fedpdmc.sites` takes wider ones, ``columns={"age": {"bounds": [18, 100]}}``.
    kind : {"mean", "response", "survival", "hazard", "restricted_mean", "median"}
        The expected response (a probability, a rate, a time), or a response itself, with its own variation. Of survival
        families also the probability to survive a time, the hazard at it, the mean survival time up to it, and the median.
    at : float or sequence of float, optional
        The times, in the units of the table, for survival, hazard and restricted mean.
    level : float
        Probability of the interval, between quantiles with equal tails.
    draws, seed : int

    Returns
    -------
    DataFrame
        A row for each record: mean, sd and the ends of the interval, in the response's own units. Where the response has
        levels, a row for each record and level, with its probability; NaN for a record with a missing value, if such are
        dropped; of survival families the time until the event, and
        with ``at`` a row for each record and time.
    """
    one_of("kind", kind, ("mean", "response", "median", *OF_TIMES))
    times = check_times(kind, at)
    records = check_table(sites.study, table, response=False)
    outcome = Outcome(sites.study, public_draws(post, draws).values)

    def of_each(values: np.ndarray) -> pd.DataFrame:
        # A record that is dropped for a missing value keeps its row, which is NaN: rows are those of the table.
        return described(values, level, records.attrs["rows"]).reindex(range(records.attrs["count"]))

    if kind not in ("mean", "response"):
        parts = [of_each(outcome.expected(records, kind, time)) for time in times]
        found = pd.concat(parts, keys=times, names=["at", "record"]).swaplevel().sort_index()
        return found.droplevel("at") if at is None else found
    law = outcome.law(records)
    if kind == "mean":
        values = law.mean()
    elif law.levels or law.shares:
        raise InputError(
            "kind", repr(kind), "Use 'mean' for levels and shares of trials: it gives their probabilities."
        )
    else:
        values = law.draw({}, np.random.default_rng(seed))
    values = own_units(values, outcome.response)
    if not law.levels:
        return of_each(values)
    parts = [of_each(values[..., k]) for k in range(values.shape[2])]
    found = pd.concat(parts, keys=list(outcome.response.levels), names=["level", "record"])
    return found.swaplevel().sort_index(level="record", sort_remaining=False)


def check_times(kind: str, at: Any) -> list[float]:
    """The times of a prediction; one that is not used if the kind needs none.

    Raises
    ------
    InputError
        Times where none are needed, none where some are, or times that are not positive.
    """
    remedy = f"Give at=, one or more positive times, with kind one of {', '.join(OF_TIMES)}, and only with them."
    if (at is not None) != (kind in OF_TIMES):
        raise InputError("at", f"{at!r} with kind = {kind!r}", remedy)
    times = np.atleast_1d(np.asarray(1.0 if at is None else at, float))
    if times.ndim != 1 or not times.size or not (np.isfinite(times) & (times > 0)).all():
        raise InputError("at", repr(at), remedy)
    return times.tolist()


def described(values: np.ndarray, level: float, index: Any = None) -> pd.DataFrame:
    """Mean, sd and interval of each row."""
    ends = {name: np.quantile(values, p, axis=1) for name, p in interval_ends("level", level).items()}
    return pd.DataFrame({"mean": values.mean(1), "sd": values.std(1)} | ends, index=index)
