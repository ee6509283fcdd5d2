"""``sites``: a study from a table in memory, by the rules of a contract."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import polars as pl

from fedpdmc._jax.precision import double_precision
from fedpdmc.console.warnings import warn
from fedpdmc.errors import InputError
from fedpdmc.members.member import DescribedSites
from fedpdmc.members.site import Site
from fedpdmc.models.families import FAMILIES as RECORD_FAMILIES
from fedpdmc.models.families import family as record_family
from fedpdmc.models.model_file.model import Model
from fedpdmc.models.model_file.source import Source
from fedpdmc.results.report.methods_text import MANY_DROPPED
from fedpdmc.study.column import Column
from fedpdmc.study.contract import Study, parse_study
from fedpdmc.study.contract_keys import PREDICTOR_FAMILIES, of_record
from fedpdmc.study.contract_model import FILE
from fedpdmc.study.declare import GIVE, as_columns, as_frame, check_order, declare, ordered_levels
from fedpdmc.study.default_prior import COUNTS, LOGITS, ORDERED, Place, Scales, place_covariate, place_response
from fedpdmc.study.description import modelled, prior_lines, ratios, released
from fedpdmc.study.formula import Design, columns_of
from fedpdmc.study.mixed_formula import by_site, is_mixed, parse_mixed
from fedpdmc.study.prior_names import Prior, prior_by_name
from fedpdmc.study.units import INTERCEPT, design_map
from fedpdmc.study.value_checks import Origin, checked_records, faulty_sites
from fedpdmc.study.write_contract import contract_text
from fedpdmc.validation import one_of, suggest

# Role of the response by family; a number for any other family.
RESPONSES = {"logistic": "level", "poisson": "count", "negative_binomial": "count"}
# Role of a column of a family of the standard library, by the domain that the family declares.
ROLES = {"binary": "level", "index": "level", "count": "count", "real": "number", "positive": "positive",
         "nonnegative": "number", "unit": "unit"}  # fmt: skip
# The name of a model file that a contract written here refers to.
MODEL_FILE = "model.fpm"
# Default limits of a contract.
LIMITS = {"rounds": 5000, "observed_time": 100_000.0}


ALIASES = {"binomial": "logistic", "bernoulli": "logistic", "gaussian": "linear", "normal": "linear"}
OPTIONS = {"linear": ("scale",), "student_t": ("scale", "df"), "poisson": ("offset", "exposure"),
           "negative_binomial": ("size", "offset", "exposure")}  # fmt: skip
DEPENDENT = 1e-7  # what is left of a column of length one that counts as none
# The largest range of an offset, which is a logarithm: rates that differ by a factor of three million.
MOST_OFFSET = 15.0
# What to do about values out of bounds.
WIDEN = ' For more, give fedpdmc.sites wider bounds and sample: columns={{"{name}": {{"bounds": [least, most]}}}}.'


class Sites(DescribedSites):
    """The sites of a study, with formula, columns, family and prior; a sequence of `Site`.

    `sites` makes one. ``fedpdmc.sample(sites)`` takes prior and names from it.

    Attributes
    ----------
    study : Study
        The contract of the same study.
    prior
        As `fedpdmc.sample` takes it; None for a flat one.
    tables : dict
        The checked records of each site, by name, in the units of the model.
    """

    def __init__(self, study: Study, tables: dict[str, pd.DataFrame], prior: Prior):
        self.study, self.tables, self._prior = study, tables, prior
        self._members = tuple(_site(study, name, records) for name, records in tables.items())
        self.prior = study.prior() if study.effects else prior.potential(study)
        self.prior_lines = prior_lines(study, prior)

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Site]:
        return iter(self._members)

    def __getitem__(self, index):
        if isinstance(index, str):
            return self._members[list(self.tables).index(index)]
        return self._members[index]

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters' names."""
        return self.study.names

    def write(self, path: str | Path) -> Path:
        """Write the contract, `study.toml`, for the same analysis over a network, and its model file next to it.

        Its bounds, centres and scales come from the table, rounded: check them before you send it.

        Raises
        ------
        InputError
            A prior that a contract cannot express.
        """
        if not self._prior.in_contracts:
            raise InputError(
                "prior",
                "; ".join(self._prior.lines()),
                "Contracts have no prior that is flat for some parameters only: say normal.",
            )
        path = Path(path)
        path.write_bytes(self.study.text)
        if self.study.model is not None and self.study.model_file is not None:
            self.study.model.model.save(path.parent / self.study.model_file)
        return path

    def released(self) -> list[str]:
        """What leaves the sites in a run, as a text."""
        return released(self.study)

    def ratios(self) -> dict[str, list[str]]:
        """The coefficients of covariates on a log scale, by what they are logarithms of: "odds" or "rates"."""
        return ratios(self.study)

    def lines(self) -> list[str]:
        """What is modelled, as a text."""
        counts = [len(table) for table in self.tables.values()]
        first, *others = modelled(self.study, self._prior)
        found = [first, f"{len(self)} sites with {min(counts)} to {max(counts)} records, {sum(counts):,} in all"]
        if dropped := self.dropped():
            gone = sum(count for count, _ in dropped.values())
            shares = ", ".join(f"{site} {100 * count / read:.0f} %" for site, (count, read) in dropped.items())
            found.append(f"{gone:,} of {gone + sum(counts):,} records ({shares}) dropped for a missing value")
        return [*found, *others]

    def dropped(self) -> dict[str, tuple[int, int]]:
        """Records that were dropped for a missing value and all records, at each site that has some."""
        read = {name: (table.attrs.get("count", len(table)), len(table)) for name, table in self.tables.items()}
        return {name: (count - kept, count) for name, (count, kept) in read.items() if count > kept}

    def __repr__(self) -> str:
        return "\n".join(["Sites: " + self.lines()[0], *(f"  {line}" for line in self.lines()[1:])])

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{escape(name)}</td><td>{len(table):,}</td></tr>" for name, table in self.tables.items()
        )
        lines = "<br>".join(escape(line) for line in self.lines())
        return f"<p>{lines}</p><table><tr><th>site</th><th>records</th></tr>{rows}</table>"


