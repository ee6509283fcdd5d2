"""Priors by name, for the coefficients of a formula."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedpdmc.console.warnings import warn
from fedpdmc.errors import InputError
from fedpdmc.models.mixture_prior import MOST_DF, mixture_prior
from fedpdmc.study.contract import Study
from fedpdmc.study.default_prior import Scales, default_prior, term_of
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


@dataclass(frozen=True)
class Prior:
    """Independent priors of the parameters, and a horseshoe on some of them.

    ``df`` is infinite for normal priors, ``scale`` for flat ones; for a horseshoe's parameters ``scale`` is the slab.
    """

    names: tuple[str, ...]
    mean: np.ndarray
    scale: np.ndarray
    df: np.ndarray
    default: bool = False
    horseshoe: tuple[int, ...] = ()
    global_scale: float = 1.0

    @classmethod
    def of(cls, study: Study) -> Prior:
        """The prior of a contract, without that of the spreads of effects."""
        names = study.normal_names
        wide = np.inf if study.prior_scale is None else study.prior_scale
        mean, scale = (np.broadcast_to(np.asarray(x, float), (len(names),)) for x in (study.prior_mean, wide))
        df = np.asarray([study.prior_df.get(name, np.inf) for name in names])
        shrunk = tuple(names.index(name) for name in study.prior_horseshoe)
        return cls(names, mean, scale, df, False, shrunk, study.prior_global_scale)

    def lines(self) -> list[str]:
        """The law of every parameter as a text, equal ones together."""
        laws: dict[str, list[str]] = {}
        for i, name in enumerate(self.names):
            place = f"{self.mean[i]:.3g}, {self.scale[i]:.3g}"
            law = f"normal({place})" if np.isinf(self.df[i]) else f"student_t({self.df[i]:g}, {place})"
            law = "flat" if np.isinf(self.scale[i]) else law
            if i in self.horseshoe:
                law = f"horseshoe({self.global_scale:g}, {self.scale[i]:.3g})"
            laws.setdefault(law, []).append(name)
        return [f"{', '.join(names)} ~ {law}" for law, names in laws.items()]

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
    told: str | Mapping[str, str] | None, names: tuple[str, ...], design: Design, scales: Scales
) -> Prior:
    """The prior that was named, or `default_prior`."""
    mean, scale = default_prior(names, design, scales)
    df, open_names = np.full(len(names), np.inf), list(names)
    told = {} if told is None else {OTHERS: told} if isinstance(told, str) else told
    stray = sorted(set(told) - {*names, OTHERS})
    if stray:
        raise InputError("prior", f"a prior of {stray[0]!r}", f"The parameters are {', '.join(names)}; or {OTHERS!r}.")
    shrunk: dict[int, float] = {}
    for i, name in enumerate(names):
        words = told.get(name, told.get(OTHERS))
        # If given for all, it is the prior of the coefficients only, not of other parameters such as log σ.
        if words is None or (name not in told and term_of(name, design) is None):
            continue
        mean_i, scale_i, df_i, global_scale = _parsed(name, words)
        if global_scale is not None:
            if name not in told and design.names[term_of(name, design) or 0] == INTERCEPT:
                # The intercept, the predictor at average covariates, has no value to shrink to.
                continue
            shrunk[i] = global_scale
        mean[i], scale[i], df[i] = mean_i, scale_i, df_i
        open_names.remove(name)
    if len(set(shrunk.values())) > 1:
        raise InputError("prior", "horseshoes of different global scales", "Give one: its members share it.")
    if open_names and not scales.known:
        warn(
            f"prior: nothing states the scale of {', '.join(open_names)} in a model of your own, so their standard "
            "deviations are a guess (print(sites) shows them). Give each one, in the units of your function: "
            f'prior={{"{open_names[0]}": "normal(mean, sd)", ...}}.'
        )
    return Prior(names, mean, scale, df, not told, tuple(shrunk), next(iter(shrunk.values()), 1.0))


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
