"""Candidates on a piece of path on which the rates of all sites are polynomials of time with proved errors.

The Bernstein coefficients of ``P_m + E_m`` on J equal cells bound the rate of site m there. Their positive parts, added over
the sites, are the rate of one stream of candidates; a candidate belongs to site m with probability proportional to its
bound, and its threshold is uniform below that bound: Poisson thinning of the superposed clocks. It is accepted below
``P_m − E_m`` and rejected at or above ``P_m + E_m``. In between the records decide, in 64 bits. A piece may end
at any candidate that was rejected, because thinning has no memory.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fedpdmc._jax.random_streams import exponentials
from fedpdmc.potentials.chebyshev import interpolant, to_bernstein
from fedpdmc.potentials.dense_rates import Curves

# Cells of a piece, candidates that are examined on a piece, and uniforms for each of them.
CELLS, CANDIDATES, DRAWN = 6, 3, 3


class Found(NamedTuple):
    """Where each chain's piece ends.

    Attributes
    ----------
    time : (C,)
        At the candidate that the piece ends with, or its length.
    hit : (C,)
        Whether the candidate was accepted or is to be decided by the records.
    cut : (C,)
        Whether the piece ends before its length at a candidate that was rejected.
    site : (C,)
        The site whose candidate it is.
    ceiling, threshold, least, most : (C,)
        The bound at the candidate, the level that the rate must exceed, and the squeeze of the rate.
    """

    time: Float[Array, " C"]
    hit: Bool[Array, " C"]
    cut: Bool[Array, " C"]
    site: Int[Array, " C"]
    ceiling: Float[Array, " C"]
    threshold: Float[Array, " C"]
    least: Float[Array, " C"]
    most: Float[Array, " C"]


class Cells(NamedTuple):
    """The bounds of all sites on the cells of a piece.

    Attributes
    ----------
    curves : Curves
    bounds : (J, M, C)
        Zero or positive.
    integral : (J, C)
        Of all sites together, up to the end of each cell.
    width : (C,)
    """

    curves: Curves
    bounds: Float[Array, "J M C"]
    integral: Float[Array, "J C"]
    width: Float[Array, " C"]


def cells_of(curves: Curves, length: Float[Array, " C"]) -> Cells:
    """The bounds from the curves of a piece."""
    sites, nodes, chains = curves.values.shape
    values = jnp.swapaxes(curves.values, 0, 1).reshape(nodes, -1)
    bernstein = (jnp.asarray(to_bernstein(nodes, CELLS).reshape(-1, nodes)) @ values).reshape(
        CELLS, nodes, sites, chains
    )
    bounds = jnp.maximum(jnp.max(bernstein, 1) + curves.error, 0.0)
    width = length / CELLS
    return Cells(curves, bounds, jnp.cumsum(jnp.sum(bounds, 1) * width, 0), width)


def first_candidate(cells: Cells, length: Float[Array, " C"], u: Float[Array, "n C"]) -> Found:
    """The first candidate that the curves do not reject, of the first few; ``u``: ``CANDIDATES * DRAWN`` uniforms."""
    none = jnp.zeros(length.shape, bool)
    zero = jnp.zeros_like(length)
    found = Found(length, none, none, jnp.zeros(length.shape, int), zero, zero, zero, zero)
    active, level = ~none, zero
    for k in range(CANDIDATES):
        chance = u[k * DRAWN : (k + 1) * DRAWN]
        level = level + exponentials(chance[0])
        here, over = _candidate(cells, level, chance)
        undecided = active & ~over & ~(here.threshold >= here.most)
        found = Found(*(jnp.where(undecided, new, old) for new, old in zip(here, found, strict=True)))
        active = active & ~over & ~undecided
    return found._replace(time=jnp.where(active, here.time, found.time), cut=active)


def _candidate(cells: Cells, level: Float[Array, " C"], chance: Float[Array, "n C"]) -> tuple[Found, Bool[Array, " C"]]:
    """The candidate where the integral of the bounds is ``level``, and whether the piece ends before."""
    bounds, width = cells.bounds, cells.width
    passed = jnp.sum(cells.integral <= level, 0)
    over, cell = passed >= CELLS, jnp.minimum(passed, CELLS - 1)
    here, before = bounds[0], jnp.zeros_like(level)
    for j in range(1, CELLS):
        here = jnp.where(cell == j, bounds[j], here)
        before = jnp.where(cell == j, cells.integral[j - 1], before)
    total = jnp.sum(here, 0)
    time = cell * width + jnp.minimum((level - before) / jnp.where(total > 0, total, 1.0), width)
    site, ceiling, values, error = _owner(cells.curves, here, chance[1] * total)
    rate = interpolant(values, time / (CELLS * width))
    hit = jnp.ones_like(over)
    return Found(time, hit, ~hit, site, ceiling, chance[2] * ceiling, rate - error, rate + error), over


def _owner(curves: Curves, bounds: Float[Array, "M C"], level: Float[Array, " C"]):
    """The site to which a candidate belongs, its bound, the values of its curve and their error."""
    sites = bounds.shape[0]
    if sites == 1:
        return jnp.zeros(level.shape, int), bounds[0], curves.values[0], curves.error[0]
    site = jnp.minimum(jnp.sum(jnp.cumsum(bounds, 0) <= level, 0), sites - 1)
    ceiling, error = (jnp.take_along_axis(x, site[None], 0)[0] for x in (bounds, curves.error))
    return site, ceiling, jnp.take_along_axis(curves.values, site[None, None], 0)[0], error
