"""Lines over time, as SVG inside a page."""

from __future__ import annotations

import math
from html import escape
from typing import NamedTuple

from fedpdmc.console.screens import clock

WIDTH, HEIGHT = 360, 190
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 10, 22
TICKS = 4


class Series(NamedTuple):
    """A name, and values by seconds; None where there is none yet."""

    name: str
    points: list[tuple[float, float | None]]


def ticks(low: float, high: float) -> list[float]:
    """Round numbers from at most ``low`` to at least ``high``, about `TICKS` of them."""
    if not high > low:
        high = low + (abs(low) or 1.0) * 0.1
    raw = (high - low) / TICKS
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= raw * (1 - 1e-9))
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def _short(value: float) -> str:
    if value and abs(value) >= 1e6:
        return f"{value:.3g}"
    return f"{round(value, 9):,.6g}"


def plot(title: str, series: list[Series]) -> str:
    """A card with a plot, or a note if there is no data yet."""
    known = [(x, y) for one in series for x, y in one.points if y is not None]
    if not known:
        return f'<div class="card"><h3>{escape(title)}</h3><p>No data yet.</p></div>'
    last_x, values = max(x for x, _ in known), [y for _, y in known]
    first_x = min(x for x, _ in known)
    low, high = min(values), max(values)
    marks = ticks(0.0 if 0 <= low <= 0.5 * high or high == low == 0 else low, high)
    span = max(last_x - first_x, 1e-9)

    def place(x: float, y: float) -> tuple[float, float]:
        across, up = (x - first_x) / span, (y - marks[0]) / (marks[-1] - marks[0])
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(_words(title, series))}">']
    for mark in marks:
        _, y = place(first_x, mark)
        parts.append(f'<line class="rule" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_short(mark)}</text>')
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 4}">{clock(first_x)}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">{clock(last_x)}</text>')
    for number, one in enumerate(series):
        parts += [_line(one, number, place)]
    parts.append("</svg>")
    return f'<div class="card"><h3>{escape(title)}</h3>{"".join(parts)}{_key(series)}</div>'


def _line(one: Series, number: int, place) -> str:
    """A path with gaps where there are no values, and a dot at its end."""
    path, pen, end = [], "M", None
    for x, y in one.points:
        if y is None:
            pen = "M"
            continue
        end = place(x, y)
        path.append(f"{pen}{end[0]:.1f} {end[1]:.1f}")
        pen = "L"
    if end is None:
        return ""
    colour = f"var(--s{number % 6})"
    return (
        f'<path class="path" style="stroke:{colour}" d="{" ".join(path)}"/>'
        f'<circle cx="{end[0]:.1f}" cy="{end[1]:.1f}" r="3.5" style="fill:{colour}"/>'
    )


def _last(one: Series) -> str:
    found = [y for _, y in one.points if y is not None]
    return _short(float(f"{found[-1]:.4g}")) if found else "–"


def _words(title: str, series: list[Series]) -> str:
    return f"{title}: " + ", ".join(f"{one.name} {_last(one)}" for one in series)


def _key(series: list[Series]) -> str:
    if len(series) < 2:
        return ""
    keys = (
        f'<span><i style="background:var(--s{number % 6})"></i>{escape(one.name)} {_last(one)}</span>'
        for number, one in enumerate(series)
    )
    return f'<div class="key">{"".join(keys)}</div>'
