"""Curves of logistic records with the logistic function itself at the nodes, for predictors of any size.

With ``ρ'(δ) = σ(ẑ + δ) − e − s δ``, ``Δb = |ρ'(0)|``, ``Δw = |ρ''(0)|``, ``κ = sup|σ''| = 1/(6√3)`` and ``r² = α² + β²``
(see `fedpdmc.potentials.record_curves` for what is common), one record adds to the error at most the sum of

- *time*, ``2 (L/4)^K/K! Σ_{m=1}^{K+1} sup|ρ^{(m)}| S(K+1, m) r^m`` over ``|δ| ≤ r``, by Faà di Bruno's formula with
  ``|δ^{(j)}| ≤ r``; S are Stirling numbers of the second kind. ``|ρ'| ≤ Δb + Δw r + ½κr²``, ``|ρ''| ≤ Δw + κr``, and for
  ``m ≥ 3`` ``|ρ^{(m)}|`` is at most ``2 (m−1)! λ(m)/π^m`` (`Logistic.beyond`). Where ``|ẑ|`` is large it is also at most
  ``B_m σ' ≤ B_m e^{r − |ẑ|}``: ``σ^{(n)} = σ(1−σ) Σ_k (−1)^k A(n, k) σ^k (1−σ)^{n−1−k}`` with Eulerian numbers A, and B_m
  bounds the last sum (`tail_bounds`);
- *rounding*, Λ times: ``(u (c_0 + c_1 r)) r`` for ρ' (the logistic function, ``exponential`` within 10 units of roundoff,
  the differences, ẑ in 32 bits), ``γ_{b+8} (Δb + Δw r + ½κr²) r`` for products and sums, and
  ``h |ξ| (Δb + 2 Δw r + 1½ κ r²)`` for the product with the design, where h bounds the relative error of its rows.
"""

from __future__ import annotations

import functools
import math
from fractions import Fraction

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from fedpdmc.potentials.linear_predictor import LinearPredictor
from fedpdmc.potentials.losses import Logistic
from fedpdmc.potentials.record_curves import (
    LEBESGUE,
    ROOM,
    ROUNDOFF,
    SPREAD,
    RecordCurves,
    exact_rounding,
    packed,
)  # fmt: skip

KAPPA = 1 / (6 * math.sqrt(3))
# The exponential of 32 bits: the largest argument, log 2 in two parts of which the first has few digits, and its error.
LARGEST, LN2_HIGH, LN2_LOW = 87.0, 0.693359375, -2.12194440e-4
EXPONENTIAL_ULPS = 10.0
# Halvings of [0, 1] on which the quotients of derivatives are bounded.
HALVINGS = 6


class LogisticCurves(RecordCurves):
    """Logistic records evaluated at the nodes: ``rows`` are ``ξ_i``.

    ``terms`` are ``ẑ, e, s``, then for the error ``|ξ|``, the bound of σ' for ``|δ| ≤ 4|ξ|``, ``Δb``, ``Δw``, and
    the rounding of ρ' at rest and per unit of r.
    """

    block: int = eqx.field(static=True)

    def _value(self, alpha, beta, cos, sin, c):
        """``(σ(ẑ + δ) − e − s δ) δ'``."""
        delta = alpha * cos + beta * sin
        rest = 1 / (1 + exponential(-(c[0] + delta))) - c[1] - c[2] * delta
        return rest * (beta * cos - alpha * sin)

    def _error(self, alpha, beta, shrink, slip, c):
        """The sum of time and rounding; r with room for what is true and what is computed."""
        size, near, first, second, still, moving = c[3], c[4], c[5], c[6], c[7], c[8]
        slip = slip * size
        r = jnp.sqrt(jnp.float32(1.001) * (alpha * alpha + beta * beta) + jnp.float32(9100.0) * (slip * slip))
        anywhere, ratio = time_coefficients(self.nodes)
        tail = jnp.where(r <= jnp.float32(SPREAD) * size, near, jnp.float32(0.25))
        time = jnp.float32(anywhere[-1])
        for coefficient in anywhere[-2::-1]:
            time = time * r + jnp.float32(coefficient)
        time = time * jnp.minimum(jnp.float32(1), jnp.float32(ratio) * tail) * (r * r)
        low = first + second * r * jnp.float32(2.0**self.nodes)
        bend = jnp.float32(KAPPA) * r
        sums = jnp.float32(LEBESGUE * ROOM * (self.block + 8) * ROUNDOFF) * (first + r * (second + 0.5 * bend))
        slips = jnp.float32(LEBESGUE) * slip * (first + r * (2 * second + 1.5 * bend))
        return r * (shrink * (time + low) + sums + still + moving * r) + slips


