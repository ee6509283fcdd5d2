"""Bulk and tail effective sample size of draws, as ArviZ defines them, without the second that importing ArviZ takes."""

from __future__ import annotations

import numpy as np

# Fewest draws per chain for which a size is computed.
LEAST_DRAWS = 4
TAILS = (0.05, 0.95)  # quantiles at which tails are counted


def bulk_ess(values: np.ndarray) -> float:
    """Bulk effective sample size of draws (C, n); NaN if they are too few or not finite (Vehtari et al., 2021).

    Chains are split in half and draws replaced by normal quantiles of their ranks. With ``ρ_t`` the autocorrelation at
    lag t over all sequences, the size is ``C n / (−1 + 2 Σ_t ρ_t)``, summed by pairs ``ρ_{2k} + ρ_{2k+1}`` as long as
    these are positive, none larger than the one before (Geyer, 1992).
    """
    if values.shape[1] < LEAST_DRAWS or not np.all(np.isfinite(values)):
        return np.nan
    return _ess(rank_normalised(_halves(values)))


def tail_ess(values: np.ndarray) -> float:
    """The smaller effective sample size of the two events that a draw is below the 5 % and above the 95 % quantile."""
    if values.shape[1] < LEAST_DRAWS or not np.all(np.isfinite(values)):
        return np.nan
    low, high = np.quantile(values, TAILS)
    return min(_ess(_halves((values <= low).astype(float))), _ess(_halves((values >= high).astype(float))))


def _halves(values: np.ndarray) -> np.ndarray:
    half = values.shape[1] // 2
    return np.concatenate([values[:, :half], values[:, -half:]])


def _ess(z: np.ndarray) -> float:
    """Effective sample size of the mean of sequences (C, n)."""
    if np.ptp(z) < np.finfo(float).resolution:
        return float(z.size)
    chains, n = z.shape
    cov = _autocovariances(z).mean(0)
    within = cov[0] * n / (n - 1.0)
    total = cov[0] + (z.mean(1).var(ddof=1) if chains > 1 else 0.0)
    rho = 1.0 - (within - cov) / total
    rho[0] = 1.0
    return z.size / max(_correlation_time(rho), 1 / np.log10(z.size))


def _correlation_time(rho: np.ndarray) -> float:
    """``−1 + 2 Σ_t ρ_t`` over the initial positive pairs, made monotone."""
    n = len(rho)
    # Pairs (1, 2), (3, 4), … are added until the sum of the last two correlations is not positive.
    t, last = 1, (rho[0], rho[1])
    kept = np.zeros(n)
    kept[:2] = rho[:2]
    while t < n - 3 and sum(last) > 0.0:
        last = rho[t + 1], rho[t + 2]
        if sum(last) >= 0:
            kept[t + 1 : t + 3] = last
        t += 2
    end = t - 2
    if last[0] > 0:
        kept[end + 1] = last[0]
    for t in range(1, end - 1, 2):
        before = kept[t - 1] + kept[t]
        if kept[t + 1] + kept[t + 2] > before:
            kept[t + 1 : t + 3] = before / 2.0
    return -1.0 + 2.0 * float(np.sum(kept[: end + 1])) + float(np.sum(kept[end + 1 : end + 2]))


def _autocovariances(values: np.ndarray) -> np.ndarray:
    """Autocovariances of every sequence (C, n), divided by n at all lags."""
    n = values.shape[1]
    length = 1 << (2 * n - 1).bit_length()
    spectrum = np.fft.rfft(values - values.mean(1, keepdims=True), length, 1)
    return np.fft.irfft(spectrum * np.conjugate(spectrum), length, 1)[:, :n] / n


def rank_normalised(values: np.ndarray) -> np.ndarray:
    """Standard normal quantiles of the ranks among all draws; equal draws share the mean of theirs."""
    from scipy.special import ndtri

    _, place, count = np.unique(values.ravel(), return_inverse=True, return_counts=True)
    ranks = np.cumsum(count) - (count - 1) / 2.0
    return ndtri((ranks - 0.375) / (values.size + 0.25))[place].reshape(values.shape)
