"""Cells of a path on which the rates of a program lie below straight lines, by polynomials of time of degree one."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fedpdmc.potentials.base import RateBound

# On a rotation a cell is at most this long (radians).
LONGEST = 1.0
# Candidates that the error of a cell should add, and the maximum. With an error of ``k h²`` the work ``(1 + k h³)/h`` is
# least if they are one half.
AIM, MOST = 0.5, 1.0
# A cell is tried again if it could be longer by this factor; its length changes by at most STRIDE, at most ATTEMPTS times.
MISJUDGED, STRIDE, ATTEMPTS = 8.0, 64.0, 24
# Relative, for the rounding of the line.
SLACK = 1e-9
# Lengths that are tried at unit speed.
LADDER = 2.0 ** np.arange(3, -13, -1)

# ``(a, v, h)`` to the values in the middle of cells, the slopes there in units of half a cell, and the errors.
Line = Callable[..., tuple[Float[Array, "C k"], Float[Array, "C k"], Float[Array, "C k"]]]


def speed(rotating: bool, a: Float[Array, " d"], v: Float[Array, " d"]) -> Float[Array, ""]:
    """The usual size of a coordinate's velocity on the path."""
    square = jnp.mean(v * v) + (jnp.mean(a * a) if rotating else 0.0)
    return jnp.sqrt(jnp.maximum(square / (2 if rotating else 1), 1e-300))


def _bounded(line: Line, a, v, h: Float[Array, " C"]) -> tuple[RateBound, Float[Array, " C"]]:
    """The lines above the rates on cells of these lengths, and how many candidates their errors add; not finite if unknown.

    With ``τ = 2s/h − 1`` a rate is at most ``m + l τ + e``, which is ``m − l + e`` at the start and has the slope ``2 l/h``.
    """
    middle, lean, error = line(a, v, h)
    error = error + SLACK * (jnp.abs(middle) + jnp.abs(lean))
    value, slope = middle - lean + error, 2 * lean / h[:, None]
    added = h * jnp.sum(error + 0.0 * (value + slope), -1)
    return RateBound(value, slope, jnp.zeros_like(value), h), added


def fitted_line(line: Line, rotating: bool, usual, a: Float[Array, "C d"], v: Float[Array, "C d"]) -> RateBound:
    """Bound the rates on cells whose lengths are found by trial: first the usual length, then a corrected one if needed.

    The length depends on the anchor alone. After a length without a finite bound only shorter ones are tried.
    """
    chains, longest = a.shape[0], LONGEST if rotating else jnp.inf
    first = jnp.minimum(usual / jax.vmap(lambda one, other: speed(rotating, one, other))(a, v), longest)

    def judged(bound: RateBound, added, limit):
        """Where the length suffices, and the length to try elsewhere."""
        finite = jnp.isfinite(added)
        ratio = jnp.where(finite, jnp.cbrt(AIM / jnp.maximum(added, 1e-300)), 1 / STRIDE)
        following = jnp.minimum(bound.reach * jnp.clip(ratio, 1 / STRIDE, STRIDE), limit)
        good = finite & (added <= MOST) & (following < MISJUDGED * bound.reach)
        return good, following

    def unfinished(state):
        count, _, _, good, _ = state
        return (count < ATTEMPTS) & ~jnp.all(good)

    def again(state):
        count, length, limit, good, old = state
        new, added = _bounded(line, a, v, length)
        bound = jax.tree.map(lambda x, y: jnp.where(good if x.ndim == 1 else good[:, None], x, y), old, new)
        limit = jnp.where(jnp.isfinite(added), limit, jnp.minimum(limit, length / STRIDE))
        well, following = judged(new, added, limit)
        return count + 1, jnp.where(good | well, length, following), limit, good | well, bound

    # The first trial is part of the loop, so that the program is enclosed in one place only.
    marks = jax.eval_shape(line, a, v, first)[0].shape[1]
    zero, no = jnp.zeros((chains, marks)), jnp.zeros(chains, bool)
    blank = RateBound(zero, zero, zero, first)
    start = (jnp.asarray(0), first, jnp.full(chains, longest), no, blank)
    return jax.lax.while_loop(unfinished, again, start)[-1]


def best_lines(line: Line, rotating: bool, a: Float[Array, "n d"], v: Float[Array, "n d"]):
    """At some points: the length of a cell that needs the least work, the rounding of the rates, and their size.

    The rounding is the error of a cell of length zero.
    """
    pace = jax.vmap(lambda one, other: speed(rotating, one, other))(a, v)
    longest = LONGEST if rotating else jnp.inf

    def attempt(rung):
        h = jnp.minimum(rung / pace, longest)
        middle, _, error = line(a, v, h)
        work = (1 + h * jnp.sum(error, -1)) / h
        return h, jnp.where(jnp.isfinite(work), work, jnp.inf), jnp.max(error, -1), jnp.max(jnp.abs(middle), -1)

    lengths, works, errors, rates = jax.lax.map(attempt, jnp.asarray([0.0, *LADDER]))
    best = jnp.argmin(works[1:], 0)
    return jnp.take_along_axis(lengths[1:], best[None], 0)[0], errors[0], rates[0]
