"""Effects on the scale of their family, per stated increment: tables, and forest plots with estimates by site."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator, NullLocator
from scipy import stats

from fedpdmc._jax.precision import double_precision
from fedpdmc.errors import InputError
from fedpdmc.models.user_function import StoredVariables, Variables, scalars
from fedpdmc.validation import interval_ends, suggest

if TYPE_CHECKING:
    from fedpdmc.results.posterior import Posterior

DRAWS = 8000  # of a posterior, over all chains
SITE_DRAWS = 4096  # of the Gaussian of one site, a power of two
HAVE = "Posteriors of fedpdmc.sites and of contracts know theirs."


class Effect(NamedTuple):
    """One coefficient on the scale of its family: what is estimated, and draws of shape (S,)."""

    name: str
    label: str
    draws: np.ndarray


@dataclass(frozen=True)
class EffectScale:
    """How the coefficients of a model are read.

    Attributes
    ----------
    kinds : dict
        What a coefficient β is, per increment, the usual kind first: ``exp(β)``, or with the name of a variable k
        ``exp(−k β)``, as the hazard ratio of a Weibull model with shape k is.
    ratio, scale : bool, float
        Whether it is a ratio; otherwise the difference is β times the scale.
    columns : dict
        For each column that is a number its increment ``by`` (None: it is zero or one), whether it enters by its logarithm
        (``log``: then ``by`` is a factor), and the ``scale`` that it was divided by.
    terms : dict
        For each coefficient its ``label``, the ``columns`` multiplied in it, and whether it is left ``aside`` unless it is
        named: the intercept, and columns of a spline or polynomial, which say nothing one by one.
    """

    kinds: dict[str, str | None]
    ratio: bool = True
    scale: float = 1.0
    columns: dict[str, dict[str, Any]] = field(default_factory=dict)
    terms: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, post: Posterior, exp: bool | None = None) -> EffectScale:
        """That of a posterior's model; for a model that is not known all parameters, or their exponentials with ``exp``."""
        known = post.settings.get("effect_scale")
        if known is not None and exp is None:
            return cls(**known)
        terms = {name: {"label": name, "columns": []} for name in scalars(post.variables(2))}
        return cls({"exp(parameter)" if exp else "parameter": None}, bool(exp), terms=terms)

    def kind(self, name: str | None) -> str:
        """The kind that was asked for, or the usual one."""
        if name is not None and name not in self.kinds:
            raise InputError("kind", repr(name), f"{suggest(name, self.kinds)}Give one of {', '.join(self.kinds)}.")
        return next(iter(self.kinds)) if name is None else name

    def increments(self, wanted: Mapping[str, float] | None) -> dict[str, float | None]:
        """The increment of every column; None for one unit of a column of zeros and ones."""
        stray = sorted(set(wanted or {}) - set(self.columns))
        if stray:
            known = ", ".join(self.columns) or "none: no column of the model is a number"
            raise InputError("increments", repr(stray[0]), f"Columns that are numbers: {known}.")
        for name, by in (wanted or {}).items():
            if not np.isfinite(by) or by == 0 or (self.columns[name]["log"] and by <= 1):
                need = "a number other than zero; of a column that enters by its logarithm a factor above 1"
                raise InputError(f"increments[{name!r}]", repr(by), f"Give {need}.")
        return {name: one["by"] for name, one in self.columns.items()} | dict(wanted or {})

    def effects(
        self,
        values: Mapping[str, np.ndarray],
        increments: Mapping[str, float] | None = None,
        kind: str | None = None,
        names: Sequence[str] | None = None,
    ) -> list[Effect]:
        """The effects, from draws of the variables by name, each of shape (S,)."""
        steps, kind, found = self.increments(increments), self.kind(kind), []
        known = [name for name in self.terms if name in values]
        usual = [name for name in known if not self.terms[name].get("aside")] or known
        for name in usual if names is None else names:
            if name not in known:
                raise InputError("names", repr(name), f"{suggest(name, known)}Give some of {', '.join(known)}.")
            step, words = self.scale, []
            for one in self.terms[name]["columns"]:
                column, by = self.columns[one], steps[one]
                step *= (1.0 if by is None else np.log(by) if column["log"] else by) / column["scale"]
                words += [] if by is None else [f"{'×' if column['log'] else '+'} {by:g}"]
            drawn = step * np.asarray(values[name])
            if self.kinds[kind] is not None:
                drawn = -np.asarray(values[str(self.kinds[kind])]) * drawn
            label = self.terms[name]["label"] + (f" ({', '.join(words)})" if words else "")
            # A ratio that overflows is infinite, and its ends say so.
            with np.errstate(over="ignore"):
                found.append(Effect(name, label, np.exp(drawn) if self.ratio else drawn))
        return found


