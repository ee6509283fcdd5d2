"""Derivatives of a potential along a path, by automatic differentiation: what its own formulas are held against."""

import functools
import itertools

import jax
import jax.numpy as jnp

# What is computed here is compared to many digits, not to the last bit: compile it fast.
FAST = {"xla_backend_optimization_level": 0}


@functools.partial(jax.jit, compiler_options=FAST)
def fields(potential, a, v):
    """``Potential.field`` by (rotating, flips)."""
    kinds = itertools.product((False, True), repeat=2)
    return {(rotating, flips): potential.field(rotating, flips, a, v) for rotating, flips in kinds}


def position(rotating, a, v, s):
    """``a(s)`` on a line or a rotation."""
    return a * jnp.cos(s) + v * jnp.sin(s) if rotating else a + v * s


def series(function, order):
    """``(f, f', …)`` up to ``order`` as one function of a number."""
    if order == 0:
        return lambda s: (function(s),)
    before = series(function, order - 1)

    def all_of(s):
        now, change = jax.jvp(before, (s,), (1.0,))
        return (*now, change[-1])

    return all_of


@functools.partial(jax.jit, compiler_options=FAST)
def derivatives(potential, x):
    """``∇U`` and ``∇²U`` at points (C, d): by the potential, then by automatic differentiation of its value."""
    own = jax.vmap(potential.gradient)(x), jax.vmap(potential.hessian)(x)
    return own, (jax.vmap(jax.grad(potential.value))(x), jax.vmap(jax.hessian(potential.value))(x))


@functools.partial(jax.jit, static_argnames="rotating", compiler_options=FAST)
def along(potential, rotating, a, v, s):
    """``∇U(a(s))`` and two derivatives in s, then ``U(a(s))`` and three: for chains (C, d) and times (C, n)."""

    def one(a_, v_, t):
        gradient = series(lambda u: jax.grad(potential.value)(position(rotating, a_, v_, u)), 2)(t)
        return gradient, series(lambda u: potential.value(position(rotating, a_, v_, u)), 3)(t)

    return jax.vmap(jax.vmap(one, (None, None, 0)))(a, v, s)


def times_within(reach, n, longest=2.0):
    """``n`` times from zero to the end of each chain's reach: shape (C, n)."""
    return jnp.minimum(reach, longest)[:, None] * jnp.linspace(0.0, 1.0, n)
