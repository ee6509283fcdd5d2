"""Arrivals of a model file under a privacy budget: what one record can change, and how long a walk can take.

A flip's rate is ``(v_i ∂_i(U − q))_+ + ρ|v_i|``. The site computes ``∇U = Sᵀ G``, where G is a sum over records of gradients
in the model's own parameters. Each is computed by itself, scaled down if it is longer than the certified bound b of
`fedpdmc.members.model_file_sensitivity`, set to zero if it is not finite, and rounded to multiples of a power of two
(`fedpdmc.members.clipped_record_derivatives`), so that G is exact in every order of summation.

**Sensitivity.** A record's part g has ``|g| ≤ b' = b(1 + 10⁻¹²) + √k q/2``, whatever its program computes, at the same
computed point x for both of two neighbours. All shapes are public, since records are padded to the declared maximum
number: both run the same compiled program, in which a record's part depends on that record alone. Adding or removing a
record changes ``∇U`` by ``Sᵀ g``, replacing one by ``Sᵀ(g − g̃)``: at most ``‖Sᵀ‖ b'``, or twice that, in each norm of
the account. Products with S are rounded by at most ``γ_{k+2} N b' |S_{·i}|`` in coordinate i.

**Region.** Within the declared region no gradient is longer than b, nothing is scaled down, and the rates are those of the
model: the chain is exact. A plan that leaves the region is refused from public facts (code REGION), and the run ends; it
never continues with clipped rates.

**Work.** A ceiling on rates that came from the records could end a walk at a time that depends on them. Here it is
public: ``c_i = N b' |S_{·i}|`` for the records, with N their declared maximum number. In the proof of
`fedpdmc.privacy.work_limit` the ceiling is then at most ``V + W + E`` with W from the control variate alone and ``2c``
added to E: the control variate's signed rate is at most ``V + c``, the records' ceiling is c, and the records' rate
changes by at most 2c, which is within ``V/2`` where ``W + E ≤ V/2``.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedpdmc._jax.precision import double_precision
from fedpdmc.errors import InputError
from fedpdmc.members.clipped_record_derivatives import SCALED, file_bounds, grid, held_sum, record_gradients
from fedpdmc.models.model_file.records import CONSTANTS, WEIGHTS, RecordModel
from fedpdmc.potentials.clipped_gradient_potential import ClippedRecords
from fedpdmc.privacy.accountant import Sensitivity, up
from fedpdmc.privacy.budget import Budget
from fedpdmc.privacy.declared_bounds import Bounds
from fedpdmc.privacy.rounding_error_bound import (
    FARTHEST,
    LARGEST_SHARE,
    LEVELS,
    MOST_SLOPE,
    STEEPEST,
    UNIT,
    Limits,
    gamma,
)
from fedpdmc.privacy.sensitivity import largest_row

# Number of records whose gradients are computed at a time.
BLOCK = 256


def longest(model: RecordModel, budget: Budget) -> float:
    """``b'``: no record's part of the sum is longer."""
    bound = file_bounds(model, budget).gradient
    return up(bound * (1 + SCALED) + math.sqrt(model.dim or 0) * grid(bound, budget.bounds.most_records) / 2)


def file_change(model: RecordModel, budget: Budget, scale: np.ndarray) -> Sensitivity:
    """K of the records' gradient in whitened coordinates, ``scale`` being the rows of S."""
    factor = 2 if budget.neighbours == "replace" else 1
    most = largest_row(Bounds(norm=longest(model, budget)), scale)
    return Sensitivity(*(up(factor * k) for k in most))


def file_limits(model: RecordModel, budget: Budget, scale: np.ndarray, known: Sensitivity, excess: float) -> Limits:
    """Limits on plans, and K with rounding: of products with S, of the control variate and of levels.

    Raises
    ------
    InputError
        Rounding is as large as the effect of one record.
    """
    rows, dim = scale.shape
    slope, wide = min(STEEPEST * known.k_2, MOST_SLOPE), math.sqrt(dim)
    total = budget.bounds.most_records * longest(model, budget) * float(np.linalg.norm(scale))
    off = up(gamma(rows + 2) * total + 4 * UNIT * ((dim + 4) * slope + total + wide * excess) + wide * LEVELS)
    if not 2 * off <= LARGEST_SHARE * known.k_2:
        raise InputError(
            "Bounds(most_records)",
            f"{budget.bounds.most_records:,}: rounding changes a rate by {2 * off / known.k_2:.3g} of what a record can",
            "Declare no more records than there can be, and a reference with the scale of the posterior.",
        )
    k_inf, k_1, k_2 = known
    return Limits(FARTHEST, slope, off, Sensitivity(up(k_inf + 2 * off), up(k_1 + 2 * wide * off), up(k_2 + 2 * off)))


def file_ceiling(model: RecordModel, budget: Budget, scale: np.ndarray) -> float:
    """The largest ``c_i``: a bound on the records' rate per unit of speed, whatever they are."""
    return up(
        budget.bounds.most_records * longest(model, budget) * float(np.linalg.norm(scale, axis=0).max()) * (1 + 1e-8)
    )


@dataclasses.dataclass(frozen=True)
class ClippedSum:
    """``Σ_n c(∇f_n)(x)`` over padded records."""

    function: Any
    bound: float
    unit: float

    def __call__(self, x, data):
        """The sum, by blocks of records."""

        def add(total, block):
            parts = record_gradients(self.function, x, {**block, **data["same"]})
            return total + held_sum(block[WEIGHTS], parts, self.bound, self.unit), None

        return jax.lax.scan(add, jnp.zeros(x.shape), data["blocks"])[0]


@double_precision
def clipped_records(model: RecordModel, budget: Budget) -> ClippedRecords:
    """The records as a private site walks with them: padded to the declared maximum, so that all shapes are public."""
    bound, most, n = file_bounds(model, budget).gradient, budget.bounds.most_records, model.records
    blocks = -(-most // BLOCK)
    rows = np.minimum(np.arange(blocks * BLOCK), n - 1)

    def cut(value):
        array = np.asarray(value)[rows]
        return jnp.asarray(array.reshape(blocks, BLOCK, *array.shape[1:]))

    data = {key: cut(value) for key, value in model.data.items() if key != CONSTANTS}
    data[WEIGHTS] = jnp.asarray((np.arange(blocks * BLOCK) < n).astype(float).reshape(blocks, BLOCK))
    whole = {"blocks": data, "same": {CONSTANTS: model.data[CONSTANTS]}}
    total = most * longest(model, budget)
    return ClippedRecords(
        ClippedSum(model.function, bound, grid(bound, most)), whole, jnp.asarray(total), model.dim or 0
    )
