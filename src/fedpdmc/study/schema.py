"""The keys of contracts and policies, each declared once: reading, errors, writing and the table of keys follow from it.

Every table of a file is a class whose fields are its keys, with their types, limits and descriptions. msgspec refuses
unknown keys and what has another type; `read` says where, what was found, and what is allowed there.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec
import numpy as np
from msgspec import Meta, inspect

from fedpdmc.errors import InputError
from fedpdmc.models.families import BUILT_IN, FAMILIES
from fedpdmc.models.grouped import SPREADS
from fedpdmc.models.mixture_prior import MOST_DF
from fedpdmc.privacy.budget_planning import PRIVATE_LAPLACE
from fedpdmc.validation import check_name, check_plain, is_plain, one_script, suggest

T = TypeVar("T")
FORMAT = 1
# In a formula, names other than letters, digits, dots and underscores are in backticks.
COLUMN_NAME = re.compile(r"(?=.{1,64}$)[^\W\d]([^:;,|~`+\"'\\\[\]]*[^\s:;,|~`+\"'\\\[\]])?")
# Types of columns of values; a column of type "key" says which rows belong together.
VALUES = ("number", "count", "level")
# What sites may release of their derivatives, from least to most.
DERIVATIVES = ("none", "noisy", "noisy-summed", "summed", "own")
# What sites may report about the fit to their records after the run: see fedpdmc.assessment.
ASSESSMENTS = ("loo", "checks", "influence", "survival")
LARGEST = sys.float_info.max
PLACE = re.compile(r"(.*?)(?: - at `\$(.*)`)?", re.S)


def doc(description: str = "", allowed: str | None = None, **limits: Any) -> Meta:
    """A key's description, limits and, in errors, what is allowed if the limits do not say it well."""
    return Meta(description=description or None, extra=None if allowed is None else {"allowed": allowed}, **limits)


Positive = Annotated[float, doc(ge=1e-300, allowed="a positive number")]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Delta = Annotated[float, doc(ge=1e-300, le=0.5, allowed="a positive number of at most 0.5")]
AtLeastZero = Annotated[float, Meta(ge=0.0)]
Count = Annotated[int, Meta(ge=0)]
CountFromOne = Annotated[int, Meta(ge=1)]
Df = Annotated[int, Meta(ge=1, le=MOST_DF)]
Texts = Annotated[tuple[str, ...], Meta(min_length=1)]
Numbers = float | Annotated[tuple[float, ...], Meta(min_length=1)]
FamilyName: TypeAlias = Literal[tuple(FAMILIES)]  # pyright: ignore[reportInvalidTypeForm]
DerivativesName: TypeAlias = Literal[DERIVATIVES]  # pyright: ignore[reportInvalidTypeForm]
Refreshment = Literal["quarter-turns"] | AtLeastZero
Neighbours = Literal["replace", "add-remove", "label"]


# Reading --------------------------------------------------------------------------------------------------------------


class Keys(msgspec.Struct, forbid_unknown_fields=True):
    """The keys of one table. What ``__post_init__`` raises has the key as its argument; `read` adds the path."""


