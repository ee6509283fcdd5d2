"""The values of a site's records against the contract: all that is wrong with them in one report.

It is told to the site's own operator, by line and column; the coordinator learns nothing of it.
"""

from __future__ import annotations

import csv
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import polars as pl

from fedpdmc.errors import InputError
from fedpdmc.study.contract import Column, Study

logger = logging.getLogger("fedpdmc.site")

# Faults that a report shows, and characters of a value.
MOST_SHOWN, WIDTH = 20, 40
# Texts that stand for a missing value, unless the contract declares them as levels.
MISSING = ("", "NA", "N/A", "NaN", "nan", "null", "NULL", "None")
IMPUTE = "Remove or impute the record, or agree on missing = 'drop' in the contract."


class Origin(NamedTuple):
    """Where records come from: in words, and the file if they come from one."""

    where: str
    path: Path | None

    def places(self, rows: np.ndarray, count: int) -> list[str]:
        """What to call these of ``count`` records: by the line of a CSV file, else by their number, from one."""
        lines = _lines(self.path) if self.path is not None and self.path.suffix.lower() == ".csv" else []
        if len(lines) == count:
            return [f"line {lines[row]}" for row in rows]
        return [f"record {row + 1}" for row in rows]


def _lines(path: Path) -> list[int]:
    """The line on which each record of a CSV file begins; a quoted value may go over several."""
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        reader = csv.reader(file)
        next(reader, None)
        lines, last = [], reader.line_num
        for _ in reader:
            lines.append(last + 1)
            last = reader.line_num
    return lines


class Fault(NamedTuple):
    """A value that cannot be used; of no record if the whole column cannot."""

    row: int
    column: str
    what: str
    remedy: str


def checked_records(study: Study, raw: Mapping[str, pl.Series], origin: Origin, count: int) -> pd.DataFrame:
    """Numbers and levels of all columns; ``attrs["origin"]`` and ``attrs["rows"]`` say where each record is from."""
    missing = {name: _missing(series, study.columns[name]) for name, series in raw.items()}
    drop = study.missing == "drop"
    kept = ~np.any(list(missing.values()), 0) if drop and missing else np.ones(count, bool)
    if not kept.any():
        raise InputError(origin.where, f"a missing value in each of {count} records", "Give records that are complete.")
    faults: list[Fault] = []
    frame = {}
    for name, series in raw.items():
        if not drop:
            faults += [Fault(int(row), name, "a missing value", IMPUTE) for row in np.flatnonzero(missing[name])]
        frame[name], found = _column(series, study.columns[name], kept & ~missing[name])
        faults += found
    if faults:
        raise _report(faults, origin, count)
    if not kept.all():
        logger.warning("%s: %d of %d records dropped for a missing value", origin.where, count - kept.sum(), count)
    records = pd.DataFrame({name: values[kept] for name, values in frame.items()})
    records.attrs |= {"origin": origin, "rows": np.flatnonzero(kept), "count": count}
    return records


def record_names(records: pd.DataFrame, rows: np.ndarray) -> tuple[str, list[str]]:
    """Where records come from, and what to call some of them."""
    origin = records.attrs.get("origin", Origin("data", None))
    own = np.asarray(records.attrs.get("rows", np.arange(len(records))))
    return origin.where, origin.places(own[rows], records.attrs.get("count", len(records)))


def _report(faults: list[Fault], origin: Origin, count: int) -> InputError:
    faults = sorted(faults, key=lambda fault: fault.row)
    rows = np.array([fault.row for fault in faults[:MOST_SHOWN]])
    places = origin.places(np.maximum(rows, 0), count)
    places = [f"{place}, " if row >= 0 else "" for place, row in zip(places, rows, strict=True)]
    if len(faults) == 1:
        fault = faults[0]
        return InputError(f"{origin.where}, {places[0]}column {fault.column!r}", fault.what, fault.remedy)
    told = [
        f"  {place}column {fault.column!r}: {fault.what}. {fault.remedy}"
        for place, fault in zip(places, faults, strict=False)
    ]
    more = [f"  and {len(faults) - MOST_SHOWN} more."] if len(faults) > MOST_SHOWN else []
    bad = len({fault.row for fault in faults if fault.row >= 0})
    return InputError(
        origin.where, f"{len(faults)} faults in {bad} of {count} records", "\n".join(["Correct them:", *told, *more])
    )


def _missing(raw: pl.Series, column: Column) -> np.ndarray:
    """Where there is no value."""
    found = raw.is_null().to_numpy()
    if raw.dtype == pl.String:
        marks = [mark for mark in MISSING if mark not in column.levels]
        return found | raw.str.strip_chars().is_in(marks).fill_null(value=False).to_numpy()
    return found | raw.is_nan().fill_null(value=False).to_numpy() if raw.dtype.is_float() else found


def _column(raw: pl.Series, column: Column, present: np.ndarray) -> tuple[np.ndarray | pd.Categorical, list[Fault]]:
    """The values as they enter the model, and what is wrong with those that are present."""
    faults: list[Fault] = []

    def refuse(bad: np.ndarray, what: str, remedy: str) -> None:
        told = {fault.row for fault in faults}
        for row in np.flatnonzero(bad & present):
            if int(row) not in told:
                faults.append(Fault(int(row), column.name, f"{what} ({str(raw[int(row)])[:WIDTH]!r})", remedy))

    if column.type == "level":
        if raw.dtype.is_float() or raw.dtype.is_nested():
            return np.zeros(len(raw)), [Fault(-1, column.name, f"type {raw.dtype}", "Give levels as text.")]
        text = raw.cast(pl.String)
        known = ", ".join(map(repr, column.levels))
        unknown = ~text.is_in(list(column.levels)).fill_null(value=True).to_numpy()
        refuse(unknown, "an unknown level", f"The contract knows {known}.")
        return pd.Categorical(text.to_list(), categories=list(column.levels)), faults
    if not (raw.dtype.is_numeric() or raw.dtype in (pl.String, pl.Boolean)):
        return np.zeros(len(raw)), [Fault(-1, column.name, f"type {raw.dtype}", "Give numbers.")]
    values = raw.cast(pl.Float64, strict=False).fill_null(np.nan).to_numpy()
    refuse(np.isnan(values), "no number", "Give a number.")
    refuse(~np.isfinite(values), "a value that is not finite", "Give a finite number.")
    least, most = column.bounds
    refuse((values < least) | (values > most), "a value out of bounds", f"The contract allows {least:g} to {most:g}.")
    if column.type == "count":
        refuse(values != np.round(values), "no whole number", "Give counts.")
    with np.errstate(invalid="ignore", divide="ignore"):
        values = np.log(values) if column.log else values
    return (values - column.center) / column.scale, faults
