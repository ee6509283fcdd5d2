"""Survival curves of a model over Kaplan-Meier estimates, and average effects of a column over the records at the sites."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from fedpdmc.assessment.at_site import DRAWS, public_draws
from fedpdmc.assessment.predict import check_times, described, predict
from fedpdmc.assessment.site_survival import CURVE_DRAWS, average_survival, kaplan_meier, time_grid, times_and_events
from fedpdmc.console.interrupts import check, deferred
from fedpdmc.errors import InputError
from fedpdmc.study.study_response import Outcome
from fedpdmc.validation import LEVEL, one_of, probability

if TYPE_CHECKING:
    from fedpdmc.results.posterior import Posterior
    from fedpdmc.study.schema import Column
    from fedpdmc.study.sites_from_table import Sites

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
    times = check_times("survival", time_grid(*_observed(sites, sites.tables), SMOOTH) if at is None else at)
    for name, tables in _groups(sites, by):
        time, died = _observed(sites, tables)
        total: Any = 0.0
        for site, records in tables.items():
            outcome = Outcome(sites.study, public, site)
            total = total + len(records) * average_survival(outcome, records, times, lambda share: check())
        curve = described((total / len(time)).T, level, pd.Index(times, name="time"))
        parts[name] = curve.assign(kaplan_meier=kaplan_meier(time, died).at(times))
    return pd.concat(parts, names=["all" if by is None else by])


def _observed(sites: Sites, tables: dict[str, pd.DataFrame]) -> tuple[np.ndarray, np.ndarray]:
    """Times and events of some records of all sites."""
    pairs = [times_and_events(Outcome(sites.study, np.zeros((1, len(sites.names))), s), t) for s, t in tables.items()]
    time, died = (np.concatenate(one) for one in zip(*pairs, strict=True))
    return time, died


def _groups(sites: Sites, by: str | None) -> Iterator[tuple[str, dict[str, pd.DataFrame]]]:
    """Records of each curve by site, in the order of the levels."""
    if by is None or by == "site":
        yield from [("all", sites.tables)] if by is None else ((name, {name: t}) for name, t in sites.tables.items())
        return
    if by not in sites.study.design.used - {sites.study.design.response_name}:
        known = ", ".join(["site", *sorted(sites.study.design.used - {sites.study.design.response_name})])
        raise InputError("by", repr(by), f"Give one of {known}.")
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
    time, died = _observed(sites, sites.tables)
    if new is None:
        table, groups = survival_curves(post, sites, by=by, at=at, level=level, draws=draws), dict(_groups(sites, by))
        models = {str(name): part.droplevel(0) for name, part in table.groupby(level=0, sort=False)}
        observed = {name: _observed(sites, tables) for name, tables in groups.items()}
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
    if column not in study.design.used or column == study.design.response_name:
        known = ", ".join(sorted(study.design.used - {study.design.response_name}))
        raise InputError("column", repr(column), f"Give one of {known}.")
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
        raise InputError(
            "column", repr(name), "Effects of a column that enters by its logarithm: give its coefficient."
        )
    return {
        f"{name}: + {step:g}": (
            lambda block: block,
            lambda block: block.assign(**{name: block[name] + step / column.scale}),
        )
    }
