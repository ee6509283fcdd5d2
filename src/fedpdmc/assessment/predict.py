"""Predictions for new records, and average effects of a column over the records at the sites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from fedpdmc.assessment.at_site import DRAWS, public_draws
from fedpdmc.assessment.outcome import Outcome
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
    values = _own_units(values, outcome.response)
    if not law.levels:
        return _described(values, level)
    parts = [_described(values[..., k], level) for k in range(values.shape[2])]
    found = pd.concat(parts, keys=list(outcome.response.levels), names=["level", "record"])
    return found.swaplevel().sort_index(level="record", sort_remaining=False)


def _described(values: np.ndarray, level: float, index: Any = None) -> pd.DataFrame:
    """Mean, sd and interval of each row."""
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2], axis=1)
    tail = 50 * (1 - level)
    found = {"mean": values.mean(1), "sd": values.std(1), f"{tail:.4g}%": low, f"{100 - tail:.4g}%": high}
    return pd.DataFrame(found, index=index)


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
        A row for each contrast; where the response has levels, for each contrast and level.
    """
    study = sites.study
    if column not in study.design.used or column == study.design.response_name:
        known = ", ".join(sorted(study.design.used - {study.design.response_name}))
        raise InputError("column", repr(column), f"Give one of {known}.")
    declared = study.columns[column]
    public = public_draws(post, draws).values
    response = study.columns[study.design.response_name]
    total = sum(len(records) for records in sites.tables.values())
    rows = {}
    for name, (before, after) in _contrasts(declared, by).items():
        start, end = (_average(sites, public, change) / total for change in (before, after))
        values = end / start if ratio else end - start
        if values.ndim == 1:
            rows[name] = values
        else:
            rows |= {f"{name}, P({one})": values[:, k] for k, one in enumerate(response.levels)}
    return _described(np.stack(list(rows.values())), level, list(rows))


def _average(sites: Sites, draws: np.ndarray, change: Any) -> np.ndarray:
    """The sum of expected responses over all records after a change, at each draw, which each site computes itself."""
    total: Any = 0.0
    for site, records in sites.tables.items():
        outcome = Outcome(sites.study, draws, site)
        for block in outcome.blocks(records):
            total = total + _own_units(outcome.mean(change(block)), outcome.response).sum(0)
    return total


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
