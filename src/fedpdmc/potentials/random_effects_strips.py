"""Bounds of the rates of grouped effects in strips of complex times, and how long a cell they allow.

Let ``f(t) = R(a(t), ζ)`` with ζ at rest on a rotation, ``a(t) = a cos t + v sin t``. For
``t = x + iy`` any linear form is ``l·a(t) = A cos(t − t₀)`` with ``A² = (l·a)² + (l·v)²``, so that for ``|y| ≤ b``

    |l·a(t)|, |l·a'(t)| ≤ A cosh b,        |Im l·a(t)| ≤ A sinh b.

Predictors, ``log τ`` and m are linear forms. On ``|Im u| ≤ y < π``: ``|σ(u)| ≤ min(1, e^{Re u})``, over ``sin y`` where
``y > π/2``, and ``σ' = σ(u)σ(−u)``. This bounds ``|z|, |z'|, |Im z|``, with them ``|Im η|`` (which must stay in the family's
strip) and ``|f'(t)| ≤ B`` in the strip ``|Im t| ≤ b``, all by sums over groups. On a cell of half-length L the interpolant p
of ``f'`` at n Chebyshev points then has (Trefethen, *Approximation Theory and Practice*, theorem 8.2)

    |f' − p| ≤ 4 B ϱ^{1−n}/(ϱ − 1),        b = L (ϱ − 1/ϱ)/2.

B enters by its n-th root only: crude sums over groups cost little.

**Bent spreads.** Where ``log τ = T(l)`` of a linear form l, bounds follow by `fedpdmc.bent_coordinates.enclosed`. The cell
begins at ``t = 0``, and for ϱ ≥ 2 the ellipse about it has ``Re t ≤ b(ϱ + 1)/(ϱ − 1) ≤ 3b``, so that ``|t| ≤ √10 b`` and
``|l(t) − l(0)| ≤ A cosh b √10 b``; besides ``Re l(t)`` lies within ``A cosh b`` of its value at the reference.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from fedpdmc._jax.random_streams import logarithm
from fedpdmc.bent_coordinates import enclosed, steepness
from fedpdmc.potentials.forms_on_rotations import Reach
from fedpdmc.potentials.grouped_families import STRIP

if TYPE_CHECKING:
    from fedpdmc.potentials.random_effects_rates import InformedRemainder

# Points of a cell, the error of its polynomial, strips that are tried as shares of the widest, and the widest.
POINTS, ERROR, SHARES, WIDEST = 8, 0.05, (0.9, 1.1, 0.7, 0.3, 0.01), 2.5
# Groups up to which all of these strips are tried at once.
FEW_GROUPS = 4
# Relative room for rounding in B, and in hyperbolic functions.
ROUNDING, SLACK = 1e-11, 1e-15
# The least ϱ; the farthest that its ellipse reaches from the cell's beginning, in units of b; and that of a first guess.
LEAST_ELLIPSE, FARTHEST, GUESSED = 2.0, math.sqrt(10.0), 0.3


def longest_cell(part: InformedRemainder, reach: Reach, size, room):
    """The longest cell, and the certified error of its polynomial."""
    steep = steepness(part.spread[:, None] + reach.now, part.bend[..., None])
    tilt = 2 * jnp.maximum(jnp.max(steep * reach.spread, 0), reach.turn * (2 * STRIP / math.pi))
    # Where the strip would end if what grows with it grew like ``sinh b`` from one on, and the spread bent by little.
    _, leaning, _ = _strip(part, reach, size, jnp.ones_like(tilt), jnp.full_like(tilt, GUESSED))
    least = jnp.sinh(1.0) * part.family.strip / jnp.maximum(leaning, 1e-12)
    height = jnp.minimum(least, STRIP / jnp.maximum(tilt, 1e-12))
    widest = jnp.minimum(WIDEST, logarithm(height + jnp.sqrt(1 + height * height)))

    def attempt(state):
        turn, length, error = state
        b = jnp.minimum(shares[turn][:, None] * widest, WIDEST)
        most, fits = jax.vmap(lambda b: largest_slope(part, reach, size, b))(b)
        needed = jnp.maximum(1 + _root(4 * most / ERROR), LEAST_ELLIPSE)
        found = jnp.where(fits, 4 * b / (needed - 1 / needed), 0.0)
        longest = jnp.argmax(found, 0)[None]
        new, most = (jnp.take_along_axis(x, longest, 0)[0] for x in (found, most))
        better = (new > length) & (length < room)
        return turn + 1, jnp.where(better, new, length), jnp.where(better, ERROR + ROUNDING * most, error)

    # Of few groups all shares at once: a loop over them would be many small kernels. Else until the room is filled; what a
    # chain gets does not depend on the others.
    shares = jnp.asarray(SHARES).reshape(1 if size.shape[0] <= FEW_GROUPS else len(SHARES), -1)
    start = (0, jnp.zeros_like(room), jnp.full_like(room, ERROR))
    if len(shares) == 1:
        _, length, error = attempt(start)
    else:
        _, length, error = jax.lax.while_loop(
            lambda s: (s[0] < len(shares)) & jnp.any(s[1] < room), attempt, start
        )  # fmt: skip
    return jnp.minimum(length, room), error


def largest_slope(part: InformedRemainder, reach: Reach, size, b):
    """A bound of ``|f'|`` in the strip ``|Im t| ≤ b``, and whether the strip is free of poles; by chain."""
    grow, tilt = _hyperbolic(b)
    (fast, up, down, m, ms), leaning, aside = _strip(part, reach, size, b, FARTHEST * b)
    h = part.information[..., None]
    root = jnp.sqrt(up / h)
    z = up * m + root * size
    dz = up * down * fast * m + up * ms + 0.5 * root * down * fast * size
    e = jnp.sqrt(down) * (jnp.sqrt(h * up) * m + size)
    de = 0.5 * up * fast * e + jnp.sqrt(down * h * up) * (0.5 * down * fast * m + ms)
    prior = jnp.sum(e * de + 0.5 * fast * up, 1)
    if e.shape[1] == 2:
        prior = prior + _correlation(part, e, de, reach.turn * grow)
    most, wide = part.most[..., None], reach.design * grow
    eta, speed = wide + jnp.sum(most * z, 1), wide + jnp.sum(most * dz, 1)
    steep = reach.scale * grow
    first, second = part.family.largest(part.stats, eta, part.log_scale - steep)
    total = part.counts[:, None] * (first * speed + second * steep) + part.present[:, None] * prior
    # |cos 2t|, |sin 2t| ≤ cosh 2b.
    quadratic = reach.control[0] * (grow**2 + tilt**2) + reach.control[1] * grow
    fits = (leaning <= part.family.strip) & (aside <= STRIP)
    fits &= reach.turn * tilt <= math.pi / 4
    bound = jnp.sum(total, 0) + quadratic
    return bound, fits & jnp.isfinite(bound)


