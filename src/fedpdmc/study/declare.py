"""Declarations of columns, as in a contract, derived from a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import narwhals as nw
import numpy as np
import pandas as pd
import polars as pl

from fedpdmc.errors import InputError
from fedpdmc.study.column import Column
from fedpdmc.study.contract_keys import VALUES

MOST_LEVELS = 200
# Bounds are wider than the observed range by this share of it, and centre and scale have this many digits.
WIDER, DIGITS = 0.25, 2
# Roles of numbers above zero and below this.
INSIDE = {"positive": np.inf, "unit": 1.0}
KEYS = ("type", "levels", "bounds", "center", "scale", "log")
GIVE = "Give a pandas or polars data frame or an Arrow table, or a dict of them by site."


def as_columns(table: Any, names: Sequence[str], argument: str = "table") -> dict[str, pl.Series]:
    """Columns of a pandas, polars or Arrow table: numbers as numbers, everything else as text."""
    frame = as_frame(table, argument)
    missing = [name for name in names if name not in frame.columns]
    if missing:
        known = ", ".join(map(str, frame.columns[:20]))
        raise InputError(argument, f"no column {missing[0]!r}", f"The table has the columns {known}.")
    return {name: _series(name, frame[name]) for name in names}


def as_frame(table: Any, argument: str = "table") -> nw.DataFrame:
    """A table of any known kind; anything with Arrow's C interface is one."""
    if not hasattr(table, "columns") and hasattr(table, "__arrow_c_stream__"):
        table = pl.DataFrame(table)
    try:
        return nw.from_native(table, eager_only=True)
    except TypeError as error:
        raise InputError(argument, type(table).__name__, GIVE) from error


def _series(name: str, column: nw.Series) -> pl.Series:
    values = column.to_list()
    values = [None if value is None or value != value else value for value in values]
    if column.dtype == nw.Boolean or all(isinstance(value, (bool, np.bool_)) for value in values if value is not None):
        return pl.Series(name, [None if x is None else str(bool(x)).lower() for x in values], dtype=pl.String)
    if all(isinstance(value, (int, np.integer)) for value in values if value is not None):
        return pl.Series(name, [None if x is None else int(x) for x in values], dtype=pl.Int64)
    if column.dtype.is_numeric():
        return pl.Series(name, [None if x is None else float(x) for x in values], dtype=pl.Float64)
    return pl.Series(name, [None if x is None else str(x) for x in values], dtype=pl.String)


def ordered_levels(table: Any, name: str) -> tuple[str, ...] | None:
    """The categories of a pandas Categorical or a polars Enum, in their order; None for any other column."""
    column = as_frame(table)[name].to_native()
    if isinstance(column, pd.Series) and isinstance(column.dtype, pd.CategoricalDtype):
        return tuple(map(str, column.cat.categories))
    if isinstance(column, pl.Series) and isinstance(column.dtype, pl.Enum):
        return tuple(column.dtype.categories.to_list())
    return None


def check_order(name: str, table: Any, seen: pl.Series) -> None:
    """Refuse text as an ordered response, unless it is an ordered categorical: the alphabet is not its order."""
    column = as_frame(table)[name].to_native()
    categorical = isinstance(column, pd.Series) and isinstance(column.dtype, pd.CategoricalDtype)
    known = categorical and column.cat.ordered or isinstance(column, pl.Series) and isinstance(column.dtype, pl.Enum)
    found = seen.drop_nulls().unique().sort().to_list()
    if known or (seen.dtype != pl.String and not categorical) or found == ["false", "true"]:
        return
    some = f"text without an order ({', '.join(map(repr, found[:3]))}{', ...' if len(found) > 3 else ''})"
    given = f'Give its levels from the lowest to the highest: columns={{"{name}": {{"levels": [...]}}}}; or an ordered '
    remedy = f"{given}categorical (pandas: ordered=True; polars: Enum)."
    raise InputError(f"column {name!r}", f"{some} as the response of an ordered family", remedy)


