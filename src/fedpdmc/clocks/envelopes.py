"""Bounds of a site's rates on a piece of its path, and what the costs of clocks are estimated from.

All costs are in one unit, gradients of the site's potential per unit of process time on one chain, so that
`fedpdmc.clocks.choose` can compare them.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fedpdmc._jax.compilation import on_device
from fedpdmc.dynamics import Dynamics
from fedpdmc.potentials import Potential, RateBound, Sum, program_of, records_of
from fedpdmc.potentials.base import ROTATION_REACH, Field
from fedpdmc.potentials.clipped_gradient_potential import ClippedRecords

# The price of a cell that is bounded by the records, in gradients of theirs: five products with the design for two.
CELL_PRICE = 2.5
# Operations of a draw, and those of a record apart from the products of its gradient.
DRAW_WORK, RECORD_WORK = 1000.0, 30.0
# Seed of the states at which costs are estimated.
STATES_SEED = 7_320_508_075


def usual_states(dynamics: Dynamics, dim: int, count: int) -> tuple[Float[Array, "n d"], Float[Array, "n d"]]:
    """Positions and velocities of the reference.

    The seed is an unusual one: records simulated with the same seed would be the same numbers.
    """
    a, v = np.random.default_rng(STATES_SEED).standard_normal((2, count, dim))
    return on_device(a), on_device(np.sign(v) if dynamics.unit_speed else v)


def affine_load(
    value: Float[Array, "*C k"], slope: Float[Array, "*C k"], length: Float[Array, "*C"]
) -> Float[Array, "*C"]:
    """The integral of ``(value + slope s)_+`` over a cell, of all marks."""
    h = length[..., None]
    start, end = jnp.maximum(value, 0.0), jnp.maximum(value + slope * h, 0.0)
    highest = jnp.maximum(jnp.maximum(start, end), 1e-300)
    part = jnp.where((start > 0) & (end > 0), start + end, highest**2 / jnp.maximum(jnp.abs(slope * h), 1e-300))
    return jnp.sum(0.5 * h * part, -1)


def reach_of(load: Float[Array, "*C"], length: Float[Array, "*C"]) -> Float[Array, "*C"]:
    """How far a cell is walked on average, to its end or to the first candidate, if bounds have the integral Λ over it.

    Nearly ``length (1 − e^{−Λ})/Λ``.
    """
    return length * jnp.where(load > 1e-6, -jnp.expm1(-load) / jnp.maximum(load, 1e-6), 1.0)


def cell_length(bound: RateBound) -> Float[Array, " C"]:
    """The length h that minimises ``1/h + ¼ k h²``: cells a unit of time, and candidates that only the chord adds.

    Any choice that depends only on the anchor is exact.
    """
    return jnp.cbrt(2 / jnp.maximum(jnp.sum(bound.curve, -1), 1e-300))


def gradient_work(potential: Potential) -> float:
    """Operations of a gradient of a sum over records, roughly."""
    records = records_of(potential)
    assert records is not None
    return 4.0 * records.design.size + RECORD_WORK * records.design.shape[0]


# Quadratic bounds of rates ---------------------------------------------------------------------------------------------


# Certified second-order bounds of a site's rates on a piece of a path.

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


def exact_rates(
    dynamics: Dynamics, potential: Potential, a: Float[Array, "C d"], v: Float[Array, "C d"]
) -> tuple[Float[Array, "C d"], Float[Array, "C k"]]:
    """The gradient and the signed rates; a program's reflections forward through it, as its bounds have them."""
    gradient = potential.gradients(a)
    if program_of(potential) is not None and not dynamics.flips:
        return gradient, potential.speeds(a, v)
    return gradient, signed_rates(dynamics, gradient, v)


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

    Clipped records bound their rates themselves; the bounds of a sum add.
    """
    rotating, flips = dynamics.flow.rotating, dynamics.flips
    if isinstance(potential, ClippedRecords):
        return Evaluation(*exact_rates(dynamics, potential, a, v), potential.bound(rotating, a, ahead))
    if isinstance(potential, Sum) and any(isinstance(term, ClippedRecords) for term in potential.terms):
        parts = [evaluate(dynamics, term, a, v, ahead) for term in potential.terms]
        return functools.reduce(_joined, parts)
    field = potential.field(rotating, flips, a, ahead)
    return Evaluation(field.gradient, signed_rates(dynamics, field.gradient, v), certified(dynamics, field, a, ahead))


def _joined(one: Evaluation, other: Evaluation) -> Evaluation:
    return Evaluation(one.gradient + other.gradient, one.rates + other.rates, one.bound + other.bound)
