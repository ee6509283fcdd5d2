"""Potentials, and the bounds that they give of their gradients along a piece of a path."""

from __future__ import annotations

import abc
import functools
import itertools
import math
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fedpdmc.enclosures import TimeInterval
from fedpdmc.whitening import Reference

if TYPE_CHECKING:
    from fedpdmc.enclosures import Curve
    from fedpdmc.potentials.chebyshev import RateCurve
    from fedpdmc.potentials.quadratic import Quadratic

P = TypeVar("P", bound="Potential")

# On a rotating path the remainder terms are bounded on pieces of at most this length (radians).
ROTATION_REACH = 0.25


class Field(NamedTuple):
    """The gradient ``G`` of a potential at the start of a piece of path, and how it can change along it.

    For flips, ``slope`` is ``G'(0)`` by coordinate and ``curve`` a bound on ``|G''|`` for times in ``[0, reach]``.
    For reflections, with ``f(s) = U(a(s))``, ``slope`` is ``f''(0)`` and ``curve`` a bound on ``|f'''|``, of shape (C, 1).
    ``slack`` bounds the rounding error of ``G`` in units of velocity one.
    """

    gradient: Float[Array, "C d"]
    slope: Float[Array, "C k"]
    curve: Float[Array, "C k"]
    reach: Float[Array, " C"]
    slack: Float[Array, " C"]

    def __add__(self, other: Field) -> Field:  # type: ignore[override]
        return _added(self, other)


class RateBound(NamedTuple):
    """For times s in ``[0, reach]``, the signed rate of mark i is at most ``value + slope s + ½ curve s²``.

    The rate itself is the positive part; ``value`` and ``slope`` are exact at s = 0 up to the slack added to them.
    """

    value: Float[Array, "*C k"]
    slope: Float[Array, "*C k"]
    curve: Float[Array, "*C k"]
    reach: Float[Array, "*C"]

    def __add__(self, other: RateBound) -> RateBound:  # type: ignore[override]
        return _added(self, other)


def _added(one: Any, other: Any) -> Any:
    """Sums of all that is known, as far as both are."""
    pairs = zip(one._fields, one, other, strict=True)
    return type(one)(*(jnp.minimum(x, y) if name == "reach" else x + y for name, x, y in pairs))


class Potential(eqx.Module):
    """A minus log density up to a constant, as a pytree of the numbers it needs."""

    @property
    @abc.abstractmethod
    def dim(self) -> int:
        """Number of parameters."""

    def value(self, x: Float[Array, " d"]) -> Float[Array, ""]:
        """``U(x)``, where it is a function of x alone."""
        raise self._refusal("a value")

    def whiten(self, reference: Reference, columns: Array | None) -> Potential:
        """The same potential as a function of ``a``, with ``x[columns] = (c + S a)[columns]`` its own arguments."""
        raise self._refusal("whitening")

    def field(self, rotating: bool, flips: bool, a: Float[Array, "C d"], v: Float[Array, "C d"]) -> Field:
        """Gradient and certified enclosure of its change from ``(a, v)`` along a linear or a rotating path."""
        raise self._refusal("bounds from its derivatives alone")

    def curves(
        self,
        rotating: bool,
        flips: bool,
        a: Float[Array, "d C"],
        v: Float[Array, "d C"],
        h: Float[Array, " C"],
        order: int,
    ) -> Curve:
        """The signed rates on intervals of these lengths as polynomials of time with a proved error, by columns."""
        raise self._refusal("polynomials of its rates")

    def speeds(self, a: Float[Array, "C d"], v: Float[Array, "C d"]) -> Float[Array, "C 1"]:
        """``v·∇U`` on every chain."""
        return jnp.sum(v * self.gradients(a), -1, keepdims=True)

    def _refusal(self, what: str) -> TypeError:
        return TypeError(f"{type(self).__name__} has no {what}: it walks with a clock of its own")

    def gradient(self, x: Float[Array, " d"]) -> Float[Array, " d"]:
        """``∇U(x)``."""
        return jax.grad(self.value)(x)

    def gradients(self, a: Float[Array, "C d"]) -> Float[Array, "C d"]:
        """``∇U`` on every chain."""
        return jax.vmap(self.gradient)(a)

    def hessian(self, x: Float[Array, " d"]) -> Float[Array, "d d"]:
        """``∇²U(x)``."""
        return jax.hessian(self.value)(x)

    def averaged(
        self, x: Float[Array, " d"], spread: Float[Array, "d d"]
    ) -> tuple[Float[Array, ""], Float[Array, " d"], Float[Array, "d d"]]:
        """``E U``, ``E ∇U`` and ``E ∇²U`` over ``N(x, S Sᵀ)`` with ``S = spread``: here a mean over `public_points`."""
        points, weights = (jnp.asarray(part) for part in public_points(x.shape[0]))

        def add(total, node):
            at, weight = x + spread @ node[0], node[1]
            found = self.value(at), self.gradient(at), self.hessian(at)
            return tuple(one + weight * other for one, other in zip(total, found, strict=True)), None

        start = jnp.zeros(()), jnp.zeros_like(x), jnp.zeros_like(spread)
        return jax.lax.scan(add, start, (points, weights))[0]

    def stripped(self: P) -> P:
        """The potential reduced to its numbers, so that equal potentials share compiled code."""
        return self

    def with_share(self, share: Float[Array, " C"]) -> Potential:
        """The same with these parts of a redistributed prior, one for each chain; itself where it holds none."""
        return self

    @property
    def shares(self) -> Float[Array, " C"] | None:
        """The parts of a redistributed prior that it holds, one for each chain."""
        return None

    def affine(self, rotating: bool) -> bool:
        """Whether ``field`` is exact for all times (``curve`` zero, ``reach`` infinite)."""
        return False


