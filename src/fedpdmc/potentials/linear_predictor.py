"""Sums over records of a scalar loss of a linear predictor: most models of practice."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fedpdmc._jax.by_numpy import once
from fedpdmc._jax.compilation import on_device
from fedpdmc.potentials.base import ROTATION_REACH, Field, Potential, Sum
from fedpdmc.potentials.jax_function import enclosed_rates
from fedpdmc.potentials.losses import Loss
from fedpdmc.potentials.quadratic import Quadratic

EPSILON = 2.0**-52


class LinearPredictor(Potential):
    """``U(x) = Σ_i R_i(z_i)`` with ``z_i = ξ_i·x + o_i``, ``R_i = w_i ℓ(·; y_i)`` less a quadratic of ``z_i``.

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
        ``Σ w_i sup|ℓ'''| |ξ_i| ⊗ ξ_i ⊗ ξ_i``: with it the bound of ``G''`` on a line needs no pass over the records.
    weight : array of shape (n,), optional
        ``w_i ≥ 0``; one if None. Every value, derivative and bound of a loss is multiplied by it, in `each`.
    """

    design: Float[Array, "n d"] | Float[Array, " n"]
    offset: Float[Array, " n"]
    response: Float[Array, " n"]
    loss: Loss
    control: Float[Array, "3 n"] | None = None
    cubic: Float[Array, "d d d"] | None = None
    series: int = eqx.field(default=0, static=True)
    weight: Float[Array, " n"] | None = None

    @classmethod
    def from_records(cls, design, response, loss: Loss, offset=None, weight=None) -> LinearPredictor:
        """A potential of all records, with no control variate."""
        n = design.shape[0]
        offset = on_device(np.zeros(n)) if offset is None else offset
        return cls(design, offset, response, loss, weight=weight)

    @property
    def dim(self) -> int:
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

    def each(self, of_loss: Callable[..., Any], z):
        """``w_i f(z_i, y_i)`` of all records, for a derivative, a bound or several numbers of the loss."""
        found = of_loss(z, self.response)
        return found if self.weight is None else jax.tree.map(lambda x: self.weight * x, found)

    def _derivatives(self, z):
        """``R', R''`` and the bound of ``|R'''|`` at the predictors z."""
        first, second = self.each(self.loss.first, z), self.each(self.loss.second, z)
        if self.control is not None:
            point, slope, curvature = self.control
            first, second = first - slope - curvature * (z - point), second - curvature
        return first, second, self.each(self.loss.third, z)

    def value(self, x):
        z = self._predict(x) + self.offset
        total = jnp.sum(self.each(self.loss.value, z))
        if self.control is None:
            return total
        point, slope, curvature = self.control
        return total - jnp.sum(slope * (z - point) + 0.5 * curvature * (z - point) ** 2)

    def gradient(self, x):
        return self._collect(self._derivatives(self._predict(x) + self.offset)[0])

    def gradients(self, a: Float[Array, "C d"]) -> Float[Array, "C d"]:
        return self.gradient(a)

    def hessian(self, x):
        return self._squares(self._derivatives(self._predict(x) + self.offset)[1])

    def _squares(self, second):
        if self.diagonal:
            return jnp.diag(self.design**2 * second)
        return (self.design * second[:, None]).T @ self.design

    def averaged(self, x, spread):
        """Over ``x ~ N(·, S Sᵀ)`` a predictor is ``N(z_i, |Sᵀξ_i|²)``: the means of each record's loss are one-dimensional.

        Of records with no control variate.
        """
        assert self.control is None
        z = self._predict(x) + self.offset
        value, first, second = self._averaged(z, spread)
        return jnp.sum(value), self._collect(first), self._squares(second)

    def expanded_at(
        self, x: Float[Array, " d"], order: int, spread: Float[Array, "d d"] | None = None
    ) -> LinearPredictor:
        """The same records less their own Taylor polynomial of degree ``order`` (1 or 2) at ``x``.

        With a spread, less the polynomial of the means of each loss's derivatives over ``N(x, S Sᵀ)``.
        """
        z = self._predict(x) + self.offset
        if spread is None:
            first, second = self.each(self.loss.first, z), self.each(self.loss.second, z)
        else:
            _, first, second = self._averaged(z, spread)
        second = second if order == 2 else jnp.zeros_like(z)
        control = jnp.stack([z, first, second])
        return dataclasses.replace(self, control=control)

    def _averaged(self, z, spread):
        """Means of value and derivatives of each record about its predictor."""
        rows = self.design[:, None] * spread if self.diagonal else self.design @ spread
        deviation = jnp.sqrt(jnp.sum(rows**2, -1))
        return self.each(lambda z, y: self.loss.averaged(z, deviation, y), z)

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
            weight=None if self.weight is None else pad(self.weight, (0, extra)),
        )

    def with_cubic(self) -> LinearPredictor:
        """The same potential with its cubic tensor, where that is cheaper than a pass over the records."""
        if self.diagonal or not self.loss.uniform or self.dim**2 > self.design.shape[0]:
            return self
        weight = self.each(self.loss.third, self.offset)
        cubic = jnp.einsum("n,ni,nj,nk->ijk", weight, jnp.abs(self.design), self.design, self.design, optimize=True)
        return dataclasses.replace(self, cubic=cubic)

    def whiten(self, reference, columns):
        """Covariates ``Sᵀ ξ`` and offsets ``o + ξ·c``."""
        rows, center = reference.rows_of(columns)
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
        slope, curve, reach = self._changes(rotating, flips, gradient, a, v, position, speed, first, second, third)
        return Field(gradient, slope, curve, reach, self._rounding(first, position))

    def _rounding(self, first, position):
        """A bound of the rounding error of ``Σ R' ξ``: a few units in the last place of the largest terms."""
        mass = jnp.sum(jnp.abs(self.design))
        if self.loss.uniform:
            spread = jnp.max(jnp.abs(self.design), initial=0.0)
            drift = 0.0 if self.control is None else jnp.max(jnp.abs(self.control[2]), initial=0.0) * spread
            steepest = self.loss.steepest * (1.0 if self.weight is None else jnp.max(self.weight, initial=0.0))
            largest = (2 * steepest + drift) * jnp.ones(position.shape[0])
        else:
            largest = jnp.max(jnp.abs(first), -1, initial=0.0) + jnp.max(
                self.each(response_size, position), initial=0.0
            )
        return 8 * EPSILON * mass * largest

    def _changes(self, rotating, flips, gradient, a, v, position, speed, first, second, third):
        fastest = jnp.hypot(position, speed) if rotating else jnp.abs(speed)
        reach = jnp.full(speed.shape[0], ROTATION_REACH if rotating else jnp.inf)
        if not math.isinf(self.loss.reach):
            widest = jnp.maximum(jnp.max(fastest, -1, initial=0.0), 1e-300)
            reach = jnp.minimum(reach, self.loss.reach / widest)
        turn, bend = reach[:, None], third * fastest ** (2 if flips else 3)
        if rotating:
            farthest = jnp.minimum(fastest, jnp.abs(position) + turn * jnp.abs(speed))
            fastest = jnp.minimum(fastest, jnp.abs(speed) + turn * jnp.abs(position))
            largest_second = jnp.abs(second) + third * turn * fastest
            swing = largest_second * farthest if flips else 3 * largest_second * fastest * farthest
            bend = third * fastest ** (2 if flips else 3) + swing
        if flips:
            if self.cubic is not None and not rotating:
                return self._collect(second * speed), curve_on_line(self.cubic, v), reach
            return self._collect(second * speed), self._collect(bend, jnp.abs(self.design)), reach
        slope, curve = jnp.sum(second * speed**2, -1, keepdims=True), jnp.sum(bend, -1, keepdims=True)
        if not rotating:
            return slope, curve, reach
        # Σ R' z⃛ = −Σ R' ż = −f', itself at most |f'(0)| + reach |f''(0)| + ½ reach² sup|f'''|: solve for sup|f'''|.
        rate, slope = jnp.sum(gradient * v, -1, keepdims=True), slope - jnp.sum(gradient * a, -1, keepdims=True)
        return slope, (curve + jnp.abs(rate) + turn * jnp.abs(slope)) / (1 - turn**2 / 2), reach


