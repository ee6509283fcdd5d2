"""``sites``: a study from a table in memory, by the rules of a contract, with declarations that follow from its columns."""

from __future__ import annotations

import contextlib
import datetime
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import narwhals as nw
import numpy as np
import pandas as pd
import polars as pl

from fedpdmc._jax.precision import double_precision
from fedpdmc.console.warnings import warn
from fedpdmc.errors import InputError
from fedpdmc.members.site import DescribedSites, Site
from fedpdmc.models.families import BUILT_IN, FAMILIES, Place, Seen
from fedpdmc.models.families import family as record_family
from fedpdmc.models.model_file.allowed_operations import Source
from fedpdmc.models.model_file.model import Model
from fedpdmc.models.user_function import Variables
from fedpdmc.results import arviz_export
from fedpdmc.results.report import MANY_DROPPED
from fedpdmc.study.contract import Study, design_map, parse_study
from fedpdmc.study.contract_model import of_record
from fedpdmc.study.description import effect_scale, modelled, prior_lines, released
from fedpdmc.study.formula import (
    INTERCEPT,
    SPLINES,
    Design,
    FormulaFunction,
    by_site,
    columns_of,
    freeze,
    is_mixed,
    outward,
    parse_mixed,
    round_to,
    split,
)
from fedpdmc.study.prior_names import (
    Prior,
    Scales,
    place_covariate,
    place_function,
    place_response,
    prior_by_name,
)
from fedpdmc.study.read_data import Origin, check_records, read_all_sites
from fedpdmc.study.schema import VALUES, Column, contract_text, toml_lines
from fedpdmc.study.study_response import Responses
from fedpdmc.validation import integer, one_of, suggest

MOST_LEVELS = 200
WIDER = 0.25  # share of the observed range by which bounds are wider
DIGITS = 2  # of bounds, centres and scales: a contract reveals little about the records
# Roles of numbers above zero and below this.
INSIDE = {"positive": np.inf, "unit": 1.0}
KEYS = ("type", "levels", "bounds", "center", "scale", "log")
MOMENTS = (datetime.date, datetime.time, datetime.timedelta, pd.Period)
GIVE = "Give a pandas or polars data frame or an Arrow table, or a dict of them by site."


def as_columns(table: Any, names: Sequence[str], argument: str = "table") -> dict[str, pl.Series]:
    """Columns of a pandas, polars or Arrow table: numbers as numbers, everything else as text."""
    frame = as_frame(table, argument)
    missing = [name for name in names if name not in frame.columns]
    if missing:
        known = ", ".join(map(str, frame.columns[:20]))
        numbered = "Names are texts: give the columns such names. " if missing[0] in map(str, frame.columns) else ""
        raise InputError(argument, f"no column {missing[0]!r}", f"{numbered}The table has the columns {known}.")
    return {name: _series(name, frame[name]) for name in names}


def as_frame(table: Any, argument: str = "table") -> nw.DataFrame:
    """A table of any known kind; anything with Arrow's C interface is one."""
    if not hasattr(table, "columns") and hasattr(table, "__arrow_c_stream__"):
        table = pl.DataFrame(table)
    try:
        return nw.from_native(table, eager_only=True)
    except TypeError as error:
        raise InputError(argument, type(table).__name__, GIVE) from error
    except nw.exceptions.DuplicateError as error:
        twice = next(name for name in table.columns if list(table.columns).count(name) > 1)
        raise InputError(argument, f"two columns {twice!r}", "Give every column its own name.") from error


def _series(name: str, column: nw.Series) -> pl.Series:
    values = column.to_list()
    values = [None if value is None or value is pd.NA or value != value else value for value in values]
    moment = next((value for value in values if isinstance(value, MOMENTS)), None)
    if moment is not None:
        days = f"Give a number, such as days since a day: (table[{name!r}] - day).dt.days in pandas"
        raise InputError(f"column {name!r}", f"a date or a time ({moment})", f"{days}; or text, if each is a level.")
    if column.dtype == nw.Boolean or all(isinstance(value, (bool, np.bool_)) for value in values if value is not None):
        return pl.Series(name, [None if x is None else str(bool(x)).lower() for x in values], dtype=pl.String)
    if all(isinstance(value, (int, np.integer)) for value in values if value is not None):
        return pl.Series(name, [None if x is None else int(x) for x in values], dtype=pl.Int64)
    if column.dtype.is_numeric():
        return pl.Series(name, [None if x is None else float(x) for x in values], dtype=pl.Float64)
    return pl.Series(name, [None if x is None else str(x) for x in values], dtype=pl.String)