def declare(
    name: str,
    values: pl.Series,
    told: Mapping[str, Any],
    role: str,
    levels: tuple[str, ...] | None,
    standardize: bool,
) -> Column:
    """The declaration of a column.

    Parameters
    ----------
    name : str
    values : Series
        Of all sites.
    told : mapping
        What the user declares; it takes precedence over what the values show.
    role : {"covariate", "level", "count", "number", "positive", "unit"}
        What the model needs it to be.
    levels : tuple of str or None
        The categories of a categorical column.
    standardize : bool
        Whether numbers are centred and scaled.
    """
    unknown = sorted(set(told) - set(KEYS))
    if unknown:
        raise InputError(f"columns[{name!r}]", f"the key {unknown[0]!r}", f"Known keys: {', '.join(KEYS)}.")
    seen = values.drop_nulls()
    if not len(seen):
        raise InputError(f"column {name!r}", "no values", "Remove it from the formula.")
    kind = told.get("type") or _kind(seen, role, levels, "levels" in told)
    if kind not in VALUES:
        raise InputError(f"columns[{name!r}]: type", repr(kind), f"Give one of {', '.join(map(repr, VALUES))}.")
    if kind == "level":
        found = _levels(name, seen) if levels is None else tuple(x for x in levels if x in set(seen.cast(pl.String)))
        return Column(name, kind, levels=tuple(told.get("levels") or found))
    numbers = _numbers(name, seen)
    log = bool(told.get("log", False))
    if log and numbers.min() <= 0:
        raise InputError(
            f"column {name!r}", f"the value {numbers.min():g} with log = True", "Logarithms need values above 0."
        )
    if role in INSIDE and not (numbers.min() > 0 and numbers.max() < INSIDE[role]):
        found = f"values from {numbers.min():g} to {numbers.max():g}"
        raise InputError(f"column {name!r}", found, f"Give values above 0 and below {INSIDE[role]:g}.")
    bounds = told.get("bounds") or _bounds(numbers, kind, log or role in INSIDE, INSIDE.get(role, np.inf))
    if len(bounds) != 2 or not bounds[0] < bounds[1]:
        raise InputError(f"columns[{name!r}]: bounds", repr(bounds), "Give [least, most].")
    used = np.log(numbers) if log else numbers
    center, scale = (0.0, 1.0) if kind == "count" and role == "count" or not standardize else _standard(used)
    return Column(
        name, kind, (), (float(bounds[0]), float(bounds[1])), float(told.get("center", center)),
        float(told.get("scale", scale)), log,
    )  # fmt: skip


def _kind(seen: pl.Series, role: str, levels: tuple[str, ...] | None, named: bool) -> str:
    if role == "level" or levels is not None or named:
        return "level"
    if role != "covariate":
        return "count" if role == "count" else "number"
    return "level" if seen.dtype == pl.String and not _all_numbers(seen) else "number"


def _all_numbers(seen: pl.Series) -> bool:
    return not seen.cast(pl.Float64, strict=False).is_null().any()


def _levels(name: str, seen: pl.Series) -> tuple[str, ...]:
    if seen.dtype == pl.Float64:
        whole = seen.cast(pl.Int64)
        if not (whole.cast(pl.Float64) == seen).all():
            raise InputError(f"column {name!r}", "numbers that are not whole, as levels", "Give text or whole numbers.")
        seen = whole
    found = seen.unique().sort().cast(pl.String).to_list()
    if len(found) > MOST_LEVELS:
        raise InputError(
            f"column {name!r}",
            f"{len(found)} levels",
            f"At most {MOST_LEVELS} are taken from a table: is it a number? Else declare them: columns={{{name!r}: ...}}.",
        )
    if len(found) == 1:
        raise InputError(f"column {name!r}", f"only the level {found[0]!r}", "Remove it, or declare all levels.")
    return tuple(found)


def _numbers(name: str, seen: pl.Series) -> np.ndarray:
    found = seen.cast(pl.Float64, strict=False)
    bad = seen.filter(found.is_null())
    if len(bad):
        raise InputError(f"column {name!r}", f"{str(bad[0])[:40]!r}", "Give numbers, or declare it: type = 'level'.")
    numbers = found.to_numpy()
    if not np.all(np.isfinite(numbers)):
        raise InputError(f"column {name!r}", "a value that is not finite", "Give finite numbers.")
    return numbers


def _bounds(numbers: np.ndarray, kind: str, positive: bool, most: float = np.inf) -> tuple[float, float]:
    """The observed range, a quarter wider on each side and rounded outwards; not below zero if no value is.

    For positive numbers, from half the smallest to twice the largest, or half the way from the largest to a finite ``most``.
    """
    low, high = float(numbers.min()), float(numbers.max())
    if set(numbers.tolist()) == {0.0, 1.0} and not positive:
        return 0.0, 1.0
    if positive:
        return _outward(low / 2, -1), _outward(2 * high, 1) if np.isinf(most) else most - _outward(
            (most - high) / 2, -1
        )
    more = WIDER * (high - low) or max(abs(high), 1.0)
    least = _outward(low - more, -1)
    least = max(least, 0.0) if low >= 0 else least
    if kind == "count":
        return float(np.floor(least)), float(np.ceil(_outward(high + more, 1)))
    return least, _outward(high + more, 1)


def _outward(x: float, direction: int) -> float:
    """Rounded to `DIGITS` digits, up or down."""
    if x == 0:
        return 0.0
    unit = 10.0 ** (np.floor(np.log10(abs(x))) - DIGITS + 1)
    rounded = np.ceil(x / unit) if direction > 0 else np.floor(x / unit)
    return float(f"{rounded * unit:.12g}")


def _standard(numbers: np.ndarray) -> tuple[float, float]:
    """Centre and scale of few digits, so that a contract reveals little about the records."""
    sd = float(numbers.std())
    if sd == 0:
        return 0.0, 1.0
    scale = float(f"{sd:.{DIGITS}g}")
    unit = 10.0 ** np.floor(np.log10(scale))
    return float(f"{np.round(numbers.mean() / unit) * unit:.12g}"), scale
