"""Sensitivity: how much one record can change a site's gradient, from declared bounds alone.

The gradient of one record is ``w ℓ'(ξ·x; y) ξ`` with a weight w of at most the declared one. A flip's rate is
``(v_i ∂_i(U_m − q_m))_+ + ρ``, and the positive part is 1-Lipschitz, so a rate changes by at most ``|v_i|`` times the change
of ``∂_i U_m``; the public ``q_m`` cancels. In whitened coordinates the change is ``Sᵀ(w ℓ' ξ − w̃ ℓ̃' ξ̃)``.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from fedpdmc.errors import InputError
from fedpdmc.privacy.accountant import Sensitivity, up
from fedpdmc.validation import integer

# Relative tolerance for a record on the border, whose norm is rounded.
ROUNDING = 1e-9
# Default of most_records. Rounding of a sum over that many records is below 2⁻⁹ of the sensitivity to one record. It grows
# with the square of their number: at 2²⁴ it is 2⁻⁵, and beyond that no run stays below the limit of one tenth.
MOST_RECORDS, LARGEST_MOST_RECORDS = 1 << 22, 1 << 24


@dataclass(frozen=True, eq=False)
class Bounds:
    """Bounds on a site's records, declared in advance and never computed from the data.

    Parameters
    ----------
    norm : float, optional
        The Euclidean norm of a record's covariates is at most this (for `gaussian_mean`: of the record).
    box : float or array of shape (d,), optional
        Each covariate is at most this in absolute value. If ``norm`` is given too, both hold.
    outcome : (low, high), optional
        The range of the outcome (for `ar1_student_t`: of every value of a series).
    offset : (low, high), optional
        The range of the offsets of `poisson`; zero if left out.
    region : float or array of shape (d,), optional
        The parameters stay within ``|x_j| ≤ region_j``: the site refuses plans that leave it. Needed if a gradient
        grows without bound.
    weight : float
        The largest weight of a record; with trials times their largest number.
    columns : mapping, optional
        The ranges ``(low, high)`` of the columns of a model file, by name. Binary columns and levels need none.
    most_records : int
        An upper bound on the number of records (of transitions, for series), at most 16,777,216. It bounds the rounding
        error of sums.
    """

    norm: float | None = None
    box: Any = None
    outcome: tuple[float, float] | None = None
    offset: tuple[float, float] | None = None
    region: Any = None
    most_records: int = MOST_RECORDS
    columns: Any = None
    weight: float = 1.0

    def __post_init__(self):
        def put(name: str, check: Callable[[str, Any], Any]) -> None:
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, check(f"Bounds({name})", value))

        for name in ("norm", "weight"):
            put(name, lambda argument, value: float(_sizes(argument, value, scalar=True)))
        put(
            "most_records", lambda argument, value: integer(argument, value, 1, sys.maxsize, "Give a positive integer.")
        )
        if self.most_records > LARGEST_MOST_RECORDS:
            raise InputError(
                "Bounds(most_records)",
                f"{self.most_records:,}",
                f"Give at most {LARGEST_MOST_RECORDS:,}: in a sum over more records rounding would hide what one record "
                "changes. Divide the records among several sites (in a contract: [limits] records).",
            )
        for name, check in (("box", _sizes), ("region", _sizes), ("outcome", _interval), ("offset", _interval)):
            put(name, check)
        if self.columns is not None:
            ranges = {str(name): _interval(f"Bounds(columns: {name})", x) for name, x in dict(self.columns).items()}
            object.__setattr__(self, "columns", ranges)

    def sizes(self, name: str, dim: int) -> np.ndarray | None:
        """``box`` or ``region`` by coordinate."""
        value = getattr(self, name)
        if value is None:
            return None
        if value.ndim and value.shape != (dim,):
            raise InputError(f"Bounds({name})", f"shape {value.shape}", f"Give a number or an array of shape ({dim},).")
        return np.broadcast_to(value, (dim,))

    def clip_rows(self, rows: np.ndarray) -> np.ndarray:
        """Covariates moved into the box, then scaled into the ball (which keeps them in the box)."""
        box = self.sizes("box", rows.shape[1])
        clipped = rows if box is None else np.clip(rows, -box, box)
        if self.norm is None:
            return clipped
        length = np.linalg.norm(clipped, axis=1, keepdims=True)
        outside = length > self.norm * (1 + ROUNDING)
        return np.where(outside, clipped * (self.norm / np.maximum(length, 1e-300)), clipped)

    def clip_values(self, name: str, values: np.ndarray) -> np.ndarray:
        """Outcomes or offsets moved into their range."""
        interval = getattr(self, name)
        return values if interval is None else np.clip(values, *interval)

    def describe(self) -> dict[str, Any]:
        """The bounds as plain numbers, for reports."""
        known = {field.name: value for field in fields(self) if (value := getattr(self, field.name)) is not None}
        return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in known.items()}


def _sizes(argument: str, value: Any, scalar: bool = False) -> np.ndarray:
    try:
        array = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        array = np.asarray(math.nan)
    if array.ndim > (0 if scalar else 1) or array.size == 0 or not np.all((array > 0) & np.isfinite(array)):
        raise InputError(argument, repr(value), "Give positive finite numbers.")
    return array


def _interval(argument: str, value: Any) -> tuple[float, float]:
    try:
        low, high = (float(end) for end in value)
    except (TypeError, ValueError) as error:
        raise InputError(argument, repr(value), "Give (low, high).") from error
    if not -math.inf < low <= high < math.inf:
        raise InputError(argument, repr(value), "Give finite numbers, the lower one first.")
    return low, high


# Sensitivity ---------------------------------------------------------------------------------------------------------

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
    """The public facts about a model that determine its sensitivity."""

    loss: str  # one of logistic, student_t, poisson, cox, gaussian_mean, linear
    dim: int  # number of the model's own parameters
    rows: int = 1  # number of likelihood terms that one record contributes (the transitions of a series)
    weight: float | np.ndarray = 1.0  # ``1/scale²`` of Gaussian models
    df: float = 1.0  # of Student-t models, as is the scale
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

    ``scale`` (k, d) has the rows of S for the model's own parameters. A bound that the guarantee needs must be declared.
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
        # One point more or less changes the count of one cell by one, one point moved changes two.
        factor, rows = 2.0 if neighbours == "replace" else 1.0, np.abs(scale)
        sizes = rows.max(), rows.sum(1).max(), np.linalg.norm(rows, axis=1).max()
        return Sensitivity(*(factor * float(size) for size in sizes))
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


# Rounding ------------------------------------------------------------------------------------------------------------
#
# A bound on the rounding error of a site's gradient, from public facts; it is added to the sensitivity K.
#
# A site computes ``Σ_n ℓ'(ξ_n·a + o_n) ξ_n``, with whitened records, in 64-bit numbers. With ``γ_n = n u/(1 − n u)`` and
# u = 2⁻⁵³, the error of a sum of n terms is at most γ_n times the sum of their sizes, in any order of summation. Hence,
# for at most N terms with ``|ℓ'| ≤ s₁`` and ``|ℓ''| ≤ s₂``, predictors with error δz, and k a bound on
# ``‖ |S|ᵀ|ξ| ‖``, the error of the gradient is at most
#
#     r = N k (s₂ δz + s₁ (γ_N + γ_{d+16})),    δz = γ_{2d+8} (k |a| + |ξ| |c| + |o|).
#
# Two neighbours' computed gradients differ by at most K + 2r. A rate is compared with levels on a grid: near a level λ their
# spacing is at most ``max(2⁻⁵⁵, 2⁻⁵² λ)``, which counts as an error of the rate. Per unit of speed, at least 2⁻²⁰,
# that is ``2⁻³⁵ + 2⁻⁵²(|G_i| + ρ)`` in each coordinate, hence ``√d 2⁻³⁵ + 2⁻⁵²(|G| + √d ρ)`` in Euclidean norm.
#
# The bound needs a limit on the distance of plans from the centre, and one on the slope of the public control variate. Both
# are chosen here, from public facts, so that r is small compared with K.

UNIT = 2.0**-53
# Largest and smallest limit on the whitened distance of plans.
FARTHEST, NEAREST = 1e6, 1e3
# Target and hard limit of the rounding error, as shares of K.
USUAL_SHARE, LARGEST_SHARE = 0.01, 0.1
# The largest slope of a control variate, in units of K: its rounding error d u·2³⁶ is d 2⁻¹⁷ of K.
STEEPEST = 2.0**36
# A slope beyond that of any useful control variate.
MOST_SLOPE = 1e12
# Spacing of low levels, 2⁻⁵⁵, at the least speed of a coordinate that flips, 2⁻²⁰.
LEVELS = 2.0**-35
# Limit on log intensities of a Cox model: beyond it, a count would be lost in the rounding of an intensity.
COX_REGION = 20.0


class Limits(NamedTuple):
    """The limits that a site puts on every plan of a run, and the resulting K, from public facts alone."""

    distance: float  # Euclidean norm of ``(a, v)`` on rotations, of ``a`` on lines, on a whole plan
    slope: float  # the largest ``|∇q|`` of the control variate, in whitened coordinates, on a whole plan
    rounding: float  # ``r``, included in `sensitivity`
    sensitivity: Sensitivity  # ``K + 2r``


def gamma(n: float) -> float:
    """``n u/(1 − n u)``, rounded up."""
    return up(n * UNIT / (1 - n * UNIT))


def limits(
    model: ModelFacts,
    bounds: Bounds,
    neighbours: str,
    scale: np.ndarray,
    center: np.ndarray,
    exact: Sensitivity,
    excess: float = 0.0,
) -> Limits:
    """The widest limits at which rounding is small compared with K, which is ``exact`` in real arithmetic.

    ``scale`` (k, d) and ``center`` (k,) are the rows of S, and the centre, of the site's own parameters; ``excess`` is an
    upper bound on the excess rate. Refused are coordinates in which rounding is as large as the effect of one record.
    """
    distance, slope = _within_region(bounds, scale, center), min(STEEPEST * exact.k_2, MOST_SLOPE)
    dim, wide = scale.shape[1], math.sqrt(scale.shape[1])
    while True:
        # The rounding of the gradient is at least γ_34 of a bound of its size, so levels add less than a sixteenth of it.
        off = 17 / 16 * gradient_rounding(model, bounds, neighbours, scale, center, distance)
        off = up(off + 4 * UNIT * ((dim + 4) * slope + wide * excess) + wide * LEVELS)
        share = 2 * off / exact.k_2
        if share <= USUAL_SHARE or distance <= NEAREST:
            break
        distance /= 10
    if not share <= LARGEST_SHARE:
        raise InputError(
            "reference",
            f"coordinates in which rounding can change a rate by {share:.3g} of the effect of one record",
            "Use a reference with the centre and scale of the posterior, bounds and a region no wider than needed, and "
            "most_records=... no larger.",
        )
    k_inf, k_1, k_2 = exact
    return Limits(distance, slope, off, Sensitivity(up(k_inf + 2 * off), up(k_1 + 2 * wide * off), up(k_2 + 2 * off)))


def gradient_rounding(
    model: ModelFacts, bounds: Bounds, neighbours: str, scale: np.ndarray, center: np.ndarray, distance: float
) -> float:
    """A bound on the Euclidean norm of the rounding error of ``Sᵀ∇U_m`` at whitened distance at most ``distance``."""
    dim, terms = scale.shape[1], float(bounds.most_records)
    absolute = np.abs(scale)
    many = gamma(terms + 2 * dim + 32)
    if model.loss == "cox":
        k = float(np.linalg.norm(absolute, axis=1).max())
        return up(model.dim * k * (math.exp(COX_REGION) + terms) * gamma(3 * dim + 64))
    where = float(np.linalg.norm(center))
    if model.loss == "gaussian_mean":
        weighted = np.broadcast_to(model.weight, (model.dim,))[:, None] * absolute
        k = largest_row(bounds, weighted).k_2
        size = float(np.linalg.norm(weighted, 2)) * (float(np.linalg.norm(absolute, 2)) * distance + where)
        # Under add-remove the number of records is known up to one, and x is within the region.
        return up(terms * (k * many + size * gamma(3 * dim + 32)))
    rows = row_bounds(model, bounds)
    k, longest = largest_row(rows, absolute).k_2, largest_row(rows, np.eye(model.dim)).k_2
    offset = 0.0 if bounds.offset is None else max(map(abs, bounds.offset))
    z = k * distance + longest * where + offset
    if model.loss == "linear":
        weight = float(np.max(model.weight)) * bounds.weight
        high = 0.0 if bounds.outcome is None else max(map(abs, bounds.outcome))
        # Sums of public covariates have the same bits for both neighbours.
        known = gamma(3 * dim + 32) if neighbours == "label" else many
        return up(terms * k * weight * (z * known + high * many))
    slope = slopes(model, bounds, neighbours)
    shift = 0.0 if neighbours == "label" else gamma(2 * dim + 8) * z
    return up(terms * k * (slope.second * shift + slope.first * many))


def _within_region(bounds: Bounds, scale: np.ndarray, center: np.ndarray) -> float:
    """`FARTHEST`, or the extent of the declared region."""
    region = bounds.sizes("region", len(center))
    if region is None or scale.shape[0] != scale.shape[1]:
        return FARTHEST
    least = float(np.linalg.svd(scale, compute_uv=False)[-1])
    reach = float(np.linalg.norm(region) + np.linalg.norm(center))
    return min(FARTHEST, up(reach / least)) if least > 0 else FARTHEST


def hessian_rounding(model: ModelFacts, bounds: Bounds, neighbours: str, distance: float) -> float:
    """Bound on the Frobenius norm of rounding in ``∇²U_m`` at a point of this norm, in the model's own parameters."""
    terms, many = float(bounds.most_records), gamma(bounds.most_records + 3 * model.dim + 32)
    if model.loss in ("cox", "gaussian_mean"):
        return 0.0 if neighbours != "add-remove" else up(terms * float(np.max(model.weight)) * many)
    rows = row_bounds(model, bounds)
    longest = largest_row(rows, np.eye(model.dim)).k_2
    if model.loss == "linear":
        return up(terms * float(np.max(model.weight)) * bounds.weight * longest**2 * many)
    slope = slopes(model, bounds, neighbours)
    offset = 0.0 if bounds.offset is None else max(map(abs, bounds.offset))
    shift = gamma(2 * model.dim + 8) * (longest * distance + offset)
    # The third derivative has the same bound as the second; for Student-t, 2 cos⁴(π/8)/(√ν scale) < 1.46/(√ν scale)
    # times that bound.
    steeper = 1.46 / (math.sqrt(model.df) * model.scale) if model.loss == "student_t" else 1.0
    return up(terms * longest**2 * slope.second * (steeper * shift + many))
