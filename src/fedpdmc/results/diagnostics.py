"""Bulk and tail effective sample size, nested R-hat and drift of draws, for coordinates and energy alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy.special import chdtri, ndtri, stdtrit

LEAST_DRAWS = 4  # of a chain, for which a size is computed
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
    if np.ptp(z) < np.finfo(float).resolution:
        return float(z.size)
    chains, n = z.shape
    length = 1 << (2 * n - 1).bit_length()
    spectrum = np.fft.rfft(z - z.mean(1, keepdims=True), length, 1)
    cov = (np.fft.irfft(spectrum * np.conjugate(spectrum), length, 1)[:, :n] / n).mean(0)
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


def rank_normalised(values: np.ndarray) -> np.ndarray:
    """Standard normal quantiles of the ranks among all draws; equal draws share the mean of theirs."""
    _, place, count = np.unique(values.ravel(), return_inverse=True, return_counts=True)
    ranks = np.cumsum(count) - (count - 1) / 2.0
    return ndtri((ranks - 0.375) / (values.size + 0.25))[place].reshape(values.shape)


SUPERCHAINS = 4  # into which many chains are merged
LEAST_SEQUENCES = 8  # into which few chains are cut
FALSE_ALARM = 1e-3  # probability that a stationary run exceeds a limit, over all quantities
EARLY = 0.2  # part of every chain whose mean is compared with that of its end, after Geweke
LATE = 0.5  # that end
LEAST_CHAINS = 8  # whose scatter gives the error of a drift
WIDE_EVERY = 4  # one chain in so many starts twice as far out as the others
LEAST_WIDE = 4  # chains that start far out, from which they are compared with the others
BETWEEN = 32  # chains from which the scatter of their means gives the Monte Carlo error
LONG = 512  # draws of a sequence, below which the bias of an autocorrelation matters
LEAST_LONG = 4  # joined sequences


class Diagnosis(NamedTuple):
    """What the draws show about each quantity, the energy last; means and errors are in standard deviations.

    A limit is what a stationary run exceeds once in a thousand.
    """

    names: list[str]
    ess: np.ndarray  # bulk effective sample size over all chains
    tail: np.ndarray
    error: (
        np.ndarray
    )  # of the mean: from the scatter of the chains' means, which are independent; with few chains from ess
    scatter: np.ndarray  # effective sample size from the scatter of the chains' mean ranks
    rhat: np.ndarray  # nested
    floor: np.ndarray  # its value for a stationary run with this ESS
    limit: np.ndarray
    drift: np.ndarray  # mean of the first fifth less that of the second half
    drift_limit: np.ndarray
    begin: np.ndarray  # mean over chains of the first draws, from the mean of all
    begin_limit: np.ndarray
    apart: np.ndarray  # of chains that started far out, over the first half, in location or in distance from the median
    apart_limit: np.ndarray


def wide_chains(chains: int) -> np.ndarray:
    """Which chains start far out, where the user gives no starts."""
    return np.arange(chains) % WIDE_EVERY == WIDE_EVERY - 1


def energy(draws: np.ndarray, mean: np.ndarray, cov: np.ndarray) -> np.ndarray:
    """``½ (x − m)ᵀ C⁻¹ (x − m)`` of every draw."""
    values, vectors = np.linalg.eigh(cov)
    floor = max(float(values[-1]), 1e-300) * 1e-14
    whitened = (draws - mean) @ (vectors / np.sqrt(np.maximum(values, floor)))
    return 0.5 * np.sum(whitened**2, -1)


def diagnose(values: np.ndarray, names: list[str], starts: np.ndarray, wide: bool = False) -> Diagnosis:
    """All diagnostics of quantities, given their draws and where the chains started.

    Parameters
    ----------
    values : (C, n, q)
        Draws of every chain, equally spaced.
    names : list of str
    starts : (C, q)
        The quantities at the start of each chain, before its burn-in.
    wide : bool
        Whether `wide_chains` started farther out than the others.
    """
    ess, tail = effective_sizes(values), effective_sizes(values, tail_ess)
    far = wide_chains(len(values)) if wide else np.zeros(len(values), bool)
    columns = [_nested(values[..., i], starts[:, i], far) for i in range(values.shape[-1])]
    bulk, folded, drift, error, begin, scatter, apart, apart_error = (np.array(x) for x in zip(*columns, strict=True))
    chains, count = values.shape[0], len(names)
    # Squares mix no faster than the energy, the last quantity.
    slow = np.minimum(ess, ess[-1])
    groups = sequences(chains)
    # Of 2q statistics: bulk and folded.
    width = chdtri(groups - 1, FALSE_ALARM / (2 * count)) / (groups - 1)
    which = bulk / groups_floor(ess, groups) >= folded / groups_floor(slow, groups)
    used = np.where(which, ess, slow)
    # Two-sided, of 2q statistics: drift and beginning.
    z = -ndtri(FALSE_ALARM / (4 * count))
    wide_z = -stdtrit(max(chains - 1, 1), FALSE_ALARM / (4 * count))
    if chains < LEAST_CHAINS:
        error, wide_z = np.sqrt((1 / EARLY + 1 / LATE) / np.maximum(ess, 1.0)), z
    # Of 4q two-sided statistics, with the degrees of freedom of the smaller group.
    apart_z = -stdtrit(max(int(far.sum()) - 1, 1), FALSE_ALARM / (4 * count))
    floor = groups_floor(used, groups)
    limit = np.sqrt(1 + width * (floor**2 - 1))
    error_of_mean = monte_carlo_error(values, ess)
    scatter = np.where(chains < BETWEEN, ess, scatter)
    return Diagnosis(
        names, ess, tail, error_of_mean, scatter, np.maximum(bulk, folded), floor, limit, drift, wide_z * error,
        begin, np.full(count, z / np.sqrt(chains)), apart, apart_z * apart_error,
    )  # fmt: skip


def monte_carlo_error(values: np.ndarray, ess: np.ndarray) -> np.ndarray:
    """Standard error of the mean of draws (C, n, q), in standard deviations.

    Chains are independent and of one length: the variance of their means needs no model of autocorrelations.
    """
    chains = len(values)
    if chains < BETWEEN:
        return 1 / np.sqrt(np.maximum(ess, 1e-300))
    spread = np.maximum(values.std((0, 1)), 1e-300)
    return values.mean(1).std(0, ddof=1) / np.sqrt(chains) / spread


def quantile_errors(values: np.ndarray, probability: float) -> np.ndarray:
    """Monte Carlo standard error of a quantile of draws (C, n, q)."""
    flat, cut = values.reshape(-1, values.shape[-1]), np.quantile(values, probability, (0, 1))
    below = (values <= cut).astype(float)
    error = monte_carlo_error(below, effective_sizes(below)) * np.sqrt(probability * (1 - probability))
    ends = [np.clip(probability + sign * error, 0, 1) for sign in (-1, 1)]
    return np.array(
        [(np.quantile(x, high) - np.quantile(x, low)) / 2 for x, low, high in zip(flat.T, *ends, strict=True)]
    )


def groups_floor(ess: np.ndarray, groups: int) -> np.ndarray:
    """``√(1 + K/ESS)``: nested R-hat of K superchains that share ESS independent draws."""
    return np.sqrt(1 + groups / np.maximum(ess, 1e-300))


def sequences(chains: int) -> int:
    """How many superchains nested R-hat compares."""
    return SUPERCHAINS if chains >= LEAST_SEQUENCES else chains * _cuts(chains)


def _cuts(chains: int) -> int:
    return -(-LEAST_SEQUENCES // chains) if chains < LEAST_SEQUENCES else 1


def nested_rhat(values: np.ndarray, starts: np.ndarray) -> float:
    """Nested R-hat of draws (C, n): whether superchains, groups of chains with similar starts, agree.

    With K superchains of M chains, ``x̄_k`` the mean of a superchain, ``B̃_k`` the variance of its chains' means and
    ``W̃_k`` the mean variance within its chains, ``R² = 1 + var_k(x̄_k) / mean_k(B̃_k + W̃_k)`` (Margossian et al., 2024).
    The classical R-hat of 64 chains requires that the mean of *each* be known well, which takes 64 long chains. This
    one requires it of four superchains: their mean has the variance ``σ²K/ESS`` in a stationary run, hence the floor
    ``√(1 + K/ESS)``.

    In that paper, the chains of a superchain start at one point. Here every chain has its own start, and each
    superchain is the quarter of chains whose starts in this quantity are neighbours. If the run has forgotten its
    starts, the superchains have the same distribution; if not, they differ, however many chains each has. Random groups
    would average that away. Chains that are stuck, but not near their starts, show in the ESS of each chain.

    Fewer than eight chains are cut into eight sequences or more: this is then split R-hat.
    """
    chains, n = values.shape
    cuts = _cuts(chains)
    if cuts > 1:
        length = n // cuts
        values = values[:, : length * cuts].reshape(chains * cuts, length)
        groups = [np.array([i]) for i in range(len(values))]
    else:
        groups = np.array_split(np.argsort(starts, kind="stable"), SUPERCHAINS)
    means, within = values.mean(1), values.var(1, ddof=1)
    centers = np.array([means[group].mean() for group in groups])
    inner = [within[g].mean() + (means[g].var(ddof=1) if len(g) > 1 else 0.0) for g in groups]
    between, inside = centers.var(ddof=1), float(np.mean(inner))
    if inside <= 0:
        return 1.0 if between <= 0 else float("inf")
    return float(np.sqrt(1 + between / inside))


def _nested(values: np.ndarray, starts: np.ndarray, far: np.ndarray) -> tuple[float, ...]:
    """R-hat of ranks and of folded ranks; drift, its error; the first draws; ESS by scatter; far starts less others."""
    z, middle = rank_normalised(values), np.median(values)
    folded = rank_normalised(np.abs(values - middle))
    n = values.shape[1]
    late = z[:, n - max(int(LATE * n), 1) :].mean(1)
    moved = z[:, : max(int(EARLY * n), 1)].mean(1) - late
    error = moved.std(ddof=1) / np.sqrt(len(moved)) if len(moved) > 1 else np.inf
    begin = float(z[:, 0].mean())
    apart = max(
        (_apart(x[:, : max(n // 2, 1)].mean(1), far) for x in (z, folded)), key=lambda found: found[0] / found[1]
    )
    # Folded ranks are grouped by how far from the middle chains began: a reference that is too narrow shows there.
    inner, outer = nested_rhat(z, starts), nested_rhat(folded, np.abs(starts - middle))
    between = z.mean(1).var(ddof=1) if len(z) > 1 else 0.0
    scatter = len(z) * z.var() / between if between > 0 else np.inf
    return inner, outer, float(moved.mean()), float(error), begin, float(scatter), *apart


def _apart(means: np.ndarray, far: np.ndarray) -> tuple[float, float]:
    """Difference of chains' means between those that began far out and the others, and its standard error."""
    count = int(far.sum())
    if count < LEAST_WIDE or len(far) - count < LEAST_WIDE:
        return 0.0, np.inf
    groups = means[far], means[~far]
    error = np.sqrt(sum(group.var(ddof=1) / len(group) for group in groups))
    return float(abs(groups[0].mean() - groups[1].mean())), float(max(error, 1e-300))


