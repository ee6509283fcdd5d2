"""Curves of logistic records with the logistic function itself at the nodes, for predictors of any size.

With ``ρ'(δ) = σ(ẑ + δ) − e − s δ``, ``Δb = |ρ'(0)|``, ``Δw = |ρ''(0)|``, ``κ = sup|σ''| = 1/(6√3)`` and ``r² = α² + β²``
(see `fedpdmc.potentials.dense_rates` for what is common), one record adds to the error at most the sum of

- *time*: ``ρ' δ' = (σ − ½) δ' + (½ − e) δ' − s δ δ'``. The last two are ``r cos`` and ``½ r² cos`` of one and two times the
  angle, so ``2 (L/4)^K/K! (|½ − e| r + 2^{K−1} |s| r²)`` for them. The first is analytic where ``|Im δ| < π``. For
  ``|Im t| ≤ τ`` and ``S = r sinh τ < π``, ``|Im δ| ≤ S``, ``|δ'| ≤ r cosh τ``, and ``|σ − ½| = ½|tanh(z/2)| ≤
  ½ max(1, tan(S/2))``. Its Chebyshev coefficients on [0, L] are at most ``2 M ϑ^{−k}``, with M the product of both bounds
  and ϑ that of the ellipse, ``½ (ϑ − 1/ϑ) = 2τ/L``. Interpolation at Chebyshev nodes aliases each that is left out to one
  that is kept, so the error is at most ``4 M ϑ^{1−K}/(ϑ − 1)`` for every τ, and at most ``(1 + Λ) ½ r``. The least of
  these, ``G(r)`` (`ellipses`), is below a polynomial of r² (`majorant`);
- *rounding*, Λ times: ``(u (c_0 + c_1 r)) r`` for ρ' (the logistic function, ``exponential`` within 10 units of roundoff,
  the differences, ẑ in 32 bits), ``γ_{b+8} (Δb + Δw r + ½κr²) r`` for products and sums, and
  ``h |ξ| (Δb + 2 Δw r + 1½ κ r²)`` for the product with the design, where h bounds the relative error of its rows.

Odd powers of r become even ones by ``r ≤ ½ (c + r²/c)`` with ``c² = 2 |ξ|²``, the mean of r². All of it is then a polynomial
of r², and these coefficients are what is kept of a record.
"""

from __future__ import annotations

import functools
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from fedpdmc.potentials.dense_rates import (
    LEBESGUE,
    ROOM,
    ROUNDOFF,
    RecordCurves,
    exact_rounding,
)  # fmt: skip
from fedpdmc.potentials.linear_predictor import LinearPredictor
from fedpdmc.potentials.record_blocks import filled_blocks, packed

KAPPA = 1 / (6 * math.sqrt(3))
# The exponential of 32 bits: the largest argument, log 2 in two parts of which the first has few digits, and its error.
LARGEST, LN2_HIGH, LN2_LOW = 87.0, 0.693359375, -2.12194440e-4
EXPONENTIAL_ULPS = 10.0
# The majorant of G: number of coefficients, largest r and number of points of the comparison, and the range of r in which
# it should be close.
POWERS, FITTED, POINTS, LEAST_USUAL, MOST_USUAL = 8, 16.0, 4000, 0.1, 4.0
# Strips |Im δ| ≤ S that are tried, as shares of π.
STRIPS = (0.5, 0.6, 0.7, 0.76, 0.82, 0.87, 0.91, 0.95)


class LogisticCurves(RecordCurves):
    """Logistic records evaluated at the nodes: ``rows`` are ``ξ_i``.

    ``terms`` are ``ẑ, e, s``, then for the error ``|ξ|²``, three coefficients of r² and two of the product's rounding;
    ``higher`` are the coefficients that all records share.
    """

    higher: tuple[float, ...] = eqx.field(static=True)

    def _value(self, alpha, beta, cos, sin, c):
        """``(σ(ẑ + δ) − e − s δ) δ'``."""
        delta = alpha * cos + beta * sin
        rest = 1 / (1 + exponential(-(c[0] + delta))) - c[1] - c[2] * delta
        return rest * (beta * cos - alpha * sin)

    def _error(self, alpha, beta, slip, c):
        """A polynomial of r², with room for what is true and what is computed."""
        q = jnp.float32(1.001) * (alpha * alpha + beta * beta) + jnp.float32(9100.0) * (slip * slip) * c[3]
        total = jnp.float32(self.higher[-1])
        for coefficient in self.higher[-2::-1]:
            total = total * q + jnp.float32(coefficient)
        return c[4] + q * (c[5] + q * (c[6] + q * total)) + slip * (c[7] + c[8] * q)


