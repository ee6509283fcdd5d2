"""Leave-one-out predictive accuracy of a site's own records, by Pareto smoothed importance sampling, and WAIC."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import numpy as np
from scipy.special import logsumexp

from fedpdmc.console.warnings import import_arviz

# Beyond this a record's estimate cannot be trusted.
HIGH_K = 0.7
# What `totals` has.
LOO = {"records", "elpd", "squares", "parameters", "waic", "worst_k", "high_k"}


class Pointwise(NamedTuple):
    """For each record: log predictive density left out (``loo``), the same by WAIC, within the sample, and Pareto k."""

    loo: np.ndarray
    waic: np.ndarray
    within: np.ndarray
    k: np.ndarray


def pareto_smoothed(log_ratios: np.ndarray, efficiency: float) -> tuple[np.ndarray, np.ndarray]:
    """Normalised log weights of shape (n, S), smoothed in the tail, and Pareto k of shape (n,)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        weights, k = import_arviz().psislw(log_ratios, reff=efficiency)
    return np.asarray(weights), np.atleast_1d(np.asarray(k))


def pointwise(log_density: np.ndarray, efficiency: float) -> Pointwise:
    """Pointwise accuracy from the log density of each record at each draw, of shape (n, S)."""
    draws = log_density.shape[1]
    weights, k = pareto_smoothed(-log_density, efficiency)
    loo = np.asarray(logsumexp(weights + log_density, axis=1))
    within = np.asarray(logsumexp(log_density, axis=1)) - np.log(draws)
    return Pointwise(loo, within - log_density.var(axis=1, ddof=1), within, k)


def joined(parts: list[Pointwise]) -> Pointwise:
    """Blocks of records as one."""
    return Pointwise(*(np.concatenate(one) for one in zip(*parts, strict=True)))


def totals(records: Pointwise) -> dict[str, float]:
    """Sums over records: all that leaves a site.

    ``elpd`` is the sum of the log predictive densities, ``squares`` that of their squares, from which the standard error
    over all sites is made; ``parameters`` is the effective number of parameters; ``worst_k`` and ``high_k`` say how far
    the smoothing can be trusted.
    """
    loo, waic, within, k = records
    return {
        "records": float(len(loo)),
        "elpd": float(loo.sum()),
        "squares": float(np.sum(loo**2)),
        "parameters": float(np.sum(within - loo)),
        "waic": float(waic.sum()),
        "worst_k": float(k.max()),
        "high_k": float(np.sum(k > HIGH_K)),
    }


def standard_error(total: float, squares: float, n: float) -> float:
    """Standard error of a sum of n terms, from their sum and the sum of their squares."""
    return float(np.sqrt(max(n / (n - 1) * (squares - total**2 / n), 0.0))) if n > 1 else float("nan")
