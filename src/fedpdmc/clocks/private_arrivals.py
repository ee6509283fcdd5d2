"""The arrivals of a private site: proposals are drawn without the records, and the first one below the site's rates arrives.

Take a Poisson process of unit intensity in the plane of time and level, one for each coordinate. Its points below the curve
``λ_i`` are a Poisson process of rate ``λ_i``. The points are drawn from a secret key and public facts alone; the records
only decide which of them lie below the curve. So a time depends on the records only through *which* point it is.

*Grid.* Times are first rounded up to ``j h``, ``h = 2⁻ᵏ``, and rates are evaluated there. Given the records, the numbers of
points below the rates in the cells of the grid are independent Poisson numbers of mean ``h λ_i(jh)``. The released time is
therefore the first point, rounded up, of a Poisson process whose rates are constant on cells. The privacy account holds for
that process in real arithmetic, whatever the computed rates are, provided they differ between neighbours by at most K.

*Layers.* Levels are cut into the layers ``[0, b), [b, 2b), [2b, 4b), …``, and the layer with width ``b 2ˡ⁻¹`` into tiles of
length ``Δ 2¹⁻ˡ``: every tile has ``μ = d b Δ`` points on average, whose number, places, coordinates and levels follow from
a few blocks of ChaCha20. A walk evaluates only the tiles below a certified bound of its rates. Which tiles these are, and
hence the running time, depends on the records; the result does not depend on which tiles were evaluated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from decimal import Decimal, localcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from fedpdmc._jax.random_streams import CHACHA_WORDS, ChainKeys, chacha20
from fedpdmc.clocks.base import FINE, NOT_FINITE, VIOLATED, Path, pick
from fedpdmc.clocks.envelopes import RateBound, evaluate
from fedpdmc.dynamics import Dynamics
from fedpdmc.potentials import Potential

# Bits of a released time, and of the order among points of one cell of the grid.
BITS, FINER = 31, 32
# The longest and the shortest tile of the lowest layers, as exponents of two.
LONGEST_TILE, SHORTEST_TILE = -2, -10
# Coordinates slower than this do not flip: levels are multiples of 2⁻⁵⁵ or finer, which is small compared with the effect
# of one record at this speed.
SLOWEST = 2.0**-20
# Maximum number of points in a tile: with a mean of at most ½, more have a probability below 2⁻⁶⁴.
MOST_POINTS = 16
# Blocks of ChaCha20 for a tile: one word of 64 bits for the number, three for each point.
BLOCKS = 7
# The fault of a walk that has used up its passes.
TOO_LONG = 3


class Grid(NamedTuple):
    """The public grid of each chain's plan, a function of its horizon alone.

    Attributes
    ----------
    unit : (C,)
        ``h``: a power of two, at least 2⁻⁴¹, such that the horizon is less than ``2³¹ h``.
    bits : (C,)
        Binary logarithm of the number of cells in a tile of the lowest layers.
    base : (C,)
        ``b``, the height of the lowest layer.
    """

    unit: Any
    bits: Any
    base: Any


def time_grid(horizon: Float[np.ndarray, " C"], dim: int) -> Grid:
    """The grid of plans of these lengths in ``dim`` coordinates."""
    power = np.maximum(np.frexp(np.asarray(horizon, dtype=np.float64))[1], SHORTEST_TILE)
    tile = np.minimum(power, LONGEST_TILE)
    return Grid(
        np.ldexp(1.0, power - BITS),
        (tile - power + BITS).astype(np.int64),
        np.ldexp(1.0, -tile - _halvings(dim)),
    )


def _halvings(dim: int) -> int:
    """M with ``½ ≥ d 2⁻ᵐ > ¼``."""
    return int(2 * dim - 1).bit_length()


@functools.cache
def count_thresholds(dim: int) -> np.ndarray:
    """``2⁶⁴ P(N ≤ n)`` for n below `MOST_POINTS`, N the number of points of a tile: Poisson of mean ``d 2⁻ᵐ``, to 2⁻⁶⁴."""
    with localcontext() as context:
        context.prec = 60
        mean = Decimal(dim) / Decimal(2) ** _halvings(dim)
        term = (-mean).exp()
        total, out = Decimal(0), []
        for n in range(MOST_POINTS):
            total += term
            term = term * mean / (n + 1)
            out.append(min(int((total * 2**64).to_integral_value()), 2**64 - 1))
    return np.asarray(out, dtype=np.uint64)


class Points(NamedTuple):
    """The points of one tile on every chain: places in units of 2⁻³² cells since the plan's start, coordinates, levels."""

    place: Int[Array, "n C"]
    mark: Int[Array, "n C"]
    level: Float[Array, "n C"]
    present: Bool[Array, "n C"]


