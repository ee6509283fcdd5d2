"""Certified second-order bounds of a site's rates on a piece of a path."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from fedpdmc.dynamics import Dynamics
from fedpdmc.potentials import Potential, Program, Shared, Sum
from fedpdmc.potentials.base import ROTATION_REACH, Field, RateBound
from fedpdmc.potentials.clipped_gradient_potential import ClippedRecords

RELATIVE_SLACK = 1e-9
POSITION_SLACK = 1e-13


class Evaluation(NamedTuple):
    """The result of one pass over the records: the gradient, the signed rates, and a bound of them from here on."""

    gradient: Float[Array, "C d"]
    rates: Float[Array, "C k"]
    bound: RateBound


def signed_rates(dynamics: Dynamics, gradient: Float[Array, "C d"], v: Float[Array, "C d"]) -> Float[Array, "C k"]:
    """``v_i G_i`` by coordinate for flips, ``v·G`` for reflections."""
    return v * gradient if dynamics.flips else jnp.sum(v * gradient, -1, keepdims=True)


def taylor(dynamics: Dynamics, field: Field, a: Float[Array, "C d"], v: Float[Array, "C d"]) -> RateBound:
    """Second-order Taylor bound of the signed rates, without slack.

    A flip's signed rate is ``r = v_i(s) G_i(s)``. On lines ``r' = v_i G_i'`` and ``r'' = v_i G_i''``. On rotations
    ``r' = −a_i G_i + v_i G_i'`` and ``r'' = −r − 2 a_i G_i' + v_i G_i''``, with ``|r|`` bounded by its own expansion. A
    reflection's is ``f' = d/ds U(a(s))``, whose derivatives the potential bounds itself.
    """
    value = signed_rates(dynamics, field.gradient, v)
    if not dynamics.flips:
        return RateBound(value, field.slope, field.curve, field.reach)
    if not dynamics.flow.rotating:
        return RateBound(value, v * field.slope, jnp.abs(v) * field.curve, field.reach)
    reach = jnp.minimum(field.reach, ROTATION_REACH)
    turn, amplitude = reach[:, None], jnp.hypot(a, v)
    slope = v * field.slope - a * field.gradient
    fastest = jnp.minimum(amplitude, jnp.abs(v) + turn * jnp.abs(a))
    farthest = jnp.minimum(amplitude, jnp.abs(a) + turn * jnp.abs(v))
    rest = 2 * farthest * (jnp.abs(field.slope) + turn * field.curve) + fastest * field.curve
    curve = (rest + jnp.abs(value) + turn * jnp.abs(slope)) / (1 - turn**2 / 2)
    return RateBound(value, slope, curve, reach)


def certified(dynamics: Dynamics, field: Field, a: Float[Array, "C d"], v: Float[Array, "C d"]) -> RateBound:
    """`taylor` with room for rounding: of the sums over records, of the position, and relatively of all terms."""
    bound = taylor(dynamics, field, a, v)
    size = 1 + jnp.max(jnp.abs(a), -1, keepdims=True)
    speed = jnp.sum(jnp.abs(v), -1, keepdims=True)
    rounding = field.slack[:, None] * speed + POSITION_SLACK * size * jnp.abs(bound.slope)
    return RateBound(
        bound.value + RELATIVE_SLACK * jnp.abs(bound.value) + rounding,
        bound.slope + RELATIVE_SLACK * jnp.abs(bound.slope),
        bound.curve * (1 + RELATIVE_SLACK),
        bound.reach,
    )


def evaluate(dynamics: Dynamics, potential: Potential, a, v, ahead) -> Evaluation:
    """The rates at ``(a, v)``, and their certified bound from ``(a, ahead)`` on.

    A program bounds its rates itself; the bounds of a sum add.
    """
    rotating, flips = dynamics.flow.rotating, dynamics.flips
    if isinstance(potential, ClippedRecords):
        gradient = potential.gradients(a)
        return Evaluation(gradient, signed_rates(dynamics, gradient, v), potential.bound(rotating, a, ahead))
    if isinstance(potential, Program):
        gradient = potential.gradients(a)
        rates = signed_rates(dynamics, gradient, v) if flips else potential.speeds(a, v)
        return Evaluation(gradient, rates, potential.bound(rotating, flips, a, ahead))
    if isinstance(potential, Sum) and any(isinstance(term, (Program, ClippedRecords)) for term in potential.terms):
        parts = [evaluate(dynamics, term, a, v, ahead) for term in potential.terms]
        return functools.reduce(_joined, parts)
    if isinstance(potential, Shared) and isinstance(potential.records, Program):
        part = potential.prior_field(rotating, flips, a, ahead)
        prior = Evaluation(part.gradient, signed_rates(dynamics, part.gradient, v), certified(dynamics, part, a, ahead))
        return _joined(evaluate(dynamics, potential.records, a, v, ahead), prior)
    field = potential.field(rotating, flips, a, ahead)
    return Evaluation(field.gradient, signed_rates(dynamics, field.gradient, v), certified(dynamics, field, a, ahead))


def _joined(one: Evaluation, other: Evaluation) -> Evaluation:
    return Evaluation(one.gradient + other.gradient, one.rates + other.rates, one.bound + other.bound)
