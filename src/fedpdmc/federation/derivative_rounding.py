"""Derivatives on a public grid: a site releases as many bits as the search for the reference needs.

Any public quadratic serves as a control variate, so rounding changes how often sites have events and never the posterior.
Exact derivatives have 50 bits in each number, where a record has few: a solver finds the records.

*Grid.* Diagonal entries of the Hessian have a power of two as their scale, ``s_i² ≈ H_ii``. Entries of the Hessian are
rounded to multiples of ``2⁻ᵏ s_i s_j``. With the rounded Hessian ``≈ L Lᵀ`` the gradient becomes ``L r``, with r on a grid
of width ``2⁻ᵏ/√d``: a Newton step moves by at most ``2⁻ᵏ`` standard deviations, however the columns are correlated. Rounding
goes up or down at random, with probabilities that make it right on average (a dither that is the site's secret).

*Digits.* Far from the reference a few are enough for the next step, the fewest after steps of more than `FAR` standard
deviations, and fewer for the gradient. Averages and points next to
the last one have more: control variates are made of them.

*Bits.* What is released is a list of integers, each one of two that the dither decides between. Their law given the records
is P, and Q is a public one: about what the last release predicts, with ``g ≈ g' + H'(x − x')`` and ``H ≈ c H'``, for several
c and widths that are equally likely. The information in the release is at most ``E log₂ P/Q``, whatever is known beforehand;
``log₂ P/Q`` at what is released is counted. Where a dither serves again, P is at most one.

*Values* of the potential are not released. Their differences follow from gradients and Hessians at both ends (`Heights`).
"""

from __future__ import annotations

import hashlib
import math
from typing import NamedTuple

import numpy as np
from scipy.special import logsumexp, ndtr

COARSE = 3  # binary digits of a first release
FINE = 6  # binary digits of averages, and of points near the last one
NEAR = 1.0  # standard deviations, by the site's own curvature, within which a point is near the last one
FEWER = 2  # binary digits that a gradient has less elsewhere
# The least digits of a Hessian elsewhere, which decides how wide the reference is: it has all digits with 4 parameters,
# where they are cheap, and one less whenever their number doubles.
MIDDLE = 4
FAR = 8.0  # standard deviations, by the site's own curvature, from which a release is as coarse as the first
LEAST = 1e-3  # the smallest relative curvature of a direction in which a gradient is rounded finer than along the axes
# Tolerance of the search, in posterior standard deviations; above the effect of rounding on a step.
TOLERANCE = 0.1
LARGEST_EXPONENT = 256
# Of the public law: standard deviations in units of the grid, and factors of a Hessian.
WIDTHS = np.ldexp(np.array([1.0, math.sqrt(2.0)])[:, None], np.arange(-1, 15)).ravel()
FACTORS = np.array([0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0, 1.1, 1.2])
# Factors of steps that change all curvature alike, as those of a logarithmic intercept do; by how much exponents move then.
WIDE_FACTORS = np.exp(np.arange(-5.0, 5.05, 0.1))
SHIFTS = np.arange(-8, 9)
USUAL_EXPONENT = 3.0  # where the public law expects a first exponent
CAUCHY = 0.02  # weight of a Cauchy law in the public law


def digits_of(dim: int, first: bool) -> int:
    """Binary digits of a release. The error of a matrix grows with its dimension."""
    return (COARSE if first else FINE) + int(np.log2(dim) / 4)


def grid(dim: int) -> float:
    """The spacing of releases, in units of their scales."""
    return 2.0 ** -digits_of(dim, False)


def digits_in(hessian: np.ndarray, more: int = 0) -> int:
    """The least number of binary digits that a released Hessian can have, at most ``more`` than the usual number."""
    size, fine = np.ldexp(1.0, scale_exponents(hessian)), digits_of(len(hessian), False) + more
    steps = hessian / np.outer(size, size)
    return next((k for k in range(COARSE, fine) if np.array_equal(s := np.ldexp(steps, k), np.round(s))), fine)


class Release(NamedTuple):
    """Derivatives as a site has released them at a point, and the bits that they carry."""

    x: np.ndarray
    gradient: np.ndarray
    hessian: np.ndarray
    bits: float
    secret: bytes = b""  # from which the dither followed

    @property
    def exponents(self) -> np.ndarray:
        """Binary logarithms of the scales of the parameters."""
        return scale_exponents(self.hessian)


