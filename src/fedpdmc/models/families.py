"""The families: for each of them one record that says everything about it.

A `Family` has the law of the response, the scale of the linear predictor, what the exponential of a coefficient is, which
predictive checks are usual, where the default prior starts, and how the model is built. Families of the standard library are
built by the same route as a user's model file: their functions (``_weibull`` and so on) are minus the log likelihood of one
record, without what does not depend on parameters, with ``eta`` for the linear predictor. Auxiliary parameters are
unconstrained coordinates; ``variables`` are what results show. Next to each is its regression from arrays
(``fp.models.weibull`` and so on), which takes ``weights`` of shape (n,), by which the loss of each record is multiplied
(docs/regressions.md#weights).

Arrays of laws have the shape (n, S), records by draws; those of levels (n, S, K).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import scipy
from jax.nn import softplus
from jax.scipy.special import gammaln, log_ndtr, logsumexp

from fedpdmc.errors import InputError
from fedpdmc.models.model_file.model import Model
from fedpdmc.models.model_file.records import RecordModel
from fedpdmc.validation import integer

__all__ = [
    "beta", "beta_binomial", "gamma", "log_normal", "multinomial_logit", "negative_binomial", "ordered_logit",
    "ordered_probit", "piecewise_exponential", "weibull", "zero_inflated_poisson",
]  # fmt: skip

Array = np.ndarray


# Laws of the response ---------------------------------------------------------------------------------------------------


def exp(z: Array) -> Array:
    """``e^z``, cut off before it overflows."""
    return np.exp(np.minimum(z, 700.0))


@dataclass
class Law:
    """The law of the response of n records under S draws.

    Attributes
    ----------
    log_density : callable
        Log density of responses of shape (n, 1), from them and the family's other columns by name.
    mean : callable
        The expected response, without arguments; of a binomial one its probability, of levels theirs.
    draw : callable
        A response of each record under each draw, from the other columns and a generator.
    levels : bool
        Whether the response is one of several levels.
    shares : bool
        Whether it counts events among trials.
    of : callable, optional
        For a time until an event: ``of(kind, at)`` is the survival or hazard at a time, the mean restricted to a horizon,
        ``∫_0^τ P(T > t) dt``, or the median.
    """

    log_density: Callable[[Array, Mapping[str, Array]], Array]
    mean: Callable[[], Array]
    draw: Callable[[Mapping[str, Array], np.random.Generator], Array]
    levels: bool = False
    shares: bool = False
    of: Callable[..., Array] | None = None


def _standard(law: Any, average: Array, discrete: bool = False) -> Law:
    """A distribution of SciPy."""
    return Law(
        lambda y, own: law.logpmf(y) if discrete else law.logpdf(y),
        lambda: average,
        lambda own, rng: np.asarray(law.rvs(size=average.shape, random_state=rng), float),
    )


def _events(probability: Array) -> Law:
    """Events among ``trials``."""
    return Law(
        lambda y, own: scipy.stats.binom.logpmf(y, own["trials"], probability),
        lambda: probability,
        lambda own, rng: rng.binomial(np.asarray(own["trials"], int), probability).astype(float),
        shares=True,
    )


def _survival(
    log_pdf: Callable, log_survival: Callable, average: Array, quantile: Callable, restricted: Callable
) -> Law:
    """A time until an event; ``died`` is zero where it is censored, and draws are not censored."""

    def of(kind: str, at: float = 0.5) -> Array:
        y = np.asarray(at, float)
        if kind == "survival":
            return np.exp(log_survival(y))
        if kind == "hazard":
            return np.exp(log_pdf(y) - log_survival(y))
        return restricted(y) if kind == "restricted_mean" else quantile(np.asarray(0.5))

    return Law(
        lambda y, own: np.where(own.get("died", 1.0) > 0, log_pdf(y), log_survival(y)),
        lambda: average,
        lambda own, rng: quantile(rng.random(average.shape)),
        of=of,
    )


def _categorical(log_probability: Array) -> Law:
    """One of K levels, with log probabilities of shape (n, S, K); draws are their codes."""

    def draw(own: Mapping[str, Array], rng: np.random.Generator) -> Array:
        below = np.cumsum(np.exp(log_probability), -1)
        return np.sum(rng.random(below.shape[:2])[..., None] > below[..., :-1], -1).astype(float)

    return Law(
        lambda y, own: np.take_along_axis(log_probability, np.asarray(y, int)[..., None], 2)[..., 0],
        lambda: np.exp(log_probability),
        draw,
        levels=True,
    )


# Where the default prior starts -----------------------------------------------------------------------------------------

LOGISTIC_SD = float(np.pi / np.sqrt(3))  # τ: the error's sd on the latent scale of a logistic regression
LOG_HAZARD_SD = float(np.pi / np.sqrt(6))  # τ of a log hazard: the sd of the logarithm of an exponential time
MULTINOMIAL_SD = 2 * LOGISTIC_SD  # levels that are far apart on a latent scale differ more than two levels do
DIGITS = 2  # of spreads, so that a contract reveals little about the records
BISECTIONS = 60


class Seen(NamedTuple):
    """Values of a response, with their offset on the scale of the predictor, status, and number of levels."""

    values: Array
    offset: Array | None = None
    died: Array | None = None
    levels: int = 0


class Place(NamedTuple):
    """Where values are and how far they spread, in the units of the model.

    Of a response: on the scale of the linear predictor, with the prior means of the family's other parameters.
    """

    center: float = 0.0
    spread: float = 1.0
    level: bool = False
    others: Mapping[str, float] = {}

    def rounded(self) -> Place:
        """The centre and other parameters to a tenth."""
        return self._replace(
            center=round(float(self.center), 1) + 0.0,
            others={name: round(float(x), 1) + 0.0 for name, x in self.others.items()},
        )


def significant(x: float) -> float:
    """To two digits."""
    return float(f"{x:.{DIGITS}g}")


def place_counts(seen: Seen) -> Place:
    """The log of the rate, and the spread of a log-normal law with the rates' variance, at least that of an exponential."""
    values = seen.values
    exposure = np.ones(len(values)) if seen.offset is None else np.exp(seen.offset)
    rate = max(values.sum(), 0.5) / exposure.sum()
    relative = np.mean((values - rate * exposure) ** 2) / (rate**2 * np.mean(exposure**2))
    return Place(np.log(rate), max(significant(np.sqrt(np.log1p(relative))), LOG_HAZARD_SD))


