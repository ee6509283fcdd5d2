"""Checks of the records' values against the contract, with all errors in one report.

The report, by site, line and column, goes to the holder of the records. A coordinator on a network learns nothing of it.
"""

from __future__ import annotations

import csv
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import polars as pl

from fedpdmc.errors import InputError
from fedpdmc.study.column import Column
from fedpdmc.study.contract import Study

logger = logging.getLogger("fedpdmc.site")

# Number of errors shown in a report, and characters shown of a value.
MOST_SHOWN, WIDTH = 20, 40
# Texts for a missing value, unless the contract declares them as levels.
MISSING = ("", "NA", "N/A", "NaN", "nan", "null", "NULL", "None")
IMPUTE = "Remove or impute the record, or leave out such records: missing='drop', also as a key of a contract."


class Origin(NamedTuple):
    """The source of records: a description, and the file if there is one."""

    where: str
    path: Path | None

    def places(self, rows: np.ndarray, count: int) -> list[str]:
        """Names of these rows of ``count`` records: the line in a CSV file, else the number of the record, from one."""
        lines = _lines(self.path) if self.path is not None and self.path.suffix.lower() == ".csv" else []
        if len(lines) == count:
            return [f"line {lines[row]}" if row < count else "" for row in rows]
        return [f"record {row + 1}" for row in rows]


def _lines(path: Path) -> list[int]:
    """The line on which each record of a CSV file begins; quoted values may span several lines."""
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        reader = csv.reader(file)
        next(reader, None)
        lines, last = [], reader.line_num
        for _ in reader:
            lines.append(last + 1)
            last = reader.line_num
    return lines


class Fault(NamedTuple):
    """An invalid value. ``row`` is −1 for a whole column, ``column`` is empty for a whole record."""

    row: int
    column: str
    what: str
    remedy: str


class FaultyRecords(InputError):
    """All errors in the records of one source.

    Attributes
    ----------
    where : str
    lines : list of str
        The first `MOST_SHOWN` faults.
    total : int
        How many there are.
    extent : str
        In how many records.
    """

    def __init__(self, origin: Origin, faults: list[Fault], count: int):
        faults = sorted(faults, key=lambda fault: fault.row)
        shown = faults[:MOST_SHOWN]
        places = origin.places(np.maximum([fault.row for fault in shown], 0), count)
        labels = [_label(fault, place) for fault, place in zip(shown, places, strict=True)]
        self.where, self.total = origin.where, len(faults)
        self.lines, told = [], set()
        for label, fault in zip(labels, shown, strict=True):
            # The remedy is given once per column.
            remedy = "" if (fault.column, fault.remedy) in told else f" {fault.remedy}"
            told.add((fault.column, fault.remedy))
            self.lines.append(f"{label}{': ' if label else ''}{fault.what}.{remedy}")
        bad = len({fault.row for fault in faults if fault.row >= 0})
        self.extent = f"{_faults(self.total)} in {bad} of {count} records"
        if self.total == 1:
            super().__init__(", ".join(filter(None, [self.where, labels[0]])), faults[0].what, faults[0].remedy)
        else:
            super().__init__(self.where, self.extent, "\n  ".join(["Correct them:", *self.lines, *_more(self.total)]))


def _label(fault: Fault, place: str) -> str:
    column = f"column {fault.column!r}" if fault.column else ""
    return ", ".join(filter(None, [place if fault.row >= 0 else "", column]))


def _faults(count: int) -> str:
    return "1 fault" if count == 1 else f"{count:,} faults"


def _more(total: int, shown: int = MOST_SHOWN) -> list[str]:
    return [f"and {total - shown:,} more."] if total > shown else []


def faulty_sites(found: Mapping[str, InputError], sites: int) -> InputError:
    """One report of the errors in the records of several of ``sites`` sites.

    At most `MOST_SHOWN` errors are shown, evenly distributed over the sites.
    """
    if len(found) == 1:
        return next(iter(found.values()))
    totals = {site: error.total if isinstance(error, FaultyRecords) else 1 for site, error in found.items()}
    shown = dict.fromkeys(found, 0)
    for _ in range(MOST_SHOWN):
        open_ones = [site for site in found if shown[site] < totals[site]]
        if open_ones:
            shown[min(open_ones, key=lambda site: shown[site])] += 1
    told = ["Correct them:"]
    for site, error in found.items():
        if shown[site] and isinstance(error, FaultyRecords) and error.total > 1:
            lines = [*error.lines[: shown[site]], *_more(error.total, shown[site])]
            told += [f"{error.where}: {error.extent}", *(f"  {line}" for line in lines)]
        elif shown[site]:
            told.append(str(error))
    left = [site for site in found if not shown[site]]
    if left:
        told.append(f"and {_faults(sum(totals[site] for site in left))} at {len(left):,} more sites.")
    what = f"{_faults(sum(totals.values()))} at {len(found)} of {sites} sites"
    return InputError("data", what, "\n  ".join(told))