class Sum(Potential):
    """A sum of potentials of the same parameters."""

    terms: tuple[Potential, ...]

    @property
    def dim(self) -> int:
        return self.terms[0].dim

    def _total(self, of_term: Callable[[Potential], Any]) -> Any:
        return functools.reduce(operator.add, map(of_term, self.terms))

    def value(self, x):
        return self._total(lambda term: term.value(x))

    def gradient(self, x):
        return self._total(lambda term: term.gradient(x))

    def gradients(self, a):
        return self._total(lambda term: term.gradients(a))

    def hessian(self, x):
        return self._total(lambda term: term.hessian(x))

    def averaged(self, x, spread):
        parts = [term.averaged(x, spread) for term in self.terms]
        return tuple(functools.reduce(operator.add, part) for part in zip(*parts, strict=True))

    def whiten(self, reference, columns):
        return Sum(tuple(term.whiten(reference, columns) for term in self.terms))

    def with_share(self, share):
        return Sum(tuple(term.with_share(share) for term in self.terms))

    @property
    def shares(self):
        return next((term.shares for term in self.terms if term.shares is not None), None)

    def field(self, rotating, flips, a, v):
        """Sum of the terms' fields: gradients and the bounds of their change add."""
        return self._total(lambda term: term.field(rotating, flips, a, v))

    def curves(self, rotating, flips, a, v, h, order):
        """Their sum."""
        parts = [term.curves(rotating, flips, a, v, h, order) for term in self.terms]
        return functools.reduce(functools.partial(TimeInterval(order).rule, "add", {}), parts)

    def speeds(self, a, v):
        return self._total(lambda term: term.speeds(a, v))

    def affine(self, rotating):
        return all(term.affine(rotating) for term in self.terms)


# Private latents -----------------------------------------------------------------------------------------------------


NEEDS_ROTATION = (
    "Private latents move with the few-rounds method only: leave dynamics out, or give fedpdmc.Boomerang()."
)


class LatentPotential(Potential):
    """``U(θ, z)``; as a function of θ alone, `value` is the Laplace or quadrature marginal ``−log ∫ e^{−U(θ, z)} dz``.

    The marginal's gradient and Hessian, of size d, are what a site releases to make a reference. They need not be exact for
    the sampler to be: they decide how few arrivals there are.
    """

    @property
    @abc.abstractmethod
    def latents(self) -> int:
        """How many private numbers there are."""

    @abc.abstractmethod
    def opened(
        self, center: Float[Array, " d"], rows: Float[Array, "d e"], control: Quadratic | None
    ) -> PrivateRemainder:
        """The remainder ``R(a, ζ)`` with ``θ = center + rows a``; ``control`` is a quadratic of θ."""