def place_times(seen: Seen) -> Place:
    """A Weibull law without covariates, which takes account of censoring."""
    scale, shape = fit_weibull(seen.values, np.ones(len(seen.values)) if seen.died is None else seen.died)
    spread = significant(LOG_HAZARD_SD / shape)
    return Place(np.log(scale), spread, others={"log_shape": np.log(shape), "log_sigma": np.log(spread)})


def place_levels(quantile: Callable, spread: float, seen: Seen) -> Place:
    """Cut points at the levels' shares, each with half a record more."""
    shares = np.bincount(seen.values.astype(int), minlength=seen.levels) + 0.5
    cuts = quantile((np.cumsum(shares) / shares.sum())[:-1])
    gaps = np.log(np.diff(cuts))
    return Place(cuts[0], spread, others={f"log_gaps[{i}]": gap for i, gap in enumerate(gaps)})


def fit_weibull(time: np.ndarray, died: np.ndarray) -> tuple[float, float]:
    """Scale and shape of the Weibull law of censored times, by maximum likelihood; shape 1 with fewer than two events.

    The shape k solves ``Σ tᵏ log t/Σ tᵏ − 1/k = Σ_died log t/D``, whose left side rises with k.
    """
    most, events, shape = np.log(time).max(), float(died.sum()), 1.0
    log = np.log(time) - most
    low, high = (1e-3, 1e3) if events >= 2 and log.std() > 0 else (shape, shape)
    for _ in range(BISECTIONS):
        shape = float(np.sqrt(low * high))
        weight = np.exp(shape * log)
        rises = weight @ log / weight.sum() - 1 / shape > died @ log / max(events, 0.5)
        low, high = (low, shape) if rises else (shape, high)
    return float(np.exp(most + np.log(np.exp(shape * log).sum() / max(events, 0.5)) / shape)), shape


# Records ----------------------------------------------------------------------------------------------------------------

# Usual predictive checks. `EVENTS` is the share of events among times that may be censored, `LEVELS` that of each level.
EVENTS, LEVELS = "events", "levels"
COUNTS, TIMES, NUMBERS = ("mean", "sd", "zeros"), ("mean", EVENTS), ("mean", "sd", "skewness")