def power_of_two(k: Int[Array, "*shape"]) -> Float[Array, "*shape"]:
    """``2ᵏ``, exactly."""
    return jax.lax.bitcast_convert_type((k.astype(jnp.uint64) + jnp.uint64(1023)) << 52, jnp.float64)


def tile_points(
    grid: Grid, dim: int, keys: ChainKeys, number: Int[Array, " C"], layer: Int[Array, ""], cell: Int[Array, " C"]
) -> Points:
    """The points of a layer's tile that contains a cell of the grid, a function of public facts and the secret key."""
    width = grid.bits - jnp.maximum(layer - 1, 0)
    within = jnp.maximum(width, 0)
    tile = cell >> within
    words = _words(keys, number, layer, tile)
    count = jnp.sum(words[0][None] >= jnp.asarray(count_thresholds(dim))[:, None], 0)
    place, height, draw = words[1 : 1 + 3 * MOST_POINTS].reshape(3, MOST_POINTS, -1)
    inside = ((place >> 1) >> (63 - within).astype(jnp.uint64)).astype(jnp.int64)
    finer = ((place << within.astype(jnp.uint64)) >> 32).astype(jnp.int64)
    lower, d = draw & jnp.uint64(0xFFFFFFFF), jnp.uint64(dim)
    # The integer part of d times a fraction of 64 bits.
    mark = (((draw >> 32) * d + ((lower * d) >> 32)) >> 32).astype(jnp.int64)
    # In the lowest layer a level has the full precision of a 64-bit float.
    lowest = layer == 0
    u = height.astype(jnp.float64) * 2.0**-64
    above = 1.0 + (height >> 12).astype(jnp.float64) * 2.0**-52
    level = grid.base * jnp.where(lowest, u, power_of_two(jnp.maximum(layer - 1, 0)) * above)
    present = (jnp.arange(MOST_POINTS)[:, None] < count) & (width >= 0)
    return Points((((tile << within) + inside) << FINER) + finer, mark, level, present)


def _words(keys: ChainKeys, number, layer, tile) -> Array:
    """56 words of 64 random bits for each chain's tile."""
    counter = jnp.broadcast_to(jnp.arange(BLOCKS, dtype=jnp.uint32)[:, None], (BLOCKS, keys.shape[0]))
    key = tuple(keys[None, :, i] for i in range(CHACHA_WORDS))
    number, layer, tile = (jnp.broadcast_to(x, tile.shape).astype(jnp.uint32)[None] for x in (number, layer, tile))
    words = jnp.stack(chacha20(key, counter, (number, layer, tile)), 1)
    bits = (words[:, 0::2].astype(jnp.uint64) << 32) | words[:, 1::2].astype(jnp.uint64)
    return bits.reshape(-1, bits.shape[-1])


class ArrivalSearch(NamedTuple):
    """The state of a walk on every chain.

    Attributes
    ----------
    next : (C,)
        The place of the first point that is not decided.
    anchor : (C,)
        The number j of the current time ``j h``.
    candidate : (C,)
        Whether the walk is at a point below its bound, of coordinate ``mark`` at ``level``; ``ceiling`` is the bound.
    done, rang, fault : (C,)
    passes : ()
        Passes over the records so far.
    """

    next: Int[Array, " C"]
    anchor: Int[Array, " C"]
    candidate: Bool[Array, " C"]
    mark: Int[Array, " C"]
    level: Float[Array, " C"]
    ceiling: Float[Array, " C"]
    done: Bool[Array, " C"]
    rang: Bool[Array, " C"]
    fault: Int[Array, " C"]
    passes: Int[Array, ""]


