"""Which clock a site walks with: the one that costs the fewest gradients per unit of process time.

Every clock here is exact, so the choice changes only the work. It depends on the potential in whitened coordinates and on
states of the reference, never on the state of a chain. Costs are rough estimates, good enough to rank clocks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fedpdmc._jax.by_numpy import once
from fedpdmc.clocks.base import Clock
from fedpdmc.clocks.cell_thinning import ThinnedClock
from fedpdmc.clocks.closed_form import AffineClock, ExponentialClock, is_exponential
from fedpdmc.clocks.dense_settings import best_setting, dense_clocks, fits, gradient_price
from fedpdmc.clocks.envelopes.ball_polynomial import MOST_CANDIDATES, BallPolynomial
from fedpdmc.clocks.envelopes.base import CELL_PRICE, PROGRAM_CELL_PRICE, cell_length, reach_of, usual_states
from fedpdmc.clocks.envelopes.flip_polynomial import flip_polynomial
from fedpdmc.clocks.envelopes.quadratic_rate_bound import evaluate
from fedpdmc.clocks.envelopes.record_polynomial import record_polynomial
from fedpdmc.clocks.envelopes.third_order import QuadraticPart, ThirdOrder
from fedpdmc.clocks.envelopes.time_polynomial import time_polynomial
from fedpdmc.clocks.interval_thinning import IntervalClock
from fedpdmc.clocks.segment_thinning import SegmentClock
from fedpdmc.dynamics import Dynamics
from fedpdmc.errors import InputError
from fedpdmc.potentials import (
    LinearPredictor,
    Potential,
    Program,
    Quadratic,
    Shared,
    Sum,
    beside_taylor,
    cubic_remainder,
    known_orders,
    polynomial_on_lines,
    polynomial_remainder,
    records_of,
)

# A clock that costs no more than this is chosen without computing the cost of the next, which takes seconds. Cells, which
# come after polynomials of time, are seldom cheaper and take the longest to compile.
CHEAP, CHEAP_BALLS, CHEAP_PROGRAM = 3.0, 27.0, 1e4
# Passes over one record that take as long as it takes to compile a clock on polynomials of the position.
COMPILATION = 1e9
# The largest rounding error relative to a usual rate; and the rounding, per unit of velocity, above which a polynomial on
# balls is not used: there the rounding is only estimated, whereas cells and polynomials of time carry a bound of it.
NOISY, CLEAN = 1e-3, 1e-6
# A dense clock is made for many chains. If their number is unknown its cost is that for few, which is higher by this factor.
FEW_CHAINS, FEW_CHAINS_PRICE = 64, 4.0
# States at which the cost of cells is found.
TRIALS = 256


class Choice(NamedTuple):
    """A clock, and what it was preferred to.

    Attributes
    ----------
    clock : Clock
    why : str
    costs : dict
        By clock, gradients of the site's potential per unit of process time on one chain, as far as they were computed.
    """

    clock: Clock
    why: str
    costs: dict[str, float]

    @property
    def report(self) -> dict[str, Any]:
        """The entry in the run's settings: the clock, why, its cost, and the costs of the others."""
        costs = {name: float(f"{cost:.3g}") if math.isfinite(cost) else None for name, cost in self.costs.items()}
        own = costs.pop(self.clock.name, None)
        return {"clock": self.clock.name, "why": self.why, "cost": own, "alternatives": costs}


def choose(
    potential: Potential,
    dynamics: Dynamics,
    center: Float[Array, " d"] | None = None,
    site: str = "",
    chain_time: float = math.inf,
    jumps: bool = False,
) -> Choice:
    """The cheapest exact clock for a potential in whitened coordinates.

    Parameters
    ----------
    potential : Potential
    dynamics : Dynamics
    center : array of shape (d,), optional
        Where the potential's quadratic control variate was made from second derivatives, if it was.
    site : str
        Whose potential it is, for errors.
    chain_time : float
        Process time of all chains that the clock is made for. In a short run a clock that compiles quickly is better, even
        if it costs more per unit of time.
    jumps : bool
        Whether a function may jump at surfaces: then it has no Taylor polynomial of the position.
    """
    if isinstance(potential, Program):
        return _cheapest(_of_program(potential, dynamics, center, site, chain_time, jumps))
    potential = prepared(potential, dynamics)
    if potential.affine(dynamics.flow.rotating):
        return Choice(AffineClock(potential, dynamics), "rates are inverted in closed form", {})
    if is_exponential(potential, dynamics):
        return Choice(ExponentialClock(potential, dynamics), "rates are inverted in closed form", {})  # type: ignore[arg-type]
    return _cheapest(_of_records(potential, dynamics, center))


