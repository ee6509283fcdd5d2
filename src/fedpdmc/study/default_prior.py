"""The default prior of a regression: from the places and spreads of the values, never from declared bounds.

All terms together get the spread τ of the response on the scale of the linear predictor, ``τ²/p`` for each of p terms in
units of its column's standard deviation: R² is about one half whatever p is. In a linear regression of n records the prior
has ``(1 − R²) p/n`` of the information about a coefficient, so it moves an estimate by at most ``p/(2√n)`` standard errors.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy import stats

from fedpdmc.study.column import Column
from fedpdmc.study.formula import Design
from fedpdmc.study.units import INTERCEPT

INTERCEPT_SD = 5.0  # of the intercept, the predictor at average covariates, in units of τ
AUXILIARY_SD = 2.0  # of other parameters, which are logarithms or logits: log σ, a log shape, a log gap
LOGISTIC_SD = float(np.pi / np.sqrt(3))  # τ: the error's sd on the latent scale of a logistic regression
LOG_HAZARD_SD = float(np.pi / np.sqrt(6))  # τ of a log hazard: the sd of the logarithm of an exponential time
MULTINOMIAL_SD = 2 * LOGISTIC_SD  # levels that are far apart on a latent scale differ more than two levels do
LEVEL_SPREAD = 0.5  # of a level or of zeros and ones, whatever their shares: a rare one is no reason for a wide prior
DIGITS = 2  # of spreads and places, so that a contract reveals little about the records
BISECTIONS = 60
COUNTS = ("poisson", "negative_binomial", "zero_inflated_poisson")
LOGITS = ("logistic", "ordered_logit", "multinomial_logit", "beta", "beta_binomial")
ORDERED = ("ordered_logit", "ordered_probit")
# Parameters that are in place of an intercept.
IN_PLACE = ("first_cut", "log_hazard")


class Place(NamedTuple):
    """Where values are and how far they spread, in the units of the model."""

    center: float = 0.0
    spread: float = 1.0
    level: bool = False


class Scales(NamedTuple):
    """What the default prior is made of.

    ``response`` is on the scale of the linear predictor; ``others`` has prior means of other parameters, such as
    ``log_shape``. It is not ``known`` for a model that does not say what its predictor is.
    """

    covariates: dict[str, Place]
    response: Place
    others: dict[str, float]
    known: bool = True


def place_covariate(column: Column, values: np.ndarray, stated: bool) -> Place:
    """The place of a covariate: 1 for one that is centred and scaled, or whose scale is stated; else that of its values."""
    if column.type == "level" or set(np.unique(values)) <= {0.0, 1.0} and not column.log:
        return Place(0.0, LEVEL_SPREAD / column.scale, level=True)
    found = _place(column, values)
    return Place(0.0 if column.center else found.center, 1.0 if stated or column.scale != 1 else found.spread)


def place_response(
    family: str, column: Column, values: np.ndarray, offset: np.ndarray | None, died: np.ndarray | None
) -> tuple[Place, dict[str, float]]:
    """The response's place on the scale of the linear predictor, and prior means of the family's other parameters.

    Counts: the log of the rate, and the spread of a log-normal law with their variance, at least that of a log exponential.
    Survival: a Weibull law without covariates, which takes account of censoring. Ordered levels: cut points at their shares.
    """
    others: dict[str, float] = {}
    center, spread = 0.0, LOGISTIC_SD if family in LOGITS else 1.0
    if family in ("linear", "student_t"):
        center, spread, _ = _place(column, values) if column.scale == 1 else Place()
        others["log_sigma"] = np.log(spread)
        return Place(center, spread), _rounded(others)
    if family in COUNTS:
        exposure = np.ones(len(values)) if offset is None else np.exp(offset)
        rate = max(values.sum(), 0.5) / exposure.sum()
        relative = np.mean((values - rate * exposure) ** 2) / (rate**2 * np.mean(exposure**2))
        center, spread = np.log(rate), max(_significant(np.sqrt(np.log1p(relative))), LOG_HAZARD_SD)
    elif family == "gamma":
        center, spread = np.log(values.mean()), _significant(np.log(values).std()) or 1.0
        others["log_shape"] = -2 * np.log(spread)
    elif family == "piecewise_exponential" and died is not None:
        center, spread = np.log(max(died.sum(), 0.5) / values.sum()), LOG_HAZARD_SD
    elif died is not None:
        scale, shape = fit_weibull(values, died)
        center, spread = np.log(scale), _significant(LOG_HAZARD_SD / shape)
        others |= {"log_shape": np.log(shape), "log_sigma": np.log(spread)}
    elif family in ORDERED:
        shares = np.bincount(values.astype(int), minlength=len(column.levels)) + 0.5
        law = stats.norm if family == "ordered_probit" else stats.logistic
        cuts = law.ppf((np.cumsum(shares) / shares.sum())[:-1])
        center, others = cuts[0], {f"log_gaps[{i}]": gap for i, gap in enumerate(np.log(np.diff(cuts)))}
    elif family == "multinomial_logit":
        spread = MULTINOMIAL_SD
    elif family == "beta":
        precision = values.mean() * (1 - values.mean()) / max(values.var(), 1e-12) - 1
        others["log_precision"] = np.log(max(precision, 1.0))
    return Place(_rounded({"": center})[""], spread), _rounded(others)


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
    mean, scale = np.zeros(len(names)), np.full(len(names), AUXILIARY_SD)
    for i, name in enumerate(names):
        term = term_of(name, design)
        if term is not None and slopes[term]:
            scale[i] = own[term]
        elif term is not None or name.partition("[")[0] in IN_PLACE:
            mean[i], scale[i] = place.center, np.sqrt((INTERCEPT_SD * place.spread) ** 2 + far)
        else:
            mean[i] = scales.others.get(name, 0.0)
    return mean, scale


def term_of(name: str, design: Design) -> int | None:
    """Which term of the formula a parameter is the coefficient of; families of several predictors name them ``age[B]``."""
    for i, term in enumerate(design.names):
        ending = name.endswith((f" {term}", f".{term}", f"[{term}]", f":{term}"))
        if name == term or (ending or name.startswith(f"{term}[")) and name not in design.names:
            return i
    return None


def fit_weibull(time: np.ndarray, died: np.ndarray) -> tuple[float, float]:
    """Scale and shape of the Weibull law of censored times, by maximum likelihood; shape 1 with fewer than two events.

    The shape k solves ``Σ tᵏ log t/Σ tᵏ − 1/k = Σ_died log t/D``, whose left side rises with k.
    """
    most, events, shape = np.log(time).max(), float(died.sum()), 1.0
    log = np.log(time) - most
    low, high = (1e-3, 1e3) if events >= 2 and log.std() > 0 else (shape, shape)
    for _ in range(BISECTIONS):
        shape = float(np.sqrt(low * high))
        weight = np.exp(shape * log)
        rises = weight @ log / weight.sum() - 1 / shape > died @ log / max(events, 0.5)
        low, high = (low, shape) if rises else (shape, high)
    return float(np.exp(most + np.log(np.exp(shape * log).sum() / max(events, 0.5)) / shape)), shape


def _place(column: Column, values: np.ndarray) -> Place:
    values = ((np.log(values) if column.log else values) - column.center) / column.scale
    spread = _significant(values.std()) or 1.0
    unit = 10.0 ** np.floor(np.log10(spread))
    return Place(float(f"{np.round(values.mean() / unit) * unit:.12g}"), spread)


def _significant(x: float) -> float:
    return float(f"{x:.{DIGITS}g}")


def _rounded(logarithms: dict[str, float]) -> dict[str, float]:
    """To a tenth."""
    return {name: round(float(x), 1) + 0.0 for name, x in logarithms.items()}
