"""Public rules for means over a Gaussian: nodes in one dimension, and points in several."""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np

# Nodes for the predictor of one record; nodes along each axis for functions of few parameters, and the most of these.
PREDICTOR_NODES, AXIS_NODES, MOST_AXES = 20, 5, 3
# Parameters up to which blocks of orthogonal points are used, and the number of points beyond.
MOST_ORTHOGONAL, MANY_POINTS = 16, 64


@functools.cache
def hermite(count: int = PREDICTOR_NODES) -> tuple[np.ndarray, np.ndarray]:
    """Gauss–Hermite nodes and weights of a standard normal variable: exact for polynomials of degree ``2 count − 1``."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(count)
    return nodes, weights / weights.sum()


@functools.cache
def public_points(dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Points and weights for means of a function of ``dim`` standard normal variables, the same in every process.

    A grid for few variables. Then ``±r_j q`` with q the columns of two fixed orthogonal matrices and
    ``r_j² = d ± √(2d)``: the means of ``r²`` and ``r⁴`` are ``d`` and ``d(d + 2)``, as for a Gaussian, and cubics are exact.
    Beyond, pairs ``±ε`` of fixed normal vectors. All weights are positive: a mean of convex functions stays convex.
    """
    if dim <= MOST_AXES:
        nodes, weights = hermite(AXIS_NODES)
        grid = np.array(list(itertools.product(nodes, repeat=dim)))
        return grid, np.array([math.prod(w) for w in itertools.product(weights, repeat=dim)])
    rng = np.random.default_rng(0)
    if dim <= MOST_ORTHOGONAL:
        radii = np.sqrt([dim - math.sqrt(2 * dim), dim + math.sqrt(2 * dim)])
        half = np.concatenate([r * np.linalg.qr(rng.standard_normal((dim, dim)))[0] for r in radii])
    else:
        half = rng.standard_normal((MANY_POINTS // 2, dim))
    points = np.concatenate([half, -half])
    return points, np.full(len(points), 1 / len(points))