def read_bytes(path: str | Path, argument: str, remedy: str = "Give the path of a TOML file.") -> bytes:
    """The bytes of a file."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InputError(argument, f"{error.strerror}: {path}", remedy) from error


@contextlib.contextmanager
def naming_file(usual: str, path: str | Path) -> Iterator[None]:
    """Replace the usual name of a file in errors by its path."""
    try:
        yield
    except InputError as error:
        if not error.argument.startswith(usual):
            raise
        raise InputError(f"{path}{error.argument.removeprefix(usual)}", error.found, error.remedy) from error


def parse_toml(data: bytes, where: str) -> dict[str, Any]:
    """The top-level table of a TOML file, in which all characters are visible and all numbers finite."""
    try:
        text = data.decode()
        # Comments too: a person compares and allows what a terminal shows.
        check_plain(text, where)
        values = tomllib.loads(text)
        _check_values(values, where)
        return values
    except InputError:
        raise
    except RecursionError as error:
        raise InputError(where, "tables or lists that are nested too deeply", "Give a TOML file.") from error
    except ValueError as error:
        # Not text, not TOML, or a number with too many digits.
        raise InputError(where, str(error)[:200], "Give a TOML file.") from error


def _check_values(value: Any, where: str, named: bool = False) -> None:
    """Check texts and numbers; ``named``: keys and texts of lists, which name something, are of one line."""
    if isinstance(value, dict):
        for key, one in value.items():
            _check_values(key, where, True)
            _check_values(one, f"{where}: {key}")
    elif isinstance(value, list):
        for one in value:
            _check_values(one, where, True)
        if all(isinstance(one, str) for one in value) and len(set(value)) < len(value):
            raise InputError(where, repr(value)[:200], "Give different texts.")
    elif isinstance(value, str):
        # Control characters could hide a part of a contract on a terminal, and a second line could pass for one of a check.
        if not value or not is_plain(value if named else value.replace("\n", " ")):
            raise InputError(where, ascii(value)[:200], f"Give a printable text{' of one line' if named else ''}.")
    elif isinstance(value, (int, float)) and not abs(value) <= LARGEST:
        found = repr(value) if isinstance(value, float) else "an integer of more than 300 digits"
        raise InputError(where, found, "Give a finite number.")


def read(kind: type[T], values: Any, where: str) -> T:
    """A table whose keys are the fields of a class.

    Raises
    ------
    InputError
        Names the path of the first key that is missing, unknown or of another type, what was found and what is allowed.
    """
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise _explain(inspect.type_info(kind), values, where, error) from None


def _explain(node: inspect.Type, values: Any, where: str, error: msgspec.ValidationError) -> InputError:
    match = PLACE.fullmatch(str(error))
    assert match is not None
    # An entry of a list, or of a table with any keys, is shown with the whole of it.
    for key in re.findall(r"\w+", (match[2] or "").partition("[")[0]):
        node, values, where = _fields(node, values)[key], values[key], f"{where}: {key}"
    if isinstance(cause := error.__cause__, InputError):
        return InputError(f"{where}: {cause.argument}", cause.found, cause.remedy)
    key = re.fullmatch(r"Object (missing required|contains unknown) field `(.*)`", match[1])
    if key is None:
        words = [str(word) for kind in _kinds(node) if isinstance(kind, inspect.LiteralType) for word in kind.values]
        return InputError(where, repr(values)[:200], f"{suggest(values, words)}Give {describe(node)}.")
    fields = _fields(node, values)
    if key[1] == "missing required":
        return InputError(f"{where}: {key[2]}", "no value", f"This key is required: give {describe(fields[key[2]])}.")
    known = f"{suggest(key[2], fields)}Known keys: {', '.join(sorted(fields))}."
    return InputError(f"{where}: {key[2]}", "an unknown key", known)


def _kinds(node: inspect.Type) -> tuple[inspect.Type, ...]:
    node = node.type if isinstance(node, inspect.Metadata) else node
    return node.types if isinstance(node, inspect.UnionType) else (node,)


def _fields(node: inspect.Type, values: Any = None) -> dict[str, inspect.Type]:
    """What each key of a table may be; of several classes, those of the class that the table's tag names."""
    classes = [kind for kind in _kinds(node) if isinstance(kind, inspect.StructType)]
    chosen = next((one for one in classes if one.tag and values.get(one.tag_field) == one.tag), classes[0])
    tags = {chosen.tag_field: inspect.LiteralType(tuple(str(one.tag) for one in classes))} if chosen.tag_field else {}
    return tags | {field.encode_name: field.type for field in chosen.fields}


