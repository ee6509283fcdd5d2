"""Rates of arrivals of any function with private latents, as polynomials of time with a proved error."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fedpdmc.enclosures import Curve, TimeInterval, enclose
from fedpdmc.errors import NoEnclosure
from fedpdmc.potentials.affine_rate_cells import LONGEST
from fedpdmc.potentials.chebyshev import chebyshev_nodes
from fedpdmc.potentials.jax_function import curved_path
from fedpdmc.potentials.latent import RateCell
from fedpdmc.potentials.quadratic_rate_cells import reflection_rate
from fedpdmc.potentials.random_effects_strips import POINTS

# The order of the polynomials; the number of candidates that the error of a cell should add, and the largest number.
ORDER, AIM, MOST = 3, 0.05, 0.15
# How often a cell is shortened, the largest factor, and the factor where no finite bound of the rate is known.
ATTEMPTS, SHORTER, NOT_FINITE = 24, 8.0, 3.0
# Relative rounding error of a polynomial's value.
ROUNDING = 1e-13
# For series: lengths of cells that are tried, relative to the longest, and the cost of an error relative to a cell.
LENGTHS, PRICE = (1.0, 0.25, 1 / 16, 1 / 64, 1 / 512), 2.0

Energy = Callable[[Float[Array, " d"], Float[Array, " k"]], Float[Array, ""]]


def rate_cell(
    energy: Energy, a: Float[Array, "C d"], v: Float[Array, "C d"], zeta: Float[Array, "C k"], room: Float[Array, " C"]
) -> RateCell:
    """``v·∇_a R`` along the rotation from ``(a, v)`` for ``R(a, ζ) = energy``, with ζ at rest, on cells within ``room``.

    The rate is enclosed as a polynomial of time (`fedpdmc.enclosures.taylor_models`), ζ being a curve that does not move. A
    cell is as long as the room, and is shortened until its error e adds few candidates: with ``e ∝ h^{n+1}`` for order n,
    ``e h`` is `AIM` at ``h (AIM/(e h))^{1/(n+2)}``. Where an operation has no rule for polynomials, cells come from series
    ``r_0 + r_1 s + [lo, hi] s²``, a quadratic within ``½(hi − lo)s²``.
    """

    def rate(a, v, zeta):
        return jax.jvp(lambda x: energy(x, zeta), (a,), (v,))[1]

    try:
        return _polynomials(rate, a, v, zeta, room)
    except NoEnclosure:
        length, values, error = jax.vmap(lambda *one: _series(rate, *one))(a, v, zeta, room)
        return RateCell(length, values.T, error)


def _polynomials(rate: Callable, a, v, zeta, room) -> RateCell:
    still = Curve((zeta.T,), jnp.zeros_like(zeta.T))

    def attempt(h):
        found = enclose(rate, TimeInterval(ORDER))(*curved_path(True, a.T, v.T, h, ORDER), still)
        found = found if isinstance(found, Curve) else Curve((jnp.reshape(found, (1,)),), jnp.zeros(1))
        value = jnp.zeros((POINTS, a.shape[0]))
        for part in reversed(found.parts):
            value = value * jnp.asarray(chebyshev_nodes(POINTS))[:, None] + (0.0 if part is None else part)
        return value, jnp.broadcast_to(found.error, h.shape) + ROUNDING * found.size

    def again(state):
        count, h, good, old = state
        value, error = attempt(h)
        added = error * h + 0.0 * jnp.sum(value, 0)
        finite = jnp.isfinite(added)
        ratio = jnp.where(finite, (AIM / jnp.maximum(added, 1e-300)) ** (1 / (ORDER + 2)), 1 / NOT_FINITE)
        well = finite & (added <= MOST)
        new = RateCell(jnp.where(finite, h, 0.0), jnp.where(finite, value, 0.0), jnp.where(finite, error, 0.0))
        kept = jax.tree.map(lambda x, y: jnp.where(good, x, y), old, new)
        return count + 1, jnp.where(good | well, h, h * jnp.clip(ratio, 1 / SHORTER, 1.0)), good | well, kept

    # One loop, so that the program is enclosed in one place.
    blank = RateCell(jnp.zeros_like(room), jnp.zeros((POINTS, *room.shape)), jnp.zeros_like(room))
    start = (jnp.asarray(0), jnp.clip(room, 0.0, LONGEST), jnp.zeros(room.shape, bool), blank)
    return jax.lax.while_loop(lambda s: (s[0] < ATTEMPTS) & ~jnp.all(s[2]), again, start)[-1]


def _series(rate: Callable, a, v, zeta, room):
    """The cell, on one chain, that costs the least among some lengths, counting its error."""

    def attempt(share):
        h = share * jnp.clip(room, 1e-12, LONGEST)
        found = reflection_rate(lambda a, v: rate(a, v, zeta), a, v, h)
        error = 0.5 * (found.high - found.low) * h * h * (1 + 1e-9) + found.error
        middle = 0.5 * (found.low + found.high)
        price = jnp.nan_to_num(1 / h + PRICE * error, nan=jnp.inf) + 0.0 * middle
        return h, found.value, found.slope, middle, error, jnp.where(jnp.isfinite(price), price, jnp.inf)

    tried = jax.lax.map(attempt, jnp.asarray(LENGTHS))
    best = jnp.argmin(tried[-1])
    h, value, slope, bend, error, price = (part[best] for part in tried)
    length = jnp.where(jnp.isfinite(price), jnp.minimum(h, room), 0.0)
    s = 0.5 * length * (1 + jnp.asarray(chebyshev_nodes(POINTS)))
    return length, value + slope * s + bend * s**2, error
