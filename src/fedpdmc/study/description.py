"""A text that describes what a study models and what its sites release."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from fedpdmc.study.default_prior import ORDERED
from fedpdmc.study.prior_names import Prior
from fedpdmc.study.units import INTERCEPT, OriginalUnits

if TYPE_CHECKING:
    from fedpdmc.study.column import Column
    from fedpdmc.study.contract import Study
    from fedpdmc.study.contract_model import BoundModel

DERIVATIVES = {
    "none": [],
    "noisy": ["derivatives with noise"],
    "noisy-summed": ["derivatives summed over the sites, with noise that they share"],
    "summed": ["derivatives summed over the sites"],
    "own": ["each site's derivatives"],
}
DEFAULT = "weakly informative (all terms together explain about half of the variation), "
# What coefficients are logarithms of.
LOG_SCALES = {"logistic": "odds", "poisson": "rates", "negative_binomial": "rates"}


def modelled(study: Study, prior: Prior | None = None) -> list[str]:
    """Family and formula, parameters, prior, and how columns enter."""
    found = [
        f"{study.family} regression, {study.formula}"
        if study.model is None
        else _of_records(study.model, study.formula),
        f"parameters: {', '.join(study.names)}",
        f"prior: {DEFAULT if prior is not None and prior.default else ''}{'; '.join(prior_lines(study, prior))}",
    ]
    scaled = [words for column in study.columns.values() if (words := scaling(column))]
    if scaled:
        undone = "; results are per original unit" if isinstance(study.naming, OriginalUnits) else ""
        found.append(f"the model takes {', '.join(scaled)}{undone}")
    if study.family in ORDERED:
        response = study.columns[study.design.response_name]
        found.append(f"the levels of {response.name} in their order: {' < '.join(response.levels)}")
    if study.model is not None:
        return found
    response = study.columns[study.design.response_name]
    if response.type == "level":
        found.append(f"the probability of {response.name} = {response.levels[1]!r} is modelled")
    return found


def _of_records(bound: BoundModel, formula: str) -> str:
    """A model of one record."""
    terms = f", {formula}" if formula else ""
    where = f" ({bound.file}, SHA-256 {bound.model.digest})" if bound.file else ""
    return f"{bound.model.source.title}{terms}{where}"


def released(study: Study) -> list[str]:
    """What sites release."""
    passes = ["number of passes over the records"] if study.passes else []
    fit = [f"of the fit of their records: {', '.join(study.assessment)}"] if study.assessment else []
    arrivals = [] if study.one_shot else ["arrivals"]
    return [*arrivals, *DERIVATIVES[study.derivatives], *passes, *fit]


def ratios(study: Study) -> dict[str, list[str]]:
    """The coefficients of covariates that are on a log scale, by what they are logarithms of; empty for other families."""
    if study.model is not None or study.family not in LOG_SCALES:
        return {}
    return {LOG_SCALES[study.family]: [name for name in study.design.names if name != INTERCEPT]}


def prior_lines(study: Study, prior: Prior | None = None) -> list[str]:
    """The law of every parameter that is sampled; ``prior`` is that of the coefficients if no contract can say it."""
    found = (Prior.of(study) if prior is None else prior).lines()
    if (effects := study.effects) is None or study.prior_scale is None:
        return found
    spreads = ["sigma"] if study.unknown_scale else []
    spreads += ["sd"] if effects.formula.slope is None else ["sd[0]", "sd[1]"]
    found.append(f"{', '.join(spreads)} ~ {effects.spread}({effects.spread_scale:.3g})")
    if effects.formula.slope is not None:
        found.append(f"atanh_correlation ~ normal(0, {effects.correlation_scale:.3g})")
    return found


def as_html(study: Study) -> str:
    """A contract as notebooks show it: what is modelled, who takes part, what is released, and its hash."""
    lines = [*modelled(study), f"sites: {', '.join(study.sites)}", f"they release: {'; '.join(released(study))}"]
    if study.epsilon is not None:
        lines.append(f"privacy: ε = {study.epsilon:g}, δ = {study.delta:g} for each site")
    shown = "<br>".join(escape(line) for line in lines)
    return f"<p><b>{escape(study.name)}</b></p><p>{shown}</p><p><small>SHA-256 {study.digest.hex()}</small></p>"


def scaling(column: Column) -> str:
    """How a column enters the model, if not unchanged."""
    if column.type == "level" or (not column.center and column.scale == 1 and not column.log):
        return ""
    name = f"log({column.name})" if column.log else column.name
    moved = f"({name} {'−' if column.center > 0 else '+'} {abs(column.center):g})" if column.center else name
    return moved if column.scale == 1 else f"{moved}/{column.scale:g}"
