"""Sensitivity: how much one record can change a site's gradient, from declared bounds alone.

The gradient of one record is ``w ℓ'(ξ·x; y) ξ`` with a weight w of at most the declared one. A flip's rate is
``(v_i ∂_i(U_m − q_m))_+ + ρ``, and the positive part is 1-Lipschitz, so a rate changes by at most ``|v_i|`` times the change
of ``∂_i U_m``; the public ``q_m`` cancels. In whitened coordinates the change is ``Sᵀ(w ℓ' ξ − w̃ ℓ̃' ξ̃)``.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import numpy as np

from fedpdmc.errors import InputError
from fedpdmc.privacy.accountant import Sensitivity, up
from fedpdmc.privacy.declared_bounds import ROUNDING, Bounds

NEIGHBOURS = {
    "replace": "one record is replaced by any other",
    "add-remove": "one record is added or removed",
    "label": "the outcome of one record changes; covariates are public",
}
# Boxes of at most this many coordinates are searched corner by corner.
MOST_CORNERS = 12
# The largest standard deviation of a predictor over which a Poisson model's intensities are averaged.
WIDEST = 8.0


class ModelFacts(NamedTuple):
    """The public facts about a model that determine its sensitivity.

    Attributes
    ----------
    loss : {"logistic", "student_t", "poisson", "cox", "gaussian_mean", "linear"}
    dim : int
        Number of the model's own parameters.
    rows : int
        Number of likelihood terms that one record contributes (the transitions of a series).
    weight : float or array
        ``1/scale²`` of Gaussian models.
    df, scale : float
        Parameters of Student-t models.
    """

    loss: str
    dim: int
    rows: int = 1
    weight: float | np.ndarray = 1.0
    df: float = 1.0
    scale: float = 1.0
    series: bool = False


class Slopes(NamedTuple):
    """Bounds on one term's ``|ℓ'|``, ``|ℓ''|``, and on the change of ℓ' and ℓ'' when only the outcome changes."""

    first: float
    second: float
    label_first: float
    label_second: float


def slopes(model: ModelFacts, bounds: Bounds, neighbours: str) -> Slopes:
    """The loss's own bounds on the declared domain, times the largest weight; infinite if there are none."""
    return Slopes(*(bounds.weight * slope for slope in _slopes(model, bounds)))


def _slopes(model: ModelFacts, bounds: Bounds) -> Slopes:
    if model.loss == "logistic":
        return Slopes(1.0, 0.25, 1.0, 0.0)
    if model.loss == "student_t":
        nu, s = model.df, model.scale
        steepest, curved = (nu + 1) / (2 * math.sqrt(nu) * s), (nu + 1) / (nu * s * s)
        width = math.inf if bounds.outcome is None else bounds.outcome[1] - bounds.outcome[0]
        third = 2 * math.cos(math.pi / 8) ** 4 * (nu + 1) * nu**-1.5 / s**3
        # ℓ'' lies in [−(ν+1)/(8νs²), (ν+1)/(νs²)].
        return Slopes(steepest, curved, min(2 * steepest, width * curved), min(1.125 * curved, width * third))
    low, high = (-math.inf, math.inf) if bounds.outcome is None else bounds.outcome
    reach = predictor_reach(model, bounds)
    if model.loss == "poisson":
        start, stop = bounds.offset or (0.0, 0.0)
        intensity = math.exp(min(reach + stop, 700.0)) if reach < math.inf else math.inf
        return Slopes(max(intensity, high), intensity, high - max(low, 0.0), 0.0)
    weight = float(np.max(model.weight))
    return Slopes(weight * (reach + max(abs(low), abs(high))), weight, weight * (high - low), 0.0)


def sensitivity(model: ModelFacts, bounds: Bounds, neighbours: str, scale: np.ndarray) -> Sensitivity:
    """``K_∞, K_1, K_2`` of a site's potential in whitened coordinates ``x = c + S a``.

    Parameters
    ----------
    model : ModelFacts
    bounds : Bounds
        Declared bounds of the records.
    neighbours : {"replace", "add-remove", "label"}
    scale : array of shape (k, d)
        The rows of S for the model's own parameters.

    Raises
    ------
    InputError
        A bound that the guarantee needs is not declared.
    """
    scale = np.atleast_2d(np.asarray(scale, dtype=np.float64))
    _check(model, bounds, neighbours)
    found = Sensitivity(*(up(k) for k in _changes(model, bounds, neighbours, scale)))
    # Rounding up turns a zero into a number that is too small to compute with.
    if not 1e-300 < min(found) <= max(found) < math.inf:
        raise InputError(
            "Bounds",
            f"a change of at most {max(found):.3g} by one record",
            "Declare larger bounds, and an outcome that can take more than one value.",
        )
    return found


