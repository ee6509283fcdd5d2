"""Sensitivity of a model file's derivatives to one record, from the file and declared bounds alone.

A record's minus log likelihood depends on the parameters through linear predictors ``η_p = ξ·β_p`` and parameters θ. With
``z = (η, θ)``, f's gradient in (β, θ) has the Euclidean norm ``√Σ_k w_k (∂_k f)²`` and its Hessian the Frobenius norm
``√Σ_kl w_k w_l (∂_kl f)²``, with ``w_k = |ξ|²`` for a predictor and one for a parameter. Both are bounded on the box of
all z and columns that the declared bounds allow, by enclosures of the derivatives and branch and bound. A record that is
added or removed changes a sum by at most the bound, one replaced by another by at most twice the bound. If f is a convex
function of one predictor alone, its Hessians ``f'' ξξᵀ`` have non-negative inner products, and the sum of Hessians
changes by at most √2 times the bound.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedpdmc._jax.precision import double_precision
from fedpdmc.enclosures import Interval, enclose
from fedpdmc.errors import InputError, NoEnclosure
from fedpdmc.models.model_file.evaluation import evaluate
from fedpdmc.models.model_file.model import Model
from fedpdmc.models.model_file.source import Column
from fedpdmc.privacy.accountant import up
from fedpdmc.privacy.branch_and_bound import PATIENCE, supremum
from fedpdmc.privacy.declared_bounds import ROUNDING, Bounds
from fedpdmc.privacy.sensitivity import largest_row

# Maximum number of combinations of levels.
MOST_LEVELS = 256
# The range of values if none is declared.
KNOWN = {"binary": (0.0, 1.0)}
# A bound is rounded up to this many significant bits, so that all sites of a study have the same.
BITS = 12
# Relative size of a negative second derivative that counts as rounding of its enclosure.
FLAT = 1e-9


class RecordBounds(NamedTuple):
    """Bounds on one record's derivatives: Euclidean norm of its gradient, Frobenius norm of its Hessian.

    ``convex``: a function of one predictor alone whose second derivative is at least ``−FLAT`` times its bound.
    """

    gradient: float
    hessian: float
    convex: bool = False

    def changes(self, neighbours: str) -> tuple[float, float]:
        """Sensitivities of the sums of gradients and Hessians to one record that is replaced, or added or removed."""
        if neighbours == "add-remove":
            return self.gradient, self.hessian
        return 2 * self.gradient, (math.sqrt(2) if self.convex else 2) * self.hessian


class Domain(NamedTuple):
    """The box of z and of columns that are numbers, and the values of columns that are levels."""

    low: np.ndarray
    high: np.ndarray
    weights: np.ndarray
    columns: tuple[Column, ...]
    levels: tuple[Column, ...]


@functools.lru_cache(32)
@double_precision
def record_bounds(model: Model, width: int, declared: str, constants: tuple = ()) -> RecordBounds:
    """Bounds on a record's derivatives over everything that the declared bounds allow.

    Parameters
    ----------
    model : Model
    width : int
        Columns of the linear predictors' X.
    declared : str
        `Bounds.describe` as JSON: bounds on X, the columns and the parameters.
    constants : tuple
        Names, shapes and values of the contract's numbers.

    Raises
    ------
    InputError
        A bound is not declared, or a derivative has no bound.
    """
    bounds = Bounds(**json.loads(declared))
    given = {name: np.asarray(values).reshape(shape) for name, shape, values in constants}
    domain = _domain(model, bounds, width)
    search = _Search(model, domain, given)
    try:
        found = [search.largest(order) for order in (1, 2)]
    except NoEnclosure as error:
        raise InputError("Site(budget)", f"a model file whose derivatives have no bounds: {error}", REMEDY) from error
    if not all(map(math.isfinite, found)):
        raise InputError(
            "Site(budget)",
            f"a model whose derivative by {', '.join(search.unbounded())} has no bound for one record",
            REMEDY,
        )
    return RecordBounds(_rounded(found[0]), _rounded(found[1]), search.convex(found[1]))


REMEDY = "Declare tighter bounds of columns, or a smaller region of parameters."


def _rounded(value: float) -> float:
    if value == 0:
        return 0.0
    cell = 2.0 ** (math.floor(math.log2(value)) - BITS)
    return up(math.ceil(value / cell) * cell)


def _domain(model: Model, bounds: Bounds, width: int) -> Domain:
    """The box of z and the columns, from the declared bounds."""
    source = model.source
    predictors = sum(one.type.size for one in source.predictors)
    dim = predictors * width + sum(one.type.size for one in source.parameters)
    region = bounds.sizes("region", dim)
    if region is None:
        raise InputError("Bounds(region)", "none for a model file", "Declare region=..., a bound on the parameters.")
    reach, weight = np.zeros(predictors), 0.0
    if predictors:
        if bounds.norm is None and bounds.box is None:
            raise InputError("Bounds", "no bound on the covariates", "Declare norm=... or box=..., or both.")
        rows = region[: predictors * width].reshape(predictors, width)
        box = bounds.sizes("box", width)
        by_box = np.full(predictors, np.inf) if box is None else rows @ box
        by_norm = np.inf if bounds.norm is None else bounds.norm * np.linalg.norm(rows, axis=1)
        reach = np.minimum(by_box, by_norm) * (1 + 4 * ROUNDING)
        weight = largest_row(bounds, np.eye(width)).k_2 ** 2
    numbers = tuple(one for one in source.columns if one.domain != "index" and one.domain not in KNOWN)
    levels = tuple(one for one in source.columns if one not in numbers)
    if any(one.type.shape for one in levels) or source.group is not None:
        raise InputError("Site(budget)", "a model of groups of rows", "Budgets need one row for each record.")
    ends = [_declared(one, bounds) for one in numbers]
    high = np.concatenate([reach, region[predictors * width :], [end for _, end in ends]])
    low = np.concatenate([-reach, -region[predictors * width :], [begin for begin, _ in ends]])
    weights = np.concatenate([np.full(predictors, weight), np.ones(dim - predictors * width)])
    return Domain(low, high, weights, numbers, levels)


def _declared(column: Column, bounds: Bounds) -> tuple[float, float]:
    if column.name not in (bounds.columns or {}):
        raise InputError(
            f"Bounds(columns: {column.name})",
            "none for a column of a model file",
            "Declare the range of its values: columns={" + repr(column.name) + ": (low, high)}.",
        )
    return bounds.columns[column.name]


class _Search:
    """Branch and bound for one model: the functions that it needs, compiled once."""

    def __init__(self, model: Model, domain: Domain, constants: dict[str, np.ndarray]):
        self.model, self.domain, self.constants = model, domain, constants
        self.size = len(domain.weights)
        values = [range(one.levels) if one.domain == "index" else (0, 1) for one in domain.levels]
        if math.prod(len(one) for one in values) > MOST_LEVELS:
            raise InputError("Site(budget)", f"more than {MOST_LEVELS} combinations of levels", "Merge levels.")
        every = list(itertools.product(*values))
        self.levels = np.array(every, float).reshape(len(every), len(values))
        self._made = {order: self._functions(order) for order in (1, 2)}

    def largest(self, order: int) -> float:
        """The bound on the norm of the gradient (order one) or the Hessian (two), on all levels."""
        return supremum(*self._made[order], *self._boxes())

    def _boxes(self) -> tuple[np.ndarray, np.ndarray]:
        """A box for each combination of levels; its sides along the levels have no length."""
        levels = self.levels
        ends = (np.tile(end, (len(levels), 1)) for end in (self.domain.low, self.domain.high))
        low, high = (np.concatenate([end, levels], 1) for end in ends)
        return low, high

    def convex(self, bound: float) -> bool:
        """Whether f is a convex function of one predictor alone, by enclosures of its second derivative."""
        if self.size != 1 or not self.model.source.predictors:
            return False
        split, room = len(self.domain.low), FLAT * bound / self.domain.weights[0]

        def below(low, high):
            found = self._enclosed(2, low[:split], high[:split], low[split:])
            return jnp.maximum(-room - jnp.ravel(found.lo if isinstance(found, Interval) else found)[0], 0.0)

        upper = jax.jit(jax.vmap(below))
        return supremum(upper, lambda points: np.zeros(len(points)), *self._boxes(), most=PATIENCE) == 0

    def unbounded(self) -> list[str]:
        """The parameters with respect to which a derivative has no bound on the whole box."""
        source, names = self.model.source, []
        for one in (*source.predictors, *source.parameters):
            names += [one.name] * one.type.size
        box, bad = (jnp.asarray(self.domain.low), jnp.asarray(self.domain.high)), set[str]()
        sizes = jax.jit(lambda levels: self._magnitudes(1, *box, levels))
        for levels in self.levels:
            found = np.asarray(sizes(jnp.asarray(levels)))
            bad |= {names[k] for k in np.flatnonzero(~np.isfinite(found))}
        return [name for name in dict.fromkeys(names) if name in bad] or ["its parameters"]

    def _derivative(self, order: int):
        """The derivative of f with respect to z, as a function of z, columns that are numbers, and levels."""

        def f(z, numbers, levels):
            values: dict[str, Any] = dict(self.constants)
            begin = 0
            for one in (*self.model.source.predictors, *self.model.source.parameters):
                values[one.name] = jnp.reshape(z[begin : begin + one.type.size], one.type.shape)
                begin += one.type.size
            for part, given in ((self.domain.columns, numbers), (self.domain.levels, levels)):
                values |= {one.name: given[k].astype(one.type.dtype) for k, one in enumerate(part)}
            return evaluate(self.model.source.likelihood, values)[""]

        return jax.grad(f) if order == 1 else jax.hessian(f)

    def _enclosed(self, order: int, low, high, levels):
        n = self.size
        return enclose(self._derivative(order))(Interval(low[:n], high[:n]), Interval(low[n:], high[n:]), levels)

    def _magnitudes(self, order: int, low, high, levels):
        found = self._enclosed(order, low, high, levels)
        return found.magnitude if isinstance(found, Interval) else jnp.abs(found)

    def _norm(self, order: int, sizes):
        """The norm in coefficients and parameters, from the derivatives with respect to z."""
        weights = jnp.asarray(self.domain.weights)
        weights = weights if order == 1 else weights[:, None] * weights
        return jnp.sqrt(jnp.sum(weights * sizes**2)) * (1 + 1e-12)

    def _functions(self, order: int):
        split = len(self.domain.low)

        def upper(low, high):
            return self._norm(order, self._magnitudes(order, low[:split], high[:split], low[split:]))

        def value(point):
            n = self.size
            return self._norm(order, self._derivative(order)(point[:n], point[n:split], point[split:]))

        return jax.jit(jax.vmap(upper)), jax.jit(jax.vmap(value))
