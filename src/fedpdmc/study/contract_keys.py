"""The tables of a contract, each read and checked by itself."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from fedpdmc.errors import InputError
from fedpdmc.models.families import FAMILIES as RECORD_FAMILIES
from fedpdmc.models.grouped import FAMILIES as GROUPED_FAMILIES
from fedpdmc.models.grouped import SPREADS
from fedpdmc.models.mixture_prior import MOST_DF
from fedpdmc.privacy.schedule import PRIVATE_LAPLACE
from fedpdmc.study.column import Column
from fedpdmc.study.contract_model import FILE, read_model
from fedpdmc.study.formula import columns_of
from fedpdmc.study.mixed_formula import SITE, Effects, is_mixed, parse_mixed
from fedpdmc.study.strict_toml import Table
from fedpdmc.validation import one_script

# Families of a linear predictor with bounds of their own; all others are models of one record.
PREDICTOR_FAMILIES = ("linear", "logistic", "poisson", "student_t")
FAMILIES = (*PREDICTOR_FAMILIES, *RECORD_FAMILIES)
# In a formula, names other than letters, digits, dots and underscores are in backticks.
COLUMN_NAME = re.compile(r"(?=.{1,64}$)[^\W\d]([^:;,|~`+\"'\\\[\]]*[^\s:;,|~`+\"'\\\[\]])?")
VALUES = ("number", "count", "level")
TYPES = (*VALUES, "key")
QUARTER_TURNS = "quarter-turns"
# Dynamics, with the usual rates.
KINDS = {"ZigZag": {"excess": 0.0}, "BouncyParticle": {"refresh": 1.0}, "Boomerang": {"refresh": QUARTER_TURNS},
         "FactorisedBoomerang": {"refresh": 1.0, "excess": 0.0}}  # fmt: skip
# What sites may release of their derivatives, from least to most.
DERIVATIVES = ("none", "noisy", "noisy-summed", "summed", "own")
# What sites may report about the fit to their records after the run: see fedpdmc.assessment.
ASSESSMENTS = ("loo", "checks", "influence")


def read_columns(table: Table) -> dict[str, Column]:
    """The declared columns."""
    columns = {}
    for name in table.keys():
        if not COLUMN_NAME.fullmatch(name) or not name.isprintable() or not one_script(name):
            remedy = "Use letters of one script, digits, and at most 64 characters without : ; , | ~ ` [ ] + or quotes."
            raise InputError(f"{table.where}: {name}", repr(name), remedy)
        one = table.table(name)
        kind = one.text("type", among=TYPES)
        if kind == "key":
            columns[name] = Column(name, kind)
        elif kind == "level":
            columns[name] = Column(name, kind, levels=one.texts("levels", least=2))
        else:
            bounds = one.numbers("bounds")
            log = one.flag("log", False)
            if not isinstance(bounds, tuple) or len(bounds) != 2 or not bounds[0] < bounds[1]:
                raise InputError(f"{one.where}: bounds", repr(bounds), "Give [least, most].")
            if log and bounds[0] <= 0:
                raise InputError(f"{one.where}: bounds", repr(bounds), "A logarithm needs a positive least value.")
            if kind == "count" and bounds[0] < 0:
                raise InputError(f"{one.where}: bounds", repr(bounds), "Counts are zero or positive.")
            scale = one.number("scale", 1.0, least=1e-300)
            columns[name] = Column(name, kind, (), bounds, one.number("center", 0.0), scale, log)
        one.done()
    return columns


def read_likelihood(
    table: Table, columns: dict[str, Column], sites: tuple[str, ...], file: Callable[[str], bytes]
) -> dict[str, Any]:
    """The family or the model file, with the formula."""
    if is_mixed(table.values.get("formula")):
        return _mixed(table, columns, sites, file)
    if FILE in table.values or table.values.get("family") in RECORD_FAMILIES:
        model = read_model(table, columns, sites, file)
        named = table.values.get("family", FILE)
        return {"family": named, "options": {}, "formula": table.values.get("formula", ""), "model": model}
    family, options = table.text("family", among=FAMILIES), {}
    if family == "student_t" or (family == "linear" and "scale" in table.values):
        options["scale"] = table.number("scale", least=1e-300)
    elif family == "linear":
        table.number("scale", None)
    if family == "student_t":
        options["df"] = table.number("df", least=1e-3)
    formula = table.text("formula")
    if family == "poisson":
        options |= _offset(table, columns, formula)
    units = table.text("units", "declared", among=("declared", "original"))
    table.done()
    return {"family": family, "options": options, "formula": formula, "units": units}


def _offset(table: Table, columns: dict[str, Column], formula: str) -> dict[str, Any]:
    """The column that is added to the linear predictor: an offset as it is, an exposure as its logarithm."""
    given = {key: name for key in ("offset", "exposure") if (name := table.text(key, None)) is not None}
    if len(given) == 2:
        raise table.invalid("offset", "Give an offset or an exposure, not both.")
    for key, name in given.items():
        column, logged = columns.get(name), key == "exposure"
        if column is None or column.type in ("level", "key"):
            raise table.invalid(key, "Name a declared column of numbers.")
        if logged and not (column.bounds[0] > 0 and column.center == 0 and column.scale == 1 and not column.log):
            raise table.invalid(key, "An exposure has a positive least bound, and neither center, scale nor log.")
        if logged and name in columns_of(formula)[1]:
            raise table.invalid(
                key, f"{name!r} is a term of the formula too: add a copy of the column for one of them."
            )
        if column.log and not logged:
            remedy = f"write exposure = {name!r} and remove log = true from the column"
            raise table.invalid(key, f"An offset is on the scale of the linear predictor. For a time at risk {remedy}.")
        columns[name] = dataclasses.replace(column, log=logged)
    return {"offset": next(iter(given.values()))} if given else {}


def of_record(family: Any, options: Any) -> bool:
    """Whether a family with effects is a model of one record: a negative binomial is one unless its size is known."""
    return family in RECORD_FAMILIES and not (family in GROUPED_FAMILIES and "size" in options)


def _mixed(
    table: Table, columns: dict[str, Column], sites: tuple[str, ...], file: Callable[[str], bytes]
) -> dict[str, Any]:
    """A family or a model file with effects of groups."""
    formula = table.text("formula")
    parsed = parse_mixed(formula, f"{table.where}: formula")
    found: dict[str, Any] = {"formula": formula, "options": {}, "effects": Effects(parsed)}
    if FILE in table.values or of_record(table.values.get("family"), table.values):
        found |= {"family": table.values.get("family", FILE), "model": read_model(table, columns, sites, file, parsed)}
    else:
        found |= _predictor_with_effects(table, columns, parsed.fixed)
    groups = columns.get(parsed.groups)
    if groups is None and parsed.groups != SITE or groups is not None and groups.type != "key":
        raise table.invalid(
            "formula", f"{parsed.groups!r} must be a column of type 'key', or {SITE!r}: the site is the group."
        )
    if parsed.slope is not None and (
        parsed.slope not in columns or columns[parsed.slope].type not in ("number", "count")
    ):
        raise table.invalid("formula", f"{parsed.slope!r} must be a declared column of numbers.")
    return found


def _predictor_with_effects(table: Table, columns: dict[str, Column], fixed: str) -> dict[str, Any]:
    """A family with bounds of its own."""
    family = table.text("family", among=tuple(dict.fromkeys((*GROUPED_FAMILIES, *RECORD_FAMILIES))))
    options: dict[str, Any] = {}
    for name in {"student_t": ("scale", "df"), "negative_binomial": ("size",)}.get(family, ()):
        options[name] = table.number(name, least=1e-300)
    if family in ("poisson", "negative_binomial"):
        options |= _offset(table, columns, fixed)
    units = table.text("units", "declared", among=("declared", "original"))
    table.done()
    return {"family": family, "options": options, "units": units}


def read_prior(table: Table, effects: Effects | None = None) -> dict[str, Any]:
    """The prior; with effects also that of their spreads."""
    flat = table.flag("flat", False)
    mean, scale = table.numbers("mean", 0.0), None if flat else table.numbers("scale")
    if scale is not None and np.min(scale) <= 0:
        raise InputError(f"{table.where}: scale", repr(scale), "Give positive standard deviations.")
    found: dict[str, Any] = {"prior_mean": mean, "prior_scale": scale}
    if effects is not None:
        found["effects"] = dataclasses.replace(
            effects,
            spread=table.text("spread", effects.spread, among=SPREADS),
            spread_scale=table.number("spread_scale", effects.spread_scale, least=1e-300),
            correlation_scale=table.number("correlation_scale", effects.correlation_scale, least=1e-300),
        )
    heavy = table.table("student_t", None)
    found["prior_df"] = {name: heavy.whole(name, least=1, most=MOST_DF) for name in heavy.keys()}
    if "horseshoe" in table.values:
        own = table.table("horseshoe")
        found["prior_horseshoe"] = own.texts("on")
        found["prior_global_scale"] = own.number("scale", least=1e-300)
        own.done()
    table.done()
    return found


def read_dynamics(table: Table) -> dict[str, Any]:
    """The dynamics, the reference and the number of chains."""
    few = "kind" not in table.values
    kind = table.text("kind", "Boomerang", among=tuple(KINDS))
    rates: dict[str, float | str] = {}
    for rate, usual in KINDS[kind].items():
        turning = kind.endswith("Boomerang") and rate == "refresh" and isinstance(table.values.get(rate, usual), str)
        rates[rate] = (
            table.text(rate, usual, among=(QUARTER_TURNS,)) if turning else table.number(rate, usual, least=0.0)
        )
    reference = table.text("reference", "vb" if few else "none", among=("vb", "laplace", "none"))
    control = table.text("control", "quadratic" if few else "none", among=("none", "linear", "quadratic"))
    chains = table.whole("chains", 64, least=1, most=2**16)
    table.done()
    return {"kind": kind, "rates": rates, "reference": reference, "control": control, "chains": chains}


def read_run(table: Table) -> dict[str, Any]:
    """When the run ends, and by which method."""
    ess, duration = (table.number(key, None, least=1e-300) for key in ("ess", "duration"))
    if ess is not None and duration is not None:
        raise InputError(table.where, "ess and duration", "Give one of them.")
    burn_in = table.number("burn_in", None, least=0.0)
    method = table.text("method", "exact", among=("exact", PRIVATE_LAPLACE))
    table.done()
    ess = 1000.0 if ess is None and duration is None else ess
    return {"ess": ess, "duration": duration, "burn_in": burn_in, "method": method}


def read_releases(releases: Table, limits: Table, one_shot: bool) -> dict[str, Any]:
    """What sites release, and how much of it."""
    if releases.flag("arrivals", not one_shot) == one_shot:
        found, right = ("true", "false") if one_shot else ("false", "true")
        raise InputError(
            f"{releases.where}: arrivals", f"{found} with this [run] method", f"Set it to {right}, or remove it."
        )
    derivatives, passes = releases.text("derivatives", "none", among=DERIVATIVES), releases.flag("passes", False)
    assessment = releases.texts("assessment", ())
    if not set(assessment) <= set(ASSESSMENTS):
        raise releases.invalid("assessment", f"Give some of {', '.join(map(repr, ASSESSMENTS))}.")
    releases.done()
    found = {
        "derivatives": derivatives,
        "passes": passes,
        "assessment": assessment,
        "rounds": limits.whole("rounds", least=1, most=2**62),
        "most_derivatives": limits.whole("derivatives", 12, least=0),
        "most_records": limits.whole("records", 1_000_000, least=1),
        "observed_time": limits.number("observed_time", *((1.0,) if one_shot else ()), least=1e-300),
    }
    limits.done()
    return found


def read_privacy(top: Table) -> dict[str, Any]:
    """The privacy budget."""
    if "privacy" not in top.values:
        return {}
    table = top.table("privacy")
    found = {
        "epsilon": table.number("epsilon", least=1e-6),
        "delta": table.number("delta", least=1e-300, most=0.5),
        "neighbours": table.text("neighbours", "replace", among=("replace", "add-remove", "label")),
        "excess": table.number("excess", None, least=1e-300),
        "region": table.numbers("region", None) if "region" in table.values else None,
        "release": table.number("release", 0.0, least=0.0, most=0.99),
        "colluding": table.whole("colluding", None, least=0) if "colluding" in table.values else None,
    }
    table.done()
    return found


def read_parameters(top: Table, sites: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """The table [coordinates]: parameters of sites whose records do not depend on all of them."""
    if "coordinates" not in top.values:
        return {}
    table = top.table("coordinates")
    found = {site: table.texts(site) for site in sites if site in table.values}
    table.done()
    return found
