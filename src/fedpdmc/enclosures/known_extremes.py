"""Ranges on intervals of functions of one number whose extremes are known."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax

from fedpdmc.enclosures.cell_values import Interval


def rising(f: Callable) -> Callable[[Interval], Interval]:
    """The range of a function that does not fall."""
    return lambda x: Interval(f(x.lo), f(x.hi))


def falling(f: Callable) -> Callable[[Interval], Interval]:
    """The range of a function that does not rise."""
    return lambda x: Interval(f(x.hi), f(x.lo))


def with_peaks(f: Callable, *peaks: tuple[float, float]) -> Callable[[Interval], Interval]:
    """The range of a function monotone between its extremes, each given as ``(where, value)``."""

    def found(x: Interval) -> Interval:
        one, other = f(x.lo), f(x.hi)
        lo, hi = jnp.minimum(one, other), jnp.maximum(one, other)
        for where, value in peaks:
            inside = (x.lo <= where) & (where <= x.hi)
            lo = jnp.where(inside, jnp.minimum(lo, value), lo)
            hi = jnp.where(inside, jnp.maximum(hi, value), hi)
        return Interval(lo, hi)

    return found


def on_positive(inner: Callable[[Interval], Interval], least: float = 0.0) -> Callable[[Interval], Interval]:
    """A range that is everything unless the argument is above ``least``."""

    def found(x: Interval) -> Interval:
        good = x.lo > least
        inside = inner(Interval(jnp.where(good, x.lo, least + 1.0), jnp.where(good, x.hi, least + 1.0)))
        return Interval(jnp.where(good, inside.lo, -jnp.inf), jnp.where(good, inside.hi, jnp.inf))

    return found


def apart_from_zero(inner: Callable[[Interval], Interval], x: Interval) -> Interval:
    """A range on either side of zero; everything if zero is inside."""
    good = (x.lo > 0) | (x.hi < 0)
    inside = inner(Interval(jnp.where(good, x.lo, 1.0), jnp.where(good, x.hi, 1.0)))
    return Interval(jnp.where(good, inside.lo, -jnp.inf), jnp.where(good, inside.hi, jnp.inf))


def negated(inner: Callable[[Interval], Interval]) -> Callable[[Interval], Interval]:
    """The range of minus the function."""

    def found(x: Interval) -> Interval:
        y = inner(x)
        return Interval(-y.hi, -y.lo)

    return found


def sine(x: Interval) -> Interval:
    """Peaks at ``π/2 + 2πk``, troughs at ``−π/2 + 2πk``; very wide or far intervals give everything."""

    def holds(at):
        return jnp.floor((x.hi - at) / (2 * jnp.pi) + 1e-9) >= jnp.ceil((x.lo - at) / (2 * jnp.pi) - 1e-9)

    far = x.magnitude > 1e6
    one, other = jnp.sin(x.lo), jnp.sin(x.hi)
    hi = jnp.where(holds(jnp.pi / 2) | far, 1.0, jnp.maximum(one, other))
    lo = jnp.where(holds(-jnp.pi / 2) | far, -1.0, jnp.minimum(one, other))
    return Interval(lo, hi)


def cosine(x: Interval) -> Interval:
    """As `sine`, shifted by a quarter period."""
    shift = jnp.pi / 2
    return sine(Interval(x.lo + shift, x.hi + shift)).widened(1.0)


def power_range(n: int) -> Callable[[Interval], Interval]:
    """The range of ``x**n`` for an integer n."""

    def inverse(x: Interval) -> Interval:
        apart = (x.lo > 0) | (x.hi < 0)
        found = power_range(-n)(Interval(jnp.where(apart, x.lo, 1.0), jnp.where(apart, x.hi, 1.0)))
        return Interval(jnp.where(apart, 1 / found.hi, -jnp.inf), jnp.where(apart, 1 / found.lo, jnp.inf))

    if n < 0:
        return inverse
    if n == 0:
        return lambda x: Interval(jnp.ones_like(x.lo), jnp.ones_like(x.hi))
    if n % 2:
        return rising(lambda x: lax.integer_pow(x, n))

    def even(x: Interval) -> Interval:
        least, most = jnp.maximum(jnp.maximum(x.lo, -x.hi), 0.0), x.magnitude
        return Interval(lax.integer_pow(least, n), lax.integer_pow(most, n))

    return even
