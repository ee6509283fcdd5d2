"""The posterior given noisy derivatives: the noise is part of the uncertainty.

Near a public point x a likelihood of many records is ``exp(−g·δ − ½ δᵀHδ)`` in ``δ = θ − x``, so the gradient g informs
about θ like an observation from ``N(−Hδ, H)`` (the score is centred at the truth, with the information as its variance).
The observations are ``ĝ = g + N(0, Σ)`` and ``Ĥ = H + E`` with Gaussian E, so that

    p(θ, H | ĝ, Ĥ) ∝ p(θ) N(ĝ; −H(θ − x), H + Σ) N(Ĥ; H) 1[H positive definite].

Given H this is Gaussian in θ, with precision ``P_0 + H (H + Σ)⁻¹ H``. Without noise this is the Laplace approximation; as
noise grows, it tends to the prior. H is integrated out by elliptical slice sampling (Murray, Adams and MacKay, 2010).

Releases at several points ``x_k`` are averaged first. If the likelihood is quadratic, ``ĝ_k = −H(θ − x_k) + s + n_k``
with the same score s of the records, so for any weights w_k that sum to one

    Σ w_k ĝ_k = −H(θ − Σ w_k x_k) + s + Σ w_k n_k

is again such a release, at the mean of the points. Otherwise the curvature between x_k and θ differs from that at x_k, and
``ĝ_k`` has an error proportional to ``H(θ − x_k)``. The factor is modelled as Gaussian with standard deviation
`CURVATURE_CHANGE`, and the weights are inversely proportional to the variance of the noise plus that of this error.
With little noise the points near θ dominate; with much noise all points count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# Parallel draws of the Hessian, and sweeps of the slice sampler for each.
HESSIANS, SWEEPS = 256, 25
# A slice shrinks geometrically: after this many steps it is the current point, up to rounding.
MOST_SHRINKS = 60
# Standard deviation of the relative change of the curvature between the point of a release and the parameters.
CURVATURE_CHANGE = 0.2
# Fixed-point iterations between the weights of releases and the mean that they depend on.
TURNS = 2
# Smallest eigenvalue of a start, as a share of the noise.
LEAST_EIGENVALUE = 1e-2


class NoisyRelease(NamedTuple):
    """Noisy derivatives of the log likelihood of all sites together, at one point."""

    x: np.ndarray  # (d,)
    gradient: np.ndarray  # (d,)
    hessian: np.ndarray  # (d, d)
    gradient_sd: np.ndarray  # (d,): standard deviations of the noise, by coordinate
    hessian_sd: np.ndarray  # (d, d): the same by entry; entries (i, j) and (j, i) have the same noise


class Gaussian(NamedTuple):
    """A Gaussian prior."""

    mean: np.ndarray
    precision: np.ndarray


def given_hessian(release: NoisyRelease, hessian: np.ndarray, prior: Gaussian) -> tuple[np.ndarray, np.ndarray]:
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


def pooled(releases: Sequence[NoisyRelease], prior: Gaussian) -> tuple[NoisyRelease, np.ndarray]:
    """The weighted mean of releases, and the mean of θ given it.

    The first of several is left out: it was made at the prior's mean, which does not depend on the records.
    """
    last, used = releases[-1], releases[1:] or releases
    curvature = believable(last.hessian, last.hessian_sd)
    one, mean = last, given_hessian(last, curvature, prior)[0]
    for _ in range(TURNS):
        one = _weighted(used, curvature, mean)
        mean = given_hessian(one, believable(one.hessian, one.hessian_sd), prior)[0]
    return one, mean


def _weighted(releases: Sequence[NoisyRelease], curvature: np.ndarray, mean: np.ndarray) -> NoisyRelease:
    """The weighted mean of releases; weights are inverse to the total variance of noise and change of curvature."""
    noise = np.array([np.mean(one.gradient_sd**2) for one in releases])
    change = np.array([CURVATURE_CHANGE**2 * np.mean((curvature @ (mean - one.x)) ** 2) for one in releases])
    weights = 1 / np.maximum(noise + change, 1e-300)
    weights /= weights.sum()
    x, gradient, hessian, first, second = (np.stack(parts) for parts in zip(*releases, strict=True))
    return NoisyRelease(
        weights @ x,
        weights @ gradient,
        np.tensordot(weights, hessian, 1),
        np.sqrt(weights**2 @ (first**2 + change[:, None])),
        np.sqrt(np.tensordot(weights**2, second**2, 1)),
    )


def believable(hessian: np.ndarray, sd: np.ndarray) -> np.ndarray:
    """The nearest positive definite matrix: eigenvalues of at least a small share of the noise."""
    values, vectors = np.linalg.eigh((hessian + hessian.T) / 2)
    least = max(LEAST_EIGENVALUE * float(np.max(sd)), 1e-12 * float(np.abs(values).max()), 1e-300)
    return (vectors * np.maximum(values, least)) @ vectors.T


def draws(release: NoisyRelease, prior: Gaussian, n: int, rng: np.random.Generator) -> np.ndarray:
    """``n`` draws of θ, of shape (n, d), with the noise of gradient and Hessian integrated out."""
    hessians = _hessians(release, prior, rng)
    means, covariances = given_hessian(release, hessians, prior)
    factors = np.linalg.cholesky((covariances + np.swapaxes(covariances, -1, -2)) / 2)
    which = rng.permutation(np.arange(n) % len(means))
    return means[which] + np.einsum("nij,nj->ni", factors[which], rng.standard_normal((n, means.shape[1])))


def _hessians(release: NoisyRelease, prior: Gaussian, rng: np.random.Generator) -> np.ndarray:
    """Draws of H from its posterior by slice sampling: the error E has a Gaussian prior, the rest is the likelihood."""
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
        upper = np.triu(rng.standard_normal(error.shape) * sd)
        error, now = _slice(error, now, log_density, upper + np.swapaxes(np.triu(upper, 1), -1, -2), rng)
    return center + error


def _evidence(release: NoisyRelease, hessian: np.ndarray, mean: np.ndarray, cov: np.ndarray) -> np.ndarray:
    """``log N(ĝ; −H(μ_0 − x), H + Σ + H C_0 H)`` for each H: θ is integrated out."""
    spread = hessian + np.diag(release.gradient_sd**2) + hessian @ cov @ hessian
    off = release.gradient + hessian @ (mean - release.x)
    return -0.5 * (np.linalg.slogdet(spread)[1] + np.sum(off * np.linalg.solve(spread, off[..., None])[..., 0], -1))


def _slice(error, now, log_density, other, rng: np.random.Generator):
    """One elliptical slice update of every matrix: a point on the ellipse through it and a new draw, by shrinking."""
    level = now + np.log(rng.random(len(now)))
    angle = rng.random(len(now)) * 2 * np.pi
    low, high = angle - 2 * np.pi, angle.copy()
    error, now, open_ = error.copy(), now.copy(), np.arange(len(now))
    for _ in range(MOST_SHRINKS):
        turn = angle[open_][:, None, None]
        proposal = error[open_] * np.cos(turn) + other[open_] * np.sin(turn)
        found = log_density(proposal)
        taken = found > level[open_]
        error[open_[taken]], now[open_[taken]] = proposal[taken], found[taken]
        open_ = open_[~taken]
        if not len(open_):
            break
        below = angle[open_] < 0
        low[open_] = np.where(below, angle[open_], low[open_])
        high[open_] = np.where(below, high[open_], angle[open_])
        angle[open_] = low[open_] + rng.random(len(open_)) * (high[open_] - low[open_])
    return error, now