@double_precision
def _site(study: Study, name: str, records: pd.DataFrame) -> Site:
    site = Site(study.potential(records, name), name=name)
    site.naming = study.naming
    return site


@contextlib.contextmanager
def _in_words_of_the_table() -> Iterator[None]:
    """Errors of the contract that is made here name the column or the argument, not a file that nobody wrote."""
    try:
        yield
    except InputError as error:
        _, *path = error.argument.split(": ")
        if type(error) is not InputError or not error.argument.startswith("study.toml: "):
            raise
        own = f"column {path[1]!r}" + "".join(f": {key}" for key in path[2:]) if path[0] == "columns" else path[-1]
        raise InputError(own, error.found, error.remedy) from None


@_in_words_of_the_table()
def sites(
    table: Any,
    *,
    formula: str,
    family: str | Model,
    by: str | None = None,
    prior: str | Mapping[str, str] | None = None,
    columns: Mapping[str, Mapping[str, Any]] | None = None,
    standardize: bool = True,
    missing: str = "refuse",
    name: str = "study",
    spread: str | None = None,
    spread_scale: float | None = None,
    **options: Any,
) -> Sites:
    """Sites from a table, with a formula: as from a contract, without a network.

    Parameters
    ----------
    table : pandas or polars DataFrame, Arrow table, or dict of them
        All records with a column ``by`` that names the site of each; or a table for each site.
    formula : str
        Such as ``"died ~ hmo * white + age"``: columns and their interactions. One term may be an effect of groups that
        stays at its site: ``(1 | ward)``, ``(1 + dose | ward)``, or with the column ``by`` an effect of each site.
    family : str or Model
        As in a contract: ``"logistic"``, ``"poisson"``, ``"linear"``, ``"student_t"``, or one of the standard library, such
        as ``"weibull"`` or ``"negative_binomial"``. Or a model of one record with a linear predictor, `fedpdmc.Model`.
    by : str, optional
        The column of the sites' names, for one table.
    prior : str or mapping, optional
        ``"normal(0, 2.5)"``, ``"student_t(3, 0, 2.5)"``, ``"horseshoe(0.1)"`` with its global scale (a second number is the
        slab's sd), ``"flat"``, or one for each parameter by name with ``"others"`` for the rest. Parameters with the same
        horseshoe share its global scale; given for all, it leaves out the intercept. None: a weakly informative prior
        in which all terms together explain about half of the variation, from the values or the stated scales of the columns
        (`fedpdmc.study.default_prior`). All are for the coefficients of columns as they enter the model.
    columns : mapping, optional
        Declarations by column, which override what the table shows:
        ``{"age": {"bounds": [18, 100]}, "dose": {"log": True}, "ward": {"levels": ["A", "B"]}}``. Keys: type, levels,
        bounds, center, scale, log. The first level is the baseline.
    standardize : bool
        Centre and scale covariates that are numbers (not those of zeros and ones), and the response of a linear regression
        with unknown scale. Results are reported in the original units either way. Families of the standard library take
        columns as they are.
    missing : {"refuse", "drop"}
        What to do with a record with a missing value.
    name : str
        The study's name.
    spread, spread_scale : optional
        The prior of the spread of effects: "half-normal" (if None), "exponential" or "half-Cauchy", and its scale (1 if
        None) in the units of the model.
    **options
        Of the family: ``scale``, ``df``, for counts ``exposure`` (a column of times at risk or numbers of persons, whose
        logarithm is added to the linear predictor) or ``offset`` (a column that is added as it is), with effects a known
        ``size`` of a negative binomial; the table's columns for those of the family that are not the response, such as
        ``died="status"``; constants, such as ``cuts=[1.0, 2.0]``.

    Returns
    -------
    Sites
    """
    mixed = parse_mixed(formula) if is_mixed(formula) else None
    if mixed is None and (spread is not None or spread_scale is not None):
        raise InputError(
            "spread", "a prior of a spread without effects", "Give a formula with a term such as (1 | ward)."
        )
    own = family if isinstance(family, Model) else None
    if isinstance(family, str):
        family = ALIASES.get(family.lower(), family.lower())
        one_of("family", family, (*PREDICTOR_FAMILIES, *RECORD_FAMILIES))
    predictor = family in PREDICTOR_FAMILIES or (own is None and mixed is not None and not of_record(family, options))
    parts, fixed = _by_site(table, by), formula if mixed is None else mixed.fixed
    source = None if predictor else (family if isinstance(family, Model) else _example(family)).source
    _check_options(family, options, source, next(iter(parts.values())))
    used, told = _uses(fixed, family, options, source), dict(columns or {})
    if mixed is not None and mixed.slope is not None:
        # Its coefficient varies by group: it is neither centred nor scaled, so that the effects are in its own units.
        told[mixed.slope] = {"center": 0.0, "scale": 1.0} | dict(told.get(mixed.slope, {}))
        used = used._replace(covariates=[*used.covariates, mixed.slope])
    whole = _whole(parts, used.columns)
    if family in ORDERED and "levels" not in told.get(used.response, {}):
        for part in parts.values():
            check_order(used.response, part, as_columns(part, [used.response])[used.response])
    declared = _declare(whole, fixed, used, told, standardize and predictor)
    scales = _scales(whole, declared, used, family, columns or {})
    if mixed is not None and mixed.groups != by:
        declared[mixed.groups] = Column(mixed.groups, "key")
    elif mixed is not None:
        formula = by_site(formula)
    named = {"family": family} if own is None else {"file": MODEL_FILE, "sha256": own.digest}
    model: dict[str, Any] = {**named, "formula": formula}
    tables = {"model": model}
    if predictor:
        model |= {"units": "original"} | options
    else:
        taken = {key: value for key, value in options.items() if isinstance(value, str)}
        tables |= {"model.columns": taken, "model.constants": {k: v for k, v in options.items() if k not in taken}}
    tables |= {"releases": {"derivatives": "summed" if len(parts) >= 3 else "own"}, "limits": LIMITS}
    design = Design(fixed, declared)

    def parsed(changes: dict[str, Any]) -> Study:
        text = contract_text(name, list(parts), declared, missing, tables | changes)
        return parse_study(text, lambda _: b"" if own is None else own.text.encode())

    # The parameters of some families follow from the levels of the response.
    names = design.names
    if mixed is None or not predictor:
        names = parsed({"model": model | {"formula": fixed}, "prior": {"flat": True}}).names
    rule = prior_by_name(prior, names, design, scales)
    if mixed is not None and not rule.normal:
        raise InputError("prior", "; ".join(rule.lines()), "With effects the coefficients' priors are normal.")
    if spread_scale is None and family not in (*COUNTS, *LOGITS, FILE):
        # Effects are in the units of the predictor, which are those of the response or its logarithm.
        spread_scale = scales.response.spread
    of_spread = {} if mixed is None else {"spread": spread, "spread_scale": spread_scale}
    study = parsed({"prior": rule.table() | of_spread})
    found = Sites(study, _records(study, parts), rule)
    _name_dependent_columns(study, found.tables)
    shares = {site: gone / read for site, (gone, read) in found.dropped().items()}
    if many := [f"{site} {100 * share:.0f} %" for site, share in shares.items() if share > MANY_DROPPED]:
        warn(
            f"missing='drop' leaves out many records: {', '.join(many)}. If values are not missing at random the estimates "
            "are biased. Leave the column out of the formula, or fill in its values."
        )
    return found


