"""A site's records, from a file or a database, checked value by value against the contract.

What is wrong is told by row and column to the site's own operator; the coordinator learns nothing of it.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl

from fedpdmc.errors import InputError
from fedpdmc.study.contract import Column, Study

DATABASES = ("sqlite:", "postgresql://", "postgres://")


def read_records(study: Study, source: str | Path, query: str | None = None) -> pd.DataFrame:
    """The declared columns of a site's records, as numbers and levels.

    Parameters
    ----------
    study : Study
    source : str or path
        A ``.csv`` or ``.parquet`` file, ``sqlite:PATH``, or a ``postgresql://`` address.
    query : str, optional
        The query that gives the records; for databases only.

    Raises
    ------
    InputError
        With the row (the first record is row 1) and the column of the first value that cannot be used.
    """
    database = isinstance(source, str) and source.startswith(DATABASES)
    if database != (query is not None):
        found = "a database without a query" if database else "a query for a file"
        raise InputError("data", found, "Give a query for sqlite: and postgresql:// sources, and only for them.")
    needed = _needed(study)
    if database:
        raw = _from_database(str(source), str(query))
    else:
        raw = _from_file(Path(source), needed)
    missing = [name for name in needed if name not in raw]
    if missing:
        raise InputError("data", f"no column {missing[0]!r}", f"Give the columns {', '.join(needed)}.")
    return pd.DataFrame({name: _checked(raw[name], study.columns[name]) for name in needed})


def _needed(study: Study) -> list[str]:
    used = study.design.used | {study.options[key] for key in ("offset",) if key in study.options}
    return [name for name in study.columns if name in used]


def _from_file(path: Path, needed: list[str]) -> Mapping[str, pl.Series]:
    kind = path.suffix.lower()
    if kind not in (".csv", ".parquet"):
        raise InputError(
            "data", shown(str(path)), "Give a .csv or .parquet file, sqlite:PATH or a postgresql:// address."
        )
    try:
        # Text as it stands, so that what is wrong can be shown as it was written.
        frame = pl.read_csv(path, infer_schema=False) if kind == ".csv" else pl.read_parquet(path)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise InputError("data", f"{path}: {error}", "Give a file that can be read.") from error
    if kind == ".csv":
        _refuse_twins(path)
    return {name: frame[name] for name in needed if name in frame.columns}


def _refuse_twins(path: Path) -> None:
    """Of two columns of one name polars would rename one, and nobody would know which of them was taken."""
    header = [str(name) for name in pl.read_csv(path, infer_schema=False, has_header=False, n_rows=1).row(0)]
    for name in header:
        if header.count(name) > 1:
            raise InputError("data", f"{path} with two columns {name!r}", "Give every column a name of its own.")


def shown(source: str) -> str:
    """An address of a database as it may be shown: without the user and the password."""
    plain = re.sub(r":/+.*@", "://***@", source)
    return re.sub(r"(?i)\b(\w*pass\w*|user)=[^&\s]*", r"\1=***", plain)


def _from_database(source: str, query: str) -> dict[str, pl.Series]:
    try:
        names, rows = _sqlite(source, query) if source.startswith("sqlite:") else _postgres(source, query)
    except sqlite3.Error as error:
        raise InputError("data", f"{shown(source)}: {error}", "Check the database and the query.") from error
    if len(set(names)) != len(names):
        raise InputError("data", "a query with two columns of one name", "Name the columns apart with AS.")
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


def _postgres(source: str, query: str) -> tuple[list[str], list[tuple]]:
    import psycopg

    try:
        with psycopg.connect(source, options="-c default_transaction_read_only=on") as connection:
            cursor = connection.execute(query.encode())
            return [column.name for column in cursor.description or ()], cursor.fetchall()
    except psycopg.Error as error:
        # The address may hold a password, and what is said of a wrong one may repeat it.
        said = str(error)
        for secret in re.findall(r"[^:@/?&=]{3,}", "".join(re.findall(r"//(.*)@", source))):
            said = said.replace(secret, "***")
        raise InputError("data", f"{shown(source)}: {shown(said)}", "Check the database and the query.") from None


def _as_text(value) -> str | None:
    if value is None:
        return None
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, float) else str(value)


def _checked(raw: pl.Series, column: Column) -> np.ndarray | pd.Categorical:
    _refuse(raw.is_null(), raw, column, "a missing value", "Remove or impute the record.")
    if column.type == "level":
        if raw.dtype.is_float() or raw.dtype.is_nested():
            _refuse(pl.repeat(True, 1, eager=True), raw, column, f"type {raw.dtype}", "Give levels as text.")
        text = raw.cast(pl.String)
        known = ", ".join(map(repr, column.levels))
        _refuse(~text.is_in(list(column.levels)), text, column, "an unknown level", f"The contract knows {known}.")
        return pd.Categorical(text.to_list(), categories=list(column.levels))
    if not (raw.dtype.is_numeric() or raw.dtype in (pl.String, pl.Boolean)):
        _refuse(pl.repeat(True, 1, eager=True), raw, column, f"type {raw.dtype}", "Give numbers.")
    number = raw.cast(pl.Float64, strict=False)
    _refuse(number.is_null(), raw, column, "no number", "Give a number.")
    _refuse(~number.is_finite(), raw, column, "a value that is missing or not finite", "Remove or impute the record.")
    least, most = column.bounds
    outside = (number < least) | (number > most)
    _refuse(outside, raw, column, "a value out of bounds", f"The contract allows {least:g} to {most:g}.")
    values = number.to_numpy()
    if column.type == "count":
        _refuse(pl.Series(values != np.round(values)), raw, column, "no whole number", "Give counts.")
    values = np.log(values) if column.log else values
    return (values - column.center) / column.scale


def _refuse(bad: pl.Series, raw: pl.Series, column: Column, what: str, remedy: str) -> None:
    rows = np.flatnonzero(bad.to_numpy())
    if not rows.size:
        return
    row = int(rows[0])
    shown = "" if len(raw) <= row or raw[row] is None else f" ({str(raw[row])[:40]!r})"
    more = f", and in {rows.size - 1} other rows" if rows.size > 1 else ""
    raise InputError(f"data, row {row + 1}, column {column.name!r}", f"{what}{shown}{more}", remedy)
