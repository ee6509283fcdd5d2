"""The default prior of a regression: from the places and spreads of the values, never from declared bounds.

All terms together get the spread τ of the response on the scale of the linear predictor, ``τ²/p`` for each of p terms in
units of its column's standard deviation: R² is about one half whatever p is. In a linear regression of n records the prior
has ``(1 − R²) p/n`` of the information about a coefficient, so it moves an estimate by at most ``p/(2√n)`` standard errors.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from scipy import stats

from fedpdmc.study.column import Column
from fedpdmc.study.formula import Design
from fedpdmc.study.units import INTERCEPT

# Standard deviation of the intercept, the predictor at average covariates, in units of τ.
INTERCEPT_SD = 5.0
# Standard deviation of other parameters, which are logarithms or logits: log σ, a log shape, a log gap.
AUXILIARY_SD = 2.0
# τ: the error's standard deviation on the latent scale of a logistic regression and on that of a log hazard.
LOGISTIC_SD = float(np.pi / np.sqrt(3))
LOG_HAZARD_SD = float(np.pi / np.sqrt(6))
# Levels that are far apart on a latent scale differ more than two levels do.
MULTINOMIAL_SD = 2 * LOGISTIC_SD
# Spread of a level or of zeros and ones, whatever their shares: a rare level is no reason for a wide prior.
LEVEL_SPREAD = 0.5
DIGITS = 2  # of spreads and places, so that a contract reveals little about the records
BISECTIONS = 60
COUNTS = ("poisson", "negative_binomial", "zero_inflated_poisson")
LOGITS = ("logistic", "ordered_logit", "multinomial_logit", "beta", "beta_binomial")
ORDERED = ("ordered_logit", "ordered_probit")
# Parameters that are in place of an intercept.
IN_PLACE = ("first_cut", "log_hazard")


@dataclass(frozen=True)
class Place:
    """Where values are and how far they spread, in the units of the model."""

    center: float = 0.0
    spread: float = 1.0
    level: bool = False


@dataclass(frozen=True)
class Scales:
    """What the default prior is made of.

    Attributes
    ----------
    covariates : dict of Place
    response : Place
        On the scale of the linear predictor.
    others : dict
        Prior means of other parameters, such as ``log_shape``.
    known : bool
        Whether the family says what its predictor is; if not, the response's place is a guess.
    """

    covariates: dict[str, Place]
    response: Place
    others: dict[str, float] = field(default_factory=dict)
    known: bool = True


def place_covariate(column: Column, values: np.ndarray, stated: bool) -> Place:
    """The place of a covariate: 1 for one that is centred and scaled, or whose scale is stated; else that of its values."""
    if column.type == "level":
        return Place(0.0, LEVEL_SPREAD, level=True)
    if set(np.unique(values)) <= {0.0, 1.0} and not column.log:
        return Place(0.0, LEVEL_SPREAD / column.scale, level=True)
    found = _place(in_model_units(column, values))
    scaled = stated or column.scale != 1
    return Place(0.0 if column.center else found.center, 1.0 if scaled else found.spread)


def place_response(
    family: str, column: Column, values: np.ndarray, offset: np.ndarray | None, died: np.ndarray | None
) -> tuple[Place, dict[str, float]]:
    """The response's place on the scale of the linear predictor, and prior means of the family's other parameters.

    Counts: the log of the rate, and the spread of a log-normal law with their variance, at least that of a log exponential.
    Survival: a Weibull law without covariates, which takes account of censoring.
    """
    if family in ("linear", "student_t"):
        place = _place(in_model_units(column, values)) if column.scale == 1 else Place()
        return place, {"log_sigma": _round(np.log(place.spread))}
    if family in COUNTS:
        return _place_counts(values, np.ones(len(values)) if offset is None else np.exp(offset)), {}
    if family == "gamma":
        spread = _place(np.log(values)).spread
        return Place(_round(np.log(values.mean())), spread), {"log_shape": _round(-2 * np.log(spread))}
    if died is not None and family == "piecewise_exponential":
        return Place(_round(np.log(max(died.sum(), 0.5) / values.sum())), LOG_HAZARD_SD), {}
    if died is not None:
        scale, shape = fit_weibull(values, died)
        spread = _significant(LOG_HAZARD_SD / shape)
        others = {"log_shape": _round(np.log(shape)), "log_sigma": _round(np.log(spread))}
        return Place(_round(np.log(scale)), spread), others
    if family in ORDERED:
        return _place_levels(family, values, len(column.levels))
    if family == "multinomial_logit":
        return Place(0.0, MULTINOMIAL_SD), {}
    if family == "beta":
        share = values.mean()
        precision = share * (1 - share) / max(values.var(), 1e-12) - 1
        return Place(0.0, LOGISTIC_SD), {"log_precision": _round(np.log(max(precision, 1.0)))}
    return Place(0.0, LOGISTIC_SD if family in LOGITS else 1.0), {}


def default_prior(names: tuple[str, ...], design: Design, scales: Scales) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of the normal default prior of each parameter.

    The intercept is the predictor where all columns are zero. Columns that are not centred move it, by
    ``own_j · center_j`` for a coefficient of one prior sd ``own_j``; this is added to its variance.
    """
    place, covariates = scales.response, scales.covariates.items()
    spreads = design.products({name: one.spread for name, one in covariates})
    centers = design.products({name: 1.0 if one.level else one.center for name, one in covariates})
    centers[design.products({name: float(one.level) for name, one in covariates}) == 1] = 0.0
    slopes = np.asarray([name != INTERCEPT for name in design.names])
    own = place.spread / np.sqrt(max(slopes.sum(), 1)) / spreads
    far = np.sum((own * centers)[slopes] ** 2)
    intercept = float(np.sqrt((INTERCEPT_SD * place.spread) ** 2 + far))
    mean, scale = np.zeros(len(names)), np.full(len(names), AUXILIARY_SD)
    for i, name in enumerate(names):
        term = term_of(name, design)
        if term is not None and slopes[term]:
            scale[i] = own[term]
        elif term is not None or name.partition("[")[0] in IN_PLACE:
            mean[i], scale[i] = place.center, intercept
        else:
            mean[i] = scales.others.get(name, 0.0)
    return mean, scale