def checked_records(
    study: Study,
    raw: Mapping[str, pl.Series],
    origin: Origin,
    count: int,
    faults: Sequence[Fault] = (),
    widen: str = "",
) -> pd.DataFrame:
    """Numbers and levels of all columns; ``attrs["origin"]`` and ``attrs["rows"]`` give the source of each record.

    ``faults`` are errors that were found before. ``widen`` says, with ``{name}`` for a column, how to allow values that are
    out of bounds.
    """
    missing = {name: _missing(series, study.columns[name]) for name, series in raw.items()}
    drop = study.missing == "drop"
    kept = ~np.any(list(missing.values()), 0) if drop and missing else np.ones(count, bool)
    faults, frame = list(faults), {}
    if not kept.any():
        faults.append(Fault(-1, "", f"a missing value in each of {count} records", "Give records that are complete."))
    for name, series in raw.items():
        if not drop:
            faults += [Fault(int(row), name, "a missing value", IMPUTE) for row in np.flatnonzero(missing[name])]
        frame[name], found = _column(series, study.columns[name], kept & ~missing[name], widen)
        faults += found
    if faults:
        raise FaultyRecords(origin, faults, count)
    if not kept.all():
        logger.warning("%s: %d of %d records (%.0f %%) dropped for a missing value", origin.where, count - kept.sum(), count,
                       100 * (1 - kept.sum() / count))  # fmt: skip
    records = pd.DataFrame({name: values[kept] for name, values in frame.items()})
    records.attrs |= {"origin": origin, "rows": np.flatnonzero(kept), "count": count}
    return records


def refuse_records(records: pd.DataFrame, faults: list[Fault]) -> FaultyRecords:
    """An error report for records from `checked_records`; rows of ``faults`` are rows of the table."""
    origin, count = records.attrs.get("origin", Origin("data", None)), records.attrs.get("count", len(records))
    rows = records.attrs.get("rows", np.arange(len(records)))
    return FaultyRecords(origin, [fault._replace(row=int(rows[fault.row])) for fault in faults], count)


def _missing(raw: pl.Series, column: Column) -> np.ndarray:
    """Which values are missing."""
    found = raw.is_null().to_numpy()
    if raw.dtype == pl.String:
        marks = [mark for mark in MISSING if mark not in column.levels]
        return found | raw.str.strip_chars().is_in(marks).fill_null(value=False).to_numpy()
    return found | raw.is_nan().fill_null(value=False).to_numpy() if raw.dtype.is_float() else found


def _column(
    raw: pl.Series, column: Column, present: np.ndarray, widen: str
) -> tuple[np.ndarray | pd.Categorical, list[Fault]]:
    """The values in model units, and the errors in those that are present."""
    faults: list[Fault] = []

    def refuse(bad: np.ndarray, what: str, remedy: str) -> None:
        told = {fault.row for fault in faults}
        for row in np.flatnonzero(bad & present):
            if int(row) not in told:
                faults.append(Fault(int(row), column.name, f"{what} ({str(raw[int(row)])[:WIDTH]!r})", remedy))

    if column.type == "key":
        return np.asarray(raw.cast(pl.String).to_list(), dtype=object), faults
    if column.type == "level":
        if raw.dtype.is_float() or raw.dtype.is_nested():
            return np.zeros(len(raw)), [Fault(-1, column.name, f"type {raw.dtype}", "Give levels as text.")]
        text = raw.cast(pl.String)
        # Programs write true and True.
        text = text.str.to_lowercase() if set(column.levels) == {"false", "true"} else text
        known = ", ".join(map(repr, column.levels))
        unknown = ~text.is_in(list(column.levels)).fill_null(value=True).to_numpy()
        refuse(unknown, "an unknown level", f"The declared levels are {known}.")
        return pd.Categorical(text.to_list(), categories=list(column.levels)), faults
    if not (raw.dtype.is_numeric() or raw.dtype in (pl.String, pl.Boolean)):
        return np.zeros(len(raw)), [Fault(-1, column.name, f"type {raw.dtype}", "Give numbers.")]
    values = raw.cast(pl.Float64, strict=False).fill_null(np.nan).to_numpy()
    refuse(np.isnan(values), "text that is not a number", "Give a number.")
    refuse(~np.isfinite(values), "a value that is not finite", "Give a finite number.")
    least, most = column.bounds
    remedy = f"The declared bounds are {least:g} to {most:g}.{widen.format(name=column.name)}"
    refuse((values < least) | (values > most), "a value out of bounds", remedy)
    if column.type == "count":
        refuse(values != np.round(values), "a number that is not whole", "Give counts.")
    with np.errstate(invalid="ignore", divide="ignore"):
        values = np.log(values) if column.log else values
    return (values - column.center) / column.scale, faults
