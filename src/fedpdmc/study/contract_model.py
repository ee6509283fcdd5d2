"""The model of a contract, bound to declared columns: a family, or a model file.

A built-in loss is the one thing that distinguishes families: `BoundModel` knows of it, and nothing else has to.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from fedpdmc import models
from fedpdmc.errors import InputError
from fedpdmc.models.families import BUILT_IN, FAMILIES, LIBRARY, family
from fedpdmc.models.grouped import FAMILIES as GROUPED_FAMILIES
from fedpdmc.models.grouped import check_one_predictor
from fedpdmc.models.model_file.allowed_operations import FileColumn as ModelColumn
from fedpdmc.models.model_file.model import Model, parsed
from fedpdmc.models.model_file.records import FileVariables, Layout, RecordModel
from fedpdmc.privacy.sensitivity import ModelFacts
from fedpdmc.study.formula import SITE, Design, Effects, MixedFormula, columns_of, is_mixed, parse_mixed
from fedpdmc.study.schema import (
    Column,
    FamilyKeys,
    FileKeys,
    ModelKeys,
    Numbers,
    PredictorKeys,
    RecordKeys,
    read,
)
from fedpdmc.validation import suggest

WHERE = "study.toml: model"
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
    """A model with the contract's columns, formula and constants."""

    model: Model
    # The contract's column for each column of the model, but for columns that are one in every record.
    columns: dict[str, str]
    constants: dict[str, Any]  # arrays by name; a dict by site if they differ between sites
    group: str = ""  # the contract's column that says which rows belong together; empty if every row is a record
    design: Design | None = None  # the formula of the linear predictors
    file: str = ""  # the name of the model file; empty for a family
    # The family if its loss is built in, or with effects of groups a negative binomial of known size; empty for others.
    loss: str = ""

    @property
    def title(self) -> str:
        """The model in words."""
        return f"{self.loss} regression" if self.loss else self.model.source.title

    @property
    def numbers(self) -> dict[str, float]:
        """The known numbers of a built-in loss: scale, df and size."""
        return {name: float(value) for name, value in self.constants.items()} if self.loss else {}

    @property
    def unknown_scale(self) -> bool:
        """Whether the scale of a linear regression is a parameter, as its logarithm: after the coefficients."""
        return self.loss == "linear" and not self.constants

    @property
    def convex(self) -> bool:
        """Whether its losses are convex, and their curvature changes at most as fast as it is large."""
        return bool(self.loss) and FAMILIES[self.loss].convex and not self.unknown_scale

    @property
    def takes_offset(self) -> bool:
        """Whether its predictor can have an offset."""
        return bool(self.loss) and "offset" in FAMILIES[self.loss].options

    @property
    def trials(self) -> str | None:
        """The column of numbers of trials, of which the response is a number of events."""
        return self.columns.get("trials") if self.loss else None

    @property
    def entries(self) -> int:
        """Number of linear predictors."""
        return sum(one.type.size for one in self.model.source.predictors)

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
    def variables(self) -> FileVariables | None:
        """The variables that results show; None if they are the parameters."""
        return None if self.loss else FileVariables(self.model.source, self.layout.width, self.names)

    @property
    def reach(self) -> np.ndarray:
        """How much a unit of each coordinate can change a predictor or a parameter: most models exponentiate both."""
        largest = np.zeros(0) if self.design is None else self.design.largest
        largest = largest * (not self.loss or FAMILIES[self.loss].link == "log")
        return np.append(np.tile(largest, self.entries), np.ones(len(self.names) - self.entries * len(largest)))

    def offset(self, records: pd.DataFrame) -> np.ndarray | None:
        """What is added to the linear predictor: the argument's column, or ``offset(...)`` of the formula."""
        name = self.columns.get("offset")
        if self.takes_offset and name is not None:
            return records[name].to_numpy(float)
        return None if self.design is None else self.design.offset(records)

    def declared(self, columns: dict[str, Column]) -> dict[str, Any]:
        """Ranges of the model's columns, and of the covariates, as `fedpdmc.Bounds` takes them."""
        named = {name: columns[column] for name, column in self.columns.items()}
        ranges = {name: column.range for name, column in named.items() if column.type != "level"}
        box = None if self.design is None else self.design.largest
        if not self.loss or self.design is None:
            return {"box": box, "columns": ranges}
        outcome = None if self.trials else ranges.get("y")
        return {"box": box, "outcome": outcome, "offset": ranges.get("offset", self.design.offset_range)}

    def facts(self, dim: int) -> ModelFacts | None:
        """What the sensitivity of records with a built-in loss depends on; else it follows from enclosures: None."""
        if not self.loss:
            return None
        scale = self.numbers.get("scale", 1.0)
        return ModelFacts(self.loss, dim, weight=scale**-2.0, df=self.numbers.get("df", 1.0), scale=scale)

    def constants_of(self, site: str) -> dict[str, Any]:
        """The constants at a site."""
        return {name: value[site] if isinstance(value, dict) else value for name, value in self.constants.items()}

    def count(self, records: pd.DataFrame) -> int:
        """Number of records; of groups, if rows are grouped."""
        return len(pd.unique(np.asarray(records[self.group]))) if self.group else len(records)

    def potential(
        self, records: pd.DataFrame, site: str, X: Any, weights: Any = None, groups: Mapping[str, Any] | None = None
    ) -> Any:
        """Minus the log likelihood of a site's records with the design X; ``groups`` has those of its effects."""
        values = self.values(records)
        if not self.loss:
            model = self._of_records(values, records, site, X, weights)
            return model if groups is None else models.with_effects(model, **groups)
        known: dict[str, Any] = {name: value for name, value in values.items() if name in ("offset", "trials")}
        known |= self.numbers | {"weights": weights}
        if groups is None:
            return getattr(models, self.loss)(X, values["y"], **known)
        assert self.design is not None
        return models.random_effects(X, values["y"], **known, family=self.loss, names=self.design.names, **groups)

    def terms(self, records: pd.DataFrame, site: str, X: np.ndarray | None) -> RecordModel:
        """The same as a model of one record without weights, whose terms are those of the likelihood."""
        return self._of_records(self.values(records), records, site, X, None)

    def _of_records(
        self, values: dict[str, Any], records: pd.DataFrame, site: str, X: Any, weights: Any
    ) -> RecordModel:
        values = {one.name: np.ones(len(records)) for one in self.model.source.columns} | values
        if self.group:
            values = self._group_rows(values, records)
        names = None if self.design is None else self.design.names
        model = self.model.of(values, X, self.constants_of(site), names, weights)
        return replace(model, names=self.names, constrain=self.variables)

    def values(self, records: pd.DataFrame) -> dict[str, np.ndarray]:
        """The model's columns as numbers, levels as 0, 1 and so on."""
        found = {name: records[column] for name, column in self.columns.items()}
        codes = {
            name: one.cat.codes if isinstance(one.dtype, pd.CategoricalDtype) else one for name, one in found.items()
        }
        values = {name: one.to_numpy(dtype=np.float64) for name, one in codes.items()}
        added = self.offset(records) if self.takes_offset else None
        return values if added is None else values | {"offset": added}

    def _group_rows(self, values: dict[str, np.ndarray], records: pd.DataFrame) -> dict[str, np.ndarray]:
        """Rows of one group side by side in the order of the file, padded with copies of the first."""
        group = self.model.source.group
        assert group is not None
        places = self.group_places(records)
        place = places >= 0
        rows = np.where(place, places, places[:, :1])
        shapes = {column.name: column.type.shape for column in self.model.source.columns}
        found = {name: value[rows] if shapes[name] else value[rows[:, 0]] for name, value in values.items()}
        return {**found, group.mask: place.astype(float)}

    def group_places(self, records: pd.DataFrame) -> np.ndarray:
        """The rows of each group (groups, length), in the order of the file; −1 for the places behind them."""
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
        return np.where(place, order[starts[:, None] + np.where(place, np.arange(group.length)[None], 0)], -1)