def _check_options(family: str | Model, options: Mapping[str, Any], source: Source | None, table: Any) -> None:
    """Refuse arguments that the family does not take, and name those that it needs."""
    known = OPTIONS.get(str(family), ())
    needed = known if family == "student_t" else ()
    if source is not None:
        others, constants = ([one.name for one in part] for part in (source.columns[1:], source.constants))
        known, there = (*others, *constants), as_frame(table).columns
        needed = [*constants, *(name for name in others if name not in there)]
    named = repr(family) if isinstance(family, str) else "of your own"
    for name in sorted(set(options) - set(known)):
        near = suggest(name, [*inspect.signature(sites).parameters, *known])
        raise InputError(
            name, "an unknown argument", f"{near}The family {named} takes {', '.join(known) or 'no others'}."
        )
    for name in (name for name in needed if name not in options):
        raise InputError(name, "no value", f"The family {named} needs it: give {name}=, a column's name or numbers.")


def _name_dependent_columns(study: Study, tables: Mapping[str, pd.DataFrame]) -> None:
    """Warn of columns of the design that are constant, or a combination of those before them."""
    X = np.concatenate([study.design.matrix(table) for table in tables.values()])
    names, implied = study.design.names, study.model is not None and INTERCEPT not in study.design.names
    X = np.c_[np.ones(len(X)), X] if implied else X
    left = np.abs(np.diag(np.linalg.qr(X / np.maximum(np.linalg.norm(X, axis=0), 1e-300), mode="r")))[int(implied) :]
    if alike := [name for name, size in zip(names, left, strict=False) if size < DEPENDENT]:
        warn(
            f"formula: {', '.join(alike)} is constant, or a combination of the terms before it, so that only the prior "
            "tells its coefficient. Leave it out of the formula."
        )