def effective_sizes(values: np.ndarray, size: Callable[[np.ndarray], float] = bulk_ess) -> np.ndarray:
    """The bulk ESS, or the tail ESS, of each quantity of (C, n, q) draws, not above the number of draws.

    Short chains are joined end to end, group by group. An autocorrelation that is estimated within n draws is too low
    by about ``1/n``: for 12 independent draws of a thousand chains, ArviZ reports 38 % more than there are. In a
    sequence of joined chains, which are independent, the correlation at lag t has the weight ``1 − t/n``. That is its
    weight in the variance of the mean of all draws. A chain that is stuck still shows: its draws are alike.
    """
    values, scale = join_short_chains(values)
    found = [scale * size(values[..., i]) for i in range(values.shape[-1])]
    return np.minimum(np.nan_to_num(found, nan=0.0), scale * values.shape[0] * values.shape[1])


def join_short_chains(values: np.ndarray) -> tuple[np.ndarray, float]:
    """Draws (C, n, q) with short chains joined end to end, and the ratio of all draws to those that are kept."""
    chains, n = values.shape[:2]
    group = min(-(-LONG // max(n, 1)), chains // LEAST_LONG)
    if group <= 1:
        return values, 1.0
    count = chains // group
    return values[: count * group].reshape(count, group * n, *values.shape[2:]), chains / (count * group)