def _changes(model: ModelFacts, bounds: Bounds, neighbours: str, scale: np.ndarray) -> Sensitivity:
    if model.loss == "cox":
        return _cells(scale, neighbours)
    if model.loss == "gaussian_mean":
        return _means(model, bounds, neighbours, scale)
    slope = slopes(model, bounds, neighbours)
    # Two gradients of any direction differ by at most twice their largest norm.
    factor = {"replace": 2 * slope.first, "add-remove": slope.first, "label": slope.label_first}[neighbours]
    if not math.isfinite(factor):
        raise _missing(model, neighbours)
    largest = largest_row(row_bounds(model, bounds), scale)
    return Sensitivity(*(model.rows * factor * k for k in largest))


def derivative_sensitivity(model: ModelFacts, bounds: Bounds, neighbours: str) -> tuple[float, float]:
    """Euclidean sensitivity of ``∇U_m(x)`` and Frobenius sensitivity of ``∇²U_m(x)`` in the model's own parameters."""
    gradient = sensitivity(model, bounds, neighbours, np.eye(model.dim)).k_2
    if model.loss == "cox":
        return gradient, 0.0
    if model.loss == "gaussian_mean":
        changed = float(np.linalg.norm(np.broadcast_to(model.weight, (model.dim,))))
        return gradient, changed if neighbours == "add-remove" else 0.0
    slope = slopes(model, bounds, neighbours)
    square = largest_row(row_bounds(model, bounds), np.eye(model.dim)).k_2 ** 2
    # Matrices ℓ'' ξξᵀ of one sign have a non-negative inner product: their difference has at most √2 times their norm.
    two = 2.0 if model.loss == "student_t" else math.sqrt(2.0)
    factor = {"replace": two * slope.second, "add-remove": slope.second, "label": slope.label_second}[neighbours]
    if not math.isfinite(factor):
        raise _missing(model, neighbours)
    return gradient, model.rows * factor * square


def averaged_sensitivity(model: ModelFacts, bounds: Bounds, spread: np.ndarray) -> float:
    """The factor by which sensitivity grows if derivatives are averaged over ``N(x, S Sᵀ)`` with ``S = spread``.

    Bounds on ``ℓ'`` and ``ℓ''`` also hold for their averages. Only intensities of a Poisson model are bounded by the
    region, which a Gaussian leaves: ``E e^{ξ·x} = e^{ξ·m + ½|Sᵀξ|²}``. Intensities of Cox cells are public.
    """
    if model.loss != "poisson":
        return 1.0
    deviation = largest_row(row_bounds(model, bounds), spread).k_2
    if not deviation <= WIDEST:
        found = f"a predictor with a standard deviation of up to {deviation:.3g}"
        raise InputError("reference", found, "Use reference='laplace', whose derivatives are not averaged.")
    return up(math.exp(0.5 * deviation**2))


def _check(model: ModelFacts, bounds: Bounds, neighbours: str) -> None:
    if neighbours not in NEIGHBOURS:
        raise InputError("neighbours", repr(neighbours), f"Give one of {', '.join(map(repr, NEIGHBOURS))}.")
    if model.loss == "cox" and neighbours == "label":
        raise InputError(
            "neighbours", "'label'", "A point of a Cox process has no label: use 'add-remove' or 'replace'."
        )
    if model.series and neighbours == "label":
        raise InputError("neighbours", "'label'", "The values of a series are covariates too: use 'replace'.")
    if model.loss == "poisson" and bounds.region is None:
        # Needed even if only the outcome changes: the outcome would be lost in the rounding of an unbounded intensity.
        raise InputError("Bounds(region)", "none for a poisson model", "Declare region=..., a bound on the parameters.")
    if bounds.outcome is not None and model.loss == "poisson" and bounds.outcome[0] < 0:
        raise InputError("Bounds(outcome)", repr(bounds.outcome), "Counts are not negative: give (0, high).")


