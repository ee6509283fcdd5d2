"""A bound on the work of a plan, from public facts: a plan that takes too long is refused before the records are touched.

A walk (`fedpdmc.clocks.private_arrivals`) makes passes over the records. At a pass it has a certified ceiling of its rates,
and moves to the first point below the ceiling within a dyadic interval of length ℓ with ``d ℓ · ceiling < 2μ``,
``¼ < μ ≤ ½``, or to the end of the interval if there is no point (an *empty* pass). With ``c = H/cells`` (see `cells`),
the ceiling is at most ``V + W + E``: V the largest signed rate at the current point, ``W + E`` its rise and the excess, and

    d c (W + E) ≤ ½.

Let ``ℓ_A`` be the largest dyadic length of at most ``c/4``, so that ``d ℓ_A (W + E) ≤ ⅛``. Then:

1. Any pass is empty with probability at least ``e^{−2μ} ≥ 1/e``, given the past: points beyond the last one that was judged
   have not been examined.
2. If ``d ℓ_A V ≤ ¼`` (A), an interval of length ℓ_A fits: an empty pass leaves the current cell of length ℓ_A.
   There are at most ``a = 8 cells + 2 + 2S`` of them with S segments.
3. Else (B) ``W + E ≤ V/2``, so the rate of the steepest coordinate is at least V/2 within ℓ_A, and an interval of length at
   least ``1/(8dV)`` fits. If ``1/(16dV)`` of it is ahead, the walk ends at this pass, with an arrival, with probability at
   least ``(V/2) (1/(16dV)) e^{−2μ} ≥ 1/(88 d)``. (The coordinate is faster than `SLOWEST` there: else V would be in E.)
4. If less is ahead, an empty pass goes to the end of the interval. There V is still at least half as large and a whole
   interval is ahead: the next pass is one of 2 or 3, or begins a segment.

Hence, with ``n = 2¹⁴ d``: there are more than n passes of 3 with probability at most ``(1 − 1/(88d))ⁿ < e^{−186}``, and more
than ``4(a + n)`` passes of 2 with less than ``e^{−n/10}`` (Hoeffding, by 1). So at most ``5a + 6n + S`` passes are empty,
and there are at most four times as many in all (Hoeffding again). A walk of more than `most_passes` has probability below
2⁻²⁶⁷ under any data set.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from fedpdmc.privacy.declared_bounds import Bounds
from fedpdmc.privacy.sensitivity import Model, largest_row, predictor_reach, row_bounds, slopes

# The largest number of cells of a plan, by their public bound.
MOST_CELLS = 2.0**18
# Passes per coordinate within which a walk at high rates ends, except with probability e^{−186}.
STEEP_PASSES = 1 << 14
# Coordinates slower than this do not flip.
SLOWEST = 2.0**-20
# Relative error of a position in `fedpdmc.clocks.envelopes.quadratic_rate_bound`.
POSITION_SLACK = 1e-13


def steepness(
    model: Model, bounds: Bounds, neighbours: str, scale: np.ndarray, where: np.ndarray
) -> tuple[float, float, float, float]:
    """``N s_1 k, N s_2 k², N s_3 k³`` and ``k``: bounds on the gradient of all records and on its derivatives.

    ``s_j`` bounds the j-th derivative of the loss, ``k`` a whitened record (zero if no reach depends on it), and
    ``where`` each parameter on the plan. A linear model's gradient is bounded at distance one, and grows like its slope.
    """
    terms = float(bounds.most_records)
    if model.loss == "cox":
        k, top = float(np.linalg.norm(scale, axis=1).max()), math.exp(min(float(np.max(where)) + 1, 700.0))
        return k * (top + terms), k * k * top, k**3 * top, k
    if model.loss == "gaussian_mean":
        weight = np.broadcast_to(model.weight, (model.dim,))
        k = largest_row(bounds, weight[:, None] * scale).k_2
        return terms * k, terms * float(np.max(weight)) * float(np.linalg.norm(scale, 2)) ** 2, 0.0, 0.0
    k = largest_row(row_bounds(model, bounds), scale).k_2
    if model.loss == "linear":
        high = 0.0 if bounds.outcome is None else max(map(abs, bounds.outcome))
        weight = float(np.max(model.weight))
        return terms * k * weight * (high + k), terms * k * k * weight, 0.0, 0.0
    if model.loss == "poisson":
        reach = predictor_reach(model, dataclasses.replace(bounds, region=np.maximum(where, 1e-300)))
        # The loss is bounded within distance one of a predictor.
        top = math.exp(min(reach + max(bounds.offset or (0.0,)) + 1, 700.0))
        high = 0.0 if bounds.outcome is None else bounds.outcome[1]
        return terms * k * (top + high), terms * k * k * top, terms * k**3 * top, k
    slope = slopes(model, bounds, neighbours)
    third = 0.1 if model.loss == "logistic" else 1.46 * slope.second / (math.sqrt(model.df) * model.scale)
    return terms * slope.first * k, terms * slope.second * k * k, terms * third * k**3, 0.0


def cells(
    steep: tuple[float, float, float, float],
    dim: int,
    rotating: bool,
    excess: tuple[float, float],
    control: tuple[float, float],
    farthest: np.ndarray,
    speed: np.ndarray,
    horizon: np.ndarray,
) -> np.ndarray:
    """``H/c`` for each chain: c is so short that ``d c (W + E) ≤ ½`` and that ceilings hold for a time c.

    On lines signed rates have ``|r'| ≤ v (N s_2 k² + B) v`` and ``|r''| ≤ v N s_3 k³ v²``, with B the control variate's
    Hessian. On rotations, with A the norm of ``(a, v)``, ``G`` a bound of the gradient and t ≤ ¼ the reach of a ceiling,

        |r'| ≤ A (G + T),  |r''| ≤ A ((1+t) G + (3+3t) T + (1+t)(1+2t) N s_3 k³ A²)/(1 − t²/2),  T = (N s_2 k² + B) A,

    where the ceilings' own second-order terms are bounded, not only those of the rates.

    Parameters
    ----------
    steep : tuple
        The result of `steepness`.
    dim : int
    rotating : bool
    excess : (float, float)
        ρ, and the bound on the rounding of a gradient.
    control : (float, float)
        Norms of the control variate's whitened Hessian, and of its slope on the plan.
    farthest, speed, horizon : (C,)
        Euclidean norms of position and speed on the whole plan, and its length.
    """
    gradient, second, third, reach = steep
    curvature, slope = control
    size = np.hypot(farthest, speed) if rotating else speed
    turn, bend = (second + curvature) * size, third * size**2
    rises, falls = size * turn, size * bend
    least = (excess[0] + (1 + dim) * excess[1]) * size
    if rotating:
        here = gradient + second * farthest + slope
        rises, falls = size * (here + turn), size * (1.3 * here + 3.9 * turn + 2.0 * bend)
        least = least + SLOWEST * here
    least = least + POSITION_SLACK * (1 + farthest) * rises
    # d c (r' c + ½ r'' c²) ≤ ⅛ + ⅛, and d c E ≤ ¼.
    inverse = [4.0 + 0 * size, np.sqrt(8 * dim * rises), np.cbrt(4 * dim * falls), reach * size, 4 * dim * least]
    return horizon * np.max(inverse, 0)


def most_passes(cells: float, dim: int, segments: int) -> int:
    """Maximum number of passes over the records of a walk, except with probability 2⁻²⁶⁷: ``4(5a + 6n + S)``."""
    empty = 8 * cells + 2 + 2 * segments
    return math.ceil(4 * (5 * empty + 6 * STEEP_PASSES * dim + segments))