def response_size(z, y):
    """The size of the terms of a loss's derivative, for their rounding."""
    return 1 + jnp.abs(y)


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


# With a share of the prior ---------------------------------------------------------------------------------------------


class PriorShare(Potential):
    """``α U_0`` with a weight ``α ≥ 0`` for each chain, which a plan brings (paper, Algorithm 4).

    Parameters
    ----------
    prior : Quadratic
        ``U_0``.
    share : array of shape (C,), optional
        ``α``; None until a plan has come.
    """

    prior: Quadratic
    share: Float[Array, " C"] | None = None

    @property
    def dim(self) -> int:
        return self.prior.dim

    def with_share(self, share):
        return PriorShare(self.prior, share)

    @property
    def shares(self):
        return self.share

    def value(self, x):
        return self._weights() * self.prior.value(x)

    def gradients(self, a):
        return self._weights()[:, None] * self.prior.gradients(a)

    def whiten(self, reference, columns):
        return PriorShare(self.prior.whiten(reference, columns), self.share)

    def field(self, rotating, flips, a, v):
        """That of the prior times the weight, since ``α ≥ 0``."""
        prior, weight = self.prior.field(rotating, flips, a, v), self._weights()[:, None]
        return Field(weight * prior.gradient, weight * prior.slope, weight * prior.curve, prior.reach, prior.slack)

    def curves(self, rotating, flips, a, v, h, order):
        def rates(a, v, weight):
            gradient = weight * self.prior.gradient(a)
            return v * gradient if flips else (v @ gradient)[None]

        return enclosed_rates(rates, rotating, a, v, h, order, self._weights())

    def _weights(self) -> Float[Array, " C"]:
        if self.share is None:
            raise ValueError("a shared prior walks with the weights of a plan")
        return self.share

    def affine(self, rotating):
        return not rotating


