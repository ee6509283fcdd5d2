"""The gradient of a site's records as a polynomial about a point of its own, with a bound of the rest."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fedpdmc._jax.by_numpy import once
from fedpdmc.enclosures.multi_index import exponents, factorials, powers
from fedpdmc.potentials.base import Potential, Sum
from fedpdmc.potentials.cubic_remainder import ROOM, quartic_bound
from fedpdmc.potentials.linear_predictor import EPSILON, LinearPredictor
from fedpdmc.potentials.quadratic import Quadratic

# Degree of the polynomial, and of what bounds the rest of it.
DEGREE = 3
# An expansion pays where it has this many times fewer monomials than there are records, of which there are not few.
FEWER, LEAST_RECORDS, MOST_MONOMIALS = 2, 256, 5000
# Records whose monomials are held at a time.
BLOCK = 4096
# Newton steps to the site's own mode, halvings of each, and the ridge that makes one where the records have none.
STEPS, HALVINGS, RIDGE = 50, 12, 1e-3


class Expansion(eqx.Module):
    """``∇U`` to third order about ``center``, and polynomials that bound the error.

    With ``u_n = ξ_n·b`` and ``b = a − center``, Taylor's formula with ``|ℓ⁽⁵⁾| ≤ w`` everywhere gives
    ``|∂_iU − P_i(b)| ≤ w/24 Σ_n |ξ_ni| u_n⁴``: an even power, so that the bound is a polynomial too. Both sums over records
    are done once: ``Σ_n c_n (ξ_n·b)^k / k! = Σ_{|α|=k} (Σ_n c_n ξ_n^α / α!) b^α``. Along a line the slope is off by at most
    ``w/6 Σ |ξ_ni| |u_n|³ |ξ_n·v| ≤ w/6 (Σ |ξ_ni| u_n⁴)^{¾} (Q_i |v|⁴)^{¼}`` by Hölder.

    Attributes
    ----------
    center : (d,)
    terms : (d, m)
        Coefficients of P by monomial of degree at most three.
    rest : (d, q)
        Coefficients of the bound by monomial of degree four.
    spread : (d,)
        ``w/6 (24/w)^{¾} Q_i^{¼}``: times ``error^{¾} |v|`` it bounds the error of the slope.
    rounding : (d, 5)
        Bounds of the rounding by degree, for ``|b|_∞ = 1``: of P, and last of ``rest``.
    """

    center: Float[Array, " d"]
    terms: Float[Array, "d m"]
    rest: Float[Array, "d q"]
    spread: Float[Array, " d"]
    rounding: Float[Array, "d 5"]

    def gradient(self, b: Float[Array, "d C"]) -> Float[Array, "d C"]:
        """``P(b)``."""
        return self.terms @ powers(b, DEGREE)

    def error(self, b: Float[Array, "d C"]) -> Float[Array, "d C"]:
        """A bound of ``|∇U − P|``, the rounding of P not counted.

        A sum of even powers, but of monomials that cancel where many of the ``u_n`` are small.
        """
        lost = self.rounding[:, DEGREE + 1 :] * jnp.max(jnp.abs(b), 0) ** (DEGREE + 1)
        return ROOM * jnp.maximum(self.rest @ powers(b, DEGREE + 1, DEGREE + 1), 0.0) + lost

    def slip(self, b: Float[Array, "d C"]) -> Float[Array, "d C"]:
        """A bound of the rounding of ``P``."""
        size = jnp.max(jnp.abs(b), 0)
        return self.rounding[:, : DEGREE + 1] @ jnp.stack([size**k for k in range(DEGREE + 1)])

    def slope(self, b: Float[Array, "d C"], v: Float[Array, "d C"]) -> Float[Array, "d C"]:
        """``d/ds P(b + v s)`` at zero."""
        return self.terms @ jax.jvp(lambda x: powers(x, DEGREE), (b,), (v,))[1]

    def slope_error(self, error: Float[Array, "d C"], v: Float[Array, "d C"]) -> Float[Array, "d C"]:
        """A bound of how far the slope of ``∇U`` is from that of P, given `error`."""
        root = jnp.sqrt(error)
        return ROOM * root * jnp.sqrt(root) * self.spread[:, None] * jnp.linalg.norm(v, axis=0)


def expansion(potential: Potential) -> Expansion | None:
    """The expansion of a whitened potential about its own mode; None where it does not apply or does not pay."""
    terms = potential.terms if isinstance(potential, Sum) else (potential,)
    records = [term for term in terms if isinstance(term, LinearPredictor)]
    quadratics = [term for term in terms if isinstance(term, Quadratic)]
    if len(records) != 1 or len(records) + len(quadratics) != len(terms):
        return None
    part, dim = records[0], potential.dim
    if part.diagonal or not part.loss.uniform or part.control is not None:
        return None
    count = math.comb(dim + DEGREE + 1, dim)
    if count > MOST_MONOMIALS or FEWER * count > part.design.shape[0] or _present(part) < LEAST_RECORDS:
        return None
    center = _mode(potential)
    if center is None:
        return None
    known = _expanded(part, quadratics, center)
    return known if all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(known)) else None


def _present(part: LinearPredictor) -> int:
    """Records that are not padding."""
    return int(np.count_nonzero(np.any(np.asarray(part.design) != 0, 1)))


def _expanded(part: LinearPredictor, quadratics: Sequence[Quadratic], center: np.ndarray) -> Expansion:
    design, dim = np.asarray(part.design), part.dim
    derivatives = np.asarray(_derivatives(part, jnp.asarray(center)))
    width = float(np.max(np.asarray(part.loss.fifth(part.offset, part.response)), initial=0.0))
    weights = [*derivatives, np.full(len(design), width)]
    counts = [math.comb(dim + k - 1, k) for k in range(DEGREE + 2)]
    terms, sizes = [np.zeros((dim, m)) for m in counts], [np.zeros((dim, m)) for m in counts]
    for first in range(0, len(design), BLOCK):
        rows = slice(first, first + BLOCK)
        for k in range(DEGREE + 2):
            scaled = np.asarray(_powers(jnp.asarray(design[rows].T), k)).T / factorials(exponents(dim, k, k))
            slopes = weights[k][rows, None] * (design[rows] if k <= DEGREE else np.abs(design[rows]))
            terms[k] += slopes.T @ scaled
            sizes[k] += np.abs(slopes).T @ np.abs(scaled)
    for quadratic in quadratics:
        precision, linear = np.asarray(quadratic.precision), np.asarray(quadratic.linear)
        terms[0] += (precision @ center + linear)[:, None]
        terms[1] += precision
        sizes[0] += (np.abs(precision) @ np.abs(center) + np.abs(linear))[:, None]
        sizes[1] += np.abs(precision)
    quartic = np.array([quartic_bound(design, np.abs(column)) for column in design.T])
    # w/6 q^{¾} Q^{¼} with q = 24 error/w.
    spread = width / 6 * (24 / width) ** 0.75 * (ROOM * quartic) ** 0.25 if width > 0 else np.zeros_like(quartic)
    return Expansion(
        jnp.asarray(center),
        jnp.asarray(np.concatenate(terms[: DEGREE + 1], 1)),
        jnp.asarray(terms[DEGREE + 1]),
        jnp.asarray(spread),
        jnp.asarray((64 + len(design)) * EPSILON * np.stack([x.sum(1) for x in sizes], 1)),
    )


@functools.partial(jax.jit, static_argnums=1)
def _powers(b: Float[Array, "d C"], degree: int) -> Float[Array, "_ C"]:
    """The monomials of one degree, without those on the way to them."""
    return powers(b, degree, degree)


@once
def _derivatives(part: LinearPredictor, center: Float[Array, " d"]) -> Float[Array, "4 n"]:
    """The first four derivatives of every record's loss."""
    loss, y, z = part.loss, part.response, part.design @ center + part.offset
    third = jax.grad(loss.second)
    return jnp.stack([loss.first(z, y), loss.second(z, y), jax.vmap(third)(z, y), jax.vmap(jax.grad(third))(z, y)])


