"""Priors by name, for the coefficients of a formula."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedpdmc._jax.precision import double_precision
from fedpdmc.errors import InputError
from fedpdmc.study.column import Column
from fedpdmc.study.contract import LOG_SIGMA
from fedpdmc.study.formula import Design
from fedpdmc.study.units import INTERCEPT

CALL = re.compile(r"\s*(\w+)\s*(?:\(([^()]*)\))?\s*")
OTHERS = "others"
GIVE = "Give 'normal(mean, sd)', 'student_t(df, mean, scale)' or 'flat'."
# Standard deviation of the linear predictor under the default prior: the error's own, so that R² is about a half. On the
# latent scale of a logistic regression that is π/√3; a Poisson rate varies by a factor of e.
PREDICTOR_SD = {"logistic": float(np.pi / np.sqrt(3)), "poisson": 1.0}
# Of a column of a level, which is 0 or 1.
LEVEL_SD = 0.5
# The intercept is where the covariates are average; others are log σ of a standardised response, a log shape, and the like.
INTERCEPT_SD, AUXILIARY_SD = 5.0, 2.0


@dataclass(frozen=True)
class Prior:
    """Independent priors of the parameters; ``df`` is infinite where normal, ``scale`` where flat."""

    mean: np.ndarray
    scale: np.ndarray
    df: np.ndarray
    words: str

    @property
    def gaussian(self) -> bool:
        """Whether a contract can say it."""
        flat = np.isinf(self.scale)
        return bool(np.all(np.isinf(self.df)) and (flat.all() or not flat.any()))

    def table(self) -> dict[str, Any]:
        """The contract's table; of priors that it does not know, normal ones of the same scale."""
        flat = np.isinf(self.scale)
        if flat.any():
            return {"flat": True}
        return {"mean": [float(x) for x in self.mean], "scale": [float(f"{x:.3g}") for x in self.scale]}

    @double_precision
    def potential(self, names: tuple[str, ...]):
        """The prior as `fedpdmc.sample` takes it."""
        import jax.numpy as jnp

        from fedpdmc.models import normal_prior

        flat = np.isinf(self.scale)
        if flat.all():
            return None
        if self.gaussian:
            table = self.table()
            return normal_prior(len(names), mean=np.asarray(table["mean"]), scale=np.asarray(table["scale"]))
        normal, heavy = np.isinf(self.df) & ~flat, np.isfinite(self.df)
        weight = jnp.asarray(np.where(normal, 1 / np.where(flat, 1.0, self.scale) ** 2, 0.0))
        df, scale = jnp.asarray(self.df[heavy]), jnp.asarray(self.scale[heavy])
        mean, index = jnp.asarray(self.mean), np.flatnonzero(heavy)

        def minus_log_density(x):
            z = (x[index] - mean[index]) / scale
            return 0.5 * jnp.sum(weight * (x - mean) ** 2) + jnp.sum(0.5 * (df + 1) * jnp.log1p(z * z / df))

        return minus_log_density


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
        return Prior(mean, scale, df, "weakly informative (all terms together explain about half of the variation)")
    if isinstance(told, str):
        told = {OTHERS: told}
    stray = sorted(set(told) - {*names, OTHERS})
    if stray:
        raise InputError("prior", f"a prior of {stray[0]!r}", f"The parameters are {', '.join(names)}; or {OTHERS!r}.")
    for i, name in enumerate(names):
        words = told.get(name, told.get(OTHERS))
        # Said for all, it is the coefficients' prior: not that of other parameters, such as log σ.
        if words is None or (name not in told and _term(name, design) is None):
            continue
        mean[i], scale[i], df[i] = _parsed(name, words)
    return Prior(mean, scale, df, ", ".join(f"{name}: {words}" for name, words in told.items()))


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


def _parsed(name: str, words: str) -> tuple[float, float, float]:
    """Mean, scale and degrees of freedom."""
    match = CALL.fullmatch(words) if isinstance(words, str) else None
    if match is None:
        raise InputError(f"prior of {name!r}", repr(words), GIVE)
    kind = match[1]
    try:
        numbers = [float(x) for x in (match[2] or "").split(",") if x.strip()]
    except ValueError:
        raise InputError(f"prior of {name!r}", repr(words), GIVE) from None
    if kind == "flat" and not numbers:
        return 0.0, np.inf, np.inf
    if kind == "normal" and len(numbers) == 2 and numbers[1] > 0:
        return numbers[0], numbers[1], np.inf
    if kind == "student_t" and len(numbers) == 3 and numbers[0] > 0 and numbers[2] > 0:
        return numbers[1], numbers[2], numbers[0]
    raise InputError(f"prior of {name!r}", repr(words), GIVE)