# The remainder of third order ------------------------------------------------------------------------------------------


# Up to this dimension the quartic form is bounded through its d² × d² matrix.
MOST_PARAMETERS = 32
# Relative room for the rounding of eigenvalues.
ROOM = 1 + 1e-9
# The error of a sum over records in units in the last place, relative to its terms.
ULPS = 64 * 2.0**-52
# Relative difference of derivatives that are the same but for rounding.
SAME = 8 * 2.0**-52


class CubicRemainder(eqx.Module):
    """A potential minus its Taylor polynomial of degree two at ``center``: the third order, and a bound of the rest.

    With ``b = a − center`` and ``u_n = ξ_n·b``, Taylor's formula gives for every direction e
    ``|e·∇R − ½ T[b, b, e]| ≤ ⅙ e^{g max|u|} Σ_n w_n |u_n|³ |ξ_n·e|``, where ``T = Σ ℓ'''(z*_n) ξ_n⊗ξ_n⊗ξ_n`` and
    ``|ℓ''''(z*_n + u)| ≤ w_n e^{g|u|}``. By Hölder the sum is at most ``Q |b|³ |e|`` if ``Σ w_n (ξ_n·b)⁴ ≤ Q |b|⁴``, and for
    a coordinate ``Q^{¾} (Σ w_n ξ_{ni}⁴)^{¼} |b|³``.

    Attributes
    ----------
    center : (d,)
        The point of expansion in whitened coordinates.
    tensor : (d, d, d)
        ``T``.
    norm, norms : (), (d,)
        Certified bounds of ``T[b, b, e]`` over unit vectors, and of ``T[b, b, e_i]``.
    quartic, quartics : (), (d,)
        ``Q``, and its coordinate form.
    growth : ()
        ``g max_n |ξ_n|``.
    rounding : ()
        Bound of the rounding error of the gradient's sums, per unit of ``1 + |b|``.
    """

    center: Float[Array, " d"]
    tensor: Float[Array, "d d d"]
    norm: Float[Array, ""]
    norms: Float[Array, " d"]
    quartic: Float[Array, ""]
    quartics: Float[Array, " d"]
    growth: Float[Array, ""]
    rounding: Float[Array, ""]

    def gradient(self, b: Float[Array, "C d"]) -> Float[Array, "C d"]:
        """``½ T[b, b, ·]``."""
        dim = self.tensor.shape[0]
        outer = (b[:, :, None] * b[:, None, :]).reshape(-1, dim * dim)
        return 0.5 * outer @ self.tensor.reshape(dim * dim, dim)

    def beyond(self, size: Float[Array, "*C"], flips: bool) -> Float[Array, "*C k"]:
        """Bound of the error of ``½ T[b, b, e]`` for ``|b| ≤ size``: by coordinate, or for any unit vector e."""
        quartic = self.quartics if flips else self.quartic[None]
        return (jnp.exp(self.growth * size) * size**3 / 6)[..., None] * quartic

    def largest(self, size: Float[Array, "*C"], flips: bool) -> Float[Array, "*C k"]:
        """Bound of ``|e·∇R|`` for ``|b| ≤ size``."""
        norm = self.norms if flips else self.norm[None]
        return 0.5 * (size**2)[..., None] * norm + self.beyond(size, flips)


