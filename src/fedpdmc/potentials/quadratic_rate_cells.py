"""Cells of a path on which the rates of a program lie below parabolas, by series with a proved remainder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fedpdmc.enclosures import Cell, Series, enclose, span
from fedpdmc.potentials.affine_rate_cells import LONGEST, speed
from fedpdmc.potentials.base import RateBound

# Rounding error of positions and velocities along a plan, relative to the largest entry.
POSITION_SLACK = 1e-13
# A cell is tried again if it was too long or too short by this factor, at most ATTEMPTS times; a first guess is somewhat too
# long, because thinning can stop before its end.
ATTEMPTS, MISJUDGED, STRIDE, EAGER = 16, 8.0, 64.0, 1.2
# Relative room for the rounding of the curve itself.
ROOM = 1 + 1e-9
# The smallest curvature that is used, and the lengths that are tried.
LEAST, LADDER = 1e-9, 2.0 ** np.arange(0, -8, -1)


def path(rotating: bool, a: Float[Array, " d"], v: Float[Array, " d"]) -> tuple[Series, Series]:
    """Position and velocity along a line or a rotation, exact but for their rounding."""
    here = jnp.full(a.shape, POSITION_SLACK * (1 + jnp.max(jnp.abs(a), initial=0.0)))
    there = jnp.full(v.shape, POSITION_SLACK * jnp.max(jnp.abs(v), initial=0.0))
    if rotating:
        both = here + there
        return Series(a, both, v, -a), Series(v, both, -a, -v)
    return Series(a, here, v), Series(v, there)


def reflection_rate(rate: Callable, a, v, length) -> Series:
    """A signed rate of reflections on a rotation, as a series on a cell with bounds from both sides."""
    return series_rates(rate, True, a, v, length)


def series_rates(program, rotating: bool, a, v, length) -> Series:
    """The signed rates as series on a cell."""
    cell = Cell(length, rotating)
    return _flattened(cell, enclose(program, cell)(*path(rotating, a, v)))


def _flattened(cell: Cell, found: Any) -> Series:
    """The series with ``σ`` and ``κ`` written in powers of s, and zeros for absent parts."""
    if not isinstance(found, Series):
        found = Series(*_ends(span(cell, found)))
    zero = jnp.zeros(found.shape, found.dtype)
    slope = zero if found.slope is None else found.slope
    turn = zero if found.turn is None else found.turn
    low, high = (zero, zero) if found.low is None else (found.low, found.high)
    if cell.rotating:
        # slope sin s ∈ slope s + slope s² [−h/6, 0], and turn κ ∈ turn s² [least, ½].
        bend = -slope * cell.length / 6
        low, high = low + jnp.minimum(bend, 0.0), high + jnp.maximum(bend, 0.0)
        one, other = cell.least_turn * turn, 0.5 * turn
        low, high = low + jnp.minimum(one, other), high + jnp.maximum(one, other)
    return Series(found.value, found.error, slope, None, low, high)


def _ends(interval):
    middle = 0.5 * (interval.lo + interval.hi)
    return middle, jnp.maximum(interval.hi - middle, middle - interval.lo)


def best_cell(program, rotating: bool, a, v):
    """At a point: the length with the least ``1/h + ¼ k(h) h²`` among some, the rounding of the rates and their size."""

    # One loop, so that the program is enclosed once: a cell of length zero shows which lengths to try.
    def tried(longest, rung):
        h = longest * rung
        found = series_rates(program, rotating, a, v, h)
        bend, _, bound = _judged(found, h)
        first = jnp.minimum(2 * jnp.cbrt(2 / jnp.maximum(bend, LEAST)), LONGEST if rotating else jnp.inf)
        work = jnp.nan_to_num(1 / h + jnp.sum(bound.curve) * h * h / 4 + jnp.sum(found.error), nan=jnp.inf)
        largest = jnp.max(found.error), jnp.max(jnp.abs(found.value))
        return jnp.where(rung == 0, first, longest), (h, work, *largest)

    _, (lengths, works, errors, rates) = jax.lax.scan(tried, jnp.ones(()), jnp.asarray([0.0, *LADDER]))
    return lengths[1:][jnp.argmin(works[1:])], errors[0], rates[0]


def attempt(program, rotating: bool, a, v, h) -> tuple[Float[Array, ""], Float[Array, ""], RateBound]:
    """`_judged` of a cell of this length."""
    return _judged(series_rates(program, rotating, a, v, h), h)


def _judged(found: Series, h) -> tuple[Float[Array, ""], Float[Array, ""], RateBound]:
    """How much the rates bend, up or down (NaN if not finite), candidates that their error adds, and their bound."""
    bend = 2 * jnp.sum(jnp.maximum(jnp.abs(found.low), jnp.abs(found.high)))
    bend = bend + 0.0 * jnp.sum(found.value + found.error + found.slope)
    curve = 2 * jnp.maximum(found.high, 0.0) * ROOM
    return bend, h * jnp.sum(found.error), RateBound(found.value + found.error, found.slope, curve, h)


def fitted_cell(program, rotating: bool, usual, a, v) -> RateBound:
    """Bound the rates on a cell whose length is found by trial: first the usual length, then a corrected one if needed.

    With ``k`` the sum of the curvatures, ``1/h + ¼ k h²`` is least at ``h = (2/k)^{1/3}``; k counts curvature of both signs,
    so that a cell on which all rates are concave does not suggest a longer one. Where the error alone, of comparisons that
    are not decided, adds more than one candidate the cell is too long. The length depends on the anchor alone.
    """
    longest = jnp.asarray(LONGEST if rotating else jnp.inf)

    def factor(state):
        """The factor for the cell's length; after one without a finite bound only shorter ones are tried."""
        _, limit, bend, added, bound = state
        length = jnp.minimum(EAGER * jnp.cbrt(2 / jnp.maximum(bend, 1e-300)), limit)
        ratio = jnp.where(bend == 0, 1.0, jnp.clip(length / bound.reach, 1 / STRIDE, STRIDE))
        ratio = jnp.minimum(ratio, jnp.maximum(1 / jnp.maximum(added, 1.0), 1 / STRIDE))
        return jnp.where(jnp.isfinite(bend), ratio, 1 / STRIDE)

    def misjudged(state):
        ratio = factor(state)
        return (state[0] == 0) | (state[0] < ATTEMPTS) & ((ratio < 1 / MISJUDGED) | (ratio > MISJUDGED))

    def again(state):
        count, limit, bend, added, bound = state
        fine = jnp.isfinite(bend) & (added <= MISJUDGED)
        limit = jnp.where(fine, limit, jnp.minimum(limit, bound.reach / jnp.where(jnp.isfinite(bend), 2.0, STRIDE)))
        length = jnp.where(count == 0, bound.reach, bound.reach * factor(state))
        return count + 1, limit, *attempt(program, rotating, a, v, length)

    # The first trial is part of the loop, so that the program is enclosed in one place only.
    first = jnp.minimum(EAGER * usual / speed(rotating, a, v), longest)
    rates = jnp.zeros(jax.eval_shape(program, a, v).shape)
    start = (jnp.asarray(0), longest, jnp.zeros(()), jnp.zeros(()), RateBound(rates, rates, rates, first))
    return jax.lax.while_loop(misjudged, again, start)[-1]