def _strip(part: InformedRemainder, reach: Reach, size, b, far):
    """Bounds of ``|u'|, |σ(u)|, |σ(−u)|, |m|, |m'|`` for ``|Im t| ≤ b``, ``|t| ≤ far``; of ``|Im η|``; of ``|Im u|``."""
    grow, tilt = _hyperbolic(b)
    h = part.information[..., None]
    middle, way, wide = part.spread[:, None], reach.spread * grow * far, reach.spread * grow
    now = middle + reach.now
    ends = jnp.maximum(now - way, middle - wide), jnp.minimum(now + way, middle + wide)
    steep, least, most = enclosed(*ends, reach.spread * tilt, part.bend[..., None])
    fast, leaning = 2 * steep * reach.spread * grow, 2 * steep * reach.spread * tilt
    # Beyond STRIP the strip is not used.
    lean = jnp.minimum(leaning, STRIP)
    sine, cosine = jnp.sin(lean), jnp.cos(lean)
    pole = jnp.where(cosine > 0, 1.0, 1 / sine)
    # ``|1 + e^{−u}|`` and its argument, which grows with ``e^{−Re u}``; the sines of the argument and of half of it.
    inverse = jnp.exp(jnp.minimum(-2 * least - jnp.log(h), 50.0))
    x, y = 1 + inverse * cosine, inverse * sine
    modulus = jnp.sqrt(x * x + y * y)
    turned = jnp.where(x > 0, y / modulus, 1.0)
    half = jnp.where(x > 0, y / jnp.sqrt(2 * modulus * (modulus + x)), jnp.sqrt(0.5 - 0.5 * x / modulus))
    up = pole * jnp.exp(jnp.minimum(2 * most + jnp.log(h), 0.0))
    down = pole * jnp.minimum(inverse, 1.0)
    m = jnp.abs(part.center)[..., None] + reach.slope * grow
    # |Im σ(x + iy)| = e^{−x} sin y/(1 + 2 e^{−x} cos y + e^{−2x}) is largest at x = 0: half the tangent of y/2.
    aside = jnp.minimum(0.5 * sine / (1 + cosine), up * turned)
    off = aside * m + up * reach.slope * tilt + jnp.sqrt(up / h) * half * size
    eta = reach.design * tilt + jnp.sum(part.most[..., None] * off, 1)
    return (fast, up, down, m, reach.slope * grow), jnp.max(eta, 0), jnp.max(leaning, 0)


def _correlation(part: InformedRemainder, e, de, turning):
    """``|d/dt|`` of ``½ sinh²φ |e|² − sinh φ cosh φ e₁e₂ − log cosh φ``, with ``|tanh φ| ≤ 1`` for ``|Im φ| ≤ π/4``."""
    top = jnp.cosh(jnp.abs(part.turn) + turning) ** 2
    one, other, d1, d2 = e[:, 0], e[:, 1], de[:, 0], de[:, 1]
    square = one**2 + other**2
    own = top * (turning * square + one * d1 + other * d2)
    return own + top * (2 * turning * one * other + d1 * other + one * d2) + turning


def _hyperbolic(b):
    """``cosh b`` and ``sinh b``, from above, by one exponential."""
    up = jnp.exp(b)
    return (0.5 + SLACK) * (up + 1 / up), 0.5 * (up - 1 / up) + SLACK * up


def _root(x):
    """The root of order `POINTS`, a power of two."""
    for _ in range(POINTS.bit_length() - 1):
        x = jnp.sqrt(x)
    return x