def cubic_remainder(potential: LinearPredictor, center: Float[Array, " d"]) -> CubicRemainder:
    """The `CubicRemainder` of a whitened potential after its Taylor polynomial at ``center``.

    The difference between a control variate of means and that polynomial is separate: `beside_taylor`.
    """
    design = np.asarray(potential.design)
    local = LossExpansion(*(np.asarray(x) for x in _local(potential, center)))
    tensor = np.einsum("n,ni,nj,nk->ijk", local.third, design, design, design, optimize=True)
    quartic = quartic_bound(design, local.largest_fourth)
    coordinate = (local.largest_fourth[:, None] * design**4).sum(0)
    norms = np.abs(np.linalg.eigvalsh(np.moveaxis(tensor, 2, 0))).max(1)
    reach = potential.loss.growth * np.sqrt((design**2).sum(1).max(initial=0.0))
    return CubicRemainder(
        on_device(center),
        on_device(tensor),
        on_device(ROOM * _cubic_bound(tensor)),
        on_device(ROOM * norms),
        on_device(ROOM * quartic),
        on_device(ROOM * quartic**0.75 * coordinate**0.25),
        on_device(ROOM * reach),
        on_device(_rounding(design, np.asarray(potential.each(response_size, local.z)), _control(potential), local)),
    )


def beside_taylor(potential: LinearPredictor, center: Float[Array, " d"]) -> Quadratic | None:
    """The Taylor polynomial of the records at ``center`` minus their control variate; None if they differ by rounding only.

    The remainder after a control variate ``f + s u`` of means of ``ℓ'`` and ``ℓ''`` has
    ``R' = (ℓ' − ℓ'(z*) − ℓ''(z*) u) + (ℓ'(z*) − f) + (ℓ''(z*) − s) u``: the Taylor remainder that `CubicRemainder` bounds,
    and a quadratic ``Σ (ℓ'(z*) − f) ξ·b + ½ Σ (ℓ''(z*) − s) (ξ·b)²`` of b.
    """
    assert potential.control is not None
    design, at = np.asarray(potential.design), np.asarray(center)
    local = LossExpansion(*(np.asarray(x) for x in _local(potential, center)))
    point, slope, curvature = np.asarray(potential.control)
    first, second = local.first - slope - curvature * (local.z - point), local.second - curvature
    size = np.abs(design).max(1, initial=0.0)
    terms = np.asarray(potential.each(response_size, local.z))
    terms = terms + np.abs(local.first) + np.abs(local.second) * (np.abs(local.z) + size)
    if np.all(np.maximum(np.abs(first), np.abs(second) * size) <= SAME * terms):
        return None
    precision = (design * second[:, None]).T @ design
    return Quadratic(jnp.asarray(precision), jnp.asarray(design.T @ first - precision @ at))


