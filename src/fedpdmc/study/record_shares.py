"""The effective number of records in a sum, and the largest share of one of them."""

from __future__ import annotations

import math

import numpy as np
from scipy import sparse
from scipy.optimize import linprog

# Relative eigenvalue of a Gram matrix below which a direction is a rounding error.
ROUNDING = 1e-12


def effective_number(weights: np.ndarray) -> np.ndarray:
    """``(Σ w)²/Σ w²`` of contributions ``w ≥ 0`` along the first axis; infinite where all of them are zero."""
    largest = np.max(weights, axis=0, initial=0.0)
    scaled = weights / np.where(largest == 0, 1.0, largest)
    return np.where(largest == 0, np.inf, scaled.sum(0) ** 2 / np.maximum(np.sum(scaled**2, 0), 1.0))


def largest_leverage(rows: np.ndarray, noise: float | np.ndarray = 0.0) -> float:
    """``max_i a_iᵀ (Σ a_j a_jᵀ + N²)⁺ a_i``: the largest share of one row in the sum of squares in any direction.

    N is diagonal, with the noise of the sum in each column.
    """
    return float(np.max(leverages(rows[:, None], noise, ROUNDING), initial=0.0))


def leverages(blocks: np.ndarray, noise: float | np.ndarray = 0.0, least: float = ROUNDING) -> np.ndarray:
    """``λ_max(B^{−½} T_iᵀ T_i B^{−½})`` with ``B = Σ_j T_jᵀ T_j + N²``, of blocks (n, r, k).

    Directions whose eigenvalue of B is below ``least`` of the largest are left out.
    """
    noise = np.broadcast_to(noise, blocks.shape[-1:])
    size = np.sqrt(np.sum(blocks**2, axis=(0, 1)))
    seen = size > 0
    if not blocks.size or not seen.any():
        return np.zeros(len(blocks))
    blocks, noise = blocks[:, :, seen] / size[seen], noise[seen] / size[seen]
    flat = blocks.reshape(-1, blocks.shape[-1])
    values, vectors = np.linalg.eigh(flat.T @ flat + np.diag(noise**2))
    kept = values > least * values[-1]
    whitened = blocks @ (vectors[:, kept] / np.sqrt(values[kept]))
    return np.minimum(np.linalg.norm(whitened, ord=2, axis=(1, 2)) ** 2, 1.0)


def largest_combined_share(rows: np.ndarray, noise: np.ndarray, most: float) -> float:
    """The largest share ``|a_i·c|/(Σ_j |a_j·c| + Σ_k N_k |c_k|)`` of one row in any combination c of the columns.

    The leverages bound it. Of rows whose bound is above ``most`` it is found by a linear program.
    """
    bounds = np.array([share_of_leverage(x) for x in leverages(rows[:, None], noise)])
    over = np.flatnonzero(bounds > most)
    if not over.size:
        return float(bounds.max(initial=0.0))
    size = np.maximum(np.sqrt(np.sum(rows**2, axis=0)), 1e-300)
    terms = np.concatenate([rows / size, np.diag(noise / size)])
    count, width = terms.shape
    limits = sparse.vstack([sparse.hstack([sign * terms, -sparse.eye(count)]) for sign in (1, -1)])
    free = [(None, None)] * width + [(0, None)] * count
    cost, shares = np.r_[np.zeros(width), np.ones(count)], []
    for i in over:
        one = np.r_[terms[i] / np.linalg.norm(terms[i]), np.zeros(count)][None]
        found = linprog(cost, limits, np.zeros(2 * count), one, [1.0], free)
        shares.append(np.linalg.norm(terms[i]) / found.fun if found.success else bounds[i])
    return float(max(shares))


def share_of_leverage(leverage: float) -> float:
    """The largest share of one term in a sum of absolute terms whose squares have leverage λ: ``1/(1 + √((1 − λ)/λ))``."""
    return 1 / (1 + math.sqrt((1 - leverage) / leverage)) if leverage > 0 else 0.0