class _Uses(NamedTuple):
    """Columns that a model uses: the response, other own columns with their roles, and which may be standardised."""

    response: str
    roles: dict[str, str]
    covariates: list[str]
    offset: str | None
    standard_response: bool
    died: str | None = None

    @property
    def columns(self) -> list[str]:
        offset = [] if self.offset is None else [self.offset]
        return list(dict.fromkeys([*self.roles, *self.covariates, *offset]))


def _uses(formula: str, family: str | Model, options: Mapping[str, Any], source: Source | None) -> _Uses:
    response, covariates = columns_of(formula)
    if source is None:
        roles = {response: RESPONSES.get(str(family), "number")}
        offset = options.get("offset", options.get("exposure"))
        roles |= {} if offset is None or "offset" in options else {offset: "positive"}
        return _Uses(response, roles, covariates, offset, family == "linear" and "scale" not in options)
    if source.group is not None:
        raise InputError("family", "a model of groups of rows", "A table has one row for each record: use Model.of.")
    first, *others = source.columns
    roles = {response: ROLES[first.domain]}
    roles |= {str(options.get(column.name, column.name)): ROLES[column.domain] for column in others}
    died = str(options.get("died", "died")) if any(column.name == "died" for column in others) else None
    return _Uses(response, roles, covariates, None, False, died)


