"""Bounds on the derivatives of one record over all values that a contract's columns allow, from the model alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from fedpdmc._jax.precision import double_precision
from fedpdmc.enclosures import Interval, enclose, smoothed
from fedpdmc.errors import NoEnclosure
from fedpdmc.models.model_file.records import CONSTANTS, DESIGN, WEIGHTS, RecordSum
from fedpdmc.potentials.gaussian_average import public_points

if TYPE_CHECKING:
    from fedpdmc.study.contract import Study


class DerivativeBounds:
    """Enclosures of gradient and Hessian of a record whose columns are anywhere within their declared bounds.

    Parameters
    ----------
    study : Study
        With a model of one record.
    """

    @double_precision
    def __init__(self, study: Study):
        assert study.model is not None
        alike = not any(isinstance(value, dict) for value in study.model.constants.values())
        self._dim = len(study.names)
        self._boxes = [_box(study, site) for site in (study.sites[:1] if alike else study.sites)]
        function = RecordSum(study.model.model, study.model.layout.width)

        def derivatives(x, data):
            def total(x):
                return smoothed(function)(x, data)

            return jax.grad(total)(x), jax.hessian(total)(x)

        self._enclosed = jax.jit(enclose(derivatives))

    @double_precision
    def at(self, x: np.ndarray, spread: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """The largest absolute gradient and Hessian, or means as `Potential.averaged` has them; infinite if unknown."""
        if spread is None:
            return self._at_point(x)
        points, weights = public_points(len(x))
        found = [self._at_point(x + spread @ point) for point in points]
        gradient, hessian = (np.tensordot(np.abs(weights), np.stack(part), 1) for part in zip(*found, strict=True))
        return gradient, hessian

    def _at_point(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        worst = np.zeros(self._dim), np.zeros((self._dim, self._dim))
        for box in self._boxes:
            try:
                found = self._enclosed(jnp.asarray(x), box)
            except NoEnclosure:
                return np.full(self._dim, np.inf), np.full((self._dim, self._dim), np.inf)
            worst = tuple(np.maximum(one, _size(other)) for one, other in zip(worst, found, strict=True))
        return worst  # type: ignore[return-value]


def _size(form: Any) -> np.ndarray:
    """The largest absolute value; infinite where it is not known."""
    size = np.maximum(np.abs(form.lo), np.abs(form.hi)) if isinstance(form, Interval) else np.abs(np.asarray(form))
    return np.where(np.isnan(size), np.inf, size)


def _box(study: Study, site: str) -> dict[str, Any]:
    """Data of one record, with intervals for its columns."""
    bound, box = study.model, {}
    assert bound is not None
    for column in bound.model.source.columns:
        declared = study.columns[bound.columns[column.name]]
        low, high = (0.0, len(declared.levels) - 1.0) if declared.type == "level" else declared.range
        box[column.name] = _interval(low, high, (1, *column.type.shape), column.type.dtype)
    if bound.model.source.group is not None:
        group = bound.model.source.group
        box[group.mask] = _interval(0.0, 1.0, (1, group.length), np.dtype(float))
    if bound.design is not None:
        largest = bound.design.largest[None]
        low = np.where([name == "Intercept" for name in bound.design.names], 1.0, -largest)
        box[DESIGN] = Interval(jnp.asarray(low), jnp.asarray(largest))
    box[CONSTANTS] = {name: jnp.asarray(value) for name, value in bound.constants_of(site).items()}
    box[WEIGHTS] = jnp.ones(1)
    return box


def _interval(low: float, high: float, shape: tuple[int, ...], dtype: np.dtype) -> Interval:
    return Interval(jnp.full(shape, low, dtype), jnp.full(shape, high, dtype))
