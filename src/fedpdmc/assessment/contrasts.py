"""Functions of the parameters by name: contrasts, odds ratios and the like."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
import pandas as pd

from fedpdmc._jax.mapped import mapped
from fedpdmc._jax.precision import double_precision
from fedpdmc.assessment.at_site import DRAWS
from fedpdmc.errors import InputError
from fedpdmc.models.variables import scalars
from fedpdmc.study.units import INTERCEPT
from fedpdmc.validation import probability

if TYPE_CHECKING:
    from fedpdmc.results.posterior import Posterior
    from fedpdmc.study.sites_from_table import Sites

Function = Callable[[dict[str, Any]], Any]
# What the exponential of a coefficient is, by family.
RATIOS = {
    "logistic": "odds ratio",
    "poisson": "rate ratio",
    "negative_binomial": "rate ratio",
    "zero_inflated_poisson": "rate ratio",
    "gamma": "ratio of means",
    "beta": "odds ratio",
    "beta_binomial": "odds ratio",
    "weibull": "time ratio",
    "log_normal": "time ratio",
    "piecewise_exponential": "hazard ratio",
    "ordered_logit": "odds ratio",
    "multinomial_logit": "ratio of odds against the first level",
}


@double_precision
def contrasts(
    post: Posterior, what: Mapping[str, Mapping[str, float] | Function], *, level: float = 0.9, draws: int = DRAWS
) -> pd.DataFrame:
    """Functions of the parameters in the units of `Posterior.summary`.

    Parameters
    ----------
    post : Posterior
    what : mapping
        From a name to weights of parameters by name, ``{"older by ten": {"age": 10}}``, or to a JAX function of a dict of
        parameters by name.
    level : float
        Probability of the interval.
    draws : int
        Draws, over all chains, for the interval and the probability.

    Returns
    -------
    DataFrame
        A row for each: mean and sd, which are integrals along the paths (or averages over the turns, or over draws of a
        posterior from disk), the ends of the interval, and the probability of being positive.
    """
    level = probability("level", level, "Give a probability between 0 and 1, such as 0.9.")
    each = min(max(-(-draws // post.chains), 2), post.most_draws)
    values = {name: jnp.asarray(x.reshape(-1)) for name, x in scalars(post.variables(each)).items()}
    functions = {name: _function(name, one, list(values)) for name, one in what.items()}
    tail, rows = 50 * (1 - level), {}
    for name, f in functions.items():
        drawn = np.asarray(mapped(f)(values), float)
        if drawn.ndim != 1:
            raise InputError(f"what[{name!r}]", f"an array of shape {drawn.shape[1:]}", "Return one number.")
        mean, square = _average(post, f, drawn)
        low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
        sd = np.sqrt(max(square - mean**2, 0.0))
        ends = {f"{tail:.4g}%": low, f"{100 - tail:.4g}%": high}
        rows[name] = {"mean": mean, "sd": sd, **ends, "P(> 0)": np.mean(drawn > 0)}
    return pd.DataFrame(rows).T


def _average(post: Posterior, f: Function, drawn: np.ndarray) -> np.ndarray:
    """Means of f and f²: along the paths, or over draws of a posterior from disk, which lacks the functions of variables."""
    try:
        return post.expectation(_moments(f), named=True)
    except InputError as error:
        if error.argument not in ("named", "skeleton"):
            raise
        return np.array([drawn.mean(), np.mean(drawn**2)])


def _moments(f: Function) -> Function:
    def moments(found):
        value = f(_entries(found))
        return jnp.stack([value, value**2])

    return moments


def _entries(found: dict[str, Any]) -> dict[str, Any]:
    """Every entry of every variable, named as `scalars` does."""
    entries = {}
    for name, value in found.items():
        for index in np.ndindex(jnp.shape(value)):
            entries[f"{name}[{','.join(map(str, index))}]" if index else name] = value[index] if index else value
    return entries


def _function(name: str, told: Mapping[str, float] | Function, known: list[str]) -> Function:
    if callable(told):
        return told
    stray = sorted(set(told) - set(known))
    if stray:
        raise InputError(f"what[{name!r}]", f"the parameter {stray[0]!r}", f"Give some of {', '.join(known)}.")
    return lambda found: sum(weight * found[one] for one, weight in told.items())


def ratios(
    post: Posterior,
    sites: Sites,
    *,
    by: Mapping[str, float] | None = None,
    level: float = 0.9,
    draws: int = DRAWS,
) -> pd.DataFrame:
    """Odds ratios, rate ratios, hazard ratios or time ratios, as the family has them, of all terms but the intercept.

    Parameters
    ----------
    post : Posterior
    sites : Sites
        From `fedpdmc.sites`, which ``post`` was sampled from.
    by : mapping, optional
        Increases by term, in the column's own units, where they are not one: ``{"age": 10}``.
    level : float
    draws : int

    Returns
    -------
    DataFrame
        A row for each term: median, the ends of the interval, and the probability of a ratio above one.
    """
    family = sites.study.family
    if family not in RATIOS:
        raise InputError("sites", f"a study of family {family!r}", f"Ratios are of {', '.join(RATIOS)}.")
    level = probability("level", level, "Give a probability between 0 and 1, such as 0.9.")
    steps = dict(by or {})
    each = min(max(-(-draws // post.chains), 2), post.most_draws)
    values = scalars(post.variables(each))
    others = set() if sites.study.model is None else set(sites.names[len(sites.names) - _others(sites) :])
    terms = [name for name in sites.names if name in values and INTERCEPT not in name and name not in others]
    if stray := sorted(set(steps) - set(terms)):
        raise InputError("by", repr(stray[0]), f"Give some of {', '.join(terms)}.")
    tail, rows = 50 * (1 - level), {}
    for name in terms:
        drawn = np.exp(steps.get(name, 1.0) * values[name].reshape(-1))
        low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
        shown = f"{name} (+ {steps[name]:g})" if name in steps else name
        ends = {f"{tail:.4g}%": low, f"{100 - tail:.4g}%": high}
        rows[shown] = {"median": np.median(drawn), **ends, "P(> 1)": np.mean(drawn > 1)}
    return pd.DataFrame(rows).T.rename_axis(index=RATIOS[family])


def _others(sites: Sites) -> int:
    """Number of parameters that are not coefficients."""
    model = sites.study.model
    return 0 if model is None else sum(one.type.size for one in model.model.source.parameters)
