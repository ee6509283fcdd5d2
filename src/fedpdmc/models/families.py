"""The standard library of families: models of one record, built by the same route as a user's model file.

Each function here is minus the log likelihood of one record, without what does not depend on parameters. ``eta`` is the
linear predictor. Auxiliary parameters are unconstrained coordinates; ``variables`` are what results show.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.nn import softplus
from jax.scipy.special import gammaln, log_ndtr, logsumexp

from fedpdmc.models.model_file.model import Model


class Family(NamedTuple):
    """How a family is built.

    Attributes
    ----------
    build : callable
        Returns the arguments of `Model`; takes ``levels`` or ``pieces`` where the family has them.
    title : str
    levels : bool
        Whether the response has levels, of which there must be a number.
    pieces : bool
        Whether time is cut into pieces.
    """

    build: Callable[..., dict[str, Any]]
    title: str
    levels: bool = False
    pieces: bool = False


FAMILIES: dict[str, Family] = {}


def _family(title: str, **sizes: bool) -> Callable:
    def enter(build: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        FAMILIES[build.__name__.strip("_")] = Family(build, title, **sizes)
        return build

    return enter


@functools.lru_cache(64)
def family(name: str, **sizes: int) -> Model:
    """The model of a family, for so many levels or pieces where it has them."""
    found = FAMILIES[name]
    return Model(title=found.title, **found.build(**sizes))


def _positive(parameter: str, variable: str) -> Callable:
    """A positive variable whose logarithm is the parameter."""
    return lambda x: {variable: jnp.exp(x[parameter])}


def _with_eta(function: Callable, parameter: str, variable: str, columns: dict[str, Any]) -> dict[str, Any]:
    """A family of one linear predictor and one positive variable."""
    return {
        "function": function, "parameters": [parameter], "predictors": ["eta"], "columns": columns,
        "variables": _positive(parameter, variable),
    }  # fmt: skip


@_family("Negative binomial regression: mean exp(eta), variance mean + mean^2/concentration")
def negative_binomial() -> dict[str, Any]:
    """``y ~ NB(e^η, φ)`` in ``log φ``."""

    def function(x, row):
        y, log_phi = row["y"], x["log_concentration"]
        phi = jnp.exp(log_phi)
        choose = gammaln(y + phi) - gammaln(phi)
        return (y + phi) * jnp.logaddexp(log_phi, x["eta"]) - choose - phi * log_phi - y * x["eta"]

    return _with_eta(function, "log_concentration", "concentration", {"y": "count"})


@_family("Gamma regression: mean exp(eta)")
def gamma() -> dict[str, Any]:
    """``y ~ Gamma(a, a e^{−η})`` in ``log a``."""

    def function(x, row):
        log_a, log_y = x["log_shape"], jnp.log(row["y"])
        a = jnp.exp(log_a)
        u = log_y - x["eta"]
        return gammaln(a) - a * log_a + a * (jnp.exp(u) - u)

    return _with_eta(function, "log_shape", "shape", {"y": "positive"})


@_family("Beta regression: mean logistic(eta)")
def beta() -> dict[str, Any]:
    """``y ~ Beta(μφ, (1 − μ)φ)`` with ``μ = 1/(1 + e^{−η})``, in ``log φ``."""

    def function(x, row):
        log_phi = x["log_precision"]
        one, other = jnp.exp(log_phi - softplus(-x["eta"])), jnp.exp(log_phi - softplus(x["eta"]))
        density = one * jnp.log(row["y"]) + other * jnp.log1p(-row["y"])
        return gammaln(one) + gammaln(other) - gammaln(jnp.exp(log_phi)) - density

    return _with_eta(function, "log_precision", "precision", {"y": "unit"})


SURVIVAL = {"time": "positive", "died": "binary"}


@_family("Weibull survival with right censoring: scale exp(eta)")
def weibull() -> dict[str, Any]:
    """``P(T > t) = exp(−(t e^{−η})^k)`` in ``log k``; ``died`` is zero where the time is censored."""

    def function(x, row):
        u = jnp.exp(x["log_shape"]) * (jnp.log(row["time"]) - x["eta"])
        return jnp.exp(u) - row["died"] * (x["log_shape"] + u)

    return _with_eta(function, "log_shape", "shape", SURVIVAL)


@_family("Log-normal survival with right censoring: log time has mean eta")
def log_normal() -> dict[str, Any]:
    """``log T ~ N(η, σ²)`` in ``log σ``; a censored time contributes ``−log Φ(−z)``."""

    def function(x, row):
        z = (jnp.log(row["time"]) - x["eta"]) * jnp.exp(-x["log_sigma"])
        died = x["log_sigma"] + 0.5 * z * z
        return row["died"] * died - (1 - row["died"]) * log_ndtr(-z)

    return _with_eta(function, "log_sigma", "sigma", SURVIVAL)


@_family("Piecewise exponential survival: a hazard for each piece of time, times exp(eta)", pieces=True)
def piecewise_exponential(pieces: int) -> dict[str, Any]:
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


@_family("Ordered logistic regression", levels=True)
def ordered_logit(levels: int) -> dict[str, Any]:
    """``P(y ≤ k) = 1/(1 + e^{η − c_k})``.

    With ``g = c_k − c_{k−1}``, ``log P(y = k) = log(1 − e^{−g}) − log(1 + e^{η − c_k}) − log(1 + e^{c_{k−1} − η})``.
    """

    def between(upper, lower, log_gap, last, first):
        inner = (1 - last - first) * jnp.log(-jnp.expm1(-jnp.exp(log_gap)))
        return (1 - last) * softplus(-upper) + (1 - first) * softplus(lower) - inner

    return _ordered(between, levels)


@_family("Ordered probit regression", levels=True)
def ordered_probit(levels: int) -> dict[str, Any]:
    """``P(y ≤ k) = Φ(c_k − η)``."""

    def between(upper, lower, log_gap, last, first):
        # At the ends the other cut point is out of the way, at a fixed distance.
        low = jnp.where(first + last > 0, upper - 1.0, upper - jnp.exp(log_gap))
        above = log_ndtr(upper)
        inner = above + jnp.log(-jnp.expm1(log_ndtr(low) - above))
        return -(first * above + last * log_ndtr(-lower) + (1 - first - last) * inner)

    return _ordered(between, levels)


@_family("Multinomial logistic regression: the first level is the baseline", levels=True)
def multinomial_logit(levels: int) -> dict[str, Any]:
    """``P(y = k) ∝ e^{η_k}`` with ``η_0 = 0``."""

    def function(x, row):
        eta = jnp.concatenate([jnp.zeros(1), x["eta"]])
        return logsumexp(eta) - (row["y"] == jnp.arange(levels)).astype(float) @ eta

    return {"function": function, "predictors": {"eta": levels - 1}, "columns": {"y": levels}}


@_family("Zero-inflated Poisson regression: mean exp(eta) of the counts that are not structural zeros")
def zero_inflated_poisson() -> dict[str, Any]:
    """``y = 0`` with probability π, else ``y ~ Poisson(e^η)``; in ``log(π/(1 − π))``."""

    def function(x, row):
        z, mean = x["logit_zero"], jnp.exp(x["eta"])
        zero = (row["y"] == 0).astype(float)
        return softplus(z) - zero * jnp.logaddexp(z, -mean) - (1 - zero) * (row["y"] * x["eta"] - mean)

    return {
        "function": function, "parameters": ["logit_zero"], "predictors": ["eta"], "columns": {"y": "count"},
        "variables": lambda x: {"zero_probability": 1 / (1 + jnp.exp(-x["logit_zero"]))},
    }  # fmt: skip


@_family("Beta-binomial regression: mean logistic(eta)")
def beta_binomial() -> dict[str, Any]:
    """Successes among trials, with a probability ``~ Beta(μφ, (1 − μ)φ)``, ``μ = 1/(1 + e^{−η})``; in ``log φ``."""

    def function(x, row):
        log_phi, good, bad = x["log_precision"], row["successes"], row["failures"]
        one, other = jnp.exp(log_phi - softplus(-x["eta"])), jnp.exp(log_phi - softplus(x["eta"]))
        phi = jnp.exp(log_phi)
        rises = gammaln(good + one) - gammaln(one) + gammaln(bad + other) - gammaln(other)
        return gammaln(good + bad + phi) - gammaln(phi) - rises

    return _with_eta(function, "log_precision", "precision", {"successes": "count", "failures": "count"})
