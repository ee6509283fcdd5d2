"""The third order of a ``LinearPredictor`` with a control variate: bounds of its rates without a pass over the records."""

from __future__ import annotations

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fedpdmc._jax.by_numpy import once
from fedpdmc._jax.compilation import on_device
from fedpdmc.potentials.linear_predictor import LinearPredictor
from fedpdmc.potentials.quadratic import Quadratic

# Up to this dimension the quartic form is bounded through its d² × d² matrix.
MOST_PARAMETERS = 32
# The fourth order costs d⁴ where a pass over n records costs n d and some more.
SHARPER_PAYS = 2
# Relative room for the rounding of eigenvalues.
ROOM = 1 + 1e-9
# The error of a sum over records in units in the last place, relative to its terms.
ULPS = 64 * 2.0**-52
# Relative difference of derivatives that are the same but for rounding.
SAME = 8 * 2.0**-52


class Quartic(eqx.Module):
    """The fourth order of a remainder and a bound of what follows it.

    ``|e·∇R − ½ T[b, b, e] − ⅙ F[b, b, b, e]| ≤ 1/24 e^{g max|u|} Σ_n w_n |u_n|⁴ |ξ_n·e|`` with
    ``F = Σ ℓ''''(z*_n) ξ_n⊗ξ_n⊗ξ_n⊗ξ_n`` and w of the fifth derivative; the sum is at most ``Q |b|⁴ max_n |ξ_n·e|``.

    Attributes
    ----------
    tensor : (d², d²)
        ``F``.
    quintic, quintics : (), (d,)
        ``Q max_n |ξ_n|``, and ``Q max_n |ξ_{ni}|``.
    """

    tensor: Float[Array, "dd dd"]
    quintic: Float[Array, ""]
    quintics: Float[Array, " d"]

    def gradient(self, b: Float[Array, "C d"]) -> Float[Array, "C d"]:
        """``⅙ F[b, b, b, ·]``."""
        dim = b.shape[-1]
        outer = (b[:, :, None] * b[:, None, :]).reshape(-1, dim * dim)
        return jnp.sum((outer @ self.tensor).reshape(-1, dim, dim) * b[:, None, :], -1) / 6

    def beyond(self, size: Float[Array, "*C"], growth: Float[Array, ""], flips: bool) -> Float[Array, "*C k"]:
        """Bound of the error for ``|b| = size``: by coordinate, or for any unit vector e."""
        quintic = self.quintics if flips else self.quintic[None]
        return (jnp.exp(growth * size) * size**4 / 24)[..., None] * quintic


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
    sharper : Quartic or None
        The next order, if it costs little compared with the records.
    """

    center: Float[Array, " d"]
    tensor: Float[Array, "d d d"]
    norm: Float[Array, ""]
    norms: Float[Array, " d"]
    quartic: Float[Array, ""]
    quartics: Float[Array, " d"]
    growth: Float[Array, ""]
    rounding: Float[Array, ""]
    sharper: Quartic | None = None

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
    local = Local(*(np.asarray(x) for x in _local(potential, center)))
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
        on_device(_rounding(design, np.asarray(potential.response), _control(potential), local)),
        _sharper(design, local) if SHARPER_PAYS * design.shape[1] ** 3 <= design.shape[0] else None,
    )


def beside_taylor(potential: LinearPredictor, center: Float[Array, " d"]) -> Quadratic | None:
    """The Taylor polynomial of the records at ``center`` minus their control variate; None if they differ by rounding only.

    The remainder after a control variate ``f + s u`` of means of ``ℓ'`` and ``ℓ''`` has
    ``R' = (ℓ' − ℓ'(z*) − ℓ''(z*) u) + (ℓ'(z*) − f) + (ℓ''(z*) − s) u``: the Taylor remainder that `CubicRemainder` bounds,
    and a quadratic ``Σ (ℓ'(z*) − f) ξ·b + ½ Σ (ℓ''(z*) − s) (ξ·b)²`` of b.
    """
    assert potential.control is not None
    design, at = np.asarray(potential.design), np.asarray(center)
    local = Local(*(np.asarray(x) for x in _local(potential, center)))
    point, slope, curvature = np.asarray(potential.control)
    first, second = local.first - slope - curvature * (local.z - point), local.second - curvature
    size = np.abs(design).max(1, initial=0.0)
    terms = 1 + np.abs(potential.response) + np.abs(local.first) + np.abs(local.second) * (np.abs(local.z) + size)
    if np.all(np.maximum(np.abs(first), np.abs(second) * size) <= SAME * np.asarray(terms)):
        return None
    precision = (design * second[:, None]).T @ design
    return Quadratic(jnp.asarray(precision), jnp.asarray(design.T @ first - precision @ at))


class Local(NamedTuple):
    """The predictors at the point of expansion, the derivatives of every record's loss there, and bounds of two."""

    z: np.ndarray
    first: np.ndarray
    second: np.ndarray
    third: np.ndarray
    fourth: np.ndarray
    largest_fourth: np.ndarray
    largest_fifth: np.ndarray


@once
def _local(potential: LinearPredictor, center: Float[Array, " d"]):
    loss, y = potential.loss, potential.response
    z = potential.design @ center + potential.offset
    third = jax.grad(loss.second)
    exact = (loss.first(z, y), loss.second(z, y), jax.vmap(third)(z, y), jax.vmap(jax.grad(third))(z, y))
    return z, *exact, loss.fourth(z, y), loss.fifth(z, y)


def _sharper(design: np.ndarray, local: Local) -> Quartic:
    """The fourth order."""
    dim = design.shape[1]
    squares = (design[:, :, None] * design[:, None, :]).reshape(-1, dim * dim)
    quartic = ROOM * quartic_bound(design, local.largest_fifth)
    return Quartic(
        on_device((squares * local.fourth[:, None]).T @ squares),
        on_device(quartic * np.sqrt((design**2).sum(1).max(initial=0.0))),
        on_device(quartic * np.abs(design).max(0, initial=0.0)),
    )


def _control(potential: LinearPredictor) -> np.ndarray | None:
    return None if potential.control is None else np.asarray(potential.control)


def _rounding(design: np.ndarray, response: np.ndarray, control: np.ndarray | None, local: Local) -> float:
    """Some units in the last place of all terms of ``Σ R' ξ``, before they cancel, plus the same for positions."""
    size = np.abs(design).max(1, initial=0.0)
    terms = 1 + np.abs(response) + np.abs(local.first) + np.abs(local.second) * (np.abs(local.z) + size)
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