# The table [model] of a contract ---------------------------------------------------------------------------------------


def read_likelihood(
    values: dict[str, Any], columns: dict[str, Column], sites: tuple[str, ...], file: Callable[[str], bytes]
) -> dict[str, Any]:
    """The family or the model file, with the formula and the columns of weights and trials.

    A column of an exposure enters by its logarithm: its declaration among ``columns`` is replaced.
    """
    formula, family = values.get("formula"), values.get("family")
    mixed = parse_mixed(str(formula), f"{WHERE}: formula") if is_mixed(formula) else None
    predictors = (*BUILT_IN, "negative_binomial") if mixed and "size" in values else BUILT_IN
    kind = FileKeys if FILE in values else PredictorKeys if family in predictors else FamilyKeys
    keys: ModelKeys = read(kind, values, WHERE)
    found = _weighing(keys, columns) | {"formula": formula or "", "family": family or FILE}
    trials = found.pop("trials", None)
    if isinstance(keys, RecordKeys):
        found["model"] = read_model(keys, columns, sites, file, mixed)
    elif isinstance(keys, PredictorKeys):
        if mixed is not None and keys.family == "linear" and keys.scale is not None:
            raise _invalid("scale", keys.scale, "With effects of groups it is a parameter: leave it out.")
        found["units"] = keys.units
        found["model"] = _with_loss(keys, columns, keys.formula if mixed is None else mixed.fixed, trials)
    if mixed is not None:
        groups = columns.get(mixed.groups)
        if groups is None and mixed.groups != SITE or groups is not None and groups.type != "key":
            remedy = f"{mixed.groups!r} must be a column of type 'key', or {SITE!r}: the site is the group."
            raise _invalid("formula", formula, remedy)
        found["effects"] = Effects(mixed)
    return found