def describe(node: inspect.Type) -> str:
    """What a key may be, as a phrase."""
    match node:
        case inspect.Metadata():
            return (node.extra or {}).get("allowed") or describe(node.type)
        case inspect.UnionType():
            kinds = [describe(one) for one in node.types if not isinstance(one, inspect.NoneType)]
            return " or ".join(dict.fromkeys(kinds))
        case inspect.LiteralType():
            return f"{'one of ' if len(node.values) > 1 else ''}{', '.join(map(repr, node.values))}"
        case inspect.IntType() | inspect.FloatType():
            words = "an integer" if isinstance(node, inspect.IntType) else "a finite number"
            high = "" if node.le is None else f" to {node.le}"
            return words + ("" if node.ge is None else f" {'from' if high else 'of at least'} {node.ge:g}{high}")
        case inspect.VarTupleType():
            return (
                f"a list{f' of {node.min_length} or more' if node.min_length else ''}, each {describe(node.item_type)}"
            )
        case inspect.BoolType():
            return "true or false"
        case inspect.StrType():
            return "a printable text"
        case inspect.DictType() if not isinstance(node.value_type, inspect.AnyType):
            return f"a table, each value {describe(node.value_type)}"
    return "a table"


# Columns --------------------------------------------------------------------------------------------------------------


class NumberKeys(Keys, tag_field="type", tag="number"):
    """A column of numbers. The model takes ``(f(value) − center)/scale``, where f is the logarithm if ``log``."""

    bounds: Annotated[
        tuple[float, float],
        doc("smallest and largest value; others are refused", allowed="[least, most]"),
    ]
    center: Annotated[float, doc("what is subtracted from the value")] = 0.0
    scale: Annotated[Positive, doc("what the difference is divided by")] = 1.0
    log: Annotated[bool, doc("whether the logarithm of the value enters")] = False

    def __post_init__(self) -> None:
        least, most = self.bounds
        remedy = (
            "Give [least, most]."
            if not least < most
            else "A logarithm needs a positive least value."
            if self.log and least <= 0
            else "Counts are zero or positive."
            if isinstance(self, CountKeys) and least < 0
            else ""
        )
        if remedy:
            raise InputError("bounds", repr(self.bounds), remedy)


class CountKeys(NumberKeys, tag="count"):
    """A column of whole numbers."""


class LevelKeys(Keys, tag_field="type", tag="level"):
    """A column of texts of a known set."""

    levels: Annotated[tuple[str, ...], doc("the texts; the first is the baseline", min_length=2)]


class GroupKeys(Keys, tag_field="type", tag="key"):
    """A column of any texts: rows with the same text belong together."""


@dataclass(frozen=True)
class Column:
    """A declared column of the records: its name, its type, and the keys of that type with their values."""

    name: str
    type: str
    levels: tuple[str, ...] = ()
    bounds: tuple[float, float] = (0.0, 0.0)
    center: float = 0.0
    scale: float = 1.0
    log: bool = False

    @property
    def plain(self) -> bool:
        """Whether it enters the model as it is recorded."""
        return not self.center and self.scale == 1 and not self.log

    @property
    def range(self) -> tuple[float, float]:
        """The bounds after the transformation to model units."""
        low, high = (float(np.log(x)) if self.log else x for x in self.bounds)
        return (low - self.center) / self.scale, (high - self.center) / self.scale

    def table(self) -> dict[str, Any]:
        """The declaration, without default values."""
        if self.type == "key":
            return {"type": self.type}
        if self.type == "level":
            return {"type": self.type, "levels": list(self.levels)}
        found: dict[str, Any] = {"type": self.type, "bounds": list(self.bounds)}
        if self.center or self.scale != 1:
            found |= {"center": self.center, "scale": self.scale}
        return found | ({"log": True} if self.log else {})


def read_columns(tables: Mapping[str, Any], where: str) -> dict[str, Column]:
    """The declared columns."""
    columns = {}
    for name, values in tables.items():
        if not COLUMN_NAME.fullmatch(name) or not one_script(name):
            remedy = "Use letters of one script, digits, and at most 64 characters without : ; , | ~ ` [ ] + or quotes."
            raise InputError(f"{where}: {name}", repr(name), remedy)
        kinds: Any = NumberKeys | CountKeys | LevelKeys | GroupKeys
        one = read(kinds, values, f"{where}: {name}")
        columns[name] = Column(name, str(one.__struct_config__.tag), **msgspec.structs.asdict(one))
    return columns


