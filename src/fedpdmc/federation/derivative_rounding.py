"""Derivatives on a public grid: a site releases as many bits as the search for the reference needs.

Any public quadratic serves as a control variate, so rounding changes how often sites have events and never the posterior.
Exact derivatives have 50 bits in each number, where a record has few: a solver finds the records.

*Grid.* Diagonal entries of the Hessian have a power of two as their scale, ``s_i² ≈ H_ii``. Entries of the Hessian are
rounded to multiples of ``2⁻ᵏ s_i s_j``. With the rounded Hessian ``≈ L Lᵀ`` the gradient becomes ``L r``, with r on a grid
of width ``2⁻ᵏ/√d``: a Newton step moves by at most ``2⁻ᵏ`` standard deviations, however the columns are correlated. Rounding
goes up or down at random, with probabilities that make it right on average (a dither that is the site's secret).

*Bits.* What is released is a list of integers. Their differences from what the last release predicts, with
``g ≈ g' + H'(x − x')``, are written in a prefix code that does not depend on the records: a Rice code whose parameter is
written first. Its length bounds the information in the release, whatever is known beforehand.

*Values* of the potential are not released. Their differences follow from gradients and Hessians at both ends (`Heights`).
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np

# Binary digits of a release far from the reference, the first or one where the curvature still changes, and of all others.
COARSE, FINE = 3, 6
# The smallest relative curvature of a direction in which a gradient is rounded finer than along the axes.
LEAST = 1e-3
# Tolerance of the search, in posterior standard deviations; above the effect of rounding on a step.
TOLERANCE = 0.1
EXPONENT_BITS = 9  # for the first exponent of a diagonal entry
LARGEST_EXPONENT = 2 ** (EXPONENT_BITS - 1)
MOST_PARAMETER = 40  # of a Rice code


def digits_of(dim: int, first: bool) -> int:
    """Binary digits of a release. The error of a matrix grows with its dimension."""
    return (COARSE if first else FINE) + int(np.log2(dim) / 4)


class Release(NamedTuple):
    """Derivatives as a site has released them at a point, and the length of their code."""

    x: np.ndarray
    gradient: np.ndarray
    hessian: np.ndarray
    bits: float

    @property
    def exponents(self) -> np.ndarray:
        """Binary logarithms of the scales of the parameters."""
        return _exponents(self.hessian)


def release(
    x: np.ndarray, gradient: np.ndarray, hessian: np.ndarray, before: Release | None, secret: bytes,
    digits: int | None = None,
) -> Release:  # fmt: skip
    """The derivatives on the grid, coded by their difference from the release before.

    Parameters
    ----------
    secret : bytes
        Of the site, for this request: the dither follows from it.
    digits : int, optional
        Binary digits, if not the usual ones.
    """
    chance = np.random.Generator(np.random.Philox(key=int.from_bytes(hashlib.sha256(secret).digest()[:16], "little")))
    exponents = _exponents(hessian)
    if digits is None:
        digits = digits_of(len(x), before is None or _far_from(before, hessian))
    if before is None:
        bits = EXPONENT_BITS + rice_bits(np.diff(exponents))
    else:
        # One bit says that none has changed, and one how many digits there are.
        change = exponents - before.exponents
        bits = 2 + (rice_bits(change) if change.any() else 0.0)
    size, upper = np.ldexp(1.0, exponents), np.triu_indices(len(x))
    unit = (np.ldexp(1.0, -digits) * np.outer(size, size))[upper]
    entries = _rounded(hessian[upper] / unit, chance)
    expected = np.diag(size**2) if before is None else before.hessian
    bits += rice_bits(entries - np.round(expected[upper] / unit))
    coarse = np.zeros_like(hessian)
    coarse[upper] = entries * unit
    coarse = np.triu(coarse) + np.triu(coarse, 1).T
    factor, width = _factor(coarse, size), np.ldexp(1.0, -digits) / np.sqrt(len(x))
    steps = _rounded(np.linalg.solve(factor, gradient) / width, chance)
    expected = np.zeros(len(x)) if before is None else before.gradient + before.hessian @ (x - before.x)
    bits += rice_bits(steps - np.round(np.linalg.solve(factor, expected) / width))
    return Release(np.array(x), factor @ (steps * width), coarse, float(bits))


def _far_from(before: Release, hessian: np.ndarray) -> bool:
    """Whether a diagonal entry has changed twofold, so that the search is still far away."""
    one, other = np.abs(np.diag(before.hessian)), np.abs(np.diag(hessian))
    return bool(np.any(np.abs(one - other) > 0.5 * np.maximum(one, other)))


def _exponents(hessian: np.ndarray) -> np.ndarray:
    """``½ log₂ |H_ii|``, rounded; zero where there is no curvature."""
    diagonal = np.abs(np.diag(hessian))
    found = np.round(np.log2(np.where(diagonal > 0, diagonal, 1.0)) / 2)
    return np.clip(found, -LARGEST_EXPONENT, LARGEST_EXPONENT - 1).astype(int)


def _factor(hessian: np.ndarray, size: np.ndarray) -> np.ndarray:
    """L with ``L Lᵀ ≈ H``, of directions that are not flat."""
    values, vectors = np.linalg.eigh(hessian / np.outer(size, size))
    return size[:, None] * vectors * np.sqrt(np.maximum(np.abs(values), LEAST))


def _rounded(values: np.ndarray, chance: np.random.Generator) -> np.ndarray:
    return np.floor(values + chance.random(values.shape))


def rice_bits(numbers: np.ndarray) -> float:
    """The length of a Rice code of signed integers; its parameter k comes first, in the code of Elias for k + 1."""
    folded = np.where(numbers >= 0, 2 * numbers, -2 * numbers - 1)
    return min(
        2 * np.floor(np.log2(k + 1)) + 1 + float(np.sum(1 + k + np.floor(np.ldexp(folded, -k))))
        for k in range(MOST_PARAMETER)
    )


class Heights:
    """Differences of a potential between places, from gradients and Hessians there.

    Along a way Δ from one place to another ``U' − U ≈ ½ (g + g')·Δ``, and for means over Gaussians, whose covariances differ
    by D, ``¼ tr((H + H') D)`` more. Each place is compared with the nearest one before.
    """

    def __init__(self):
        self._places: list[tuple[np.ndarray, np.ndarray, bytes, np.ndarray, np.ndarray, float]] = []

    def at(self, x, spread: np.ndarray | None, bend: bytes, gradient: np.ndarray, hessian: np.ndarray) -> float:
        """The height of a place above the first one with the same bend."""
        wide = np.zeros((len(x), len(x))) if spread is None else spread @ spread.T
        best, height = np.inf, 0.0
        for x0, wide0, bend0, gradient0, hessian0, height0 in self._places:
            way, more = x - x0, wide - wide0
            far = abs(float(way @ hessian0 @ way)) + abs(float(np.sum(hessian0 * more)))
            if bend0 == bend and far < best:
                best = far
                height = height0 + 0.5 * (gradient0 + gradient) @ way + 0.25 * np.sum((hessian0 + hessian) * more)
        self._places.append((np.array(x), wide, bend, gradient, hessian, float(height)))
        return float(height)
