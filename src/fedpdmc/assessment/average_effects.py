"""Average effects of a column on the expected response, over the records at the sites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from fedpdmc.assessment.at_site import DRAWS, public_draws
from fedpdmc.assessment.predict import described, own_units
from fedpdmc.assessment.study_response import Outcome
from fedpdmc.errors import InputError

if TYPE_CHECKING:
    from fedpdmc.results.posterior import Posterior
    from fedpdmc.study.column import Column
    from fedpdmc.study.sites_from_table import Sites


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
    return described(np.stack(list(rows.values())), level, list(rows))


def _average(sites: Sites, draws: np.ndarray, change: Any) -> np.ndarray:
    """The sum of expected responses over all records after a change, at each draw, which each site computes itself."""
    total: Any = 0.0
    for site, records in sites.tables.items():
        outcome = Outcome(sites.study, draws, site)
        for block in outcome.blocks(records):
            total = total + own_units(outcome.mean(change(block)), outcome.response).sum(0)
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
