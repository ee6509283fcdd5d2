"""Predictions for new records."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from fedpdmc.assessment.at_site import DRAWS, public_draws
from fedpdmc.assessment.study_response import Outcome
from fedpdmc.errors import InputError
from fedpdmc.study.sites_from_table import checked_table
from fedpdmc.validation import one_of, probability

if TYPE_CHECKING:
    from fedpdmc.results.posterior import Posterior
    from fedpdmc.study.column import Column
    from fedpdmc.study.sites_from_table import Sites


def predict(
    post: Posterior,
    sites: Sites,
    table: Any,
    *,
    kind: str = "mean",
    level: float = 0.9,
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
    kind : {"mean", "response"}
        The expected response (a probability, a rate, a time), or a response itself, with its own variation.
    level : float
        Probability of the interval, between quantiles with equal tails.
    draws, seed : int

    Returns
    -------
    DataFrame
        A row for each record: mean, sd and the ends of the interval, in the response's own units. Where the response has
        levels, a row for each record and level, with its probability; of survival families the time until the event.
    """
    one_of("kind", kind, ("mean", "response"))
    level = probability("level", level, "Give a probability between 0 and 1, such as 0.9.")
    records = checked_table(sites.study, table, response=False)
    outcome = Outcome(sites.study, public_draws(post, draws).values)
    law = outcome.law(records)
    if kind == "mean":
        values = law.mean()
    elif law.levels or sites.study.family == "beta_binomial":
        raise InputError(
            "kind", repr(kind), "Use 'mean' for levels and shares of trials: it gives their probabilities."
        )
    else:
        values = law.draw({}, np.random.default_rng(seed))
    values = own_units(values, outcome.response)
    if not law.levels:
        return described(values, level)
    parts = [described(values[..., k], level) for k in range(values.shape[2])]
    found = pd.concat(parts, keys=list(outcome.response.levels), names=["level", "record"])
    return found.swaplevel().sort_index(level="record", sort_remaining=False)


def described(values: np.ndarray, level: float, index: Any = None) -> pd.DataFrame:
    """Mean, sd and interval of each row."""
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2], axis=1)
    tail = 50 * (1 - level)
    found = {"mean": values.mean(1), "sd": values.std(1), f"{tail:.4g}%": low, f"{100 - tail:.4g}%": high}
    return pd.DataFrame(found, index=index)


def own_units(values: np.ndarray, response: Column) -> np.ndarray:
    """Values of a standardised response in its own units."""
    return values * response.scale + response.center if response.type == "number" else values
