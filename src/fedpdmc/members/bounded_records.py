"""Records within declared bounds: clipped or refused, and their derivatives with a known sensitivity to one record.

Built-in models state their public facts (`model_of`), from which `fedpdmc.privacy.sensitivity` works out what one record can
change. For a model file the gradient and Hessian of each record are computed separately, scaled down if they exceed the
certified bound (never, if the bound is right), and rounded to multiples of a power of two q. q is so large that any sum of
them fits into 53 bits, so that sums are exact in every order. Replacing one record therefore changes them by at most twice
the bound plus ``√n q``, whatever the program computes: the guarantee does not depend on the enclosures.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from fedpdmc._jax.compilation import on_device
from fedpdmc._jax.precision import double_precision
from fedpdmc.enclosures import Interval, enclose
from fedpdmc.errors import InputError, NoEnclosure, PlanRefused
from fedpdmc.models.model_file.allowed_operations import Source, evaluate
from fedpdmc.models.model_file.model import Model as FileModel
from fedpdmc.models.model_file.records import CONSTANTS, DESIGN, WEIGHTS, Layout, RecordModel, RecordSum
from fedpdmc.models.user_function import derivatives_of
from fedpdmc.potentials import (
    GaussianRecords,
    LinearPredictor,
    LinearUnknownScale,
    Logistic,
    Poisson,
    Potential,
    Program,
    Quadratic,
    StudentT,
    bare,
)
from fedpdmc.potentials.clipped_gradient_potential import ClippedRecords
from fedpdmc.potentials.padding import bucket
from fedpdmc.privacy.accountant import Sensitivity, up
from fedpdmc.privacy.budget import Budget
from fedpdmc.privacy.budget_planning import steepness
from fedpdmc.privacy.sensitivity import (
    COX_REGION,
    FARTHEST,
    LARGEST_SHARE,
    LEVELS,
    MOST_SLOPE,
    ROUNDING,
    STEEPEST,
    UNIT,
    Bounds,
    Limits,
    ModelFacts,
    averaged_sensitivity,
    derivative_sensitivity,
    gamma,
    gradient_rounding,
    hessian_rounding,
    largest_row,
    limits,
    sensitivity,
)

LARGEST_POINT = (
    1e15  # number in a plan, reference or control variate, and of parameters: beyond it others might overflow
)
LAST_NODE = 8.0  # standard deviations, beyond the last quadrature node of averages over predictors
LARGEST = 1e100  # of a response without a declared range: squares do not overflow
BLOCK = 1024  # records whose derivatives are added at a time
EXACT_BITS = 52  # of a sum that is exact, minus one
SCALED = 1e-12  # relative error of the length of a scaled vector
MOST_LEVELS = 256  # combinations of levels
KNOWN = {"binary": (0.0, 1.0)}  # the range of values if none is declared
BITS = 12  # significant bits of a bound, rounded up, so that all sites of a study have the same
FLAT = 1e-9  # relative size of a negative second derivative that counts as rounding of its enclosure
BATCH = 256  # boxes that are bounded in one call
SHARE = 0.02  # relative tolerance between the result and the largest value found
MOST_BOXES = 1 << 16
PATIENCE = 1 << 12  # boxes after which the search gives up if the bound is still infinite
WALK_BLOCK = 256  # records whose gradients are computed at a time in a walk
REMEDY = "Declare tighter bounds of columns, or a smaller region of parameters."


def model_of(potential: Potential) -> ModelFacts:
    """The public facts about a potential: its loss and the loss's parameters."""
    if isinstance(potential, Quadratic) and potential.source is not None:
        kind = "gaussian_mean" if potential.source.design is None else "linear"
        return ModelFacts(kind, potential.dim, weight=potential.source.weight)
    if isinstance(potential, LinearPredictor) and potential.control is None:
        loss = potential.loss
        if isinstance(loss, Logistic):
            return ModelFacts("logistic", potential.dim)
        if isinstance(loss, Poisson):
            return ModelFacts("cox" if potential.diagonal else "poisson", potential.dim)
        if isinstance(loss, StudentT):
            numbers = {"df": float(loss.df), "scale": float(loss.scale), "series": potential.series > 0}
            return ModelFacts("student_t", potential.dim, max(potential.series, 1), **numbers)
    found = f"a {type(potential).__name__} whose records have no known sensitivity"
    remedy = "Privacy budgets need a model of records from fedpdmc.models."
    if isinstance(potential, LinearUnknownScale):
        found = "a linear regression with an unknown scale, whose gradient has no bound"
        remedy = "Give a known scale: fedpdmc.models.linear(X, y, scale=...)."
    raise InputError("Site(budget)", found, remedy)


