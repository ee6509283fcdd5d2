"""A text that describes what a study models and what its sites release."""

from __future__ import annotations

import re
from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from fedpdmc.models.families import FAMILIES
from fedpdmc.study.contract import OriginalUnits
from fedpdmc.study.formula import CURVES, INTERCEPT
from fedpdmc.study.prior_names import Prior

if TYPE_CHECKING:
    import pandas as pd

    from fedpdmc.study.contract import Study
    from fedpdmc.study.schema import Column

DERIVATIVES = {
    "none": [],
    "noisy": ["derivatives with noise"],
    "noisy-summed": ["derivatives summed over the sites, with noise that they share"],
    "summed": ["derivatives summed over the sites"],
    "own": ["each site's derivatives"],
}
DEFAULT = "weakly informative (all terms together explain about half of the variation), "


def modelled(study: Study, prior: Prior | None = None) -> list[str]:
    """Family and formula, parameters, prior, and how columns enter."""
    first, default = study.model.title, DEFAULT if prior is not None and prior.default else ""
    first += f", {study.formula}" if study.formula else ""
    first += f" ({study.model_file}, SHA-256 {study.model_digest})" if study.model_file else ""
    found = [first, f"parameters: {', '.join(study.names)}", f"prior: {default}{'; '.join(prior_lines(study, prior))}"]
    scaled = [words for column in study.columns.values() if (words := scaling(column))]
    if scaled:
        undone = "; results are per original unit" if isinstance(study.naming, OriginalUnits) else ""
        found.append(f"the model takes {', '.join(scaled)}{undone}")
    family = FAMILIES.get(study.family)
    response = None if family is None else study.columns[study.design.response_name]
    if family is not None and response is not None and family.ordered:
        found.append(f"the levels of {response.name} in their order: {' < '.join(response.levels)}")
    if study.weights is not None:
        found.append(
            f"each record counts with its weight {study.weights}; intervals take no account of how records were sampled"
        )
    status = study.columns.get(study.model.columns.get("died", ""))
    if study.survival and status is not None and status.levels:
        found.append(f"times with {status.name} = {status.levels[1]!r} are of events")
    if response is None or family is None:
        return found
    if (trials := study.model.trials) is not None:
        found.append(f"{response.name} counts the events among {trials} trials, whose probability is modelled")
    elif family.response == response.type == "level":
        found.append(f"the probability of {response.name} = {response.levels[1]!r} is modelled")
    return found


def released(study: Study) -> list[str]:
    """What sites release."""
    passes = ["number of passes over the records"] if study.passes else []
    fit = [f"of the fit of their records: {', '.join(study.assessment)}"] if study.assessment else []
    arrivals = [] if study.one_shot else ["arrivals"]
    return [*arrivals, *DERIVATIVES[study.derivatives], *passes, *fit]


def choice(study: Study) -> list[str]:
    """What an organiser is told of a contract whose plans the coordinator chooses."""
    words = "the operator of the coordinator can choose where records are asked; sites refuse, unless their policies"
    return [f"{why}: {words} have coordinator_may_choose = true"] if (why := study.coordinator_chooses) else []


def effect_scale(study: Study, tables: Mapping[str, pd.DataFrame] | None = None) -> dict[str, Any] | None:
    """How coefficients are read: the scale of their family, and by how much each column increases (`EffectScale`).

    An increment is a round number near the standard deviation of the column's values, or of its declared scale; one unit of
    columns of zeros and ones; twice as much of a column that enters by its logarithm. None without a linear predictor.
    """
    if study.model.design is None:
        return None
    design, response = study.design, study.columns[study.design.response_name]
    original = study.units == "original"
    columns = {}
    for name in sorted({one for factors in design.factors for one in factors if one in study.columns}):
        if (column := study.columns[name]).type != "level":
            values = [
                np.asarray(table[name], float) * column.scale + column.center for table in (tables or {}).values()
            ]
            by = 2.0 if column.log else _increment(column, np.concatenate(values) if values else np.zeros(0))
            columns[name] = {"by": by, "log": column.log, "scale": 1.0 if original else column.scale}
    baselines = {column: (column, one.levels[0]) for column, one in study.columns.items() if one.levels}
    baselines |= {one.label: (one.columns[0], one.settings["coding"]) for one in design.functions if one.kind == "C"}
    curves = {name for one in design.functions if one.kind in CURVES for name in one.names}
    terms = {}
    for name, (term, factors) in zip(
        study.names, study.model.entries * list(zip(design.names, design.factors, strict=True)), strict=False
    ):
        parts = term.split(":") if len(term.split(":")) == len(factors) else [term]
        label = name.replace(term, " × ".join(_plain_level(part, baselines) for part in parts))
        own = {"label": label, "columns": [one for one in factors if one in columns]}
        terms[name] = own | ({"aside": True} if term == INTERCEPT or curves & set(factors) else {})
    family = FAMILIES.get(study.family)
    ratios = {} if family is None else dict(family.ratios)
    if response.type == "number" and response.log:
        ratios = {"ratio of geometric means": None}
    latent = "the latent variable of " if family is not None and family.ordered else ""
    kinds = ratios or {f"difference in {latent}{response.name}": None}
    scale = 1.0 if original or response.type == "level" else response.scale
    return {"kinds": kinds, "ratio": bool(ratios), "scale": scale, "columns": columns, "terms": terms}


def _increment(column: Column, values: np.ndarray) -> float | None:
    """One, two or five times a power of ten, near the standard deviation; at least one if all are whole; None if 0 or 1."""
    whole = values.size and np.allclose(values, np.round(values))
    if (whole and set(np.round(values)) <= {0.0, 1.0}) or (not values.size and column.bounds == (0.0, 1.0)):
        return None
    spread = float(values.std()) if values.size else column.scale
    if not spread > 0:
        return 1.0
    tens = 10.0 ** np.floor(np.log10(spread))
    near = float(min((tens * step for step in (1.0, 2.0, 5.0, 10.0)), key=lambda x: abs(np.log(x / spread))))
    return max(float(f"{near:.3g}"), 1.0 if whole else 0.0)


def _plain_level(part: str, baselines: Mapping[str, tuple[str, str]]) -> str:
    """``drug[T.verum]`` as ``drug: verum vs placebo``, and ``C(drug)[T.verum]`` too."""
    found = re.fullmatch(r"(.*?)\[(?:T\.)?(.*)\]", part)
    if found is None or found[1] not in baselines:
        return part
    column, baseline = baselines[found[1]]
    return f"{column}: {found[2]}" + (f" vs {baseline}" if found[2] != baseline else "")


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
    if column.type == "level" or column.plain:
        return ""
    name = f"log({column.name})" if column.log else column.name
    moved = f"({name} {'−' if column.center > 0 else '+'} {abs(column.center):g})" if column.center else name
    return moved if column.scale == 1 else f"{moved}/{column.scale:g}"