def exponential(x: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """``e^x`` of ``|x| ≤ 87``, larger ones cut, in 32 bits with a relative error of at most ten units of roundoff.

    ``x = n log 2 + f`` with ``|f| < 0.35``: n times the first part of log 2 is exact, what is left has an error below u, and
    Taylor's polynomial of degree 6 leaves ``0.35⁷/7! e^{0.35} < 3u``; Horner's rule adds less than 3u, and ``2^n`` is exact.
    """
    x = jnp.clip(x, -LARGEST, LARGEST)
    n = jax.lax.round(x * jnp.float32(1 / math.log(2)), jax.lax.RoundingMethod.TO_NEAREST_EVEN)
    f = (x - n * jnp.float32(LN2_HIGH)) - n * jnp.float32(LN2_LOW)
    total = jnp.float32(1 / 720)
    for k in (120, 24, 6, 2, 1, 1):
        total = total * f + jnp.float32(1 / k)
    scale = jax.lax.bitcast_convert_type((n.astype(jnp.int32) + 127) << 23, jnp.float32)
    return total * scale


@functools.cache
def time_coefficients(nodes: int) -> tuple[tuple[float, ...], float]:
    """Coefficients of ``Σ_m sup|ρ^{(m)}| S(K+1, m) r^{m−3}`` without Δb and Δw, and c: ``c σ'`` times it is a bound too."""
    stirling = np.zeros(nodes + 2)
    stirling[0] = 1.0
    for _ in range(nodes + 1):
        stirling = np.arange(nodes + 2) * stirling + np.concatenate([[0.0], stirling[:-1]])
    anywhere = [Logistic.highest(m) * stirling[m] for m in range(3, nodes + 2)]
    tails = [bound * stirling[m] for m, bound in zip(range(3, nodes + 2), tail_bounds(nodes + 1), strict=True)]
    low = 0.5 * stirling[1] + stirling[2]
    anywhere[0], tails[0] = anywhere[0] + KAPPA * low, tails[0] + low
    return tuple(ROOM * x for x in anywhere), ROOM * max(x / y for x, y in zip(tails, anywhere, strict=True))


@functools.cache
def tail_bounds(most: int) -> tuple[float, ...]:
    """``B_m ≥ |ℓ^{(m)}|/ℓ''`` for ``m = 3 … most``: the largest Bernstein coefficient on short intervals, in exact numbers.

    With ``n = m − 1``, ``σ^{(n)}/σ'`` is a polynomial of σ with Bernstein coefficients ``(−1)^k A(n, k)/C(n−1, k)``.
    """
    bounds = []
    for n in range(2, most):
        eulerian = [
            sum((-1) ** j * math.comb(n + 1, j) * (k + 1 - j) ** n for j in range(k + 1)) for k in range(n)
        ]  # fmt: skip
        pieces = [[Fraction((-1) ** k * x, math.comb(n - 1, k)) for k, x in enumerate(eulerian)]]
        for _ in range(HALVINGS):
            pieces = [half for piece in pieces for half in _halved(piece)]
        bounds.append(1.0001 * float(max(abs(x) for piece in pieces for x in piece)))
    return tuple(bounds)


def _halved(coefficients: list[Fraction]) -> tuple[list[Fraction], list[Fraction]]:
    """Bernstein coefficients on both halves of an interval, by de Casteljau's rule."""
    left, right, row = [], [], coefficients
    while row:
        left.append(row[0])
        right.append(row[-1])
        row = [(x + y) / 2 for x, y in zip(row, row[1:], strict=False)]
    return left, right[::-1]


def logistic_terms(potential: LinearPredictor, some: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The design and the terms of all records that see a parameter, or of some."""
    design, (offset, response) = np.asarray(potential.design), np.asarray([potential.offset, potential.response])
    size = np.linalg.norm(design, axis=1)
    own = np.flatnonzero(np.any(design, 1)) if some is None else some
    design, size, offset, response = design[own], size[own], offset[own], response[own]
    e, s = response, np.zeros_like(size)
    if potential.control is not None:
        point, slope, s = np.asarray(potential.control)[:, own]
        e = response + slope + s * (offset - point)
    sigma = 0.5 + 0.5 * np.tanh(0.5 * offset)
    first, second = np.abs(sigma - e), np.abs(sigma * (1 - sigma) - s)
    near = np.minimum(0.25, np.exp(-np.maximum(np.abs(offset) - ROOM**2 * SPREAD * size, 0.0)))
    # σ' of the rounding of z = ẑ + δ, the exponential, quotient and sum of σ; e and s δ rounded, and two differences.
    still = 0.25 * (2 * np.abs(offset) + EXPONENTIAL_ULPS) + 8 + 4 * np.abs(e)
    moving = 1.0 + 8 * np.abs(s)
    rounding = LEBESGUE * ROUNDOFF * ROOM**2 * np.stack([still, moving])
    bounds = ROOM * np.stack([size, near, first + 1e-15, second + 1e-15])
    return design, np.concatenate([np.stack([offset, e, s]), bounds, rounding]).T


def logistic_curves(
    potential: LinearPredictor, nodes: int, shape: tuple[int, int], wide: bool = False
) -> LogisticCurves:
    """The curves of whitened logistic records; ``shape`` as `fedpdmc.potentials.record_curves.blocking` has it."""
    design, terms = logistic_terms(potential)
    exact = exact_rounding(potential)
    return LogisticCurves(packed(design, shape), packed(terms, shape), exact, nodes, wide, shape[1])
