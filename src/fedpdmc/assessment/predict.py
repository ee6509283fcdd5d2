"""Predictions for new records, and average effects of a column over the records at the sites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from fedpdmc.assessment.at_site import DRAWS, public_draws
from fedpdmc.assessment.outcome import Outcome
from fedpdmc.errors import InputError
from fedpdmc.study.tables import checked_table
from fedpdmc.validation import one_of, probability

if TYPE_CHECKING:
    from fedpdmc.results.posterior import Posterior
    from fedpdmc.study.column import Column
    from fedpdmc.study.tables import Sites


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
        The formula's columns, without the response. Values must be within the declared bounds.
    kind : {"mean", "response"}
        The expected response (a probability, a rate), or a response itself, with its own variation.
    level : float
        Probability of the interval, between quantiles with equal tails.
    draws, seed : int

    Returns
    -------
    DataFrame
        A row for each record: mean, sd and the ends of the interval, in the response's own units.
    """
    one_of("kind", kind, ("mean", "response"))
    level = probability("level", level, "Give a probability between 0 and 1, such as 0.9.")
    records = checked_table(sites.study, table, response=False)
    outcome = Outcome(sites.study, public_draws(post, draws).values)
    predictor = outcome.predictor(records)
    if kind == "mean":
        values = outcome.mean(predictor)
    else:
        values = np.asarray(
            outcome.law(predictor).rvs(size=predictor.shape, random_state=np.random.default_rng(seed)), float
        )
    response = sites.study.columns[sites.study.design.response_name]
    values = _own_units(values, response)
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2], axis=1)
    tail = 50 * (1 - level)
    found = {"mean": values.mean(1), "sd": values.std(1), f"{tail:.4g}%": low, f"{100 - tail:.4g}%": high}
    return pd.DataFrame(found)


def effects(
    post: Posterior,
    sites: Sites,
    column: str,
    *,
    by: float | None = None,
    ratio: bool = False,
    level: float = 0.9,
    draws: int = DRAWS,
) -> pd.DataFrame:
    """The average marginal effect of a column: how the expected response changes, averaged over all records.

    Each site averages over its own records, for every draw; these averages, one number for each draw and contrast, leave it,
    weighted by the number of its records.

    Parameters
    ----------
    post : Posterior
    sites : Sites
    column : str
        Of levels: every level against the first. A number: an increase of ``by``.
    by : float, optional
        In the column's own units; 1 if None.
    ratio : bool
        The ratio of the average expected responses instead of their difference.
    level : float
    draws : int

    Returns
    -------
    DataFrame
        A row for each contrast.
    """
    study = sites.study
    if column not in study.design.used or column == study.design.response_name:
        known = ", ".join(sorted(study.design.used - {study.design.response_name}))
        raise InputError("column", repr(column), f"Give one of {known}.")
    declared = study.columns[column]
    outcome = Outcome(study, public_draws(post, draws).values)
    response = study.columns[study.design.response_name]
    contrasts = _contrasts(declared, by)
    total = sum(len(records) for records in sites.tables.values())
    rows = {}
    for name, (before, after) in contrasts.items():
        sums = np.zeros((2, len(outcome.draws)))
        for records in sites.tables.values():
            for block in outcome.blocks(records):
                for i, change in enumerate((before, after)):
                    predictor = outcome.predictor(change(block))
                    sums[i] += _own_units(outcome.mean(predictor), response).sum(0)
        start, end = sums / total
        values = end / start if ratio else end - start
        low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
        tail = 50 * (1 - level)
        rows[name] = {"mean": values.mean(), "sd": values.std(), f"{tail:.4g}%": low, f"{100 - tail:.4g}%": high}
    return pd.DataFrame(rows).T


def _contrasts(column: Column, by: float | None) -> Mapping[str, Sequence[Any]]:
    """Changes of a block of records, before and after, by name."""
    name = column.name
    if column.type == "level":
        if by is not None:
            raise InputError("by", repr(by), f"{name!r} has levels: leave it out.")

        def at(level: str):
            levels = list(column.levels)
            return lambda block: block.assign(**{name: pd.Categorical([level] * len(block), categories=levels)})

        first, *others = column.levels
        return {f"{name}: {level} against {first}": (at(first), at(level)) for level in others}
    step = 1.0 if by is None else float(by)
    if column.log:
        raise InputError(
            "column", repr(name), "Effects of a column that enters by its logarithm: give its coefficient."
        )
    return {
        f"{name}: + {step:g}": (
            lambda block: block,
            lambda block: block.assign(**{name: block[name] + step / column.scale}),
        )
    }


def _own_units(values: np.ndarray, response: Column) -> np.ndarray:
    return values * response.scale + response.center if response.type == "number" else values