@double_precision
def hold_to_bounds(potential: Potential, budget: Budget) -> Potential:
    """The potential of the records within the declared bounds: records outside are clipped, or refused."""
    inside = _clip(potential, budget.bounds)
    # A record of a Cox model is a point.
    terms = _arrays(inside)[1].sum() if model_of(inside).loss == "cox" else len(_arrays(inside)[0])
    _check_number(terms, budget.bounds)
    pairs = zip(_arrays(potential), _arrays(inside), strict=True)
    _check_inside(budget, all(np.array_equal(x, y) for x, y in pairs))
    return inside


def _check_number(records: float, bounds: Bounds) -> None:
    if records > bounds.most_records:
        found = f"{records:.0f} records where at most {bounds.most_records} are declared"
        remedy = "Declare Bounds(most_records=...): it must be known without the records."
        raise InputError("Site(budget)", found, remedy)


def _check_inside(budget: Budget, unchanged: bool) -> None:
    """Refuse records that clipping has changed, unless the budget allows it."""
    if budget.on_violation == "refuse" and not unchanged:
        raise InputError(
            "Site(budget)",
            "records outside the declared bounds",
            "Declare wider bounds (of weights too: Bounds(weight=...)), correct the records, or use "
            "Budget(on_violation='clip').",
        )


def _clip(potential: Potential, bounds: Bounds) -> Potential:
    model = model_of(potential)
    if isinstance(potential, Quadratic):
        source = potential.source
        assert source is not None
        share = None if source.share is None else np.minimum(source.share, bounds.weight)
        if source.design is None and share is not None:
            remedy = "Use fedpdmc.models.linear with a column of ones."
            raise InputError("Site(budget)", "weights of gaussian_mean", remedy)
        if source.design is None:
            return Quadratic.of_records(GaussianRecords(None, bounds.clip_rows(source.response), source.weight))
        response = bounds.clip_values("outcome", source.response)
        return Quadratic.of_records(GaussianRecords(bounds.clip_rows(source.design), response, source.weight, share))
    assert isinstance(potential, LinearPredictor)
    design, response, offset = (np.asarray(x) for x in (potential.design, potential.response, potential.offset))
    if model.loss == "cox":
        return potential
    if model.series:
        # Every value of a series is the outcome of one transition and the covariate of the next: one range for both.
        design = np.stack([bounds.clip_values("outcome", design[:, 0]), design[:, 1]], 1)
    else:
        design = bounds.clip_rows(design)
    if model.loss != "logistic":
        # Without a declared range: small enough that squares do not overflow.
        response = np.clip(bounds.clip_values("outcome", response), -LARGEST, LARGEST)
    low, high = bounds.offset or (0.0, 0.0)
    arrays = {"design": design, "response": response, "offset": np.clip(offset, low, high)}
    weight = None if potential.weight is None else jnp.minimum(potential.weight, bounds.weight)
    return dataclasses.replace(potential, **{key: jnp.asarray(x) for key, x in arrays.items()}, weight=weight)


def _arrays(potential: Potential) -> list[np.ndarray]:
    if isinstance(potential, Quadratic):
        source = potential.source
        assert source is not None
        return [np.asarray(x) for x in (source.design, source.response, source.share) if x is not None]
    if isinstance(potential, Program):
        return [np.asarray(x) for x in jax.tree.leaves(potential.data)]
    assert isinstance(potential, LinearPredictor)
    own = (potential.design, potential.response, potential.offset, potential.weight)
    return [np.asarray(x) for x in own if x is not None]