# The tables of a contract ---------------------------------------------------------------------------------------------


class ModelKeys(Keys):
    """The table [model]; ``weights`` and ``trials`` belong to every class of families."""

    formula: Annotated[str, doc("columns, interactions and functions, such as 'ill ~ drug + age'")]
    weights: Annotated[str | None, doc("the column of the records' weights, which multiply their losses")] = None
    trials: Annotated[str | None, doc("family 'logistic': the column of numbers of trials")] = None


class PredictorKeys(ModelKeys, kw_only=True):
    """A family with a built-in loss, or with effects of groups a negative binomial of known size."""

    family: Annotated[Literal[(*BUILT_IN, "negative_binomial")], doc("the family of the response")]  # pyright: ignore[reportInvalidTypeForm]
    units: Annotated[
        Literal["declared", "original"],
        doc("built-in losses: results per unit of columns as declared, or as recorded"),
    ] = "declared"
    scale: Annotated[
        Positive | None, doc("linear: the known standard deviation; left out: a parameter. student_t: required")
    ] = None
    df: Annotated[Annotated[float, Meta(ge=1e-3)] | None, doc("student_t: degrees of freedom, required")] = None
    offset: Annotated[str | None, doc("poisson, negative_binomial: a column that is added to the linear predictor")] = (
        None
    )
    exposure: Annotated[
        str | None, doc("poisson, negative_binomial: a column whose logarithm is added to it, such as days")
    ] = None
    size: Annotated[Positive | None, doc("negative_binomial: the known size, with effects of groups")] = None

    def __post_init__(self) -> None:
        family = FAMILIES[self.family]
        for key in ("scale", "df", "offset", "exposure", "size"):
            value = getattr(self, key)
            if value is not None and key not in family.options:
                known = sorted({*ModelKeys.__struct_fields__, "family", "units", *family.options})
                raise InputError(key, "an unknown key", f"Known keys: {', '.join(known)}.")
            if value is None and key in family.needed:
                raise InputError(key, "no value", f"This key is required with family {self.family!r}.")


class RecordKeys(ModelKeys, kw_only=True):
    """A model of one record."""

    formula: Annotated[str | None, doc("the linear predictors, if the model has some")] = None
    columns: Annotated[dict[str, str | bool], doc("the contract's columns by the model's names; true: ones")] = {}
    constants: Annotated[dict[str, Any], doc("numbers by name, or tables of them by site")] = {}
    group: Annotated[str | None, doc("the column of type 'key' whose rows are one record")] = None


class FamilyKeys(RecordKeys, kw_only=True):
    """A family of the standard library."""

    family: Annotated[FamilyName, doc("the family of the response")]


class FileKeys(RecordKeys, kw_only=True):
    """A model file."""

    file: Annotated[str, doc("the name of a file next to the contract, such as 'weibull.fpm'")]
    sha256: Annotated[str, doc("its SHA-256")]


class HorseshoeKeys(Keys):
    """A horseshoe prior, whose slab is the normal prior."""

    on: Annotated[Texts, doc("the parameters that are shrunk to zero")]
    scale: Annotated[Positive, doc("the global scale")]


class PriorKeys(Keys):
    """The table [prior]."""

    mean: Annotated[Numbers, doc("one number, or one for each parameter")] = 0.0
    scale: Annotated[Numbers | None, doc("standard deviations: one number, or one for each parameter")] = None
    flat: Annotated[bool, doc("no prior, in place of mean and scale")] = False
    student_t: Annotated[dict[str, Df], doc("degrees of freedom of parameters with a Student-t prior")] = {}
    horseshoe: Annotated[HorseshoeKeys | None, doc("parameters that are shrunk to zero")] = None
    spread: Annotated[
        Literal[SPREADS] | None,  # pyright: ignore[reportInvalidTypeForm]
        doc("the prior of the spreads of effects; left out: 'half-normal'"),
    ] = None
    spread_scale: Annotated[Positive | None, doc("its scale; left out: 1")] = None
    correlation_scale: Annotated[Positive | None, doc("sd of atanh of the effects' correlation; left out: 0.5")] = None

    def __post_init__(self) -> None:
        if self.scale is None and not self.flat:
            raise InputError("scale", "no value", "This key is required, or flat = true.")
        if self.scale is not None and (self.flat or np.min(self.scale) <= 0):
            remedy = "A flat prior has none: leave it out." if self.flat else "Give positive standard deviations."
            raise InputError("scale", repr(self.scale), remedy)


