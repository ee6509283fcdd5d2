"""Derivatives of a model file under a privacy budget: computed for each record, clipped to a bound, and added exactly.

The gradient and Hessian of each record are computed separately, scaled down if they exceed the certified bound (never, if
the bound is right), and rounded to multiples of a power of two q. q is so large that any sum of them fits into 53 bits, so
that sums are exact in every order. Replacing one record therefore changes them by at most twice the bound plus ``√n q``,
whatever the program computes: the guarantee does not depend on the enclosures.
"""

from __future__ import annotations

import functools
import json
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from fedpdmc._jax.precision import double_precision
from fedpdmc.errors import InputError
from fedpdmc.members.clipping import check_inside, check_number
from fedpdmc.members.model_file_sensitivity import RecordBounds, record_bounds
from fedpdmc.models.model_file.evaluation import evaluate
from fedpdmc.models.model_file.records import CONSTANTS, DESIGN, WEIGHTS, Layout, RecordModel, RecordSum
from fedpdmc.potentials import Program
from fedpdmc.privacy.accountant import up
from fedpdmc.privacy.budget import Budget
from fedpdmc.privacy.declared_bounds import Bounds

# Records per block.
BLOCK = 1024
# Bits of a sum that is exact, minus one.
EXACT_BITS = 52
# Relative error of the length of a scaled vector.
SCALED = 1e-12


def file_bounds(model: RecordModel, budget: Budget) -> RecordBounds:
    """Bounds on one record's derivatives under the declared bounds of a budget."""
    function = model.function
    assert isinstance(function, RecordSum)
    if budget.neighbours == "label":
        raise InputError(
            "Budget(neighbours)",
            f"{budget.neighbours!r} with a model file",
            "Use 'replace' or 'add-remove': a model file does not say which columns are outcomes.",
        )
    constants = tuple(
        (name, np.shape(value), tuple(np.ravel(np.asarray(value)).tolist()))
        for name, value in sorted(model.data[CONSTANTS].items())
    )
    return record_bounds(function.model, function.width, json.dumps(budget.bounds.describe()), constants)


def grid(bound: float, most_records: int) -> float:
    """q: a power of two with ``N bound ≤ 2⁵² q``."""
    return 2.0 ** (math.ceil(math.log2(bound)) + math.ceil(math.log2(most_records)) - EXACT_BITS) if bound > 0 else 1.0


def file_sensitivity(model: RecordModel, budget: Budget) -> tuple[tuple[float, float], tuple[float, float]]:
    """Sensitivities of gradient and Hessian to one record, and bounds on the rounding of each record's part."""
    bounds, dim = file_bounds(model, budget), model.dim or 0
    q = [grid(bound, budget.bounds.most_records) for bound in bounds[:2]]
    first, second = (up(change * (1 + SCALED)) for change in bounds.changes(budget.neighbours))
    return (first, second), (up(math.sqrt(dim) * q[0] / 2), up(dim * q[1] / 2))