def clock_for(potential: Potential, dynamics: Dynamics) -> Clock:
    """The cheapest exact clock for a potential in whitened coordinates."""
    return choose(potential, dynamics).clock


class Offer(NamedTuple):
    """A clock and its cost. At or below ``enough`` the following clocks are not considered; None for cells, the last."""

    clock: Clock
    cost: Callable[[], float]
    enough: float | None = None


def _cheapest(offers: Iterator[Offer]) -> Choice:
    """The cheapest of clocks that are made one by one."""
    costs, best = {}, None
    for clock, cost, enough in offers:
        if best is None and enough is None:
            return Choice(clock, "no other applies", {})
        costs[clock.name] = cost()
        if best is None or costs[clock.name] < costs[best.name]:
            best = clock
        if enough is not None and costs[best.name] <= enough:
            why = f"below {enough:g} gradients per unit of process time no other is considered"
            return Choice(best, why, costs)
    assert best is not None
    return Choice(best, "the lowest cost", costs)


def _of_records(potential: Potential, dynamics: Dynamics, center) -> Iterator[Offer]:
    """Clocks of sums over records, and of anything that encloses its field."""
    third = None if center is None else third_order(potential, center)
    if third is not None:
        yield Offer(SegmentClock(potential, dynamics, third), lambda: third.cost(potential, dynamics), CHEAP)
    polynomial = record_polynomial(potential, dynamics)
    if polynomial is not None:
        clock = ThinnedClock(potential, dynamics, polynomial)
        yield Offer(clock, lambda: polynomial.cost(potential, dynamics), CHEAP)
    if not dynamics.flips and dynamics.flow.rotating and center is not None and fits(potential):
        setting = best_setting(potential, dynamics)
        (clock,) = dense_clocks([potential], dynamics, setting, FEW_CHAINS)
        price = FEW_CHAINS_PRICE * setting.cost / gradient_price(potential)
        yield Offer(clock, lambda: price, CHEAP)
    yield Offer(ThinnedClock(potential, dynamics), lambda: cost_of_cells(potential, dynamics))


def third_order(potential: Potential, center: Float[Array, " d"]) -> ThirdOrder | None:
    """The envelope of records with a quadratic control variate, and of quadratics in the same sum."""
    records = records_of(potential)
    if records is None or records.diagonal or records.control is None:
        return None
    others = [term for term in getattr(potential, "terms", ()) if term is not records]
    if not all(isinstance(term, Quadratic) for term in others):
        return None
    rest = beside_taylor(records, center)
    for term in others:
        rest = term if rest is None else rest.plus(term)
    return ThirdOrder(
        cubic_remainder(records, center), None if rest is None else QuadraticPart.of(rest, center)
    )  # fmt: skip


def _of_program(
    program: Program, dynamics: Dynamics, center, site: str, chain_time: float, jumps: bool
) -> Iterator[Offer]:
    """Clocks of a user's function: polynomials of the position if there are few parameters, polynomials of time, and cells.

    Polynomials of the position cost the least per event and the most to make: in a short run those of time come first.
    """
    smooth = not jumps and dynamics.flips != dynamics.flow.rotating
    few = smooth and bool(known_orders(program.dim, dynamics.flow.rotating))
    soon = COMPILATION / (max(program.records, 1) * chain_time)
    early = few and soon >= 1
    if early:
        found = time_polynomial(program, dynamics)
        if found is not None:
            curves, quiet = found
            _check_noise(quiet, site)
            clock = IntervalClock(quiet, dynamics, curves)
            yield Offer(clock, functools.partial(curves.cost, quiet, dynamics), soon)
    if few:
        program = _paced(program, dynamics)
        _check_noise(program, site)
        known = _on_balls(program, dynamics, jnp.zeros(program.dim) if center is None else center)
        if known is not None:
            yield known
    found = None if early else time_polynomial(program, dynamics)
    if found is not None:
        curves, program = found
        _check_noise(program, site)
        clock = IntervalClock(program, dynamics, curves)
        yield Offer(clock, functools.partial(curves.cost, program, dynamics), CHEAP_PROGRAM)
    program = _paced(program, dynamics)
    _check_noise(program, site)
    yield Offer(ThinnedClock(program, dynamics), lambda: cost_of_cells(program, dynamics))


