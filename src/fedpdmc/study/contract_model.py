"""A model of one record in a contract: a model file, or a family of the standard library, bound to declared columns."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from fedpdmc.errors import InputError
from fedpdmc.models.families import FAMILIES, family
from fedpdmc.models.grouped import check_one_predictor
from fedpdmc.models.model_file.model import Model, parsed
from fedpdmc.models.model_file.records import Layout, RecordModel, Variables
from fedpdmc.models.model_file.source import Column as ModelColumn
from fedpdmc.study.formula import Design
from fedpdmc.study.mixed_formula import MixedFormula
from fedpdmc.study.strict_toml import Table

if TYPE_CHECKING:
    from fedpdmc.study.column import Column

# The family of a contract that names a model file.
FILE = "file"
# How a column of a contract may be declared for a column of a model.
NEEDS = {
    "real": "a number or a count",
    "positive": "a number or a count whose bounds are positive, after its centre and scale",
    "nonnegative": "a number or a count whose bounds are not negative, after its centre and scale",
    "unit": "a number with bounds between 0 and 1",
    "binary": "a level of two, or a count with bounds [0, 1]",
    "count": "a count, neither centred nor scaled",
}


@dataclass(frozen=True)
class BoundModel:
    """A model with the contract's columns, formula and constants.

    Attributes
    ----------
    model : Model
    columns : dict
        The contract's column for each column of the model.
    constants : dict
        Arrays by name; a dict by site if they differ between sites.
    group : str
        The contract's column that says which rows belong together; empty if every row is a record.
    design : Design or None
        The formula of the linear predictors.
    file : str
        The name of the model file; empty for a family of the standard library.
    """

    model: Model
    columns: dict[str, str]
    constants: dict[str, Any]
    group: str = ""
    design: Design | None = None
    file: str = ""

    @property
    def layout(self) -> Layout:
        """The layout of the coordinates."""
        return Layout(self.model.source, 0 if self.design is None else len(self.design.names))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the coordinates."""
        if self.design is None:
            return self.layout.names(None)
        levels = self.design.columns[self.design.response_name].levels
        return self.layout.names(self.design.names, levels[1:])

    @property
    def used(self) -> set[str]:
        """The contract's columns that the model needs."""
        terms = set() if self.design is None else self.design.used
        return terms | set(self.columns.values()) | ({self.group} if self.group else set())

    @property
    def variables(self) -> Variables:
        """The variables that results show."""
        return Variables(self.model.source, self.layout.width, self.names)

    @property
    def reach(self) -> np.ndarray:
        """How much a unit of each coordinate can change a predictor or a parameter: most models exponentiate both."""
        largest = np.zeros(0) if self.design is None else self.design.largest
        entries = sum(one.type.size for one in self.model.source.predictors)
        return np.append(np.tile(largest, entries), np.ones(len(self.names) - entries * len(largest)))

    def declared(self, columns: dict[str, Column]) -> dict[str, Any]:
        """Ranges of the model's columns, and of the covariates, as `fedpdmc.Bounds` takes them."""
        named = {name: columns[column] for name, column in self.columns.items()}
        ranges = {name: column.range for name, column in named.items() if column.type != "level"}
        return {"box": None if self.design is None else self.design.largest, "columns": ranges}

    def constants_of(self, site: str) -> dict[str, Any]:
        """The constants at a site."""
        return {name: value[site] if isinstance(value, dict) else value for name, value in self.constants.items()}

    def count(self, records: pd.DataFrame) -> int:
        """Number of records; of groups, if rows are grouped."""
        return len(pd.unique(np.asarray(records[self.group]))) if self.group else len(records)

    def potential(self, records: pd.DataFrame, site: str) -> RecordModel:
        """The model of a site's records, without effects."""
        values = {name: _values(records[column]) for name, column in self.columns.items()}
        if self.group:
            values = self._grouped(values, records)
        X = None if self.design is None else self.design.matrix(records)
        names = None if self.design is None else self.design.names
        model = self.model.of(values, X, self.constants_of(site), names)
        return replace(model, names=self.names, constrain=self.variables)

    def _grouped(self, values: dict[str, np.ndarray], records: pd.DataFrame) -> dict[str, np.ndarray]:
        """Rows of one group side by side in the order of the file, padded with copies of the first."""
        group = self.model.source.group
        assert group is not None
        codes, keys = pd.factorize(records[self.group])
        sizes = np.bincount(codes, minlength=len(keys))
        if sizes.max(initial=0) > group.length:
            raise InputError(
                f"data, column {self.group!r}",
                f"a group of {sizes.max()} rows",
                f"The model takes at most {group.length}: build it for longer groups, or divide them.",
            )
        order, starts = np.argsort(codes, kind="stable"), np.cumsum(sizes) - sizes
        place = np.arange(group.length)[None] < sizes[:, None]
        rows = order[starts[:, None] + np.where(place, np.arange(group.length)[None], 0)]
        shapes = {column.name: column.type.shape for column in self.model.source.columns}
        found = {name: value[rows] if shapes[name] else value[rows[:, 0]] for name, value in values.items()}
        return {**found, group.mask: place.astype(float)}