class DynamicsKeys(Keys, tag_field="kind"):
    """The table [dynamics]; left out: the Boomerang with reference 'vb' and quadratic control."""

    reference: Annotated[
        Literal["vb", "laplace", "none"] | None, doc("left out: 'vb' if kind is left out too, else 'none'")
    ] = None
    control: Annotated[
        Literal["none", "linear", "quadratic"] | None, doc("left out: 'quadratic' without kind, else 'none'")
    ] = None
    chains: Annotated[int, doc("number of chains", ge=1, le=2**16)] = 64


class ZigZagKeys(DynamicsKeys, tag="ZigZag"):
    """The zig-zag process."""

    excess: Annotated[AtLeastZero, doc("rate of flips in addition to those that are needed")] = 0.0


class BouncyKeys(DynamicsKeys, tag="BouncyParticle"):
    """The bouncy particle sampler."""

    refresh: Annotated[AtLeastZero, doc("rate of refreshment")] = 1.0


class BoomerangKeys(DynamicsKeys, tag="Boomerang"):
    """The Boomerang."""

    refresh: Annotated[Refreshment, doc("rate of refreshment, or at every quarter turn")] = "quarter-turns"


class FactorisedKeys(DynamicsKeys, tag="FactorisedBoomerang"):
    """The factorised Boomerang."""

    refresh: Annotated[Refreshment, doc("rate of refreshment")] = 1.0
    excess: Annotated[AtLeastZero, doc("rate of flips in addition to those that are needed")] = 0.0


class RunKeys(Keys):
    """The table [run]."""

    ess: Annotated[Positive | None, doc("effective sample size to reach; left out, with duration: 1000")] = None
    duration: Annotated[Positive | None, doc("process time, in place of ess")] = None
    burn_in: Annotated[AtLeastZero | None, doc("process time that is left out")] = None
    method: Annotated[
        Literal["exact", PRIVATE_LAPLACE],  # pyright: ignore[reportInvalidTypeForm]
        doc("draws of the exact posterior from arrivals, or of an approximate one from noisy derivatives"),
    ] = "exact"

    def __post_init__(self) -> None:
        if self.ess is not None and self.duration is not None:
            raise InputError("ess and duration", "both", "Give one of them.")


class ReleaseKeys(Keys):
    """The table [releases]."""

    arrivals: Annotated[bool | None, doc("follows from the method of [run]")] = None
    derivatives: Annotated[
        DerivativesName,
        doc(
            "gradient and Hessian where the coordinator asks: none, with noise, sums with shared noise, sums, each site's"
        ),
    ] = "none"
    passes: Annotated[bool, doc("the number of passes over a site's records")] = False
    assessment: Annotated[
        tuple[Literal[ASSESSMENTS], ...],  # pyright: ignore[reportInvalidTypeForm]
        doc("summaries of the fit that sites may release after the run"),
    ] = ()
    survival_times: Annotated[Numbers, doc("times of Kaplan-Meier estimates, with assessment 'survival'")] = (
        msgspec.field(name="times", default=())
    )

    def __post_init__(self) -> None:
        times = np.atleast_1d(self.survival_times).tolist()
        if ("survival" in self.assessment) != bool(times) or any(a >= b for a, b in itertools.pairwise([0.0, *times])):
            remedy = "Give increasing, positive times of survival estimates with assessment 'survival', and only then."
            raise InputError("times", str(times), remedy)
        self.survival_times = tuple(times)


