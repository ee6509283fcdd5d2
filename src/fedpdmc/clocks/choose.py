"""Which clock a site walks with: the one that costs the fewest gradients per unit of process time.

Every clock here is exact, so the choice changes only the work. It depends on the potential in whitened coordinates and on
states of the reference, never on the state of a chain. Costs are rough estimates, good enough to rank clocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fedpdmc._jax.by_numpy import once
from fedpdmc.clocks.base import Clock
from fedpdmc.clocks.closed_form import AffineClock, ExponentialClock, is_exponential
from fedpdmc.clocks.dense import (
    best_setting,
    cubic_clock,
    cubic_price,
    dense_clocks,
    fits,
    gradient_price,
    pooled,
    prices,
)
from fedpdmc.clocks.envelopes import CELL_PRICE, affine_load, cell_length, evaluate, reach_of, usual_states
from fedpdmc.clocks.thinning import (
    CurveClock,
    QuadraticPart,
    SegmentClock,
    ThinnedClock,
    ThirdOrder,
    time_polynomial,
)
from fedpdmc.dynamics import Dynamics
from fedpdmc.errors import InputError
from fedpdmc.potentials import (
    LinearPredictor,
    Potential,
    Program,
    Quadratic,
    Sum,
    beside_taylor,
    cubic_remainder,
    program_of,
    records_of,
)

# A clock that costs no more than this is chosen without computing the cost of the next, which takes seconds.
CHEAP = 3.0
# The largest rounding error relative to a usual rate.
NOISY = 1e-3
# A dense clock is made for many chains. If their number is unknown its cost is that for few, which is higher by this factor.
FEW_CHAINS, FEW_CHAINS_PRICE = 64, 4.0
# States at which the cost of cells is found.
TRIALS = 256


class ClockChoice(NamedTuple):
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
) -> ClockChoice:
    """The cheapest exact clock for a potential in whitened coordinates.

    Parameters
    ----------
    potential : Potential
    dynamics : Dynamics
    center : array of shape (d,), optional
        Where the potential's quadratic control variate was made from second derivatives, if it was.
    site : str
        Whose potential it is, for errors.
    """
    if (program := program_of(potential)) is not None:
        return _of_program(program, potential, dynamics, site)
    potential = with_constants(potential, dynamics)
    if potential.affine(dynamics.flow.rotating):
        return ClockChoice(AffineClock(potential, dynamics), "rates are inverted in closed form", {})
    if is_exponential(potential, dynamics):
        return ClockChoice(ExponentialClock(potential, dynamics), "rates are inverted in closed form", {})  # type: ignore[arg-type]
    return _cheapest(_of_records(potential, dynamics, center))


def clock_for(potential: Potential, dynamics: Dynamics) -> Clock:
    """The cheapest exact clock for a potential in whitened coordinates."""
    return choose(potential, dynamics).clock


class ClockOffer(NamedTuple):
    """A clock and its cost. At or below ``enough`` the following clocks are not considered; None for cells, the last."""

    clock: Clock
    cost: Callable[[], float]
    enough: float | None = None


def _cheapest(offers: Iterator[ClockOffer]) -> ClockChoice:
    costs, best = {}, None
    for clock, cost, enough in offers:
        if best is None and enough is None:
            return ClockChoice(clock, "no other applies", {})
        costs[clock.name] = cost()
        if best is None or costs[clock.name] < costs[best.name]:
            best = clock
        if enough is not None and costs[best.name] <= enough:
            why = f"below {enough:g} gradients per unit of process time no other is considered"
            return ClockChoice(best, why, costs)
    assert best is not None
    return ClockChoice(best, "the lowest cost", costs)


def _of_records(potential: Potential, dynamics: Dynamics, center) -> Iterator[ClockOffer]:
    """Clocks of sums over records, and of anything that encloses its field."""
    third = None if center is None else third_order(potential, center)
    if third is not None:
        yield ClockOffer(SegmentClock(potential, dynamics, third), lambda: third.cost(potential, dynamics), CHEAP)
    if not dynamics.flips and dynamics.flow.rotating and center is not None and fits(potential):
        setting = best_setting(potential, dynamics)
        (clock,) = dense_clocks([potential], dynamics, setting, FEW_CHAINS)
        price = FEW_CHAINS_PRICE * setting.cost / gradient_price(potential)
        yield ClockOffer(clock, lambda: price, CHEAP)
    yield ClockOffer(ThinnedClock(potential, dynamics), lambda: cost_of_cells(potential, dynamics))


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


def _of_program(program: Program, potential: Potential, dynamics: Dynamics, site: str) -> ClockChoice:
    """The clock of a user's function, alone or with a share of the prior, which is easy to follow.

    A function is refused if its rates have a rounding error that is not small relative to them where chains usually are.
    Elsewhere the error is part of the bounds: it costs candidates, and bounds that are not finite are never used.
    """
    curves, length, rounding = time_polynomial(program, dynamics)
    if rounding > NOISY:
        raise InputError(
            f"sites ({site!r})",
            f"a model whose event rates are lost in rounding: their error may be {rounding:.1g} of their size",
            "Look for values in 32 bits, for large offsets that are added and subtracted again, and for differences such as "
            "(1 + u) - 1 or log(1 + u): write them with expm1, log1p and centred data.",
        )
    clock = CurveClock(potential, dynamics, curves, length)
    return ClockChoice(clock, "no other applies", {clock.name: curves.cost(program, dynamics, length)})


def cost_of_cells(potential: Potential, dynamics: Dynamics) -> float:
    """Gradients per unit of process time if cells are bounded by passes over the records."""
    whole = potential.with_share(jnp.ones(TRIALS))
    reach = float(_usual_reach(whole, dynamics, *usual_states(dynamics, potential.dim, TRIALS)))
    return CELL_PRICE / reach if reach > 0 else math.inf


@once
def _usual_reach(potential: Potential, dynamics: Dynamics, a: Float[Array, "n d"], v: Float[Array, "n d"]):
    bound = evaluate(dynamics, potential, a, v, v).bound
    cell = jnp.minimum(bound.reach, cell_length(bound))
    reach = reach_of(affine_load(bound.value, bound.slope + 0.5 * bound.curve * cell[:, None], cell), cell)
    return jnp.mean(jnp.where(jnp.isfinite(reach), reach, 0.0))


def with_constants(potential: Potential, dynamics: Dynamics) -> Potential:
    """The records with the constants that the dynamics need, computed once."""
    if isinstance(potential, Sum):
        return Sum(tuple(with_constants(term, dynamics) for term in potential.terms))
    if not dynamics.flips or dynamics.flow.rotating:
        return potential
    return _with_cubic(potential) if isinstance(potential, LinearPredictor) else potential


@once
def _with_cubic(potential: LinearPredictor) -> LinearPredictor:
    return potential.with_cubic()


# For all sites of a process --------------------------------------------------------------------------------------------


# Fewer chains do not fill the vectors.
LEAST_CHAINS = 32
TOGETHER = "the lowest cost for all sites in one process"


def choices_in_one_process(
    potentials: Sequence[LinearPredictor], each: Callable[[], list[ClockChoice]], dynamics: Dynamics, chains: int
) -> list[ClockChoice]:
    """The clocks of all sites of a process: what costs least together, in nanoseconds per unit of process time.

    Dense clocks with one setting; third orders in lockstep, if all sites have one; or the clock of each site by itself.

    Parameters
    ----------
    potentials : sequence of LinearPredictor
        What the sites walk with if all are sums over records; else empty.
    each : callable
        Makes the choice of every site, in the order of the potentials. It is not called where dense clocks cost less than
        the other clocks without their gradients: tensors take longer to make than a setting.
    dynamics : Dynamics
    chains : int
    """
    if dynamics.flips or not dynamics.flow.rotating or not potentials or not all(map(fits, potentials)):
        return each()
    setting, sites = best_setting(pooled(potentials), dynamics), len(potentials)
    units = [gradient_price(potential) for potential in potentials]
    dense, apart, cubic = setting.cost, sites * prices().time, sites * cubic_price(potentials[0].dim)
    costs: list[dict[str, float]] = [{} for _ in potentials]
    if min(apart, cubic) <= dense:
        choices = each()
        own = [_gradients(choice, dynamics) for choice in choices]
        costs = [{choice.clock.name: cost} | choice.costs for choice, cost in zip(choices, own, strict=True)]
        apart += float(np.dot(own, units))
        clocks = [choice.clock for choice in choices if isinstance(choice.clock, SegmentClock)]
        if len(clocks) == sites:
            fewer = [clock.envelope.cost_in_lockstep(clock.potential, dynamics) for clock in clocks]
            cubic += float(np.dot(fewer, units))
            if cubic < min(apart, dense):
                return [
                    ClockChoice(cubic_clock(clock), TOGETHER, {clock.name: cost, "DenseClock": dense / sum(units)})
                    for clock, cost in zip(clocks, fewer, strict=True)
                ]
        if apart <= dense:
            return choices
    made = dense_clocks(potentials, dynamics, setting, chains)
    return [
        ClockChoice(x, TOGETHER, known | {x.name: dense / sum(units)}) for x, known in zip(made, costs, strict=True)
    ]


def _gradients(choice: ClockChoice, dynamics: Dynamics) -> float:
    """The cost of a clock, computed where there was no other."""
    known = choice.costs.get(choice.clock.name)
    return cost_of_cells(choice.clock.potential, dynamics) if known is None else known