def _with_loss(keys: PredictorKeys, columns: dict[str, Column], formula: str, trials: str | None) -> BoundModel:
    """A family with a built-in loss."""
    numbers = {key: value for key in ("scale", "df", "size") if (value := getattr(keys, key)) is not None}
    own = _offset(keys, columns, formula) | ({} if trials is None else {"trials": trials})
    design = Design(formula, columns)
    known = [*numbers, *own, *(["offset"] if design.offsets and "offset" in FAMILIES[keys.family].options else [])]
    bound = {"y": design.response_name} | own
    constants = {name: np.asarray(value) for name, value in numbers.items()}
    return BoundModel(
        family(keys.family, **dict.fromkeys(known, True)), bound, constants, design=design, loss=keys.family
    )


def _invalid(key: str, found: Any, remedy: str) -> InputError:
    return InputError(f"{WHERE}: {key}", repr(found)[:200], remedy)


def of_record(family: Any, options: Any) -> bool:
    """Whether a family with effects is a model of one record: a negative binomial is one unless its size is known."""
    return family in LIBRARY and not (family in GROUPED_FAMILIES and "size" in options)


def _weighing(keys: ModelKeys, columns: dict[str, Column]) -> dict[str, Any]:
    given = {key: name for key in ("weights", "trials") if (name := getattr(keys, key)) is not None}
    for key, name in given.items():
        column, kinds = columns.get(name), ("number", "count") if key == "weights" else ("count",)
        if column is None or column.type not in kinds or not column.plain or column.bounds[0] < 0:
            kind = "a number or a count" if key == "weights" else "a count"
            remedy = f"Name a declared column: {kind} of at least zero, without center, scale and log."
            raise _invalid(key, name, remedy)
    if "trials" in given and getattr(keys, "family", "") != "logistic":
        raise _invalid("trials", keys.trials, "Numbers of trials belong to the family 'logistic': leave them out.")
    if "weights" in given and isinstance(keys, RecordKeys) and keys.group is not None:
        remedy = "A record of this model is a group of rows: put the weights into the model."
        raise _invalid("weights", keys.weights, remedy)
    return given