def _check_noise(program: Program, site: str) -> None:
    """Refuse a function whose rates have a rounding error that is not small relative to them where chains usually are.

    Elsewhere the error is part of the bounds: it costs candidates, and bounds that are not finite are never used.
    """
    if program.typical_noise is None or program.usual is None or np.isnan(program.typical_noise):
        return
    share = float(program.typical_noise) / max(1.0, float(program.usual))
    if share > NOISY:
        raise InputError(
            f"sites ({site!r})",
            f"a model whose event rates are lost in rounding: their error may be {share:.1g} of their size",
            "Look for values in 32 bits, for large offsets that are added and subtracted again, and for differences such as "
            "(1 + u) - 1 or log(1 + u): write them with expm1, log1p and centred data.",
        )


def _on_balls(program: Program, dynamics: Dynamics, center: Float[Array, " d"]) -> Offer | None:
    """A clock that thins with a polynomial of the position, if the program's derivatives can be enclosed."""
    if program.noise is None or not program.noise <= CLEAN:
        return None
    at, rounding = np.asarray(center), float(program.noise)
    if dynamics.flips:
        known = polynomial_on_lines(program, at, rounding)
        if known is None:
            return None
        point = flip_polynomial(program, known, dynamics)
        return Offer(ThinnedClock(program, dynamics, point), lambda: point.cost(program, dynamics), CHEAP_BALLS)
    remainder = polynomial_remainder(program, at, rounding)
    if remainder is None:
        return None
    ball = BallPolynomial(remainder)
    clock = SegmentClock(program, dynamics, ball, jnp.asarray(MOST_CANDIDATES))
    return Offer(clock, lambda: ball.cost(program, dynamics), CHEAP_BALLS)


def cost_of_cells(potential: Potential, dynamics: Dynamics) -> float:
    """Gradients per unit of process time if cells are bounded by passes over the records or calls of the program."""
    terms = getattr(potential, "terms", (getattr(potential, "records", potential),))
    price = PROGRAM_CELL_PRICE if any(isinstance(term, Program) for term in terms) else CELL_PRICE
    if isinstance(potential, Shared):
        potential = potential.holding(jnp.ones(TRIALS))
    reach = float(_usual_reach(potential, dynamics, *usual_states(dynamics, potential.dim, TRIALS)))
    return price / reach if reach > 0 else math.inf


@once
def _usual_reach(potential: Potential, dynamics: Dynamics, a: Float[Array, "n d"], v: Float[Array, "n d"]):
    """How far a cell is walked on average."""
    bound = evaluate(dynamics, potential, a, v, v).bound
    cell = jnp.minimum(bound.reach, cell_length(bound))
    reach = reach_of(bound.value, bound.slope + 0.5 * bound.curve * cell[:, None], cell)
    return jnp.mean(jnp.where(jnp.isfinite(reach), reach, 0.0))


def prepared(potential: Potential, dynamics: Dynamics) -> Potential:
    """The records with the constants that the dynamics need, computed once."""
    if isinstance(potential, Sum):
        return Sum(tuple(prepared(term, dynamics) for term in potential.terms))
    if isinstance(potential, Shared):
        return Shared(prepared(potential.records, dynamics), potential.prior)
    if isinstance(potential, Program):
        return _paced(potential, dynamics)
    if not dynamics.flips or dynamics.flow.rotating:
        return potential
    if isinstance(potential, Quadratic):
        return potential.separated()
    return _with_cubic(potential) if isinstance(potential, LinearPredictor) else potential


@once
def _paced(potential: Program, dynamics: Dynamics) -> Program:
    return potential.paced(dynamics.flow.rotating, dynamics.flips)


@once
def _with_cubic(potential: LinearPredictor) -> LinearPredictor:
    return potential.with_cubic()