class LossExpansion(NamedTuple):
    """The predictors at the point of expansion, derivatives of every record's loss there, and a bound of the fourth."""

    z: np.ndarray
    first: np.ndarray
    second: np.ndarray
    third: np.ndarray
    largest_fourth: np.ndarray


@once
def _local(potential: LinearPredictor, center: Float[Array, " d"]):
    loss, z = potential.loss, potential.design @ center + potential.offset
    exact = potential.each(first_three(loss), z)
    return z, *exact, potential.each(functools.partial(loss.beyond, 4), z)


def first_three(loss: Loss) -> Callable[[Array, Array], tuple[Array, ...]]:
    """The first three derivatives of a loss at each record's predictor."""
    third = jax.vmap(jax.grad(loss.second))
    return lambda z, y: (loss.first(z, y), loss.second(z, y), third(z, y))


def _control(potential: LinearPredictor) -> np.ndarray | None:
    return None if potential.control is None else np.asarray(potential.control)


def _rounding(design: np.ndarray, terms: np.ndarray, control: np.ndarray | None, local: LossExpansion) -> float:
    """Some units in the last place of all terms of ``Σ R' ξ``, before they cancel, plus the same for positions."""
    size = np.abs(design).max(1, initial=0.0)
    terms = terms + np.abs(local.first) + np.abs(local.second) * (np.abs(local.z) + size)
    if control is not None:
        point, slope, curvature = np.abs(control)
        terms = terms + slope + curvature * (np.abs(local.z) + point + size)
    return ULPS * float(np.sum(size * terms)) + 1e-13


def _cubic_bound(tensor: np.ndarray) -> float:
    """A bound of ``T[b, b, e]`` over unit vectors from the singular triples ``(σ_k, U_k, w_k)`` of the d² × d unfolding.

    ``T[b, b, e] = Σ σ_k U_k[b, b] w_k·e``; for every r the first r terms, less ``σ_{r+1}``, are bounded by the spectral
    norms of the symmetric ``U_k``, and the rest by ``σ_{r+1}``.
    """
    dim = tensor.shape[0]
    left, sigma, _ = np.linalg.svd(tensor.reshape(dim * dim, dim), full_matrices=False)
    matrices = left.T.reshape(-1, dim, dim)
    norms = np.abs(np.linalg.eigvalsh((matrices + np.swapaxes(matrices, 1, 2)) / 2)).max(1)
    following = np.append(sigma[1:], 0.0)
    bounds = [
        np.sqrt(np.sum(((sigma[: r + 1] - following[r]) * norms[: r + 1]) ** 2)) + following[r]
        for r in range(len(sigma))
    ]
    return float(min([sigma[0], *bounds]))


def quartic_bound(design: np.ndarray, weight: np.ndarray) -> float:
    """A bound of ``Σ w_n (ξ_n·b)⁴`` over unit vectors b, from the eigenpairs of ``Σ w vec(ξξᵀ) vec(ξξᵀ)ᵀ``.

    ``Q ≤ Σ_{k≤r} (λ_k − λ_{r+1}) ‖U_k‖² + λ_{r+1}`` for every r, with ``U_k`` the symmetric matrix of eigenvector k.
    """
    if not design.size:
        return 0.0
    dim = design.shape[1]
    if dim > MOST_PARAMETERS:
        second = np.linalg.eigvalsh((design * weight[:, None]).T @ design)[-1]
        return float(second * (design**2).sum(1).max())
    squares = (design[:, :, None] * design[:, None, :]).reshape(-1, dim * dim)
    values, vectors = np.linalg.eigh((squares * weight[:, None]).T @ squares)
    values, vectors = np.maximum(values[::-1], 0.0), vectors[:, ::-1]
    matrices = vectors.T.reshape(-1, dim, dim)
    norms = np.abs(np.linalg.eigvalsh((matrices + np.swapaxes(matrices, 1, 2)) / 2)).max(1)
    following = np.append(values[1:], 0.0)
    partial = np.cumsum(values * norms**2) - following * np.cumsum(norms**2) + following
    return float(min(values[0], partial.min()))