def term_of(name: str, design: Design) -> int | None:
    """Which term of the formula a parameter is the coefficient of; families of several predictors name them ``age[B]``."""
    for i, term in enumerate(design.names):
        if (
            name == term
            or (name.endswith((f" {term}", f".{term}", f"[{term}]", f":{term}")) or name.startswith(f"{term}["))
            and name not in design.names
        ):
            return i
    return None


def fit_weibull(time: np.ndarray, died: np.ndarray) -> tuple[float, float]:
    """Scale and shape of the Weibull law of censored times, by maximum likelihood; shape 1 with fewer than two events.

    The shape k solves ``Σ tᵏ log t/Σ tᵏ − 1/k = Σ_died log t/D``, whose left side rises with k.
    """
    log, events = np.log(time), float(died.sum())
    log = log - log.mean()
    shape = 1.0
    if events >= 2 and log.std() > 0:
        low, high = 1e-3, 1e3
        for _ in range(BISECTIONS):
            shape = np.sqrt(low * high)
            weight = np.exp(shape * (log - log.max()))
            rises = weight @ log / weight.sum() - 1 / shape > died @ log / events
            low, high = (low, shape) if rises else (shape, high)
    middle = np.log(time).mean()
    weight = np.mean(np.exp(shape * (log - log.max())))
    scale = np.exp(middle + log.max() + np.log(weight * len(time) / max(events, 0.5)) / shape)
    return float(scale), float(shape)


def _place_counts(values: np.ndarray, exposure: np.ndarray) -> Place:
    rate = max(values.sum(), 0.5) / exposure.sum()
    relative = np.mean((values - rate * exposure) ** 2) / (rate**2 * np.mean(exposure**2))
    return Place(_round(np.log(rate)), max(_significant(np.sqrt(np.log1p(relative))), LOG_HAZARD_SD))


def _place_levels(family: str, values: np.ndarray, levels: int) -> tuple[Place, dict[str, float]]:
    """Ordered levels: cut points at the shares of the levels, half a record added to each."""
    spread = 1.0 if family == "ordered_probit" else LOGISTIC_SD
    shares = np.bincount(values.astype(int), minlength=levels) + 0.5
    below = (np.cumsum(shares) / shares.sum())[:-1]
    cuts = stats.norm.ppf(below) if family == "ordered_probit" else np.log(below / (1 - below))
    return Place(_round(cuts[0]), spread), {f"log_gaps[{i}]": _round(x) for i, x in enumerate(np.log(np.diff(cuts)))}


def in_model_units(column: Column, values: np.ndarray) -> np.ndarray:
    """Values as they enter the model."""
    return ((np.log(values) if column.log else values) - column.center) / column.scale


def _place(values: np.ndarray) -> Place:
    spread = _significant(float(values.std())) or 1.0
    unit = 10.0 ** np.floor(np.log10(spread))
    return Place(float(f"{np.round(values.mean() / unit) * unit:.12g}"), spread)


def _significant(x: float) -> float:
    return float(f"{x:.{DIGITS}g}")


def _round(x: float) -> float:
    """A logarithm, to a tenth."""
    return round(float(x), 1) + 0.0
