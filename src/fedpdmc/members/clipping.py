"""Preparation of a private site's records: their model's public facts, and clipping to the declared bounds."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from fedpdmc._jax.precision import double_precision
from fedpdmc.errors import InputError
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
)
from fedpdmc.privacy.budget import Budget
from fedpdmc.privacy.declared_bounds import Bounds
from fedpdmc.privacy.sensitivity import Model

LARGEST = 1e100


def model_of(potential: Potential) -> Model:
    """The public facts about a potential: its loss and the loss's parameters."""
    if isinstance(potential, Quadratic) and potential.source is not None:
        kind = "gaussian_mean" if potential.source.design is None else "linear"
        return Model(kind, potential.dim, weight=potential.source.weight)
    if isinstance(potential, LinearPredictor) and potential.control is None:
        loss = potential.loss
        if isinstance(loss, Logistic):
            return Model("logistic", potential.dim)
        if isinstance(loss, Poisson):
            return Model("cox" if potential.diagonal else "poisson", potential.dim)
        if isinstance(loss, StudentT):
            rows = max(potential.series, 1)
            return Model(
                "student_t",
                potential.dim,
                rows,
                df=float(loss.df),
                scale=float(loss.scale),
                series=potential.series > 0,
            )
    if isinstance(potential, LinearUnknownScale):
        raise InputError(
            "Site(budget)",
            "a linear regression with an unknown scale, whose gradient has no bound",
            "Give a known scale: fedpdmc.models.linear(X, y, scale=...).",
        )
    raise InputError(
        "Site(budget)",
        f"a {type(potential).__name__} whose records have no known sensitivity",
        "Privacy budgets need a model of records from fedpdmc.models.",
    )


@double_precision
def hold_to_bounds(potential: Potential, budget: Budget) -> Potential:
    """The potential of the records within the declared bounds: records outside are clipped, or refused."""
    inside = _clipped(potential, budget.bounds)
    # A record of a Cox model is a point.
    terms = _arrays(inside)[1].sum() if model_of(inside).loss == "cox" else len(_arrays(inside)[0])
    check_number(terms, budget.bounds)
    check_inside(budget, lambda: _same(potential, inside))
    return inside


def check_number(records: float, bounds: Bounds) -> None:
    """Refuse more records than declared."""
    if records > bounds.most_records:
        raise InputError(
            "Site(budget)",
            f"{records:.0f} records where at most {bounds.most_records} are declared",
            "Declare Bounds(most_records=...): it must be known without the records.",
        )


def check_inside(budget: Budget, unchanged: Callable[[], bool]) -> None:
    """Refuse records that clipping has changed, unless the budget allows it."""
    if budget.on_violation == "refuse" and not unchanged():
        raise InputError(
            "Site(budget)",
            "records outside the declared bounds",
            "Declare wider bounds, correct the records, or use Budget(on_violation='clip').",
        )


def _clipped(potential: Potential, bounds: Bounds) -> Potential:
    model = model_of(potential)
    if isinstance(potential, Quadratic):
        source = potential.source
        assert source is not None
        if source.design is None:
            return Quadratic.of_records(GaussianRecords(None, bounds.clip_rows(source.response), source.weight))
        response = bounds.clip_values("outcome", source.response)
        return Quadratic.of_records(GaussianRecords(bounds.clip_rows(source.design), response, source.weight))
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
    arrays = (jnp.asarray(x) for x in (design, response, np.clip(offset, low, high)))
    return dataclasses.replace(potential, **dict(zip(("design", "response", "offset"), arrays, strict=True)))


def _arrays(potential: Potential) -> list[np.ndarray]:
    if isinstance(potential, Quadratic):
        source = potential.source
        assert source is not None
        return [np.asarray(x) for x in (source.design, source.response) if x is not None]
    if isinstance(potential, Program):
        return [np.asarray(x) for x in jax.tree.leaves(potential.data)]
    assert isinstance(potential, LinearPredictor)
    return [np.asarray(x) for x in (potential.design, potential.response, potential.offset)]


def _same(one: Potential, other: Potential) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(_arrays(one), _arrays(other), strict=True))


def fingerprint(potential: Potential) -> str:
    """A hash of the records; it stays in the site's ledger."""
    digest = hashlib.sha256()
    for array in _arrays(potential):
        digest.update(repr(array.shape).encode() + np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