@once
def _value(potential: Potential, a):
    return potential.value(a)


@once
def _slopes(potential: Potential, a):
    return potential.gradient(a), potential.hessian(a)


def _mode(potential: Potential) -> np.ndarray | None:
    """The minimum of the potential with a slight ridge, by damped Newton steps; any point would be as exact."""
    a = np.zeros(potential.dim)
    gradient, hessian = (np.asarray(x) for x in _slopes(potential, jnp.asarray(a)))
    ridge = RIDGE * float(np.trace(np.abs(hessian))) / len(a) + 1e-12
    height = float(_value(potential, jnp.asarray(a)))
    for _ in range(STEPS):
        if not (np.all(np.isfinite(gradient)) and np.all(np.isfinite(hessian)) and np.isfinite(height)):
            return None
        values, vectors = np.linalg.eigh(hessian)
        slope = gradient + ridge * a
        step = -vectors @ ((vectors.T @ slope) / (np.abs(values) + ridge))
        if -slope @ step < 1e-10:
            break
        for halving in range(HALVINGS):
            there = a + step * 0.5**halving
            other = float(_value(potential, jnp.asarray(there))) + 0.5 * ridge * there @ there
            if other <= height:
                break
        else:
            break
        a, height = there, other
        gradient, hessian = (np.asarray(x) for x in _slopes(potential, jnp.asarray(a)))
    return a


def usual_points(potential: Potential, center: Float[Array, " d"], count: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions from the Gaussian approximation at the site's own mode, and velocities of unit speeds."""
    rng = np.random.default_rng(0)
    values, vectors = np.linalg.eigh(np.asarray(_slopes(potential, center)[1]))
    scale = 1 / np.sqrt(np.maximum(np.abs(values), RIDGE * np.abs(values).max(initial=0.0) + 1e-12))
    a = np.asarray(center) + (rng.standard_normal((count, len(values))) * scale) @ vectors.T
    return a, np.sign(rng.standard_normal(a.shape))


__all__ = ["DEGREE", "Expansion", "expansion", "usual_points"]
