"""The figures of a report, as SVG that takes its colours from the page."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

if TYPE_CHECKING:
    from fedpdmc.results.posterior import Posterior

# Ink is replaced by the page's text colour; the accent is legible on light and dark backgrounds.
INK, ACCENT = "#000000", "#2a7ab0"
MOST_DENSITIES, MOST_ROWS, MOST_PATHS, PATH_TIME = 12, 40, 3, 30.0
BINS = 60
# Number of characters of a name that are drawn.
LONGEST_NAME = 30


def as_svg(figure: Figure, title: str) -> str:
    """A figure as an inline element with a title for screen readers."""
    with io.StringIO() as file:
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
        text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r' (width|height)="[\d.]+pt"', "", text, count=2)
    text = text.replace(INK, "currentColor")
    return text.replace("<svg", f'<svg role="img" aria-label="{title}"', 1)


def shortened(name: str) -> str:
    """A name that fits its panel, with its middle left out."""
    half = (LONGEST_NAME - 1) // 2
    return name if len(name) <= LONGEST_NAME else f"{name[:half]}…{name[-half:]}"


def axes_of(figure: Figure, *place: int):
    """Axes without a frame."""
    axes = figure.add_subplot(*place)
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def forest(names: list[str], draws: np.ndarray) -> Figure:
    """Median, 50 % and 90 % intervals of each parameter; draws of shape (n, q)."""
    names, draws = names[:MOST_ROWS], draws[:, :MOST_ROWS]
    figure = Figure(figsize=(7.5, 0.8 + 0.32 * len(names)), layout="constrained")
    axes = axes_of(figure)
    low, lower, middle, upper, high = np.quantile(draws, [0.05, 0.25, 0.5, 0.75, 0.95], axis=0)
    rows = np.arange(len(names))[::-1]
    axes.axvline(0.0, color=INK, linewidth=0.8, linestyle=(0, (4, 3)), alpha=0.5)
    axes.hlines(rows, low, high, color=ACCENT, linewidth=1.6)
    axes.hlines(rows, lower, upper, color=ACCENT, linewidth=5)
    axes.plot(middle, rows, "o", color=INK, markersize=4, zorder=3)
    axes.set_yticks(rows, [shortened(name) for name in names])
    axes.set_ylim(-0.6, len(names) - 0.4)
    axes.set_xlabel("median, 50 % and 90 % intervals")
    axes.tick_params(axis="y", length=0)
    return figure


def densities(names: list[str], draws: np.ndarray) -> Figure:
    """Marginal densities; draws of shape (n, q)."""
    count = min(len(names), MOST_DENSITIES)
    columns = min(count, 3)
    rows = -(-count // columns)
    figure = Figure(figsize=(2.5 * columns, 1.7 * rows), layout="constrained")
    for i in range(count):
        axes = axes_of(figure, rows, columns, i + 1)
        values = draws[:, i]
        inside = values[(values >= np.quantile(values, 0.001)) & (values <= np.quantile(values, 0.999))]
        axes.hist(inside, bins=BINS, density=True, color=ACCENT, alpha=0.75)
        axes.spines["left"].set_visible(False)
        axes.set_yticks([])
        axes.set_title(shortened(names[i]), fontsize=9)
        axes.tick_params(labelsize=8)
        axes.xaxis.set_major_locator(MaxNLocator(3))
        axes.ticklabel_format(axis="x", style="sci", scilimits=(-3, 4))
        axes.xaxis.get_offset_text().set_fontsize(8)
    return figure


def paths(post: Posterior) -> Figure:
    """The beginning of one chain's path: it is continuous, and events change its direction."""
    count = min(len(post.names), MOST_PATHS)
    shown = min(post.duration, PATH_TIME)
    whole = min(post.most_draws, int(np.ceil(20 * post.duration)) + 1)
    draws = post.draws(whole)[0]
    times = np.linspace(0.0, post.duration, whole)
    kept = times <= shown
    figure = Figure(figsize=(7.5, 1.5 * count), layout="constrained")
    for i in range(count):
        axes = axes_of(figure, count, 1, i + 1)
        axes.plot(times[kept], draws[kept, i], color=ACCENT, linewidth=1.0)
        axes.set_title(shortened(post.names[i]), fontsize=9, loc="left")
        axes.tick_params(labelsize=8)
    axes.set_xlabel("process time of one chain (in the coordinates that were sampled)", fontsize=9)
    return figure
