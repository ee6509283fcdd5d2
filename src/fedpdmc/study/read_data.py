"""Read a site's records from a file or a database, as the contract declares them."""

from __future__ import annotations

import re
import sqlite3
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl

from fedpdmc.errors import InputError
from fedpdmc.study.contract import Study
from fedpdmc.study.value_checks import Fault, FaultyRecords, Origin, checked_records, faulty_sites

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
    needed = [*_needed(study), *(name for name in also if name not in study.used)]
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
    used = {name: raw[name] for name in needed if name in raw and name in study.used}
    records = checked_records(study, used, origin, count, faults)
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
    if study.count(records) > study.most_records:
        raise InputError(
            f"data of site {site!r}",
            f"{study.count(records):,} records",
            f"The contract allows {study.most_records:,} per site. Agree on a larger limit: [limits] records = ....",
        )
    if study.coordinates(site) is not None:
        study.matrix(records, site)
    return records


def records_of_sites(study: Study, sources: Mapping[str, tuple[str | Path, str | None]]) -> dict[str, pd.DataFrame]:
    """The records of all sites, each from its source and query.

    Raises
    ------
    InputError
        One report of the errors in all of them.
    """
    found, faults = {}, {}
    for site, (source, query) in sources.items():
        try:
            found[site] = site_records(study, site, source, query)
        except InputError as error:
            faults[site] = error
    if faults:
        raise faulty_sites(faults, len(sources))
    return found


def check_cells(study: Study, records: pd.DataFrame, least: int) -> None:
    """Refuse records in which a level, or one value of a binary term, occurs, but fewer than ``least`` times.

    A sum over that few records is close to the value of one record.

    Raises
    ------
    InputError
    """
    for name in records:
        if study.columns[str(name)].type == "level":
            counts = records[name].value_counts()
            for level, count in counts.items():
                _check_cell(f"level {level!r} of column {str(name)!r}", int(count), least)
    if study.model is not None and study.model.design is None:
        return
    matrix = study.design.matrix(records)
    for name, column in zip(study.design.names, matrix.T, strict=True):
        values, counts = np.unique(column, return_counts=True)
        if len(values) == 2:
            _check_cell(f"term {name!r} of the formula", int(counts.min()), least)


def _check_cell(what: str, count: int, least: int) -> None:
    if 0 < count < least:
        raise InputError(
            f"data, {what}",
            f"only {count} records",
            f"The policy has least_cell = {least}: merge levels in the contract, leave these records out, or lower it.",
        )


def _needed(study: Study) -> list[str]:
    return [name for name in study.columns if name in study.used]


def _from_file(path: Path, needed: list[str], whose: str) -> Mapping[str, pl.Series]:
    kind = path.suffix.lower()
    if kind not in (".csv", ".parquet"):
        raise InputError(
            whose, shown(str(path)), "Give a .csv or .parquet file, sqlite:PATH or a postgresql:// address."
        )
    if kind == ".parquet":
        _check_parquet(path, whose)
    try:
        # Text, so that errors can show values as they were written.
        frame = pl.read_csv(path, infer_schema=False) if kind == ".csv" else pl.read_parquet(path)
        if kind == ".csv":
            _refuse_duplicate_columns(path, whose)
    except (OSError, pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        raise InputError(whose, f"{path}: {str(error)[:200]}", "Give a file that can be read.") from error
    return {name: frame[name] for name in needed if name in frame.columns}


def _check_parquet(path: Path, whose: str) -> None:
    """Read a Parquet file in another process first: some damaged files end the process that reads them."""
    done = subprocess.run([sys.executable, "-c", READ_PARQUET, path], stdin=subprocess.DEVNULL, capture_output=True)
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        found = f"{path}: {lines[-1][:200] if lines else 'a file at which the reader ends'}"
        raise InputError(whose, found, "Give a file that can be read.")


def _refuse_duplicate_columns(path: Path, whose: str) -> None:
    """Polars would rename one of two columns with the same name, without a warning."""
    header = [str(name) for name in pl.read_csv(path, infer_schema=False, has_header=False, n_rows=1).row(0)]
    for name in header:
        if header.count(name) > 1:
            raise InputError(whose, f"{path} with two columns {name!r}", "Give every column its own name.")


def shown(source: str) -> str:
    """The address of a database without user and password, for messages."""
    plain = re.sub(r":/+.*@", "://***@", source)
    return re.sub(r"(?i)\b(\w*pass\w*|user)=[^&\s]*", r"\1=***", plain)


def _from_database(source: str, query: str, whose: str) -> dict[str, pl.Series]:
    try:
        names, rows = _sqlite(source, query) if source.startswith("sqlite:") else _postgres(source, query, whose)
    except (sqlite3.Error, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(whose, f"{shown(source)}: {error}", "Check the database and the query.") from error
    if len(set(names)) != len(names):
        raise InputError(whose, "a query with two columns of the same name", "Rename columns with AS.")
    columns = zip(*rows, strict=True) if rows else [()] * len(names)
    return {
        name: pl.Series(name, [_as_text(value) for value in values], dtype=pl.String)
        for name, values in zip(names, columns, strict=True)
    }


def _sqlite(source: str, query: str) -> tuple[list[str], list[tuple]]:
    path = Path(source.removeprefix("sqlite:"))
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
    try:
        cursor = connection.execute(query)
        return [column[0] for column in cursor.description or ()], cursor.fetchall()
    finally:
        connection.close()


def _postgres(source: str, query: str, whose: str) -> tuple[list[str], list[tuple]]:
    import psycopg

    try:
        with psycopg.connect(source, options="-c default_transaction_read_only=on") as connection:
            cursor = connection.execute(query.encode())
            return [column.name for column in cursor.description or ()], cursor.fetchall()
    except psycopg.Error as error:
        # The address may contain a password, and the error message may repeat it.
        said = str(error)
        for secret in re.findall(r"[^:@/?&=]{3,}", "".join(re.findall(r"//(.*)@", source))):
            said = said.replace(secret, "***")
        raise InputError(whose, f"{shown(source)}: {shown(said)}", "Check the database and the query.") from None


def _as_text(value) -> str | None:
    if value is None:
        return None
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, float) else str(value)