class Family(NamedTuple):
    """All that is known of a family.

    Attributes
    ----------
    name, title : str
    law : callable
        The law of the response from predictors, the other coordinates at each draw (S, m) and constants such as cut points.
    link : {"identity", "log", "logit", "probit"}
        The scale of the linear predictor.
    ratios : mapping
        What the exponential of a coefficient is, and by which positive variable the coefficient is multiplied before, if by
        any. Empty: a coefficient is a difference.
    checks : tuple of str
        Usual statistics of predictive checks.
    place : callable, optional
        `Place` of the response. None: that of the values themselves.
    response : {"number", "level", "count"}
        The response of a built-in loss.
    options, needed : tuple of str
        Further arguments of `fedpdmc.sites`, and those without which there is no model.
    build : callable
        Arguments of `Model`; takes ``levels`` or ``pieces`` where the family has them, and which options are given.
    built_in : bool
        Whether its potential has a built-in loss; its model then serves for densities only.
    convex : bool
        Whether built-in losses of a known scale are convex, with ``|ℓ'''| ≤ ℓ''`` or quadratic.
    levels, ordered : bool
        Whether the response has levels, of which there must be a number, and whether they have an order.
    pieces : bool
        Whether time is cut into pieces.
    survival : bool
        Whether the response is a time that may be censored.
    """

    name: str
    build: Callable[..., dict[str, Any]]
    title: str
    law: Callable[[Array, Array, Mapping[str, Any]], Law]
    link: str
    ratios: Mapping[str, str | None] = {}
    checks: tuple[str, ...] = NUMBERS
    place: Callable[[Seen], Place] | None = None
    response: str = "number"
    options: tuple[str, ...] = ()
    needed: tuple[str, ...] = ()
    built_in: bool = False
    convex: bool = False
    levels: bool = False
    ordered: bool = False
    pieces: bool = False
    survival: bool = False

    @property
    def unitless(self) -> bool:
        """Whether effects on the linear predictor have a scale of their own: logits, and logarithms of rates."""
        return self.link == "logit" or self.checks == COUNTS


FAMILIES: dict[str, Family] = {}


def _enter(**facts: Any) -> Callable:
    """Enter a family with what builds its model."""

    def enter(build: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        name = build.__name__.strip("_")
        FAMILIES[name] = Family(name, build, **facts)
        return build

    return enter


@functools.lru_cache(64)
def family(name: str, **sizes: int) -> Model:
    """The model of a family, for so many levels or pieces where it has them, and the options that are given."""
    return Model(title=FAMILIES[name].title, **FAMILIES[name].build(**sizes))


# Built-in losses: their potentials are in `fedpdmc.models` ---------------------------------------------------------------


def _errors(loss: Callable, known: bool, numbers: Sequence[str]) -> dict[str, Any]:
    """A family of errors with a loss of the standardised residual, whose scale is known or the last parameter."""

    def function(x, row):
        log_scale = jnp.log(row["scale"]) if known else x["log_sigma"]
        return log_scale + loss((row["y"] - x["eta"]) * jnp.exp(-log_scale), row)

    return {
        "function": function, "parameters": [] if known else ["log_sigma"], "predictors": ["eta"],
        "columns": {"y": "real"}, "constants": numbers,
    }  # fmt: skip


COUNT, OFFSET = {"y": "count"}, {"offset": "real"}  # columns


def _linear_law(eta, other, constants) -> Law:
    scale = np.exp(other[:, 0]) if other.shape[1] else constants["scale"]
    return _standard(scipy.stats.norm(eta, scale), eta)


@_enter(
    title="Linear regression", law=_linear_law, link="identity", options=("scale",), built_in=True, convex=True
)  # fmt: skip
def _linear(scale: bool = False) -> dict[str, Any]:
    return _errors(lambda z, row: 0.5 * z * z, scale, ["scale"] * scale)


def _logistic_law(eta, other, constants) -> Law:
    chance = scipy.special.expit(eta)
    if constants.get("trials"):
        return _events(chance)
    law = _standard(scipy.stats.bernoulli(chance), chance, True)
    return replace(law, draw=lambda own, rng: rng.random(chance.shape) < chance)


@_enter(
    title="Logistic regression",
    law=_logistic_law,
    link="logit",
    ratios={"odds ratio": None},
    checks=("mean",),
    place=lambda seen: Place(0.0, LOGISTIC_SD),
    response="level",
    options=("trials",),
    built_in=True,
    convex=True,
)
def _logistic(trials: bool = False) -> dict[str, Any]:
    def function(x, row):
        return (row["trials"] if trials else 1.0) * softplus(x["eta"]) - row["y"] * x["eta"]

    columns = {"y": "count", "trials": "count"} if trials else {"y": "binary"}
    return {"function": function, "predictors": ["eta"], "columns": columns}


def _poisson_law(eta, other, constants) -> Law:
    return _standard(scipy.stats.poisson(exp(eta)), exp(eta), True)


@_enter(
    title="Poisson regression",
    law=_poisson_law,
    link="log",
    ratios={"rate ratio": None},
    checks=COUNTS,
    place=place_counts,
    response="count",
    options=("offset", "exposure"),
    built_in=True,
    convex=True,
)
def _poisson(offset: bool = False) -> dict[str, Any]:
    def function(x, row):
        eta = x["eta"] + row["offset"] if offset else x["eta"]
        return jnp.exp(eta) - row["y"] * eta

    return {"function": function, "predictors": ["eta"], "columns": COUNT | OFFSET if offset else COUNT}


def _student_t_law(eta, other, constants) -> Law:
    return _standard(scipy.stats.t(constants["df"], eta, constants["scale"]), eta)


@_enter(
    title="Student-t regression",
    law=_student_t_law,
    link="identity",
    options=("scale", "df"),
    needed=("scale", "df"),
    built_in=True,
)
def _student_t(scale: bool = True, df: bool = True) -> dict[str, Any]:
    return _errors(
        lambda z, row: 0.5 * (row["df"] + 1) * jnp.log1p(z * z / row["df"]), True, ["scale", "df"]
    )  # fmt: skip


# The standard library ---------------------------------------------------------------------------------------------------


def _positive(parameter: str, variable: str) -> Callable:
    """A positive variable whose logarithm is the parameter."""
    return lambda x: {variable: jnp.exp(x[parameter])}


def _with_eta(function: Callable, parameter: str, variable: str, columns: dict[str, Any]) -> dict[str, Any]:
    """A family of one linear predictor and one positive variable."""
    return {
        "function": function, "parameters": [parameter], "predictors": ["eta"], "columns": columns,
        "variables": _positive(parameter, variable),
    }  # fmt: skip


def _of(
    name: str, X: Any, columns: dict[str, Any], weights: Any, constants: dict[str, Any] | None = None, **sizes: int
) -> RecordModel:
    """Records of a family; a data frame X names the coefficients."""
    names = [str(column) for column in X.columns] if hasattr(X, "columns") else None
    try:
        design = np.asarray(X, float)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{name}(X)", f"{type(X).__name__} that is not numeric", "Give a matrix of shape (n, p)."
        ) from error
    return family(name, **sizes).of(columns, design, constants, names, weights)


