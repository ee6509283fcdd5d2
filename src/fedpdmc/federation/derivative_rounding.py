"""Derivatives rounded to what the search for the mode needs.

Exact sums at a dozen points give a dozen times as many equations for the records, and a solver finds many of them. The
search needs two digits of the step, not sixteen. So all points are answered with rounded numbers. Only the last point,
requested a second time, is answered exactly, because the control variates are computed there.
"""

from __future__ import annotations

import numpy as np

# The grid of the value; of gradients, in standard deviations of a posterior of these records alone (over √d); and of the
# Hessian, relative to its diagonal.
VALUE, GRADIENT, HESSIAN = 2.0**-20, 2.0**-5, 2.0**-12
# The smallest relative curvature of a direction in which a gradient is rounded finer than along the axes.
LEAST = 1e-3
# Tolerance of the search, in posterior standard deviations; above the effect of rounding on a step.
TOLERANCE = 0.05


def rounded(value: float, gradient: np.ndarray, hessian: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
    """The derivatives on a grid.

    With the rounded Hessian ``H ≈ L Lᵀ`` the gradient becomes ``L r`` with ``r`` on a grid of width ``2⁻⁵/√d``: the Newton
    step ``−H⁻¹ g`` moves by at most ``2⁻⁶`` standard deviations, however the columns are correlated.
    """
    size = np.sqrt(np.abs(np.diag(hessian)))
    size = np.where(size > 0, size, 1.0)
    units = HESSIAN * np.outer(size, size)
    coarse = np.round(hessian / units) * units
    scaled = coarse / np.outer(size, size)
    values, vectors = np.linalg.eigh((scaled + scaled.T) / 2)
    factor = size[:, None] * vectors * np.sqrt(np.maximum(np.abs(values), LEAST))
    width = GRADIENT / np.sqrt(len(gradient))
    steps = np.round(np.linalg.solve(factor, gradient) / width) * width
    return float(np.round(value / VALUE) * VALUE), factor @ steps, coarse
