"""The largest value of a function on a box, certified from above: branch and bound on enclosures.

Boxes are split until their upper bounds are within a relative tolerance of the largest value found. The result is the
largest bound over all boxes, so it is valid whenever the search stops; a longer search only makes it sharper.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

# Number of boxes that are bounded in one call.
BATCH = 256
# Relative tolerance between the result and the largest value found, and the maximum number of boxes.
SHARE, MOST_BOXES = 0.02, 1 << 16
# Number of boxes after which the search gives up if the bound is still infinite.
PATIENCE = 1 << 12

Boxes = np.ndarray


def supremum(
    upper: Callable[[Boxes, Boxes], np.ndarray],
    value: Callable[[Boxes], np.ndarray],
    low: Boxes,
    high: Boxes,
    most: int = MOST_BOXES,
) -> float:
    """An upper bound on ``value`` over the union of boxes; infinite if none is found.

    Parameters
    ----------
    upper : callable
        Maps corners of shape (`BATCH`, n) to bounds on the values in the boxes between them, of shape (`BATCH`,).
    value : callable
        Maps points of shape (`BATCH`, n) to values.
    low, high : arrays of shape (k, n)
        Corners of the boxes.
    most : int
        Maximum number of boxes.
    """
    width = np.maximum((high - low).max(0), 1e-300)
    bounds, found = _bounded(upper, value, low, high)
    settled, seen = 0.0, len(low)
    while len(low):
        open_ = ~(bounds <= found * (1 + SHARE))
        settled = max(settled, float(np.max(bounds[~open_], initial=0.0)))
        low, high, bounds = low[open_], high[open_], bounds[open_]
        if not len(low) or seen >= (most if np.isfinite(bounds).all() else min(most, PATIENCE)):
            break
        order = np.argsort(-bounds, kind="stable")
        first, rest = order[: BATCH // 2], order[BATCH // 2 :]
        left, right = _halves(low[first], high[first], width)
        new_low, new_high = np.concatenate([left[0], right[0]]), np.concatenate([left[1], right[1]])
        tighter, more = _bounded(upper, value, new_low, new_high)
        tighter = np.minimum(tighter, np.tile(bounds[first], 2))
        low, high = np.concatenate([low[rest], new_low]), np.concatenate([high[rest], new_high])
        bounds, found, seen = np.concatenate([bounds[rest], tighter]), max(found, more), seen + len(new_low)
    return max(settled, float(np.max(bounds, initial=0.0)))


def _halves(low: Boxes, high: Boxes, width: np.ndarray) -> tuple[tuple[Boxes, Boxes], tuple[Boxes, Boxes]]:
    """The two halves of each box, split along the side that is longest relative to the whole."""
    side = np.argmax((high - low) / width, 1)
    rows = np.arange(len(low))
    middle = 0.5 * (low[rows, side] + high[rows, side])
    below, above = high.copy(), low.copy()
    below[rows, side] = above[rows, side] = middle
    return (low, below), (above, high)


def _bounded(upper, value, low: Boxes, high: Boxes) -> tuple[np.ndarray, float]:
    """An upper bound for each box, infinite if there is none, and the largest value at their midpoints."""
    bounds, found = np.empty(len(low)), 0.0
    for at in range(0, len(low), BATCH):
        here = np.minimum(np.arange(at, at + BATCH), len(low) - 1)
        bounds[here] = np.asarray(upper(low[here], high[here]))
        points = np.asarray(value(0.5 * (low[here] + high[here])))
        found = max(found, float(np.max(points[np.isfinite(points)], initial=0.0)))
    return np.where(np.isnan(bounds), np.inf, bounds), found
