"""Envelopes: bounds of a site's rates that cost less than a pass over its records or a call of its program.

Thinning draws candidates under a bound and accepts each with probability rate over bound. The law of the events depends
on the rate alone, as long as the bound holds; so an envelope changes only the work. There are three kinds:

`PointEnvelope`
    Gives the rates at a point up to a proved error, a squeeze that decides most candidates, and bounds them by an
    affine function from there on (`fedpdmc.clocks.cell_thinning`).
`IntervalEnvelope`
    Gives the rates on an interval of the path as polynomials of time up to a proved error, again a squeeze
    (`fedpdmc.clocks.interval_thinning`).
`SegmentEnvelope`
    Gives a constant that holds on a segment and a sharper bound at a point (`fedpdmc.clocks.segment_thinning`).

All costs are in one unit, gradients of the site's potential per unit of process time on one chain, so that
`fedpdmc.clocks.choose` can compare them.
"""

from __future__ import annotations

import abc
import functools
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from fedpdmc._jax.compilation import on_device
from fedpdmc.dynamics import Dynamics
from fedpdmc.potentials import Potential, RateBound, records_of
from fedpdmc.potentials.chebyshev import bernstein_basis

# An interval to which the error adds more candidates than this is of no use.
MOST_ADDED = 0.5
# Rough prices in gradients of a program: of a polynomial of the position at a point, of an interval with polynomials of
# time, of a cell that is enclosed in series; and of a unit of time in such cells.
POINT_PRICE, INTERVAL_PRICE, PROGRAM_CELL_PRICE, PROGRAM_CELLS = 1 / 3, 4.0, 32.0, 33.0
# The price of a cell that is bounded by the records, in gradients of theirs: five products with the design for two.
CELL_PRICE = 2.5
# Operations of a draw, and those of a record apart from the products of its gradient.
DRAW_WORK, RECORD_WORK = 1000.0, 30.0
# Seed of the states at which costs are estimated.
STATES_SEED = 7_320_508_075


class Envelope(eqx.Module):
    """A cheap bound of a site's rates.

    Attributes
    ----------
    domain : str
        How event times are drawn with it, in words.
    """

    domain: ClassVar[str]

    @abc.abstractmethod
    def cost(self, potential: Potential, dynamics: Dynamics) -> float:
        """Gradients per unit of process time, if the posterior is like the reference."""


class Known(NamedTuple):
    """The gradient at some positions as an envelope approximates it, its error with rounding, and intermediate results."""

    position: Float[Array, "C d"]
    gradient: Float[Array, "C d"]
    error: Float[Array, "C d"]
    parts: Any = None


class PointEnvelope(Envelope):
    """Flips on lines, for gradients that are nearly a polynomial where the process goes.

    Attributes
    ----------
    position_decides : bool
        Whether it depends on the position alone where the envelope can be used.
    """

    position_decides: ClassVar[bool]

    @abc.abstractmethod
    def known(self, a: Float[Array, "C d"]) -> Known:
        """The gradient up to a proved error: the squeeze."""

    @abc.abstractmethod
    def bounded(self, dynamics: Dynamics, known: Known, v: Float[Array, "C d"]) -> tuple[RateBound, Bool[Array, " C"]]:
        """The bound with this velocity from there on, and where it can be used."""


class IntervalRates(eqx.Module):
    """The signed rates on an interval: polynomials of ``τ = 2s/length − 1``, their error, and affine bounds of them in s.

    In columns, one for each chain; in rows where some chains are picked out.
    """

    parts: tuple[Float[Array, ...], ...]
    error: Float[Array, ...]
    value: Float[Array, ...]
    slope: Float[Array, ...]
    length: Float[Array, " C"]

    def at(self, mark: Int[Array, " C"], s: Float[Array, " C"]) -> tuple[Float[Array, " C"], ...]:
        """For each chain's mark at time s: the polynomial by Horner's rule, its error, and the bound."""

        def of(rates):
            return jnp.take_along_axis(rates, mark[None], 0)[0]

        tau, parts = 2 * s / self.length - 1, [of(part) for part in self.parts]
        rate = parts[-1]
        for part in parts[-2::-1]:
            rate = part + tau * rate
        return rate, of(self.error), of(self.value) + of(self.slope) * s


class IntervalEnvelope(Envelope):
    """Polynomials of time on intervals of the path.

    Attributes
    ----------
    usual : ()
        The length of an interval that is tried first.
    order : int
        Degree of the polynomials.
    """

    usual: eqx.AbstractVar[Float[Array, ""]]
    order: eqx.AbstractVar[int]

    @abc.abstractmethod
    def rates(
        self, potential: Any, dynamics: Dynamics, a: Float[Array, "C d"], v: Float[Array, "C d"], h: Float[Array, " C"]
    ) -> tuple[IntervalRates, Float[Array, " C"]]:
        """The rates from there on, and how many candidates the error adds; not finite where there is no bound."""


class SegmentEnvelope(Envelope):
    """Constants on segments, and a sharper bound at a point."""

    @abc.abstractmethod
    def constants(
        self, dynamics: Dynamics, a: Float[Array, "*C d"], v: Float[Array, "*C d"], remaining: Float[Array, "*C"]
    ) -> tuple[Float[Array, "*C k"], Float[Array, "*C"]]:
        """Bounds of the rates by mark that hold for a while, at most ``remaining``, and for how long."""

    @abc.abstractmethod
    def bound(self, dynamics: Dynamics, a: Float[Array, "C d"], v: Float[Array, "C d"]) -> Float[Array, "C k"]:
        """A bound of the rate of every mark at ``(a, v)``, never above the constants of a cell that it lies in."""

    def least(self, dynamics: Dynamics, a: Float[Array, "C d"], v: Float[Array, "C d"]) -> Float[Array, "C k"] | None:
        """A lower bound of the signed rate of every mark, if one is known: a computed rate below it is a fault."""
        return None


def usual_states(dynamics: Dynamics, dim: int, count: int) -> tuple[Float[Array, "n d"], Float[Array, "n d"]]:
    """Positions and velocities of the reference.

    The seed is an unusual one: records simulated with the same seed would be the same numbers.
    """
    a, v = np.random.default_rng(STATES_SEED).standard_normal((2, count, dim))
    return on_device(a), on_device(np.sign(v) if dynamics.unit_speed else v)


def reach_of(
    value: Float[Array, "*C k"], slope: Float[Array, "*C k"], length: Float[Array, "*C"]
) -> Float[Array, "*C"]:
    """How far a cell is walked on average: to its end, or to the first candidate of ``(value + slope s)_+``.

    With Λ the integral of the bounds over the cell, nearly ``length (1 − e^{−Λ})/Λ``.
    """
    h = length[..., None]
    start, end = jnp.maximum(value, 0.0), jnp.maximum(value + slope * h, 0.0)
    highest = jnp.maximum(jnp.maximum(start, end), 1e-300)
    part = jnp.where((start > 0) & (end > 0), start + end, highest**2 / jnp.maximum(jnp.abs(slope * h), 1e-300))
    load = jnp.sum(0.5 * h * part, -1)
    return length * jnp.where(load > 1e-6, -jnp.expm1(-load) / jnp.maximum(load, 1e-6), 1.0)


@functools.cache
def bernstein(degree: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes on [0, 1], and the matrix from values of a polynomial there to its Bernstein coefficients."""
    nodes = 0.5 - 0.5 * np.cos(np.pi * np.arange(degree + 1) / degree)
    return nodes, np.linalg.inv(bernstein_basis(nodes, degree))


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