def _categories(table: Any, name: str) -> tuple[tuple[str, ...] | None, bool]:
    """The categories of a pandas Categorical or a polars Enum, and whether they are ordered; None for other columns."""
    column = as_frame(table)[name].to_native()
    if isinstance(column, pd.Series) and isinstance(column.dtype, pd.CategoricalDtype):
        names = (str(one).lower() if isinstance(one, (bool, np.bool_)) else str(one) for one in column.cat.categories)
        return tuple(names), bool(column.cat.ordered)
    if isinstance(column, pl.Series) and isinstance(column.dtype, pl.Enum):
        return tuple(column.dtype.categories.to_list()), True
    return None, False


def _check_order(name: str, table: Any) -> None:
    """Refuse text as an ordered response, unless it is an ordered categorical: the alphabet is not its order."""
    seen, (levels, ordered) = as_columns(table, [name])[name], _categories(table, name)
    found = seen.drop_nulls().unique().sort().to_list()
    if ordered or (seen.dtype != pl.String and levels is None) or found == ["false", "true"]:
        return
    some = f"text without an order ({', '.join(map(repr, found[:3]))}{', ...' if len(found) > 3 else ''})"
    given = f'Give its levels from the lowest to the highest: columns={{"{name}": {{"levels": [...]}}}}; or an ordered '
    remedy = f"{given}categorical (pandas: ordered=True; polars: Enum)."
    raise InputError(f"column {name!r}", f"{some} as the response of an ordered family", remedy)


def declare(
    name: str,
    values: pl.Series,
    given: Mapping[str, Any],
    role: str,
    levels: tuple[str, ...] | None,
    standardize: bool,
) -> Column:
    """The declaration of a column, from its values at all sites, what the user declares, and the ``role`` in the model.

    Roles: covariate, level, status, count, number, positive, unit or weight. ``levels`` are those of a categorical.
    """
    unknown = sorted(set(given) - set(KEYS))
    if unknown:
        known = f"{suggest(unknown[0], KEYS)}Known keys: {', '.join(KEYS)}."
        raise InputError(f"columns[{name!r}]", f"the key {unknown[0]!r}", known)
    seen = values.drop_nulls()
    if not len(seen):
        raise InputError(f"column {name!r}", "no values", "Remove it from the formula.")
    kind = given.get("type") or _kind(seen, role, levels, "levels" in given)
    if kind not in VALUES:
        raise InputError(f"columns[{name!r}]: type", repr(kind), f"Give one of {', '.join(map(repr, VALUES))}.")
    if kind == "level":
        present = set(seen.cast(pl.String))
        found = _levels(name, seen, role) if levels is None else tuple(x for x in levels if x in present)
        return Column(name, kind, levels=tuple(given.get("levels") or found))
    parsed = seen.cast(pl.Float64, strict=False)
    if len(bad := seen.filter(parsed.is_null())):
        raise InputError(f"column {name!r}", f"{str(bad[0])[:40]!r}", "Give numbers, or declare it: type = 'level'.")
    numbers = parsed.to_numpy()
    if not np.all(np.isfinite(numbers)):
        count, first = np.count_nonzero(~np.isfinite(numbers)), seen.filter(~parsed.is_finite())[0]
        some = f"a value that is not finite ({first}; {count:,} of {len(numbers):,})"
        raise InputError(f"column {name!r}", some, "Give finite numbers, or leave the values empty as missing ones.")
    log = bool(given.get("log", False))
    if log and numbers.min() <= 0:
        found = f"the value {numbers.min():g} with log = True"
        raise InputError(f"column {name!r}", found, "Logarithms need values above 0.")
    if role in INSIDE and not (numbers.min() > 0 and numbers.max() < INSIDE[role]):
        found = f"values from {numbers.min():g} to {numbers.max():g}"
        raise InputError(f"column {name!r}", found, f"Give values above 0 and below {INSIDE[role]:g}.")
    if role in ("weight", "count") and numbers.min() < 0:
        words = "Weights" if role == "weight" else "Counts"
        raise InputError(f"column {name!r}", f"the value {numbers.min():g}", f"{words} are at least zero.")
    if role == "weight" and not numbers.any():
        raise InputError(f"column {name!r}", "only weights of zero", "Give some record a weight above zero.")
    bounds = given.get("bounds") or numbers_bounds(numbers, kind, log or role in INSIDE, INSIDE.get(role, np.inf))
    if len(bounds) != 2 or not bounds[0] < bounds[1]:
        raise InputError(f"columns[{name!r}]: bounds", repr(bounds), "Give [least, most].")
    used = np.log(numbers) if log else numbers
    center, scale = (0.0, 1.0) if kind == "count" and role == "count" or not standardize else _standard(used)
    return Column(
        name, kind, (), (float(bounds[0]), float(bounds[1])), float(given.get("center", center)),
        float(given.get("scale", scale)), log,
    )  # fmt: skip