class LimitKeys(Keys):
    """The table [limits]: the most that a site answers, whoever asks."""

    rounds: Annotated[int, doc("requests", ge=1, le=2**62)]
    most_derivatives: Annotated[Count, doc("points at which derivatives are released")] = msgspec.field(
        name="derivatives", default=12
    )
    most_records: Annotated[CountFromOne, doc("records of a site; it bounds what derivatives can be")] = msgspec.field(
        name="records", default=1_000_000
    )
    observed_time: Annotated[Positive | None, doc("process time of all chains; required for method 'exact'")] = None


class PrivacyKeys(Keys):
    """The table [privacy]: a privacy budget."""

    epsilon: Annotated[float, doc("ε", ge=1e-6)]
    delta: Annotated[Delta, doc("δ")]
    neighbours: Annotated[Neighbours, doc("which data sets are neighbours; 'label' protects outcomes only")] = "replace"
    excess: Annotated[Positive | None, doc("rate of flips that hide those of the records")] = None
    region: Annotated[Numbers | None, doc("largest absolute value of the parameters, for some families")] = None
    release: Annotated[float, doc("with derivatives 'noisy': their share of the budget", ge=0.0, le=0.99)] = 0.0
    colluding: Annotated[Count | None, doc("with derivatives 'noisy-summed': sites that may collude")] = None


class ContractKeys(Keys):
    """A contract."""

    format: Annotated[Literal[FORMAT], doc("of this file")]  # pyright: ignore[reportInvalidTypeForm]
    name: Annotated[str, doc("the study's name")]
    sites: Annotated[Texts, doc("the names in the sites' certificates")]
    columns: Annotated[dict[str, Any], doc("the declared columns, each a table")]
    model: Annotated[dict[str, Any], doc("a family or a model file, with its formula")]
    prior: PriorKeys
    releases: ReleaseKeys
    limits: LimitKeys
    missing: Annotated[Literal["refuse", "drop"], doc("records with a missing value in a used column")] = "refuse"
    from_table: Annotated[tuple[str, ...], doc("columns whose bounds, levels, centre or scale come from records")] = ()
    dynamics: ZigZagKeys | BouncyKeys | BoomerangKeys | FactorisedKeys = msgspec.field(default_factory=BoomerangKeys)
    run: RunKeys = msgspec.field(default_factory=RunKeys)
    privacy: PrivacyKeys | None = None
    coordinates: Annotated[dict[str, Texts], doc("parameters on which a site's records depend; left out: all")] = {}

    def __post_init__(self) -> None:
        for name in self.sites:
            check_name(name)
        # It is shown in lines of logs, checks and registers: a second line could pass for one of those.
        if not is_plain(self.name):
            raise InputError("name", repr(self.name)[:200], "Give a text of one line.")
        if unknown := sorted(set(self.from_table) - set(self.columns)):
            raise InputError("from_table", repr(unknown[0]), f"The columns are {', '.join(self.columns)}.")
        if self.privacy is not None and self.from_table:
            found = f"{', '.join(map(repr, self.from_table))} with a table [privacy]"
            remedy = (
                "Bounds, levels, centres and scales that were taken from records say something about them, and so does a "
                "prior that follows from them. Write what is possible and usual whoever takes part, and remove from_table."
            )
            raise InputError("from_table", found, remedy)


# Writing --------------------------------------------------------------------------------------------------------------


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


def toml_lines(values: Mapping[str, Any]) -> list[str]:
    """One line for each key whose value is not None."""
    return [f"{_key(key)} = {toml_value(value)}" for key, value in values.items() if value is not None]


def contract_text(
    name: str,
    sites: Sequence[str],
    columns: Mapping[str, Column],
    missing: str,
    tables: Mapping[str, Mapping[str, Any]],
) -> bytes:
    """A contract as TOML; ``tables`` are all except the columns."""
    lines = toml_lines({"format": FORMAT, "name": name, "sites": list(sites), "missing": missing})
    for table, values in {"columns": {one.name: one.table() for one in columns.values()}, **tables}.items():
        if keys := toml_lines(values):
            lines += ["", f"[{table}]", *keys]
    return ("\n".join(lines) + "\n").encode()
