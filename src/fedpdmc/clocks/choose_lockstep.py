"""Whether dense clocks pay for all sites of a process, which then run in lockstep (`fedpdmc.sampling.engines.lockstep`)."""

from __future__ import annotations

from collections.abc import Sequence

from fedpdmc.clocks.choose import Choice, cost_of_cells
from fedpdmc.clocks.dense_settings import best_setting, dense_clocks, fits, gradient_price, pooled, prices
from fedpdmc.dynamics import Dynamics

# Fewer chains do not fill the vectors.
LEAST_CHAINS = 32


def dense_choices(usual: Sequence[Choice], dynamics: Dynamics, chains: int) -> list[Choice] | None:
    """Dense clocks for all sites of a process, with one setting, if they cost less; else None."""
    potentials = [potential for choice in usual if fits(potential := choice.clock.potential)]
    if dynamics.flips or not dynamics.flow.rotating or len(potentials) < len(usual):
        return None
    setting = best_setting(pooled(potentials), dynamics)
    units, others = [gradient_price(potential) for potential in potentials], [_cost(x, dynamics) for x in usual]
    if len(usual) * prices().time + sum(others) <= setting.cost:
        return None
    made, total = [], sum(units)
    for choice, clock, unit, other in zip(
        usual, dense_clocks(potentials, dynamics, setting, chains), units, others, strict=True
    ):
        costs = {choice.clock.name: other / unit, **choice.costs, clock.name: setting.cost / total}
        made.append(Choice(clock, "the lowest cost for all sites in one process", costs))
    return made


def _cost(usual: Choice, dynamics: Dynamics) -> float:
    """Nanoseconds of the gradients that a clock asks for."""
    clock = usual.clock
    known = usual.costs.get(clock.name)
    gradients = cost_of_cells(clock.potential, dynamics) if known is None else known
    return gradients * gradient_price(clock.potential)  # type: ignore[arg-type]