def release(
    x: np.ndarray, gradient: np.ndarray, hessian: np.ndarray, before: Release | None, secret: bytes,
    digits: int | None = None, averaged: bool = False, repeated: bool = False,
) -> Release:  # fmt: skip
    """The derivatives on the grid, with the information in them beyond the release before.

    ``secret``: of the site, for this request: the dither follows from it. ``digits``: binary digits, if not the usual
    ones. ``averaged``: whether they are means over a Gaussian. ``repeated``: whether the secret has served before; its
    dither is then counted once, and hides nothing more.
    """
    chance = np.random.Generator(np.random.Philox(key=int.from_bytes(hashlib.sha256(secret).digest()[:16], "little")))
    hides = 0.0 if repeated else 1.0
    exponents, dim, way = scale_exponents(hessian), len(x), 0.0 if before is None else x - before.x
    moved = 0.0 if before is None else float(np.sqrt(abs(way @ before.hessian @ way)))
    near = averaged or (before is not None and moved < NEAR)
    if digits is None:
        digits = digits_of(dim, not near and (before is None or moved > FAR))
        digits -= (
            0 if near or before is None or moved > FAR else int(np.clip(round(math.log2(dim / 3)), 0, FINE - MIDDLE))
        )
    if before is None:
        bits = surprise(exponents, np.full(dim, USUAL_EXPONENT))
    else:
        # One bit says that none has changed.
        shifted = before.exponents + SHIFTS[:, None]
        bits = 1 + (surprise(exponents, shifted) if (exponents != before.exponents).any() else 0.0)
    size, upper = np.ldexp(1.0, exponents), np.triu_indices(dim)
    unit = (np.ldexp(1.0, -digits) * np.outer(size, size))[upper]
    entries, known = _rounded(hessian[upper] / unit, chance)
    if before is None:
        bits += surprise(entries, np.diag(size**2)[upper] / unit) - hides * known
    else:
        usual, wide = (
            surprise(entries, some[:, None] * before.hessian[upper] / unit) for some in (FACTORS, WIDE_FACTORS)
        )
        bits += 1 - float(np.logaddexp2(-usual, -wide)) - hides * known
    coarse = np.zeros_like(hessian)
    coarse[upper] = entries * unit
    coarse = np.triu(coarse) + np.triu(coarse, 1).T
    factor, width = _factor(coarse, size), np.ldexp(1.0, (0 if near else FEWER) - digits) / np.sqrt(dim)
    steps, known = _rounded(np.linalg.solve(factor, gradient) / width, chance)
    expected = np.zeros(dim) if before is None else before.gradient + before.hessian @ way
    bits += surprise(steps, np.linalg.solve(factor, expected) / width) - hides * known
    return Release(np.array(x), factor @ (steps * width), coarse, float(bits), secret)


def scale_exponents(hessian: np.ndarray) -> np.ndarray:
    """``½ log₂ |H_ii|``, rounded; zero where there is no curvature."""
    diagonal = np.abs(np.diag(hessian))
    found = np.round(np.log2(np.where(diagonal > 0, diagonal, 1.0)) / 2)
    return np.clip(found, -LARGEST_EXPONENT, LARGEST_EXPONENT - 1).astype(int)


def _factor(hessian: np.ndarray, size: np.ndarray) -> np.ndarray:
    """L with ``L Lᵀ ≈ H``, of directions that are not flat."""
    values, vectors = np.linalg.eigh(hessian / np.outer(size, size))
    return size[:, None] * vectors * np.sqrt(np.maximum(np.abs(values), LEAST))


def _rounded(values: np.ndarray, chance: np.random.Generator) -> tuple[np.ndarray, float]:
    """Integers, and the bits of the dither in them: −log₂ of their chance."""
    low, uniform = np.floor(values), chance.random(values.shape)
    up = uniform >= 1 - (values - low)
    return low + up, float(-np.sum(np.log2(np.where(up, values - low, 1 - (values - low)))))


def surprise(numbers: np.ndarray, means: np.ndarray) -> float:
    """−log₂ of the public chance of integers: normal laws about means (n,), or one of several (k, n), rounded."""
    away = numbers - np.atleast_2d(means)
    low, high = ((away + end) / WIDTHS[:, None, None] for end in (-0.5, 0.5))
    # Not high − low, which is zero where rounding hides the difference of the ends.
    cauchy = np.arctan2(1 / WIDTHS[:, None, None], 1 + low * high) / math.pi
    logs = np.log((1 - CAUCHY) * (ndtr(high) - ndtr(low)) + CAUCHY * cauchy).sum(-1)
    return (math.log(logs.size) - float(np.asarray(logsumexp(logs)))) / math.log(2)


class Heights:
    """Differences of a potential between places, from gradients and Hessians there.

    Along a way Δ from one place to another ``U' − U ≈ ½ (g + g')·Δ − Δᵀ(H' − H)Δ/12``, exact up to fourth powers. For means
    over Gaussians, whose covariances differ by D, ``¼ tr((H + H') D)`` is added. Each place is compared with the nearest
    one before.
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
                height = height0 + 0.5 * (gradient0 + gradient) @ way - way @ (hessian - hessian0) @ way / 12
                height += 0.25 * np.sum((hessian0 + hessian) * more)
        self._places.append((np.array(x), wide, bend, gradient, hessian, float(height)))
        return float(height)
