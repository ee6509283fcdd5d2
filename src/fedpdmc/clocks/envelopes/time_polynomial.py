"""An envelope of a program on intervals of a path: its rates as polynomials of time with a proved error."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fedpdmc._jax.by_numpy import once
from fedpdmc._jax.compilation import computed_first, on_device
from fedpdmc.clocks.envelopes.base import (
    INTERVAL_PRICE,
    MOST_ADDED,
    IntervalEnvelope,
    IntervalRates,
    bernstein,
    reach_of,
    usual_states,
)
from fedpdmc.clocks.envelopes.quadratic_rate_bound import RELATIVE_SLACK
from fedpdmc.dynamics import Dynamics
from fedpdmc.errors import NoEnclosure
from fedpdmc.potentials import Potential, Program

# Points at which the envelope is tried out, the lengths that are tried, the first of them, and the order. With order three
# softmax, eight schools and hierarchical logistic took 9 to 19 % more processor time to 1,000 effective samples.
TRIALS, LENGTHS, FIRST, ORDER = 32, 2.0 ** np.arange(2, -8, -0.5), 6, 2
# Where the error allows no intervals longer than this, polynomials of a higher order are tried, and used if their intervals
# are longer by the ratio of the prices. Recursions and factors of matrices are of this kind: with 12 places of a Gaussian
# process intervals are 10 times as long and take 3.5 times the work, with 30 Euler steps 8 and 2 times.
SHORT, HIGH_ORDER, PRICE_OF_ORDER = 0.1, 6, 2.5
# How far from the centre the points are, in units of the reference.
SPREADS = (1.0, 2.0)


class TimePolynomial(IntervalEnvelope):
    """Any program that Taylor models can follow (`fedpdmc.enclosures.taylor_models.taylor_model`).

    On an interval of length h the signed rate is ``p(s) ± e``. With Bernstein coefficients ``β_k`` of p, of degree m, it
    lies below ``β_0 + c s + e`` for ``c = max_k (β_k − β_0) m/(k h)``, since a straight line has the coefficients
    ``β_0 + c k h/m``.
    """

    domain: ClassVar[str] = "polynomials of time with a proved error (Taylor models)"

    usual: Float[Array, ""]
    order: int = eqx.field(static=True, default=ORDER)

    def rates(self, potential, dynamics, a, v, h):
        """The rates by Taylor models."""
        found = potential.curves(dynamics.flow.rotating, dynamics.flips, a.T, v.T, h, self.order)
        # Many numbers of a walk depend on these few, and each would repeat all operations of the program.
        parts, error = computed_first(found, number=h)
        slack = RELATIVE_SLACK * sum(map(jnp.abs, parts))
        error = error + slack
        nodes, matrix = bernstein(self.order)
        from_powers = matrix @ (2 * nodes[:, None] - 1) ** np.arange(self.order + 1)
        start, *others = (sum(c * part for c, part in zip(row, parts, strict=True)) for row in from_powers)
        rises = [(beta - start) * (self.order / k) for k, beta in enumerate(others, 1)]
        rise = functools.reduce(jnp.maximum, rises) + slack
        rates = IntervalRates(parts, error, start + error, rise / h, h)
        return rates, jnp.sum(error + 0.0 * (rates.value + rates.slope), 0) * h

    def cost(self, potential, dynamics):
        """The envelope once for each interval."""
        assert isinstance(potential, Program)
        tried = _tried(potential.without_rounding(), dynamics, *usual_states(dynamics, potential.dim, TRIALS), self)
        price = INTERVAL_PRICE * (PRICE_OF_ORDER if self.order > ORDER else 1.0)
        return price / max(float(np.mean(np.asarray(tried.reach))), 1e-300)


class Tried(NamedTuple):
    """At each point: how far an interval reaches, and error and rate per unit of velocity and ``1 + |a|``."""

    reach: Float[Array, " n"]
    error: Float[Array, " n"]
    rate: Float[Array, " n"]


def time_polynomial(program: Program, dynamics: Dynamics) -> tuple[TimePolynomial, Program] | None:
    """The envelope with the order and the length of intervals of least cost, if Taylor models exist for the program.

    The program is returned too, with the rounding of its rates: the error of an interval of length zero.
    """
    points, bare = _trials(dynamics, program.dim), program.without_rounding()

    def tried(length: float, order: int = ORDER) -> Tried:
        return _tried(bare, dynamics, *points, TimePolynomial(on_device(length), order))

    def reach(length: float, order: int = ORDER) -> float:
        return float(np.mean(np.asarray(tried(length, order).reach)))

    try:
        still = tried(0.0)
    except NoEnclosure:
        return None
    error, rate = (np.asarray(x)[: TRIALS // len(SPREADS)] for x in (still.error, still.rate))
    (length, far), order = _best_length(reach), ORDER
    if length < SHORT:
        longer, farther = _best_length(functools.partial(reach, order=HIGH_ORDER))
        if farther > PRICE_OF_ORDER * far:
            length, order = longer, HIGH_ORDER
    return TimePolynomial(on_device(length), order), program.with_rounding(error, rate)


def _best_length(reach: Callable[[float], float]) -> tuple[float, float]:
    """The length of `LENGTHS` with the longest reach, with that reach: by steps to better neighbours, first by two."""
    known: dict[int, float] = {}

    def reach_at(place: int) -> float:
        if place not in known:
            known[place] = reach(float(LENGTHS[place])) if 0 <= place < len(LENGTHS) else -np.inf
        return known[place]

    best = FIRST
    for stride in (2, 1):
        while reach_at(best) <= 0 and best + stride < len(LENGTHS):
            best += stride
        better = best
        while better is not None:
            best, better = (
                better,
                next((p for p in (best + stride, best - stride) if reach_at(p) > reach_at(best)), None),
            )
    return float(LENGTHS[best]), reach_at(best)


def _trials(dynamics: Dynamics, dim: int) -> tuple[Float[Array, "n d"], Float[Array, "n d"]]:
    """Positions spread as the reference and wider, and velocities."""
    # An unusual seed: points that equal simulated data may lie on kinks, where the error says nothing about rounding.
    rng = np.random.default_rng(0x74726961)
    spread = np.repeat(SPREADS, -(-TRIALS // len(SPREADS)))[:TRIALS, None]
    a, v = spread * rng.standard_normal((TRIALS, dim)), rng.standard_normal((TRIALS, dim))
    return on_device(a), on_device(np.sign(v) if dynamics.unit_speed else v)


@once
def _tried(program: Potential, dynamics: Dynamics, a, v, envelope: TimePolynomial) -> Tried:
    """Reach to the end of an interval or to the first candidate, zero if it must be cut; with its error and rate."""
    size = jnp.linalg.norm(v, axis=-1) * (1 + jnp.linalg.norm(a, axis=-1))
    h = jnp.broadcast_to(envelope.usual, a.shape[:1])
    rates, added = envelope.rates(program, dynamics, a, v, h)
    reach = jnp.where(added <= MOST_ADDED, reach_of(rates.value.T, rates.slope.T, h), 0.0)
    return Tried(reach, jnp.max(rates.error, 0) / size, jnp.max(jnp.abs(rates.parts[0]), 0) / size)
