"""Formulas with effects of groups, such as ``ill ~ drug + age + (1 | ward)``."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np

from fedpdmc.errors import InputError

TERM = re.compile(r"\(\s*([^()|]*?)\s*\|\s*(`[^`]+`|[\w.]+)\s*\)")
NAME = re.compile(r"`[^`]+`|[\w.]+")
SUCH_AS = "Give one term such as (1 | ward) or (1 + dose | ward)."
# In place of a column: the site itself is the group.
SITE = "site"
# Approximate standard deviation of the log of a spread under each of its priors.
LOG_SPREAD_SD = 1.5


@dataclass(frozen=True)
class MixedFormula:
    """The parts of a formula.

    Attributes
    ----------
    fixed : str
        Without the term of the effects.
    slope : str or None
        The column whose coefficient varies in addition to the intercept, if there is one.
    groups : str
        The column of the groups, or `SITE`.
    """

    fixed: str
    slope: str | None
    groups: str


@dataclass(frozen=True)
class Effects:
    """The effects of groups in a contract: the formula, and the prior of their spreads.

    Attributes
    ----------
    formula : MixedFormula
    spread : {"half-normal", "exponential", "half-Cauchy"}
    spread_scale, correlation_scale : float
        As `fedpdmc.models.effects_prior` takes them.
    """

    formula: MixedFormula
    spread: str = "half-normal"
    spread_scale: float = 1.0
    correlation_scale: float = 0.5

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters of the effects' law."""
        return ("log_sd",) if self.formula.slope is None else ("log_sd[0]", "log_sd[1]", "atanh_correlation")

    def spreads(self, dim: int) -> tuple[int, ...]:
        """The places of the log spreads among ``dim`` parameters, of which those of the effects are the last."""
        first = dim - len(self.names)
        return (first,) if self.formula.slope is None else (first, first + 1)

    def columns(self, declared: object) -> set[str]:
        """The columns that the effects need, among those that are declared."""
        groups = {self.formula.groups} if self.formula.groups in declared else set()  # type: ignore[operator]
        return groups | ({self.formula.slope} if self.formula.slope else set())

    def prior_place(self, scaled: bool) -> tuple[np.ndarray, np.ndarray]:
        """Approximate mean and standard deviation, under the prior, of the parameters other than the coefficients."""
        spreads = scaled + (1 if self.formula.slope is None else 2)
        mean, sd = np.full(spreads, math.log(self.spread_scale)), np.full(spreads, LOG_SPREAD_SD)
        if self.formula.slope is None:
            return mean, sd
        return np.append(mean, 0.0), np.append(sd, self.correlation_scale)


def is_mixed(formula: object) -> bool:
    """Whether a formula has a term of effects."""
    return isinstance(formula, str) and "|" in formula


def parse_mixed(formula: str, where: str = "formula") -> MixedFormula:
    """Split a formula with one term of effects into its parts."""
    found = TERM.findall(formula)
    if len(found) != 1 or formula.count("|") != 1 or "~" not in formula:
        raise InputError(where, repr(formula), SUCH_AS)
    varying, groups = found[0]
    parts = [part.strip() for part in varying.split("+")]
    slopes = [part for part in parts if part != "1"]
    if "1" not in parts or len(parts) > 2 or len(slopes) > 1 or not all(NAME.fullmatch(slope) for slope in slopes):
        raise InputError(where, f"({varying} | {groups})", SUCH_AS)
    left, right = formula.split("~", 1)
    terms = [term.strip() for term in TERM.sub("", right).split("+")]
    right = " + ".join(term for term in terms if term) or "1"
    return MixedFormula(f"{left.strip()} ~ {right}", slopes[0].strip("`") if slopes else None, groups.strip("`"))


def by_site(formula: str) -> str:
    """The formula with the site itself as the group."""
    return TERM.sub(lambda term: f"({term[1]} | {SITE})", formula)