class Here(NamedTuple):
    """A bound of the rates that holds for a while from the current point, and speeds."""

    bound: RateBound
    speed: Float[Array, "C d"]
    excess: Float[Array, ""]

    def ceilings(self, s: Array, of: Callable[[Array], Array] = lambda table: table) -> Array:
        """A bound, by coordinate, of the rate within time s from here; or what is picked out of it."""
        rise = jnp.maximum(of(self.bound.slope), 0.0) * s + 0.5 * of(self.bound.curve) * s * s
        return jnp.maximum(of(self.bound.value) + rise, 0.0) + self.excess * of(self.speed)


def first_below(
    potential: Potential,
    dynamics: Dynamics,
    excess: Float[Array, ""],
    slack: Float[Array, ""],
    grid: Grid,
    path: Path,
    keys: ChainKeys,
    most_passes: Int[Array, ""],
) -> ArrivalSearch:
    """The first point below the rates ``(v_i ∂_iU)_+ + ρ|v_i|`` of each coordinate, or none by the horizon.

    Parameters
    ----------
    potential : Potential
        The records minus the public control variate, in whitened coordinates.
    dynamics : Dynamics
        With flips.
    excess : ()
        ``ρ``.
    slack : ()
        A bound of the rounding of ``∇U``.
    grid : Grid
    path : Path
    keys : ChainKeys
        Secret, of ChaCha20.
    most_passes : ()
        Passes over the records after which the walk gives up, with a fault.
    """
    chains = path.number.shape[0]
    cells = jnp.floor((path.begin + path.duration) / grid.unit[:, None]).astype(jnp.int64)
    none, zero, no = jnp.zeros(chains, jnp.int64), jnp.zeros(chains), jnp.zeros(chains, bool)
    start = ArrivalSearch(none, none, no, none, zero, zero, cells[:, -1] <= 0, no, none, jnp.array(0))
    walk = functools.partial(_step, potential, dynamics, excess, slack, grid, path, cells, keys)
    found = jax.lax.while_loop(lambda now: jnp.any(~now.done) & (now.passes < most_passes), walk, start)
    return found._replace(fault=jnp.where(found.done, found.fault, TOO_LONG))


def _step(potential, dynamics, excess, slack, grid, path, cells, keys, now: ArrivalSearch) -> ArrivalSearch:
    """One pass over the records: decide the current point, then move to the next one below the bound."""
    segment = jnp.minimum(jnp.sum(cells <= (now.next >> FINER)[:, None], 1), path.last)
    begin = pick(path.begin, segment)
    offset = jnp.maximum(now.anchor * grid.unit - begin, 0.0)
    a, v = path.state(dynamics, segment, offset)
    seen = evaluate(dynamics, potential, a, v, v)
    size = jnp.abs(v)
    rates = jnp.where(size < SLOWEST, 0.0, jnp.maximum(seen.rates, 0.0) + excess_rates(excess, v))
    rate = jnp.take_along_axis(rates, now.mark[:, None], -1)[:, 0]
    finite = jnp.all(jnp.isfinite(seen.rates) & jnp.isfinite(seen.bound.curve) & jnp.isfinite(seen.bound.slope), -1)
    violated = now.candidate & ~(rate <= now.ceiling)
    fault = jnp.where(finite, jnp.where(violated, VIOLATED, FINE), NOT_FINITE)
    rang = now.candidate & (now.level < rate) & (fault == FINE)

    bound = seen.bound._replace(value=seen.bound.value + slack * size)
    here = Here(bound, jnp.hypot(a, v) if dynamics.flow.rotating else size, excess * (1 + 1e-12))
    after = now.next + now.candidate
    same = jnp.sum(cells <= (after >> FINER)[:, None], 1) == segment
    last = jnp.where(same, pick(cells, segment), after >> FINER)
    until, layers = _reach(here, grid, after >> FINER, last, begin + offset)
    found = _next_point(here, grid, path, keys, after, until, layers, begin + offset)
    hit = found.candidate
    moved = ArrivalSearch(
        jnp.where(hit, found.next, jnp.maximum(until << FINER, after)),
        jnp.where(hit, (found.next >> FINER) + 1, jnp.maximum(until, after >> FINER)),
        hit, found.mark, found.level, found.ceiling,
        rang | (fault != FINE) | (~hit & (until >= cells[:, -1])),
        rang, fault, now.passes + 1,
    )  # fmt: skip
    # A walk with an arrival does not move: its time is that of the anchor.
    stays = now.done | rang
    kept = jax.tree.map(lambda old, new: jnp.where(stays, old, new), now, moved._replace(passes=now.next))
    return kept._replace(
        done=now.done | moved.done,
        rang=now.rang | (rang & ~now.done),
        fault=jnp.where(now.done, now.fault, fault),
        passes=moved.passes,
    )


