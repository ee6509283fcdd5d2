"""The text of a contract, from its parts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fedpdmc.study.column import Column
from fedpdmc.study.contract import FORMAT


def toml_value(value: Any) -> str:
    """A value in TOML syntax. Strings are written as in JSON, which TOML can read."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(key)} = {toml_value(one)}" for key, one in value.items()) + " }"
    if isinstance(value, Sequence):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, int):
        return str(value)
    return f"{int(value)}.0" if value == int(value) and abs(value) < 1e15 else repr(float(value))


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name, ensure_ascii=False)


def column_table(column: Column) -> dict[str, Any]:
    """A column's declaration, without default values."""
    if column.type == "key":
        return {"type": column.type}
    if column.type == "level":
        return {"type": column.type, "levels": list(column.levels)}
    found: dict[str, Any] = {"type": column.type, "bounds": list(column.bounds)}
    if column.center or column.scale != 1:
        found |= {"center": column.center, "scale": column.scale}
    return found | ({"log": True} if column.log else {})


def contract_text(
    name: str,
    sites: Sequence[str],
    columns: Mapping[str, Column],
    missing: str,
    tables: Mapping[str, Mapping[str, Any]],
) -> bytes:
    """A contract as TOML; ``tables`` are all except the columns, without keys that are None."""
    lines = [
        f"format = {FORMAT}",
        f"name = {toml_value(name)}",
        f"sites = {toml_value(list(sites))}",
        f"missing = {toml_value(missing)}",
        "",
        "[columns]",
        *(f"{_key(one.name)} = {toml_value(column_table(one))}" for one in columns.values()),
    ]
    for table, values in tables.items():
        told = {key: value for key, value in values.items() if value is not None}
        if told:
            lines += ["", f"[{table}]", *(f"{key} = {toml_value(value)}" for key, value in told.items())]
    return ("\n".join(lines) + "\n").encode()
