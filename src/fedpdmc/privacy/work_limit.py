"""How much work a plan can be, from public facts: one that would take for ever is refused before the records are touched."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from fedpdmc.privacy.bounds import Bounds
from fedpdmc.privacy.sensitivity import Model, largest_row, predictor_reach, row_bounds, slopes

# Cells of a plan, by the public bound of their number, beyond which it is refused.
MOST_CELLS = 2.0**18


def steepness(
    model: Model, bounds: Bounds, neighbours: str, scale: np.ndarray, where: np.ndarray
) -> tuple[float, float, float, float]:
    """``N s_1 k, N s_2 k², N s_3 k³`` and ``k``: bounds of the gradient of all records and of how it can change.

    ``s_j`` bounds the j-th derivative of the loss, ``k`` a whitened record (zero where no reach depends on it), and
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
    excess: float,
    control: tuple[float, float],
    farthest: np.ndarray,
    speed: np.ndarray,
    horizon: np.ndarray,
) -> np.ndarray:
    """An upper bound of the cells in which a plan is walked, up to a small factor, for each chain.

    In a cell of length c the bound of the rates of d coordinates may rise by ``r'c + ½r''c²``, and the points that adds
    must be few: ``d (r'c + ½r''c²) c ≤ ¼``.

    Parameters
    ----------
    steep : tuple
        Of `steepness`.
    dim : int
    rotating : bool
    excess : float
        ``ρ``, and what bounds allow for rounding.
    control : (float, float)
        Norms of the control variate's whitened Hessian, and of its slope on the plan.
    farthest, speed, horizon : (C,)
        Euclidean norms of position and speed on the whole plan, and its length.
    """
    gradient, second, third, reach = steep
    curvature, slope = control
    size = np.hypot(farthest, speed) if rotating else speed
    turn = (second + curvature) * size
    bend = third * size**2
    if rotating:
        here = gradient + second * farthest + slope
        first, then = size * (here + turn), 1.1 * size * (here + 3 * turn + bend)
    else:
        first, then = speed * turn, speed * bend
    short = [4.0 + 0 * size, np.sqrt(8 * dim * first), np.cbrt(4 * dim * then), reach * size, 4 * dim * excess * size]
    return horizon * np.max(short, 0)