def _example(family: str) -> Model:
    """A family of the standard library in some size: its columns do not depend on it."""
    found = RECORD_FAMILIES[family]
    return record_family(family, **({"levels": 3} if found.levels else {"pieces": 2} if found.pieces else {}))


def _by_site(table: Any, by: str | None) -> dict[str, Any]:
    """A table for each site."""
    if isinstance(table, Mapping):
        if by is not None:
            raise InputError("by", repr(by), "A dict has a table for each site: leave it out.")
        if not table:
            raise InputError("table", "an empty dict", GIVE)
        return {str(site): one for site, one in table.items()}
    if by is None:
        raise InputError("by", "None", "Name the column that says which site each record belongs to.")
    owner = as_columns(table, [by])[by].cast(pl.String)
    if owner.is_null().any():
        row = int(owner.is_null().arg_true()[0])
        raise InputError(f"column {by!r}", f"a missing value in record {row + 1}", "Every record belongs to one site.")
    frame = as_frame(table)
    return {site: frame.filter((owner == site).to_list()).to_native() for site in sorted(owner.unique().to_list())}


# The values of a column at all sites, and its categories if it is categorical.
_Values = tuple[pl.Series, tuple[str, ...] | None]


def _whole(parts: Mapping[str, Any], used: Sequence[str]) -> dict[str, _Values]:
    """The columns that the model uses, of all sites."""
    found: dict[str, _Values] = {}
    read = [(part, as_columns(part, used, f"table of site {site!r}")) for site, part in parts.items()]
    for column in used:
        ordered = [levels for part, _ in read if (levels := ordered_levels(part, column)) is not None]
        levels = tuple(dict.fromkeys(level for one in ordered for level in one)) if ordered else None
        found[column] = _joined([series[column] for _, series in read]), levels
    return found


def _declare(
    whole: Mapping[str, _Values], formula: str, uses: _Uses, told: Mapping[str, Mapping[str, Any]], standardize: bool
) -> dict[str, Column]:
    """Declarations of all columns that the model uses."""
    stray = sorted(set(told) - set(whole))
    if stray:
        raise InputError("columns", repr(stray[0]), f"The model uses {', '.join(whole)}.")

    def all_declared(standard: bool) -> dict[str, Column]:
        found = {}
        for column, (series, levels) in whole.items():
            moved = standard and column != uses.offset and not _zero_one(series)
            if column in uses.roles:
                moved = standard and column == uses.response and uses.standard_response
            found[column] = declare(
                column, series, told.get(column, {}), uses.roles.get(column, "covariate"), levels, moved
            )
        return found

    found = all_declared(standardize)
    if not standardize:
        return found
    no_intercept = "Intercept" not in Design(formula, found).names
    if design_map(formula, found) is None or (found[uses.response].center and no_intercept):
        # Centring cannot be undone, as for an interaction without its main effects: the numbers stay as they are.
        return all_declared(False)
    return found