def _has_words(seen: pl.Series) -> bool:
    return bool(seen.dtype == pl.String and seen.cast(pl.Float64, strict=False).is_null().any())


def _kind(seen: pl.Series, role: str, levels: tuple[str, ...] | None, named: bool) -> str:
    if role in ("level", "status") or levels is not None or named:
        return "level"
    if role != "covariate":
        return "count" if role == "count" else "number"
    text = _has_words(seen)
    return "level" if text else "number"


def _levels(name: str, seen: pl.Series, role: str) -> tuple[str, ...]:
    if seen.dtype == pl.Float64:
        whole = seen.cast(pl.Int64)
        if not (whole.cast(pl.Float64) == seen).all():
            raise InputError(f"column {name!r}", "numbers that are not whole, as levels", "Give text or whole numbers.")
        seen = whole
    found = seen.unique().sort().cast(pl.String).to_list()
    if role == "status" and len(found) == 1:
        # A status without censoring, or without events.
        found = next((list(pair) for pair in (("0", "1"), ("false", "true")) if found[0] in pair), found)
    if len(found) > MOST_LEVELS:
        taken = f"At most {MOST_LEVELS} are taken from a table"
        remedy = f"{taken}: is it a number? Else declare them: columns={{{name!r}: ...}}."
        raise InputError(f"column {name!r}", f"{len(found)} levels", remedy)
    if len(found) == 1:
        all_of_them = f'declare all levels: columns={{"{name}": {{"levels": [...]}}}}'
        remedy = f"Leave it out of the formula, or {all_of_them}."
        if role != "covariate":
            other = (
                "Give died=True if every time is that of an event, or "
                if role == "status"
                else "It is to be explained: "
            )
            remedy = f"{other}{all_of_them}."
        raise InputError(f"column {name!r}", f"only the level {found[0]!r}", remedy)
    return tuple(found)


def numbers_bounds(numbers: np.ndarray, kind: str, positive: bool, most: float = np.inf) -> tuple[float, float]:
    """The observed range, a quarter wider on each side and rounded outwards; not below zero if no value is.

    For positive numbers, from half the smallest to twice the largest, or half the way from the largest to a finite ``most``.
    """
    low, high = float(numbers.min()), float(numbers.max())
    if set(numbers.tolist()) == {0.0, 1.0} and not positive:
        return 0.0, 1.0
    if positive:
        return _outward(low / 2, -1), _outward(2 * high, 1) if np.isinf(most) else most - _outward(
            (most - high) / 2, -1
        )
    more = WIDER * (high - low) or max(abs(high), 1.0)
    least = _outward(low - more, -1)
    least = max(least, 0.0) if low >= 0 else least
    if kind == "count":
        return float(np.floor(least)), float(np.ceil(_outward(high + more, 1)))
    return least, _outward(high + more, 1)


def _outward(x: float, direction: int) -> float:
    """Rounded to `DIGITS` digits, up or down."""
    if x == 0:
        return 0.0
    unit = 10.0 ** (np.floor(np.log10(abs(x))) - DIGITS + 1)
    rounded = np.ceil(x / unit) if direction > 0 else np.floor(x / unit)
    return float(f"{rounded * unit:.12g}")


def _standard(numbers: np.ndarray) -> tuple[float, float]:
    """Centre and scale of few digits, so that a contract reveals little about the records."""
    sd = float(numbers.std())
    if sd == 0:
        return 0.0, 1.0
    scale = float(f"{sd:.{DIGITS}g}")
    return round_to(numbers.mean(), scale), scale


# Role of a column of a family of the standard library, by the domain that the family declares.
ROLES = {"binary": "status", "index": "level", "count": "count", "real": "number", "positive": "positive",
         "nonnegative": "number", "unit": "unit"}  # fmt: skip
# The name of a model file that a contract written here refers to.
MODEL_FILE = "model.fpm"
# Default limits of a contract.
LIMITS = {"rounds": 5000, "observed_time": 100_000.0}


# As other packages call them.
ALIASES = {"binomial": "logistic", "bernoulli": "logistic", "gaussian": "linear", "normal": "linear",
           "negbinomial": "negative_binomial", "negativebinomial": "negative_binomial", "lognormal": "log_normal",
           "cumulative": "ordered_logit", "ordinal": "ordered_logit", "categorical": "multinomial_logit"}  # fmt: skip
