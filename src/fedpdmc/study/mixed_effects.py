"""``mixed_sites``: sites with private effects from a table and a formula such as ``ill ~ drug + age + (1 | ward)``."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from formulaic import Formula

from fedpdmc._jax.precision import double_precision
from fedpdmc.errors import InputError
from fedpdmc.members.site import Site
from fedpdmc.models.grouped import SpreadPrior, effects_prior, random_effects

TERM = re.compile(r"\(\s*([^()|]*?)\s*\|\s*(\w+)\s*\)")
NAME = re.compile(r"\w+")
SUCH_AS = "Give one term such as (1 | ward) or (1 + dose | ward)."


class MixedSites(NamedTuple):
    """Sites and prior, as `fedpdmc.sample` takes them: ``fedpdmc.sample(*mixed_sites(...))``."""

    sites: list[Site]
    prior: SpreadPrior


class MixedFormula(NamedTuple):
    """A formula taken apart: the fixed part, the column whose coefficient varies if there is one, and the groups."""

    fixed: str
    slope: str | None
    groups: str


def parse_mixed(formula: str) -> MixedFormula:
    """Take a formula with one term of effects apart."""
    found = TERM.findall(formula)
    if len(found) != 1 or formula.count("|") != 1 or "~" not in formula:
        raise InputError("formula", repr(formula), SUCH_AS)
    varying, groups = found[0]
    parts = [part.strip() for part in varying.split("+")]
    slopes = [part for part in parts if part != "1"]
    if "1" not in parts or len(parts) > 2 or len(slopes) > 1 or not all(NAME.fullmatch(slope) for slope in slopes):
        raise InputError("formula", f"({varying} | {groups})", SUCH_AS)
    left, right = formula.split("~", 1)
    terms = [term.strip() for term in TERM.sub("", right).split("+")]
    right = " + ".join(term for term in terms if term) or "1"
    return MixedFormula(f"{left.strip()} ~ {right}", slopes[0] if slopes else None, groups)


@double_precision
def mixed_sites(
    table: pd.DataFrame,
    *,
    formula: str,
    by: str,
    family: str = "logistic",
    scale: Any = 10.0,
    spread: str = "half-normal",
    spread_scale: float = 1.0,
    **options: Any,
) -> MixedSites:
    """Sites with private effects from a table.

    Parameters
    ----------
    table : DataFrame
        All records, with a column ``by`` that says whose each is.
    formula : str
        Such as ``"ill ~ drug + age + (1 | ward)"`` or ``"ill ~ dose + (1 + dose | ward)"``. With ``(1 | hospital)`` and
        ``by="hospital"`` every site has one effect, its own.
    by : str
        The column of the sites' names.
    family : str
        As in `fedpdmc.models.random_effects`.
    scale, spread, spread_scale
        The prior, as in `fedpdmc.models.effects_prior`.
    **options
        Of the family: ``size``, ``df`` and ``scale`` of Student-t as ``noise_scale``.

    Returns
    -------
    MixedSites
    """
    parsed = parse_mixed(formula)
    needed = [by, parsed.groups, *([parsed.slope] if parsed.slope else [])]
    for column in needed:
        if column not in table.columns:
            raise InputError("formula", f"column {column!r}", f"The table has {', '.join(map(str, table.columns))}.")
        if bool(np.any(pd.isna(table[column].to_numpy()))):
            raise InputError(f"column {column!r}", "a missing value", "Drop the record, or impute it.")
    try:
        both: Any = Formula(parsed.fixed).get_model_matrix(table, na_action="raise")  # pyright: ignore[reportAbstractUsage]
    except Exception as error:
        raise InputError("formula", repr(formula), str(error)[:200]) from error
    response, design = both.lhs, both.rhs
    if response.shape[1] > 1:
        # Two levels, of which the second is counted.
        response = response.iloc[:, -1:]
    if "noise_scale" in options:
        options["scale"] = options.pop("noise_scale")
    sites = []
    for name, rows in table.groupby(by, observed=True, sort=True).indices.items():
        own = table.iloc[rows]
        X = design.to_numpy(float)[rows]
        effects = None if parsed.slope is None else np.c_[np.ones(len(rows)), own[parsed.slope].to_numpy(float)]
        groups = None if parsed.groups == by else own[parsed.groups].astype(str).to_numpy()
        model = random_effects(
            X,
            response.to_numpy(float)[rows, 0],
            groups,
            family=family,
            effects=effects,
            names=design.columns,
            **options,
        )
        sites.append(Site(model, name=str(name)))
    return MixedSites(
        sites, effects_prior(sites[0].potential, scale=scale, spread=spread, spread_scale=spread_scale)
    )  # fmt: skip
