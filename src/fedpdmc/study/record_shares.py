"""The effective number of records in a sum, and the largest share of one of them."""

from __future__ import annotations

import math

import numpy as np

# Relative eigenvalue of a Gram matrix below which a direction is a rounding error.
ROUNDING = 1e-12


def effective_number(weights: np.ndarray) -> np.ndarray:
    """``(Σ w)²/Σ w²`` of contributions ``w ≥ 0`` along the first axis; infinite where all of them are zero."""
    largest = np.max(weights, axis=0, initial=0.0)
    scaled = weights / np.where(largest == 0, 1.0, largest)
    return np.where(largest == 0, np.inf, scaled.sum(0) ** 2 / np.maximum(np.sum(scaled**2, 0), 1.0))


def largest_leverage(rows: np.ndarray) -> float:
    """``max_i a_iᵀ (Σ a_j a_jᵀ)⁺ a_i``: the largest share of one row in the sum of squares in any direction."""
    size = np.sqrt(np.sum(rows**2, axis=0))
    rows = rows[:, size > 0] / size[size > 0]
    if not rows.size:
        return 0.0
    values, vectors = np.linalg.eigh(rows.T @ rows)
    kept = values > ROUNDING * values[-1]
    whitened = rows @ (vectors[:, kept] / np.sqrt(values[kept]))
    return min(float(np.sum(whitened**2, axis=1).max()), 1.0)


def share_of_leverage(leverage: float) -> float:
    """The largest share of one term in a sum of absolute terms whose squares have leverage λ: ``1/(1 + √((1 − λ)/λ))``."""
    return 1 / (1 + math.sqrt((1 - leverage) / leverage)) if leverage > 0 else 0.0