# A survival time with its status, as in R.
SURV = re.compile(r"\s*Surv\(\s*([^(),]+?)\s*(?:,\s*([^(),]+?)\s*)?\)\s*(?=~)")
DEPENDENT = 1e-7  # what is left of a column of length one that counts as none
# The largest range of an offset, which is a logarithm: rates that differ by a factor of three million.
MOST_OFFSET = 15.0
# Functions that may need positive values.
POSITIVE = r"log\(|/|\*\*"
# What to do about values out of bounds.
WIDEN = ' For more, give fedpdmc.sites wider bounds and sample: columns={{"{name}": {{"bounds": [least, most]}}}}.'
WIDEN_SPLINES = " In bs() give the same ends: lower=, upper=."


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

    def __init__(self, study: Study, tables: dict[str, pd.DataFrame], prior: Prior, from_table: Sequence[str] = ()):
        self.study, self.tables, self._prior, self._from_table = study, tables, prior, list(from_table)
        self._members = tuple(_site(study, name, records) for name, records in tables.items())
        self.prior = study.prior() if study.effects or prior.in_contracts else prior.potential()
        self.prior_lines = prior_lines(study, prior)
        self.effect_scale = effect_scale(study, tables)

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

        Its bounds, centres and scales come from the table, rounded: check them before you send it. Columns of which
        ``columns=`` did not give them, or levels, are named in ``from_table``; a privacy budget allows none.

        Raises
        ------
        InputError
            A prior that a contract cannot express.
        """
        if not self._prior.in_contracts:
            remedy = "Contracts have no prior that is flat for some parameters only: say normal."
            raise InputError("prior", "; ".join(self._prior.lines()), remedy)
        path = Path(path)
        text = self.study.text
        if self._from_table:
            # The digest of a study of one process does not depend on it.
            text = text.replace(
                b"\n", b"\n" + "\n".join(toml_lines({"from_table": self._from_table})).encode() + b"\n", 1
            )
        path.write_bytes(text)
        if self.study.model.file:
            self.study.model.model.save(path.parent / self.study.model.file)
        return path

    def prior_predictive(self, draws: int = 500, *, seed: int | None = None):
        """Responses of the same records under draws of the prior, as ArviZ data with groups prior and prior_predictive.

        Look at it before you sample: ``az.plot_ppc(fp.prior_predictive(sites), group="prior")``. Times of events are not
        censored.

        Parameters
        ----------
        draws : int
        seed : int, optional

        Raises
        ------
        InputError
            A flat prior, effects of groups, or sites that are not of `fedpdmc.sites`.
        """
        if not isinstance(self, Sites):
            raise InputError("sites", type(self).__name__, "Give what fedpdmc.sites returns.")
        if self.study.effects is not None:
            remedy = "Look at the prior of a formula without them."
            raise InputError("sites", "effects of groups in the formula", remedy)
        rng = np.random.default_rng(seed)
        x = self._prior.draws(integer("prior_predictive(draws)", draws, 1), rng)
        named = self._members[0].naming
        values = Variables([], {name: i for i, name in enumerate(self.names)})
        if named is not None and named.constrain is not None:
            values = Variables([(np.arange(len(self.names)), named.constrain)], {})
        try:
            # Times under a wide prior may be infinite.
            with np.errstate(over="ignore"):
                return arviz_export.prior_predictive(self, x, values.of(x[None]), rng)
        except InputError:
            raise
        except ValueError as error:
            raise InputError("prior", f"responses that cannot be drawn ({error})", "Give a narrower prior.") from error

    def released(self) -> list[str]:
        """What leaves the sites in a run, as a text."""
        return released(self.study)

    def lines(self) -> list[str]:
        """What is modelled, as a text."""
        counts = [len(table) for table in self.tables.values()]
        first, *others = modelled(self.study, self._prior)
        found = [first, f"{len(self)} sites with {min(counts):,} to {max(counts):,} records, {sum(counts):,} in all"]
        if (weights := self.study.weights) is not None:
            total = sum(float(np.sum(table[weights])) for table in self.tables.values())
            found[1] += f"; their weights add up to {total:,.6g}"
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
        each = self.tables.items()
        rows = "".join(f"<tr><td>{escape(name)}</td><td>{len(table):,}</td></tr>" for name, table in each)
        lines = "<br>".join(escape(line) for line in self.lines())
        return f"<p>{lines}</p><table><tr><th>site</th><th>records</th></tr>{rows}</table>"


prior_predictive = Sites.prior_predictive


@double_precision
def _site(study: Study, name: str, records: pd.DataFrame) -> Site:
    site = Site(study.potential(records, name), name=name)
    site.naming, site.responses = study.naming, Responses(study, name, records)
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
    weights: str | None = None,
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
        Functions of columns are bs, cr, ns, poly, log, I, center, scale, C and offset: ``"died ~ bs(age, df=5) * C(arm)"``.
        Their knots, ends, centres and scales are computed once from all records; ``print(sites)`` shows them.
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
        (`fedpdmc.study.prior_names`). All are for the coefficients of columns as they enter the model.
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
    weights : str, optional
        The column of the records' weights, of at least zero, by which their losses are multiplied: inverse probabilities
        or numbers of equal records. Default priors and scales are those of the records without weights.
    **options
        Of the family: ``scale``, ``df``, for a logistic regression ``trials`` (a column of numbers of trials, of which the
        response is the number of events), for counts ``exposure`` (a column of times at risk or numbers of persons, whose
        logarithm is added to the linear predictor) or ``offset`` (a column that is added as it is), with effects a known
        ``size`` of a negative binomial; the table's columns for those of the family that are not the response, such as
        ``died="status"`` (``died=True``: every time is that of an event; the formula may also say ``Surv(time, status)`` or
        ``Surv(time)``); constants, such as ``cuts=[1.0, 2.0]``.

    Returns
    -------
    Sites
    """
    named_columns = {
        key: options.get(key) for key in ("trials", "offset", "exposure", "died") if options.get(key) is not True
    }
    _check_texts(formula, by=by, weights=weights, **named_columns)
    if surv := SURV.match(formula):
        time, status = surv.groups()
        if "died" in options:
            raise InputError("died", repr(options["died"]), "The formula has it: Surv(time, status).")
        formula, options = f"{time} {formula[surv.end() :]}", options | {"died": status or True}
    mixed = parse_mixed(formula) if is_mixed(formula) else None
    if mixed is None and (spread is not None or spread_scale is not None):
        remedy = "Give a formula with a term such as (1 | ward)."
        raise InputError("spread", "a prior of a spread without effects", remedy)
    own = family if isinstance(family, Model) else None
    if isinstance(family, str):
        family = ALIASES.get(family.lower(), family.lower())
        one_of("family", family, tuple(FAMILIES), (*ALIASES, *FAMILIES))
    predictor = family in BUILT_IN or (own is None and mixed is not None and not of_record(family, options))
    parts, fixed = _by_site(table, by), formula if mixed is None else mixed.fixed
    source = None
    if isinstance(family, Model):
        source = family.source
    elif not predictor:
        # In some size: its columns do not depend on it.
        sizes = {"levels": 3} if FAMILIES[family].levels else {"pieces": 2} if FAMILIES[family].pieces else {}
        source = record_family(family, **sizes).source
    _check_options(family, options, source, next(iter(parts.values())))
    used, given = _uses(fixed, family, options, source, weights), dict(columns or {})
    functions = [one for one in split(formula) if isinstance(one, FormulaFunction)]
    as_recorded = set().union(*(one.columns for one in functions))
    if mixed is not None and mixed.slope is not None:
        # Its coefficient varies by group: it is neither centred nor scaled, so that the effects are in its own units.
        varying = columns_of(f"{used.response} ~ {mixed.slope}")[1]
        used, as_recorded = used._replace(covariates=[*used.covariates, *varying]), as_recorded | set(varying)
    whole = _whole(parts, used.columns)
    formula, declared = _freeze(formula, functions, whole)
    usual = {"center": 0.0, "scale": 1.0}
    given |= {name: declared.get(name, usual) | dict(given.get(name, {})) for name in as_recorded}
    mixed = parse_mixed(formula) if mixed is not None else None
    fixed = formula if mixed is None else mixed.fixed
    record = FAMILIES[family] if isinstance(family, str) else None
    if record is not None and record.ordered and "levels" not in given.get(used.response, {}):
        for part in parts.values():
            _check_order(used.response, part)
    declared = _declare(whole, fixed, used, given, standardize and predictor)
    for column in declared.values():
        _name_alike(f"column {column.name!r}: the levels", column.levels)
    _name_alike("the sites", list(parts))
    if family in ("linear", "student_t") and whole[used.response][0].drop_nulls().n_unique() == 1:
        only = f"only the value {whole[used.response][0].drop_nulls()[0]}"
        raise InputError(f"column {used.response!r}", only, "A response that never varies has nothing to explain.")
    design = Design(fixed, declared)
    scales = _scales(whole, declared, used, design, family, columns or {})
    if mixed is not None and mixed.groups != by:
        declared[mixed.groups] = Column(mixed.groups, "key")
    elif mixed is not None:
        formula = by_site(formula)
    named = {"family": family} if own is None else {"file": MODEL_FILE, "sha256": own.digest}
    model: dict[str, Any] = {**named, "formula": formula} | ({} if weights is None else {"weights": weights})
    tables = {"model": model}
    if predictor:
        model |= {"units": "original"} | options
    else:
        taken = {key: value for key, value in options.items() if isinstance(value, str) or value is True}
        tables |= {"model.columns": taken, "model.constants": {k: v for k, v in options.items() if k not in taken}}
    tables |= {"releases": {"derivatives": "summed" if len(parts) >= 3 else "own"}, "limits": LIMITS}

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
    if spread_scale is None and not (record is not None and record.unitless):
        # Effects are in the units of the predictor, which are those of the response or its logarithm.
        spread_scale = scales.response.spread
    of_spread = {} if mixed is None else {"spread": spread, "spread_scale": spread_scale}
    study = parsed({"prior": rule.table() | of_spread})
    records = read_all_sites(parts, lambda site: check_table(study, parts[site], f"table of site {site!r}"))
    of_numbers = {"bounds", "center", "scale"} if standardize else {"bounds"}
    stated = {name for name, keys in (columns or {}).items() if "levels" in keys or of_numbers <= set(keys)}
    from_table = [one.name for one in declared.values() if one.type != "key" and one.name not in stated]
    found = Sites(study, records, rule, from_table)
    _name_dependent_columns(study, found.tables)
    shares = {site: gone / read for site, (gone, read) in found.dropped().items()}
    if many := [f"{site} {100 * share:.0f} %" for site, share in shares.items() if share > MANY_DROPPED]:
        warn(
            f"missing='drop' leaves out many records: {', '.join(many)}. If values are not missing at random the estimates "
            "are biased. Leave the column out of the formula, or fill in its values."
        )
    return found