def _levels(name: str, levels: Any) -> int:
    return integer(f"{name}(levels)", levels, 2, remedy="Give the number of levels of y, the same at all sites.")


SURVIVAL = {"time": "positive", "died": "binary"}


def _negative_binomial_law(eta, other, constants) -> Law:
    mean, phi = exp(eta), exp(other[:, 0])
    return _standard(scipy.stats.nbinom(phi, phi / (phi + mean)), mean, True)


@_enter(
    title="Negative binomial regression: mean exp(eta), variance mean + mean^2/concentration",
    law=_negative_binomial_law,
    link="log",
    ratios={"rate ratio": None},
    checks=COUNTS,
    place=place_counts,
    response="count",
    options=("size", "offset", "exposure"),
)
def _negative_binomial(size: bool = False, offset: bool = False) -> dict[str, Any]:
    """``y ~ NB(e^η, φ)`` in ``log φ``, unless φ is a known size."""

    def function(x, row):
        y, log_phi = row["y"], jnp.log(row["size"]) if size else x["log_concentration"]
        phi, eta = jnp.exp(log_phi), x["eta"] + row["offset"] if offset else x["eta"]
        choose = gammaln(y + phi) - gammaln(phi)
        return (y + phi) * jnp.logaddexp(log_phi, eta) - choose - phi * log_phi - y * eta

    if not size:
        return _with_eta(function, "log_concentration", "concentration", COUNT)
    columns = COUNT | OFFSET if offset else COUNT
    return {"function": function, "predictors": ["eta"], "columns": columns, "constants": ["size"]}


def negative_binomial(X: Any, y: Any, weights: Any = None) -> RecordModel:
    """Counts with mean ``e^{ξ·β}`` and variance ``μ + μ²/φ``; in results ``concentration``, whose logarithm is sampled.

    Parameters
    ----------
    X : array of shape (n, p)
    y : array of shape (n,), counts
    """
    return _of("negative_binomial", X, {"y": y}, weights)


def _gamma_law(eta, other, constants) -> Law:
    mean, shape = exp(eta), exp(other[:, 0])
    return _standard(scipy.stats.gamma(shape, scale=mean / shape), mean)


def _place_gamma(seen: Seen) -> Place:
    spread = significant(np.log(seen.values).std()) or 1.0
    return Place(np.log(seen.values.mean()), spread, others={"log_shape": -2 * np.log(spread)})


@_enter(
    title="Gamma regression: mean exp(eta)",
    law=_gamma_law,
    link="log",
    ratios={"ratio of means": None},
    checks=NUMBERS,
    place=_place_gamma,
)
def _gamma() -> dict[str, Any]:
    """``y ~ Gamma(a, a e^{−η})`` in ``log a``."""

    def function(x, row):
        log_a, log_y = x["log_shape"], jnp.log(row["y"])
        a = jnp.exp(log_a)
        u = log_y - x["eta"]
        return gammaln(a) - a * log_a + a * (jnp.exp(u) - u)

    return _with_eta(function, "log_shape", "shape", {"y": "positive"})