def draws_of(post: Posterior, draws: int = DRAWS) -> dict[str, np.ndarray]:
    """Draws of a posterior's variables by name, each of shape (S,)."""
    each = min(max(-(-draws // post.chains), 2), post.most_draws)
    return {name: value.reshape(-1) for name, value in scalars(post.variables(each)).items()}


def ratios(
    post: Posterior, scale: EffectScale, increments: Any, level: float, kind: str | None, draws: int = DRAWS
) -> pd.DataFrame:
    """The table of `Posterior.ratios`."""
    if not scale.ratio:
        raise InputError(
            "ratios", f"the scale {scale.kind(None)!r}", f"They are of families with a log or logit. {HAVE}"
        )
    ends = interval_ends("level", level)
    rows = {
        one.label: {"median": np.median(one.draws)}
        | {name: np.quantile(one.draws, p) for name, p in ends.items()}
        | {"P(> 1)": np.mean(one.draws > 1)}
        for one in scale.effects(draws_of(post, draws), increments, kind)
    }
    return pd.DataFrame(rows).T.rename_axis(index=scale.kind(kind))


def each_site(post: Posterior, sites: Any = None, naming: Any = None) -> tuple[dict[str, Any], str]:
    """Draws of the variables by each site's own records, None for a site without an estimate; and how they were made.

    For sites in this process a Gaussian at the mode of the site's own likelihood and the prior, NaN for parameters of
    which the site knows nothing. For sites on a network, and for a posterior from disk, one Newton step from the centre of
    the run's reference, by the gradient and Hessian that each site has released there; ``naming`` is the contract's.
    """
    found = None if post.run is None else post.run.each_site(sites)
    how = "each site: normal approximation at the mode of its own likelihood and the prior"
    if found is None:
        how = "each site: one Newton step from the released derivatives, without the prior"
        found = _site_gaussians(post)
        if sites is None and naming is None and isinstance(post.named, StoredVariables):
            raise InputError("sites", "None, of a posterior from disk", "Give sites=, as they were given to sample().")
    named: Any = post.named_by(sites)
    if naming is not None and naming.constrain is not None:
        named = Variables([(np.arange(len(post.names)), naming.constrain)], {})
    out: dict[str, Any] = dict.fromkeys(found)
    for name, gaussian in ((name, one) for name, one in found.items() if one is not None):
        x = stats.qmc.MultivariateNormalQMC(*gaussian, rng=np.random.default_rng(0)).random(SITE_DRAWS)
        out[name] = {key: value.reshape(-1) for key, value in scalars(named.of(np.asarray(x)[None])).items()}
    return out, how


@double_precision
def _site_gaussians(post: Posterior) -> dict[str, tuple[np.ndarray, np.ndarray] | None]:
    names = set(post.settings["sites"]) - {post.settings.get("prior_site")}
    control = {name: one for name, one in (post.reference.control or {}).items() if name in names}
    if (
        post.privacy
        or not control
        or any(one.order != 2 or len(one.point) != len(post.names) for one in control.values())
    ):
        raise InputError(
            "by",
            "'site' where sites have not released derivatives of their own",
            "A contract with derivatives = 'own' has them; in one process the sites of the run are asked.",
        )
    found: dict[str, tuple[np.ndarray, np.ndarray] | None] = {}
    for name, one in control.items():
        hessian = np.asarray(one.quadratic.precision) / one.kept
        size, axes = np.linalg.eigh((hessian + hessian.T) / 2)
        if size.min() <= 1e-9 * max(size.max(), 1e-300):
            found[name] = None
            continue
        cov = (axes / size) @ axes.T
        found[name] = np.asarray(one.point) - cov @ np.asarray(one.gradient), cov
    return found


INK = "#000000"  # a report replaces it by the page's text colour
ACCENT = "#2a7ab0"  # legible on light and dark backgrounds
MOST_ROWS = 40
WIDTH = 7.0  # inches
ROW = 0.3  # inches, the height of a row
FRAME = 1.1  # inches above and below the rows
REACH = 5.0  # median half-widths beyond the outermost medians at which intervals are cut, with an arrow
LARGEST = 11.0  # points, the side of the largest square
SMALLEST = 3.0  # points, that of the smallest
LONGEST_NAME = 34


class Row(NamedTuple):
    """One line: the ends of its interval, the median, and its weight in percent if it is one site's."""

    label: str
    low: float
    middle: float
    high: float
    weight: float | None = None
    diamond: bool = False


def shorten(name: str, longest: int = LONGEST_NAME) -> str:
    """A name that fits its panel, with its middle left out."""
    half = (longest - 1) // 2
    return name if len(name) <= longest else f"{name[:half]}…{name[-half:]}"


def plot_forest(
    post: Posterior, names: Sequence[str] | None, by: str | None, increments: Mapping[str, float] | None, level: float,
    kind: str | None, exp: bool | None, sites: Any,
):  # fmt: skip
    """What `Posterior.plot_forest` draws, on a figure that notebooks show."""
    from matplotlib import pyplot

    if by not in (None, "site"):
        raise InputError("by", repr(by), "Give None or 'site'.")
    scale = EffectScale.of(post, exp)
    effects = scale.effects(draws_of(post), increments, kind, names)
    panels, how = [(None, [row_of(one.label, one.draws, level) for one in effects])], ""
    if by is not None:
        panels, how = site_panels(post, scale, effects, increments, kind, level, sites)
    return forest(pyplot.figure(layout="constrained"), panels, scale, kind, level, how)


def row_of(label: str, draws: np.ndarray, level: float, **more: Any) -> Row:
    """The median of draws and the interval with equal tails."""
    low, middle, high = np.quantile(draws, sorted([0.5, *interval_ends("level", level).values()]))
    return Row(label, low, middle, high, **more)


def site_panels(
    post: Posterior, scale: EffectScale, effects: Sequence[Effect], increments: Any, kind: Any, level: float, sites: Any,
    naming: Any = None,
) -> tuple[list[tuple[str | None, list[Row]]], str]:  # fmt: skip
    """A panel for each effect, with a row for each site and the posterior as a diamond; and how the rows were made."""
    (estimates, how), names, panels = each_site(post, sites, naming), [one.name for one in effects], []
    alone = {s: scale.effects(x, increments, kind, names) for s, x in estimates.items() if x is not None}
    for i, pooled in enumerate(effects):
        drawn = {site: found[i].draws for site, found in alone.items() if np.isfinite(found[i].draws).all()}
        if nothing := sorted(set(alone) - set(drawn)):
            how += f"; {', '.join(nothing)}: nothing about {pooled.label}"
        # Inverse variances, on the scale on which estimates are nearly normal.
        precision = {s: 1 / max(np.var(np.log(x) if scale.ratio else x), 1e-300) for s, x in drawn.items()}
        rows = [row_of(s, x, level, weight=100 * precision[s] / sum(precision.values())) for s, x in drawn.items()]
        panels.append((pooled.label, [*rows, row_of("all sites", pooled.draws, level, diamond=True)]))
    missing = ", ".join(sorted(set(estimates) - set(alone)))
    return panels, how + (f"; none for {missing}" if missing else "")


def forest(
    figure: Figure,
    panels: Sequence[tuple[str | None, Sequence[Row]]],
    scale: EffectScale,
    kind: str | None,
    level: float,
    how: str = "",
    width: float = WIDTH,
) -> np.ndarray:
    """Draw the panels below each other: names at the left, intervals, figures at the right."""
    panels = [(title, rows if rows and rows[-1].diamond else rows[:MOST_ROWS]) for title, rows in panels]
    heights = [FRAME + ROW * len(rows) for _, rows in panels]
    figure.set_size_inches(width, sum(heights))
    grid = figure.add_gridspec(len(panels), 1, height_ratios=heights)
    found = []
    for i, (title, rows) in enumerate(panels):
        axes = figure.add_subplot(grid[i])
        _panel(axes, rows, scale.ratio)
        if title is not None:
            axes.set_title(shorten(title, 60), loc="left", fontsize=10, fontweight="bold", pad=15)
        weights = any(row.weight is not None for row in rows)
        words = f"median, {100 * level:g} %" + ("   weight" if weights else "")
        axes.annotate(
            words, (1.02, 1.0), xycoords="axes fraction", fontsize=8, va="bottom", annotation_clip=False, color=INK
        )
        axes.set_xlabel(scale.kind(kind) + (f"\n{how}" if how and i == len(panels) - 1 else ""), fontsize=9)
        found.append(axes)
    return np.asarray(found)


def _panel(axes: Any, rows: Sequence[Row], ratio: bool) -> None:
    axes.spines[["top", "right", "left"]].set_visible(False)
    if ratio:
        axes.set_xscale("log")
    low, high = _limits(rows, ratio)
    axes.set_xlim(low, high)
    null = float(ratio)
    if low <= null <= high:
        axes.axvline(null, color=INK, linewidth=0.9, linestyle=(0, (4, 3)), alpha=0.6, zorder=1)
    if rows and rows[-1].diamond:
        axes.axvline(rows[-1].middle, color=ACCENT, linewidth=0.9, linestyle=(0, (1, 2)), zorder=1)
    for y, row in zip(range(len(rows) - 1, -1, -1), rows, strict=True):
        _draw(axes, y, row, low, high)
        weight = "" if row.weight is None else f"   {row.weight:.0f} %"
        middle, least, most = numbers(row.low, row.middle, row.high, ratio)
        axes.annotate(
            f"{middle} ({least} to {most}){weight}", (1.02, y),
            xycoords=("axes fraction", "data"), va="center", fontsize=9, annotation_clip=False, color=INK,
        )  # fmt: skip
    labels = axes.set_yticks(range(len(rows) - 1, -1, -1), [shorten(row.label) for row in rows], fontsize=9.5)
    for tick, row in zip(labels, rows, strict=True):
        tick.label1.set_fontweight("bold" if row.diamond else "normal")
    axes.set_ylim(-0.7, len(rows) - 0.3)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8.5)
    axes.xaxis.set_major_locator(FixedLocator(_ticks(low, high, ratio)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}" if abs(x) > 1e-12 else "0")


def _draw(axes: Any, y: int, row: Row, low: float, high: float) -> None:
    """A diamond for all sites, a square for one, a dot for an effect; an arrow where the interval is cut."""
    left, right = max(row.low, low), min(row.high, high)
    if row.diamond:
        axes.fill([left, row.middle, right, row.middle], [y, y + 0.28, y, y - 0.28], color=ACCENT, zorder=3)
        return
    axes.plot([left, right], [y, y], color=ACCENT, linewidth=1.6, zorder=2)
    for cut, end, mark in ((row.low < low, left, "<"), (row.high > high, right, ">")):
        if cut:
            axes.plot(end, y, mark, color=ACCENT, markersize=6, clip_on=False, zorder=3)
    side = 5.5 if row.weight is None else max(LARGEST * np.sqrt(row.weight / 100), SMALLEST)
    if low <= row.middle <= high:
        axes.plot(row.middle, y, "o" if row.weight is None else "s", color=INK, markersize=side, zorder=3)


def _limits(rows: Sequence[Row], ratio: bool) -> tuple[float, float]:
    """Where the axis ends: at the outermost interval, or `REACH` half-widths beyond the medians if that is nearer."""
    ends = np.asarray([(row.low, row.middle, row.high) for row in rows])
    with np.errstate(divide="ignore"):
        low, middle, high = (np.log(ends) if ratio else ends).T
    reach = REACH * float(np.median(high - low)) / 2
    least, most = max(low.min(), middle.min() - reach), min(high.max(), middle.max() + reach)
    # The line of no effect, at zero here, is shown if it is near.
    if 2 * least - most < 0.0 < 2 * most - least:
        least, most = min(least, 0.0), max(most, 0.0)
    margin = 0.04 * max(most - least, 1e-9 * max(abs(most), 1.0))
    found = np.asarray([least - margin, most + margin])
    return tuple(np.exp(found) if ratio else found)


def _ticks(low: float, high: float, ratio: bool) -> list[float]:
    """About five round numbers."""
    if not ratio or high / low < 2.5:
        found = MaxNLocator(5).tick_values(low, high)
    else:
        steps = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0) if high / low < 8 else (1.0, 2.0, 5.0) if high / low < 200 else (1.0,)
        found = LogLocator(subs=steps).tick_values(low, high)
    inside = [float(x) for x in found if low <= x <= high]
    return inside[:: -(-len(inside) // 8)] if len(inside) > 8 else inside


def numbers(low: float, middle: float, high: float, ratio: bool) -> list[str]:
    """An estimate and its interval, with decimals for two digits of the width; of ratios at least 0.012, 1.23, 12.3."""
    size = high - low
    width = 1 - np.floor(np.log10(size)) if 0 < size < np.inf else 2.0
    found = []
    for x in (middle, low, high):
        tens = np.floor(np.log10(float(f"{x:.1e}"))) if ratio and 0 < x < np.inf else 0.0
        places = int(np.clip(max(width, 2 - tens - (tens < 0)) if ratio else width, 0, 4))
        found.append(f"{x:,.{places}f}" if abs(x) < 1e6 and tens >= -4 else f"{x:.2g}")
    return found
