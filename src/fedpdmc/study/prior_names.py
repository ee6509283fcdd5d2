"""Priors by name, for the coefficients of a formula."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fedpdmc.console.warnings import warn
from fedpdmc.errors import InputError
from fedpdmc.models.families import Family, Place, Seen, significant
from fedpdmc.models.mixture_prior import MOST_DF, mixture_prior
from fedpdmc.potentials.bent_spread_prior import FLOOR
from fedpdmc.study.contract import Study
from fedpdmc.study.formula import INTERCEPT, Design, round_to
from fedpdmc.study.schema import Column

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

    def draws(self, n: int, rng: np.random.Generator) -> np.ndarray:
        """Draws, (n, d).

        The slab multiplies the density of a horseshoe: given ``s = τλ`` the coefficient is normal with variance
        ``1/(1/s² + 1/c²)``, and the scales have the density of their laws times ``∏ c/√(s² + c²)``, drawn by rejection.
        """
        if np.isinf(self.scale).any():
            raise InputError("prior", "a flat one", "It has no draws: give a proper prior, or leave prior= out.")
        heavy, noise = np.isfinite(self.df), rng.standard_normal((n, len(self.names)))
        noise[:, heavy] = rng.standard_t(self.df[heavy], (n, int(heavy.sum())))
        x, shrunk = self.mean + self.scale * noise, list(self.horseshoe)
        slab, kept = self.scale[shrunk], np.zeros((0, len(shrunk)))
        while shrunk and len(kept) < n:
            u = rng.uniform(2 / np.pi * np.arctan(FLOOR), 1.0, (8 * n, len(shrunk) + 1))
            scales = np.tan(np.pi / 2 * u)
            s = self.global_scale * scales[:, :1] * scales[:, 1:]
            kept = np.concatenate([kept, s[rng.random(8 * n) < np.prod(slab / np.hypot(s, slab), 1)]])
        if shrunk:
            s = kept[:n]
            x[:, shrunk] = noise[:, shrunk] * s * slab / np.hypot(s, slab)
        return x

    def potential(self) -> Any:
        """The prior as `fedpdmc.sample` takes it; some of its scales are finite."""
        from fedpdmc.models import normal_prior

        heavy = {int(i): int(self.df[i]) for i in np.flatnonzero(np.isfinite(self.df))}
        if self.normal:
            return normal_prior(len(self.names), mean=self.mean, scale=self.scale)
        made = mixture_prior(self.mean, self.scale, heavy, self.horseshoe, self.global_scale)
        return made if made.index else made.normal


def prior_by_name(
    named: str | Mapping[str, str] | None, names: tuple[str, ...], design: Design, scales: Scales
) -> Prior:
    """The prior that was named, or `default_prior`."""
    mean, scale = default_prior(names, design, scales)
    df, open_names = np.full(len(names), np.inf), list(names)
    if not isinstance(named, (str, Mapping, type(None))):
        raise InputError("prior", repr(named), f"{GIVE} Or a dict of them, by parameter.")
    named = {} if named is None else {OTHERS: named} if isinstance(named, str) else named
    stray = sorted(set(named) - {*names, OTHERS})
    if stray:
        raise InputError("prior", f"a prior of {stray[0]!r}", f"The parameters are {', '.join(names)}; or {OTHERS!r}.")
    shrunk: dict[int, float] = {}
    for i, name in enumerate(names):
        words = named.get(name, named.get(OTHERS))
        # If given for all, it is the prior of the coefficients only, not of other parameters such as log σ.
        if words is None or (name not in named and term_of(name, design) is None):
            continue
        mean_i, scale_i, df_i, global_scale = _parse_law(name, words)
        if global_scale is not None:
            if name not in named and design.names[term_of(name, design) or 0] == INTERCEPT:
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
    return Prior(names, mean, scale, df, not named, tuple(shrunk), next(iter(shrunk.values()), 1.0))


def _parse_law(name: str, words: str) -> tuple[float, float, float, float | None]:
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


# The default prior of a regression: from the places and spreads of the values, never from declared bounds.
#
# All terms together get the spread τ of the response on the scale of the linear predictor, ``τ²/p`` for each of p terms in
# units of its column's standard deviation: R² is about one half whatever p is. In a linear regression of n records the prior
# has ``(1 − R²) p/n`` of the information about a coefficient, so it moves an estimate by at most ``p/(2√n)`` standard
# errors.

INTERCEPT_SD = 5.0  # of the intercept, the predictor at average covariates, in units of τ
AUXILIARY_SD = 2.0  # of other parameters, which are logarithms or logits: log σ, a log shape, a log gap
LEVEL_SPREAD = 0.5  # of a level or of zeros and ones, whatever their shares: a rare one is no reason for a wide prior
# Parameters that are in place of an intercept.
IN_PLACE = ("first_cut", "log_hazard")


class Scales(NamedTuple):
    """What the default prior is made of.

    ``response`` is on the scale of the linear predictor. It is not ``known`` for a model that does not say what its
    predictor is.
    """

    covariates: dict[str, Place]
    response: Place
    known: bool = True


def place_covariate(column: Column, values: np.ndarray, stated: bool) -> Place:
    """The place of a covariate: 1 for one that is centred and scaled, or whose scale is stated; else that of its values."""
    if column.type == "level" or set(np.unique(values)) <= {0.0, 1.0} and not column.log:
        return Place(0.0, LEVEL_SPREAD / column.scale, level=True)
    found = _place(column, values)
    return Place(0.0 if column.center else found.center, 1.0 if stated or column.scale != 1 else found.spread)


def place_function(names: list[str], values: np.ndarray | None, spline: bool) -> dict[str, Place]:
    """The places of a function's columns: of levels if there are no values; those of a spline share one spread.

    The curve at a point is about the mean of two or three coefficients of a spline, so their prior is that of the curve. A
    column that few records reach is no reason for a wide one.
    """
    if values is None:
        return {name: Place(0.0, LEVEL_SPREAD, level=True) for name in names}
    plain = Column("", "number")
    found = {name: place_covariate(plain, column, False) for name, column in zip(names, values.T, strict=True)}
    if not spline:
        return found
    shared = significant(float(np.sqrt(np.mean(values.var(0))))) or 1.0
    return {name: Place(place.center, shared) for name, place in found.items()}


def place_response(family: Family, column: Column, seen: Seen) -> Place:
    """The response's place on the scale of the linear predictor, with prior means of the family's other parameters."""
    if family.place is not None:
        return family.place(seen._replace(levels=len(column.levels))).rounded()
    found = _place(column, seen.values) if column.scale == 1 else Place()
    return found._replace(others=Place(others={"log_sigma": np.log(found.spread)}).rounded().others)


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
            mean[i] = place.others.get(name, 0.0)
    return mean, scale


def term_of(name: str, design: Design) -> int | None:
    """Which term of the formula a parameter is the coefficient of; families of several predictors name them ``age[B]``."""
    for i, term in enumerate(design.names):
        ending = name.endswith((f" {term}", f".{term}", f"[{term}]", f":{term}"))
        if name == term or (ending or name.startswith(f"{term}[")) and name not in design.names:
            return i
    return None


def _place(column: Column, values: np.ndarray) -> Place:
    values = ((np.log(values) if column.log else values) - column.center) / column.scale
    spread = significant(values.std()) or 1.0
    return Place(round_to(values.mean(), spread), spread)