def gamma(X: Any, y: Any, weights: Any = None) -> RecordModel:
    """Positive values with mean ``e^{ξ·β}`` and variance ``μ²/a``; in results ``shape``, whose logarithm is sampled."""
    return _of("gamma", X, {"y": y}, weights)


def _beta_law(eta, other, constants) -> Law:
    mean, phi = scipy.special.expit(eta), exp(other[:, 0])
    return _standard(scipy.stats.beta(mean * phi, (1 - mean) * phi), mean)


def _place_beta(seen: Seen) -> Place:
    mean, variance = seen.values.mean(), max(seen.values.var(), 1e-12)
    precision = mean * (1 - mean) / variance - 1
    return Place(0.0, LOGISTIC_SD, others={"log_precision": np.log(max(precision, 1.0))})


@_enter(
    title="Beta regression: mean logistic(eta)",
    law=_beta_law,
    link="logit",
    ratios={"odds ratio": None},
    checks=NUMBERS,
    place=_place_beta,
)
def _beta() -> dict[str, Any]:
    """``y ~ Beta(μφ, (1 − μ)φ)`` with ``μ = 1/(1 + e^{−η})``, in ``log φ``."""

    def function(x, row):
        log_phi = x["log_precision"]
        one, other = jnp.exp(log_phi - softplus(-x["eta"])), jnp.exp(log_phi - softplus(x["eta"]))
        density = one * jnp.log(row["y"]) + other * jnp.log1p(-row["y"])
        return gammaln(one) + gammaln(other) - gammaln(jnp.exp(log_phi)) - density

    return _with_eta(function, "log_precision", "precision", {"y": "unit"})


def beta(X: Any, y: Any, weights: Any = None) -> RecordModel:
    """Values between 0 and 1 with mean ``1/(1 + e^{−ξ·β})``; the last coordinate is ``log φ``, in results ``precision``."""
    return _of("beta", X, {"y": y}, weights)


def _weibull_law(eta, other, constants) -> Law:
    """With ``u = (t/λ)^k``: survival ``e^{−u}``, restricted mean ``λ Γ(1 + 1/k) P(1/k, u)``, P the gamma ratio."""
    k, mean = exp(other[:, 0]), exp(eta) * scipy.special.gamma(1 + exp(-other[:, 0]))

    def log_pdf(y):
        log_u = k * (np.log(y) - eta)
        return other[:, 0] + log_u - exp(log_u) - np.log(y)

    return _survival(
        log_pdf,
        lambda y: -exp(k * (np.log(y) - eta)),
        mean,
        lambda u: exp(eta) * (-np.log1p(-u)) ** (1 / k),
        lambda y: mean * scipy.special.gammainc(1 / k, exp(k * (np.log(y) - eta))),
    )


@_enter(
    title="Weibull survival with right censoring: scale exp(eta)",
    law=_weibull_law,
    link="log",
    ratios={"time ratio": None, "hazard ratio": "shape"},
    checks=TIMES,
    place=place_times,
    survival=True,
)
def _weibull() -> dict[str, Any]:
    """``P(T > t) = exp(−(t e^{−η})^k)`` in ``log k``; ``died`` is zero where the time is censored."""

    def function(x, row):
        u = jnp.exp(x["log_shape"]) * (jnp.log(row["time"]) - x["eta"])
        return jnp.exp(u) - row["died"] * (x["log_shape"] + u)

    return _with_eta(function, "log_shape", "shape", SURVIVAL)


def weibull(X: Any, time: Any, died: Any, weights: Any = None) -> RecordModel:
    """Survival times, ``P(T > t) = exp(−(t e^{−ξ·β})^k)``; the last coordinate is ``log k``, in results ``shape``.

    Parameters
    ----------
    X : array of shape (n, p)
    time : array of shape (n,)
        Until death or the end of observation, positive.
    died : array of shape (n,)
        One, or zero where the time is censored.
    """
    return _of("weibull", X, {"time": time, "died": died}, weights)


def _log_normal_law(eta, other, constants) -> Law:
    """With ``z = (log t − η)/σ``: survival ``Φ(−z)``, restricted mean ``e^{η + σ²/2} Φ(z − σ) + t Φ(−z)``."""
    sigma, mean = exp(other[:, 0]), exp(eta + 0.5 * exp(2 * other[:, 0]))

    def z(y):
        return (np.log(y) - eta) / sigma

    return _survival(
        lambda y: -0.5 * z(y) ** 2 - 0.5 * np.log(2 * np.pi) - other[:, 0] - np.log(y),
        lambda y: scipy.special.log_ndtr(-z(y)),
        mean,
        lambda u: exp(eta + sigma * scipy.special.ndtri(u)),
        lambda y: mean * scipy.special.ndtr(z(y) - sigma) + y * scipy.special.ndtr(-z(y)),
    )


