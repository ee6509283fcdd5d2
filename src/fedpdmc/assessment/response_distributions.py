"""Distributions of the response in every family, given linear predictor and other parameters at each draw.

Arrays have the shape (n, S), records by draws; where the response has levels, predictors and probabilities (n, S, K).
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import special, stats

Array = np.ndarray


def expit(z: Array) -> Array:
    """``1/(1 + e^{−z})``."""
    return 0.5 + 0.5 * np.tanh(0.5 * z)


def exp(z: Array) -> Array:
    """``e^z``, cut off before it overflows."""
    return np.exp(np.minimum(z, 700.0))


class Law(abc.ABC):
    """The law of the response of n records under S draws.

    Attributes
    ----------
    levels : bool
        Whether the response is one of several levels, whose means are their probabilities.
    """

    levels = False

    @abc.abstractmethod
    def log_density(self, y: Array, own: Mapping[str, Array]) -> Array:
        """Log density of responses of shape (n, 1); ``own`` are the family's other columns."""

    @abc.abstractmethod
    def mean(self) -> Array:
        """The expected response; of a binomial one its probability."""

    @abc.abstractmethod
    def draw(self, own: Mapping[str, Array], rng: np.random.Generator) -> Array:
        """A response of each record under each draw."""


@dataclass
class Standard(Law):
    """A distribution of SciPy."""

    law: Any
    average: Array
    discrete: bool = False

    def log_density(self, y, own):
        """Log of the density or of the probability."""
        return self.law.logpmf(y) if self.discrete else self.law.logpdf(y)

    def mean(self):
        """The mean that was given."""
        return self.average

    def draw(self, own, rng):
        """Draws from the distribution."""
        return np.asarray(self.law.rvs(size=self.average.shape, random_state=rng), float)


@dataclass
class ZeroInflated(Law):
    """Zero with probability ``zero``, else Poisson."""

    rate: Array
    zero: Array

    def log_density(self, y, own):
        """``log(π 1{y = 0} + (1 − π) p(y))``."""
        other = np.log1p(-self.zero) + stats.poisson.logpmf(y, self.rate)
        with np.errstate(divide="ignore"):
            return np.where(y == 0, np.logaddexp(np.log(self.zero), other), other)

    def mean(self):
        """``(1 − π) λ``."""
        return (1 - self.zero) * self.rate

    def draw(self, own, rng):
        """Structural zeros, and counts."""
        return np.where(rng.random(self.rate.shape) < self.zero, 0.0, rng.poisson(self.rate))


@dataclass
class BetaBinomial(Law):
    """Successes among ``successes + failures``."""

    probability: Array
    precision: Array

    def log_density(self, y, own):
        """Log probability of the number of successes."""
        one, other = self.probability * self.precision, (1 - self.probability) * self.precision
        return stats.betabinom.logpmf(y, y + own["failures"], one, other)

    def mean(self):
        """The probability of success."""
        return self.probability

    def draw(self, own, rng):
        """Successes among as many trials."""
        trials = np.asarray(own["successes"] + own["failures"], int)
        chance = rng.beta(self.probability * self.precision, (1 - self.probability) * self.precision)
        return rng.binomial(trials, chance).astype(float)


@dataclass
class Survival(Law):
    """A time until an event, with its log density and log survival; ``died`` is zero where it is censored."""

    log_pdf: Callable[[Array], Array]
    log_survival: Callable[[Array], Array]
    average: Array
    quantile: Callable[[Array], Array]

    def log_density(self, y, own):
        """Log density of an event, log survival where censored."""
        return np.where(own["died"] > 0, self.log_pdf(y), self.log_survival(y))

    def mean(self):
        """The expected time until the event."""
        return self.average

    def draw(self, own, rng):
        """Times until the event, not censored."""
        return self.quantile(rng.random(self.average.shape))


@dataclass
class Categorical(Law):
    """One of K levels, with log probabilities of shape (n, S, K)."""

    log_probability: Array
    levels = True

    def log_density(self, y, own):
        """Log probability of the observed level."""
        return np.take_along_axis(self.log_probability, np.asarray(y, int)[..., None], 2)[..., 0]

    def mean(self):
        """The probability of each level."""
        return np.exp(self.log_probability)

    def draw(self, own, rng):
        """Codes of levels."""
        below = np.cumsum(np.exp(self.log_probability), -1)
        drawn = np.sum(rng.random(below.shape[:2])[..., None] > below[..., :-1], -1)
        return drawn.astype(float)


def law_of(family: str, eta: Array, other: Array, constants: Mapping[str, Any], options: Mapping[str, Any]) -> Law:
    """The law of a family.

    Parameters
    ----------
    family : str
    eta : array of shape (n, S), or (n, S, K − 1) of several predictors
    other : array of shape (S, m)
        The other coordinates at each draw, such as ``log φ``.
    constants, options : mapping
        Of the family, such as cut points of time, a known scale, degrees of freedom.
    """
    return LAWS[family](eta, other, {**constants, **options})


def _linear(eta, other, told) -> Law:
    scale = np.exp(other[:, 0]) if other.shape[1] else told["scale"]
    return Standard(stats.norm(eta, scale), eta)