def _check_texts(formula: str, **columns: str | None) -> None:
    """Refuse arguments that are no names of columns, and responses as other packages write them."""
    for name, given in {"formula": formula, **columns}.items():
        if not isinstance(given, str) and (given is not None or name == "formula"):
            remedy = (
                "Give a text such as 'died ~ age'." if name == "formula" else "Give the name of a column of the table."
            )
            raise InputError(name, type(given).__name__, remedy)
    response = formula.partition("~")[0].strip()
    if "|" in response or (response.startswith("Surv(") and not SURV.match(formula)):
        remedy = (
            "Left of '~' is a column, Surv(time) or Surv(time, status). Others are arguments: trials='n', weights='w'."
        )
        raise InputError("formula", repr(response), remedy)


def _name_alike(kind: str, names: Sequence[str]) -> None:
    """Warn of texts that differ only in capitals or spaces."""
    plain = [" ".join(name.split()).casefold() for name in names]
    if alike := [name for name, one in zip(names, plain, strict=True) if plain.count(one) > 1]:
        warn(
            f"{kind} {', '.join(map(repr, alike))} differ only in capitals or spaces, and are kept apart. If they are the "
            "same, write them alike: table[...].str.strip().str.lower() in pandas."
        )


def _check_options(family: str | Model, options: Mapping[str, Any], source: Source | None, table: Any) -> None:
    """Refuse arguments that the family does not take, and name those that it needs."""
    known, needed = (FAMILIES[family].options, FAMILIES[family].needed) if isinstance(family, str) else ((), ())
    if source is not None:
        others, constants = ([one.name for one in part] for part in (source.columns[1:], source.constants))
        known, there = (*others, *constants), as_frame(table).columns
        needed = [*constants, *(name for name in others if name not in there)]
    named = repr(family) if isinstance(family, str) else "of your own"
    for name in sorted(set(options) - set(known)):
        near = suggest(name, [*inspect.signature(sites).parameters, *known])
        need = "It is for 'poisson', and for 'negative_binomial' with size= and effects such as (1 | ward)."
        if name == "died":
            survival = ", ".join(repr(one.name) for one in FAMILIES.values() if one.survival)
            need = f"It is the status of survival times, which are for {survival}."
        elif name not in ("offset", "exposure"):
            need = f"The family {named} takes {', '.join(known) or 'no others'}."
        raise InputError(name, "an unknown argument", near + need)
    for name in (name for name in needed if name not in options):
        given = "True if every time is that of an event" if name == "died" else "numbers"
        raise InputError(name, "no value", f"The family {named} needs it: give {name}=, a column's name or {given}.")