@_enter(
    title="Log-normal survival with right censoring: log time has mean eta",
    law=_log_normal_law,
    link="log",
    ratios={"time ratio": None},
    checks=TIMES,
    place=place_times,
    survival=True,
)
def _log_normal() -> dict[str, Any]:
    """``log T ~ N(η, σ²)`` in ``log σ``; a censored time contributes ``−log Φ(−z)``."""

    def function(x, row):
        z = (jnp.log(row["time"]) - x["eta"]) * jnp.exp(-x["log_sigma"])
        died = x["log_sigma"] + 0.5 * z * z
        return row["died"] * died - (1 - row["died"]) * log_ndtr(-z)

    return _with_eta(function, "log_sigma", "sigma", SURVIVAL)


def log_normal(X: Any, time: Any, died: Any, weights: Any = None) -> RecordModel:
    """Survival times with ``log T ~ N(ξ·β, σ²)``; the last coordinate is ``log σ``, in results ``sigma``."""
    return _of("log_normal", X, {"time": time, "died": died}, weights)


def _piecewise_exponential_law(eta, other, constants) -> Law:
    """Piecewise constant hazards: mean ``Σ_j e^{−H_j} (1 − e^{−h_j w_j})/h_j``, H the hazard summed up to piece j."""
    low = np.array([0.0, *np.atleast_1d(constants["cuts"])])
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
        level = np.broadcast_to(-np.log1p(-u), eta.shape)
        piece = np.sum(level[..., None] > before, -1, keepdims=True) - 1
        piece = np.maximum(piece, 0)
        start, rate = (np.take_along_axis(x, piece, 2)[..., 0] for x in (before, hazard))
        return low[piece[..., 0]] + (level - start) / rate

    def restricted(y):
        return np.sum(np.exp(-before) * -np.expm1(-hazard * np.clip(y[..., None] - low, 0.0, width)) / hazard, -1)

    mean = np.sum(np.exp(-before) * -np.expm1(-spent) / hazard, -1)
    return _survival(log_pdf, lambda y: -total(y), mean, quantile, restricted)


def _place_hazard(seen: Seen) -> Place:
    events = len(seen.values) if seen.died is None else seen.died.sum()
    return Place(np.log(max(events, 0.5) / seen.values.sum()), LOG_HAZARD_SD)


@_enter(
    title="Piecewise exponential survival: a hazard for each piece of time, times exp(eta)",
    law=_piecewise_exponential_law,
    link="log",
    ratios={"hazard ratio": None},
    checks=TIMES,
    place=_place_hazard,
    survival=True,
    pieces=True,
)
def _piecewise_exponential(pieces: int) -> dict[str, Any]:
    """Hazard ``e^{h_j + η}`` between the cut points j − 1 and j: proportional hazards with a step function as baseline."""

    def function(x, row):
        low = jnp.concatenate([jnp.zeros(1), row["cuts"]])
        high = jnp.concatenate([row["cuts"], jnp.full(1, jnp.inf)])
        spent = jnp.maximum(jnp.minimum(row["time"], high) - low, 0.0)
        here = row["died"] * ((row["time"] > low) & (row["time"] <= high))
        log_hazard = x["log_hazard"] + x["eta"]
        return jnp.sum(spent * jnp.exp(log_hazard)) - jnp.sum(here * log_hazard)

    return {
        "function": function, "parameters": {"log_hazard": pieces}, "predictors": ["eta"], "columns": SURVIVAL,
        "constants": {"cuts": pieces - 1}, "intercept": False, "variables": _positive("log_hazard", "hazard"),
    }  # fmt: skip


def piecewise_exponential(X: Any, time: Any, died: Any, cuts: Any, weights: Any = None) -> RecordModel:
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
    return _of(
        "piecewise_exponential", X, {"time": time, "died": died}, weights, {"cuts": edges}, pieces=len(edges) + 1
    )


def _cut_points(x) -> Any:
    """Increasing: the first, and then logarithms of the gaps."""
    first, gaps = x["first_cut"], jnp.exp(x["log_gaps"]) if "log_gaps" in x else jnp.zeros(0)
    return first + jnp.concatenate([jnp.zeros(1), jnp.cumsum(gaps)])