def _student_t(eta, other, told) -> Law:
    return Standard(stats.t(told["df"], eta, told["scale"]), eta)


def _logistic(eta, other, told) -> Law:
    return Standard(stats.bernoulli(expit(eta)), expit(eta), True)


def _poisson(eta, other, told) -> Law:
    return Standard(stats.poisson(exp(eta)), exp(eta), True)


def _negative_binomial(eta, other, told) -> Law:
    mean, phi = exp(eta), exp(other[:, 0])
    return Standard(stats.nbinom(phi, phi / (phi + mean)), mean, True)


def _gamma(eta, other, told) -> Law:
    mean, shape = exp(eta), exp(other[:, 0])
    return Standard(stats.gamma(shape, scale=mean / shape), mean)


def _beta(eta, other, told) -> Law:
    mean, phi = expit(eta), exp(other[:, 0])
    return Standard(stats.beta(mean * phi, (1 - mean) * phi), mean)


def _zero_inflated_poisson(eta, other, told) -> Law:
    return ZeroInflated(exp(eta), np.broadcast_to(expit(other[:, 0]), eta.shape))


def _beta_binomial(eta, other, told) -> Law:
    return BetaBinomial(expit(eta), np.broadcast_to(exp(other[:, 0]), eta.shape))


def _weibull(eta, other, told) -> Law:
    law: Any = stats.weibull_min(exp(other[:, 0]), scale=exp(eta))
    return Survival(law.logpdf, law.logsf, exp(eta) * special.gamma(1 + exp(-other[:, 0])), law.ppf)


def _log_normal(eta, other, told) -> Law:
    law: Any = stats.lognorm(exp(other[:, 0]), scale=exp(eta))
    return Survival(law.logpdf, law.logsf, exp(eta + 0.5 * exp(2 * other[:, 0])), law.ppf)


def _piecewise_exponential(eta, other, told) -> Law:
    """Piecewise constant hazards: mean ``Σ_j e^{−H_j} (1 − e^{−h_j w_j})/h_j``, H the hazard summed up to piece j."""
    low = np.array([0.0, *np.atleast_1d(told["cuts"])])
    width = np.diff([*low, np.inf])
    hazard = exp(eta[..., None] + other)
    with np.errstate(invalid="ignore"):
        spent = hazard * width
    before = np.concatenate([np.zeros_like(hazard[..., :1]), np.cumsum(spent[..., :-1], -1)], -1)

    def total(y):
        return np.sum(hazard * np.clip(y[..., None] - low, 0.0, width), -1)

    def log_pdf(y):
        piece = np.searchsorted(low[1:], y)
        here = np.broadcast_to(piece[..., None], (*eta.shape, 1))
        return np.log(np.take_along_axis(hazard, here, 2)[..., 0]) - total(y)

    def quantile(u):
        level = -np.log1p(-u)
        piece = np.sum(level[..., None] > before, -1, keepdims=True) - 1
        piece = np.maximum(piece, 0)
        start, rate = (np.take_along_axis(x, piece, 2)[..., 0] for x in (before, hazard))
        return low[piece[..., 0]] + (level - start) / rate

    mean = np.sum(np.exp(-before) * -np.expm1(-spent) / hazard, -1)
    return Survival(log_pdf, lambda y: -total(y), mean, quantile)


def _ordered(log_cdf: Callable[[Array], Array]) -> Callable[..., Law]:
    def law(eta, other, told) -> Law:
        cuts = other[:, :1] + np.concatenate(
            [np.zeros_like(other[:, :1]), np.cumsum(np.exp(other[:, 1:]), 1)], 1
        )  # fmt: skip
        z = cuts - eta[..., None]
        first, last = log_cdf(z[..., :1]), log_cdf(-z[..., -1:])
        upper, lower = z[..., 1:], z[..., :-1]
        # By symmetry the interval is taken where its ends are small probabilities.
        flip = upper + lower > 0
        high, low = log_cdf(np.where(flip, -lower, upper)), log_cdf(np.where(flip, -upper, lower))
        inner = high + np.log(-np.expm1(np.minimum(low - high, -1e-300)))
        return Categorical(np.concatenate([first, inner, last], -1))

    return law


def _multinomial_logit(eta, other, told) -> Law:
    whole = np.concatenate([np.zeros_like(eta[..., :1]), eta], -1)
    return Categorical(whole - special.logsumexp(whole, axis=-1, keepdims=True))


LAWS: dict[str, Callable[[Array, Array, Mapping[str, Any]], Law]] = {
    "linear": _linear,
    "student_t": _student_t,
    "logistic": _logistic,
    "poisson": _poisson,
    "negative_binomial": _negative_binomial,
    "gamma": _gamma,
    "beta": _beta,
    "zero_inflated_poisson": _zero_inflated_poisson,
    "beta_binomial": _beta_binomial,
    "weibull": _weibull,
    "log_normal": _log_normal,
    "piecewise_exponential": _piecewise_exponential,
    "ordered_logit": _ordered(lambda z: -np.logaddexp(0.0, -z)),
    "ordered_probit": _ordered(special.log_ndtr),
    "multinomial_logit": _multinomial_logit,
}