def _name_dependent_columns(study: Study, tables: Mapping[str, pd.DataFrame]) -> None:
    """Warn of columns of the design that are constant, or a combination of those before them."""
    X = np.concatenate([study.design.matrix(table) for table in tables.values()])
    names = study.design.names
    implied = not study.model.loss and INTERCEPT not in names
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


def _uses(
    formula: str, family: str | Model, options: Mapping[str, Any], source: Source | None, weights: str | None
) -> _Uses:
    response, covariates = columns_of(formula)
    weighed = {} if weights is None else {weights: "weight"}
    if source is None:
        roles = {response: FAMILIES[str(family)].response} | weighed
        if "trials" in options:
            roles |= {response: "count", options["trials"]: "count"}
        offset = options.get("offset", options.get("exposure"))
        roles |= {} if offset is None or "offset" in options else {offset: "positive"}
        return _Uses(response, roles, covariates, offset, family == "linear" and "scale" not in options)
    if source.group is not None:
        raise InputError("family", "a model of groups of rows", "A table has one row for each record: use Model.of.")
    first, *others = source.columns
    roles = {response: ROLES[first.domain]} | weighed
    others = [column for column in others if options.get(column.name) is not True]
    roles |= {str(options.get(column.name, column.name)): ROLES[column.domain] for column in others}
    died = str(options.get("died", "died")) if any(column.name == "died" for column in others) else None
    return _Uses(response, roles, covariates, None, False, died)


