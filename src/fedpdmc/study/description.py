"""A text that describes what a study models and what its sites release."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

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
# What coefficients are logarithms of.
LOG_SCALES = {"logistic": "odds", "poisson": "rates", "negative_binomial": "rates"}


def modelled(study: Study, prior: str | None = None) -> list[str]:
    """Family and formula, parameters, prior, and how columns enter."""
    found = [
        f"{study.family} regression, {study.formula}"
        if study.model is None
        else _of_records(study.model, study.formula),
        f"parameters: {', '.join(study.names)}",
        f"prior: {_prior(study) if prior is None else prior}",
    ]
    scaled = [words for column in study.columns.values() if (words := scaling(column))]
    if scaled:
        undone = "; results are per original unit" if isinstance(study.naming, OriginalUnits) else ""
        found.append(f"the model takes {', '.join(scaled)}{undone}")
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


def spread_words(study: Study) -> str:
    """The prior of the spreads of effects, to follow that of the coefficients."""
    if study.effects is None:
        return ""
    return f"; of each spread {study.effects.spread} with scale {study.effects.spread_scale:g}"


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


def _prior(study: Study) -> str:
    if study.prior_scale is None:
        return "flat"
    scale = study.prior_scale if isinstance(study.prior_scale, tuple) else (study.prior_scale,)
    found = f"normal, with standard deviations {', '.join(f'{x:g}' for x in scale)}"
    if study.prior_df:
        told = ", ".join(f"{name} ({df} degrees of freedom)" for name, df in study.prior_df.items())
        found += f"; Student-t with these scales: {told}"
    if study.prior_horseshoe:
        shrunk = ", ".join(study.prior_horseshoe)
        found += f"; horseshoe of global scale {study.prior_global_scale:g} with these slabs: {shrunk}"
    return found + spread_words(study)