class PrivateRemainder(Potential):
    """``R(a, ζ) = U(θ, T_θ(ζ)) − log|∂T_θ/∂ζ| − q(θ)`` with ``θ = c + S a``: what a site with private latents walks with.

    The map ``z = T_θ(ζ)`` is the site's own. For any map that is smooth and one-to-one in ζ, the density of ``(a, ζ)`` is
    ``exp(−R − q)`` and that of ``(θ, z)`` is unchanged; the better ζ | θ is standard normal for every θ, the less
    ``∇_a R`` depends on ζ, and the fewer arrivals there are.
    """

    @property
    @abc.abstractmethod
    def latents(self) -> int:
        """How many private numbers there are."""

    @abc.abstractmethod
    def gradients(self, a: Float[Array, "C d"], zeta: Float[Array, "C k"]) -> Float[Array, "C d"]:  # type: ignore[override]
        """``∇_a R``."""

    @abc.abstractmethod
    def cell(
        self, a: Float[Array, "C d"], v: Float[Array, "C d"], zeta: Float[Array, "C k"], room: Float[Array, " C"]
    ) -> RateCurve:
        """``v(s)·∇_a R(a(s), ζ)`` along the rotation from ``(a, v)``, on a cell no longer than ``room``."""

    @property
    @abc.abstractmethod
    def chances(self) -> int:
        """Uniforms that one application of the kernel takes."""

    @abc.abstractmethod
    def kernel(
        self, a: Float[Array, "C d"], zeta: Float[Array, "C k"], u: Float[Array, "n C"]
    ) -> Float[Array, "C k"]:  # fmt: skip
        """New latents from a kernel that leaves ``π(ζ | θ) ∝ exp(−R(a, ζ))`` invariant."""

    @abc.abstractmethod
    def to_z(self, a: Float[Array, "C d"], zeta: Float[Array, "C k"]) -> Float[Array, "C k"]:
        """``T_θ(ζ)``."""


# Means over a Gaussian ------------------------------------------------------------------------------------------------


# Nodes for the predictor of one record; nodes along each axis for functions of few parameters, and the most of these.
PREDICTOR_NODES, AXIS_NODES, MOST_AXES = 20, 5, 3
# Parameters up to which blocks of orthogonal points are used, and the number of points beyond.
MOST_ORTHOGONAL, MANY_POINTS = 16, 64


@functools.cache
def hermite(count: int = PREDICTOR_NODES) -> tuple[np.ndarray, np.ndarray]:
    """Gauss–Hermite nodes and weights of a standard normal variable: exact for polynomials of degree ``2 count − 1``."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(count)
    return nodes, weights / weights.sum()


@functools.cache
def public_points(dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Points and weights for means of a function of ``dim`` standard normal variables, the same in every process.

    A grid for few variables. Then ``±r_j q`` with q the columns of two fixed orthogonal matrices and
    ``r_j² = d ± √(2d)``: the means of ``r²`` and ``r⁴`` are ``d`` and ``d(d + 2)``, as for a Gaussian, and cubics are exact.
    Beyond, pairs ``±ε`` of fixed normal vectors. All weights are positive: a mean of convex functions stays convex.
    """
    if dim <= MOST_AXES:
        nodes, weights = hermite(AXIS_NODES)
        grid = np.array(list(itertools.product(nodes, repeat=dim)))
        return grid, np.array([math.prod(w) for w in itertools.product(weights, repeat=dim)])
    rng = np.random.default_rng(0)
    if dim <= MOST_ORTHOGONAL:
        radii = np.sqrt([dim - math.sqrt(2 * dim), dim + math.sqrt(2 * dim)])
        half = np.concatenate([r * np.linalg.qr(rng.standard_normal((dim, dim)))[0] for r in radii])
    else:
        half = rng.standard_normal((MANY_POINTS // 2, dim))
    points = np.concatenate([half, -half])
    return points, np.full(len(points), 1 / len(points))
