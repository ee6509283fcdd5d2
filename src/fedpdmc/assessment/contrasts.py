"""Functions of the parameters by name: contrasts, odds ratios and the like."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
import pandas as pd

from fedpdmc._jax.compilation import mapped
from fedpdmc._jax.precision import double_precision
from fedpdmc.assessment.at_site import DRAWS
from fedpdmc.errors import InputError
from fedpdmc.models.user_function import scalars
from fedpdmc.results.forest_plot import EffectScale
from fedpdmc.results.forest_plot import ratios as ratio_table
from fedpdmc.validation import LEVEL, interval_ends

if TYPE_CHECKING:
    from fedpdmc.results.posterior import Posterior
    from fedpdmc.study.sites_from_table import Sites

Function = Callable[[dict[str, Any]], Any]


@double_precision
def contrasts(
    post: Posterior, what: Mapping[str, Mapping[str, float] | Function], *, level: float = LEVEL, draws: int = DRAWS
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
    below, above = interval_ends("level", level).items()
    each = min(max(-(-draws // post.chains), 2), post.most_draws)
    values = {name: jnp.asarray(x.reshape(-1)) for name, x in scalars(post.variables(each)).items()}
    functions = {name: _function(name, one, list(values)) for name, one in what.items()}
    rows = {}
    for name, f in functions.items():
        drawn = np.asarray(mapped(f)(values), float)
        if drawn.ndim != 1:
            raise InputError(f"what[{name!r}]", f"an array of shape {drawn.shape[1:]}", "Return one number.")
        mean, square = _average(post, f, drawn)
        sd = np.sqrt(max(square - mean**2, 0.0))
        ends = {name: np.quantile(drawn, p) for name, p in (below, above)}
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
    hazard: bool = False,
    level: float = LEVEL,
    draws: int = DRAWS,
) -> pd.DataFrame:
    """Odds ratios, rate ratios, hazard ratios or time ratios, as the family has them, per unit of every column.

    `Posterior.ratios` has them per standard deviation, about.

    Parameters
    ----------
    post : Posterior
    sites : Sites
        From `fedpdmc.sites`, which ``post`` was sampled from.
    by : mapping, optional
        Increases by column, in the column's own units, where they are not one: ``{"age": 10}``.
    hazard : bool
        Of a Weibull model hazard ratios in place of time ratios: ``e^{−kβ}`` at each draw, k the shape.
    level : float
    draws : int

    Returns
    -------
    DataFrame
        A row for each term: median, the ends of the interval, and the probability of a ratio above one.
    """
    scale = EffectScale(**(sites.effect_scale or {"kinds": {"parameter": None}, "ratio": False}))
    # One unit; of a logarithm, e times as much. A label says an increment only if it was asked for.
    units = {name: one | {"by": None} for name, one in scale.columns.items()}
    if hazard and "hazard ratio" not in scale.kinds:
        remedy = "Hazards are proportional in weibull and piecewise_exponential."
        raise InputError("hazard", f"True with {sites.study.family!r}", remedy)
    return ratio_table(post, replace(scale, columns=units), by, level, "hazard ratio" if hazard else None, draws)