def exponential(x: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """``e^x`` of ``|x| ≤ 87``, larger ones cut, in 32 bits with a relative error of at most ten units of roundoff.

    ``x = n log 2 + f`` with ``|f| < 0.35``: n times the first part of log 2 is exact, what is left has an error below u, and
    Taylor's polynomial of degree 6 leaves ``0.35⁷/7! e^{0.35} < 3u``; Horner's rule adds less than 3u, and ``2^n`` is exact.
    """
    x = jnp.clip(x, -LARGEST, LARGEST)
    n = jnp.floor(x * jnp.float32(1 / math.log(2)) + jnp.float32(0.5))
    f = (x - n * jnp.float32(LN2_HIGH)) - n * jnp.float32(LN2_LOW)
    total = jnp.float32(1 / 720)
    for k in (120, 24, 6, 2, 1, 1):
        total = total * f + jnp.float32(1 / k)
    scale = jax.lax.bitcast_convert_type((n.astype(jnp.int32) + 127) << 23, jnp.float32)
    return total * scale


def ellipses(r: np.ndarray, nodes: int, length: float) -> np.ndarray:
    """``G(r)``: the error of the interpolant of ``(σ(ẑ + δ) − ½) δ'`` on a piece, for every ẑ."""
    best = 0.5 * (1 + LEBESGUE) * r
    for share in STRIPS:
        strip = math.pi * share
        x = 2 / length * np.arcsinh(strip / np.maximum(r, 1e-300))
        theta = x + np.sqrt(1 + x * x)
        most = 0.5 * max(1.0, math.tan(strip / 2)) * np.hypot(r, strip)
        best = np.minimum(best, 4 * most * theta ** (1.0 - nodes) / (theta - 1))
    return best


@functools.cache
def majorant(nodes: int, length: float) -> tuple[float, ...]:
    """Coefficients, none negative, of a polynomial of r² that is at least G for every r.

    G and the polynomial p grow with r, so ``p(r_k) ≥ G(r_{k+1})`` on a grid is enough up to its end R. From there on
    ``G ≤ ½(1 + Λ) r``, and p is made to exceed that at R: where ``p(0) ≤ ½ p(R)``,
    ``p(r) ≥ p(0) + (p(R) − p(0)) (r/R)² ≥ p(R) r/R``.
    """
    # Slow to import.
    from scipy.optimize import linprog

    r = np.linspace(0.0, FITTED, POINTS + 1)
    bound = ROOM * np.append(ellipses(r, nodes, length)[1:-1], 0.5 * (1 + LEBESGUE) * FITTED)
    shares = r[:-1, None] ** (2.0 * np.arange(POWERS)) / bound[:, None]
    # In units in which every power alone touches G from below.
    units = 1 / shares.max(0)
    shares = shares * units
    usual = (shares / np.maximum(r[:-1, None], LEAST_USUAL))[r[:-1] <= MOST_USUAL].sum(0)
    found = linprog(usual, A_ub=-shares, b_ub=-np.ones(POINTS), bounds=(0, None))
    coefficients = np.maximum(found.x, 0.0)
    # Whatever the program found: scaled until it holds.
    coefficients *= ROOM * max(1.0, float(np.max(1 / (shares @ coefficients))))
    assert shares[0, 0] * coefficients[0] * bound[0] <= 0.5 * bound[-1]
    return tuple((coefficients * units).tolist())


def logistic_terms(
    potential: LinearPredictor,
    nodes: int,
    length: float,
    block: int,
    low=(0.0, 0.0, 0.0),
    some: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The design and the terms of all records that see a parameter, or of some; ``low``: of 1, r², r⁴ in the majorant."""
    design, (offset, response) = np.asarray(potential.design), np.asarray([potential.offset, potential.response])
    size = np.linalg.norm(design, axis=1)
    own = np.flatnonzero(np.any(design, 1)) if some is None else some
    design, size, offset, response = design[own], size[own], offset[own], response[own]
    e, s = response, np.zeros_like(size)
    if potential.control is not None:
        point, slope, s = np.asarray(potential.control)[:, own]
        e = response + slope + s * (offset - point)
    sigma = 0.5 + 0.5 * np.tanh(0.5 * offset)
    first, second = np.abs(sigma - e) + 1e-15, np.abs(sigma * (1 - sigma) - s) + 1e-15
    # σ' of the rounding of z = ẑ + δ, the exponential, quotient and sum of σ; e and s δ rounded, and two differences.
    still = 0.25 * (2 * np.abs(offset) + EXPONENTIAL_ULPS) + 8 + 4 * np.abs(e)
    moving = 1.0 + 8 * np.abs(s)
    unit, sums = LEBESGUE * ROUNDOFF * ROOM, LEBESGUE * ROUNDOFF * ROOM * (block + 8)
    shrink = 2 / math.factorial(nodes) * (length / 4) ** nodes
    # Of r, r² and r³.
    one = shrink * np.abs(0.5 - e) + unit * still + sums * first
    two = shrink * 2.0 ** (nodes - 1) * np.abs(s) + unit * moving + sums * second
    three = np.full_like(size, sums * 0.5 * KAPPA)
    usual = math.sqrt(2) * size
    by_power = [
        low[0] + 0.5 * one * usual,
        low[1] + 0.5 * (one / usual + three * usual) + two,
        low[2] + 0.5 * three / usual,
    ]
    slips = [LEBESGUE * size * (first + second * usual), LEBESGUE * size * (second / usual + 1.5 * KAPPA)]
    return design, np.stack([offset, e, s, *(ROOM * x for x in (size**2, *by_power, *slips))], 1)


def logistic_curves(
    potential: LinearPredictor, nodes: int, length: float, shape: tuple[int, int], wide: bool = False
) -> LogisticCurves:
    """The curves of whitened logistic records on pieces up to a length; ``shape`` as `blocking` has it."""
    common = majorant(nodes, length)
    design, terms = logistic_terms(potential, nodes, length, shape[1], common[:3])
    higher = tuple(ROOM * x for x in np.trim_zeros(common[3:], "b")) or (0.0,)
    return LogisticCurves(
        packed(design, shape), packed(terms, shape), exact_rounding(potential),
        filled_blocks(design, shape), nodes, wide, higher,
    )  # fmt: skip