def fingerprint(potential: Potential) -> str:
    """A hash of the records; it stays in the site's ledger."""
    digest = hashlib.sha256()
    for array in _arrays(potential):
        digest.update(repr(array.shape).encode() + np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def grid(bound: float, most_records: int) -> float:
    """q: a power of two with ``N bound ≤ 2⁵² q``."""
    return 2.0 ** (math.ceil(math.log2(bound)) + math.ceil(math.log2(most_records)) - EXACT_BITS) if bound > 0 else 1.0


def _cut_records(model: RecordModel, size: int, count: int) -> dict[str, Any]:
    """Blocks of records, filled up to ``count`` and whole blocks with copies of the last record, which have no weight."""
    places = np.arange(-(-count // size) * size)

    def cut(value) -> Any:
        array = np.asarray(value)[np.minimum(places, model.records - 1)]
        return jnp.asarray(array.reshape(-1, size, *array.shape[1:]))

    data = {key: cut(value) for key, value in model.data.items() if key != CONSTANTS}
    return data | {WEIGHTS: data[WEIGHTS] * jnp.asarray((places < model.records).astype(float).reshape(-1, size))}


@eqx.filter_jit
def _block(function: Any, convex: bool, x, data: dict[str, Any], limits):
    own = _Block(function, x, data)

    def of_one(z, covariates, row):
        curvature = jax.hessian(own.loss)(z, row)
        # If the bound assumes convexity, negative curvature of a record is set to zero.
        curvature = jnp.maximum(curvature, 0.0) if convex else curvature
        jacobian = own.jacobian(covariates)
        return jacobian @ curvature @ jacobian.T

    second = jax.vmap(of_one)(own.z, own.design, own.rows)
    held = functools.partial(clip_and_add, data[WEIGHTS])
    return held(own.gradients(), limits[0], limits[2]), held(second, limits[1], limits[3])


def _loss(source: Source, z, values: dict[str, Any]):
    """F of one record with predictors and parameters z, and these values of columns and constants."""
    begin, values = 0, dict(values)
    for one in (*source.predictors, *source.parameters):
        values[one.name] = jnp.reshape(z[begin : begin + one.type.size], one.type.shape)
        begin += one.type.size
    return evaluate(source.likelihood, values)[""]


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
        return _loss(self.source, z, {**self.constants, **row})

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


def clip_and_add(weights, parts, bound, q):
    """The sum of the parts times their weights, each clipped to the bound; parts that are not finite count as zero."""
    n = len(parts)
    flat = weights[:, None] * parts.reshape(n, -1)
    flat = jnp.where(jnp.all(jnp.isfinite(flat), 1, keepdims=True), flat, 0.0)
    length = jnp.sqrt(jnp.sum(flat**2, 1, keepdims=True))
    flat = jnp.where(length > bound, flat * (bound / jnp.maximum(length, 1e-300)), flat)
    return jnp.sum(jnp.round(flat / q) * q, 0).reshape(parts.shape[1:])


@double_precision
def hold_file_to_bounds(model: RecordModel, budget: Budget) -> RecordModel:
    """The records within the declared bounds: records outside are clipped, or refused."""
    bounds: Bounds = budget.bounds
    _check_number(model.records, bounds)
    # Missing declarations are reported before the records are examined.
    _ = ProgramFacts(model, budget).bounds
    # Derivatives do not show a jump: a release would omit it, and a walk would pass over it.
    Program(model.function, model.data, model.dim or 0).check_continuity()
    data = dict(model.data)
    if DESIGN in data:
        data[DESIGN] = jnp.asarray(bounds.clip_rows(np.asarray(data[DESIGN])))
    data[WEIGHTS] = jnp.minimum(data[WEIGHTS], bounds.weight)
    for name, ends in (bounds.columns or {}).items():
        if name in data:
            data[name] = jnp.asarray(np.clip(np.asarray(data[name]), *ends))
    _check_inside(budget, all(np.array_equal(data[key], model.data[key]) for key in data if key != CONSTANTS))
    return RecordModel(model.function, data, model.dim, model.names, model.constrain)


# Sensitivity of a model file's derivatives to one record, from the file and declared bounds alone.
#
# A record's minus log likelihood depends on the parameters through linear predictors ``η_p = ξ·β_p`` and parameters θ. With
# ``z = (η, θ)``, f's gradient in (β, θ) has the Euclidean norm ``√Σ_k w_k (∂_k f)²`` and its Hessian the Frobenius norm
# ``√Σ_kl w_k w_l (∂_kl f)²``, with ``w_k = |ξ|²`` for a predictor and one for a parameter. Both are bounded on the box of
# all z and columns that the declared bounds allow, by enclosures of the derivatives and branch and bound. A record that is
# added or removed changes a sum by at most the bound, one replaced by another by at most twice the bound. If f is a convex
# function of one predictor alone, its Hessians ``f'' ξξᵀ`` have non-negative inner products, and the sum of Hessians
# changes by at most √2 times the bound.


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


@functools.lru_cache(32)
@double_precision
def record_bounds(model: FileModel, width: int, declared: str, constants: tuple = ()) -> RecordBounds:
    """Bounds on a record's derivatives over everything that the declared bounds allow.

    ``width`` is the number of columns of X, ``declared`` is `Bounds.describe` as JSON, and ``constants`` are names, shapes
    and values of the contract's numbers. Refused if a bound is not declared, or a derivative has none.
    """
    bounds = Bounds(**json.loads(declared))
    given = {name: np.asarray(values).reshape(shape) for name, shape, values in constants}
    search = _Search(model, bounds, width, given)
    try:
        found = [search.largest(order) for order in (1, 2)]
    except NoEnclosure as error:
        raise InputError("Site(budget)", f"a model file whose derivatives have no bounds: {error}", REMEDY) from error
    if not all(map(math.isfinite, found)):
        words = f"a model whose derivative by {', '.join(search.unbounded())} has no bound for one record"
        raise InputError("Site(budget)", words, REMEDY)
    return RecordBounds(_round_up(found[0]), _round_up(found[1]), search.convex(found[1]))


def _round_up(value: float) -> float:
    if value == 0:
        return 0.0
    cell = 2.0 ** (math.floor(math.log2(value)) - BITS)
    return up(math.ceil(value / cell) * cell)


class _Search:
    """Branch and bound for one model: the functions that it needs, compiled once."""

    def __init__(self, model: FileModel, bounds: Bounds, width: int, constants: dict[str, np.ndarray]):
        self.model, self.constants = model, constants
        self._set_box(bounds, width)
        values = [range(one.levels) if one.domain == "index" else (0, 1) for one in self.level_columns]
        if math.prod(len(one) for one in values) > MOST_LEVELS:
            raise InputError("Site(budget)", f"more than {MOST_LEVELS} combinations of levels", "Merge levels.")
        every = list(itertools.product(*values))
        self.levels = np.array(every, float).reshape(len(every), len(values))
        self._made = {order: self._functions(order) for order in (1, 2)}

    def _set_box(self, bounds: Bounds, width: int) -> None:
        """The box of z and of columns that are numbers, from the declared bounds, and the columns that are levels."""
        source = self.model.source
        predictors = sum(one.type.size for one in source.predictors)
        dim = predictors * width + sum(one.type.size for one in source.parameters)
        region = bounds.sizes("region", dim)
        if region is None:
            remedy = "Declare region=..., a bound on the parameters."
            raise InputError("Bounds(region)", "none for a model file", remedy)
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
        declared = bounds.columns or {}
        for one in numbers:
            if one.name not in declared:
                remedy = f"Declare the range of its values: columns={{{one.name!r}: (low, high)}}."
                raise InputError(f"Bounds(columns: {one.name})", "none for a column of a model file", remedy)
        self.high = np.concatenate([reach, region[predictors * width :], [declared[one.name][1] for one in numbers]])
        self.low = np.concatenate([-reach, -region[predictors * width :], [declared[one.name][0] for one in numbers]])
        self.weights = np.concatenate([np.full(predictors, weight), np.ones(dim - predictors * width)])
        self.size, self.columns, self.level_columns = len(self.weights), numbers, levels

    def largest(self, order: int) -> float:
        """The bound on the norm of the gradient (order one) or the Hessian (two), on all levels."""
        return supremum(*self._made[order], *self._boxes())

    def _boxes(self) -> tuple[np.ndarray, np.ndarray]:
        """A box for each combination of levels; its sides along the levels have no length."""
        levels = self.levels
        ends = (np.tile(end, (len(levels), 1)) for end in (self.low, self.high))
        low, high = (np.concatenate([end, levels], 1) for end in ends)
        return low, high

    def convex(self, bound: float) -> bool:
        """Whether f is a convex function of one predictor alone, by enclosures of its second derivative."""
        if self.size != 1 or not self.model.source.predictors:
            return False
        split, room = len(self.low), FLAT * bound / self.weights[0]

        def below(low, high):
            found = self._enclose(2, low[:split], high[:split], low[split:])
            return jnp.maximum(-room - jnp.ravel(found.lo if isinstance(found, Interval) else found)[0], 0.0)

        upper = jax.jit(jax.vmap(below))
        return supremum(upper, lambda points: np.zeros(len(points)), *self._boxes(), most=PATIENCE) == 0

    def unbounded(self) -> list[str]:
        """The parameters with respect to which a derivative has no bound on the whole box."""
        source, names = self.model.source, []
        for one in (*source.predictors, *source.parameters):
            names += [one.name] * one.type.size
        box, bad = (jnp.asarray(self.low), jnp.asarray(self.high)), set[str]()
        sizes = jax.jit(lambda levels: self._magnitudes(1, *box, levels))
        for levels in self.levels:
            found = np.asarray(sizes(jnp.asarray(levels)))
            bad |= {names[k] for k in np.flatnonzero(~np.isfinite(found))}
        return [name for name in dict.fromkeys(names) if name in bad] or ["its parameters"]

    def _derivative(self, order: int):
        """The derivative of f with respect to z, as a function of z, columns that are numbers, and levels."""

        def f(z, numbers, levels):
            values: dict[str, Any] = dict(self.constants)
            for part, given in ((self.columns, numbers), (self.level_columns, levels)):
                values |= {one.name: given[k].astype(one.type.dtype) for k, one in enumerate(part)}
            return _loss(self.model.source, z, values)

        return jax.grad(f) if order == 1 else jax.hessian(f)

    def _enclose(self, order: int, low, high, levels):
        n = self.size
        return enclose(self._derivative(order))(Interval(low[:n], high[:n]), Interval(low[n:], high[n:]), levels)

    def _magnitudes(self, order: int, low, high, levels):
        found = self._enclose(order, low, high, levels)
        return found.magnitude if isinstance(found, Interval) else jnp.abs(found)

    def _norm(self, order: int, sizes):
        """The norm in coefficients and parameters, from the derivatives with respect to z."""
        weights = jnp.asarray(self.weights)
        weights = weights if order == 1 else weights[:, None] * weights
        return jnp.sqrt(jnp.sum(weights * sizes**2)) * (1 + 1e-12)

    def _functions(self, order: int):
        split = len(self.low)

        def upper(low, high):
            return self._norm(order, self._magnitudes(order, low[:split], high[:split], low[split:]))

        def value(point):
            n = self.size
            return self._norm(order, self._derivative(order)(point[:n], point[n:split], point[split:]))

        return jax.jit(jax.vmap(upper)), jax.jit(jax.vmap(value))


# Branch and bound ------------------------------------------------------------------------------------------------------


Boxes = np.ndarray


def supremum(
    upper: Callable[[Boxes, Boxes], np.ndarray],
    value: Callable[[Boxes], np.ndarray],
    low: Boxes,
    high: Boxes,
    most: int = MOST_BOXES,
) -> float:
    """An upper bound on ``value`` over the union of boxes with corners (k, n); infinite if none is found.

    ``upper`` maps corners of shape (`BATCH`, n) to bounds on the values in the boxes between them, ``value`` points to
    values. There are at most ``most`` boxes.
    """
    width = np.maximum((high - low).max(0), 1e-300)
    bounds, found = _bound_boxes(upper, value, low, high)
    settled, seen = 0.0, len(low)
    while len(low):
        open_ = ~(bounds <= found * (1 + SHARE))
        settled = max(settled, float(np.max(bounds[~open_], initial=0.0)))
        low, high, bounds = low[open_], high[open_], bounds[open_]
        if not len(low) or seen >= (most if np.isfinite(bounds).all() else min(most, PATIENCE)):
            break
        order = np.argsort(-bounds, kind="stable")
        first, rest = order[: BATCH // 2], order[BATCH // 2 :]
        left, right = _halves(low[first], high[first], width)
        new_low, new_high = np.concatenate([left[0], right[0]]), np.concatenate([left[1], right[1]])
        tighter, more = _bound_boxes(upper, value, new_low, new_high)
        tighter = np.minimum(tighter, np.tile(bounds[first], 2))
        low, high = np.concatenate([low[rest], new_low]), np.concatenate([high[rest], new_high])
        bounds, found, seen = np.concatenate([bounds[rest], tighter]), max(found, more), seen + len(new_low)
    return max(settled, float(np.max(bounds, initial=0.0)))


def _halves(low: Boxes, high: Boxes, width: np.ndarray) -> tuple[tuple[Boxes, Boxes], tuple[Boxes, Boxes]]:
    side = np.argmax((high - low) / width, 1)
    rows = np.arange(len(low))
    middle = 0.5 * (low[rows, side] + high[rows, side])
    below, above = high.copy(), low.copy()
    below[rows, side] = above[rows, side] = middle
    return (low, below), (above, high)


def _bound_boxes(upper, value, low: Boxes, high: Boxes) -> tuple[np.ndarray, float]:
    """An upper bound for each box, infinite if there is none, and the largest value at their midpoints."""
    bounds, found = np.empty(len(low)), 0.0
    for at in range(0, len(low), BATCH):
        here = np.minimum(np.arange(at, at + BATCH), len(low) - 1)
        bounds[here] = np.asarray(upper(low[here], high[here]))
        points = np.asarray(value(0.5 * (low[here] + high[here])))
        found = max(found, float(np.max(points[np.isfinite(points)], initial=0.0)))
    return np.where(np.isnan(bounds), np.inf, bounds), found


@dataclasses.dataclass(frozen=True)
class ClippedSum:
    """``Σ_n c(∇f_n)(x)`` over padded records."""

    function: Any
    bound: float
    unit: float

    def __call__(self, x, data):
        """The sum, by blocks of records."""

        def add(total, block):
            parts = _Block(self.function, x, {**block, **data["same"]}).gradients()
            return total + clip_and_add(block[WEIGHTS], parts, self.bound, self.unit), None

        return jax.lax.scan(add, jnp.zeros(x.shape), data["blocks"])[0]


def padded_potential(potential: Potential) -> Potential:
    """Records padded to a shape that other sites share."""
    return potential.padded(bucket(potential.design.shape[0])) if isinstance(potential, LinearPredictor) else potential


# What a budget knows of a site's records --------------------------------------------------------------------------------
#
# Arrivals of a model file under a privacy budget: what one record can change, and how long a walk can take.
#
# A flip's rate is ``(v_i ∂_i(U − q))_+ + ρ|v_i|``. The site computes ``∇U = Sᵀ G``, where G is a sum over records of
# gradients in the model's own parameters. Each is computed by itself, scaled down if it is longer than the certified bound b
# (`ProgramFacts.bounds`), set to zero if it is not finite, and rounded to multiples of a power of two, so that G is exact in
# every order of summation.
#
# **Sensitivity.** A record's part g has ``|g| ≤ b' = b(1 + 10⁻¹²) + √k q/2``, whatever its program computes, at the same
# computed point x for both of two neighbours. All shapes are public, since records are padded to the declared maximum
# number: both run the same compiled program, in which a record's part depends on that record alone. Adding or removing a
# record changes ``∇U`` by ``Sᵀ g``, replacing one by ``Sᵀ(g − g̃)``: at most ``‖Sᵀ‖ b'``, or twice that, in each norm of
# the account. Products with S are rounded by at most ``γ_{k+2} N b' |S_{·i}|`` in coordinate i.
#
# **Region.** Within the declared region no gradient is longer than b, nothing is scaled down, and the rates are those of the
# model: the chain is exact. A plan that leaves the region is refused from public facts (code REGION), and the run ends; it
# never continues with clipped rates.
#
# **Work.** A ceiling on rates that came from the records could end a walk at a time that depends on them. Here it is
# public: ``c_i = N b' |S_{·i}|`` for the records, with N their declared maximum number. In the proof of
# `fedpdmc.privacy.budget_planning` the ceiling is then at most ``V + W + E`` with W from the control variate alone and
# ``2c`` added to E: the control variate's signed rate is at most ``V + c``, the records' ceiling is c, and the records' rate
# changes by at most 2c, which is within ``V/2`` where ``W + E ≤ V/2``.


Pair = tuple[float, float]  # of gradient and Hessian


@dataclasses.dataclass(frozen=True, eq=False)
class LossFacts:
    """Records with a built-in loss under a budget, whose own bounds `fedpdmc.privacy.sensitivity` has."""

    potential: Potential  # of the records within the declared bounds
    budget: Budget

    @functools.cached_property
    def public(self) -> ModelFacts:
        """What identifies the model."""
        return model_of(self.potential)

    @property
    def _terms(self) -> tuple[ModelFacts, Bounds, str]:
        return self.public, self.budget.bounds, self.budget.neighbours

    def region(self, dim: int) -> np.ndarray | None:
        """The region of the site's own parameters."""
        declared = self.budget.bounds.sizes("region", dim)
        if self.public.loss != "cox":
            return declared
        return np.minimum(COX_REGION, np.full(dim, COX_REGION) if declared is None else declared)

    def change(self, scale: np.ndarray) -> Sensitivity:
        """K of the records' gradient in whitened coordinates, ``scale`` being the rows of S."""
        return sensitivity(*self._terms, scale)

    def limits(self, scale: np.ndarray, center: np.ndarray, known: Sensitivity, excess: float) -> Limits:
        """Limits on plans, and K with rounding."""
        return limits(*self._terms, scale, center, known, excess)

    def rates(self, scale: np.ndarray, where: np.ndarray) -> tuple[Any, float]:
        """How steep rates are within ``where``, and what the records add to the excess: both bound a walk's work."""
        return steepness(*self._terms, scale, where), 0.0

    @property
    def release_change(self) -> Pair:
        """How much one record can change the gradient and the Hessian."""
        return derivative_sensitivity(*self._terms)

    def release(self, point: np.ndarray, spread: np.ndarray | None, site: str) -> tuple[Pair, Pair]:
        """Sensitivities of gradient and Hessian, or of their means, to one record, and bounds on their rounding."""
        bounds, neighbours, dim = self.budget.bounds, self.budget.neighbours, self.public.dim
        first, second = self.release_change
        # Numbers large enough to overflow are refused.
        with np.errstate(over="ignore", invalid="ignore"):
            factor, size = 1.0, float(np.linalg.norm(point))
            far = point if spread is None else np.abs(point) + 0.5 * np.sum(spread**2, 1)
            if spread is not None:
                factor = averaged_sensitivity(self.public, bounds, spread)
                # Derivatives that no record can change need no noise, averaged or not: zero stays zero.
                first, second = up(factor * first), up(factor * second) if second else 0.0
                # Predictors reach to the last node. The factor two covers the sum over nodes and the deviations.
                size, factor = up(size + LAST_NODE * float(np.linalg.norm(spread))), 2 * factor
            if not np.max(np.abs(far), initial=0.0) <= (COX_REGION if self.public.loss == "cox" else LARGEST_POINT):
                why = "a point where numbers might overflow, or a count be lost in rounding (code BAD_POINT)."
                raise PlanRefused(f"site {site!r}: {why}")
            zero = np.eye(dim), np.zeros(dim)
            off = up(factor * gradient_rounding(*self._terms, *zero, size))
            rounding = off, up(factor * hessian_rounding(self.public, bounds, neighbours, size))
        pairs = zip((first, second), rounding, strict=True)
        if any(known > 0 and not 2 * off <= LARGEST_SHARE * known for known, off in pairs):
            raise PlanRefused(
                f"site {site!r}: with up to {bounds.most_records:,} records and predictors this large, rounding is not "
                "small against the effect of one record (code BAD_POINT). Declare the most records that there can be, "
                "Bounds(most_records=...), or tighter bounds and a smaller region."
            )
        return (first, second), rounding

    def derivatives(self, x: np.ndarray, spread: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Gradient and Hessian, or their means."""
        about = None if spread is None else on_device(spread)
        _, gradient, hessian = derivatives_of(bare(self.potential), on_device(x), about)
        return np.asarray(gradient), np.asarray(hessian)

    def walked(self) -> Potential:
        """The records as a private site walks with them."""
        return padded_potential(self.potential)


@dataclasses.dataclass(frozen=True, eq=False)
class ProgramFacts:
    """Records of a model file under a budget: what follows from enclosures."""

    model: RecordModel
    budget: Budget

    @property
    def public(self) -> str:
        """What identifies the model."""
        return self.model.function.model.digest

    @functools.cached_property
    def bounds(self) -> RecordBounds:
        """Bounds on one record's derivatives under the declared bounds."""
        function, budget = self.model.function, self.budget
        assert isinstance(function, RecordSum)
        if budget.neighbours == "label":
            raise InputError(
                "Budget(neighbours)",
                f"{budget.neighbours!r} with a model file",
                "Use 'replace' or 'add-remove': a model file does not say which columns are outcomes.",
            )
        numbers = ((name, np.asarray(value)) for name, value in sorted(self.model.data[CONSTANTS].items()))
        constants = tuple((name, value.shape, tuple(value.ravel().tolist())) for name, value in numbers)
        found = record_bounds(function.model, function.width, json.dumps(budget.bounds.describe()), constants)
        weight = budget.bounds.weight
        return found._replace(gradient=up(weight * found.gradient), hessian=up(weight * found.hessian))

    @property
    def most(self) -> int:
        """The declared maximum number of records."""
        return self.budget.bounds.most_records

    @property
    def grids(self) -> Pair:
        """Q of gradients and of Hessians."""
        return grid(self.bounds.gradient, self.most), grid(self.bounds.hessian, self.most)

    @property
    def longest(self) -> float:
        """``b'``: no record's part of the sum is longer."""
        return up(self.bounds.gradient * (1 + SCALED) + math.sqrt(self.model.dim or 0) * self.grids[0] / 2)

    def region(self, dim: int) -> np.ndarray | None:
        """The region of the site's own parameters."""
        return self.budget.bounds.sizes("region", dim)

    def change(self, scale: np.ndarray) -> Sensitivity:
        """K of the records' gradient in whitened coordinates, ``scale`` being the rows of S."""
        factor = 2 if self.budget.neighbours == "replace" else 1
        return Sensitivity(*(up(factor * k) for k in largest_row(Bounds(norm=self.longest), scale)))

    def limits(self, scale: np.ndarray, center: np.ndarray, known: Sensitivity, excess: float) -> Limits:
        """Limits on plans, and K with rounding: of products with S, of the control variate and of levels.

        Raises
        ------
        InputError
            Rounding is as large as the effect of one record.
        """
        rows, dim = scale.shape
        slope, wide = min(STEEPEST * known.k_2, MOST_SLOPE), math.sqrt(dim)
        total = self.most * self.longest * float(np.linalg.norm(scale))
        off = up(gamma(rows + 2) * total + 4 * UNIT * ((dim + 4) * slope + total + wide * excess) + wide * LEVELS)
        if not 2 * off <= LARGEST_SHARE * known.k_2:
            raise InputError(
                "Bounds(most_records)",
                f"{self.most:,}: rounding changes a rate by {2 * off / known.k_2:.3g} of what a record can",
                "Declare no more records than there can be, and a reference with the scale of the posterior.",
            )
        k_inf, k_1, k_2 = known
        return Limits(
            FARTHEST, slope, off, Sensitivity(up(k_inf + 2 * off), up(k_1 + 2 * wide * off), up(k_2 + 2 * off))
        )

    def rates(self, scale: np.ndarray, where: np.ndarray) -> tuple[Any, float]:
        """How steep rates are, of the control variate alone, and twice the largest ``c_i``, which the records add."""
        widest = float(np.linalg.norm(scale, axis=0).max())
        return (0.0, 0.0, 0.0, 0.0), 2 * up(self.most * self.longest * widest * (1 + 1e-8))

    @property
    def release_change(self) -> Pair:
        """How much one record can change the gradient and the Hessian."""
        first, second = self.bounds.changes(self.budget.neighbours)
        return up(first * (1 + SCALED)), up(second * (1 + SCALED))

    def release(self, point: np.ndarray, spread: np.ndarray | None, site: str) -> tuple[Pair, Pair]:
        """Sensitivities of gradient and Hessian to one record, and bounds on the rounding of each record's part."""
        if spread is not None:
            raise InputError("reference", "'vb' with a model file under a privacy budget", "Use reference='laplace'.")
        dim, q = self.model.dim or 0, self.grids
        return self.release_change, (up(math.sqrt(dim) * q[0] / 2), up(dim * q[1] / 2))

    @double_precision
    def derivatives(self, x: np.ndarray, spread: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Sums over records of clipped gradients and Hessians."""
        limits = jnp.asarray([*self.bounds[:2], *self.grids])
        gradient, hessian = np.zeros(len(x)), np.zeros((len(x), len(x)))
        cut = _cut_records(self.model, BLOCK, self.model.records)
        for k in range(len(cut[WEIGHTS])):
            data = {key: value[k] for key, value in cut.items()} | {CONSTANTS: self.model.data[CONSTANTS]}
            one, two = _block(self.model.function, self.bounds.convex, jnp.asarray(x), data, limits)
            gradient, hessian = gradient + np.asarray(one), hessian + np.asarray(two)
        return gradient, hessian

    @double_precision
    def walked(self) -> ClippedRecords:
        """The records as a private site walks with them: padded to the declared maximum, so that all shapes are public."""
        model = self.model
        whole = {"blocks": _cut_records(model, WALK_BLOCK, self.most), "same": {CONSTANTS: model.data[CONSTANTS]}}
        gradient = ClippedSum(model.function, self.bounds.gradient, self.grids[0])
        return ClippedRecords(gradient, whole, jnp.asarray(self.most * self.longest), model.dim or 0)