def _offset(keys: PredictorKeys, columns: dict[str, Column], formula: str) -> dict[str, str]:
    """The column that is added to the linear predictor: an offset as it is, an exposure as its logarithm."""
    key, name = ("offset", keys.offset) if keys.exposure is None else ("exposure", keys.exposure)
    if name is None:
        return {}
    column, logged = columns.get(name), key == "exposure"
    if keys.offset is not None and keys.exposure is not None:
        raise _invalid("offset", keys.offset, "Give an offset or an exposure, not both.")
    if column is None or column.type in ("level", "key"):
        raise _invalid(key, name, "Name a declared column of numbers.")
    if logged and not (column.bounds[0] > 0 and column.plain):
        raise _invalid(key, name, "An exposure has a positive least bound, and neither center, scale nor log.")
    if logged and name in columns_of(formula)[1]:
        remedy = f"{name!r} is a term of the formula too: add a copy of the column for one of them."
        raise _invalid(key, name, remedy)
    if column.log and not logged:
        remedy = f"write exposure = {name!r} and remove log = true from the column"
        raise _invalid(key, name, f"An offset is on the scale of the linear predictor. For a time at risk {remedy}.")
    columns[name] = replace(column, log=logged)
    return {"offset": name}


def read_model(
    keys: RecordKeys,
    columns: dict[str, Column],
    sites: tuple[str, ...],
    file: Callable[[str], bytes],
    mixed: MixedFormula | None = None,
) -> BoundModel:
    """A model file, or a family of the standard library, with the contract's columns, formula and constants.

    ``mixed`` has the parts of the formula, if it has effects of groups.
    """
    model = _file(keys, file) if isinstance(keys, FileKeys) else _of_family(keys, columns)
    source = model.source
    if mixed is not None:
        check_one_predictor(source, f"{WHERE}: formula with effects of groups")
    formula = keys.formula if mixed is None else mixed.fixed
    if source.predictors and formula is None:
        raise InputError(f"{WHERE}: formula", "no value", "This key is required: the model has a linear predictor.")
    if formula is not None and not source.predictors:
        raise _invalid("formula", formula, "This model has no linear predictor: leave it out.")
    domains = {one.name: one.domain for one in source.columns}
    _check_names("columns", keys.columns, domains)
    for name, column in keys.columns.items():
        if isinstance(column, bool) and not (column and domains[name] == "binary"):
            remedy = "Name a column of the contract; true, for ones, is for columns of zeros and ones only."
            raise _invalid(f"columns: {name}", column, remedy)
    bound = {name: keys.columns.get(name, name) for name in domains}
    bound = {name: column for name, column in bound.items() if isinstance(column, str)}
    design = None
    if formula is not None:
        design = Design(formula, columns, all(one.intercept for one in source.predictors))
        first = source.columns[0].name
        if first in keys.columns:
            remedy = "The response is left of '~' in the formula: leave it out here."
            raise _invalid(f"columns: {first}", keys.columns[first], remedy)
        bound[first] = design.response_name
        if extra := sorted(design.used & {column for name, column in bound.items() if name != first}):
            remedy = f"{extra[0]!r} is a column of the model itself: it cannot be a term too."
            raise _invalid("formula", keys.formula, remedy)
    for column in (one for one in source.columns if one.name in bound):
        _check_column(column, bound[column.name], columns)
    if keys.group is None and source.group is not None:
        raise InputError(f"{WHERE}: group", "no value", "This key is required: the model is of groups of rows.")
    if keys.group is not None and source.group is None:
        raise _invalid("group", keys.group, "A record of this model is one row: leave it out.")
    if keys.group is not None and (keys.group not in columns or columns[keys.group].type != "key"):
        remedy = "Name a declared column of type 'key': rows with the same value are one record."
        raise _invalid("group", keys.group, remedy)
    name = keys.file if isinstance(keys, FileKeys) else ""
    return BoundModel(model, bound, _constants(keys.constants, model, sites), keys.group or "", design, name)