def _missing(model: ModelFacts, neighbours: str) -> InputError:
    wanted = "outcome=(low, high)" if neighbours == "label" else "outcome=(low, high) and region=..."
    return InputError(
        "Bounds",
        f"no bound on the gradient of a {model.loss} record under {neighbours!r}",
        f"Declare {wanted}. Otherwise one record can change a rate without limit.",
    )


def row_bounds(model: ModelFacts, bounds: Bounds) -> Bounds:
    """The declared bounds on covariates; those of an autoregression follow from the range of its values."""
    if not model.series:
        if bounds.norm is None and bounds.box is None:
            raise InputError("Bounds", "no bound on the covariates", "Declare norm=... or box=..., or both.")
        return bounds
    if bounds.outcome is None:
        raise InputError("Bounds", "no range of the series", "Declare outcome=(low, high), the range of its values.")
    return Bounds(box=[max(map(abs, bounds.outcome)) or 1e-300, 1.0])


def predictor_reach(model: ModelFacts, bounds: Bounds) -> float:
    """A bound on ``|ξ·x|`` on the declared region."""
    region = bounds.sizes("region", model.dim)
    if region is None:
        return math.inf
    rows = row_bounds(model, bounds)
    box = rows.sizes("box", model.dim)
    by_box = math.inf if box is None else float(box @ region)
    return min(by_box, math.inf if rows.norm is None else rows.norm * float(np.linalg.norm(region)))


def largest_row(rows: Bounds, scale: np.ndarray) -> Sensitivity:
    """Bounds on ``‖Sᵀξ‖`` in max, sum and Euclidean norm over the declared covariates."""
    each = np.full(scale.shape[1], math.inf)
    sums, euclidean = math.inf, math.inf
    if rows.norm is not None:
        norm = rows.norm * (1 + ROUNDING)
        each = np.minimum(each, norm * np.linalg.norm(scale, axis=0))
        euclidean = norm * float(np.linalg.norm(scale, 2))
    box = rows.sizes("box", scale.shape[0])
    if box is not None:
        each = np.minimum(each, box @ np.abs(scale))
        sums, by_box = _corners(box, scale)
        euclidean = min(euclidean, by_box)
    k_1 = min(float(each.sum()), sums, math.sqrt(scale.shape[1]) * euclidean)
    return Sensitivity(float(each.max()), k_1, min(euclidean, float(np.linalg.norm(each))))


def _corners(box: np.ndarray, scale: np.ndarray) -> tuple[float, float]:
    """Largest sum and Euclidean norm of ``Sᵀξ`` over a box, attained at a corner by convexity; or bounds on them."""
    if len(box) > MOST_CORNERS:
        return float((box @ np.abs(scale)).sum()), math.sqrt(float(box @ np.abs(scale @ scale.T) @ box))
    corners = np.array(list(itertools.product((1.0, -1.0), repeat=len(box)))) * box @ scale
    return float(np.abs(corners).sum(1).max()), float(np.linalg.norm(corners, axis=1).max())


def _cells(scale: np.ndarray, neighbours: str) -> Sensitivity:
    """Cells of a Cox grid: one point more or less changes one count by one, one point moved changes two."""
    factor = 2.0 if neighbours == "replace" else 1.0
    rows = np.abs(scale)
    return Sensitivity(
        factor * float(rows.max()),
        factor * float(rows.sum(1).max()),
        factor * float(np.linalg.norm(rows, axis=1).max()),
    )


def _means(model: ModelFacts, bounds: Bounds, neighbours: str, scale: np.ndarray) -> Sensitivity:
    """Gaussian means: a record's gradient is ``w (x − y)``, so x matters only if a record is added or removed."""
    weight = np.broadcast_to(model.weight, (model.dim,))
    region = bounds.sizes("region", model.dim)
    if bounds.norm is None and bounds.box is None:
        raise InputError("Bounds", "no bound on the records", "Declare norm=... or box=..., or both.")
    weighted = weight[:, None] * scale
    of_record = largest_row(bounds, weighted)
    if neighbours != "add-remove":
        return Sensitivity(*(2 * k for k in of_record))
    if region is None:
        raise _missing(model, neighbours)
    of_x = largest_row(Bounds(box=region), weighted)
    return Sensitivity(*(one + other for one, other in zip(of_record, of_x, strict=True)))
