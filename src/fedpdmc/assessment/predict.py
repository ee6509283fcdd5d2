"""What a posterior predicts: new records, survival curves, average effects of columns, contrasts and ratios."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
import pandas as pd

from fedpdmc._jax.compilation import mapped
from fedpdmc._jax.precision import double_precision
from fedpdmc.assessment.at_site import (
    CURVE_DRAWS,
    DRAWS,
    average_survival,
    draws_of_each,
    kaplan_meier,
    observed_times,
    public_draws,
    time_grid,
)
from fedpdmc.console.interrupts import check, deferred
from fedpdmc.errors import InputError
from fedpdmc.models.user_function import scalars
from fedpdmc.results.forest_plot import EffectScale
from fedpdmc.results.forest_plot import ratios as ratio_table
from fedpdmc.study.sites_from_table import check_table
from fedpdmc.study.study_response import OF_TIMES, Outcome, own_units
from fedpdmc.validation import LEVEL, interval_ends, one_of, probability

if TYPE_CHECKING:
    from fedpdmc.results.posterior import Posterior
    from fedpdmc.study.schema import Column
    from fedpdmc.study.sites_from_table import Sites


def predict(
    post: Posterior,
    sites: Sites,
    table: Any,
    *,
    kind: str = "mean",
    at: float | Sequence[float] | None = None,
    level: float = LEVEL,
    draws: int = DRAWS,
    seed: int = 0,
) -> pd.DataFrame:
    """Predictions for new records.

    Parameters
    ----------
    post : Posterior
    sites : Sites
        From `fedpdmc.sites`, which ``post`` was sampled from.
    table : pandas or polars DataFrame, or Arrow table
        The formula's columns, without the response. Values must be within the declared bounds:
        `fedpdmc.sites` takes wider ones, ``columns={"age": {"bounds": [18, 100]}}``.
    kind : {"mean", "response", "survival", "hazard", "restricted_mean", "median"}
        The expected response (a probability, a rate, a time), or a response itself, with its own variation. Of survival
        families also the probability to survive a time, the hazard at it, the mean survival time up to it, and the median.
    at : float or sequence of float, optional
        The times, in the units of the table, for survival, hazard and restricted mean.
    level : float
        Probability of the interval, between quantiles with equal tails.
    draws, seed : int

    Returns
    -------
    DataFrame
        A row for each record: mean, sd and the ends of the interval, in the response's own units. Where the response has
        levels, a row for each record and level, with its probability; NaN for a record with a missing value, if such are
        dropped; of survival families the time until the event, and
        with ``at`` a row for each record and time.
    """
    one_of("kind", kind, ("mean", "response", "median", *OF_TIMES))
    times = check_times(kind, at)
    records = check_table(sites.study, table, response=False)
    outcome = Outcome(sites.study, public_draws(post, draws).values)

    def of_each(values: np.ndarray) -> pd.DataFrame:
        # A record that is dropped for a missing value keeps its row, which is NaN: rows are those of the table.
        return described(values, level, records.attrs["rows"]).reindex(range(records.attrs["count"]))

    if kind not in ("mean", "response"):
        parts = [of_each(outcome.expected(records, kind, time)) for time in times]
        found = pd.concat(parts, keys=times, names=["at", "record"]).swaplevel().sort_index()
        return found.droplevel("at") if at is None else found
    law = outcome.law(records)
    if kind == "mean":
        values = law.mean()
    elif law.levels or law.shares:
        remedy = "Use 'mean' for levels and shares of trials: it gives their probabilities."
        raise InputError("kind", repr(kind), remedy)
    else:
        values = law.draw({}, np.random.default_rng(seed))
    values = own_units(values, outcome.response)
    if not law.levels:
        return of_each(values)
    parts = [of_each(values[..., k]) for k in range(values.shape[2])]
    found = pd.concat(parts, keys=list(outcome.response.levels), names=["level", "record"])
    return found.swaplevel().sort_index(level="record", sort_remaining=False)


def check_times(kind: str, at: Any) -> list[float]:
    """The times of a prediction; one that is not used if the kind needs none.

    Raises
    ------
    InputError
        Times where none are needed, none where some are, or times that are not positive.
    """
    remedy = f"Give at=, one or more positive times, with kind one of {', '.join(OF_TIMES)}, and only with them."
    if (at is not None) != (kind in OF_TIMES):
        raise InputError("at", f"{at!r} with kind = {kind!r}", remedy)
    times = np.atleast_1d(np.asarray(1.0 if at is None else at, float))
    if times.ndim != 1 or not times.size or not (np.isfinite(times) & (times > 0)).all():
        raise InputError("at", repr(at), remedy)
    return times.tolist()


def described(values: np.ndarray, level: float, index: Any = None) -> pd.DataFrame:
    """Mean, sd and interval of each row."""
    ends = {name: np.quantile(values, p, axis=1) for name, p in interval_ends("level", level).items()}
    return pd.DataFrame({"mean": values.mean(1), "sd": values.std(1)} | ends, index=index)


# Survival curves and average effects ------------------------------------------------------------------------------------

# Times of a smooth curve, the values of a column that have curves at most, and the curves of one panel.
SMOOTH, MOST_CURVES, MOST_TOGETHER = 60, 8, 4


@deferred("Nothing is kept: call survival_curves() again.")
def survival_curves(
    post: Posterior,
    sites: Sites,
    *,
    by: str | None = None,
    at: Any = None,
    level: float = LEVEL,
    draws: int = CURVE_DRAWS,
) -> pd.DataFrame:
    """Survival averaged over the covariates of the records, beside the Kaplan-Meier estimate of the same records.

    Parameters
    ----------
    post : Posterior
    sites : Sites
        From `fedpdmc.sites`, of a survival family.
    by : str, optional
        A column of levels or of few numbers, or "site": a curve for each value. None: one of all records.
    at : float or sequence of float, optional
        The times, in the units of the table; if None equally spaced up to the last event.
    level : float
    draws : int

    Returns
    -------
    DataFrame
        A row for each curve and time: mean, sd and interval of the model, and ``kaplan_meier``.
    """
    level = probability("level", level, "Give a probability between 0 and 1, such as 0.95.")
    public, parts = public_draws(post, draws).values, {}
    times = check_times("survival", time_grid(*observed_times(sites.study, sites.tables), SMOOTH) if at is None else at)
    for name, tables in _groups(sites, by):
        time, died = observed_times(sites.study, tables)
        total: Any = 0.0
        for site, records in tables.items():
            outcome = Outcome(sites.study, public, site)
            total = total + len(records) * average_survival(outcome, records, times, lambda share: check())
        curve = described((total / len(time)).T, level, pd.Index(times, name="time"))
        parts[name] = curve.assign(kaplan_meier=kaplan_meier(time, died).at(times))
    return pd.concat(parts, names=["all" if by is None else by])


def _covariates(sites: Sites) -> list[str]:
    return sorted(sites.study.design.used - {sites.study.design.response_name})


def _groups(sites: Sites, by: str | None) -> Iterator[tuple[str, dict[str, pd.DataFrame]]]:
    """Records of each curve by site, in the order of the levels."""
    if by is None or by == "site":
        yield from [("all", sites.tables)] if by is None else ((name, {name: t}) for name, t in sites.tables.items())
        return
    one_of("by", by, ["site", *_covariates(sites)])
    column = sites.study.columns[by]
    seen = set(np.concatenate([table[by].to_numpy() for table in sites.tables.values()]).tolist())
    values: list[Any] = [one for one in column.levels if one in seen] or sorted(seen)
    if len(values) > MOST_CURVES:
        remedy = f"At most {MOST_CURVES} curves fit in a picture: give rows with predict(kind='survival') instead."
        raise InputError("by", f"{by!r}, which has {len(values)} values", remedy)
    for value in values:
        shown = value if column.levels else f"{value * column.scale + column.center:g}"
        tables = {name: table.loc[(table[by] == value).to_numpy()] for name, table in sites.tables.items()}
        yield f"{by}: {shown}", {name: table for name, table in tables.items() if len(table)}


def plot_survival(
    post: Posterior,
    sites: Sites,
    new: Any = None,
    *,
    by: str | None = None,
    at: Any = None,
    level: float = LEVEL,
    draws: int = CURVE_DRAWS,
    ax: Any = None,
):
    """Survival curves of the model with bands, over Kaplan-Meier steps; returns Matplotlib's axes.

    More than four curves have a panel each, and their axes are an array.

    Parameters
    ----------
    post, sites, by, at, level, draws
        As of `survival_curves`: the model is averaged over the records of the Kaplan-Meier estimate below it.
    new : table, optional
        Rows of covariates, as `predict` takes them: a curve for each, over the estimate of all records.
    ax : matplotlib axes, optional
    """
    if new is not None and by is not None:
        raise InputError("by", f"{by!r} with rows", "Give rows of covariates or the column, not both.")
    time, died = observed_times(sites.study, sites.tables)
    if new is None:
        table, groups = survival_curves(post, sites, by=by, at=at, level=level, draws=draws), dict(_groups(sites, by))
        models = {str(name): part.droplevel(0) for name, part in table.groupby(level=0, sort=False)}
        observed = {name: observed_times(sites.study, tables) for name, tables in groups.items()}
    else:
        times = time_grid(time, died, SMOOTH) if at is None else at
        table = predict(post, sites, new, kind="survival", at=times, level=level, draws=draws)
        models = {_label(new, i): part.droplevel("record") for i, part in table.groupby(level="record", sort=False)}
        observed = {"Kaplan-Meier, all records": (time, died)}
    steps = {name: (np.unique(one[0]), kaplan_meier(*one).at(np.unique(one[0]))) for name, one in observed.items()}
    if ax is None and len(models) > MOST_TOGETHER:
        return draw_panels(models, steps, sites.study.design.response_name)
    return draw_curves(models, steps, sites.study.design.response_name, ax)


def _label(new: Any, row: Any) -> str:
    """The covariates of a row, where rows differ."""
    frame = pd.DataFrame(new).reset_index(drop=True)
    names = [name for name in frame if len(set(frame[name])) > 1]
    return ", ".join(f"{name} = {frame[name].iloc[int(row)]}" for name in names) or "the row"


def draw_curves(models: Mapping[str, Any], steps: Mapping[str, Any], label: str, ax: Any = None, known: str = "steps"):
    """Curves with bands, and Kaplan-Meier estimates (times, survival) in the colour of the curve of the same name.

    They are ``known`` as steps, or at points only.
    """
    import matplotlib.pyplot as plt

    ax = plt.subplots(figsize=(6.4, 4.2), layout="constrained")[1] if ax is None else ax
    colours, alone = {name: f"C{i}" for i, name in enumerate(models or steps)}, len(models) < 2
    for name, (time, survival) in steps.items():
        colour = colours.get(name, "0.5")
        style: dict[str, Any] = {"drawstyle": "steps-post"} if known == "steps" else {"marker": "o", "ms": 4, "ls": ":"}
        shown = name if name not in models else "Kaplan-Meier" if alone else None
        ax.plot(np.append(0.0, time), np.append(1.0, survival), color=colour, lw=1.0, label=shown, **style)
    for name, part in models.items():
        low, high = (np.append(1.0, part[column]) for column in part.columns if str(column).endswith("%"))
        time = np.append(0.0, part.index)
        ax.fill_between(time, low, high, color=colours[name], alpha=0.2, lw=0)
        shown = "model" if alone and name in steps else name
        ax.plot(time, np.append(1.0, part["mean"]), color=colours[name], lw=1.8, label=shown)
    ax.set(xlabel=label, ylabel="survival", ylim=(0, 1.02), xlim=(0, None))
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False)
    return ax


def draw_panels(
    models: Mapping[str, Any], steps: Mapping[str, Any], label: str, figure: Any = None, known: str = "steps"
):
    """As `draw_curves`, with a panel for each Kaplan-Meier estimate that has its name as title; returns the axes."""
    import matplotlib.pyplot as plt

    figure = plt.figure(layout="constrained") if figure is None else figure
    rows, width = -(-len(steps) // 3), min(len(steps), 3)
    figure.set_size_inches(2.4 * width + 0.6, 1.9 * rows + 0.4)
    axes = figure.subplots(rows, width, sharex=True, sharey=True, squeeze=False)
    for i, (ax, name) in enumerate(zip(axes.flat, steps, strict=False)):
        last = i + width >= len(steps)
        draw_curves({name: models[name]} if name in models else {}, {name: steps[name]}, label, ax, known)
        ax.set_title(name, fontsize=9)
        ax.set(xlabel=label if last else "", ylabel="" if i % width else "survival")
        ax.tick_params(labelbottom=last)
        ax.legend(frameon=False, fontsize=8).set_visible(i == 0)
    axes.flat[0].set_xlim(0, 1.02 * max(max(time, default=1.0) for time, _ in steps.values()))
    for ax in axes.flat[len(steps) :]:
        ax.set_axis_off()
    return axes


def effects(
    post: Posterior,
    sites: Sites,
    column: str,
    *,
    by: float | None = None,
    ratio: bool = False,
    kind: str = "mean",
    at: float | None = None,
    level: float = LEVEL,
    draws: int = DRAWS,
) -> pd.DataFrame:
    """The average marginal effect of a column: how the expected response changes, averaged over all records.

    Each site averages over its own records, for every draw; these averages, one number for each draw and contrast, leave it,
    weighted by the number of its records.

    Parameters
    ----------
    post : Posterior
    sites : Sites
    column : str
        Of levels: every level against the first. A number: an increase of ``by``.
    by : float, optional
        In the column's own units; 1 if None.
    ratio : bool
        The ratio of the average expected responses instead of their difference.
    kind, at : optional
        Of survival families, what changes instead of the expected time, as `predict` has it: "survival" at a time, or
        "restricted_mean" up to one.
    level : float
    draws : int

    Returns
    -------
    DataFrame
        A row for each contrast; where the response has levels, for each contrast and level.
    """
    study, level = sites.study, probability("level", level, "Give a probability between 0 and 1, such as 0.95.")
    one_of("kind", kind, ("mean", "survival", "restricted_mean"))
    (time,) = check_times(kind, None if at is None else float(at))
    one_of("column", column, _covariates(sites))
    declared = study.columns[column]
    public = public_draws(post, draws).values
    response = study.columns[study.design.response_name]
    total = sum(study.record_weights(records).sum() for records in sites.tables.values())
    rows = {}
    for name, (before, after) in _contrasts(declared, by).items():
        start, end = (_average(sites, public, change, kind, time) / total for change in (before, after))
        values = end / start if ratio else end - start
        if values.ndim == 1:
            rows[name] = values
        else:
            rows |= {f"{name}, P({one})": values[:, k] for k, one in enumerate(response.levels)}
    return described(np.stack(list(rows.values())), level, list(rows))


def _average(sites: Sites, draws: np.ndarray, change: Any, kind: str, at: float) -> np.ndarray:
    """The weighted sum of expected responses over all records after a change, at each draw, as each site computes it."""
    total: Any = 0.0
    for site, records in sites.tables.items():
        outcome = Outcome(sites.study, draws, site)
        for block in outcome.blocks(records):
            expected = outcome.expected(change(block), kind, at)
            total = total + np.tensordot(sites.study.record_weights(block), expected, 1)
    return total


def _contrasts(column: Column, by: float | None) -> Mapping[str, Sequence[Any]]:
    """Changes of a block of records, before and after, by name."""
    name = column.name
    if column.type == "level":
        if by is not None:
            raise InputError("by", repr(by), f"{name!r} has levels: leave it out.")

        def at(level: str):
            levels = list(column.levels)
            return lambda block: block.assign(**{name: pd.Categorical([level] * len(block), categories=levels)})

        first, *others = column.levels
        return {f"{name}: {level} against {first}": (at(first), at(level)) for level in others}
    step = 1.0 if by is None else float(by)
    if column.log:
        remedy = "Effects of a column that enters by its logarithm: give its coefficient."
        raise InputError("column", repr(name), remedy)

    def change(block):
        return block.assign(**{name: block[name] + step / column.scale})

    return {f"{name}: + {step:g}": (lambda block: block, change)}


# Contrasts and ratios --------------------------------------------------------------------------------------------------


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
    drawn = scalars(post.variables(draws_of_each(post, draws)))
    values = {name: jnp.asarray(x.reshape(-1)) for name, x in drawn.items()}
    functions = {name: _function(name, one, list(values)) for name, one in what.items()}
    rows = {}
    for name, f in functions.items():
        drawn = np.asarray(mapped(f)(values), float)
        if drawn.ndim != 1:
            raise InputError(f"what[{name!r}]", f"an array of shape {drawn.shape[1:]}", "Return one number.")
        try:
            mean, square = post.expectation(_moments(f), named=True)
        except InputError as error:
            # A posterior from disk lacks the functions of variables.
            if error.argument not in ("named", "skeleton"):
                raise
            mean, square = drawn.mean(), np.mean(drawn**2)
        sd = np.sqrt(max(square - mean**2, 0.0))
        ends = {name: np.quantile(drawn, p) for name, p in (below, above)}
        rows[name] = {"mean": mean, "sd": sd, **ends, "P(> 0)": np.mean(drawn > 0)}
    return pd.DataFrame(rows).T


def _moments(f: Function) -> Function:
    """F and f² of variables, whose entries are named as `scalars` does."""

    def moments(variables):
        entries = {}
        for name, value in variables.items():
            for index in np.ndindex(jnp.shape(value)):
                entries[f"{name}[{','.join(map(str, index))}]" if index else name] = value[index] if index else value
        value = f(entries)
        return jnp.stack([value, value**2])

    return moments


def _function(name: str, what: Mapping[str, float] | Function, known: list[str]) -> Function:
    if callable(what):
        return what
    stray = sorted(set(what) - set(known))
    if stray:
        raise InputError(f"what[{name!r}]", f"the parameter {stray[0]!r}", f"Give some of {', '.join(known)}.")
    return lambda variables: sum(weight * variables[one] for one, weight in what.items())


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