def _file(keys: FileKeys, file: Callable[[str], bytes]) -> Model:
    name = keys.file
    plain = all(c.isalnum() or c in "-_." for c in name) and name[0] not in "-."
    if not plain or not name.endswith(".fpm"):
        raise _invalid(FILE, name, "Give the name of a file next to the contract, such as 'weibull.fpm'.")
    text = file(name)
    digest = hashlib.sha256(text).hexdigest()
    if digest != keys.sha256:
        raise InputError(f"{WHERE}: sha256", f"{keys.sha256[:80]!r}, where {name} has {digest}", "Get the right file.")
    return parsed(text, name)


def _of_family(keys: RecordKeys, columns: dict[str, Column]) -> Model:
    """A family of the standard library, in the size that the contract's columns and constants determine."""
    assert isinstance(keys, FamilyKeys)
    sizes = {}
    if FAMILIES[keys.family].levels:
        response = (keys.formula or "").partition("~")[0].strip()
        sizes["levels"] = max(len(columns[response].levels), 2) if response in columns else 2
    if FAMILIES[keys.family].pieces:
        cuts = keys.constants.get("cuts")
        sizes["pieces"] = len(cuts) + 1 if isinstance(cuts, list) else 2
    return family(keys.family, **sizes)


def _check_column(column: ModelColumn, name: str, columns: dict[str, Column]) -> None:
    """Refuse a declared column whose values may not be what the model takes."""
    where = f"study.toml: columns: {name}"
    if name not in columns:
        remedy = f"Declare it, or say under [model.columns] which one {column.name} is."
        raise InputError(where, "no such column", remedy)
    found = columns[name]
    low, high = found.range if found.type in ("number", "count") else (np.nan, np.nan)
    numeric = found.type in ("number", "count")
    good = {
        "real": numeric,
        "positive": numeric and low > 0,
        "nonnegative": numeric and low >= 0,
        "unit": numeric and low > 0 and high < 1,
        "binary": (found.type == "level" and len(found.levels) == 2)
        or (found.type == "count" and found.plain and found.bounds == (0, 1)),
        "count": found.type == "count" and found.plain,
        "index": found.type == "level" and len(found.levels) == column.levels,
    }[column.domain]
    if not good:
        need = NEEDS.get(column.domain, f"a level of {column.levels}")
        seen = f"{len(found.levels)} levels" if found.type == "level" else found.type
        raise InputError(where, seen, f"The model's column {column.name!r} is {need}.")


def _check_names(table: str, given: dict[str, Any], known: Collection[str]) -> None:
    for name in given:
        if name not in known:
            remedy = f"{suggest(name, known)}Known keys: {', '.join(sorted(known)) or 'none'}."
            raise InputError(f"{WHERE}: {table}: {name}", "an unknown key", remedy)


def _constants(given: dict[str, Any], model: Model, sites: tuple[str, ...]) -> dict[str, Any]:
    """Arrays by name; by name and site of those that are given as tables."""
    shapes = {one.name: one.type.shape for one in model.source.constants}
    _check_names("constants", given, shapes)
    found: dict[str, Any] = {}
    for name, shape in shapes.items():
        if isinstance(by_site := given.get(name), dict):
            _check_names(f"constants: {name}", by_site, sites)
            found[name] = {site: _numbers(by_site, site, shape, f"constants: {name}: {site}") for site in sites}
        else:
            found[name] = _numbers(given, name, shape, f"constants: {name}")
    return found


def _numbers(given: dict[str, Any], key: str, shape: tuple[int, ...], where: str) -> np.ndarray:
    size = math.prod(shape)
    if key not in given:
        raise InputError(f"{WHERE}: {where}", "no value", f"This key is required: give {size} numbers.")
    kind: Any = Numbers
    array = np.asarray(read(kind, given[key], f"{WHERE}: {where}"), float)
    if array.size != size:
        raise _invalid(where, given[key], f"Give {size} numbers.")
    return array.reshape(shape)
