"""A bound on the rounding error of a site's gradient, from public facts; it is added to the sensitivity K.

A site computes ``Σ_n ℓ'(ξ_n·a + o_n) ξ_n``, with whitened records, in 64-bit numbers. With ``γ_n = n u/(1 − n u)`` and
u = 2⁻⁵³, the error of a sum of n terms is at most γ_n times the sum of their sizes, in any order of summation. Hence,
for at most N terms with ``|ℓ'| ≤ s₁`` and ``|ℓ''| ≤ s₂``, predictors with error δz, and k a bound on
``‖ |S|ᵀ|ξ| ‖``, the error of the gradient is at most

    r = N k (s₂ δz + s₁ (γ_N + γ_{d+16})),    δz = γ_{2d+8} (k |a| + |ξ| |c| + |o|).

Two neighbours' computed gradients differ by at most K + 2r. A rate is compared with levels on a grid: near a level λ their
spacing is at most ``max(2⁻⁵⁵, 2⁻⁵² λ)``, which counts as an error of the rate. Per unit of speed, at least 2⁻²⁰,
that is ``2⁻³⁵ + 2⁻⁵²(|G_i| + ρ)`` in each coordinate, hence ``√d 2⁻³⁵ + 2⁻⁵²(|G| + √d ρ)`` in Euclidean norm.

The bound needs a limit on the distance of plans from the centre, and one on the slope of the public control variate. Both
are chosen here, from public facts, so that r is small compared with K.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from fedpdmc.errors import InputError
from fedpdmc.privacy.accountant import Sensitivity, up
from fedpdmc.privacy.declared_bounds import Bounds
from fedpdmc.privacy.sensitivity import ModelFacts, largest_row, row_bounds, slopes

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
    """The limits that a site puts on every plan of a run, and the resulting K, from public facts alone.

    Attributes
    ----------
    distance : float
        Euclidean norm of ``(a, v)`` on rotations, of ``a`` on lines, on a whole plan.
    slope : float
        The largest ``|∇q|`` of the control variate, in whitened coordinates, on a whole plan.
    rounding : float
        ``r``, included in `sensitivity`.
    sensitivity : Sensitivity
        ``K + 2r``.
    """

    distance: float
    slope: float
    rounding: float
    sensitivity: Sensitivity


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
    """The widest limits at which rounding is small compared with K.

    Parameters
    ----------
    model, bounds, neighbours
        As `fedpdmc.privacy.sensitivity.sensitivity` takes them.
    scale, center : arrays of shapes (k, d) and (k,)
        The rows of S, and the centre, of the site's own parameters.
    exact : Sensitivity
        K in real arithmetic.
    excess : float
        An upper bound on the excess rate.

    Raises
    ------
    InputError
        In these coordinates rounding errors are as large as the effect of one record.
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
