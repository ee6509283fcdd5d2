"""A site's records, read from a file or a database and checked value by value against the contract.

All errors are in one report, by site, line and column, which goes to the holder of the records. A coordinator on a network
learns nothing of it.
"""

from __future__ import annotations

import csv
import heapq
import itertools
import logging
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import polars as pl

from fedpdmc.errors import InputError
from fedpdmc.study.contract import Study
from fedpdmc.study.formula import FreeTerm, free_terms, is_free
from fedpdmc.study.record_shares import largest_leverage
from fedpdmc.study.schema import Column

logger = logging.getLogger("fedpdmc.site")

MOST_SHOWN = 20  # errors in a report
WIDTH = 40  # characters shown of a value
PARTS = 64  # of a declared range, in which a term may be large
PLACES = 0.3, 0.55, 0.8  # of the ranges of other columns
POINTS = 4096  # public points of the ranges of all columns of a term
SLACK = 1.2  # the bound of the largest value, relative to one that is attained
MOST_BOXES = 2000  # into which ranges are cut to find it; else the bound is larger
# Texts for a missing value, unless the contract declares them as levels.
MISSING = ("", "NA", "N/A", "NaN", "nan", "null", "NULL", "None")
IMPUTE = "Remove or impute the record, or leave out such records: missing='drop', also as a key of a contract."


class Origin(NamedTuple):
    """The source of records: a description, and the file if there is one."""

    where: str
    path: Path | None

    def places(self, rows: np.ndarray, count: int) -> list[str]:
        """Names of these rows of ``count`` records: the line in a CSV file, else the number of the record, from one."""
        lines: list[int] = []
        if self.path is not None and self.path.suffix.lower() == ".csv":
            # Quoted values may span several lines.
            with self.path.open(newline="", encoding="utf-8", errors="replace") as file:
                reader = csv.reader(file)
                begins = [reader.line_num + 1 for _ in reader]
            lines = begins[:-1]
        if len(lines) == count:
            return [f"line {lines[row]}" if row < count else "" for row in rows]
        return [f"record {row + 1}" for row in rows]


class Fault(NamedTuple):
    """An invalid value. ``row`` is −1 for a whole column, ``column`` is empty for a whole record."""

    row: int
    column: str
    what: str
    remedy: str


class FaultyRecords(InputError):
    """All errors in the records of one source: ``lines`` has the first `MOST_SHOWN` of ``total``, in the ``extent``."""

    def __init__(self, origin: Origin, faults: list[Fault], count: int):
        faults = sorted(faults, key=lambda fault: fault.row)
        shown = faults[:MOST_SHOWN]
        places = origin.places(np.maximum([fault.row for fault in shown], 0), count)
        self.where, self.total = origin.where, len(faults)
        self.lines, remedies, labels = [], set(), []
        for fault, place in zip(shown, places, strict=True):
            column = f"column {fault.column!r}" if fault.column else ""
            labels.append(", ".join(filter(None, [place if fault.row >= 0 else "", column])))
            # The remedy is given once per column.
            remedy = "" if (fault.column, fault.remedy) in remedies else f" {fault.remedy}"
            remedies.add((fault.column, fault.remedy))
            self.lines.append(f"{labels[-1]}{': ' if labels[-1] else ''}{fault.what}.{remedy}")
        bad = len({fault.row for fault in faults if fault.row >= 0})
        self.extent = f"{_faults(self.total)} in {bad} of {count} records"
        if self.total == 1:
            super().__init__(", ".join(filter(None, [self.where, labels[0]])), faults[0].what, faults[0].remedy)
        else:
            super().__init__(self.where, self.extent, "\n  ".join(["Correct them:", *self.lines, *_more(self.total)]))


def _faults(count: int) -> str:
    return "1 fault" if count == 1 else f"{count:,} faults"


def _more(total: int, shown: int = MOST_SHOWN) -> list[str]:
    return [f"and {total - shown:,} more."] if total > shown else []


