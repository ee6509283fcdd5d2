"""Coefficients per unit of the columns as they were recorded, from those of centred and scaled columns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pandas as pd

from fedpdmc.potentials.random_effects import NaturalScale
from fedpdmc.study.formula import Design

if TYPE_CHECKING:
    from fedpdmc.study.contract import Study
    from fedpdmc.study.schema import Column

# Relative error above which one design is not a linear image of the other.
EXACT = 1e-9
INTERCEPT = "Intercept"


class Named(NamedTuple):
    """Names of parameters, and the function to the reported variables; None: the parameters themselves."""

    names: tuple[str, ...]
    constrain: Callable[[Any], dict[str, Any]] | None = None


@dataclass(frozen=True)
class OriginalUnits:
    """The names of a study's parameters, and the function from them to variables in the columns' own units.

    With ``X_s`` the design of the centred and scaled columns and ``X`` that of the columns themselves there is a matrix A
    with ``X_s = X A``, the same for all records. So ``X_s b = X (A b)``, and ``A b`` are the coefficients in the original
    units. A response ``(y − c)/s`` multiplies them by s and adds c to the intercept; σ is multiplied by s.

    Attributes
    ----------
    names : tuple of str
        Of the parameters.
    matrix : array of shape (d, d)
        s A.
    shift : array of shape (d,)
    response_scale : float
        s, by which σ and the spreads of effects are multiplied: the parameters after the coefficients.
    """

    names: tuple[str, ...]
    matrix: np.ndarray
    shift: np.ndarray
    response_scale: float = 1.0

    def constrain(self, x):
        """Variables by name."""
        d = self.matrix.shape[0]
        values = jnp.asarray(self.matrix) @ x[:d] + jnp.asarray(self.shift)
        found = {name: values[i] for i, name in enumerate(self.names[:d])}
        for name, value in NaturalScale(self.names[d:])(x[d:]).items():
            found[name] = value if name == "correlation" else self.response_scale * value
        return found


def original_units(study: Study) -> OriginalUnits | Named | None:
    """How to undo centring and scaling; None if no linear map does, as for an interaction without its main effects."""
    formula = study.formula if study.effects is None else study.effects.formula.fixed
    matrix = design_map(formula, {name: one for name, one in study.columns.items() if one.type != "key"})
    if matrix is None:
        return None
    names, response = study.design.names, study.columns[study.design.response_name]
    shift = np.zeros(len(names))
    if response.center:
        if INTERCEPT not in names:
            return None
        shift[names.index(INTERCEPT)] = response.center
    if study.names == names and response.scale == 1 and not shift.any() and np.array_equal(matrix, np.eye(len(names))):
        return Named(study.names)
    return OriginalUnits(study.names, response.scale * matrix, shift, response.scale)


def design_map(formula: str, columns: dict[str, Column]) -> np.ndarray | None:
    """A with ``X_s = X A`` for all records, or None if there is none."""
    if all(column.center == 0 and column.scale == 1 for column in columns.values()):
        return np.eye(len(Design(formula, columns).names))
    unscaled = {name: dataclasses.replace(one, center=0.0, scale=1.0) for name, one in columns.items()}
    scaled, raw = Design(formula, columns), Design(formula, unscaled)
    records = _points(unscaled, 4 * len(raw.names) + 50)
    numbers = {name: one for name, one in columns.items() if one.type != "level"}
    target = scaled.matrix(records.assign(**{x: (records[x] - one.center) / one.scale for x, one in numbers.items()}))
    design = raw.matrix(records)
    size = np.linalg.norm(design, axis=0)
    if np.any(size == 0):
        return None
    found = np.linalg.lstsq(design / size, target, rcond=None)[0]
    error = np.abs(design / size @ found - target)
    if np.any(error > EXACT * np.maximum(np.abs(target).max(0), 1.0)):
        return None
    found = found / size[:, None]
    small = np.abs(found) * size[:, None] < EXACT * np.linalg.norm(target, axis=0)
    same = np.linalg.norm(target - design, axis=0) < EXACT**1.5 * size
    return np.where(same, np.eye(len(size)), np.where(small, 0.0, found))


def _points(columns: dict[str, Column], n: int) -> pd.DataFrame:
    """Records that span what the bounds allow."""
    rng = np.random.default_rng(0)
    frame = {}
    for name, column in columns.items():
        if column.type == "level":
            codes = np.arange(n) % len(column.levels)
            frame[name] = pd.Categorical.from_codes(rng.permutation(codes), categories=list(column.levels))
        else:
            frame[name] = rng.uniform(*column.range, n)
    return pd.DataFrame(frame)
