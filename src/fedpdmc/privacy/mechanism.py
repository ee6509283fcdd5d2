"""The Gaussian mechanism for released summaries, with randomness from a cryptographic generator."""

from __future__ import annotations

import hashlib
import math

import numpy as np

from fedpdmc.privacy.accountant import up

# Releases are rounded to this share of the noise: the last bits of a sum of floats could otherwise tell of the records.
GRID = 2.0**-20


def noise_multiplier(alpha: float, cost: float, parts: int) -> float:
    """σ/Δ for which ``parts`` releases, each with noise in proportion to its sensitivity, cost ``cost`` at order α.

    Each costs ``α Δ²/(2σ²)``, and costs add. Rounded up.
    """
    return up(math.sqrt(alpha * parts / (2 * cost)))


def normals(key: bytes, count: int) -> np.ndarray:
    """Standard normals by Box and Muller from the 64-bit words of SHAKE-256 under a secret key."""
    pairs = (count + 1) // 2
    words = np.frombuffer(hashlib.shake_256(key).digest(16 * pairs), dtype="<u8").reshape(2, pairs)
    u = (words.astype(np.float64) + 0.5) * 2.0**-64
    radius, angle = np.sqrt(-2 * np.log(u[0])), 2 * np.pi * u[1]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]


def release(values: np.ndarray, sigma: float, key: bytes) -> np.ndarray:
    """``values`` with Gaussian noise of standard deviation σ, rounded to a public grid; exact if σ is zero."""
    if sigma == 0:
        return values
    grid = 2.0 ** math.floor(math.log2(sigma * GRID))
    return np.round((values + sigma * normals(key, values.size).reshape(values.shape)) / grid) * grid


def release_symmetric(matrix: np.ndarray, sigma: float, key: bytes) -> np.ndarray:
    """A symmetric matrix under a bound of its Frobenius norm: entries off the diagonal count twice, so weigh √2."""
    rows, columns = np.triu_indices(matrix.shape[0])
    weight = np.where(rows == columns, 1.0, math.sqrt(2.0))
    upper = release(matrix[rows, columns] * weight, sigma, key) / weight
    out = np.zeros_like(matrix)
    out[rows, columns] = out[columns, rows] = upper
    return out