def _values(column: Any) -> np.ndarray:
    """Numbers; levels as 0, 1 and so on."""
    codes = column.cat.codes if isinstance(column.dtype, pd.CategoricalDtype) else column
    return codes.to_numpy(dtype=np.float64)


# Read from a contract -------------------------------------------------------------------------------------------------


def read_model(
    table: Table,
    columns: dict[str, Column],
    sites: tuple[str, ...],
    file: Callable[[str], bytes],
    mixed: MixedFormula | None = None,
) -> BoundModel:
    """The model that the table [model] names: ``file`` and ``sha256``, or a family of the standard library.

    ``mixed`` has the parts of the formula, if it has effects of groups.
    """
    own = table.table("columns", None)
    model = _file(table, file) if FILE in table.values else _of_family(table, columns)
    source = model.source
    if mixed is not None:
        check_one_predictor(source, f"{table.where}: formula with effects of groups")
    formula = table.text("formula", *(() if source.predictors else (None,)))
    formula = formula if mixed is None else mixed.fixed
    if formula is not None and not source.predictors:
        raise table.invalid("formula", "This model has no linear predictor: leave it out.")
    design = None
    bound = {column.name: own.text(column.name, column.name) for column in source.columns}
    if formula is not None:
        design = Design(formula, columns, all(one.intercept for one in source.predictors))
        first = source.columns[0].name
        if first in own.values:
            raise own.invalid(first, "The response is left of '~' in the formula: leave it out here.")
        bound[first] = design.response_name
        if extra := sorted(design.used & {column for name, column in bound.items() if name != first}):
            raise table.invalid("formula", f"{extra[0]!r} is a column of the model itself: it cannot be a term too.")
    own.done()
    for column in source.columns:
        _check_column(column, bound[column.name], columns)
    constants = _constants(table.table("constants", None), model, sites)
    group = _group(table, model, columns)
    table.done()
    return BoundModel(model, bound, constants, group, design, table.values.get(FILE, ""))


def _file(table: Table, file: Callable[[str], bytes]) -> Model:
    name, digest = table.text(FILE), table.text("sha256")
    if name != name.strip(".") or not all(c.isalnum() or c in "-_." for c in name) or not name.endswith(".fpm"):
        raise table.invalid(FILE, "Give the name of a file next to the contract, such as 'weibull.fpm'.")
    text = file(name)
    found = hashlib.sha256(text).hexdigest()
    if found != digest:
        raise InputError(f"{table.where}: sha256", f"{digest[:80]!r}, where {name} has {found}", "Get the right file.")
    return parsed(text, name)


def _of_family(table: Table, columns: dict[str, Column]) -> Model:
    """A family of the standard library, in the size that the contract's columns and constants determine."""
    name = table.text("family", among=tuple(FAMILIES))
    sizes = {}
    if FAMILIES[name].levels:
        response = table.text("formula").partition("~")[0].strip()
        sizes["levels"] = max(len(columns[response].levels), 2) if response in columns else 2
    if FAMILIES[name].pieces:
        cuts = table.table("constants").numbers("cuts")
        sizes["pieces"] = len(cuts) + 1 if isinstance(cuts, tuple) else 2
    return family(name, **sizes)


def _check_column(column: ModelColumn, name: str, columns: dict[str, Column]) -> None:
    """Refuse a declared column whose values may not be what the model takes."""
    where = f"study.toml: columns: {name}"
    if name not in columns:
        raise InputError(
            where, "no such column", f"Declare it, or say under [model.columns] which one {column.name} is."
        )
    found = columns[name]
    low, high = found.range if found.type in ("number", "count") else (np.nan, np.nan)
    plain = found.center == 0 and found.scale == 1 and not found.log
    numeric = found.type in ("number", "count")
    good = {
        "real": numeric,
        "positive": numeric and low > 0,
        "nonnegative": numeric and low >= 0,
        "unit": numeric and low > 0 and high < 1,
        "binary": (found.type == "level" and len(found.levels) == 2)
        or (found.type == "count" and plain and found.bounds == (0, 1)),
        "count": found.type == "count" and plain,
        "index": found.type == "level" and len(found.levels) == column.levels,
    }[column.domain]
    if not good:
        need = NEEDS.get(column.domain, f"a level of {column.levels}")
        raise InputError(where, found.type, f"The model's column {column.name!r} is {need}.")


def _constants(table: Table, model: Model, sites: tuple[str, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for one in model.source.constants:
        if isinstance(table.values.get(one.name), dict):
            inner = table.table(one.name)
            found[one.name] = {site: _numbers(inner, site, one.type.shape) for site in sites}
            inner.done()
        else:
            found[one.name] = _numbers(table, one.name, one.type.shape)
    table.done()
    return found


def _numbers(table: Table, key: str, shape: tuple[int, ...]) -> np.ndarray:
    array = np.asarray(table.numbers(key), float)
    if array.size != int(np.prod(shape, dtype=int)):
        raise table.invalid(key, f"Give {int(np.prod(shape, dtype=int))} numbers.")
    return array.reshape(shape)


def _group(table: Table, model: Model, columns: dict[str, Column]) -> str:
    if model.source.group is None:
        return ""
    name = table.text("group")
    if name not in columns or columns[name].type != "key":
        raise table.invalid("group", "Name a declared column of type 'key': rows with the same value are one record.")
    return name