def excess_rates(excess: Float[Array, ""], v: Float[Array, "C d"]) -> Float[Array, "C d"]:
    """``ρ|v_i|``: even under the flip, so it cancels in the condition for invariance."""
    return excess * jnp.abs(v)


def _reach(here: Here, grid: Grid, cell, last, time) -> tuple[Int[Array, " C"], Int[Array, " C"]]:
    """The cell up to which the bound is used next, and the layers below it: at most one tile of each."""
    halvings = jnp.arange(BITS + 1)[:, None]
    width = grid.bits - jnp.minimum(halvings, grid.bits)
    until = jnp.minimum(((cell >> width) + 1) << width, last)
    ahead = jnp.maximum(until * grid.unit - time, 0.0)
    top = jnp.max(here.ceilings(ahead[..., None]), -1)
    layers = jnp.maximum(jnp.frexp(top / grid.base)[1], 0).astype(jnp.int64)
    fits = (layers - 1 <= halvings) & (ahead <= here.bound.reach)
    chosen = jnp.where(jnp.any(fits, 0), jnp.argmax(fits, 0), BITS)

    def of(table):
        return jnp.take_along_axis(table, chosen[None], 0)[0]

    return of(until), jnp.minimum(of(layers), grid.bits + 1)


def _next_point(here: Here, grid: Grid, path: Path, keys, after, until, layers, time) -> ArrivalSearch:
    """The first point below the bound, from ``after`` on and before the cell ``until``."""
    chains, dim = here.speed.shape
    none, zero = jnp.zeros(chains, jnp.int64), jnp.zeros(chains)
    far = jnp.full(chains, jnp.iinfo(jnp.int64).max)
    start = ArrivalSearch(far, none, zero < 0, none, zero, zero, zero < 0, zero < 0, none, jnp.array(0))

    def look_at(carry):
        layer, best = carry
        points = tile_points(grid, dim, keys, path.number, layer, after >> FINER)
        j = (points.place >> FINER) + 1
        ahead = jnp.maximum(j * grid.unit - time, 0.0)

        def of(table):
            return jnp.take_along_axis(table.T, points.mark, 0)

        ceiling = here.ceilings(ahead, of)
        below = points.present & (points.place >= after) & (j <= until) & (points.level < ceiling) & (layer <= layers)
        place = jnp.where(below, points.place, far)
        first = jnp.argmin(place, 0)[None]
        place, mark, level, ceiling = (
            jnp.take_along_axis(x, first, 0)[0] for x in (place, points.mark, points.level, ceiling)
        )
        sooner = place < best.next
        new = best._replace(next=place, mark=mark, level=level, ceiling=ceiling, candidate=sooner)
        kept = jax.tree.map(lambda old, fresh: jnp.where(sooner, fresh, old), best, new)
        return layer + 1, kept._replace(passes=best.passes)

    _, best = jax.lax.while_loop(lambda carry: carry[0] <= jnp.max(layers), look_at, (jnp.array(0), start))
    return best
