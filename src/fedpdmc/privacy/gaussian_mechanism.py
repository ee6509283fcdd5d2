"""The Gaussian mechanism for released derivatives, on a public grid and in integers.

Values are rounded to multiples of a public power of two, and noise of the discrete Gaussian law is added in those units.
Shifts by an integer vector of Euclidean length Δ cost ``α Δ²/(2σ²)`` exactly as under the continuous law (Canonne, Kamath
and Steinke, *The discrete Gaussian for differential privacy*, 2020), and no floating-point rounding is involved.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np

from fedpdmc.privacy.accountant import up

# The grid, as a share of the noise.
GRID = 2.0**-30
CHUNK = 4096


def noise_multiplier(alpha: float, cost: float) -> float:
    """σ/Δ of a release with Gaussian noise that costs ``cost`` at order α: ``α Δ²/(2σ²)``. Rounded up."""
    return up(math.sqrt(alpha / (2 * cost)))


def noise_scale(multiplier: float, sensitivity: float, rounding: float, count: int) -> float:
    """σ for ``count`` numbers that change by at most Δ and are computed up to an error r; zero if Δ is.

    Neighbours' numbers are at most ``Δ + 2r`` apart. Rounding to the grid, with cells of length ``GRID σ``, adds at
    most ``√n`` cells: ``σ = m (Δ + 2r + √n GRID σ)``. Rounded up.
    """
    if sensitivity == 0:
        return 0.0
    return up(multiplier * (sensitivity + 2 * rounding) / (1 - up(multiplier * math.sqrt(count) * GRID)))


class SecretIntegers:
    """Uniform integers from SHAKE-256 under a secret key, and exact samplers built on them."""

    def __init__(self, key: bytes):
        self._key, self._block, self._bytes = key, 0, b""

    def below(self, n: int) -> int:
        """Uniform on 0 … n − 1."""
        size = ((n - 1).bit_length() + 7) // 8
        while size:
            if len(self._bytes) < size:
                more = hashlib.shake_256(self._key + self._block.to_bytes(8, "little")).digest(CHUNK)
                self._bytes, self._block = self._bytes + more, self._block + 1
            drawn, self._bytes = int.from_bytes(self._bytes[:size], "little"), self._bytes[size:]
            if (drawn := drawn >> (8 * size - (n - 1).bit_length())) < n:
                return drawn
        return 0

    def decays(self, above: int, below: int) -> bool:
        """True with probability ``exp(−above/below)``."""
        for _ in range(above // below):
            if not self._decays_once(1, 1):
                return False
        return self._decays_once(above % below, below)

    def _decays_once(self, above: int, below: int) -> bool:
        """The same for a fraction of at most one, by sampling the alternating series of the exponential."""
        k = 1
        while self.below(below * k) < above:
            k += 1
        return k % 2 == 1

    def laplace(self, scale: int) -> int:
        """The integer k with probability proportional to ``exp(−|k|/scale)``."""
        while True:
            u = self.below(scale)
            if not self.decays(u, scale):
                continue
            v = 0
            while self.decays(1, 1):
                v += 1
            negative, size = self.below(2), u + scale * v
            if size or not negative:
                return -size if negative else size

    def gaussian(self, sigma: int) -> int:
        """The integer k with probability proportional to ``exp(−k²/(2σ²))``."""
        scale = sigma + 1
        while True:
            drawn = self.laplace(scale)
            if self.decays((abs(drawn) * scale - sigma**2) ** 2, 2 * sigma**2 * scale**2):
                return drawn


def public_grid(sigma: float) -> float:
    """The grid of numbers with noise of standard deviation σ: a power of two."""
    return 2.0 ** math.floor(math.log2(sigma * GRID))


def noisy_integers(values: np.ndarray, sigma: float, grid: float, key: bytes) -> list[int]:
    """``values`` in cells of a public grid, with discrete Gaussian noise of standard deviation σ or a little more."""
    source, width = SecretIntegers(key), math.ceil(sigma / grid)
    return [round(float(x) / grid) + source.gaussian(width) for x in values.ravel()]


def release(values: np.ndarray, sigma: float, key: bytes) -> np.ndarray:
    """``values``, rounded to a public grid, with discrete Gaussian noise of standard deviation σ or a little more.

    No noise is added if σ is zero: then the values are identical for all neighbours.
    """
    if sigma == 0:
        return values
    grid = public_grid(sigma)
    noisy = noisy_integers(values, sigma, grid, key)
    return (np.array([float(k) for k in noisy]) * grid).reshape(values.shape)


def triangle(matrix: np.ndarray) -> np.ndarray:
    """The upper triangle of a symmetric matrix, with off-diagonal entries times √2, which keeps the Frobenius norm."""
    rows, columns = np.triu_indices(matrix.shape[0])
    return matrix[rows, columns] * np.where(rows == columns, 1.0, math.sqrt(2.0))


def from_triangle(values: np.ndarray, dim: int) -> np.ndarray:
    """The inverse of `triangle`."""
    rows, columns = np.triu_indices(dim)
    out = np.zeros((dim, dim))
    out[rows, columns] = out[columns, rows] = values / np.where(rows == columns, 1.0, math.sqrt(2.0))
    return out


def release_symmetric(matrix: np.ndarray, sigma: float, key: bytes) -> np.ndarray:
    """A symmetric matrix with noise, for a bound on its Frobenius norm."""
    return from_triangle(release(triangle(matrix), sigma, key), matrix.shape[0])
