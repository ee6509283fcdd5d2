"""What a site's records do to the posterior: its pull on each parameter, and the posterior without it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy.special import logsumexp

from fedpdmc.assessment.loo import HIGH_K, pareto_smoothed

Draws = Mapping[str, np.ndarray]


def pull(log_likelihood: np.ndarray, draws: Draws) -> dict[str, float]:
    """Derivative of each posterior mean with respect to log α, in posterior sd, for the likelihood raised to the power α.

    ``d E_α[x] / d log α = Cov(x, log L)`` at α = 1. Of independent parts of the likelihood the derivatives add up: the sum
    over the sites is that of the whole likelihood, and with that of the prior nearly zero, since together they temper the
    posterior, which moves its mean by minus half its skewness.
    """
    centred = log_likelihood - log_likelihood.mean()
    return {name: float(np.mean((x - x.mean()) * centred) / x.std()) for name, x in draws.items()}


def without(log_likelihood: np.ndarray, draws: Draws, efficiency: float) -> dict[str, Any]:
    """Mean and sd of the posterior without these records, by importance weights ``1/L``, and Pareto k of the weights.

    Above a k of `HIGH_K` an average with these weights is not near its expectation for any practical number of draws:
    mean and sd are NaN.
    """
    weights, shape = pareto_smoothed(-log_likelihood[None], efficiency)
    k = float(np.nan_to_num(shape[0], nan=np.inf, posinf=np.inf))
    if k > HIGH_K:
        unknown = dict.fromkeys(draws, np.nan)
        return {"mean": unknown, "sd": dict(unknown), "k": k}
    share = np.exp(weights[0] - logsumexp(weights[0]))
    mean = {name: float(share @ x) for name, x in draws.items()}
    sd = {name: float(np.sqrt(share @ (x - mean[name]) ** 2)) for name, x in draws.items()}
    return {"mean": mean, "sd": sd, "k": k}