def _scales(
    whole: Mapping[str, _Values],
    declared: Mapping[str, Column],
    uses: _Uses,
    family: str | Model,
    told: Mapping[str, Mapping[str, Any]],
) -> Scales:
    """What the default prior is made of: places of the values, or scales that ``told`` states."""
    complete = pl.DataFrame([series.is_not_null().alias(name) for name, (series, _) in whole.items()]).min_horizontal()
    if not complete.any():
        raise InputError("table", "a missing value in every record", "Leave empty columns out of the formula.")
    numbers = {name: _numbers(series.filter(complete), declared[name]) for name, (series, _) in whole.items()}
    covariates = {
        name: place_covariate(declared[name], numbers[name], "scale" in told.get(name, {})) for name in uses.covariates
    }
    if isinstance(family, Model):
        return Scales(covariates, Place(), {}, known=False)
    offset = None if uses.offset is None else numbers[uses.offset]
    if offset is not None and uses.offset in uses.roles:
        offset = np.log(offset)
    elif offset is not None and np.ptp(offset) > MOST_OFFSET:
        raise InputError(
            "offset",
            f"values of {uses.offset!r} from {offset.min():g} to {offset.max():g}",
            "An offset is added to the linear predictor, as a logarithm. For times at risk or numbers of persons, whose "
            f"logarithm is to be added, give exposure={uses.offset!r}.",
        )
    died = numbers[uses.died] if uses.died else None
    place, others = place_response(family, declared[uses.response], numbers[uses.response], offset, died)
    return Scales(covariates, place, others)


def _numbers(seen: pl.Series, column: Column) -> np.ndarray:
    """Values as numbers; levels as 0, 1 and so on."""
    if column.type != "level":
        return seen.cast(pl.Float64).to_numpy()
    names = _as_declared(seen, column).cast(pl.String)
    return names.replace_strict(list(column.levels), range(len(column.levels)), default=0).to_numpy()


def _joined(series: Sequence[pl.Series]) -> pl.Series:
    kinds = {one.dtype for one in series}
    kind = kinds.pop() if len(kinds) == 1 else pl.Float64 if pl.String not in kinds else pl.String
    return pl.concat([one.cast(kind) for one in series])


def _zero_one(values: pl.Series) -> bool:
    return values.dtype.is_numeric() and set(values.drop_nulls().unique().to_list()) <= {0, 1}


def _records(study: Study, parts: Mapping[str, Any]) -> dict[str, pd.DataFrame]:
    """The checked records of each site; one report of the errors in all of them."""
    found, faults = {}, {}
    for site, part in parts.items():
        try:
            found[site] = checked_table(study, part, f"table of site {site!r}")
        except InputError as error:
            faults[site] = error
    if faults:
        raise faulty_sites(faults, len(parts))
    return found


def checked_table(study: Study, table: Any, where: str = "table", *, response: bool = True) -> pd.DataFrame:
    """The columns of a table that a study declares, in the units of the model.

    Raises
    ------
    InputError
    """
    needed = [column for column in study.columns if response or column in _of_formula(study)]
    raw = as_columns(table, needed, where)
    count = len(next(iter(raw.values())))
    if not count:
        raise InputError(where, "no records", "Give at least one record.")
    raw = {column: _as_declared(series, study.columns[column]) for column, series in raw.items()}
    return checked_records(study, raw, Origin(where, None), count, widen=WIDEN)


def _of_formula(study: Study) -> set[str]:
    """The columns that a prediction needs: the formula's terms and the offset."""
    offset = study.options.get("offset")
    return (study.design.used - {study.design.response_name}) | (set() if offset is None else {offset})


def _as_declared(series: pl.Series, column: Column) -> pl.Series:
    """Whole numbers that a table holds as floats because a value is missing are levels like any other."""
    if column.type == "level" and series.dtype == pl.Float64:
        return series.cast(pl.Int64, strict=False)
    return series
