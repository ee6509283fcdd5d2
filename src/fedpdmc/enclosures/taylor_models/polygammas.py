"""Derivatives of ``log Γ`` of positive numbers, all orders at once, with a proved error.

``ψ⁽ᵐ⁾(x) = ψ⁽ᵐ⁾(x + N) − (−1)ᵐ m! Σ_{k<N} (x + k)^{−m−1}``, and beyond N the asymptotic series, with ``w = 1/(x + N)``,

    ψ = log(1/w) − w/2 − Σ_j B_{2j} w^{2j}/(2j),
    (−1)^{m+1} ψ⁽ᵐ⁾ = (m−1)! wᵐ + m! w^{m+1}/2 + Σ_j B_{2j} (2j+m−1)!/(2j)! w^{2j+m},

which is enveloping on positive numbers: the error of a partial sum is at most the next term (DLMF 5.11, 5.15.8). The
terms for m ≥ 1 have one sign but for the small ones with ``B_{2j}``, so that rounding is relative. Powers are shared among
orders; ``lax.polygamma`` sums a series for each.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from fedpdmc.enclosures.cell_values import TINY, unit

# The errors of these are below 1e-8 up to the fourth derivative and are counted; a rate needs no better.
SHIFT = 5
BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730)
NEXT_BERNOULLI = 7 / 6
# Rounding of these sums and of ``lax.digamma`` or ``lax.polygamma``, which the program itself calls; relative, and absolute.
NOISE, ABSOLUTE = 320.0, 4.0
ROOM = 1 + 1e-9


def derivatives(x: Any, orders: range) -> list[tuple[Any, Any]]:
    """``ψ⁽ᵐ⁾(x)`` for some m and bounds of the errors of series and rounding; x must be positive."""
    w, sums = 1 / (x + SHIFT), [jnp.zeros_like(x) for _ in orders]
    for k in range(SHIFT):
        r = 1 / (x + k)
        power = r ** (orders[0] + 1)
        for i in range(len(orders)):
            sums[i] = sums[i] + power
            power = power * r
    return [_first(x, w, s) if m == 0 else _higher(m, w, s) for m, s in zip(orders, sums, strict=True)]


def _first(x, w, shifted):
    """``ψ``: the subtracted sum may be larger than the result."""
    terms = [b / (2 * j) for j, b in enumerate(BERNOULLI, 1)]
    logs = jnp.log(x + SHIFT)
    value = logs - (0.5 * w + _even(terms, w)) - shifted
    left = NEXT_BERNOULLI / (2 * len(BERNOULLI) + 2) * w ** (2 * len(BERNOULLI) + 2) * ROOM
    return value, left + unit(x) * (NOISE * (jnp.abs(logs) + shifted) + ABSOLUTE) + TINY


def _higher(m: int, w, shifted):
    """``ψ⁽ᵐ⁾`` for m ≥ 1."""
    terms = [b * _ratio(j, m) for j, b in enumerate(BERNOULLI, 1)]
    power = w**m
    series = power * (math.factorial(m - 1) + 0.5 * math.factorial(m) * w + _even(terms, w))
    size = math.factorial(m) * shifted + series
    j = len(BERNOULLI) + 1
    left = NEXT_BERNOULLI * _ratio(j, m) * power * w ** (2 * j) * ROOM
    return (-1.0) ** (m + 1) * size, left + unit(w) * (NOISE * size + ABSOLUTE) + TINY


def _ratio(j: int, m: int) -> float:
    return math.factorial(2 * j + m - 1) / math.factorial(2 * j)


def _even(terms: list[float], w):
    """``Σ_j terms[j] w^{2j}``, from j = 1."""
    square = w * w
    total = jnp.full_like(w, terms[-1])
    for term in terms[-2::-1]:
        total = term + square * total
    return total * square


def about(first: int, x: Any, far: Any, order: int) -> tuple[list[Any], list[Any], Any]:
    """``f_k`` of ``f = ψ⁽ⁿ⁾``, n = first, or ``log Γ`` for n = −1, at x; their errors; a bound of the next on the range."""
    least = x - far
    inside = least > 0
    low = jnp.where(inside, least, 1.0)
    orders = range(max(first, 0), first + order + 1)
    found = derivatives(jnp.where(inside, x, 1.0), orders)
    if first < 0:
        logs = lax.lgamma(x)
        found = [(logs, unit(x) * (NOISE * jnp.abs(logs) + ABSOLUTE) + TINY), *found]
    values = [value / math.factorial(k) for k, (value, _) in enumerate(found)]
    errors = [error * ROOM / math.factorial(k) for k, (_, error) in enumerate(found)]
    # The size of ``ψ⁽ᵐ⁾`` falls for m ≥ 1.
    (top, left), *_ = derivatives(low, range(first + order + 1, first + order + 2))
    beyond = (jnp.abs(top) + left) * ROOM / math.factorial(order + 1)
    return values, errors, jnp.where(inside, beyond, jnp.inf)