def _by_site(table: Any, by: str | None) -> dict[str, Any]:
    if isinstance(table, Mapping):
        if by is not None:
            raise InputError("by", repr(by), "A dict has a table for each site: leave it out.")
        if not table:
            raise InputError("table", "an empty dict", GIVE)
        return {str(site): one for site, one in table.items()}
    if by is None:
        raise InputError("by", "None", "Name the column that says which site each record belongs to.")
    owner = as_columns(table, [by])[by].cast(pl.String)
    if not len(owner):
        raise InputError("table", "no records", "Give at least one record.")
    if owner.is_null().any():
        row = int(owner.is_null().arg_true()[0])
        raise InputError(f"column {by!r}", f"a missing value in record {row + 1}", "Every record belongs to one site.")
    frame = as_frame(table)
    return {site: frame.filter((owner == site).to_list()).to_native() for site in sorted(owner.unique().to_list())}


# The values of a column at all sites, and its categories if it is categorical.
_Values = tuple[pl.Series, tuple[str, ...] | None]


def _whole(parts: Mapping[str, Any], used: Sequence[str]) -> dict[str, _Values]:
    found: dict[str, _Values] = {}
    read = [(part, as_columns(part, used, f"table of site {site!r}")) for site, part in parts.items()]
    for column in used:
        ordered = [levels for part, _ in read if (levels := _categories(part, column)[0]) is not None]
        levels = tuple(dict.fromkeys(level for one in ordered for level in one)) if ordered else None
        own = {site: series[column] for site, (_, series) in zip(parts, read, strict=True)}
        fractions = [site for site, one in own.items() if one.dtype == pl.Float64]
        texts = [site for site, one in own.items() if _has_words(one.drop_nulls())]
        if fractions and texts:
            unlike = f"numbers at site {fractions[0]!r}, text at site {texts[0]!r}"
            raise InputError(f"column {column!r}", unlike, "Give it the same kind at all sites.")
        found[column] = _join(list(own.values())), levels
    return found


def _declare(
    whole: Mapping[str, _Values], formula: str, uses: _Uses, given: Mapping[str, Mapping[str, Any]], standardize: bool
) -> dict[str, Column]:
    stray = sorted(set(given) - set(whole))
    if stray:
        raise InputError("columns", repr(stray[0]), f"The model uses {', '.join(whole)}.")

    def declare_all(standard: bool) -> dict[str, Column]:
        found = {}
        for column, (series, levels) in whole.items():
            zero_one = series.dtype.is_numeric() and set(series.drop_nulls().unique().to_list()) <= {0, 1}
            moved = standard and column != uses.offset and not zero_one
            if column in uses.roles:
                moved = standard and column == uses.response and uses.standard_response
            role = uses.roles.get(column, "covariate")
            found[column] = declare(column, series, given.get(column, {}), role, levels, moved)
        return found

    found = declare_all(standardize)
    if not standardize:
        return found
    no_intercept = INTERCEPT not in Design(formula, found).names
    if design_map(formula, found) is None or (found[uses.response].center and no_intercept):
        # Centring cannot be undone, as for an interaction without its main effects: the numbers stay as they are.
        return declare_all(False)
    return found


def _scales(
    whole: Mapping[str, _Values],
    declared: Mapping[str, Column],
    uses: _Uses,
    design: Design,
    family: str | Model,
    given: Mapping[str, Mapping[str, Any]],
) -> Scales:
    """What the default prior is made of: places of the values, or scales that ``given`` states."""
    complete = _complete(whole)
    numbers = {name: _numbers(series.filter(complete), declared[name]) for name, (series, _) in whole.items()}
    stated = {name: "scale" in given.get(name, {}) for name in uses.covariates}
    covariates = {name: place_covariate(declared[name], numbers[name], known) for name, known in stated.items()}
    for one in design.functions:
        basis = None if one.kind == "C" else one.basis(one.argument(numbers))
        covariates |= place_function(one.names, basis, one.kind in SPLINES)
    if isinstance(family, Model):
        return Scales(covariates, Place(), known=False)
    offset = None if uses.offset is None else numbers[uses.offset]
    if design.offsets:
        offset = np.sum([one.argument(numbers) for one in design.offsets], 0)
    if offset is not None and uses.offset in uses.roles:
        offset = np.log(offset)
    if offset is not None and uses.offset not in uses.roles and np.ptp(offset) > MOST_OFFSET:
        write = f"give exposure={uses.offset!r}" if uses.offset else "write offset(log(...))"
        added = "An offset is added to the linear predictor, as a logarithm. For times at risk or numbers of persons, whose "
        values = f"values of {uses.offset or 'offset(...)'!r} from {offset.min():g} to {offset.max():g}"
        raise InputError("offset", values, f"{added}logarithm is to be added, {write}.")
    died = numbers[uses.died] if uses.died else None
    seen = Seen(numbers[uses.response], offset, died)
    return Scales(covariates, place_response(FAMILIES[family], declared[uses.response], seen))


