"""The posterior given noisy derivatives: the noise is part of the uncertainty.

Near a public point x a likelihood of many records is ``exp(−g·δ − ½ δᵀHδ)`` in ``δ = θ − x``, so the gradient g tells of θ
as an observation from ``N(−Hδ, H)`` does (the score is centred at the truth, with the information as its variance). What is
seen is ``ĝ = g + N(0, Σ)`` and ``Ĥ = H + E`` with Gaussian E, so that

    p(θ, H | ĝ, Ĥ) ∝ p(θ) N(ĝ; −H(θ − x), H + Σ) N(Ĥ; H) 1[H positive definite].

Given H this is Gaussian in θ, with precision ``P_0 + H (H + Σ)⁻¹ H``: without noise that of the Laplace approximation, with
ever more noise that of the prior. H is integrated over by elliptical slice sampling (Murray, Adams and MacKay, 2010).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

# Draws of the Hessian that are made side by side, and sweeps of the slice sampler for each of them.
HESSIANS, SWEEPS = 256, 25
# A slice shrinks geometrically: beyond so many steps it is the point itself, up to rounding.
MOST_SHRINKS = 60
# Share of the noise that the least eigenvalue of a start keeps.
LEAST_EIGENVALUE = 1e-2


class Release(NamedTuple):
    """Noisy derivatives of the log likelihood of all sites together, at one point.

    Attributes
    ----------
    x, gradient : arrays of shape (d,)
    hessian : array of shape (d, d)
    gradient_sd : array of shape (d,)
        Standard deviations of the noise, by coordinate.
    hessian_sd : array of shape (d, d)
        The same by entry; entries (i, j) and (j, i) have the same noise.
    """

    x: np.ndarray
    gradient: np.ndarray
    hessian: np.ndarray
    gradient_sd: np.ndarray
    hessian_sd: np.ndarray


class Gaussian(NamedTuple):
    """A Gaussian prior."""

    mean: np.ndarray
    precision: np.ndarray


def given_hessian(release: Release, hessian: np.ndarray, prior: Gaussian) -> tuple[np.ndarray, np.ndarray]:
    """Mean and covariance of θ given H, for any number of H along leading axes.

    ``−½ (ĝ + Hδ)ᵀ V⁻¹ (ĝ + Hδ)`` with ``V = H + Σ`` has precision ``H V⁻¹ H`` and linear term ``−H V⁻¹ ĝ``.
    """
    spread = hessian + np.diag(release.gradient_sd**2)
    weighted = np.linalg.solve(spread, hessian)
    precision = prior.precision + np.swapaxes(weighted, -1, -2) @ hessian
    precision = (precision + np.swapaxes(precision, -1, -2)) / 2
    linear = prior.precision @ (prior.mean - release.x) - np.swapaxes(weighted, -1, -2) @ release.gradient
    covariance = np.linalg.inv(precision)
    return release.x + (covariance @ linear[..., None])[..., 0], covariance


def believable(hessian: np.ndarray, sd: np.ndarray) -> np.ndarray:
    """The nearest matrix whose eigenvalues are positive: at least a small share of the noise."""
    values, vectors = np.linalg.eigh((hessian + hessian.T) / 2)
    least = max(LEAST_EIGENVALUE * float(np.max(sd)), 1e-12 * float(np.abs(values).max()), 1e-300)
    return (vectors * np.maximum(values, least)) @ vectors.T


def draws(release: Release, prior: Gaussian, n: int, rng: np.random.Generator) -> np.ndarray:
    """``n`` draws of θ, of shape (n, d), with both noises integrated over."""
    hessians = _hessians(release, prior, rng)
    means, covariances = given_hessian(release, hessians, prior)
    factors = np.linalg.cholesky((covariances + np.swapaxes(covariances, -1, -2)) / 2)
    which = rng.permutation(np.arange(n) % len(means))
    return means[which] + np.einsum("nij,nj->ni", factors[which], rng.standard_normal((n, means.shape[1])))


def _hessians(release: Release, prior: Gaussian, rng: np.random.Generator) -> np.ndarray:
    """Draws of H from its posterior: its error E is Gaussian a priori, the rest of the density decides on slices."""
    center, sd, prior_cov = release.hessian, release.hessian_sd, np.linalg.inv(prior.precision)
    start = believable(center, sd)
    if not np.any(sd > 0):
        return start[None]

    def log_density(error: np.ndarray) -> np.ndarray:
        hessian = center + error
        inside = np.linalg.eigvalsh(hessian)[:, 0] > 0
        hessian = np.where(inside[:, None, None], hessian, start)
        return np.where(inside, _evidence(release, hessian, prior.mean, prior_cov), -np.inf)

    error = np.broadcast_to(start - center, (HESSIANS, *start.shape))
    now = log_density(error)
    for _ in range(SWEEPS):
        error, now = _slice(error, now, log_density, _symmetric_noise(sd, HESSIANS, rng), rng)
    return center + error


def _evidence(release: Release, hessian: np.ndarray, mean: np.ndarray, cov: np.ndarray) -> np.ndarray:
    """``log N(ĝ; −H(μ_0 − x), H + Σ + H C_0 H)``: θ integrated over, for each H."""
    spread = hessian + np.diag(release.gradient_sd**2) + hessian @ cov @ hessian
    off = release.gradient + hessian @ (mean - release.x)
    return -0.5 * (np.linalg.slogdet(spread)[1] + np.sum(off * np.linalg.solve(spread, off[..., None])[..., 0], -1))


def _symmetric_noise(sd: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Symmetric matrices of independent Gaussian entries."""
    upper = np.triu(rng.standard_normal((count, *sd.shape)) * sd)
    return upper + np.swapaxes(np.triu(upper, 1), -1, -2)


def _slice(error, now, log_density, other, rng: np.random.Generator):
    """One elliptical slice update of every matrix: a point on the ellipse through it and a fresh one, by shrinking."""
    level = now + np.log(rng.random(len(now)))
    angle = rng.random(len(now)) * 2 * np.pi
    low, high = angle - 2 * np.pi, angle.copy()
    error, now, open_ = error.copy(), now.copy(), np.ones(len(now), bool)
    for _ in range(MOST_SHRINKS):
        proposal = error * np.cos(angle)[:, None, None] + other * np.sin(angle)[:, None, None]
        found = log_density(proposal)
        taken = open_ & (found > level)
        error[taken], now[taken] = proposal[taken], found[taken]
        open_ &= ~taken
        if not open_.any():
            break
        low = np.where(open_ & (angle < 0), angle, low)
        high = np.where(open_ & (angle >= 0), angle, high)
        angle = np.where(open_, low + rng.random(len(now)) * (high - low), angle)
    return error, now
