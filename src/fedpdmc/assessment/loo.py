"""Leave-one-out predictive accuracy of a site's own records, by Pareto smoothed importance sampling, and WAIC."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import logsumexp

from fedpdmc._jax.precision import double_precision
from fedpdmc.console.warnings import has_inference_data, import_arviz

if TYPE_CHECKING:
    import pandas as pd

    from fedpdmc.study.study_response import Outcome

# Records whose weights are smoothed at least, if there are as many: those with the largest weights.
SMOOTHED = 1000
# Smoothed too: a record with a weight above so many times the average one. With smaller weights smoothing changes nothing.
LARGE_WEIGHT = 2.0
# Beyond this a record's estimate cannot be trusted.
HIGH_K = 0.7
# What `totals` has.
LOO = {"records", "elpd", "squares", "parameters", "waic", "worst_k", "high_k"}


class Pointwise(NamedTuple):
    """For each record: log predictive density left out (``loo``), the same by WAIC, within the sample, and Pareto k.

    k is NaN for records whose weights are averaged as they are.
    """

    loo: np.ndarray
    waic: np.ndarray
    within: np.ndarray
    k: np.ndarray


def pareto_smoothed(log_ratios: np.ndarray, efficiency: float) -> tuple[np.ndarray, np.ndarray]:
    """Normalised log weights of shape (n, S), smoothed in the tail, and Pareto k of shape (n,)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if has_inference_data(az := import_arviz()):
            weights, k = az.psislw(log_ratios, reff=efficiency)
        else:
            # From ArviZ 1 on it takes log likelihoods, of which the ratios are the inverse.
            weights, k = importlib.import_module("arviz_stats.base").array_stats.psislw(-log_ratios, r_eff=efficiency)
    return np.asarray(weights), np.atleast_1d(np.asarray(k))


def pointwise(log_density: np.ndarray, efficiency: float) -> Pointwise:
    """Pointwise accuracy from the log density of each record at each draw, of shape (n, S)."""
    draws = log_density.shape[1]
    weights, k = pareto_smoothed(-log_density, efficiency)
    # A record without weight or trials: its density is the same at all draws, and has no tail.
    k = np.where(np.ptp(log_density, axis=1) > 0, k, 0.0)
    loo = np.asarray(logsumexp(weights + log_density, axis=1))
    within = np.asarray(logsumexp(log_density, axis=1)) - np.log(draws)
    return Pointwise(loo, within - log_density.var(axis=1, ddof=1), within, k)


class Changes(NamedTuple):
    """What a pass over a block of records finds, of S draws, B records and d parameters."""

    # (S,): sums over records of the log densities, and of sizes and squares of their changes from draw to draw.
    total: Any
    size: Any
    squares: Any
    pulls: Any  # (B, d): covariances of log densities and parameters
    # (B,): as in `Pointwise`, without smoothing, and the largest weight over the average one.
    loo: Any
    waic: Any
    within: Any
    weight: Any


def changes(density: Any, keep: Any, centred: Any, xp: Any = np) -> Changes:
    """Of log densities of shape (B, S), records with ``keep`` zero left out of sums; ``centred`` are the draws (S, d)."""
    mean = density.mean(1)
    change = density - mean[:, None]
    squares, ratio = change**2, xp.exp(-change)
    average, within = ratio.mean(1), mean + xp.log((1 / ratio).mean(1))
    waic = within - squares.sum(1) / (len(centred) - 1)
    sums = keep @ density, keep @ xp.abs(change), keep @ squares
    return Changes(*sums, change @ centred / len(centred), mean - xp.log(average), waic, within, ratio.max(1) / average)


_compiled_changes: Callable[..., Changes] = jax.jit(functools.partial(changes, xp=jnp))


class Pass(NamedTuple):
    """What a pass over all records of a site finds: log densities summed over records, at each draw, and the rest."""

    total: np.ndarray
    records: Pointwise | None
    size: np.ndarray
    squares: np.ndarray
    pulls: np.ndarray


@double_precision
def pass_over(
    outcome: Outcome, records: pd.DataFrame, efficiency: float, *, smooth: bool = True, step: Callable[[float], None]
) -> Pass:
    """Pass over a site's records, in compiled blocks if there are many.

    Records with a weight above `LARGE_WEIGHT`, and the `SMOOTHED` of the largest weights, are smoothed. Any other has a
    mean of weights within a factor of two of it: smoothing its tail changes the mean by less than its Monte Carlo error.
    ``smooth``: whether pointwise accuracy is wanted. ``step`` is called with the share that is done.
    """
    n, centred = len(records), outcome.draws - outcome.draws.mean(0)
    found, smoothed = [], []
    if n <= SMOOTHED:
        for block in outcome.blocks(records):
            density = outcome.log_density(block)
            with np.errstate(all="ignore"):
                found.append(changes(density, np.ones(len(block)), centred))
            if smooth:
                smoothed.append(pointwise(density, efficiency))
    else:
        for at, density in outcome.compiled(records):
            keep = (np.arange(len(density)) < len(at)).astype(float)
            made = [np.asarray(x) for x in _compiled_changes(density, keep, centred)]
            found.append(Changes(*made[:3], *(x[: len(at)] for x in made[3:])))
            step((at[-1] + 1) / n)
    total, size, squares = (np.sum([getattr(one, key) for one in found], 0) for key in ("total", "size", "squares"))
    pulls, loo, waic, within, weight = (np.concatenate(x) for x in list(zip(*found, strict=True))[3:])
    whole = joined(smoothed) if smoothed else None
    if smooth and whole is None:
        whole = Pointwise(loo, waic, within, np.full(n, np.nan))
        least = np.partition(-weight, SMOOTHED - 1)[SMOOTHED - 1]
        need = np.flatnonzero(~(weight < LARGE_WEIGHT) | (weight >= -least))
        at = 0
        for block in outcome.blocks(records.iloc[need]):
            step(1.0)
            part, at = need[at : at + len(block)], at + len(block)
            for column, values in zip(whole, pointwise(outcome.log_density(block), efficiency), strict=True):
                column[part] = values
    return Pass(total, whole, size, squares, pulls)


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
        "worst_k": float(np.nanmax(k)),
        "high_k": float(np.sum(k > HIGH_K)),
    }


def standard_error(total: float, squares: float, n: float) -> float:
    """Standard error of a sum of n terms, from their sum and the sum of their squares."""
    return float(np.sqrt(max(n / (n - 1) * (squares - total**2 / n), 0.0))) if n > 1 else float("nan")