def _complete(whole: Mapping[str, _Values]) -> pl.Series:
    """Which records have no missing value."""
    found = pl.DataFrame([series.is_not_null().alias(name) for name, (series, _) in whole.items()]).min_horizontal()
    if not found.any():
        raise InputError("table", "a missing value in every record", "Leave empty columns out of the formula.")
    return found


def _freeze(
    formula: str, functions: Sequence[FormulaFunction], whole: Mapping[str, _Values]
) -> tuple[str, dict[str, dict[str, Any]]]:
    """The formula with all that functions need to know, from all complete records; and declarations of their columns."""
    declared: dict[str, dict[str, Any]] = {}
    for one in (one for one in functions if one.kind == "C"):
        levels = one.settings.get("levels")
        declared |= {one.columns[0]: {"type": "level"} | ({"levels": levels} if levels else {})}
    if not functions:
        return formula, declared
    complete, values, ranges = _complete(whole), {}, {}
    for name in set().union(*(one.columns for one in functions if one.kind != "C")):
        own, seen = [one for one in functions if name in one.columns], whole[name][0].filter(complete)
        numbers = seen.cast(pl.Float64, strict=False)
        if numbers.is_null().any():
            remedy = f"Functions are of numbers: write C({name}) for levels, or the column itself."
            raise InputError(f"column {name!r}", "text, in a function of the formula", remedy)
        values[name] = numbers.to_numpy()
        low, high = outward(values[name])
        wide = numbers_bounds(values[name], "number", positive=values[name].min() > 0)
        ranges[name] = (low if low > 0 else wide[0] if wide[0] > 0 else low, high)
        declared[name] = {"center": 0.0, "scale": 1.0}
        if any(re.search(POSITIVE, one.text) for one in own) and wide[0] > 0:
            declared[name]["bounds"] = wide
        if any(one.kind == "bs" for one in own):
            # It has ends, which no value may be beyond.
            settings, (low, high) = [one.settings for one in own if one.short == f"bs({name})"], ranges[name]
            low = max((one.get("lower", low) for one in settings), default=low)
            declared[name]["bounds"] = low, min((one.get("upper", high) for one in settings), default=high)
    return freeze(formula, values, ranges), declared


def _numbers(seen: pl.Series, column: Column) -> np.ndarray:
    """Values as numbers; levels as 0, 1 and so on."""
    if column.type != "level":
        return seen.cast(pl.Float64).to_numpy()
    names = _as_declared(seen, column).cast(pl.String)
    return names.replace_strict(list(column.levels), range(len(column.levels)), default=0).to_numpy()


def _join(series: Sequence[pl.Series]) -> pl.Series:
    kinds = {one.dtype for one in series}
    kind = kinds.pop() if len(kinds) == 1 else pl.Float64 if pl.String not in kinds else pl.String
    return pl.concat([one.cast(kind) for one in series])


def check_table(study: Study, table: Any, where: str = "table", *, response: bool = True) -> pd.DataFrame:
    """The columns of a table that a study declares, in the units of the model.

    Raises
    ------
    InputError
    """
    # A prediction needs the formula's terms and the offset.
    of_formula = {*study.design.used, study.model.columns.get("offset")} - {study.design.response_name}
    needed = [column for column in study.columns if response or column in of_formula]
    raw = as_columns(table, needed, where)
    count = len(next(iter(raw.values())))
    if not count:
        raise InputError(where, "no records", "Give at least one record.")
    raw = {column: _as_declared(series, study.columns[column]) for column, series in raw.items()}
    splines = study.formula and any(function.kind == "bs" for function in study.design.functions)
    return check_records(study, raw, Origin(where, None), count, widen=WIDEN + WIDEN_SPLINES * bool(splines))


def _as_declared(series: pl.Series, column: Column) -> pl.Series:
    """Whole numbers that a table holds as floats because a value is missing are levels like any other."""
    if column.type == "level" and series.dtype == pl.Float64:
        return series.cast(pl.Int64, strict=False)
    return series