@double_precision
def file_derivatives(model: RecordModel, budget: Budget, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sums over records of clipped gradients and Hessians."""
    bounds, n = file_bounds(model, budget), model.records
    most = budget.bounds.most_records
    limits = jnp.asarray([*bounds[:2], *(grid(bound, most) for bound in bounds[:2])])
    gradient, hessian = np.zeros(len(x)), np.zeros((len(x), len(x)))
    for begin in range(0, n, BLOCK):
        rows = np.minimum(np.arange(begin, begin + BLOCK), n - 1)
        data = {
            key: value if key == CONSTANTS else jnp.asarray(np.asarray(value)[rows])
            for key, value in model.data.items()
        }
        data[WEIGHTS] = jnp.asarray((np.arange(begin, begin + BLOCK) < n).astype(float))
        one, two = _block(model.function, bounds.convex, jnp.asarray(x), data, limits)
        gradient, hessian = gradient + np.asarray(one), hessian + np.asarray(two)
    return gradient, hessian


@eqx.filter_jit
def _block(function: Any, convex: bool, x, data: dict[str, Any], limits):
    """The sums over one block of records."""
    own = _Block(function, x, data)

    def of_one(z, covariates, row):
        curvature = jax.hessian(own.loss)(z, row)
        # If the bound assumes convexity, negative curvature of a record is set to zero.
        curvature = jnp.maximum(curvature, 0.0) if convex else curvature
        jacobian = own.jacobian(covariates)
        return jacobian @ curvature @ jacobian.T

    second = jax.vmap(of_one)(own.z, own.design, own.rows)
    held = functools.partial(held_sum, data[WEIGHTS])
    return held(own.gradients(), limits[0], limits[2]), held(second, limits[1], limits[3])


def record_gradients(function: Any, x, data: dict[str, Any]):
    """The gradient of each record in the model's own parameters, of shape (n, d)."""
    return _Block(function, x, data).gradients()


class _Block:
    """Records of a model file at a point: their predictors and parameters z, and f as a function of z."""

    def __init__(self, function: Any, x, data: dict[str, Any]):
        self.source, self.width, self.constants = function.model.source, function.width, data[CONSTANTS]
        coefficients, parameters = Layout(self.source, self.width).split(x)
        self.rows = {name: value for name, value in data.items() if name not in (DESIGN, WEIGHTS, CONSTANTS)}
        n, theta = len(data[WEIGHTS]), [value.ravel() for value in parameters.values()]
        self.design = data.get(DESIGN, jnp.zeros((n, 0)))
        predictors = [self.design @ value.reshape(-1, self.width).T for value in coefficients.values()]
        self.predictors = sum(one.shape[1] for one in predictors)
        self.z = jnp.concatenate([*predictors, *(jnp.broadcast_to(one, (n, one.size)) for one in theta)], 1)

    def loss(self, z, row):
        """F of one record."""
        values, begin = {**self.constants, **row}, 0
        for one in (*self.source.predictors, *self.source.parameters):
            values[one.name] = jnp.reshape(z[begin : begin + one.type.size], one.type.shape)
            begin += one.type.size
        return evaluate(self.source.likelihood, values)[""]

    def jacobian(self, covariates):
        """``∂z/∂x`` transposed, of one record."""
        rest = self.z.shape[1] - self.predictors
        whole = jax.scipy.linalg.block_diag(*[covariates[:, None]] * self.predictors, jnp.eye(rest))
        return whole[: self.predictors * self.width + rest]

    def gradients(self):
        """Gradients of all records, in the model's own parameters."""
        slopes = jax.vmap(jax.grad(self.loss))(self.z, self.rows)
        n, predictors = len(slopes), self.predictors
        coefficients = slopes[:, :predictors, None] * self.design[:, None, :]
        return jnp.concatenate([coefficients.reshape(n, predictors * self.width), slopes[:, predictors:]], 1)


def held_sum(weights, parts, bound, q):
    """The sum of the parts with weight one, each clipped to the bound; parts that are not finite count as zero."""
    n = len(parts)
    flat = parts.reshape(n, -1)
    flat = jnp.where(jnp.all(jnp.isfinite(flat), 1, keepdims=True), flat, 0.0)
    length = jnp.sqrt(jnp.sum(flat**2, 1, keepdims=True))
    flat = jnp.where(length > bound, flat * (bound / jnp.maximum(length, 1e-300)), flat)
    return jnp.sum(jnp.round(flat / q) * q * weights[:, None], 0).reshape(parts.shape[1:])


@double_precision
def hold_file_to_bounds(model: RecordModel, budget: Budget) -> RecordModel:
    """The records within the declared bounds: records outside are clipped, or refused."""
    bounds: Bounds = budget.bounds
    check_number(model.records, bounds)
    # Missing declarations are reported before the records are examined.
    file_bounds(model, budget)
    # Derivatives do not show a jump: a release would omit it, and a walk would pass over it.
    Program(model.function, model.data, model.dim or 0).check_continuity()
    data = dict(model.data)
    if DESIGN in data:
        data[DESIGN] = jnp.asarray(bounds.clip_rows(np.asarray(data[DESIGN])))
    for name, ends in (bounds.columns or {}).items():
        if name in data:
            data[name] = jnp.asarray(np.clip(np.asarray(data[name]), *ends))
    check_inside(budget, lambda: all(np.array_equal(data[key], model.data[key]) for key in data if key != CONSTANTS))
    return RecordModel(model.function, data, model.dim, model.names, model.constrain)