def _ordered(between: Callable, levels: int) -> dict[str, Any]:
    """``y = k`` where a latent variable of mean η is between two cut points."""

    def function(x, row):
        is_level = (row["y"] == jnp.arange(levels)).astype(float)
        cuts = _cut_points(x)
        inner = is_level[1:-1] @ x["log_gaps"] if levels > 2 else jnp.zeros(())
        upper, lower = is_level[:-1] @ cuts - x["eta"], is_level[1:] @ cuts - x["eta"]
        return between(upper, lower, inner, is_level[-1], is_level[0])

    parameters = {"first_cut": (), **({"log_gaps": levels - 2} if levels > 2 else {})}
    return {
        "function": function, "parameters": parameters, "predictors": ["eta"], "columns": {"y": levels},
        "intercept": False, "variables": lambda x: {"cut_points": _cut_points(x)},
    }  # fmt: skip


def _ordered_law(log_cdf: Callable[[Array], Array]) -> Callable[..., Law]:
    def law(eta, other, constants) -> Law:
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
        return _categorical(np.concatenate([first, inner, last], -1))

    return law


@_enter(
    title="Ordered logistic regression",
    law=_ordered_law(lambda z: -np.logaddexp(0.0, -z)),
    link="logit",
    ratios={"odds ratio": None},
    checks=(LEVELS,),
    place=functools.partial(place_levels, scipy.special.logit, LOGISTIC_SD),
    levels=True,
    ordered=True,
)
def _ordered_logit(levels: int) -> dict[str, Any]:
    """``P(y ≤ k) = 1/(1 + e^{η − c_k})``.

    With ``g = c_k − c_{k−1}``, ``log P(y = k) = log(1 − e^{−g}) − log(1 + e^{η − c_k}) − log(1 + e^{c_{k−1} − η})``.
    """

    def between(upper, lower, log_gap, last, first):
        inner = (1 - last - first) * jnp.log(-jnp.expm1(-jnp.exp(log_gap)))
        return (1 - last) * softplus(-upper) + (1 - first) * softplus(lower) - inner

    return _ordered(between, levels)


def ordered_logit(X: Any, y: Any, levels: int, weights: Any = None) -> RecordModel:
    """Ordered levels 0, 1, …, ``P(y ≤ k) = 1/(1 + e^{ξ·β − c_k})``; in results ``cut_points``.

    Parameters
    ----------
    X : array of shape (n, p)
        Without an intercept.
    y : array of shape (n,)
    levels : int
    """
    return _of("ordered_logit", X, {"y": y}, weights, levels=_levels("ordered_logit", levels))


@_enter(
    title="Ordered probit regression",
    law=_ordered_law(scipy.special.log_ndtr),
    link="probit",
    checks=(LEVELS,),
    place=functools.partial(place_levels, scipy.special.ndtri, 1.0),
    levels=True,
    ordered=True,
)
def _ordered_probit(levels: int) -> dict[str, Any]:
    """``P(y ≤ k) = Φ(c_k − η)``."""

    def between(upper, lower, log_gap, last, first):
        # At the ends the other cut point is out of the way, at a fixed distance.
        low = jnp.where(first + last > 0, upper - 1.0, upper - jnp.exp(log_gap))
        above = log_ndtr(upper)
        inner = above + jnp.log(-jnp.expm1(log_ndtr(low) - above))
        return -(first * above + last * log_ndtr(-lower) + (1 - first - last) * inner)

    return _ordered(between, levels)


def ordered_probit(X: Any, y: Any, levels: int, weights: Any = None) -> RecordModel:
    """Ordered levels 0, 1, …, ``P(y ≤ k) = Φ(c_k − ξ·β)``; in results ``cut_points``. Arguments as of `ordered_logit`."""
    return _of("ordered_probit", X, {"y": y}, weights, levels=_levels("ordered_probit", levels))


def _multinomial_logit_law(eta, other, constants) -> Law:
    whole = np.concatenate([np.zeros_like(eta[..., :1]), eta], -1)
    return _categorical(whole - scipy.special.logsumexp(whole, axis=-1, keepdims=True))


@_enter(
    title="Multinomial logistic regression: the first level is the baseline",
    law=_multinomial_logit_law,
    link="logit",
    ratios={"ratio of odds against the first level": None},
    checks=(LEVELS,),
    place=lambda seen: Place(0.0, MULTINOMIAL_SD),
    levels=True,
)
def _multinomial_logit(levels: int) -> dict[str, Any]:
    """``P(y = k) ∝ e^{η_k}`` with ``η_0 = 0``."""

    def function(x, row):
        eta = jnp.concatenate([jnp.zeros(1), x["eta"]])
        return logsumexp(eta) - (row["y"] == jnp.arange(levels)).astype(float) @ eta

    return {"function": function, "predictors": {"eta": levels - 1}, "columns": {"y": levels}}


