"""The Gaussian mechanism for released derivatives, on a public grid and in integers.

Values are rounded to multiples of a public power of two, and noise of the discrete Gaussian law is added in those units.
Shifts by an integer vector of Euclidean length Δ cost ``α Δ²/(2σ²)`` exactly as under the continuous law (Canonne, Kamath
and Steinke, *The discrete Gaussian for differential privacy*, 2020), and no floating-point rounding is involved.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedpdmc.errors import InputError
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


# Shares of noise -------------------------------------------------------------------------------------------------------


BITS = 128
WIDTH, MODULUS = BITS // 8, 1 << BITS  # bytes of a number, and what sums are taken modulo
# The grid of numbers that need no noise because they are identical for all neighbours.
FINEST = 2.0**-64
# A single honest site has no partner to share its noise with.
LEAST_HONEST = 2


class ShareTerms(NamedTuple):
    """The public terms that all sites of a sum must agree on."""

    parties: int  # M: sites that add noise
    colluding: int  # t: sites that may collude with the coordinator, at most ``M − 2``
    step: int  # which release of the run this is
    gradient: float  # sd of each site's share, as for the Hessian; zero if no noise is needed
    hessian: float

    @property
    def grids(self) -> tuple[float, float]:
        """The grids of gradient and Hessian."""
        first, second = (FINEST if sd == 0 else public_grid(sd) for sd in (self.gradient, self.hessian))
        return first, second

    @property
    def total_sd(self) -> tuple[float, float]:
        """Standard deviations of the noise in the sum."""
        root = math.sqrt(self.parties)
        return root * self.gradient, root * self.hessian

    @property
    def digest(self) -> bytes:
        """The input of the masks: masks of sites that disagree on the terms do not cancel."""
        return hashlib.sha256(repr(tuple(self)).encode()).digest()


def check_honest(where: str, parties: int, colluding: int) -> None:
    """Raise `InputError` unless at least two sites do not collude."""
    if parties - colluding < LEAST_HONEST:
        raise InputError(
            where,
            f"{colluding} of {parties} sites with shared noise",
            f"At least {LEAST_HONEST} must be honest: allow at most {max(parties - LEAST_HONEST, 0)}, or omit it; then "
            "every site adds all of its noise.",
        )


def shared_words(parties: int, colluding: int) -> str:
    """What a guarantee with shared noise assumes, in a sentence."""
    most = "none of them colludes" if colluding == 0 else f"at most {colluding} of them collude{'s' * (colluding == 1)}"
    return (
        f"The noise is shared by {parties} sites and only their sum is revealed: the guarantee holds if {most} with the "
        "coordinator."
    )


def share(sigma: float, parties: int, colluding: int) -> float:
    """The standard deviation of one site's share, rounded up; zero of nothing."""
    return up(sigma / math.sqrt(parties - colluding)) if sigma > 0 else 0.0


def noisy_share(gradient: np.ndarray, hessian: np.ndarray, terms: ShareTerms, key: bytes) -> list[int]:
    """A site's part of the sum: its gradient and the triangle of its Hessian in cells, each with its share of the noise."""
    found = []
    for values, sd, grid, what in zip(
        (gradient, triangle(hessian)), (terms.gradient, terms.hessian), terms.grids, (b"gradient", b"hessian"),
        strict=True,
    ):  # fmt: skip
        if not np.isfinite(values).all():
            raise ValueError("derivatives that are not finite")
        if sd == 0:
            found += [round(float(x) / grid) for x in values]
        else:
            found += noisy_integers(values, sd, grid, key + what)
    if max(map(abs, found)) >= MODULUS // (2 * terms.parties):
        raise ValueError("numbers that could wrap around")
    return found


def from_sum(numbers: Sequence[int], terms: ShareTerms, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Gradient and Hessian of all sites, with the noise of all shares, from the sum modulo 2¹²⁸."""
    cells = [(number + MODULUS // 2) % MODULUS - MODULUS // 2 for number in numbers]
    first, second = terms.grids
    gradient = np.array([float(k) for k in cells[:dim]]) * first
    return gradient, from_triangle(np.array([float(k) for k in cells[dim:]]) * second, dim)


def words(numbers: Sequence[int]) -> np.ndarray:
    """Numbers modulo 2¹²⁸ as 64-bit words, low word first."""
    return np.frombuffer(b"".join((n % MODULUS).to_bytes(WIDTH, "little") for n in numbers), "<u8")


def numbers(raw: bytes) -> list[int]:
    """The inverse of `words`, from bytes."""
    return [int.from_bytes(raw[at : at + WIDTH], "little") for at in range(0, len(raw), WIDTH)]


def total_integers(messages: Sequence[np.ndarray]) -> list[int]:
    """The sum of all sites' masked integers modulo 2¹²⁸, in which the masks cancel."""
    columns = zip(*(numbers(np.asarray(message, "<u8").tobytes()) for message in messages), strict=True)
    return [sum(column) % MODULUS for column in columns]
