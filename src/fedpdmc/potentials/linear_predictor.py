"""Sums over records of a scalar loss of a linear predictor: most models of practice."""

from __future__ import annotations

import dataclasses
import math

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fedpdmc._jax.compilation import on_device
from fedpdmc.potentials.base import ROTATION_REACH, Field, Potential, Sum
from fedpdmc.potentials.losses import Loss

EPSILON = 2.0**-52


class LinearPredictor(Potential):
    """``U(x) = Σ_i R_i(z_i)`` with ``z_i = ξ_i·x + o_i``, ``R_i = ℓ(·; y_i)`` less a quadratic of ``z_i``.

    The quadratic ``f_i (z − z*_i) + ½ s_i (z − z*_i)²`` is a control variate: zero, or made from the derivatives of the loss
    at a public point, or from their means about it. The site walks with the remainder.

    Parameters
    ----------
    design : array of shape (n, d), or (n,)
        The records' covariates ``ξ_i``; of shape (n,) when record i sees coordinate i alone (the cells of a grid).
    offset, response : arrays of shape (n,)
        ``o_i`` and ``y_i``.
    loss : Loss
    control : array of shape (3, n), optional
        ``z*``, ``f`` and ``s``.
    series : int
        How many terms one record contributes if the records are series (its transitions), else zero.
    cubic : array of shape (d, d, d), optional
        ``Σ sup|ℓ'''| |ξ_i| ⊗ ξ_i ⊗ ξ_i``: with it the bound of ``G''`` on a line needs no pass over the records.
    """

    design: Float[Array, "n d"] | Float[Array, " n"]
    offset: Float[Array, " n"]
    response: Float[Array, " n"]
    loss: Loss
    control: Float[Array, "3 n"] | None = None
    cubic: Float[Array, "d d d"] | None = None
    series: int = eqx.field(default=0, static=True)

    @classmethod
    def from_records(cls, design, response, loss: Loss, offset=None) -> LinearPredictor:
        """A potential of all records, with no control variate."""
        n = design.shape[0]
        offset = on_device(np.zeros(n)) if offset is None else offset
        return cls(design, offset, response, loss)

    @property
    def dim(self) -> int:
        """Number of parameters."""
        return self.design.shape[-1]

    @property
    def records(self) -> int:
        """Number of records."""
        return self.response.shape[0]

    @property
    def diagonal(self) -> bool:
        """Whether record i sees coordinate i alone."""
        return self.design.ndim == 1

    def _predict(self, a):
        return a * self.design if self.diagonal else a @ self.design.T

    def _collect(self, r, design=None):
        design = self.design if design is None else design
        return r * design if self.diagonal else r @ design

    def _derivatives(self, z):
        """``R', R''`` and the bound of ``|R'''|`` at the predictors z."""
        first, second = self.loss.first(z, self.response), self.loss.second(z, self.response)
        if self.control is not None:
            point, slope, curvature = self.control
            first, second = first - slope - curvature * (z - point), second - curvature
        return first, second, self.loss.third(z, self.response)

    def forms(self, a: Float[Array, "C d"]) -> Float[Array, "C n"]:
        """``ξ_i·a``."""
        return self._predict(a)

    def gathered(self, slopes: Float[Array, "C n"]) -> Float[Array, "C d"]:
        """The gradient from the slopes of the records."""
        return self._collect(slopes)

    def slopes(self, forms: Float[Array, "C n"]) -> Float[Array, "C n"]:
        """``R_i'``."""
        return self._derivatives(forms + self.offset)[0]

    def widths(self, forms: Float[Array, "C n"]) -> Float[Array, "C n"]:
        """How far from these forms `largest_slopes` are close and known."""
        return jnp.full_like(forms, min(1.0, self.loss.reach))

    def largest_slopes(self, forms: Float[Array, "C n"], width: Float[Array, "C n"]) -> Float[Array, "C n"]:
        """Bounds of ``|R_i'|`` within these distances: ``|R'| + w |R''| + ½ w² sup|R'''|``, and room for rounding."""
        z = forms + self.offset
        first, second, third = self._derivatives(z)
        terms = 1 + jnp.abs(self.response) + jnp.abs(first)
        if self.control is not None:
            point, slope, curvature = self.control
            terms = terms + jnp.abs(slope) + jnp.abs(curvature) * (1 + jnp.abs(z) + jnp.abs(point))
        return jnp.abs(first) + width * (jnp.abs(second) + 0.5 * width * third) + 64 * EPSILON * terms

    def value(self, x):
        """``Σ R_i(z_i)``."""
        z = self._predict(x) + self.offset
        total = jnp.sum(self.loss.value(z, self.response))
        if self.control is None:
            return total
        point, slope, curvature = self.control
        return total - jnp.sum(slope * (z - point) + 0.5 * curvature * (z - point) ** 2)

    def gradient(self, x):
        """``Σ R_i'(z_i) ξ_i``."""
        return self._collect(self._derivatives(self._predict(x) + self.offset)[0])

    def gradients(self, a: Float[Array, "C d"]) -> Float[Array, "C d"]:
        """``Σ R_i'(z_i) ξ_i`` at many points: one pass over the records."""
        return self._collect(self._derivatives(self._predict(a) + self.offset)[0])

    def hessian(self, x):
        """``Σ R_i''(z_i) ξ_i ξ_iᵀ``."""
        second = self._derivatives(self._predict(x) + self.offset)[1]
        if self.diagonal:
            return jnp.diag(self.design**2 * second)
        return (self.design * second[:, None]).T @ self.design

    def averaged(self, x, spread):
        """Over ``x ~ N(·, S Sᵀ)`` a predictor is ``N(z_i, |Sᵀξ_i|²)``: the means of each record's loss are one-dimensional.

        Of records with no control variate.
        """
        assert self.control is None
        z = self._predict(x) + self.offset
        value, first, second = self.loss.averaged(z, self._deviation(spread), self.response)
        if self.diagonal:
            return jnp.sum(value), self._collect(first), jnp.diag(self.design**2 * second)
        return jnp.sum(value), self._collect(first), (self.design * second[:, None]).T @ self.design

    def expanded_at(
        self, x: Float[Array, " d"], order: int, spread: Float[Array, "d d"] | None = None
    ) -> LinearPredictor:
        """The same records less their own Taylor polynomial of degree ``order`` (1 or 2) at ``x``.

        With a spread, less the polynomial of the means of each loss's derivatives over ``N(x, S Sᵀ)``.
        """
        z = self._predict(x) + self.offset
        if spread is None:
            first, second = self.loss.first(z, self.response), self.loss.second(z, self.response)
        else:
            _, first, second = self.loss.averaged(z, self._deviation(spread), self.response)
        second = second if order == 2 else jnp.zeros_like(z)
        control = jnp.stack([z, first, second])
        return dataclasses.replace(self, control=control)

    def _deviation(self, spread):
        """Standard deviations of the predictors."""
        rows = self.design[:, None] * spread if self.diagonal else self.design @ spread
        return jnp.sqrt(jnp.sum(rows**2, -1))

    def padded(self, n: int) -> LinearPredictor:
        """The same potential with records appended up to ``n`` whose covariates are zero: they add a constant.

        Cells of a grid are not padded.
        """
        if self.diagonal:
            return self
        extra = n - self.design.shape[0]

        def pad(x, *widths):
            return on_device(np.pad(np.asarray(x), widths))

        return dataclasses.replace(
            self,
            design=pad(self.design, (0, extra), (0, 0)),
            offset=pad(self.offset, (0, extra)),
            response=pad(self.response, (0, extra)),
            control=None if self.control is None else pad(self.control, (0, 0), (0, extra)),
        )

    def with_cubic(self) -> LinearPredictor:
        """The same potential with its cubic tensor, where that is cheaper than a pass over the records."""
        if self.diagonal or not self.loss.uniform or self.dim**2 > self.design.shape[0]:
            return self
        weight = self.loss.third(self.offset, self.response)
        cubic = jnp.einsum("n,ni,nj,nk->ijk", weight, jnp.abs(self.design), self.design, self.design, optimize=True)
        return dataclasses.replace(self, cubic=cubic)

    def whiten(self, reference, columns):
        """Covariates ``Sᵀ ξ`` and offsets ``o + ξ·c``."""
        rows, center = reference.matrix, reference.center
        if columns is not None:
            rows, center = rows[columns], center[columns]
        offset = self.offset + self._predict(center)
        if not self.diagonal:
            design = self.design @ rows
        elif reference.diagonal and columns is None:
            design = self.design * reference.scale_tril
        else:
            design = self.design[:, None] * rows
        return dataclasses.replace(self, design=design, offset=offset, cubic=None)

    def field(self, rotating, flips, a, v):
        """One pass over the records.

        With ``z(s)`` the predictor along the path: ``G = Σ R' ξ``, ``G' = Σ R'' ż ξ``, ``G'' = Σ (R''' ż² + R'' z̈) ξ``,
        and for ``f(s) = U(a(s))``: ``f'' = Σ R'' ż² + R' z̈``, ``f''' = Σ R''' ż³ + 3 R'' ż z̈ + R' z⃛``. Every ``z`` stays
        within the loss's reach on the piece, and ``|R'''| ≤ third`` there.
        """
        position, speed = self._predict(a), self._predict(v)
        first, second, third = self._derivatives(position + self.offset)
        gradient = self._collect(first)
        if rotating:
            slope, curve, reach = self._along_rotation(flips, gradient, a, v, position, speed, first, second, third)
        else:
            slope, curve, reach = self._along_line(flips, v, speed, second, third)
        return Field(gradient, slope, curve, reach, self._rounding(first, position))

    def _rounding(self, first, position):
        """A bound of the rounding error of ``Σ R' ξ``: a few units in the last place of the largest terms."""
        mass = jnp.sum(jnp.abs(self.design))
        if self.loss.uniform:
            spread = jnp.max(jnp.abs(self.design), initial=0.0)
            drift = 0.0 if self.control is None else jnp.max(jnp.abs(self.control[2]), initial=0.0) * spread
            largest = (2 * self.loss.steepest + drift) * jnp.ones(position.shape[0])
        else:
            largest = jnp.max(jnp.abs(first), -1, initial=0.0) + jnp.max(jnp.abs(self.response), initial=0.0)
        return 8 * EPSILON * mass * largest

    def _along_line(self, flips, v, speed, second, third):
        reach = jnp.full(speed.shape[0], jnp.inf)
        if not math.isinf(self.loss.reach):
            reach = self.loss.reach / jnp.maximum(jnp.max(jnp.abs(speed), -1, initial=0.0), 1e-300)
        if flips and self.cubic is not None:
            return self._collect(second * speed), curve_on_line(self.cubic, v), reach
        if flips:
            return self._collect(second * speed), self._collect(third * speed**2, jnp.abs(self.design)), reach
        slope = jnp.sum(second * speed**2, -1, keepdims=True)
        return slope, jnp.sum(third * jnp.abs(speed) ** 3, -1, keepdims=True), reach

    def _along_rotation(self, flips, gradient, a, v, position, speed, first, second, third):
        amplitude = jnp.hypot(position, speed)
        reach = jnp.full(speed.shape[0], ROTATION_REACH)
        if not math.isinf(self.loss.reach):
            widest = jnp.maximum(jnp.max(amplitude, -1, initial=0.0), 1e-300)
            reach = jnp.minimum(reach, self.loss.reach / widest)
        turn = reach[:, None]
        fastest = jnp.minimum(amplitude, jnp.abs(speed) + turn * jnp.abs(position))
        farthest = jnp.minimum(amplitude, jnp.abs(position) + turn * jnp.abs(speed))
        largest_second = jnp.abs(second) + third * turn * fastest
        if flips:
            curve = self._collect(third * fastest**2 + largest_second * farthest, jnp.abs(self.design))
            return self._collect(second * speed), curve, reach
        # Σ R' z⃛ = −Σ R' ż = −f', itself at most |f'(0)| + reach |f''(0)| + ½ reach² sup|f'''|: solve for sup|f'''|.
        rate = jnp.sum(gradient * v, -1, keepdims=True)
        slope = jnp.sum(second * speed**2, -1, keepdims=True) - jnp.sum(gradient * a, -1, keepdims=True)
        rest = jnp.sum(third * fastest**3 + 3 * largest_second * fastest * farthest, -1, keepdims=True)
        curve = (rest + jnp.abs(rate) + turn * jnp.abs(slope)) / (1 - turn**2 / 2)
        return slope, curve, reach


def curve_on_line(cubic: Float[Array, "d d d"], v: Float[Array, "C d"]) -> Float[Array, "C d"]:
    """A bound of ``|G''|`` on a line, from the cubic tensor."""
    dim = v.shape[-1]
    outer = (v[:, :, None] * v[:, None, :]).reshape(-1, dim * dim)
    return outer @ cubic.reshape(dim, dim * dim).T


def records_of(potential: Potential) -> LinearPredictor | None:
    """The one sum over records within a potential, if it has one."""
    terms = potential.terms if isinstance(potential, Sum) else (potential,)
    found = [term for term in terms if isinstance(term, LinearPredictor)]
    return found[0] if len(found) == 1 else None
