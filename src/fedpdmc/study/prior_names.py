"""Priors by name, for the coefficients of a formula."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedpdmc.errors import InputError
from fedpdmc.models.mixture_prior import MOST_DF, mixture_prior
from fedpdmc.study.column import Column
from fedpdmc.study.contract import LOG_SIGMA, Study
from fedpdmc.study.formula import Design
from fedpdmc.study.units import INTERCEPT

CALL = re.compile(r"\s*(\w+)\s*(?:\(([^()]*)\))?\s*")
OTHERS = "others"
GIVE = (
    "Give 'normal(mean, sd)', 'student_t(df, mean, scale)' with whole degrees of freedom, 'horseshoe(global scale)' or "
    "'horseshoe(global scale, slab)', or 'flat'."
)
# Slab of a horseshoe, for coefficients of scaled columns.
SLAB = 2.5
# Standard deviation of the linear predictor under the default prior: the error's own, so that R² is about a half. On the
# latent scale of a logistic regression that is π/√3; a Poisson rate varies by a factor of e.
LATENT_SD = float(np.pi / np.sqrt(3))
PREDICTOR_SD = {"poisson": 1.0} | dict.fromkeys(
    ("logistic", "ordered_logit", "multinomial_logit", "beta", "beta_binomial"), LATENT_SD
)
# The intercept is at average covariates; others are log σ of a standardised response, a log shape, and the like.
INTERCEPT_SD, AUXILIARY_SD = 5.0, 2.0
# Maximum number of parameters whose scales in the default prior are listed one by one.
MOST_SCALES = 12


@dataclass(frozen=True)
class Prior:
    """Independent priors of the parameters, and a horseshoe on some of them.

    ``df`` is infinite for normal priors, ``scale`` for flat ones; for a horseshoe's parameters ``scale`` is the slab.
    """

    names: tuple[str, ...]
    mean: np.ndarray
    scale: np.ndarray
    df: np.ndarray
    words: str
    horseshoe: tuple[int, ...] = ()
    global_scale: float = 1.0

    @property
    def in_contracts(self) -> bool:
        """Whether a contract can express it."""
        flat = np.isinf(self.scale)
        return bool(flat.all() or not flat.any())

    @property
    def normal(self) -> bool:
        """Whether all parameters have normal priors."""
        return bool(np.all(np.isinf(self.df)) and np.all(np.isfinite(self.scale)) and not self.horseshoe)

    def table(self) -> dict[str, Any]:
        """The contract's table; if only some are flat, it makes all flat."""
        if np.isinf(self.scale).any():
            return {"flat": True}
        heavy = np.flatnonzero(np.isfinite(self.df))
        found: dict[str, Any] = {
            "mean": [float(x) for x in self.mean],
            "scale": [float(f"{x:.3g}") for x in self.scale],
        }
        if heavy.size:
            found["student_t"] = {self.names[i]: int(self.df[i]) for i in heavy}
        if self.horseshoe:
            found["horseshoe"] = {"on": [self.names[i] for i in self.horseshoe], "scale": self.global_scale}
        return found

    def potential(self, study: Study) -> Any:
        """The prior as `fedpdmc.sample` takes it: that of the contract, if it can express it."""
        if self.in_contracts:
            return study.prior()
        heavy = np.flatnonzero(np.isfinite(self.df))
        made = mixture_prior(
            self.mean, self.scale, {int(i): int(self.df[i]) for i in heavy}, self.horseshoe, self.global_scale
        )
        return made if made.index else made.normal


