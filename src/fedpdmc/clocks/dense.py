"""Which curves of all records a clock walks with (`fedpdmc.potentials.dense_rates`), and what they cost."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from fedpdmc._jax.by_numpy import once
from fedpdmc._jax.compilation import on_device
from fedpdmc.clocks.envelopes import usual_states
from fedpdmc.clocks.thinning import CurveClock, SegmentClock
from fedpdmc.dynamics import QUARTER, Dynamics
from fedpdmc.potentials import LinearPredictor, Logistic, Potential
from fedpdmc.potentials.dense_rates import (
    BLOCK,
    DEGREES,
    ROOM,
    ROUNDOFF,
    InterpolatedCurves,
    LogisticCurves,
    RecordCurves,
    blocking,
    count_records,
    ellipses,
    interpolated_curves,
    local_terms,
    logistic_curves,
    logistic_terms,
    summands,
)  # fmt: skip

NODES, PARTS = (4, 5, 6, 7, 8, 9, 10, 12), (1, 2, 3, 4)
# By how much the nodes of a piece may differ from the degree.
NODES_BESIDE = (-1, 2)
# Unequal sites are stacked, and so compiled once, if padding multiplies the records by no more than this, or if there are no
# more than so many with it. They are cut into blocks of so many records; empty blocks are passed over.
MOST_STACKED, FEW_STACKED, SMALL_BLOCK = 4, 2**14, 64
# States and records at which the error is worked out, and states at which the rate is.
STATES, RECORDS, RATES = 64, 256, 16


class Prices(NamedTuple):
    """Nanoseconds on one chain; where they are not given, as measured on one core of a server."""

    piece: float = 700.0  # of a piece, apart from its records
    product: float = 0.05  # of a record on a piece, for each parameter
    node: float = 0.12  # of a record on a piece, for each node
    step: float = 0.03  # of a record on a piece, for each node and degree
    logistic: float = 0.7  # of a record on a piece, for each node where the logistic function is evaluated
    record: float = 2.5  # of a gradient in 64 bits, for each record
    column: float = 0.13  # of a gradient in 64 bits, for each record and parameter
    gradient: float = 8000.0  # of a gradient in 64 bits, the rest
    time: float = 4000.0  # of a unit of process time of one site with another clock: plans, bounds, chains that wait


# An H200 with thousands of chains.
ON_GPU = Prices(5.0, 1e-4, 5e-4, 2e-4, 2e-3, 0.01, 4e-4, 100.0, 1e5)


class Setting(NamedTuple):
    """A degree (zero: the logistic function itself), nodes, parts of a quarter turn, and nanoseconds per unit of time."""

    degree: int
    nodes: int
    parts: int
    cost: float


def prices() -> Prices:
    """Prices for the device that JAX uses."""
    return Prices() if jax.default_backend() == "cpu" else ON_GPU


def gradient_price(potential: LinearPredictor) -> float:
    """Nanoseconds of a gradient."""
    own = prices()
    records, dim = potential.design.shape
    return own.gradient + records * (own.record + own.column * dim)


def cubic_price(dim: int) -> float:
    """Nanoseconds per unit of process time of a site's third order in lockstep, apart from its gradients.

    A segment is a piece, for which the tensor is multiplied three times. It has been tried on processors only.
    """
    own = prices()
    return (own.piece + 3 * own.column * dim**3) / QUARTER if jax.default_backend() == "cpu" else math.inf


def fits(potential: Potential) -> TypeGuard[LinearPredictor]:
    """Whether a potential has a dense clock."""
    return (
        isinstance(potential, LinearPredictor) and not potential.diagonal and bool(np.any(np.asarray(potential.design)))
    )


def pooled(potentials: Sequence[LinearPredictor]) -> LinearPredictor:
    """The records of all sites as one potential, to choose a setting for."""

    def joined(name: str, axis: int):
        parts = [np.asarray(getattr(potential, name)) for potential in potentials]
        return on_device(np.concatenate(parts, axis))

    control = None if potentials[0].control is None else joined("control", 1)
    weight = None
    if any(potential.weight is not None for potential in potentials):
        parts = [np.ones(x.records) if x.weight is None else np.asarray(x.weight) for x in potentials]
        weight = on_device(np.concatenate(parts))
    return LinearPredictor(
        joined("design", 0), joined("offset", 0), joined("response", 0), potentials[0].loss, control, weight=weight
    )  # fmt: skip


def dense_clocks(
    potentials: Sequence[LinearPredictor], dynamics: Dynamics, setting: Setting, chains: int
) -> list[CurveClock]:
    """The clocks of a setting; those of potentials of one shape have one shape."""
    wide, unequal, counts = jax.default_backend() != "cpu", len({x.design.shape for x in potentials}) > 1, {}
    potentials = potentials if wide else _stackable(potentials)
    for potential in potentials:
        shape = potential.design.shape
        counts[shape] = max(counts.get(shape, 0), count_records(potential))
    made, length = [], QUARTER / setting.parts
    for potential in potentials:
        most = counts[potential.design.shape]
        if unequal and len(counts) == 1:
            blocks = (math.ceil(most / SMALL_BLOCK), SMALL_BLOCK)
        else:
            blocks = blocking(most, wide, chains)
        if setting.degree:
            curves: RecordCurves = interpolated_curves(potential, setting.degree, setting.nodes, length, blocks, wide)
        else:
            curves = logistic_curves(potential, setting.nodes, length, blocks, wide)
        made.append(CurveClock(potential, dynamics, curves, jnp.asarray(length)))
    return made


def cubic_clock(clock: SegmentClock) -> CurveClock:
    """The clock of a third order in lockstep: its polynomial of time on whole segments in place of constants."""
    return CurveClock(clock.potential, clock.dynamics, clock.envelope, jnp.asarray(QUARTER))


def _stackable(potentials: Sequence[LinearPredictor]) -> Sequence[LinearPredictor]:
    """Potentials of one shape and structure, where that adds few records to pass over."""
    records = [potential.design.shape[0] for potential in potentials]
    largest = max(records)
    if len(set(records)) == 1 or len(records) * largest > max(MOST_STACKED * sum(records), FEW_STACKED):
        return potentials
    cubic = all(potential.cubic is not None for potential in potentials)
    padded = [potential.padded(largest) for potential in potentials]
    return padded if cubic else [dataclasses.replace(potential, cubic=None) for potential in padded]


def best_setting(potential: LinearPredictor, dynamics: Dynamics) -> Setting:
    """The cheapest: a degree more costs time on every piece, a degree less costs candidates that the records decide."""
    a, v = usual_states(dynamics, potential.dim, STATES)
    rate = _mean_rate(potential, a[:RATES], v[:RATES])
    records, dim = count_records(potential), potential.dim
    own, gradient, best = prices(), gradient_price(potential), None
    # Where the logistic function itself is evaluated, records have no weights.
    kinds = [*DEGREES, 0] if isinstance(potential.loss, Logistic) and potential.weight is None else list(DEGREES)
    for degree, nodes in itertools.product(kinds, NODES):
        if degree and not degree + NODES_BESIDE[0] <= nodes <= degree + NODES_BESIDE[1]:
            continue
        each = own.logistic if degree == 0 else own.node + own.step * degree
        piece = own.piece + records * (own.product * dim + each * nodes)
        errors = _usual_errors(potential, degree, nodes, np.asarray(a), np.asarray(v), records)
        for parts, error in zip(PARTS, errors, strict=True):
            pieces = parts / QUARTER + rate + 1.5 * error
            cost = float(np.mean(pieces * piece + (rate + error) * gradient))
            if best is None or cost < best.cost:
                best = Setting(degree, nodes, parts, cost)
    assert best is not None
    return best


def _mean_rate(potential: LinearPredictor, a, v) -> float:
    rates = [_rate(potential, a[i : i + 1], v[i : i + 1]) for i in range(a.shape[0])]
    return float(np.mean(np.maximum(np.concatenate(rates), 0.0)))


@once
def _rate(potential: LinearPredictor, a, v):
    return jnp.sum(potential.gradients(a) * v, -1)


def _usual_errors(potential: LinearPredictor, degree: int, nodes: int, a, v, records: int) -> list[np.ndarray]:
    """The error of a piece by number of parts of a quarter turn and by state, from some of the records."""
    size = np.linalg.norm(np.asarray(potential.design), axis=1)
    own = np.flatnonzero(size > 0)
    own = own[:: max(1, len(own) // RECORDS)]
    zero, none = jnp.zeros((1, 1, 1), jnp.float32), jnp.zeros((), int)
    if degree:
        local = local_terms(potential, degree, nodes, BLOCK, own)
        rows, choices = local.design, [local.terms(nodes, length) for length in (0.0, QUARTER)]
        curves: RecordCurves = InterpolatedCurves(
            zero, zero, jnp.zeros(()), none, nodes, True, degree, potential.loss.growth > 0
        )
    else:
        rows, terms = logistic_terms(potential, nodes, QUARTER, BLOCK, some=own)
        choices = [terms]
        curves = LogisticCurves(zero, zero, jnp.zeros(()), none, nodes, True, (0.0,))
    alpha, beta = (np.asarray(rows @ x.T, np.float32) for x in (a, v))
    slip = (ROOM * summands(a.shape[1]) * ROUNDOFF * np.sqrt((a**2 + v**2).sum(1))).astype(np.float32)
    with np.errstate(over="ignore"):
        still, *whole = (np.asarray(_total(curves, alpha, beta, slip, _columns(terms))) for terms in choices)
    if degree:
        in_time = [np.minimum(np.maximum(whole[0] - still, 0.0), 1e6) * parts ** -float(nodes) for parts in PARTS]
    else:
        r = np.hypot(alpha, beta).astype(float)
        in_time = [np.sum(ellipses(r, nodes, QUARTER / parts), 0) for parts in PARTS]
    return [records / len(own) * (np.minimum(still, 1e6) + x) for x in in_time]


def _columns(terms: np.ndarray) -> list[np.ndarray]:
    return [terms[:, k : k + 1].astype(np.float32) for k in range(terms.shape[1])]


@once
def _total(curves: RecordCurves, alpha, beta, slip, columns):
    return jnp.sum(curves._error(alpha, beta, slip, columns), 0)
