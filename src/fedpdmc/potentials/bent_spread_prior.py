"""The prior of log spreads in bent coordinates, with bounds of its own."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fedpdmc._jax.compilation import on_device
from fedpdmc.bent_coordinates import Bend, bent, curvatures, enclosed, log_volume, steepness, straight
from fedpdmc.errors import InputError
from fedpdmc.potentials.base import Field, Potential, Sum
from fedpdmc.potentials.latent import NEEDS_ROTATION
from fedpdmc.potentials.linear_predictor import LinearPredictor
from fedpdmc.potentials.losses import Logistic, Loss
from fedpdmc.potentials.quadratic import Quadratic

# The longest piece of a path; the most that ``log T'`` and the predictors may change on it together, as far as their slopes
# at its start tell; and its length relative to the best cell, if the bound were that at its start.
LONGEST, MOST_CHANGE, ROOM = 1.5, 1.5, 1.5
# The largest third cumulant of a variable on [−1, 1] is below this: ``E|X − EX|³ ≤ 2 var X ≤ 2``.
THIRD_CUMULANT = 2.0
# Rounding error of a gradient, relative to its largest terms.
ROUNDING = 256 * float(np.finfo(np.float64).eps)


class BentSpreadPrior(Potential):
    """``U(a) = Σ_j G_j(u_j)`` with ``u = center + rows a`` and ``G(u) = ℓ(k T(u) + o; y) − log T'(u) − g u − ½ h u²``.

    Each record j is the prior of one log spread ``T_j(u_j)``, straight where T is the identity; g and h are those of a
    control variate. On a rotation ``u'' = −(u − center)``, ``u''' = −u'``, and with ``f(t) = U(a(t))``

    ``f'   = Σ G' u'``,
    ``f''  = Σ G'' u'² + G' u''``,
    ``f''' = Σ G''' u'³ + 3 G'' u' u'' − G' u'``.

    ``|u'| ≤ A`` with ``A² = (rows a)² + (rows v)²``, and ``|u' u''| ≤ ½A²``. For ``|u − u_0| ≤ Δ`` and ``M ≥ |G'''|`` there,
    ``|G''| ≤ |G''(u_0)| + ΔM`` and ``|G'| ≤ |G'(u_0)| + Δ|G''(u_0)| + ½Δ²M``. For M: every exponential of T has a rate κ of
    at most one, so that ``|T''|, |T'''| ≤ T' − c ≤ D − c``, D that of `fedpdmc.bent_coordinates.enclosed`; and ``log T'`` is
    the cumulant generating function of a variable on [−1, 1], whose third cumulant is at most two. So with ``k > 0``

    ``M = |ℓ'''| k³D³ + (3 ℓ'' kD + |ℓ'|) k (D − c) + 2``.

    Parameters
    ----------
    loss : Loss
        Logistic or Poisson.
    rows, center : arrays of shape (n, d) and (n,)
    numbers : array of shape (6, n)
        Of T.
    factor, offset, response : arrays of shape (n,)
        k, o and y.
    linear, curvature : arrays of shape (n,)
        g and h.
    """

    loss: Loss
    rows: Float[Array, "n d"]
    center: Float[Array, " n"]
    numbers: Float[Array, "6 n"]
    factor: Float[Array, " n"]
    offset: Float[Array, " n"]
    response: Float[Array, " n"]
    linear: Float[Array, " n"]
    curvature: Float[Array, " n"]

    @classmethod
    def of(cls, spreads: LinearPredictor, bend: Bend) -> BentSpreadPrior:
        """The records of a prior, each of one log spread; those that are not of the bend stay straight."""
        design = np.asarray(spreads.design)
        index = np.argmax(np.abs(design), 1)
        factor = design[np.arange(len(index)), index]
        numbers, bent_ones = straight(len(index)), list(bend.index)
        for j, coordinate in enumerate(index):
            if coordinate in bent_ones:
                numbers[:, j] = np.asarray(bend.numbers)[:, bent_ones.index(coordinate)]
        rows, zeros = np.eye(spreads.dim)[index], np.zeros(len(index))
        rows, zeros, numbers, factor = (on_device(x) for x in (rows, zeros, numbers, factor))
        return cls(spreads.loss, rows, zeros, numbers, factor, spreads.offset, spreads.response, zeros, zeros)

    @property
    def dim(self) -> int:
        """Number of parameters."""
        return self.rows.shape[1]

    def less(self, quadratic: Quadratic) -> Potential:
        """The same less a quadratic, before whitening: what is of single log spreads is held with them."""
        rows, precision, linear = (np.asarray(x) for x in (self.rows, quadratic.precision, quadratic.linear))
        index = np.argmax(rows, 1)
        g, h = linear[index], np.diagonal(precision)[index]
        own = dataclasses.replace(
            self, linear=on_device(np.asarray(self.linear) + g), curvature=on_device(np.asarray(self.curvature) + h)
        )
        bend, slope = precision - (rows.T * h) @ rows, linear - g @ rows
        if not (np.any(bend) or np.any(slope)):
            return own
        return Sum((own, Quadratic(on_device(-bend), on_device(-slope))))

    def value(self, x):
        """``Σ_j G_j``."""
        u = self.center + self.rows @ x
        own = self.loss.value(self.factor * bent(u, self.numbers) + self.offset, self.response)
        return jnp.sum(own - log_volume(u, self.numbers) - self.linear * u - 0.5 * self.curvature * u * u)

    def gradient(self, x):
        """``rowsᵀ G'``."""
        return self._at(self.center + self.rows @ x).first @ self.rows

    def gradients(self, a):
        """``rowsᵀ G'`` on every chain."""
        return self._at(self.center + a @ self.rows.T).first @ self.rows

    def hessian(self, x):
        """``rowsᵀ diag(G'') rows``."""
        return (self.rows.T * self._at(self.center + self.rows @ x).second) @ self.rows

    def whiten(self, reference, columns):
        """``rows S`` and ``center + rows c``."""
        matrix, center = reference.matrix, reference.center
        if columns is not None:
            matrix, center = matrix[columns], center[columns]
        return dataclasses.replace(self, rows=self.rows @ matrix, center=self.center + self.rows @ center)

    def _at(self, u: Float[Array, "*C n"]) -> Derivatives:
        eta = self.factor * bent(u, self.numbers) + self.offset
        t1, (t2, t3) = steepness(u, self.numbers), curvatures(u, self.numbers)
        push = self.loss.first(eta, self.response) * self.factor
        lean = t2 / t1
        first = push * t1 - lean - self.linear - self.curvature * u
        second = self.loss.second(eta, self.response) * (self.factor * t1) ** 2 + push * t2
        second = second - (t3 / t1 - lean * lean) - self.curvature
        return Derivatives(eta, t1, first, second)

    def forms(self, a: Float[Array, "C d"]) -> Float[Array, "C n"]:
        """``rows a``."""
        return a @ self.rows.T

    def gathered(self, slopes: Float[Array, "C n"]) -> Float[Array, "C d"]:
        """The gradient from ``G'``."""
        return slopes @ self.rows

    def slopes(self, forms: Float[Array, "C n"]) -> Float[Array, "C n"]:
        """``G'``."""
        return self._at(self.center + forms).first

    def widths(self, forms: Float[Array, "C n"]) -> Float[Array, "C n"]:
        """How far from these forms `largest_slopes` are close."""
        return 1 / (1 + jnp.abs(self.factor) * steepness(self.center + forms, self.numbers))

    def largest_slopes(self, forms: Float[Array, "C n"], width: Float[Array, "C n"]) -> Float[Array, "C n"]:
        """Bounds of ``|G'|`` within these distances, as the class has them, and room for rounding."""
        u = self.center + forms
        here = self._at(u)
        bends = jnp.abs(here.second) + 0.5 * width * self._third(u - width, u + width)
        return jnp.abs(here.first) + width * bends + ROUNDING * self._terms(here, u)

    def field(self, rotating, flips, a, v):
        """Gradient and slope at the start, and the bound of the class's docstring."""
        if flips or not rotating:
            raise InputError("dynamics", "lines, or flips, with bent log spreads", NEEDS_ROTATION)
        position, speed = a @ self.rows.T, v @ self.rows.T
        u, amplitude = self.center + position, jnp.hypot(position, speed)
        here = self._at(u)
        slope = jnp.sum(here.second * speed**2 - here.first * position, -1, keepdims=True)
        pace = amplitude * (1 + jnp.abs(self.factor) * here.steepness)
        first = self._curve(here, u, speed, amplitude, jnp.zeros_like(u))
        reach = jnp.minimum(LONGEST, MOST_CHANGE / jnp.maximum(jnp.max(pace, -1), 1e-300))
        reach = jnp.minimum(reach, ROOM * jnp.cbrt(2 / jnp.maximum(jnp.sum(first, -1), 1e-300)))
        curve = jnp.sum(self._curve(here, u, speed, amplitude, reach[:, None]), -1, keepdims=True)
        return Field(here.first @ self.rows, slope, curve, reach, self._slack(here, u))

    def _curve(self, here: Derivatives, u, speed, amplitude, h):
        """A bound of each term's share of ``|f'''|`` on ``[0, h]``."""
        fastest = jnp.minimum(amplitude, jnp.abs(speed) + h * amplitude)
        away = jnp.minimum(h * fastest, 2 * amplitude)
        third = self._third(u - away, u + away)
        second = jnp.abs(here.second) + away * third
        first = jnp.abs(here.first) + away * (jnp.abs(here.second) + 0.5 * away * third)
        return third * fastest**3 + 1.5 * second * amplitude**2 + first * fastest

    def _third(self, least, most):
        """M on ``[least, most]``."""
        steep, _, highest = enclosed(least, most, 0.0, self.numbers)
        bends = steep - self.numbers[1]
        if isinstance(self.loss, Logistic):
            third, second, first = self.loss.third(highest, self.response), 0.25, self.loss.steepest
        else:
            third = second = jnp.exp(self.factor * highest + self.offset)
            first = jnp.maximum(third, self.response)
        k = self.factor * steep
        whole = third * k**3 + self.factor * bends * (3 * second * k + first)
        return whole + jnp.where(bends > 0, THIRD_CUMULANT, 0.0)

    def _slack(self, here: Derivatives, u):
        """Room for the rounding of ``rowsᵀ G'``, in units of velocity one."""
        return ROUNDING * jnp.sum(self._terms(here, u) * jnp.max(jnp.abs(self.rows), 1), -1)

    def _terms(self, here: Derivatives, u):
        """The size of the largest terms of ``G'``."""
        k = jnp.abs(self.factor) * here.steepness
        push = jnp.abs(self.loss.first(here.eta, self.response)) + jnp.abs(self.response)
        far = 1 + jnp.abs(u)
        size = push * k * (1 + jnp.abs(here.eta) + k * far) + far * (1 + jnp.abs(self.curvature))
        return size + 1 + jnp.abs(self.linear)


class Derivatives(NamedTuple):
    """Predictors, ``T'``, ``G'`` and ``G''`` of all records."""

    eta: Float[Array, "*C n"]
    steepness: Float[Array, "*C n"]
    first: Float[Array, "*C n"]
    second: Float[Array, "*C n"]
