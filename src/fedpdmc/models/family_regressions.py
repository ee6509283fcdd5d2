"""Regressions of the standard library of families, from arrays: the models of `fedpdmc.models` without built-in losses."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedpdmc.errors import InputError
from fedpdmc.models.families import family
from fedpdmc.models.model_file.records import RecordModel
from fedpdmc.validation import integer


def _of(
    name: str, X: Any, columns: dict[str, Any], constants: dict[str, Any] | None = None, **sizes: int
) -> RecordModel:
    """Records of a family; a data frame X names the coefficients."""
    names = [str(column) for column in X.columns] if hasattr(X, "columns") else None
    try:
        design = np.asarray(X, float)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{name}(X)", f"{type(X).__name__} that is not numeric", "Give a matrix of shape (n, p)."
        ) from error
    return family(name, **sizes).of(columns, design, constants, names)


def _levels(name: str, levels: Any) -> int:
    return integer(f"{name}(levels)", levels, 2, remedy="Give the number of levels of y, the same at all sites.")


def negative_binomial(X: Any, y: Any) -> RecordModel:
    """Counts with mean ``e^{ξ·β}`` and variance ``μ + μ²/φ``; in results ``concentration``, whose logarithm is sampled.

    Parameters
    ----------
    X : array of shape (n, p)
    y : array of shape (n,), counts
    """
    return _of("negative_binomial", X, {"y": y})


def gamma(X: Any, y: Any) -> RecordModel:
    """Positive values with mean ``e^{ξ·β}`` and variance ``μ²/a``; in results ``shape``, whose logarithm is sampled."""
    return _of("gamma", X, {"y": y})


def beta(X: Any, y: Any) -> RecordModel:
    """Values between 0 and 1 with mean ``1/(1 + e^{−ξ·β})``; the last coordinate is ``log φ``, in results ``precision``."""
    return _of("beta", X, {"y": y})


def weibull(X: Any, time: Any, died: Any) -> RecordModel:
    """Survival times, ``P(T > t) = exp(−(t e^{−ξ·β})^k)``; the last coordinate is ``log k``, in results ``shape``.

    Parameters
    ----------
    X : array of shape (n, p)
    time : array of shape (n,)
        Until death or the end of observation, positive.
    died : array of shape (n,)
        One, or zero where the time is censored.
    """
    return _of("weibull", X, {"time": time, "died": died})


def log_normal(X: Any, time: Any, died: Any) -> RecordModel:
    """Survival times with ``log T ~ N(ξ·β, σ²)``; the last coordinate is ``log σ``, in results ``sigma``."""
    return _of("log_normal", X, {"time": time, "died": died})


def piecewise_exponential(X: Any, time: Any, died: Any, cuts: Any) -> RecordModel:
    """Proportional hazards ``e^{h_j + ξ·β}``, constant between cut points; in results ``hazard``, one for each piece.

    Parameters
    ----------
    X : array of shape (n, p)
        Without an intercept.
    time, died
        As of `weibull`.
    cuts : array of shape (J − 1,)
        Increasing and positive, the same at all sites.
    """
    edges = np.atleast_1d(np.asarray(cuts, float))
    if edges.ndim != 1 or not edges.size or not (np.diff([0.0, *edges]) > 0).all():
        raise InputError("piecewise_exponential(cuts)", repr(cuts), "Give increasing positive numbers.")
    return _of("piecewise_exponential", X, {"time": time, "died": died}, {"cuts": edges}, pieces=len(edges) + 1)


def ordered_logit(X: Any, y: Any, levels: int) -> RecordModel:
    """Ordered levels 0, 1, …, ``P(y ≤ k) = 1/(1 + e^{ξ·β − c_k})``; in results ``cut_points``.

    Parameters
    ----------
    X : array of shape (n, p)
        Without an intercept.
    y : array of shape (n,)
    levels : int
    """
    return _of("ordered_logit", X, {"y": y}, levels=_levels("ordered_logit", levels))


def ordered_probit(X: Any, y: Any, levels: int) -> RecordModel:
    """Ordered levels 0, 1, …, ``P(y ≤ k) = Φ(c_k − ξ·β)``; in results ``cut_points``. Arguments as of `ordered_logit`."""
    return _of("ordered_probit", X, {"y": y}, levels=_levels("ordered_probit", levels))


def multinomial_logit(X: Any, y: Any, levels: int) -> RecordModel:
    """Levels 0, 1, …, ``P(y = k) ∝ e^{ξ·β_k}`` with ``β_0 = 0``: a row of coefficients for each other level."""
    return _of("multinomial_logit", X, {"y": y}, levels=_levels("multinomial_logit", levels))


def zero_inflated_poisson(X: Any, y: Any) -> RecordModel:
    """Counts that are zero with probability π and else ``Poisson(e^{ξ·β})``; in results ``zero_probability``."""
    return _of("zero_inflated_poisson", X, {"y": y})


def beta_binomial(X: Any, successes: Any, failures: Any) -> RecordModel:
    """Successes and failures of probability ``~ Beta(μφ, (1 − μ)φ)``, ``μ = 1/(1 + e^{−ξ·β})``; in results ``precision``."""
    return _of("beta_binomial", X, {"successes": successes, "failures": failures})
