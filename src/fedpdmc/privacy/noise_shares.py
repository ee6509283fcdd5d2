"""Noise in shares: each of M sites adds a part of the noise that the sum over all sites needs.

The attacker knows the sum of all sites' integers and everything about t sites that collude with the coordinator. After
subtracting what it knows, the sum over ``M − t`` sites remains, with the noise of all of them. For that noise to have
standard deviation σ, each site's share is ``σ/√(M − t)``. The noise of the whole sum is ``σ √(M/(M − t))``, compared with
``σ √M`` if every site added all of its noise.

A sum of discrete Gaussians is only nearly a discrete Gaussian: the sum of n with standard deviation s (in cells) has
probabilities within a factor ``e^{±τ}`` of those of the one with ``s √n``, ``τ = 10 Σ_{k<n} exp(−2π² s² k/(k+1))``
(Kairouz, Liu and Steinke, *The distributed discrete Gaussian mechanism*, 2021). With s at least 2²⁹ this is below
``exp(−10¹⁷)``.

All arithmetic is modulo 2¹²⁸. Reduction of the sum is post-processing, and the sum is far too small to wrap around.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedpdmc.errors import InputError
from fedpdmc.privacy.accountant import up
from fedpdmc.privacy.gaussian_mechanism import from_triangle, noisy_integers, public_grid, triangle

MODULUS = 1 << 128
# The grid of numbers that need no noise because they are identical for all neighbours.
FINEST = 2.0**-64
# A single honest site has no partner to share its noise with.
LEAST_HONEST = 2


class ShareTerms(NamedTuple):
    """The public terms that all sites of a sum must agree on.

    Attributes
    ----------
    parties : int
        M: sites that add noise.
    colluding : int
        t: sites that may collude with the coordinator, at most ``M − 2``.
    step : int
        Which release of the run this is.
    gradient, hessian : float
        Standard deviations of each site's share; zero if no noise is needed.
    """

    parties: int
    colluding: int
    step: int
    gradient: float
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
    """The standard deviation of one site's share, rounded up."""
    return up(sigma / math.sqrt(parties - colluding))


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