def prior_by_name(
    told: str | Mapping[str, str] | None,
    names: tuple[str, ...],
    design: Design,
    columns: Mapping[str, Column],
    family: str,
) -> Prior:
    """The prior that was named, or the default.

    The default is normal. All coefficients but the intercept share the variance ``τ²`` of the linear predictor: ``τ²/p``
    for each of p terms in units of its column's standard deviation (1 for a standardised column, ½ for a level), with τ the
    standard deviation of the error. The prior's R² is about one half whatever p is.
    """
    mean, scale, df = _default(names, design, columns, family)
    if told is None:
        usual = "weakly informative (all terms together explain about half of the variation)"
        return Prior(names, mean, scale, df, f"{usual}, normal with {_scales(names, scale)}")
    if isinstance(told, str):
        told = {OTHERS: told}
    stray = sorted(set(told) - {*names, OTHERS})
    if stray:
        raise InputError("prior", f"a prior of {stray[0]!r}", f"The parameters are {', '.join(names)}; or {OTHERS!r}.")
    shrunk: dict[int, float] = {}
    for i, name in enumerate(names):
        words = told.get(name, told.get(OTHERS))
        # If given for all, it is the prior of the coefficients only, not of other parameters such as log σ.
        if words is None or (name not in told and _term(name, design) is None):
            continue
        mean_i, scale_i, df_i, global_scale = _parsed(name, words)
        if global_scale is not None:
            if name not in told and design.names[_term(name, design) or 0] == INTERCEPT:
                # The intercept, the predictor at average covariates, has no value to shrink to.
                continue
            shrunk[i] = global_scale
        mean[i], scale[i], df[i] = mean_i, scale_i, df_i
    if len(set(shrunk.values())) > 1:
        raise InputError("prior", "horseshoes of different global scales", "Give one: its members share it.")
    said = ", ".join(f"{name}: {words}" for name, words in told.items())
    return Prior(names, mean, scale, df, said, tuple(shrunk), next(iter(shrunk.values()), 1.0))


def _scales(names: tuple[str, ...], scale: np.ndarray) -> str:
    """The standard deviations as a text, as they enter the model."""
    if len(names) > MOST_SCALES:
        return f"standard deviations from {scale.min():.3g} to {scale.max():.3g}"
    return f"standard deviations {', '.join(f'{x:.3g} ({name})' for name, x in zip(names, scale, strict=True))}"


def _default(names: tuple[str, ...], design: Design, columns: Mapping[str, Column], family: str):
    spread = PREDICTOR_SD.get(family, 1.0)
    if family in ("linear", "student_t") and LOG_SIGMA not in names:
        # The response has its own units: a fifth of the range that is allowed.
        low, high = columns[design.response_name].range
        spread = (high - low) / 5
    terms = max(sum(name != INTERCEPT for name in design.names), 1)
    own = spread / np.sqrt(terms) / design.spread
    scale = np.full(len(names), AUXILIARY_SD)
    for i, name in enumerate(names):
        term = _term(name, design)
        if term is not None:
            scale[i] = INTERCEPT_SD * spread if design.names[term] == INTERCEPT else own[term]
    return np.zeros(len(scale)), scale, np.full(len(scale), np.inf)


def _term(name: str, design: Design) -> int | None:
    """Which term of the formula a parameter is the coefficient of; families of several predictors name them ``B: age``."""
    for i, term in enumerate(design.names):
        if (
            name == term
            or name.endswith((f" {term}", f".{term}", f"[{term}]", f":{term}"))
            and name not in design.names
        ):
            return i
    return None


def _parsed(name: str, words: str) -> tuple[float, float, float, float | None]:
    """Mean, scale (for a horseshoe, its slab), degrees of freedom, and the global scale of a horseshoe."""
    match = CALL.fullmatch(words) if isinstance(words, str) else None
    if match is None:
        raise InputError(f"prior of {name!r}", repr(words), GIVE)
    kind = match[1]
    try:
        numbers = [float(x) for x in (match[2] or "").split(",") if x.strip()]
    except ValueError:
        raise InputError(f"prior of {name!r}", repr(words), GIVE) from None
    if np.all(np.isfinite(numbers)):
        if kind == "flat" and not numbers:
            return 0.0, np.inf, np.inf, None
        if kind == "normal" and len(numbers) == 2 and numbers[1] > 0:
            return numbers[0], numbers[1], np.inf, None
        if kind == "student_t" and len(numbers) == 3 and numbers[0] in range(1, MOST_DF + 1) and numbers[2] > 0:
            return numbers[1], numbers[2], numbers[0], None
        if kind == "horseshoe" and len(numbers) in (1, 2) and min(numbers) > 0:
            return 0.0, (*numbers, SLAB)[1], np.inf, numbers[0]
    raise InputError(f"prior of {name!r}", repr(words), GIVE)