def read_all_sites(sites: Collection[str], read: Callable[[str], pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """The records of all sites, each as ``read`` returns them.

    Raises
    ------
    InputError
        One report of the errors in all of them: at most `MOST_SHOWN` errors, evenly distributed over the sites.
    """
    records: dict[str, pd.DataFrame] = {}
    found: dict[str, InputError] = {}
    for site in sites:
        try:
            records[site] = read(site)
        except InputError as error:
            found[site] = error
    if not found:
        return records
    if len(found) == 1:
        raise next(iter(found.values()))
    totals = {site: error.total if isinstance(error, FaultyRecords) else 1 for site, error in found.items()}
    shown = dict.fromkeys(found, 0)
    for _ in range(MOST_SHOWN):
        open_ones = [site for site in found if shown[site] < totals[site]]
        if open_ones:
            shown[min(open_ones, key=lambda site: shown[site])] += 1
    report = ["Correct them:"]
    for site, error in found.items():
        if shown[site] and isinstance(error, FaultyRecords) and error.total > 1:
            lines = [*error.lines[: shown[site]], *_more(error.total, shown[site])]
            report += [f"{error.where}: {error.extent}", *(f"  {line}" for line in lines)]
        elif shown[site]:
            report.append(str(error))
    left = [site for site in found if not shown[site]]
    if left:
        report.append(f"and {_faults(sum(totals[site] for site in left))} at {len(left):,} more sites.")
    what = f"{_faults(sum(totals.values()))} at {len(found)} of {len(sites)} sites"
    raise InputError("data", what, "\n  ".join(report))


def check_records(
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
    """An error report for records from `check_records`; rows of ``faults`` are rows of the table."""
    origin, count = records.attrs.get("origin", Origin("data", None)), records.attrs.get("count", len(records))
    rows = records.attrs.get("rows", np.arange(len(records)))
    return FaultyRecords(origin, [fault._replace(row=int(rows[fault.row])) for fault in faults], count)


def _missing(raw: pl.Series, column: Column) -> np.ndarray:
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
        faulty_rows = {fault.row for fault in faults}
        for row in np.flatnonzero(bad & present):
            if int(row) not in faulty_rows:
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
        known_texts = [None if bad else one for one, bad in zip(text, unknown, strict=True)]
        return pd.Categorical(known_texts, categories=list(column.levels)), faults
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


READ_PARQUET = "import polars, sys; polars.read_parquet(sys.argv[1])"
DATABASES = ("sqlite:", "postgresql://", "postgres://")


def read_records(
    study: Study, source: str | Path, query: str | None = None, *, site: str | None = None, also: Sequence[str] = ()
) -> pd.DataFrame:
    """The declared columns of a site's records, as numbers and levels.

    Parameters
    ----------
    study : Study
    source : str or path
        A ``.csv`` or ``.parquet`` file, ``sqlite:PATH``, or a ``postgresql://`` address.
    query : str, optional
        The query that gives the records; for databases only.
    site : str, optional
        The site's name, for messages.
    also : sequence of str
        Columns that the contract does not use: in ``attrs["raw"]``, with the used ones as the source has them.

    Raises
    ------
    InputError
        Lists the line (for Parquet files and databases the record) and the column of the first `MOST_SHOWN` invalid
        values.
    """
    database = is_database(source)
    whose = "data" if site is None else f"data of site {site!r}"
    if database != (query is not None):
        found = "a database without a query" if database else "a query for a file"
        raise InputError(whose, found, "Give a query for sqlite: and postgresql:// sources, and only for them.")
    used = study.used
    needed = [*(name for name in study.columns if name in used), *(name for name in also if name not in used)]
    origin = Origin(f"{whose} ({shown(str(source))})", None if database else Path(source))
    raw = _from_database(str(source), str(query), whose) if database else _from_file(Path(source), needed, whose)
    missing = ", ".join(repr(name) for name in needed if name not in raw)
    faults = [Fault(-1, "", f"no column {missing}", f"Give the columns {', '.join(needed)}, by these names.")]
    faults = faults if missing else []
    count = max((len(column) for column in raw.values()), default=0)
    if faults and not count:
        raise FaultyRecords(origin, faults, count)
    if not count:
        raise InputError(origin.where, "no records", "Give at least one record.")
    taken = {name: raw[name] for name in needed if name in raw and name in used}
    records = check_records(study, taken, origin, count, faults)
    records.attrs["raw"] = {name: raw[name][records.attrs["rows"]] for name in needed}
    return records


def identifying_texts(values: pl.Series) -> list[str]:
    """Texts that are equal for equal values, from whichever kind of source and however a contract declares them."""
    texts = values.cast(pl.String).fill_null("").str.strip_chars()
    numbers = zip(texts, texts.cast(pl.Float64, strict=False), strict=True)
    # Whole numbers may be identifiers of many digits. Programs write true and True.
    plain = [str(int(t)) if t.isdecimal() else t if x is None else f"{x:.12g}" for t, x in numbers]
    return [t.lower() if t in ("True", "TRUE", "False", "FALSE") else t for t in plain]


def is_database(source: str | Path) -> bool:
    """Whether a source of records is the address of a database; else it is a file."""
    return isinstance(source, str) and source.startswith(DATABASES)


def site_records(
    study: Study, site: str, source: str | Path, query: str | None = None, also: Sequence[str] = ()
) -> pd.DataFrame:
    """The records of a site, as `read_records` returns them, checked against the contract's limits."""
    records = read_records(study, source, query, site=site, also=also)
    if (count := study.count(records)) > study.most_records:
        remedy = (
            f"The contract allows {study.most_records:,} per site. Agree on a larger limit: [limits] records = ...."
        )
        raise InputError(f"data of site {site!r}", f"{count:,} records", remedy)
    if study.coordinates(site) is not None:
        study.matrix(records, site)
    return records


def records_of_sites(study: Study, sources: Mapping[str, tuple[str | Path, str | None]]) -> dict[str, pd.DataFrame]:
    """The records of all sites, each from its source and query, or one report of the errors in all of them."""
    return read_all_sites(sources, lambda site: site_records(study, site, *sources[site]))


def check_cells(study: Study, records: pd.DataFrame, least: int) -> None:
    """Refuse records in which a level, or one value of a binary term, occurs, but fewer than ``least`` times.

    A sum over that few records is close to the value of one record.

    Raises
    ------
    InputError
    """
    cells: dict[str, int] = {}
    for name in map(str, records):
        if study.columns[name].type == "level":
            counts = records[name].value_counts()
            cells |= {f"level {level!r} of column {name!r}": int(count) for level, count in counts.items()}
    if study.model.design is not None:
        splines = [one.label for one in study.design.functions if one.kind == "bs"]
        for name, column in zip(study.design.names, study.design.matrix(records).T, strict=True):
            values, counts = np.unique(column, return_counts=True)
            if len(values) == 2:
                cells[f"term {name!r} of the formula"] = int(counts.min())
            elif any(label in name for label in splines):
                cells[f"values other than 0 of {name!r}"] = int(np.count_nonzero(column))
    for what, count in cells.items():
        if 0 < count < least:
            policy = f"The policy has least_cell = {least}"
            remedy = f"{policy}: merge levels in the contract, leave these records out, or lower it."
            raise InputError(f"data, {what}", f"only {count} records", remedy)


def check_shares(study: Study, records: pd.DataFrame, most: float) -> None:
    """Refuse terms that are narrow in the declared ranges; then records of which one is nearly alone in some direction.

    Narrow terms are refused whatever the records are: else whether a site takes part, or declines a release, would tell who
    is there. With derivatives the site controls every release. Without them the second refusal is all that looks at single
    records: arrivals would be those of one.

    Raises
    ------
    InputError
    """
    if study.model.design is None:
        return
    if found := narrow_term(study, most):
        raise InputError("terms of the formula", found, "Ask the author of the contract, or agree on narrower bounds.")
    if study.derivatives != "none":
        return
    weights = study.record_weights(records)
    if study.model.trials is not None:
        weights = weights * records[study.model.trials].to_numpy(float)
    share = largest_leverage(study.design.matrix(records) * np.sqrt(weights)[:, None])
    if not share <= most:
        raise InputError(
            "data, terms of the formula",
            f"one record with a share of {share:.3g} in some direction",
            f"The policy has largest_share = {most:g}: read the formula, leave this record out, or raise it.",
        )


def narrow_term(study: Study, most: float) -> str:
    """A term of the formula of whose squares one part of the declared ranges has too large a share; empty if none has.

    Two searches. Along each column of a function, with the other columns at a few places of their ranges: a part has at most
    the largest value there, and every other part at least its smallest. In all columns of a term together, with no place
    between the points: ``M²/(M² + (P − 1) m)`` for P parts, with a proved bound M of the largest value and the mean m of the
    squares at public points. An offset counts by the factor of the mean that it is.
    """
    ranges = {name: column.bounds for name, column in study.columns.items() if column.type in ("number", "count")}
    for one, name in [(each, name) for each in study.design.functions if is_free(each) for name in each.columns]:
        edges, shares = np.linspace(*ranges[name], PARTS + 1), []
        for place in PLACES:
            points = {other: low + place * (high - low) for other, (low, high) in ranges.items()}
            others = {other: (x, x) for other, x in points.items()}
            parts = zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
            ends = np.array([one.range(others | {name: part}) for part in parts])
            largest, least = np.abs(ends).max(1) ** 2, np.maximum(np.maximum(ends[:, 0], -ends[:, 1]), 0.0) ** 2
            shares.append(largest.max() / max(largest.max() + least.sum(), 1e-300))
        if not max(shares) <= most:
            return f"{one.text}, of which one part in {PARTS} of the range of {name!r} may have a share of {max(shares):.3g}"
    for term in free_terms(study.design):
        share = _share_of_part(term, {name: ranges[name] for name in term.columns})
        if not share <= most:
            return f"{term.label}, of which one part in {PARTS} of the declared ranges may have a share of {share:.3g}"
    return ""


def _share_of_part(term: FreeTerm, ranges: Mapping[str, tuple[float, float]]) -> float:
    """The share of the largest value in the squares of as many values as there are parts."""
    low, high = np.array(list(ranges.values())).T
    points = low + (high - low) * np.random.default_rng(0).random((POINTS, len(ranges)))
    values = np.abs(term.values(dict(zip(ranges, points.T, strict=True))))
    best, count = float(values.max()), itertools.count()
    boxes = [(-term.largest(ranges), next(count), low, high)]
    # The box with the largest bound is halved until the bound is nearly attained.
    while (bound := -boxes[0][0]) > SLACK * best and len(boxes) < MOST_BOXES:
        _, _, below, above = heapq.heappop(boxes)
        side = int(np.argmax((above - below) / (high - low)))
        middle = (below + above) / 2
        for ends in ((below, np.where(np.arange(len(low)) == side, middle, above)),
                     (np.where(np.arange(len(low)) == side, middle, below), above)):  # fmt: skip
            inside = {name: np.atleast_1d(x) for name, x in zip(ranges, (ends[0] + ends[1]) / 2, strict=True)}
            best = max(best, float(np.abs(term.values(inside))[0]))
            own = dict(zip(ranges, zip(*(x.tolist() for x in ends), strict=True), strict=True))
            heapq.heappush(boxes, (-term.largest(own), next(count), *ends))
    mean = float(np.mean((values / bound) ** 2)) if bound > 0 else 1.0
    return 1 / (1 + (PARTS - 1) * mean)


def _from_file(path: Path, needed: list[str], whose: str) -> Mapping[str, pl.Series]:
    kind, remedy = path.suffix.lower(), "Give a file that can be read."
    if kind not in (".csv", ".parquet"):
        known = "Give a .csv or .parquet file, sqlite:PATH or a postgresql:// address."
        raise InputError(whose, shown(str(path)), known)
    if kind == ".parquet":
        # In another process first: some damaged files end the process that reads them.
        done = subprocess.run([sys.executable, "-c", READ_PARQUET, path], stdin=subprocess.DEVNULL, capture_output=True)
        if done.returncode:
            lines = done.stderr.decode(errors="replace").strip().splitlines()
            found = f"{path}: {lines[-1][:200] if lines else 'a file at which the reader ends'}"
            raise InputError(whose, found, remedy)
    try:
        # Text, so that errors can show values as they were written.
        frame = pl.read_csv(path, infer_schema=False) if kind == ".csv" else pl.read_parquet(path)
        header = pl.read_csv(path, infer_schema=False, has_header=False, n_rows=1).row(0) if kind == ".csv" else ()
    except (OSError, pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        raise InputError(whose, f"{path}: {str(error)[:200]}", remedy) from error
    # Polars renames one of two columns with the same name, without a warning.
    if twice := next((name for name in map(str, header) if [*map(str, header)].count(name) > 1), None):
        raise InputError(whose, f"{path} with two columns {twice!r}", "Give every column its own name.")
    return {name: frame[name] for name in needed if name in frame.columns}


def shown(source: str) -> str:
    """The address of a database without user and password, for messages."""
    plain = re.sub(r":/+.*@", "://***@", source)
    return re.sub(r"(?i)\b(\w*pass\w*|user)=[^&\s]*", r"\1=***", plain)


def _from_database(source: str, query: str, whose: str) -> dict[str, pl.Series]:
    try:
        if source.startswith("sqlite:"):
            path = Path(source.removeprefix("sqlite:")).absolute()
            with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as connection:
                cursor = connection.execute(query)
                names, rows = [column[0] for column in cursor.description or ()], cursor.fetchall()
        else:
            names, rows = _postgres(source, query, whose)
    except (sqlite3.Error, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(whose, f"{shown(source)}: {error}", "Check the database and the query.") from error
    if len(set(names)) != len(names):
        raise InputError(whose, "a query with two columns of the same name", "Rename columns with AS.")
    columns = zip(*rows, strict=True) if rows else [()] * len(names)
    texts = ([_as_text(value) for value in values] for values in columns)
    return {name: pl.Series(name, own, dtype=pl.String) for name, own in zip(names, texts, strict=True)}


def _postgres(source: str, query: str, whose: str) -> tuple[list[str], list[tuple]]:
    import psycopg

    try:
        with psycopg.connect(source, options="-c default_transaction_read_only=on") as connection:
            cursor = connection.execute(query.encode())
            return [column.name for column in cursor.description or ()], cursor.fetchall()
    except psycopg.Error as error:
        # The address may contain a password, and the error message may repeat it.
        message = str(error)
        for secret in re.findall(r"[^:@/?&=]{3,}", "".join(re.findall(r"//(.*)@", source))):
            message = message.replace(secret, "***")
        raise InputError(whose, f"{shown(source)}: {shown(message)}", "Check the database and the query.") from None


def _as_text(value) -> str | None:
    if value is None:
        return None
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, float) else str(value)