def multinomial_logit(X: Any, y: Any, levels: int, weights: Any = None) -> RecordModel:
    """Levels 0, 1, …, ``P(y = k) ∝ e^{ξ·β_k}`` with ``β_0 = 0``: a row of coefficients for each other level."""
    return _of("multinomial_logit", X, {"y": y}, weights, levels=_levels("multinomial_logit", levels))


def _zero_inflated_poisson_law(eta, other, constants) -> Law:
    """``log(π 1{y = 0} + (1 − π) p(y))``."""
    rate, zero = exp(eta), np.broadcast_to(scipy.special.expit(other[:, 0]), eta.shape)

    def log_density(y: Array, own: Mapping[str, Array]) -> Array:
        other = np.log1p(-zero) + scipy.stats.poisson.logpmf(y, rate)
        with np.errstate(divide="ignore"):
            return np.where(y == 0, np.logaddexp(np.log(zero), other), other)

    return Law(
        log_density,
        lambda: (1 - zero) * rate,
        lambda own, rng: np.where(rng.random(rate.shape) < zero, 0.0, rng.poisson(rate)),
    )


@_enter(
    title="Zero-inflated Poisson regression: mean exp(eta) of the counts that are not structural zeros",
    law=_zero_inflated_poisson_law,
    link="log",
    ratios={"rate ratio": None},
    checks=COUNTS,
    place=place_counts,
)
def _zero_inflated_poisson() -> dict[str, Any]:
    """``y = 0`` with probability π, else ``y ~ Poisson(e^η)``; in ``log(π/(1 − π))``."""

    def function(x, row):
        z, mean = x["logit_zero"], jnp.exp(x["eta"])
        zero = (row["y"] == 0).astype(float)
        return softplus(z) - zero * jnp.logaddexp(z, -mean) - (1 - zero) * (row["y"] * x["eta"] - mean)

    return {
        "function": function, "parameters": ["logit_zero"], "predictors": ["eta"], "columns": {"y": "count"},
        "variables": lambda x: {"zero_probability": 1 / (1 + jnp.exp(-x["logit_zero"]))},
    }  # fmt: skip


def zero_inflated_poisson(X: Any, y: Any, weights: Any = None) -> RecordModel:
    """Counts that are zero with probability π and else ``Poisson(e^{ξ·β})``; in results ``zero_probability``."""
    return _of("zero_inflated_poisson", X, {"y": y}, weights)


def _beta_binomial_law(eta, other, constants) -> Law:
    chance, precision = scipy.special.expit(eta), np.broadcast_to(exp(other[:, 0]), eta.shape)
    one, other = chance * precision, (1 - chance) * precision

    def draw(own: Mapping[str, Array], rng: np.random.Generator) -> Array:
        drawn = rng.beta(one, other)
        return rng.binomial(np.asarray(own["successes"] + own["failures"], int), drawn).astype(float)

    return Law(
        lambda y, own: scipy.stats.betabinom.logpmf(y, y + own["failures"], one, other),
        lambda: chance,
        draw,
        shares=True,
    )


@_enter(
    title="Beta-binomial regression: mean logistic(eta)",
    law=_beta_binomial_law,
    link="logit",
    ratios={"odds ratio": None},
    checks=COUNTS,
    place=lambda seen: Place(0.0, LOGISTIC_SD),
)
def _beta_binomial() -> dict[str, Any]:
    """Successes among trials, with a probability ``~ Beta(μφ, (1 − μ)φ)``, ``μ = 1/(1 + e^{−η})``; in ``log φ``."""

    def function(x, row):
        log_phi, good, bad = x["log_precision"], row["successes"], row["failures"]
        one, other = jnp.exp(log_phi - softplus(-x["eta"])), jnp.exp(log_phi - softplus(x["eta"]))
        phi = jnp.exp(log_phi)
        rises = gammaln(good + one) - gammaln(one) + gammaln(bad + other) - gammaln(other)
        return gammaln(good + bad + phi) - gammaln(phi) - rises

    return _with_eta(function, "log_precision", "precision", {"successes": "count", "failures": "count"})


def beta_binomial(X: Any, successes: Any, failures: Any, weights: Any = None) -> RecordModel:
    """Successes and failures of probability ``~ Beta(μφ, (1 − μ)φ)``, ``μ = 1/(1 + e^{−ξ·β})``; in results ``precision``."""
    return _of("beta_binomial", X, {"successes": successes, "failures": failures}, weights)


# Families with bounds of their own, and models of one record.
BUILT_IN = tuple(name for name, record in FAMILIES.items() if record.built_in)
LIBRARY = tuple(name for name, record in FAMILIES.items() if not record.built_in)
